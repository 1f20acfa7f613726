"""Blocks: quantised weights in the order in which the lanes of a warp multiply them.

A block is 16 rows by 256 weights. Its words are laid out so that every lane loads, 16 bytes at a
time, the codes of its own matrix fragment (`ptx.mma`): no shuffle, no shared-memory conflict, and
one contiguous copy brings codes and scales together. Within a run of 32 weights, lane t of a quad
owns weights 4t..4t+3 and 16+4t..16+4t+3, so the activations keep their order (`decode_product`).

Codes become float16 by writing their bits below an exponent: 0x6400 | q is 1024 + q, and a code
four bits higher, 1024 + 16 q. The activations that meet the latter are stored divided by 16, so a
pair of weights costs one instruction and a share of a shift. What the 1024s add to a block is the
product of its scales and the sums of activations under each scale ("offsets"): one more small
matrix product, exact in its scales. Products of codes are exact; scales multiply float32 sums.

This file has what the kinds of block share: where codes stand in the words, and how a lane's
registers become float16. `decode_blocks` lists the kinds.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packed import PackedFormat

ROWS, WEIGHTS = 16, 256
"""Rows and weights a row of a block."""

HALF_1024 = 0x64006400
MINUS_1024 = 0xE400E400
HALF_16384 = 0x74007400
MINUS_16384 = 0xF400F400
MINUS_18432 = 0xF480F480


class Operand(Protocol):
    """The activations that one block multiplies, as a lane loads them (8 columns a tile)."""

    def fragments(self, run: int, tile: int) -> list[Any]:
        """Returns four words: two matrix fragments, of weights 0-15 and 16-31 of a run of 32."""
        ...

    def offsets(self, tile: int) -> list[Any]:
        """Returns the fragments of the block's offsets: two words for 8 of them, four for 16."""
        ...

    def sums(self, tile: int) -> list[Any]:
        """Returns two words: the fragment of the sums over the block's runs, high and low parts."""
        ...


class Block(Protocol):
    """A kind of block: how planes become its words, and a warp's arithmetic on them.

    `isa` is `ptx`, or a model of it. Blocks of the same `operand` multiply the same activations.

    Attributes:
      operand: kind of activations.
      words: of a block.
      num_offsets: sums of activations that take the codes' excess off, one for each run (8) or half
        of a run (16): what scales multiply.
      offset_weights: what these sums weigh stored activations with: those that meet plain codes,
        and those divided by 16.
      has_mins: whether the sums of activations over runs are needed too.
    """

    operand: str
    words: int
    num_offsets: int
    offset_weights: tuple[float, float]
    has_mins: bool

    @property
    def format(self) -> PackedFormat:
        """The packed format whose values the block holds."""
        ...

    def tile(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns uint32 [..., rows / 16, blocks * words] of planes [..., rows, per row] (JAX)."""
        ...

    def load(self, isa, address, lane) -> list[Any]:
        """Returns the registers of this lane's part of the block at a shared-memory address."""
        ...

    def product(self, isa, loaded, operand: Operand, totals: list[list[Any]]) -> list[list[Any]]:
        """Returns totals + activations @ block.T: for each tile, this lane's four sums."""
        ...


def unit_rows(plane: jax.Array) -> jax.Array:
    """Returns [..., units, 2, 8, per row]: row 8 h + g of a unit at [h, g]."""
    *leading, rows, width = plane.shape
    return plane.reshape(*leading, rows // ROWS, 2, 8, width)


def pack_words(fields: jax.Array, axes: tuple[int, ...], shifts: np.ndarray) -> jax.Array:
    """Returns uint32 [..., units, blocks, words]: fields by `axes`, the last ones or-ed, shifted.

    Args:
      fields: [..., units, *dims].
      axes: an order of dims that begins with the blocks.
      shifts: of the trailing dims that make up one word.
    """
    leading, fields_of_word = fields.ndim - len(axes), shifts.ndim
    moved = fields.transpose(*range(leading), *(leading + a for a in axes)).astype(jnp.uint32)
    places = jax.lax.broadcast_to_rank(jnp.asarray(shifts, jnp.uint32), moved.ndim)
    words = (moved << places).sum(axis=tuple(range(-fields_of_word, 0)), dtype=jnp.uint32)
    return words.reshape(*words.shape[: leading + 1], -1)


def join_words(parts: list[jax.Array]) -> jax.Array:
    """Returns uint32 [..., units, blocks * words] of the parts of every block."""
    words = jnp.concatenate(parts, -1)
    return words.reshape(*words.shape[:-2], -1)


def bits_of(plane: jax.Array, kind=jnp.uint16) -> jax.Array:
    """Returns the bits of a plane's elements."""
    return jax.lax.bitcast_convert_type(plane, kind)


def code_dims(codes: jax.Array) -> jax.Array:
    """Returns codes with dims h, g, block, pair of runs, run, s, t, e, o after the units.

    A weight is 16 s + 4 t + 2 e + o of its run.
    """
    codes = unit_rows(codes)
    *leading, _, _, k = codes.shape
    return codes.reshape(*leading, 2, 8, k // WEIGHTS, 4, 2, 2, 4, 2, 2)


NIBBLE_AXES = (2, 3, 1, 6, 4, 0, 5, 7, 8)
"""Dims of `code_dims` as words [4 pairs of runs][32 lanes][2 runs][rows g, g + 8] have them."""


def tile_nibbles(codes: jax.Array) -> jax.Array:
    """Returns words [4 pairs of runs][32 lanes][2 runs][rows g, g + 8] of eight nibbles each.

    The pair of weights (k, k + 1) stands sixteen bits apart, at bit 8 s + 4 e.
    """
    two = np.arange(2)
    shifts = 8 * two[:, None, None] + 4 * two[:, None] + 16 * two
    return pack_words(code_dims(codes & 15), NIBBLE_AXES, shifts)


def tile_fifths(codes: jax.Array) -> jax.Array:
    """Returns words [32 lanes][4 pairs of runs] of the fifth bits of codes.

    The pair of run r, row h and half s is bit 4 r + 2 h + s, or eight above for e = 1.
    """
    run, row, half, e, o = np.ogrid[0:2, 0:2, 0:2, 0:2, 0:2]
    shifts = 4 * run + 2 * row + half + 8 * e + 16 * o
    return pack_words(code_dims(codes >> 4), (2, 1, 6, 3, 4, 0, 5, 7, 8), shifts)


def load_nibbles(isa, address, lane) -> list[list[Any]]:
    """Returns this lane's words of nibbles, [pair of runs][2 runs][rows g, g + 8]."""
    return [isa.load_shared(address + lane * 16, 512 * pair, 4) for pair in range(4)]


def low_pairs(isa, word) -> list[Any]:
    """Returns four float16 pairs of eight nibbles: 1024 + q, 1024 + 16 q, 1024 + q, 1024 + 16 q."""
    shifted = word >> 8
    return [
        isa.merge(source, 0x000F000F << shift, HALF_1024)
        for source in (word, shifted)
        for shift in (0, 4)
    ]


def nibble_pairs(isa, nibbles, fifths, run: int, row: int) -> list[Any]:
    """Returns float16 pairs of a run, [half][e]: 1024 more than codes, or 16 times codes.

    Args:
      isa: `ptx`, or a model of it.
      nibbles: of `load_nibbles`.
      fifths: words of fifth bits of the pairs of runs; None for codes of four bits.
      run: of the block.
      row: 0 for row g, 1 for g + 8.
    """
    pairs = low_pairs(isa, nibbles[run // 2][2 * (run % 2) + row])
    if fifths is None:
        return pairs
    place = 4 * (run % 2) + 2 * row
    return [
        # Plain codes take their fifth bit at bit 4 of a half word, the others at bit 8.
        isa.merge(
            moved(fifths[run // 2], place + i // 2 - (0 if i % 2 else 4)),
            0x01000100 if i % 2 else 0x00100010,
            pair,
        )
        for i, pair in enumerate(pairs)
    ]


def moved(word, shift: int):
    """Returns the word with its bits moved right by `shift`, left where that is negative."""
    return word >> shift if shift > 0 else word << -shift if shift < 0 else word


def pick_pairs(lane):
    """Returns the selector of bytes 2t and 2t + 1 of eight, each in a half word."""
    return (lane & 3) * 0x202 + 0x100


def add_run(
    isa, sums: list[list[Any]], rows: Any, scale: list[Any], operand: "Operand", run: int
) -> list[list[Any]]:
    """Returns sums of all tiles with a run of 32 weights added, under one scale a row.

    Args:
      isa: `ptx`, or a model of it.
      sums: of each tile.
      rows: float16 pairs of rows g and g + 8, four words each.
      scale: of rows g and g + 8.
      operand: the activations.
      run: which.
    """
    (a, b), zero, added = rows, [isa.Float(0.0)] * 4, []
    for tile, part in enumerate(sums):
        x = operand.fragments(run, tile)
        values = isa.mma([a[0], b[0], a[1], b[1]], x[:2], zero)
        values = isa.mma([a[2], b[2], a[3], b[3]], x[2:], values)
        added.append(add_scaled(isa, part, scale, values))
    return added


def add_scaled(isa, sums: list[Any], scale: list[Any], values: list[Any]) -> list[Any]:
    """Returns sums + scale * values for rows g and g + 8."""
    return [isa.fma(scale[i // 2], values[i], sums[i]) for i in range(4)]
