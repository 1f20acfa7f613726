"""Blocks of `decode_blocks` as the left-hand operand of large products: float16 weights.

A weight times 64 is a float16: within 2^-10 of its value down to 10^-6, and finite up to 1,023. The
bits of codes become float16 as in `decode_words`; what they carry in excess is taken off exactly,
and one multiply-add a pair gives the weights. Scales and mins are products in float32, rounded to
float16 once.
"""

from typing import Any, Protocol

from pallas_kernels.decode_blocks import BLOCKS
from pallas_kernels.decode_k_blocks import HalfRunBlock, KBlock, Q2KBlock
from pallas_kernels.decode_run_blocks import ByteBlock, PairBlock
from pallas_kernels.decode_scales import load_bytes
from pallas_kernels.decode_signed_blocks import SignedBlock
from pallas_kernels.decode_words import nibble_pairs

WEIGHT_SCALE = 64
"""What weights are multiplied by."""

_SIXTEENTH = 0x2C002C00
_HALVES = {-1024: 0xE400E400, -1056: 0xE420E420, -1152: 0xE480E480}
_HALVES |= {-1536: 0xE600E600, -18432: 0xF480F480, 4096: 0x6C006C00}


class DenseBlock(Protocol):
    """How a warp makes float16 weights of a block in shared memory."""

    def scales(self, isa, address, lane) -> list[Any]:
        """Returns the registers that all runs of a block need."""
        ...

    def weights(self, isa, address, lane, scales, run: int) -> list[list[Any]]:
        """Returns the two left-hand fragments (`ptx.mma`) of a run of 32 weights, times 64."""
        ...


def _doubled(isa, value) -> Any:
    """Returns a float32 as a pair of equal float16."""
    return isa.pack_halves(value, value)


def _codes(isa, address, lane, run: int) -> list[Any]:
    """Returns the nibbles of a run of rows g and g + 8."""
    return isa.load_shared(address + lane * 16, 512 * (run // 2) + 8 * (run % 2), 2)


def _nibbles(isa, bits: int, address, lane, run: int) -> tuple[list[list[Any]], list[Any] | None]:
    """Returns the nibbles and fifth bits of a run, where `nibble_pairs` looks for them."""
    codes, fifths = _codes(isa, address, lane, run), None
    if bits == 5:
        fifths = isa.load_shared(address + lane * 16, 2048 + 4 * (run // 2), 1) * 4
    return [[*codes, *codes]] * 4, fifths


def _fragments(rows: list[list[Any]]) -> list[list[Any]]:
    """Returns fragments of the pairs of rows g and g + 8: [half][e] each."""
    a, b = rows
    return [[a[i], b[i], a[i + 1], b[i + 1]] for i in (0, 2)]


def _scaled(isa, pairs: list[Any], scale, low) -> list[Any]:
    """Returns scale * code + low of pairs of a run, [half][e], that carry 1024."""
    scale, low = _doubled(isa, scale), _doubled(isa, low)
    sixteenth = isa.multiply_halves(scale, _SIXTEENTH)
    return [
        isa.multiply_add_halves(
            isa.add_halves(pair, _HALVES[-1024]), sixteenth if i % 2 else scale, low
        )
        for i, pair in enumerate(pairs)
    ]


class _DenseK:
    """q4_k and q5_k: `d * scale * code - dmin * min`."""

    def __init__(self, block: KBlock):
        """Takes the block."""
        self.block = block

    def scales(self, isa, address, lane) -> list[Any]:
        """Returns scale bytes, min bytes, and 64 d and -64 dmin of both rows."""
        group, at = lane >> 2, self.block.scales_at
        pair = isa.load_shared(address + group * 8, at + 256, 2)
        size = isa.Float(float(WEIGHT_SCALE))
        return [
            isa.load_shared(address + group * 16, at, 4),
            isa.load_shared(address + group * 16, at + 128, 4),
            [isa.half_to_float(word, False) * size for word in pair],
            [-(isa.half_to_float(word, True) * size) for word in pair],
        ]

    def weights(self, isa, address, lane, scales, run: int) -> list[list[Any]]:
        """Returns fragments; see `DenseBlock`."""
        scale_bytes, min_bytes, d, dmin = scales
        nibbles, fifths = _nibbles(isa, self.block.bits, address, lane, run)
        rows = []
        for row in (0, 1):
            pairs = nibble_pairs(isa, nibbles, fifths, run, row)
            scale = isa.byte_to_float(scale_bytes[2 * row + run // 4], run % 4) * d[row]
            low = isa.byte_to_float(min_bytes[run // 2], 2 * row + run % 2) * dmin[row]
            rows.append(_scaled(isa, pairs, scale, low))
        return _fragments(rows)


class _DensePair:
    """q4_0, q4_1 and q5_1: `d * code + m`."""

    def __init__(self, block: PairBlock):
        """Takes the block."""
        self.block = block

    def scales(self, isa, address, lane) -> list[Any]:
        """Returns the d of all runs of both rows, as pairs, and the m."""
        numbers, at = self.block.numbers, (self.block.scales_at, self.block.mins_at)
        d = numbers.load(isa, address, lane, at[0])
        return [d, d if self.block.low is not None else numbers.load(isa, address, lane, at[1])]

    def weights(self, isa, address, lane, scales, run: int) -> list[list[Any]]:
        """Returns fragments; see `DenseBlock`."""
        nibbles, fifths = _nibbles(isa, self.block.bits, address, lane, run)
        size, low = isa.Float(float(WEIGHT_SCALE)), self.block.low
        times, rows = isa.Float(WEIGHT_SCALE * (1.0 if low is None else low)), []
        for row in (0, 1):
            pairs = nibble_pairs(isa, nibbles, fifths, run, row)
            d, m = (self.block.numbers.of_group(isa, loaded, row, run) for loaded in scales)
            rows.append(_scaled(isa, pairs, d * size, m * times))
        return _fragments(rows)


class _DenseHalfRun:
    """q6_k, q3_k: `d * scale * (code - 32)`, a scale for each half of a run."""

    def __init__(self, block: HalfRunBlock):
        """Takes the block."""
        self.block = block

    def scales(self, isa, address, lane) -> list[Any]:
        """Returns scales, and 64 d of both rows."""
        block = self.block
        scales = block.scales.load(isa, address, lane, block.scales_at)
        return [scales, block.scales.of_block(isa, scales, WEIGHT_SCALE * block.unit)]

    def weights(self, isa, address, lane, scales, run: int) -> list[list[Any]]:
        """Returns fragments; see `DenseBlock`."""
        loaded, d = scales
        codes, high = _codes(isa, address, lane, run), None
        if self.block.bits == 6:
            at = 2048 + 512 * (run // 4) + 8 * (run // 2 % 2)
            high = isa.load_shared(address + lane * 16, at, 2)
            high = [[*high, *high]] * 2
        nibbles, rows = [[*codes, *codes]] * 4, []
        for row in (0, 1):
            pairs, made = self.block.pairs(isa, nibbles, high, run, row), []
            for i, pair in enumerate(pairs):
                number = self.block.scales.of_group(isa, loaded, row, 2 * run + i // 2)
                scale = _doubled(isa, number * d[row])
                if i % 2:
                    scale = isa.multiply_halves(scale, _SIXTEENTH)
                excess = _HALVES[-1536 if i % 2 else -1056]
                made.append(isa.multiply_halves(isa.add_halves(pair, excess), scale))
            rows.append(made)
        return _fragments(rows)


class _DenseQ2K:
    """q2_k: `d * scale * code - dmin * min`, both for each half of a run."""

    def __init__(self, block: Q2KBlock):
        """Takes the block."""
        self.block = block

    def scales(self, isa, address, lane) -> list[Any]:
        """Returns scale bytes, min bytes, and 64 d and -64 dmin of both rows."""
        group, size = lane >> 2, isa.Float(float(WEIGHT_SCALE))
        pair = isa.load_shared(address + group * 8, 1536, 2)
        return [
            load_bytes(isa, address, group, 1024, 16),
            load_bytes(isa, address, group, 1280, 16),
            [isa.half_to_float(word, False) * size for word in pair],
            [-(isa.half_to_float(word, True) * size) for word in pair],
        ]

    def weights(self, isa, address, lane, scales, run: int) -> list[list[Any]]:
        """Returns fragments; see `DenseBlock`."""
        scale_bytes, min_bytes, d, dmin = scales
        (word,) = isa.load_shared(address + lane * 16, 512 * (run // 4) + 4 * (run % 4), 1)
        rows = []
        for row in (0, 1):
            made = []
            for half in (0, 1):
                place = (2 * run + half) // 4, (2 * run + half) % 4
                scale = isa.byte_to_float(scale_bytes[row][place[0]], place[1]) * d[row]
                low = isa.byte_to_float(min_bytes[row][place[0]], place[1]) * dmin[row]
                scale, low = _doubled(isa, scale), _doubled(isa, low)
                plain, raised = self.block.pairs(isa, word, row, half)
                for pair, excess, times in (
                    (plain, -1056, scale),
                    (raised, -1536, isa.multiply_halves(scale, _SIXTEENTH)),
                ):
                    code = isa.add_halves(pair, _HALVES[excess])
                    made.append(isa.multiply_add_halves(code, times, low))
            rows.append(made)
        return _fragments(rows)


class _DenseByte:
    """q8_0, iq4_nl and iq4_xs: the scale times bytes that carry 128."""

    def __init__(self, block: ByteBlock):
        """Takes the block."""
        self.block = block

    def scales(self, isa, address, lane) -> list[Any]:
        """Returns scales, and what all of them are multiplied by, for both rows."""
        scales = self.block.scales.load(isa, address, lane, self.block.scales_at)
        return [scales, self.block.scales.of_block(isa, scales, float(WEIGHT_SCALE))]

    def weights(self, isa, address, lane, scales, run: int) -> list[list[Any]]:
        """Returns fragments; see `DenseBlock`."""
        loaded, d = scales
        if self.block.table is None:
            words = isa.load_shared(address + lane * 16, 512 * run, 4)
        else:
            words = _codes(isa, address, lane, run)
        rows = []
        for row, codes in enumerate(self.block.codes(isa, words)):
            scale = _doubled(isa, self.block.scales.of_group(isa, loaded, row, run) * d[row])
            sixteenth, made = isa.multiply_halves(scale, _SIXTEENTH), []
            for word in codes:
                plain = isa.permute_bytes(word, 0x64746474, 0x5150)
                raised = isa.permute_bytes(word, 0x64746474, 0x4342)
                plain = isa.add_halves(plain, _HALVES[-1152])
                raised = isa.add_halves(raised, _HALVES[-18432])
                made.append(isa.multiply_halves(plain, scale))
                made.append(isa.multiply_halves(raised, sixteenth))
            rows.append(made)
        return _fragments(rows)


class _DenseSigned:
    """Tables of signed magnitudes: the scale times a value."""

    def __init__(self, block: SignedBlock):
        """Takes the block."""
        self.block = block

    def scales(self, isa, address, lane) -> list[Any]:
        """Returns scales, and what all of them are multiplied by, for both rows."""
        block, unit = self.block, WEIGHT_SCALE * self.block.format.unit
        scales = block.scales.load(isa, address, lane, block.scales_at)
        return [scales, block.scales.of_block(isa, scales, unit)]

    def weights(self, isa, address, lane, scales, run: int) -> list[list[Any]]:
        """Returns fragments; see `DenseBlock`."""
        loaded, d = scales
        numbers, rows = self.block.scales, []
        for row, word in enumerate(_codes(isa, address, lane, run)):
            made = []
            for i, pair in enumerate(self.block.pairs(isa, word, raised=False)):
                index = run if numbers.group == 32 else 2 * run + i // 2
                scale = _doubled(isa, numbers.of_group(isa, loaded, row, index) * d[row])
                # A value is 2^24 times what it is as a pair, more than a float16 holds.
                value = isa.multiply_halves(isa.multiply_halves(pair, _HALVES[4096]), _HALVES[4096])
                made.append(isa.multiply_halves(value, scale))
            rows.append(made)
        return _fragments(rows)


_KINDS: dict[type, type] = {
    KBlock: _DenseK,
    HalfRunBlock: _DenseHalfRun,
    Q2KBlock: _DenseQ2K,
    PairBlock: _DensePair,
    ByteBlock: _DenseByte,
    SignedBlock: _DenseSigned,
}

DENSE_BLOCKS: dict[str, DenseBlock] = {
    name: _KINDS[type(block)](block) for name, block in BLOCKS.items()
}
"""What makes weights of each kind of block, by the name of its format."""
