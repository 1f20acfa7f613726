"""Blocks of signed magnitudes that tables of eight hold."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pallas_kernels.decode_run_blocks import TABLE_LANES
from pallas_kernels.decode_scales import Scales
from pallas_kernels.decode_words import (
    NIBBLE_AXES,
    Operand,
    add_scaled,
    code_dims,
    join_words,
    load_nibbles,
    pack_words,
)
from pallas_kernels.layout import unpack_codes
from pallas_kernels.matmul_t4 import Table

_SIXTEEN = 0x4C004C00
_SMALLEST = 2.0**24
"""How many of the smallest float16 make 1."""


class SignedBlock:
    """Blocks of a table format whose values are eight magnitudes below 128 and their negatives.

    mxfp4 has 576 words (4.5 bits a weight), nvfp4 640 (5 bits), iq3_s and iq3_xxs 552 (4.3125),
    iq2 and iq1 584 (4.5625). A magnitude is a byte of a register, and becomes float16 as it is,
    below the smallest exponent: nothing is in excess, so there are no offsets to take off.

    Words: nibbles [4 pairs of runs][32 lanes][2 runs][rows g, g + 8]; the index of a magnitude is
    at bit 16 s + 8 e + 4 o, its sign at 8 (2 e + o) + 7 for s = 0, at 8 (2 e + o) + 3 for s = 1:
    where one mask makes bytes of signs. Then scales.
    """

    operand, num_offsets, has_mins = "runs of bytes", 8, False
    # Of the other blocks that this operand is for.
    offset_weights = (-36.0, -576.0)

    def __init__(self, packed_format: Table, scales: Scales):
        """Takes the format and its scales.

        Raises:
          ValueError: values that are not eight magnitudes and their negatives.
        """
        self.format, self.scales = packed_format, scales
        low, high = packed_format.values[:8], packed_format.values[8:]
        negative = tuple(-value for value in high)
        # Codes below 8 are the negatives: in the other order, or from -0 on.
        self.mirrored = low[::-1] == negative
        if (not self.mirrored and low != negative) or max(map(abs, high)) > 127:
            raise ValueError(f"{packed_format.values} are no eight magnitudes with both signs")
        magnitudes = bytes(abs(value) for value in high)
        self.table: list[int] = np.frombuffer(magnitudes, np.uint32).tolist()
        self.scales_at = 2048
        self.words = (self.scales_at + scales.num_bytes) // 4

    def tile(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the words of planes; see `Block`. K must be a multiple of 256."""
        codes = code_dims(unpack_codes(planes, 4, TABLE_LANES))
        signs = 1 - (codes >> 3) if self.mirrored else codes >> 3
        indices = (codes & 7) ^ (7 * signs) if self.mirrored else codes & 7
        half, e, o = np.ogrid[0:2, 0:2, 0:2]
        nibbles = pack_words(indices, NIBBLE_AXES, 16 * half + 8 * e + 4 * o)
        nibbles |= pack_words(signs, NIBBLE_AXES, 8 * (2 * e + o) + 7 - 4 * half)
        return join_words([nibbles, *self.scales.tile(planes)])

    def load(self, isa, address, lane) -> list[Any]:
        """Returns this lane's registers; see `Block`."""
        scales = self.scales.load(isa, address, lane, self.scales_at)
        return [load_nibbles(isa, address, lane), scales]

    def pairs(self, isa, word) -> list[Any]:
        """Returns float16 pairs of eight nibbles, [half][e]: values times 2^-24."""
        low, high = (isa.Word(value) for value in self.table)
        index, pairs = word & 0x77777777, []
        for half in (0, 1):
            magnitudes = isa.permute_bytes(low, high, index >> 16 if half else index)
            signs = (word << 4 if half else word) & 0x80808080
            pairs += [isa.permute_bytes(magnitudes, signs, by) for by in (0x5140, 0x7362)]
        return pairs

    def product(self, isa, loaded, operand: Operand, totals: list[list[Any]]) -> list[list[Any]]:
        """Returns the totals with this block's part; see `Block`."""
        nibbles, scales = loaded
        zero, tiles = [isa.Float(0.0)] * 4, range(len(totals))
        sums, halves = [zero for _ in tiles], 32 // self.scales.group
        for run in range(8):
            words = nibbles[run // 2][2 * (run % 2) :][:2]
            rows = [self.pairs(isa, word) for word in words]
            a, b = (
                # The activations that meet these are divided by 16.
                [isa.multiply_halves(pair, _SIXTEEN) if i % 2 else pair for i, pair in enumerate(p)]
                for p in rows
            )
            fragments = [operand.fragments(run, tile) for tile in tiles]
            values = [zero for _ in tiles]
            for half in (0, 1):
                i = 2 * half
                for tile in tiles:
                    x = fragments[tile][i : i + 2]
                    values[tile] = isa.mma([a[i], b[i], a[i + 1], b[i + 1]], x, values[tile])
                if halves == 1 and half == 0:
                    continue
                index = run if halves == 1 else 2 * run + half
                scale = [self.scales.of_group(isa, scales, h, index) for h in (0, 1)]
                for tile in tiles:
                    sums[tile] = add_scaled(isa, sums[tile], scale, values[tile])
                    values[tile] = zero
        # Scales may be near the largest float, so what values lack is multiplied last.
        whole = self.scales.of_block(isa, scales, _SMALLEST * self.format.unit)
        return [add_scaled(isa, total, whole, sums[tile]) for tile, total in enumerate(totals)]
