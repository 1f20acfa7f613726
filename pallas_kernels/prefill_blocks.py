"""Blocks of `decode_blocks` as the left-hand operand of large products: float16 weights.

A weight times 64 is a float16: within 2^-10 of its value down to 10^-6, and finite up to 1,023. The
bits of codes become float16 as in `decode_blocks`; what they carry in excess is taken off exactly,
and one multiply-add a pair gives the weights. Scales and mins are products in float32, rounded to
float16 once.
"""

from typing import Any, Protocol

from pallas_kernels.decode_blocks import BLOCKS, KBlock, Q6KBlock, Q80Block

WEIGHT_SCALE = 64
"""What weights are multiplied by."""

_SIXTEENTH = 0x2C002C00
_HALVES = {-1024: 0xE400E400, -1056: 0xE420E420, -1152: 0xE480E480}
_HALVES |= {-1536: 0xE600E600, -18432: 0xF480F480}


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


def _fragments(rows: list[list[Any]]) -> list[list[Any]]:
    """Returns fragments of the pairs of rows g and g + 8: [half][e] each."""
    a, b = rows
    return [[a[i], b[i], a[i + 1], b[i + 1]] for i in (0, 2)]


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
        codes, high = _codes(isa, address, lane, run), None
        if self.block.bits == 5:
            high = isa.load_shared(address + lane * 16, 2048 + 4 * (run // 2), 1) * 4
        nibbles = [[*codes, *codes]] * 4
        rows = []
        for row in (0, 1):
            pairs = self.block.pairs(isa, nibbles, high, run, row)
            scale = isa.byte_to_float(scale_bytes[2 * row + run // 4], run % 4) * d[row]
            low = isa.byte_to_float(min_bytes[run // 2], 2 * row + run % 2) * dmin[row]
            scale, low = _doubled(isa, scale), _doubled(isa, low)
            sixteenth = isa.multiply_halves(scale, _SIXTEENTH)
            rows.append(
                [
                    isa.multiply_add_halves(
                        isa.add_halves(pair, _HALVES[-1024]), sixteenth if i % 2 else scale, low
                    )
                    for i, pair in enumerate(pairs)
                ]
            )
        return _fragments(rows)


class _DenseQ6K:
    """q6_k: `d * scale * (code - 32)`, a scale for each half of a run."""

    def __init__(self, block: Q6KBlock):
        """Takes the block."""
        self.block = block

    def scales(self, isa, address, lane) -> list[Any]:
        """Returns scale bytes and 64 d of both rows."""
        group = lane >> 2
        (pair,) = isa.load_shared(address + group * 4, 3328, 1)
        size = isa.Float(float(WEIGHT_SCALE))
        return [
            [isa.load_shared(address + group * 32, 3072 + 16 * h, 4) for h in (0, 1)],
            [isa.half_to_float(pair, high) * size for high in (False, True)],
        ]

    def weights(self, isa, address, lane, scales, run: int) -> list[list[Any]]:
        """Returns fragments; see `DenseBlock`."""
        scale_bytes, d = scales
        codes = _codes(isa, address, lane, run)
        at = 2048 + 512 * (run // 4) + 8 * (run // 2 % 2)
        high = isa.load_shared(address + lane * 16, at, 2)
        nibbles, high = [[*codes, *codes]] * 4, [[*high, *high]] * 2
        rows = []
        for row in (0, 1):
            pairs, made = self.block.pairs(isa, nibbles, high, run, row), []
            for i, pair in enumerate(pairs):
                index = 2 * run + i // 2
                byte = isa.byte_to_float(scale_bytes[row][index // 4], index % 4, True)
                scale = _doubled(isa, byte * d[row])
                if i % 2:
                    scale = isa.multiply_halves(scale, _SIXTEENTH)
                excess = _HALVES[-1536 if i % 2 else -1056]
                made.append(isa.multiply_halves(isa.add_halves(pair, excess), scale))
            rows.append(made)
        return _fragments(rows)


class _DenseQ80:
    """q8_0: `d * (code - 128)` of codes plus 128."""

    def __init__(self, block: Q80Block):
        """Takes the block."""
        self.block = block

    def scales(self, isa, address, lane) -> list[Any]:
        """Returns the scales of all runs of both rows, as pairs."""
        at = address + (lane >> 2) * 32
        return [isa.load_shared(at, 4096 + 16 * h, 4) for h in (0, 1)]

    def weights(self, isa, address, lane, scales, run: int) -> list[list[Any]]:
        """Returns fragments; see `DenseBlock`."""
        words = isa.load_shared(address + lane * 16, 512 * run, 4)
        size, rows = isa.Float(float(WEIGHT_SCALE)), []
        for row in (0, 1):
            d = isa.half_to_float(scales[row][run // 2], bool(run % 2)) * size
            scale = _doubled(isa, d)
            sixteenth, made = isa.multiply_halves(scale, _SIXTEENTH), []
            for word in words[2 * row : 2 * row + 2]:
                plain = isa.permute_bytes(word, 0x64746474, 0x5150)
                raised = isa.permute_bytes(word, 0x64746474, 0x4342)
                plain = isa.add_halves(plain, _HALVES[-1152])
                raised = isa.add_halves(raised, _HALVES[-18432])
                made.append(isa.multiply_halves(plain, scale))
                made.append(isa.multiply_halves(raised, sixteenth))
            rows.append(made)
        return _fragments(rows)


_KINDS: dict[type, type] = {KBlock: _DenseK, Q6KBlock: _DenseQ6K, Q80Block: _DenseQ80}

DENSE_BLOCKS: dict[str, DenseBlock] = {
    name: _KINDS[type(block)](block) for name, block in BLOCKS.items()
}
"""What makes weights of each kind of block, by the name of its format."""
