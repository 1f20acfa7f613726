"""Blocks whose runs of 32 weights have a float16 scale, or whose codes become bytes."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_scales import FloatScales, Scales, scaled_offsets
from pallas_kernels.decode_words import (
    NIBBLE_AXES,
    Operand,
    add_run,
    add_scaled,
    bits_of,
    code_dims,
    join_words,
    load_nibbles,
    nibble_pairs,
    pack_words,
    tile_fifths,
    tile_nibbles,
    unit_rows,
)
from pallas_kernels.layout import unpack_codes
from pallas_kernels.packed import PackedFormat

TABLE_LANES = 16
"""Bytes of a chunk of the code plane of table formats (see `layout`)."""


class ByteBlock:
    """Blocks of bytes, kept (q8_0: 1,088 words) or looked up by nibbles.

    The latter are iq4_nl (576 words, 4.5 bits a weight) and iq4_xs (552, 4.3125).

    Words: codes + 128 [8 runs][32 lanes][rows g, g + 8][8 bytes], or nibbles [4 pairs of
    runs][32 lanes][2 runs][rows g, g + 8], at bit 16 s + 8 e + 4 o; scales.
    """

    operand, num_offsets, has_mins = "runs of bytes", 8, False
    # Over 32: codes carry 1024 + 128, the others 16 times that.
    offset_weights = (-36.0, -576.0)

    def __init__(
        self, packed_format: PackedFormat, scales: Scales, values: tuple[int, ...] | None = None
    ):
        """Takes the format, its scales of runs, and what nibbles stand for (from -128 to 127)."""
        self.format, self.scales, self.table = packed_format, scales, None
        if values is not None:
            self.table = np.frombuffer(bytes(value + 128 for value in values), np.uint32).tolist()
        self.scales_at = 4096 if values is None else 2048
        self.words = (self.scales_at + scales.num_bytes) // 4

    def tile(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the words of planes; see `Block`. K must be a multiple of 256."""
        if self.table is None:
            codes = unit_rows(bits_of(planes["codes"], jnp.uint8) ^ 128)
            # Dims: h, g, block, run, half s, t, byte.
            codes = codes.reshape(*codes.shape[:-1], -1, 8, 2, 4, 4)
            words = pack_words(codes, (2, 3, 1, 5, 0, 4, 6), 8 * np.arange(4))
        else:
            half, e, o = np.ogrid[0:2, 0:2, 0:2]
            codes = code_dims(unpack_codes(planes, 4, TABLE_LANES))
            words = pack_words(codes, NIBBLE_AXES, 16 * half + 8 * e + 4 * o)
        return join_words([words, *self.scales.tile(planes)])

    def load(self, isa, address, lane) -> list[Any]:
        """Returns this lane's registers; see `Block`."""
        if self.table is None:
            codes = [isa.load_shared(address + lane * 16, 512 * run, 4) for run in range(8)]
        else:
            codes = load_nibbles(isa, address, lane)
        at = (isa, address, lane, self.scales_at)
        return [codes, self.scales.load(*at), self.scales.load_pairs(*at)]

    def codes(self, isa, words: list[Any]) -> list[list[Any]]:
        """Returns a run's bytes, codes + 128, of rows g and g + 8: two words each.

        Args:
          isa: `ptx`, or a model of it.
          words: the run's: four of bytes, or two of nibbles.
        """
        if self.table is None:
            return [words[:2], words[2:]]
        return [self._look_up(isa, word) for word in words]

    def _look_up(self, isa, word) -> list[Any]:
        """Returns the bytes that eight nibbles stand for."""
        assert self.table is not None
        a, b, c, d = (isa.Word(value) for value in self.table)
        # Both halves of the table are looked up by three bits, and the fourth picks one of them.
        index = word & 0x77777777
        choice = isa.merge(word >> 1, 0x44444444, 0x32103210)
        found = []
        for shift in (0, 16):
            low, high = (
                isa.permute_bytes(*half, index >> shift if shift else index)
                for half in ((a, b), (c, d))
            )
            found.append(isa.permute_bytes(low, high, choice >> shift if shift else choice))
        return found

    def product(self, isa, loaded, operand: Operand, totals: list[list[Any]]) -> list[list[Any]]:
        """Returns the totals with this block's part; see `Block`."""
        codes, scales, pairs = loaded
        zero, times = [isa.Float(0.0)] * 4, [isa.Float(32.0 / self.scales.step)] * 2
        fragment = self.scales.fragment(isa, scales, pairs)
        sums = totals if self.scales.whole else [zero] * len(totals)
        sums = [
            add_scaled(isa, part, times, scaled_offsets(isa, fragment, operand.offsets(tile)))
            for tile, part in enumerate(sums)
        ]
        for run in range(8):
            words = codes[run] if self.table is None else codes[run // 2][2 * (run % 2) :][:2]
            # Bytes of 0x64 make 1024 + u; of 0x74, 16384 + 16 u, for activations over 16.
            rows = [
                [
                    isa.permute_bytes(word, 0x64746474, selector)
                    for word in row
                    for selector in (0x5150, 0x4342)
                ]
                for row in self.codes(isa, words)
            ]
            d = [self.scales.of_group(isa, scales, h, run) for h in (0, 1)]
            sums = add_run(isa, sums, rows, d, operand, run)
        if self.scales.whole:
            return sums
        d = self.scales.of_block(isa, scales, 1.0)
        return [add_scaled(isa, total, d, sums[tile]) for tile, total in enumerate(totals)]


class PairBlock:
    """Blocks of q4_0 (576 words, 4.5 bits a weight), q4_1 (640, 5 bits) and q5_1 (768, 6 bits).

    Words: nibbles; for q5_1, the fifth bits [32 lanes][4 pairs of runs]; d, and m where there is
    one, [8 g][rows g, g + 8][8 halves]. Where there is none, m is a multiple of d.
    """

    operand, num_offsets, has_mins = "runs with mins", 8, True
    # Over 16: both kinds of code carry 1024.
    offset_weights = (-64.0, -64.0)

    def __init__(
        self, packed_format: PackedFormat, bits: int, *, lanes: int, low: float | None = None
    ):
        """Takes the format, how its codes are packed (see `layout`), and m over d, or None."""
        self.format, self.bits, self.lanes, self.low = packed_format, bits, lanes, low
        self.numbers = FloatScales(32)
        self.scales_at = 2048 + (512 if bits == 5 else 0)
        self.mins_at = self.scales_at + (256 if low is None else 0)
        self.words = (self.mins_at + 256) // 4

    def tile(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the words of planes; see `Block`. K must be a multiple of 256."""
        codes = unpack_codes(planes, self.bits, self.lanes)
        parts = [tile_nibbles(codes), *([tile_fifths(codes)] if self.bits == 5 else [])]
        for name in ("d", "m") if self.low is None else ("d",):
            parts += self.numbers.tile(planes, name)
        return join_words(parts)

    def load(self, isa, address, lane) -> list[Any]:
        """Returns this lane's registers; see `Block`."""
        nibbles = load_nibbles(isa, address, lane)
        high = isa.load_shared(address + lane * 16, 2048, 4) if self.bits == 5 else None
        scales = self.numbers.load(isa, address, lane, self.scales_at)
        pairs = mins = self.numbers.load_pairs(isa, address, lane, self.scales_at)
        if self.low is None:
            mins = self.numbers.load_pairs(isa, address, lane, self.mins_at)
        return [nibbles, high, scales, pairs, mins]

    def product(self, isa, loaded, operand: Operand, totals: list[list[Any]]) -> list[list[Any]]:
        """Returns the totals with this block's part; see `Block`."""
        nibbles, high, scales, pairs, mins = loaded
        zero, sixteen = [isa.Float(0.0)] * 4, [isa.Float(16.0)] * 2
        low = [isa.Float(1.0 if self.low is None else self.low)] * 2
        sums = [
            add_scaled(isa, total, sixteen, scaled_offsets(isa, pairs, operand.offsets(tile)))
            for tile, total in enumerate(totals)
        ]
        for run in range(8):
            rows = [nibble_pairs(isa, nibbles, high, run, row) for row in (0, 1)]
            d = [self.numbers.of_group(isa, scales, h, run) for h in (0, 1)]
            sums = add_run(isa, sums, rows, d, operand, run)
        return [
            add_scaled(isa, part, low, isa.mma(mins * 2, operand.sums(tile), zero))
            for tile, part in enumerate(sums)
        ]
