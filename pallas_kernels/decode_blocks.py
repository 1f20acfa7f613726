"""Blocks: quantised weights in the order in which the lanes of a warp multiply them.

A block is 16 rows by 256 weights. Its words are laid out so that every lane loads, 16 bytes at a
time, the codes of its own matrix fragment (`ptx.mma`): no shuffle, no shared-memory conflict, and
one contiguous copy brings codes and scales together. Within a run of 32 weights, lane t of a quad
owns weights 4t..4t+3 and 16+4t..16+4t+3, so the activations keep their order (see `Activations`).

Codes become float16 by writing their bits below an exponent: 0x6400 | q is 1024 + q, and a code
four bits higher, 1024 + 16 q. The activations that meet the latter are stored divided by 16, and
the 1024s are taken off by the accumulator's start, so a pair of weights costs one instruction and
a share of a shift. Products of integer codes are exact; scales multiply float32 sums.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import unpack_codes
from pallas_kernels.matmul_q4 import Q4_K

ROWS, WEIGHTS = 16, 256
"""Rows and weights a row of a block."""

_NIBBLES = 0x000F000F
_HALF_1024 = 0x64006400
_MINUS_1024 = 0xE400E400


class Operand(Protocol):
    """The activations that one block multiplies, as a lane loads them (8 columns at a time)."""

    def fragments(self, run: int, tile: int) -> list[Any]:
        """Returns four words: two matrix fragments, of weights 0-15 and 16-31 of a run of 32."""
        ...

    def start(self, run: int, tile: int) -> list[Any]:
        """Returns the four floats that an accumulator over a run starts from."""
        ...

    def sums(self, tile: int) -> list[Any]:
        """Returns two words: the fragment of the sums over the block's runs, high and low parts."""
        ...


def _unit_rows(plane: jax.Array) -> jax.Array:
    """Returns [..., units, 2, 8, per row]: row 8 h + g of a unit at [h, g]."""
    *leading, rows, width = plane.shape
    return plane.reshape(*leading, rows // ROWS, 2, 8, width)


def _words(fields: jax.Array, axes: tuple[int, ...], shifts: np.ndarray) -> jax.Array:
    """Returns uint32 [..., units, blocks, words]: fields by `axes`, the last ones or-ed, shifted.

    Args:
      fields: [..., units, *dims].
      axes: an order of dims that begins with the blocks.
      shifts: of the trailing dims that make up one word.
    """
    leading, fields_of_word = fields.ndim - len(axes), shifts.ndim
    moved = fields.transpose(*range(leading), *(leading + a for a in axes)).astype(jnp.uint32)
    shifts = jax.lax.broadcast_to_rank(jnp.asarray(shifts, jnp.uint32), moved.ndim)
    words = (moved << shifts).sum(axis=tuple(range(-fields_of_word, 0)), dtype=jnp.uint32)
    return words.reshape(*words.shape[: leading + 1], -1)


class Q4KBlock:
    """Blocks of q4_k: 592 words, 4.625 bits a weight.

    Words: codes [4 pairs of runs][32 lanes][2 runs][rows g, g + 8], eight nibbles a word, the pair
    (k, k + 1) sixteen bits apart; scales [8 g][rows g, g + 8][8 bytes]; mins [32 lanes][4 bytes];
    (d, dmin) [8 g][rows g, g + 8].
    """

    format = Q4_K
    words = 592
    starts_per_run = 1

    def tile(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns uint32 [..., units, blocks * 592] of the planes [..., rows, per row] (JAX)."""
        codes = _unit_rows(unpack_codes(planes, 4, 32))
        *leading, _, _, k = codes.shape
        blocks, two, byte = k // WEIGHTS, np.arange(2), 8 * np.arange(4)
        # Dims: h, g, block, pair of runs, run, s, t, e, o with k % 32 = 16 s + 4 t + 2 e + o.
        codes = codes.reshape(*leading, 2, 8, blocks, 4, 2, 2, 4, 2, 2)
        shifts = 8 * two[:, None, None] + 4 * two[:, None] + 16 * two
        quants = _words(codes, (2, 3, 1, 6, 4, 0, 5, 7, 8), shifts)
        scales = _unit_rows(planes["scales"]).reshape(*leading, 2, 8, blocks, 2, 4)
        mins = _unit_rows(planes["mins"]).reshape(*leading, 2, 8, blocks, 4, 2)
        pair = jnp.stack([_unit_rows(_bits(planes[name])) for name in ("d", "dmin")], -1)
        parts = [
            quants,
            _words(scales, (2, 1, 0, 3, 4), byte),
            _words(mins, (2, 1, 3, 0, 4), byte.reshape(2, 2)),
            _words(pair, (2, 1, 0, 3), 16 * two),
        ]
        return jnp.concatenate(parts, -1).reshape(*leading, blocks * self.words)

    def starts(self, halves: jax.Array) -> jax.Array:
        """Returns what the accumulators of runs start from, [R, K / 32], of sums [R, K/32, s, e].

        Both kinds of code carry 1024 times their (stored) activation.
        """
        return -1024 * halves.sum(axis=(2, 3))

    def load(self, isa, address, lane) -> list[Any]:
        """Returns the registers of this lane's part of the block at a shared-memory address."""
        codes = [isa.load_shared(address + lane * 16, 512 * pair, 4) for pair in range(4)]
        group = lane >> 2
        scales = isa.load_shared(address + group * 16, 2048, 4)
        mins = isa.load_shared(address + lane * 4, 2176, 1)
        pair = isa.load_shared(address + group * 8, 2304, 2)
        return [codes, scales, mins, pair]

    def product(self, isa, loaded, operand: Operand, totals: list[list[Any]]) -> list[list[Any]]:
        """Returns totals + block @ activations: for each 8 columns, this lane's four sums."""
        codes, scales, (mins,), pair = loaded
        partial: list[list[Any] | None] = [None] * len(totals)
        for run in range(8):
            low, high = codes[run // 2][2 * (run % 2) : 2 * (run % 2) + 2]
            a = [*_nibble_pairs(isa, low), *_nibble_pairs(isa, high)]
            scale = [isa.byte_to_float(scales[2 * h + run // 4], run % 4) for h in (0, 1)]
            for tile in range(len(totals)):
                x = operand.fragments(run, tile)
                sums = isa.mma([a[0], a[4], a[1], a[5]], x[:2], operand.start(run, tile))
                sums = isa.mma([a[2], a[6], a[3], a[7]], x[2:], sums)
                before = partial[tile]
                partial[tile] = [
                    scale[i // 2] * s if before is None else isa.fma(scale[i // 2], s, before[i])
                    for i, s in enumerate(sums)
                ]
        bytes_64 = 0x64646464
        m = [
            isa.add_halves(isa.permute_bytes(mins, bytes_64, selector), _MINUS_1024)
            for selector in (0x4140, 0x4342)
        ]
        d = [isa.half_to_float(word, False) for word in pair]
        dmin = [-isa.half_to_float(word, True) for word in pair]
        results = []
        for tile, total in enumerate(totals):
            zero = [isa.Float(0.0)] * 4
            offsets = isa.mma([m[0], m[1], m[0], m[1]], operand.sums(tile), zero)
            kept = partial[tile]
            assert kept is not None
            total = [isa.fma(d[i // 2], kept[i], total[i]) for i in range(4)]
            results.append([isa.fma(dmin[i // 2], offsets[i], total[i]) for i in range(4)])
        return results


def _nibble_pairs(isa, word) -> list[Any]:
    """Returns four float16 pairs of a word: 1024 + q, 1024 + 16 q, 1024 + q, 1024 + 16 q."""
    shifted = word >> 8
    return [
        isa.bits_or(source, _NIBBLES << shift, _HALF_1024)
        for source in (word, shifted)
        for shift in (0, 4)
    ]


def _bits(plane: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(plane, jnp.uint16)


Q4K_BLOCK = Q4KBlock()

BLOCKS = {block.format.name: block for block in (Q4K_BLOCK,)}
"""Blocks by the name of their format."""
