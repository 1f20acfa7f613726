from pathlib import Path

import gguf
import gguf.quants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from openjet_jax.convert import block_formats
from openjet_jax.convert.block_formats import (
    BLOCK_FORMATS,
    UnsupportedTypeError,
    packed_format_of,
    repack,
)
from pallas_kernels.formats import FORMATS

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "qwen35"
TYPES = [Type(number) for number in BLOCK_FORMATS]

# Where fp16 scales start in a block.
SCALES = {
    **dict.fromkeys([Type.Q8_0, Type.Q5_0, Type.Q4_0, Type.IQ4_NL, Type.IQ4_XS], [0]),
    **dict.fromkeys([Type.IQ3_S, Type.IQ3_XXS, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S], [0]),
    **dict.fromkeys([Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K], [0, 2]),
    Type.IQ1_S: [0],
    Type.Q6_K: [208],
    Type.Q3_K: [108],
    Type.Q2_K: [80, 82],
    Type.TQ1_0: [52],
    Type.TQ2_0: [64],
}

# Specification 11.1: elements 0..3, then sum and sum of absolute values, of one block.
SPEC_11_1 = {
    Type.Q8_0: ([5.3125, 7.625, -6.0625, -3.75], -11.0, 135.75),
    Type.Q4_0: ([-0.1875, 0.125, 0.4375, -0.25], -1.3125, 7.6875),
    Type.Q4_1: ([0.96875, 0.28125, 0.59375, 0.90625], 16.3125, 16.3125),
    Type.Q5_0: ([0.5625, -0.125, 0.1875, -0.5], 0.9375, 15.4375),
    Type.Q5_1: ([1.21875, 1.53125, 1.84375, 1.15625], 32.5625, 32.5625),
    Type.Q2_K: ([2.0625, 0.0, 0.6875, 1.375], 128.6875, 160.25),
    Type.Q3_K: ([5.0625, -6.75, 1.6875, -3.375], 59.875, 575.625),
    Type.Q4_K: ([19.71875, -1.59375, 8.09375, 17.78125], 3402.5, 3439.25),
    Type.Q5_K: ([50.71875, -1.59375, 39.09375, 17.78125], 7263.5, 7284.9375),
    Type.Q6_K: ([-89.4375, 106.0, 36.4375, -33.125], 288.25, 16656.375),
    Type.IQ4_NL: ([-2.1875, 1.5625, 7.0625, -3.0625], -16.0625, 106.5625),
    Type.IQ4_XS: ([4.0625, -0.0625, -4.3125, 5.1875], -687.8125, 10416.4375),
    Type.IQ3_S: ([-5.0625, 15.1875, -21.9375, -11.8125], 91.0, 1778.25),
}


def random_blocks(ggml_type, rows, blocks, seed=0):
    """Any block bytes whose scales are finite: [rows, bytes]."""
    rng = np.random.default_rng(seed)
    num_bytes = GGML_QUANT_SIZES[ggml_type][1]
    raw = rng.integers(0, 256, (rows * blocks, num_bytes), dtype=np.uint8)
    for start in SCALES.get(ggml_type, []):
        infinite = raw[:, start + 1] & 0x7C == 0x7C
        raw[infinite, start + 1] &= rng.choice(np.array([0x80, 0x83, 0xBF, 0xFB], np.uint8))
    if ggml_type == Type.IQ1_M:  # the exponent's upper bits are the last nibble
        raw[raw[:, 55] & 0x70 == 0x70, 55] &= 0x8F
    if ggml_type == Type.MXFP4:
        raw[:, 0] = rng.integers(2, 252, rows * blocks, dtype=np.uint8)
    if ggml_type in (Type.F16, Type.BF16):
        raw[:, 1] &= 0xBF
    return raw.reshape(rows, -1)


def unpacked(blocks, ggml_type):
    name, planes = repack(blocks, ggml_type)
    assert name == packed_format_of(ggml_type)
    return np.asarray(jax.jit(FORMATS[name].unpack)(planes))


def assert_same_bits(got, want):
    assert got.dtype == want.dtype == np.float32 and got.shape == want.shape
    differing = np.flatnonzero(got.view(np.uint32) != want.view(np.uint32))
    assert not differing.size, f"{differing.size} of {got.size}, first at {differing[0]}"


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
def test_unpacked_planes_equal_the_gguf_package_bit_for_bit(ggml_type):
    blocks = random_blocks(ggml_type, 64, 8)
    assert_same_bits(unpacked(blocks, ggml_type), gguf.quants.dequantize(blocks, ggml_type))


@pytest.mark.parametrize("ggml_type", SPEC_11_1, ids=lambda t: t.name)
def test_one_block_has_the_specified_values(ggml_type):
    num_bytes = GGML_QUANT_SIZES[ggml_type][1]
    block = ((37 * np.arange(num_bytes) + 11) % 256).astype(np.uint8)
    for start, scale in zip(SCALES[ggml_type], (0x2C00, 0x2800), strict=False):
        block[start : start + 2] = np.array([scale], "<u2").view(np.uint8)
    values = unpacked(block[None], ggml_type)[0].astype(np.float64)
    first, total, magnitude = SPEC_11_1[ggml_type]
    assert values[:4].tolist() == first
    assert values.sum() == total and np.abs(values).sum() == magnitude


@settings(max_examples=25, deadline=None)
@given(
    ggml_type=st.sampled_from(TYPES),
    rows=st.integers(1, 5),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_repacks_exactly(ggml_type, rows, blocks, seed):
    raw = random_blocks(ggml_type, rows, blocks, seed)
    name, planes = repack(raw, ggml_type)
    got = np.asarray(FORMATS[name].unpack(jax.tree.map(jnp.asarray, planes)))
    assert_same_bits(got, gguf.quants.dequantize(raw, ggml_type))


@pytest.mark.parametrize("ggml_type", [Type.Q4_K, Type.Q6_K, Type.IQ3_S], ids=lambda t: t.name)
def test_slabs_do_not_show_in_the_planes(ggml_type, monkeypatch):
    raw = random_blocks(ggml_type, 7, 2)
    _, whole = repack(raw, ggml_type)
    monkeypatch.setattr(block_formats, "_SLAB_WEIGHTS", 3 * 512)
    _, slabs = repack(raw, ggml_type)
    for name, plane in whole.items():
        assert np.array_equal(plane.view(np.uint8), slabs[name].view(np.uint8))


@pytest.mark.parametrize("case", sorted(GOLDEN.glob("*.gguf")), ids=lambda path: path.stem)
def test_golden_files_unpack_to_the_values_of_the_gguf_package(case):
    seen = {}
    for tensor in gguf.GGUFReader(case).tensors:
        if tensor.data.ndim == 2:
            seen.setdefault(tensor.tensor_type, tensor)
    for ggml_type, tensor in seen.items():
        got = unpacked(np.asarray(tensor.data), ggml_type)
        assert_same_bits(got, gguf.quants.dequantize(np.asarray(tensor.data), ggml_type))


def test_every_float_type_of_the_gguf_package_is_supported_or_refused_by_name():
    refused = sorted(set(Type) - set(TYPES))
    assert [Type(number).name for number in refused] == (
        "Q8_1 Q8_K I8 I16 I32 I64 F64 Q1_0".split()
    )
    for number in (*refused, 12345):
        assert packed_format_of(number) is None
        with pytest.raises(UnsupportedTypeError, match=rf"ggml type {int(number)} \(.*Q4_K"):
            repack(np.zeros((1, 256), np.uint8), number)


def test_a_broken_row_is_refused():
    with pytest.raises(ValueError, match="143 bytes is not a whole number of Q4_K blocks of 144"):
        repack(np.zeros((2, 143), np.uint8), Type.Q4_K)


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_a_scale_that_is_not_finite_is_refused(bits):
    raw = random_blocks(Type.Q4_K, 3, 2)
    raw[1, 146:148] = np.array([bits], "<u2").view(np.uint8)
    with pytest.raises(ValueError, match="a Q4_K block has a NaN or infinite scale 'dmin'"):
        repack(raw, Type.Q4_K)


def test_mxfp4_scales_below_the_smallest_normal_float_need_zero_weights():
    raw = random_blocks(Type.MXFP4, 1, 2)
    raw[0, 0], raw[0, 1:17] = 1, 0x80
    assert_same_bits(unpacked(raw, Type.MXFP4), gguf.quants.dequantize(raw, Type.MXFP4))
    raw[0, 5] = 0x03
    with pytest.raises(ValueError, match="MXFP4 block has non-zero weights"):
        repack(raw, Type.MXFP4)
