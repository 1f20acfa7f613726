"""Blocks of k-quants: whole numbers scale groups of weights, and a float the whole numbers."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_scales import ByteScales, load_bytes, scaled_offsets, tile_bytes
from pallas_kernels.decode_words import (
    HALF_1024,
    HALF_16384,
    MINUS_1024,
    MINUS_16384,
    Operand,
    add_run,
    add_scaled,
    bits_of,
    code_dims,
    join_words,
    load_nibbles,
    low_pairs,
    moved,
    nibble_pairs,
    pack_words,
    pick_pairs,
    tile_fifths,
    tile_nibbles,
    unit_rows,
)
from pallas_kernels.layout import unpack_codes
from pallas_kernels.matmul_q2 import Q2_K
from pallas_kernels.packed import PackedFormat


def _fragment(isa, words: list[list[Any]], pick) -> list[Any]:
    """Returns bytes, 16 times as large in float16, as a left-hand fragment.

    Args:
      isa: `ptx`, or a model of it.
      words: two for each word of the fragment.
      pick: of `pick_pairs`.
    """
    picked = [isa.permute_bytes(*two, pick) for two in words]
    return [isa.add_halves(isa.merge(word, 0x00FF00FF, HALF_16384), MINUS_16384) for word in picked]


def _tile_floats(planes: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the words (d, dmin) [8 g][rows g, g + 8]."""
    pair = jnp.stack([unit_rows(bits_of(planes[name])) for name in ("d", "dmin")], -1)
    return pack_words(pair, (2, 1, 0, 3), 16 * np.arange(2))


def _floats(isa, pair: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns d and -dmin of rows g and g + 8."""
    d = [isa.half_to_float(word, False) for word in pair]
    return d, [-isa.half_to_float(word, True) for word in pair]


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
        codes, byte = unpack_codes(planes, self.bits, 32), 8 * np.arange(4)
        parts = [tile_nibbles(codes)]
        if self.bits == 5:
            parts.append(tile_fifths(codes))
        scales, mins = unit_rows(planes["scales"]), unit_rows(planes["mins"])
        shape = (*scales.shape[:-1], scales.shape[-1] // 8)
        parts.append(pack_words(scales.reshape(*shape, 2, 4), (2, 1, 0, 3, 4), byte))
        parts.append(pack_words(mins.reshape(*shape, 4, 2), (2, 1, 3, 0, 4), byte.reshape(2, 2)))
        return join_words([*parts, _tile_floats(planes)])

    def load(self, isa, address, lane) -> list[Any]:
        """Returns this lane's registers; see `Block`."""
        at = self.scales_at
        high = isa.load_shared(address + lane * 16, 2048, 4) if self.bits == 5 else None
        return [
            load_nibbles(isa, address, lane),
            high,
            isa.load_shared(address + (lane >> 2) * 16, at, 4),
            isa.load_shared(address + lane * 4, at + 128, 1),
            isa.load_shared(address + (lane >> 2) * 8, at + 256, 2),
            pick_pairs(lane),
        ]

    def product(self, isa, loaded, operand: Operand, totals: list[list[Any]]) -> list[list[Any]]:
        """Returns the totals with this block's part; see `Block`."""
        nibbles, high, scales, (mins,), pair, pick = loaded
        zero = [isa.Float(0.0)] * 4
        s = _fragment(isa, [scales[:2], scales[2:]], pick)
        sums = [isa.mma(s * 2, operand.offsets(tile), zero) for tile in range(len(totals))]
        for run in range(8):
            rows = [nibble_pairs(isa, nibbles, high, run, row) for row in (0, 1)]
            scale = [isa.byte_to_float(scales[2 * h + run // 4], run % 4) for h in (0, 1)]
            sums = add_run(isa, sums, rows, scale, operand, run)
        m = [
            isa.add_halves(isa.permute_bytes(mins, 0x64646464, selector), MINUS_1024)
            for selector in (0x4140, 0x4342)
        ]
        d, dmin = _floats(isa, pair)
        results = []
        for tile, total in enumerate(totals):
            total = add_scaled(isa, total, d, sums[tile])
            results.append(add_scaled(isa, total, dmin, isa.mma(m * 2, operand.sums(tile), zero)))
        return results


class HalfRunBlock:
    """Blocks of q6_k (840 words) and q3_k (584): signed scales of runs of 16.

    Words: nibbles; for q6_k, upper bits [2 pairs of pairs][32 lanes][2 pairs of runs][rows g,
    g + 8], sixteen fields a word; scales [8 g][rows g, g + 8][16 bytes]; d [8 g][rows g, g + 8].

    q3_k has 4.5625 bits a weight. A code q of it stands for q - 8 = (4 q - 32) / 4: it is read as
    the six-bit code 4 q, and the block's d over 4.
    """

    operand, num_offsets, has_mins = "half runs", 16, False
    # Codes carry 1024 and 32 (or 16 times that), and scales come 16 times as large.
    offset_weights = (-66.0, -96.0)

    # Where a half word keeps the upper bits of (run, half s), for plain codes and the others: the
    # plain ones are moved to bit 4, the others to bit 8.
    _PLAIN, _RAISED = ((4, 6), (0, 2)), ((8, 10), (12, 14))

    def __init__(self, packed_format: PackedFormat, bits: int):
        """Takes the format, and the bits of its codes: 6, or 4 for codes that are 8 too large."""
        self.format, self.bits = packed_format, bits
        self.scales, self.unit = ByteScales(16), 1.0 if bits == 6 else 1 / 4
        self.scales_at = 2048 + (1024 if bits == 6 else 0)
        self.words = (self.scales_at + self.scales.num_bytes) // 4

    def tile(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the words of planes; see `Block`."""
        codes = unpack_codes(planes, self.bits, 16)
        parts = [tile_nibbles(codes)]
        if self.bits == 6:
            parts.append(self._tile_high(codes >> 4))
        return join_words([*parts, *self.scales.tile(planes)])

    def _tile_high(self, fields: jax.Array) -> jax.Array:
        """Returns the words of upper bits."""
        shifts = np.empty((2, 2, 2, 2), int)  # run, s, e, o
        for run, half in np.ndindex(2, 2):
            for e, places in enumerate((self._PLAIN, self._RAISED)):
                shifts[run, half, e] = places[run][half] + 16 * np.arange(2)
        high = code_dims(fields)
        # Two pairs of runs make one 16-byte load: dims become h, g, block, load, pair, run, ...
        high = high.reshape(*high.shape[:-6], 2, 2, *high.shape[-5:])
        return pack_words(high, (2, 3, 1, 7, 4, 0, 5, 6, 8, 9), shifts)

    def load(self, isa, address, lane) -> list[Any]:
        """Returns this lane's registers; see `Block`."""
        nibbles, high = load_nibbles(isa, address, lane), None
        if self.bits == 6:
            high = [isa.load_shared(address + lane * 16, 2048 + 512 * half, 4) for half in (0, 1)]
        at = (isa, address, lane, self.scales_at)
        return [nibbles, high, self.scales.load(*at), self.scales.load_pairs(*at)]

    def pairs(self, isa, nibbles, high, run: int, row: int) -> list[Any]:
        """Returns float16 pairs of a run, [half][e]: 1024 more than codes, or 16 times codes.

        Codes are of six bits; those of four are four times as large.
        """
        word = nibbles[run // 2][2 * (run % 2) + row]
        if high is None:
            return [
                isa.merge(source, mask, HALF_1024)
                for source in (word << 2, word >> 6)
                for mask in (0x003C003C, 0x03C003C0)
            ]
        pairs = low_pairs(isa, word)
        word = high[run // 4][2 * (run // 2 % 2) + row]
        return [
            isa.merge(moved(word, self._RAISED[run % 2][i // 2] - 8), 0x03000300, pair)
            if i % 2
            else isa.merge(moved(word, self._PLAIN[run % 2][i // 2] - 4), 0x00300030, pair)
            for i, pair in enumerate(pairs)
        ]

    def product(self, isa, loaded, operand: Operand, totals: list[list[Any]]) -> list[list[Any]]:
        """Returns the totals with this block's part; see `Block`."""
        nibbles, high, scales, pairs = loaded
        tiles, zero = range(len(totals)), [isa.Float(0.0)] * 4
        fragment = self.scales.fragment(isa, scales, pairs)
        sums = [scaled_offsets(isa, fragment, operand.offsets(tile)) for tile in tiles]
        for run in range(8):
            a, b = (self.pairs(isa, nibbles, high, run, row) for row in (0, 1))
            fragments = [operand.fragments(run, tile) for tile in tiles]
            for half in (0, 1):
                i = 2 * half
                scale = [self.scales.of_group(isa, scales, h, 2 * run + half) for h in (0, 1)]
                for tile in tiles:
                    x = fragments[tile][i : i + 2]
                    values = isa.mma([a[i], b[i], a[i + 1], b[i + 1]], x, zero)
                    sums[tile] = add_scaled(isa, sums[tile], scale, values)
        d = self.scales.of_block(isa, scales, self.unit)
        return [add_scaled(isa, total, d, sums[tile]) for tile, total in enumerate(totals)]


class Q2KBlock:
    """Blocks of q2_k: 400 words, 3.125 bits a weight, scales and mins of runs of 16.

    Words: codes [2 fours of runs][32 lanes][4 runs], at bit 8 h + 2 s + 4 e + 16 o for row g + 8 h;
    scales and mins [8 g][rows g, g + 8][16 bytes]; (d, dmin) [8 g][rows g, g + 8]. Mins multiply
    the activations as weights do: their sums over runs of 16 are no part of an operand.
    """

    format, words = Q2_K, 400
    operand, num_offsets, has_mins = "half runs", 16, False
    # Codes carry 1024 and 32 (or 16 times that), and scales come 16 times as large.
    offset_weights = (-66.0, -96.0)

    def tile(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the words of planes; see `Block`."""
        codes = code_dims(unpack_codes(planes, 2, Q2_K.lanes))
        # Four runs make one 16-byte load: dims become h, g, block, load, run, s, ...
        codes = codes.reshape(*codes.shape[:-6], 2, 4, *codes.shape[-4:])
        row, half, e, o = np.ogrid[0:2, 0:2, 0:2, 0:2]
        shifts = 8 * row + 2 * half + 4 * e + 16 * o
        return join_words(
            [
                pack_words(codes, (2, 3, 1, 6, 4, 0, 5, 7, 8), shifts),
                *(tile_bytes(planes[name], 16) for name in ("scales", "mins")),
                _tile_floats(planes),
            ]
        )

    def load(self, isa, address, lane) -> list[Any]:
        """Returns this lane's registers; see `Block`."""
        group = lane >> 2
        return [
            [isa.load_shared(address + lane * 16, 512 * half, 4) for half in (0, 1)],
            load_bytes(isa, address, group, 1024, 16),
            load_bytes(isa, address, group, 1280, 16),
            isa.load_shared(address + group * 8, 1536, 2),
            pick_pairs(lane),
        ]

    def pairs(self, isa, word, row: int, half: int) -> list[Any]:
        """Returns float16 pairs of a half run: codes and 1056 more, 16 times codes and 1536."""
        source = moved(word, 8 * row + 2 * half)
        return [
            isa.merge(source, 0x00030003, 0x64206420),
            isa.merge(source, 0x00300030, 0x66006600),
        ]

    def product(self, isa, loaded, operand: Operand, totals: list[list[Any]]) -> list[list[Any]]:
        """Returns the totals with this block's part; see `Block`."""
        codes, scales, mins, pair, pick = loaded
        tiles, zero = range(len(totals)), [isa.Float(0.0)] * 4
        fragment = _fragment(isa, [words[i : i + 2] for i in (0, 2) for words in scales], pick)
        sums = [scaled_offsets(isa, fragment, operand.offsets(tile)) for tile in tiles]
        least = [zero for _ in tiles]
        for run in range(8):
            fragments = [operand.fragments(run, tile) for tile in tiles]
            for half in (0, 1):
                word, index, i = codes[run // 4][run % 4], 2 * run + half, 2 * half
                a, b = (self.pairs(isa, word, row, half) for row in (0, 1))
                scale = [isa.byte_to_float(scales[h][index // 4], index % 4) for h in (0, 1)]
                # A min of every weight, in both bytes of a pair: 1024 + m, and 16384 + 16 m.
                by = 0x4040 + index % 4 * 0x0101
                m = [
                    isa.add_halves(isa.permute_bytes(mins[h][index // 4], above, by), minus)
                    for above, minus in ((0x64646464, MINUS_1024), (0x74747474, MINUS_16384))
                    for h in (0, 1)
                ]
                for tile in tiles:
                    x = fragments[tile][i : i + 2]
                    values = isa.mma([a[0], b[0], a[1], b[1]], x, zero)
                    sums[tile] = add_scaled(isa, sums[tile], scale, values)
                    least[tile] = isa.mma(m, x, least[tile])
        d, dmin = _floats(isa, pair)
        return [
            add_scaled(isa, add_scaled(isa, total, d, sums[tile]), dmin, least[tile])
            for tile, total in enumerate(totals)
        ]
