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


def _words_of(numbers: np.ndarray) -> list[int]:
    """Returns eight bytes as two words."""
    return numbers.astype(np.uint8).view(np.uint32).tolist()


class SignedBlock:
    """Blocks of a table format whose values are eight magnitudes below 128 and their negatives.

    mxfp4 has 576 words (4.5 bits a weight), nvfp4 640 (5 bits), iq3_s and iq3_xxs 552 (4.3125),
    iq2 and iq1 584 (4.5625). A magnitude is a byte of a register, and becomes float16 as it is,
    below the smallest exponent: nothing is in excess, so there are no offsets to take off.

    Words: nibbles [4 pairs of runs][32 lanes][2 runs][rows g, g + 8]; the index of a magnitude is
    at bit 16 e + 8 s + 4 o, its sign at 8 (2 s + o) + 7 for e = 0, at 8 (2 s + o) + 3 for e = 1:
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
        magnitudes = np.array(list(map(abs, high)))
        self.table = _words_of(magnitudes)
        # For activations that are divided by 16, where a byte holds 16 times as much.
        self.raised = _words_of(16 * magnitudes) if magnitudes.max() < 16 else None
        self.scales_at = 2048
        self.words = (self.scales_at + scales.num_bytes) // 4

    def tile(self, planes: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the words of planes; see `Block`. K must be a multiple of 256."""
        codes = code_dims(unpack_codes(planes, 4, TABLE_LANES))
        signs = 1 - (codes >> 3) if self.mirrored else codes >> 3
        indices = (codes & 7) ^ (7 * signs) if self.mirrored else codes & 7
        half, e, o = np.ogrid[0:2, 0:2, 0:2]
        nibbles = pack_words(indices, NIBBLE_AXES, 16 * e + 8 * half + 4 * o)
        nibbles |= pack_words(signs, NIBBLE_AXES, 8 * (2 * half + o) + 7 - 4 * e)
        return join_words([nibbles, *self.scales.tile(planes)])

    def load(self, isa, address, lane) -> list[Any]:
        """Returns this lane's registers; see `Block`."""
        scales = self.scales.load(isa, address, lane, self.scales_at)
        return [load_nibbles(isa, address, lane), scales]

    def pairs(self, isa, word, *, raised: bool) -> list[Any]:
        """Returns float16 pairs of eight nibbles, [half][e]: values times 2^-24.

        Args:
          isa: `ptx`, or a model of it.
          word: the nibbles.
          raised: whether those of e = 1 are to be 16 times as large.
        """
        index, found = word & 0x77777777, []
        for e in (0, 1):
            table = self.raised if e and raised and self.raised else self.table
            low, high = (isa.Word(value) for value in table)
            magnitudes = isa.permute_bytes(low, high, index >> 16 if e else index)
            signs = (word << 4 if e else word) & 0x80808080
            pairs = [isa.permute_bytes(magnitudes, signs, half) for half in (0x5140, 0x7362)]
            if e and raised and not self.raised:
                pairs = [isa.multiply_halves(pair, _SIXTEEN) for pair in pairs]
            found.append(pairs)
        return [pairs[half] for half in (0, 1) for pairs in found]

    def product(self, isa, loaded, operand: Operand, totals: list[list[Any]]) -> list[list[Any]]:
        """Returns the totals with this block's part; see `Block`."""
        nibbles, scales = loaded
        zero, tiles = [isa.Float(0.0)] * 4, range(len(totals))
        sums, halves = [zero for _ in tiles], 32 // self.scales.group
        for run in range(8):
            words = nibbles[run // 2][2 * (run % 2) :][:2]
            a, b = (self.pairs(isa, word, raised=True) for word in words)
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
