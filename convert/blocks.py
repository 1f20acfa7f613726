"""Decoders of GGUF blocks whose codes stand in the block as they are: bytes to codes and scales.

Every decoder takes blocks uint8 [n, bytes per block] and returns the parts of a packed format,
arrays [n, per block]. Layouts are those of ggml-quants.c. Runs of bits all follow one rule, that
of `unpack_fields`: byte j of a chunk of `lanes` bytes holds weights j, j + lanes, j + 2 lanes, ...
"""

import numpy as np

from pallas_kernels.layout import unpack_fields
from pallas_kernels.matmul_dense import BF16

type Blocks = np.ndarray
"""uint8 [n, bytes per block]."""

type BlockParts = dict[str, np.ndarray]
"""Parts of n blocks: arrays [n, per block]."""


def field(blocks: Blocks, start: int, stop: int, dtype: str) -> np.ndarray:
    """Returns bytes start..stop of every block as little-endian numbers [n, count]."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def f32(blocks: Blocks) -> BlockParts:
    """F32: a value is a block."""
    return {"values": blocks.view("<f4")}


def f16(blocks: Blocks) -> BlockParts:
    """F16: a value is a block."""
    return {"values": blocks.view("<f2")}


def bf16(blocks: Blocks) -> BlockParts:
    """BF16: a value is a block."""
    return {"values": blocks.view(BF16.dtype)}


def q8_0(blocks: Blocks) -> BlockParts:
    """Q8_0, 32 weights: d, 32 signed bytes."""
    return {"codes": field(blocks, 2, 34, "i1"), "d": field(blocks, 0, 2, "<f2")}


def q5_0(blocks: Blocks) -> BlockParts:
    """Q5_0, 32 weights: d, 32 high bits, 16 bytes of nibbles; the code less 16 is a q8_0 code."""
    codes = _five_bits(blocks[:, 6:22], blocks[:, 2:6]).view(np.int8) - np.int8(16)
    return {"codes": codes, "d": field(blocks, 0, 2, "<f2")}


def q5_1(blocks: Blocks) -> BlockParts:
    """Q5_1, 32 weights: d, m, 32 high bits, 16 bytes of nibbles."""
    codes = _five_bits(blocks[:, 8:24], blocks[:, 4:8])
    return {"codes": codes, "d": field(blocks, 0, 2, "<f2"), "m": field(blocks, 2, 4, "<f2")}


def q4_0(blocks: Blocks) -> BlockParts:
    """Q4_0 and IQ4_NL, 32 weights: d, 16 bytes of nibbles."""
    return {"codes": unpack_fields(blocks[:, 2:18], 4, 16), "d": field(blocks, 0, 2, "<f2")}


def q4_1(blocks: Blocks) -> BlockParts:
    """Q4_1, 32 weights: d, m, 16 bytes of nibbles."""
    codes = unpack_fields(blocks[:, 4:20], 4, 16)
    return {"codes": codes, "d": field(blocks, 0, 2, "<f2"), "m": field(blocks, 2, 4, "<f2")}


def q4_k(blocks: Blocks) -> BlockParts:
    """Q4_K, 256 weights: d, dmin, 12 bytes of six-bit scales and mins, 128 bytes of nibbles."""
    return {"codes": unpack_fields(blocks[:, 16:144], 4, 32), **_scales_and_mins(blocks)}


def q5_k(blocks: Blocks) -> BlockParts:
    """Q5_K, 256 weights: as Q4_K, with 32 bytes of high bits before the nibbles."""
    codes = unpack_fields(blocks[:, 48:176], 4, 32)
    codes |= unpack_fields(blocks[:, 16:48], 1, 32) << 4
    return {"codes": codes, **_scales_and_mins(blocks)}


def q6_k(blocks: Blocks) -> BlockParts:
    """Q6_K, 256 weights: 128 bytes of nibbles, 64 of high bit pairs, 16 signed scales, d."""
    codes = unpack_fields(blocks[:, :128], 4, 64)
    codes |= unpack_fields(blocks[:, 128:192], 2, 32) << 4
    scales, d = field(blocks, 192, 208, "i1"), field(blocks, 208, 210, "<f2")
    return {"codes": codes, "scales": scales, "d": d}


def q2_k(blocks: Blocks) -> BlockParts:
    """Q2_K, 256 weights: 16 bytes of (scale, min) nibbles, 64 of bit pairs, d, dmin."""
    return {
        "codes": unpack_fields(blocks[:, 16:80], 2, 32),
        "scales": blocks[:, :16] & 15,
        "mins": blocks[:, :16] >> 4,
        "d": field(blocks, 80, 82, "<f2"),
        "dmin": field(blocks, 82, 84, "<f2"),
    }


def q3_k(blocks: Blocks) -> BlockParts:
    """Q3_K, 256 weights: 32 bytes of high bits, 64 of bit pairs, 12 of six-bit scales, d.

    The value is pair - 4 where the high bit is clear, so pair + 4 * bit + 4 in a table from -8.
    """
    codes = (unpack_fields(blocks[:, :32], 1, 32) + np.uint8(1)) << 2
    codes += unpack_fields(blocks[:, 32:96], 2, 32)
    scales = unpack_fields(blocks[:, 96:104], 4, 8) | unpack_fields(blocks[:, 104:108], 2, 4) << 4
    scales = scales.view(np.int8) - np.int8(32)
    return {"codes": codes, "scales": scales, "d": field(blocks, 108, 110, "<f2")}


def iq4_xs(blocks: Blocks) -> BlockParts:
    """IQ4_XS, 256 weights: d, 2 + 4 bytes of six-bit scales, 128 bytes of nibbles."""
    scales = unpack_fields(blocks[:, 4:8], 4, 1) | unpack_fields(blocks[:, 2:4], 2, 1) << 4
    scales = scales.view(np.int8) - np.int8(32)
    codes = unpack_fields(blocks[:, 8:136], 4, 16)
    return {"codes": codes, "scales": scales, "d": field(blocks, 0, 2, "<f2")}


def tq1_0(blocks: Blocks) -> BlockParts:
    """TQ1_0, 256 weights: 52 bytes of base-3 digits, d. Values -1, 0, 1 in q4_0's table from -8."""
    digits = [
        (blocks[:, start:stop].reshape(-1, 1, stop - start) * powers[:, None]).reshape(
            len(blocks), -1
        )
        for start, stop, powers in (
            (0, 32, _POWERS_OF_3),
            (32, 48, _POWERS_OF_3),
            (48, 52, _POWERS_OF_3[:4]),
        )
    ]
    codes = (np.concatenate(digits, axis=1).astype(np.uint16) * 3 >> 8).astype(np.uint8) + 7
    return {"codes": codes, "d": np.repeat(field(blocks, 52, 54, "<f2"), 8, axis=1)}


def tq2_0(blocks: Blocks) -> BlockParts:
    """TQ2_0, 256 weights: 64 bytes of bit pairs, d. Values -1..2 in q4_0's table from -8."""
    codes = unpack_fields(blocks[:, :64], 2, 32) + np.uint8(7)
    return {"codes": codes, "d": np.repeat(field(blocks, 64, 66, "<f2"), 8, axis=1)}


_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], np.uint8)


def _five_bits(nibbles: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Returns codes of 32-weight blocks: 16 bytes of nibbles, 4 of high bits in order."""
    return unpack_fields(nibbles, 4, 16) | unpack_fields(high, 1, 1) << 4


def _scales_and_mins(blocks: Blocks) -> BlockParts:
    """Returns d, dmin and the eight six-bit scales and mins in bytes 4..16 of Q4_K and Q5_K.

    Words a, b, c: the low six bits of a and b are scales and mins 0..3; c has the low nibbles of
    scales (low) and mins (high) 4..7, whose top two bits are those of a and b.
    """
    a, b, c = field(blocks, 4, 16, "<u4").T
    top, nibbles = np.uint32(0x30303030), np.uint32(0x0F0F0F0F)
    scales = np.stack([a & 0x3F3F3F3F, (c & nibbles) | ((a >> 2) & top)], axis=1)
    mins = np.stack([b & 0x3F3F3F3F, ((c >> 4) & nibbles) | ((b >> 2) & top)], axis=1)
    d, dmin = field(blocks, 0, 2, "<f2"), field(blocks, 2, 4, "<f2")
    return {"scales": scales.view(np.uint8), "mins": mins.view(np.uint8), "d": d, "dmin": dmin}
