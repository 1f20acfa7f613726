"""Decoders of GGUF blocks that store indices into grids (IQ1, IQ2, IQ3) or four-bit floats.

Signed magnitudes become codes of a symmetric table: 8 + i is magnitude i and 7 - i its negative,
so a sign flips all four bits. Grids come from the gguf package, in the order of ggml-common.h.
"""

import functools

import gguf.quants
import numpy as np

from openjet_jax.convert.blocks import BlockParts, Blocks, field
from pallas_kernels.layout import unpack_fields
from pallas_kernels.matmul_dense import BF16


@functools.cache
def _grid(name: str) -> np.ndarray:
    """Returns a grid of positive magnitudes as words of codes: a byte each, 4 or 8 an entry."""
    codes = np.searchsorted(getattr(gguf.quants, name).grid_map, _values(name)) + 8
    return codes.astype(np.uint8).view(f"<u{codes.shape[1]}")[:, 0]


def _values(name: str) -> np.ndarray:
    quant = getattr(gguf.quants, name)
    quant.init_grid()
    return quant.grid.reshape(quant.grid_shape)


@functools.cache
def _flips() -> np.ndarray:
    """Returns, for a byte of sign bits, the word whose bytes are 15 where the sign is negative."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (bits * np.uint8(15)).view("<u8")[:, 0]


@functools.cache
def _even_flips() -> np.ndarray:
    """Returns the words for seven sign bits; the eighth sign makes the number of minuses even."""
    signs = np.arange(128, dtype=np.uint8)
    return _flips()[signs | (np.bitwise_count(signs) & 1) << 7]


@functools.cache
def _shifted_grid() -> np.ndarray:
    """Returns the IQ1 grid plus 1/8 (entries 0..2047) and minus 1/8, as words of codes of ±1, 7, 9.

    In eighths: -1 becomes -7 or -9, 0 becomes 1 or -1, 1 becomes 9 or 7.
    """
    codes = np.array([[6, 8, 10], [5, 7, 9]], np.uint8)  # of -7, 1, 9 and of -9, -1, 7
    shifted = codes.take(_values("IQ1_S").astype(np.int8) + 1, axis=1)
    return shifted.view("<u8").reshape(-1)


def _signed(words: np.ndarray, flips: np.ndarray) -> np.ndarray:
    """Returns codes [n, 256] of grid words [n, 32 or 64] and sign words [n, 32]."""
    return (np.ascontiguousarray(words).view("<u8") ^ flips).view(np.uint8)


def _odd(scales: np.ndarray) -> np.ndarray:
    """Returns the scale 2 s + 1 of stored scales s, as int8."""
    return (scales * 2 + 1).astype(np.int8)


def iq3_s(blocks: Blocks) -> BlockParts:
    """IQ3_S: d, 64 index bytes, 8 of ninth bits, 32 of signs, 4 of scale nibbles."""
    index = blocks[:, 2:66] | unpack_fields(blocks[:, 66:74], 1, 1).astype(np.uint16) << 8
    codes = _signed(_grid("IQ3_S")[index], _flips()[blocks[:, 74:106]])
    scales = _odd(unpack_fields(blocks[:, 106:110], 4, 1))
    return {"codes": codes, "scales": scales, "d": field(blocks, 0, 2, "<f2")}


def iq3_xxs(blocks: Blocks) -> BlockParts:
    """IQ3_XXS: d, 64 index bytes, 8 words of four sign sets of seven bits and a scale."""
    signs, scales = _signs_and_scales(field(blocks, 66, 98, "<u4"))
    codes = _signed(_grid("IQ3_XXS")[blocks[:, 2:66]], signs)
    return {"codes": codes, "scales": scales, "d": field(blocks, 0, 2, "<f2")}


def iq2_xxs(blocks: Blocks) -> BlockParts:
    """IQ2_XXS: d, 8 pairs of words: four index bytes; four sign sets of seven bits and a scale."""
    words = field(blocks, 2, 66, "<u4").reshape(-1, 8, 2)
    signs, scales = _signs_and_scales(words[:, :, 1])
    index = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    codes = _signed(_grid("IQ2_XXS")[index], signs)
    return {"codes": codes, "scales": np.repeat(scales, 2, 1), "d": field(blocks, 0, 2, "<f2")}


def iq2_xs(blocks: Blocks) -> BlockParts:
    """IQ2_XS: d, 32 words of a nine-bit index and seven signs, 8 bytes of scale nibbles."""
    words = field(blocks, 2, 66, "<u2")
    codes = _signed(_grid("IQ2_XS")[words & 511], _even_flips()[words >> 9])
    scales = _odd(unpack_fields(blocks[:, 66:74], 4, 1))
    return {"codes": codes, "scales": scales, "d": field(blocks, 0, 2, "<f2")}


def iq2_s(blocks: Blocks) -> BlockParts:
    """IQ2_S: d, 32 index bytes, 32 of signs, 8 of two more index bits, 8 of scale nibbles."""
    index = blocks[:, 2:34] | unpack_fields(blocks[:, 66:74], 2, 1).astype(np.uint16) << 8
    codes = _signed(_grid("IQ2_S")[index], _flips()[blocks[:, 34:66]])
    scales = _odd(unpack_fields(blocks[:, 74:82], 4, 1))
    return {"codes": codes, "scales": scales, "d": field(blocks, 0, 2, "<f2")}


def iq1_s(blocks: Blocks) -> BlockParts:
    """IQ1_S: d, 32 index bytes, 8 words of four three-bit index tops, a scale and a shift sign."""
    words = field(blocks, 34, 50, "<u2")
    tops = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16)) & 7
    tops |= (words >> 15 << 3)[:, :, None]
    index = blocks[:, 2:34] | tops.reshape(len(blocks), 32) << 8
    codes = _shifted_grid()[index].view(np.uint8)
    scales = np.repeat(_odd(words >> 12 & 7), 2, axis=1)
    return {"codes": codes, "scales": scales, "d": field(blocks, 0, 2, "<f2")}


def iq1_m(blocks: Blocks) -> BlockParts:
    """IQ1_M: 32 index bytes, 32 nibbles of an index top and a shift sign, 4 words of scales.

    The top nibbles of the words are d; the rest are four three-bit scales each.
    """
    words = field(blocks, 48, 56, "<u2")
    d = np.bitwise_or.reduce((words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16), axis=1)
    scales = words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7
    index = blocks[:, :32] | unpack_fields(blocks[:, 32:48], 4, 1).astype(np.uint16) << 8
    codes = _shifted_grid()[index].view(np.uint8)
    scales = _odd(scales.reshape(len(blocks), 16))
    return {"codes": codes, "scales": scales, "d": d.view(np.float16)[:, None]}


def mxfp4(blocks: Blocks) -> BlockParts:
    """MXFP4, 32 weights: an exponent byte e, 16 bytes of nibbles; d = 2 ** (e - 128).

    Raises:
      ValueError: non-zero weights have e below 2, where d is subnormal in float32.
    """
    codes, exponent = unpack_fields(blocks[:, 1:17], 4, 16), blocks[:, :1]
    if ((exponent < 2) & (codes & 7 != 0)).any():
        raise ValueError(
            "an MXFP4 block has non-zero weights and scale exponent 0 or 1: below 2**-126, which "
            "processors flush to zero; re-quantise it with llama-quantize, e.g. to Q8_0"
        )
    # bfloat16 is the upper half of float32, whose exponent field of 2 ** (e - 128) is e - 1.
    d = np.where(exponent < 2, 0, (exponent.astype(np.uint16) - 1) << 7).astype(np.uint16)
    return {"codes": codes, "d": d.view(BF16.dtype)}


def nvfp4(blocks: Blocks) -> BlockParts:
    """NVFP4, 64 weights: 4 scale bytes (unsigned e4m3), 32 bytes of nibbles, 8 for each scale."""
    return {"codes": unpack_fields(blocks[:, 4:36], 4, 8), "d": _e4m3_halves()[blocks[:, :4]]}


@functools.cache
def _e4m3_halves() -> np.ndarray:
    """Returns half the value of every e4m3 byte (the table is doubled); float16 holds them all."""
    return gguf.quants.NVFP4.ue4m3_to_fp32(np.arange(256, dtype=np.uint8)).astype(np.float16)


def _signs_and_scales(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns sign words [n, 32] and scales [n, 8] of words [n, 8]: 4 x 7 sign bits, 4 of scale."""
    sets = words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    return _even_flips()[sets.reshape(len(words), 32)], _odd(words >> 28)
