"""Scales of blocks whose groups of 16 or 32 weights have one each, and how lanes read them.

A scale is a float, or a whole number times a float of the block. As the left-hand operand of a
small matrix product (`fragment`), scales of all groups of a block meet their sums of activations.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_words import (
    MINUS_18432,
    WEIGHTS,
    bits_of,
    pack_words,
    pick_pairs,
    unit_rows,
)


class Scales(Protocol):
    """How a block keeps its scales, and what a lane does with them.

    Attributes:
      num_bytes: of a block's scales.
      whole: whether a group's own number is all of its scale.
      step: what `fragment` has its numbers multiplied by.
    """

    num_bytes: int
    whole: bool
    step: float

    @property
    def group(self) -> int:
        """Weights that share a scale: 16 or 32."""
        ...

    def tile(self, planes) -> list[jax.Array]:
        """Returns the words of the scales of planes."""
        ...

    def load(self, isa, address, lane, at: int) -> Any:
        """Returns this lane's registers: scales of rows g and g + 8."""
        ...

    def load_pairs(self, isa, address, lane, at: int) -> Any:
        """Returns what `fragment` needs beside them."""
        ...

    def of_group(self, isa, loaded, row: int, index: int) -> Any:
        """Returns a group's own number as float32."""
        ...

    def of_block(self, isa, loaded, times: float) -> list[Any]:
        """Returns, for rows g and g + 8, what groups' numbers are multiplied by, times `times`."""
        ...

    def fragment(self, isa, loaded, pairs) -> list[Any]:
        """Returns float16 of groups' numbers as a left-hand fragment: two words for 8 groups."""
        ...


class FloatScales:
    """A float16 or bfloat16 for each group: words [8 g][rows g, g + 8][256 / group numbers]."""

    whole, step = True, 1.0

    def __init__(self, group: int, *, bfloat: bool = False):
        """Takes the weights of a group, and whether the floats are bfloat16."""
        self.group, self.bfloat = group, bfloat
        self.row_bytes = 2 * WEIGHTS // group
        self.num_bytes = 16 * self.row_bytes

    def tile(self, planes, name: str = "d") -> list[jax.Array]:
        """Returns the words of a plane; see `Scales`."""
        d = unit_rows(bits_of(planes[name]))
        d = d.reshape(*d.shape[:-1], -1, self.row_bytes // 4, 2)
        return [pack_words(d, (2, 1, 0, 3, 4), 16 * np.arange(2))]

    def load(self, isa, address, lane, at: int) -> Any:
        """Returns this lane's registers; see `Scales`."""
        group = address + (lane >> 2) * (2 * self.row_bytes)
        return [
            [
                word
                for part in range(0, self.row_bytes, 16)
                for word in isa.load_shared(group, at + self.row_bytes * h + part, 4)
            ]
            for h in (0, 1)
        ]

    def load_pairs(self, isa, address, lane, at: int) -> Any:
        """Returns the float16 of groups 2t and 2t + 1; see `Scales`."""
        pair = address + (lane >> 2) * (2 * self.row_bytes) + (lane & 3) * 4
        return [isa.load_shared(pair, at + self.row_bytes * h, 1)[0] for h in (0, 1)]

    def of_group(self, isa, loaded, row: int, index: int) -> Any:
        """Returns a group's scale; see `Scales`."""
        to_float = isa.bfloat_to_float if self.bfloat else isa.half_to_float
        return to_float(loaded[row][index // 2], bool(index % 2))

    def of_block(self, isa, loaded, times: float) -> list[Any]:
        """Returns `times`; see `Scales`."""
        return [isa.Float(times)] * 2

    def fragment(self, isa, loaded, pairs) -> list[Any]:
        """Returns the scales of eight groups; see `Scales`."""
        return pairs


class ByteScales:
    """A signed byte for each group, times a float16 of the block.

    Words: bytes [8 g][rows g, g + 8][256 / group]; d [8 g][rows g, g + 8].
    """

    whole, step = False, 16.0

    def __init__(self, group: int):
        """Takes the weights of a group."""
        self.group, self.row_bytes = group, WEIGHTS // group
        self.num_bytes = 16 * self.row_bytes + 32

    def tile(self, planes) -> list[jax.Array]:
        """Returns the words of the planes `scales` and `d`; see `Scales`."""
        d = pack_words(unit_rows(bits_of(planes["d"])), (2, 1, 0), 16 * np.arange(2))
        return [tile_bytes(bits_of(planes["scales"], jnp.uint8), self.row_bytes), d]

    def load(self, isa, address, lane, at: int) -> Any:
        """Returns this lane's registers; see `Scales`."""
        group = lane >> 2
        return [
            load_bytes(isa, address, group, at, self.row_bytes),
            isa.load_shared(address + group * 4, at + 16 * self.row_bytes, 1),
        ]

    def load_pairs(self, isa, address, lane, at: int) -> Any:
        """Returns the selector of a lane's bytes; see `Scales`."""
        return pick_pairs(lane)

    def of_group(self, isa, loaded, row: int, index: int) -> Any:
        """Returns a group's byte; see `Scales`."""
        return isa.byte_to_float(loaded[0][row][index // 4], index % 4, True)

    def of_block(self, isa, loaded, times: float) -> list[Any]:
        """Returns `d * times`; see `Scales`."""
        d = [isa.half_to_float(loaded[1][0], high) for high in (False, True)]
        return d if times == 1 else [value * isa.Float(times) for value in d]

    def fragment(self, isa, loaded, pairs) -> list[Any]:
        """Returns 16 times the bytes; see `Scales`."""
        # Signed bytes plus 128, below 16384: what is taken off is 16 * 128 larger.
        return [
            isa.add_halves(
                isa.merge(isa.permute_bytes(*words[i : i + 2], pairs), 0x00FF00FF, 0x74807480),
                MINUS_18432,
            )
            for i in range(0, self.row_bytes // 4, 2)
            for words in loaded[0]
        ]


def tile_bytes(plane: jax.Array, row_bytes: int) -> jax.Array:
    """Returns words [8 g][rows g, g + 8][row_bytes] of a plane of bytes, one for each group."""
    plane = unit_rows(plane)
    plane = plane.reshape(*plane.shape[:-1], -1, row_bytes // 4, 4)
    return pack_words(plane, (2, 1, 0, 3, 4), 8 * np.arange(4))


def load_bytes(isa, address, group, at: int, row_bytes: int) -> list[list[Any]]:
    """Returns the words of `tile_bytes` of rows g and g + 8, 8 or 16 bytes a row."""
    base = address + group * (2 * row_bytes)
    if row_bytes == 8:
        both = isa.load_shared(base, at, 4)
        return [both[:2], both[2:]]
    return [isa.load_shared(base, at + row_bytes * h, 4) for h in (0, 1)]


def scaled_offsets(isa, fragment: list[Any], offsets: list[Any]) -> list[Any]:
    """Returns the products of groups' numbers and their offsets, high and low parts, summed.

    Args:
      isa: `ptx`, or a model of it.
      fragment: of `Scales.fragment`.
      offsets: of `Operand.offsets`.
    """
    zero = [isa.Float(0.0)] * 4
    if len(fragment) == 2:
        return isa.mma(fragment * 2, offsets, zero)
    return isa.mma(fragment, offsets[2:], isa.mma(fragment, offsets[:2], zero))
