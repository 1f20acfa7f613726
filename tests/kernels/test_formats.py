import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.affine import FloatPair, KQuant
from pallas_kernels.formats import FORMATS
from pallas_kernels.layout import pack_fields, unpack_fields
from pallas_kernels.matmul_dense import Dense, matmul_dense_reference
from pallas_kernels.matmul_q2 import matmul_q2_reference
from pallas_kernels.matmul_q4 import Q4_K, matmul_q4_reference, quantise_q4_k
from pallas_kernels.matmul_q5 import matmul_q5_reference
from pallas_kernels.matmul_q6 import SixBit, matmul_q6_reference
from pallas_kernels.matmul_q8 import EightBit, matmul_q8_reference
from pallas_kernels.matmul_t4 import Table, matmul_t4_reference

NAMES = list(FORMATS)
SHORTEST = {"f32": 1, "f16": 1, "bf16": 1} | dict.fromkeys(
    ("q8_0", "q5_1", "q4_1", "q4_0", "iq4_nl", "mxfp4", "nvfp4"), 32
)
REFERENCES = {
    "q8_0": matmul_q8_reference,
    "q6_k": matmul_q6_reference,
    "q5_k": matmul_q5_reference,
    "q5_1": matmul_q5_reference,
    "q4_k": matmul_q4_reference,
    "q4_1": matmul_q4_reference,
    "q2_k": matmul_q2_reference,
    "f32": matmul_dense_reference,
    "f16": matmul_dense_reference,
    "bf16": matmul_dense_reference,
}
BITS_A_WEIGHT = {"q4_k": 4.625, "q5_k": 5.625, "q6_k": 6.5625, "q8_0": 8.5, "q2_k": 3.125}
BITS_A_WEIGHT |= {"q4_0": 4.5, "iq4_nl": 4.5, "iq4_xs": 4.3125, "q3_k": 4.5625, "iq3_s": 4.3125}


def shortest(name):
    return SHORTEST.get(name, 256)


def halves(rng, *shape):
    """Any finite fp16: both signs, zeros, subnormals, the largest."""
    bits = rng.integers(0, 2**16, shape, dtype=np.uint16)
    bits[bits & 0x7C00 == 0x7C00] &= 0x83FF
    return bits.view(np.float16)


def integers(rng, low, high, dtype, *shape):
    return rng.integers(low, high, shape, dtype=dtype)


def parts_and_values(layout, rng, rows, k):
    """Random parts of a format and what they mean, by the formula in float64 (exact there)."""

    def each(array, group):
        return np.repeat(array.astype(np.float64), group, axis=1)

    match layout:
        case Dense():
            values = halves(rng, rows, k).astype(layout.dtype)
            return {"values": values}, values.astype(np.float64)
        case EightBit():
            codes, d = integers(rng, -128, 128, np.int8, rows, k), halves(rng, rows, k // 32)
            return {"codes": codes, "d": d}, each(d, 32) * codes
        case SixBit():
            codes = integers(rng, 0, 64, np.uint8, rows, k)
            scales = integers(rng, -128, 128, np.int8, rows, k // 16)
            d = halves(rng, rows, k // 256)
            values = each(d, 256) * each(scales, 16) * (codes.astype(np.float64) - 32)
            return {"codes": codes, "scales": scales, "d": d}, values
        case KQuant():
            codes = integers(rng, 0, 2**layout.bits, np.uint8, rows, k)
            scales, mins = (
                integers(rng, 0, 64, np.uint8, rows, k // layout.group) for _ in range(2)
            )
            d, dmin = halves(rng, rows, k // 256), halves(rng, rows, k // 256)
            values = each(d, 256) * each(scales, layout.group) * codes
            values -= each(dmin, 256) * each(mins, layout.group)
            parts = {"codes": codes, "scales": scales, "mins": mins, "d": d, "dmin": dmin}
            return parts, values
        case FloatPair():
            codes = integers(rng, 0, 2**layout.bits, np.uint8, rows, k)
            d, m = halves(rng, rows, k // 32), halves(rng, rows, k // 32)
            return {"codes": codes, "d": d, "m": m}, each(d, 32) * codes + each(m, 32)
        case Table():
            codes = integers(rng, 0, 16, np.uint8, rows, k)
            parts = {"codes": codes}
            d = halves(rng, rows, k // layout.block).astype(layout.dtype)
            values = each(d, layout.block)
            if layout.group is not None:
                scales = integers(rng, -128, 128, np.int8, rows, k // layout.group)
                parts["scales"] = scales
                values = values * each(scales, layout.group)
            table = np.array(layout.values, np.float64) * layout.unit
            return parts | {"d": d}, values * table[codes]
    raise AssertionError(f"no oracle for {layout}")


def packed(layout, parts):
    return jax.tree.map(jnp.asarray, layout.pack(parts))


def unpacked(layout, planes):
    return jax.jit(layout.unpack)(planes)


def assert_same_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype == np.float32 and got.shape == want.shape
    differing = np.flatnonzero(got.view(np.uint32) != want.view(np.uint32))
    assert not differing.size, f"{differing.size} of {got.size}, first at {differing[0]}"


@pytest.mark.parametrize("name", NAMES)
def test_unpacking_under_jit_gives_the_exact_value_rounded_once(name):
    layout, rng = FORMATS[name], np.random.default_rng(NAMES.index(name))
    parts, values = parts_and_values(layout, rng, 16, 3 * shortest(name))
    got = unpacked(layout, packed(layout, parts))
    assert_same_bits(got, values.astype(np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_plane_specs_say_what_pack_writes(name):
    layout, k = FORMATS[name], 2 * shortest(name)
    planes = layout.pack(parts_and_values(layout, np.random.default_rng(0), 3, k)[0])
    specs = layout.plane_specs(3, k)
    assert planes.keys() == specs.keys()
    for plane, spec in specs.items():
        assert planes[plane].shape == spec.shape and planes[plane].dtype == spec.dtype
        assert planes[plane].shape[0] == 3, "planes are row-major"


@pytest.mark.parametrize("name", BITS_A_WEIGHT)
def test_formats_take_as_many_bits_a_weight_as_documented(name):
    specs = FORMATS[name].plane_specs(1, 256)
    num_bytes = sum(spec.size * spec.dtype.itemsize for spec in specs.values())
    assert num_bytes * 8 / 256 == BITS_A_WEIGHT[name]


@pytest.mark.parametrize("name", NAMES)
def test_leading_axes_and_chosen_rows_unpack_like_their_rows(name):
    layout, rng, k = FORMATS[name], np.random.default_rng(1), shortest(name)
    parts, values = parts_and_values(layout, rng, 6, k)
    planes = packed(layout, parts)
    stacked = jax.tree.map(lambda plane: plane.reshape(2, 1, 3, -1), planes)
    assert_same_bits(unpacked(layout, stacked), values.astype(np.float32).reshape(2, 1, 3, k))
    chosen = jax.tree.map(lambda plane: plane[jnp.array([4, 0, 4])], planes)
    assert_same_bits(unpacked(layout, chosen), values.astype(np.float32)[[4, 0, 4]])


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    rows=st.integers(1, 5),
    groups=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_number_of_rows_and_groups_unpacks_exactly(name, rows, groups, seed):
    layout, rng = FORMATS[name], np.random.default_rng(seed)
    parts, values = parts_and_values(layout, rng, rows, groups * shortest(name))
    assert_same_bits(unpacked(layout, packed(layout, parts)), values.astype(np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_reference_products_agree_with_float64(name):
    layout, rng = FORMATS[name], np.random.default_rng(2)
    parts, _ = parts_and_values(layout, rng, 24, 2 * shortest(name))
    for scale in parts.keys() & {"d", "dmin", "m", "values"}:
        parts[scale] = rng.standard_normal(parts[scale].shape).astype(parts[scale].dtype)
    planes = packed(layout, parts)
    weights = np.asarray(unpacked(layout, planes), np.float64)
    x = rng.standard_normal((5, weights.shape[1])).astype(np.float32)
    reference = REFERENCES.get(name, matmul_t4_reference)
    got = jax.jit(reference, static_argnames="layout")(jnp.asarray(x), planes, layout=layout)
    want = x.astype(np.float64) @ weights.T
    assert got.dtype == jnp.float32
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 1e-6


@pytest.mark.parametrize("name", [name for name in NAMES if shortest(name) > 1])
def test_a_row_that_is_not_whole_groups_is_refused(name):
    k = shortest(name) + shortest(name) // 2
    with pytest.raises(ValueError, match=f"k={k} must be a positive multiple of .*{name}"):
        FORMATS[name].plane_specs(4, k)
    with pytest.raises(ValueError, match="k=0 must be a positive multiple"):
        FORMATS[name].plane_specs(4, 0)


def test_parts_of_wrong_name_dtype_shape_or_range_are_refused():
    layout = FORMATS["q4_k"]
    good, _ = parts_and_values(layout, np.random.default_rng(3), 2, 256)
    layout.pack(good)
    with pytest.raises(ValueError, match="is made of"):
        layout.pack({name: part for name, part in good.items() if name != "dmin"})
    with pytest.raises(ValueError, match=r"'d' .* must be float16\[2, 1\], not float32\[2, 1\]"):
        layout.pack(good | {"d": good["d"].astype(np.float32)})
    with pytest.raises(ValueError, match=r"'scales' .* must be uint8\[2, 8\]"):
        layout.pack(good | {"scales": good["scales"][:, :4]})
    with pytest.raises(ValueError, match="code 16 does not fit bits=4"):
        layout.pack(good | {"codes": np.full((2, 256), 16, np.uint8)})


def test_dense_values_keep_every_bit_pattern_that_has_no_arithmetic():
    bits = np.arange(2**16, dtype=np.uint16)[None]
    for name in ("f16", "bf16"):
        values = bits.view(FORMATS[name].plane_specs(1, 1)["values"].dtype)
        planes = FORMATS[name].pack({"values": values})
        assert np.array_equal(planes["values"].view(np.uint16), bits)
        finite = np.isfinite(values.astype(np.float32))
        got = np.asarray(jax.jit(FORMATS[name].unpack)(planes))
        assert np.array_equal(got[finite], values.astype(np.float32)[finite])


@pytest.mark.parametrize(("width", "lanes"), [(4, 32), (4, 16), (2, 16), (1, 4), (1, 1), (2, 3)])
def test_fields_stand_in_their_bytes_by_the_documented_rule(width, lanes):
    rng, per_byte = np.random.default_rng(4), 8 // width
    fields = rng.integers(0, 2**width, (3, 2 * lanes * per_byte), dtype=np.uint8)
    plane = pack_fields(fields, width, lanes)
    for chunk, i, j in np.ndindex(2, per_byte, lanes):
        byte = plane[:, chunk * lanes + j]
        weight = chunk * lanes * per_byte + i * lanes + j
        assert np.array_equal((byte >> (width * i)) & (2**width - 1), fields[:, weight])
    assert np.array_equal(unpack_fields(plane, width, lanes), fields)


def test_q4_k_rounds_normal_values_by_seven_percent_and_keeps_what_it_can_hold():
    normal = np.random.default_rng(0).normal(size=(8, 512)).astype(np.float32)
    exact = np.tile(np.arange(16, dtype=np.float32) / 8 - 1, (2, 32))
    edges = np.zeros((4, 256), np.float32)
    edges[1] = 3.0
    edges[2] = -3.0
    edges[3, 7] = 1e-3
    for values, bound in ((normal, 0.072), (normal * 1e-2, 0.072), (exact, 1e-3), (edges, 1e-3)):
        made = quantise_q4_k(jnp.asarray(values))
        parts = {name: np.asarray(part) for name, part in made.items()}
        planes = {name: jnp.asarray(plane) for name, plane in Q4_K.pack(parts).items()}
        rounded = np.asarray(Q4_K.unpack(planes))
        assert np.linalg.norm(rounded - values) <= bound * np.linalg.norm(values)
