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
"""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import unpack_codes
from pallas_kernels.matmul_q4 import Q4_K
from pallas_kernels.matmul_q5 import Q5_K
from pallas_kernels.matmul_q6 import Q6_K
from pallas_kernels.matmul_q8 import Q8_0
from pallas_kernels.packed import PackedFormat

ROWS, WEIGHTS = 16, 256
"""Rows and weights a row of a block."""

_HALF_1024 = 0x64006400
_MINUS_1024 = 0xE400E400
_HALF_16384 = 0x74007400
_MINUS_16384 = 0xF400F400
_MINUS_18432 = 0xF480F480


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
    places = jax.lax.broadcast_to_rank(jnp.asarray(shifts, jnp.uint32), moved.ndim)
    words = (moved << places).sum(axis=tuple(range(-fields_of_word, 0)), dtype=jnp.uint32)
    return words.reshape(*words.shape[: leading + 1], -1)


def _join(parts: list[jax.Array]) -> jax.Array:
    words = jnp.concatenate(parts, -1)
    return words.reshape(*words.shape[:-2], -1)


def _bits(plane: jax.Array, kind=jnp.uint16) -> jax.Array:
    return jax.lax.bitcast_convert_type(plane, kind)


def _code_dims(codes: jax.Array) -> jax.Array:
    """Returns codes with dims h, g, block, pair of runs, run, s, t, e, o after the units.

    A weight is 16 s + 4 t + 2 e + o of its run.
    """
    codes = _unit_rows(codes)
    *leading, _, _, k = codes.shape
    return codes.reshape(*leading, 2, 8, k // WEIGHTS, 4, 2, 2, 4, 2, 2)


def _tile_nibbles(codes: jax.Array) -> jax.Array:
    """Returns words [4 pairs of runs][32 lanes][2 runs][rows g, g + 8] of eight nibbles each.

    The pair of weights (k, k + 1) stands sixteen bits apart, at bit 8 s + 4 e.
    """
    two = np.arange(2)
    shifts = 8 * two[:, None, None] + 4 * two[:, None] + 16 * two
    return _words(_code_dims(codes & 15), (2, 3, 1, 6, 4, 0, 5, 7, 8), shifts)


def _load_nibbles(isa, address, lane) -> list[list[Any]]:
    return [isa.load_shared(address + lane * 16, 512 * pair, 4) for pair in range(4)]


def _low_pairs(isa, word) -> list[Any]:
    """Returns four float16 pairs of eight nibbles: 1024 + q, 1024 + 16 q, 1024 + q, 1024 + 16 q."""
    shifted = word >> 8
    return [
        isa.merge(source, 0x000F000F << shift, _HALF_1024)
        for source in (word, shifted)
        for shift in (0, 4)
    ]


def _moved(word, shift: int):
    """Returns the word with its bits moved right by `shift`, left where that is negative."""
    return word >> shift if shift > 0 else word << -shift if shift < 0 else word


def _pick(lane):
    """Returns the selector of bytes 2t and 2t + 1 of eight, each in a half word."""
    return (lane & 3) * 0x202 + 0x100


def _add_scaled(isa, sums: list[Any], scale: list[Any], values: list[Any]) -> list[Any]:
    """Returns sums + scale * values for rows g and g + 8."""
    return [isa.fma(scale[i // 2], values[i], sums[i]) for i in range(4)]


class KBlock:
    """Blocks of q4_k (592 words) and q5_k (720): scales and mins of runs of 32.

    Words: nibbles; for q5_k, the fifth bits [32 lanes][4 pairs of runs]; scales [8 g][rows g,
    g + 8][8 bytes]; mins [32 lanes][4 bytes]; (d, dmin) [8 g][rows g, g + 8].
    """

    operand, num_offsets, has_mins = "runs with mins", 8, True
    # Both kinds of code carry 1024, and scales come 16 times as large.
    offset_weights = (-64.0, -64.0)

    def __init__(self, packed_format: PackedFormat, bits: int):
        """Takes the format, and the bits of its codes: 4 or 5."""
        self.format, self.bits = packed_format, bits
        self.scales_at = 2048 + (512 if bits == 5 else 0)
        self.words = (self.scales_at + 320) // 4

    def tile(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the words of planes; see `Block`."""
        codes, two, byte = unpack_codes(planes, self.bits, 32), np.arange(2), 8 * np.arange(4)
        parts = [_tile_nibbles(codes)]
        if self.bits == 5:
            # The pair of run r, row h and half s is bit 4 r + 2 h + s, or eight above for e = 1.
            run, row, half, e, o = np.ogrid[0:2, 0:2, 0:2, 0:2, 0:2]
            shifts = 4 * run + 2 * row + half + 8 * e + 16 * o
            parts.append(_words(_code_dims(codes >> 4), (2, 1, 6, 3, 4, 0, 5, 7, 8), shifts))
        scales, mins = _unit_rows(planes["scales"]), _unit_rows(planes["mins"])
        shape = (*scales.shape[:-1], scales.shape[-1] // 8)
        parts.append(_words(scales.reshape(*shape, 2, 4), (2, 1, 0, 3, 4), byte))
        parts.append(_words(mins.reshape(*shape, 4, 2), (2, 1, 3, 0, 4), byte.reshape(2, 2)))
        pair = jnp.stack([_unit_rows(_bits(planes[name])) for name in ("d", "dmin")], -1)
        parts.append(_words(pair, (2, 1, 0, 3), 16 * two))
        return _join(parts)

    def load(self, isa, address, lane) -> list[Any]:
        """Returns this lane's registers; see `Block`."""
        at = self.scales_at
        high = isa.load_shared(address + lane * 16, 2048, 4) if self.bits == 5 else None
        return [
            _load_nibbles(isa, address, lane),
            high,
            isa.load_shared(address + (lane >> 2) * 16, at, 4),
            isa.load_shared(address + lane * 4, at + 128, 1),
            isa.load_shared(address + (lane >> 2) * 8, at + 256, 2),
            _pick(lane),
        ]

    def pairs(self, isa, nibbles, high, run: int, row: int) -> list[Any]:
        """Returns float16 pairs of a run, [half][e]: 1024 more than codes, or 16 times codes."""
        pairs = _low_pairs(isa, nibbles[run // 2][2 * (run % 2) + row])
        if high is None:
            return pairs
        place = 4 * (run % 2) + 2 * row
        return [
            # Plain codes take their fifth bit at bit 4 of a half word, the others at bit 8.
            isa.merge(
                _moved(high[run // 2], place + i // 2 - (0 if i % 2 else 4)),
                0x01000100 if i % 2 else 0x00100010,
                pair,
            )
            for i, pair in enumerate(pairs)
        ]

    def product(self, isa, loaded, operand: Operand, totals: list[list[Any]]) -> list[list[Any]]:
        """Returns the totals with this block's part; see `Block`."""
        nibbles, high, scales, (mins,), pair, pick = loaded
        zero = [isa.Float(0.0)] * 4
        picked = [isa.permute_bytes(*scales[2 * h : 2 * h + 2], pick) for h in (0, 1)]
        s = [
            isa.add_halves(isa.merge(word, 0x00FF00FF, _HALF_16384), _MINUS_16384)
            for word in picked
        ]
        sums = [isa.mma(s * 2, operand.offsets(tile), zero) for tile in range(len(totals))]
        for run in range(8):
            a, b = (self.pairs(isa, nibbles, high, run, row) for row in (0, 1))
            scale = [isa.byte_to_float(scales[2 * h + run // 4], run % 4) for h in (0, 1)]
            for tile in range(len(totals)):
                x = operand.fragments(run, tile)
                values = isa.mma([a[0], b[0], a[1], b[1]], x[:2], zero)
                values = isa.mma([a[2], b[2], a[3], b[3]], x[2:], values)
                sums[tile] = _add_scaled(isa, sums[tile], scale, values)
        m = [
            isa.add_halves(isa.permute_bytes(mins, 0x64646464, selector), _MINUS_1024)
            for selector in (0x4140, 0x4342)
        ]
        d = [isa.half_to_float(word, False) for word in pair]
        dmin = [-isa.half_to_float(word, True) for word in pair]
        results = []
        for tile, total in enumerate(totals):
            total = _add_scaled(isa, total, d, sums[tile])
            results.append(_add_scaled(isa, total, dmin, isa.mma(m * 2, operand.sums(tile), zero)))
        return results


class Q6KBlock:
    """Blocks of q6_k: 840 words, signed scales of runs of 16.

    Words: nibbles; upper bits [2 pairs of pairs][32 lanes][2 pairs of runs][rows g, g + 8], sixteen
    fields a word; scales [8 g][rows g, g + 8][16 bytes]; d [8 g][rows g, g + 8].
    """

    format, words = Q6_K, 840
    operand, num_offsets, has_mins = "half runs", 16, False
    # Codes carry 1024 and 32 (or 16 times that), and scales come 16 times as large.
    offset_weights = (-66.0, -96.0)

    # Where a half word keeps the upper bits of (run, half s), for plain codes and the others: the
    # plain ones are moved to bit 4, the others to bit 8.
    _PLAIN, _RAISED = ((4, 6), (0, 2)), ((8, 10), (12, 14))

    def tile(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the words of planes; see `Block`."""
        codes = unpack_codes(planes, 6, 16)
        shifts = np.empty((2, 2, 2, 2), int)  # run, s, e, o
        for run, half in np.ndindex(2, 2):
            for e, places in enumerate((self._PLAIN, self._RAISED)):
                shifts[run, half, e] = places[run][half] + 16 * np.arange(2)
        high = _code_dims(codes >> 4)
        # Two pairs of runs make one 16-byte load: dims become h, g, block, load, pair, run, ...
        high = high.reshape(*high.shape[:-6], 2, 2, *high.shape[-5:])
        scales = _unit_rows(_bits(planes["scales"], jnp.uint8))
        scales = scales.reshape(*scales.shape[:-1], scales.shape[-1] // 16, 4, 4)
        return _join(
            [
                _tile_nibbles(codes),
                _words(high, (2, 3, 1, 7, 4, 0, 5, 6, 8, 9), shifts),
                _words(scales, (2, 1, 0, 3, 4), 8 * np.arange(4)),
                _words(_unit_rows(_bits(planes["d"])), (2, 1, 0), 16 * np.arange(2)),
            ]
        )

    def load(self, isa, address, lane) -> list[Any]:
        """Returns this lane's registers; see `Block`."""
        group = lane >> 2
        return [
            _load_nibbles(isa, address, lane),
            [isa.load_shared(address + lane * 16, 2048 + 512 * half, 4) for half in (0, 1)],
            [isa.load_shared(address + group * 32, 3072 + 16 * h, 4) for h in (0, 1)],
            isa.load_shared(address + group * 4, 3328, 1),
            _pick(lane),
        ]

    def pairs(self, isa, nibbles, high, run: int, row: int) -> list[Any]:
        """Returns float16 pairs of a run, [half][e]: 1024 more than codes, or 16 times codes."""
        pairs = _low_pairs(isa, nibbles[run // 2][2 * (run % 2) + row])
        word = high[run // 4][2 * (run // 2 % 2) + row]
        return [
            isa.merge(_moved(word, self._RAISED[run % 2][i // 2] - 8), 0x03000300, pair)
            if i % 2
            else isa.merge(_moved(word, self._PLAIN[run % 2][i // 2] - 4), 0x00300030, pair)
            for i, pair in enumerate(pairs)
        ]

    def product(self, isa, loaded, operand: Operand, totals: list[list[Any]]) -> list[list[Any]]:
        """Returns the totals with this block's part; see `Block`."""
        nibbles, high, scales, (d_pair,), pick = loaded
        tiles, zero = range(len(totals)), [isa.Float(0.0)] * 4
        # Signed bytes plus 128, below 16384: what is taken off is 16 * 128 larger.
        s = [
            isa.add_halves(
                isa.merge(isa.permute_bytes(*words[i : i + 2], pick), 0x00FF00FF, 0x74807480),
                _MINUS_18432,
            )
            for i in (0, 2)
            for words in scales
        ]
        sums = []
        for tile in tiles:
            offsets = operand.offsets(tile)
            sums.append(isa.mma(s, offsets[2:], isa.mma(s, offsets[:2], zero)))
        for run in range(8):
            a, b = (self.pairs(isa, nibbles, high, run, row) for row in (0, 1))
            fragments = [operand.fragments(run, tile) for tile in tiles]
            for half in (0, 1):
                index, i = 2 * run + half, 2 * half
                scale = [isa.byte_to_float(scales[h][index // 4], index % 4, True) for h in (0, 1)]
                for tile in tiles:
                    x = fragments[tile][i : i + 2]
                    values = isa.mma([a[i], b[i], a[i + 1], b[i + 1]], x, zero)
                    sums[tile] = _add_scaled(isa, sums[tile], scale, values)
        d = [isa.half_to_float(d_pair, high_half) for high_half in (False, True)]
        return [_add_scaled(isa, total, d, sums[tile]) for tile, total in enumerate(totals)]


class Q80Block:
    """Blocks of q8_0: 1,088 words, float16 scales of runs of 32.

    Words: codes + 128 [8 runs][32 lanes][rows g, g + 8][8 bytes]; d [8 g][rows g, g + 8][8 halves].
    """

    format, words = Q8_0, 1088
    operand, num_offsets, has_mins = "runs of bytes", 8, False
    # Over 32: codes carry 1024 + 128, the others 16 times that.
    offset_weights = (-36.0, -576.0)

    def tile(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the words of planes; see `Block`. K must be a multiple of 256."""
        codes = _unit_rows(_bits(planes["codes"], jnp.uint8) ^ 128)
        # Dims: h, g, block, run, half s, t, byte.
        codes = codes.reshape(*codes.shape[:-1], -1, 8, 2, 4, 4)
        d = _unit_rows(_bits(planes["d"]))
        d = d.reshape(*d.shape[:-1], -1, 4, 2)
        return _join(
            [
                _words(codes, (2, 3, 1, 5, 0, 4, 6), 8 * np.arange(4)),
                _words(d, (2, 1, 0, 3, 4), 16 * np.arange(2)),
            ]
        )

    def load(self, isa, address, lane) -> list[Any]:
        """Returns this lane's registers; see `Block`."""
        scales, pair = address + (lane >> 2) * 32, address + (lane >> 2) * 32 + (lane & 3) * 4
        return [
            [isa.load_shared(address + lane * 16, 512 * run, 4) for run in range(8)],
            [isa.load_shared(scales, 4096 + 16 * h, 4) for h in (0, 1)],
            [isa.load_shared(pair, 4096 + 16 * h, 1)[0] for h in (0, 1)],
        ]

    def product(self, isa, loaded, operand: Operand, totals: list[list[Any]]) -> list[list[Any]]:
        """Returns the totals with this block's part; see `Block`."""
        codes, scales, pair = loaded
        zero, whole = [isa.Float(0.0)] * 4, [isa.Float(32.0)] * 2
        totals = [
            _add_scaled(isa, total, whole, isa.mma(pair * 2, operand.offsets(tile), zero))
            for tile, total in enumerate(totals)
        ]
        for run in range(8):
            # Bytes of 0x64 make 1024 + u; of 0x74, 16384 + 16 u, for activations over 16.
            pairs = [
                isa.permute_bytes(word, 0x64746474, selector)
                for word in codes[run]
                for selector in (0x5150, 0x4342)
            ]
            a, b = pairs[:4], pairs[4:]
            d = [isa.half_to_float(scales[h][run // 2], bool(run % 2)) for h in (0, 1)]
            for tile in range(len(totals)):
                x = operand.fragments(run, tile)
                values = isa.mma([a[0], b[0], a[1], b[1]], x[:2], zero)
                values = isa.mma([a[2], b[2], a[3], b[3]], x[2:], values)
                totals[tile] = _add_scaled(isa, totals[tile], d, values)
        return totals


_ALL: tuple[Block, ...] = (KBlock(Q4_K, 4), KBlock(Q5_K, 5), Q6KBlock(), Q80Block())

BLOCKS: dict[str, Block] = {block.format.name: block for block in _ALL}
"""Blocks by the name of their format."""
