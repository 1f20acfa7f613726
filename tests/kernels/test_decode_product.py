"""Decode products: what they refuse, that they lower and compile, and on a GPU that they are right.

Their arithmetic is tested without a GPU in test_decode_blocks.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_activations import prepare
from pallas_kernels.decode_blocks import BLOCKS
from pallas_kernels.decode_cuts import Tiles, default_tiles
from pallas_kernels.decode_product import decode_product
from tests.kernels.warp_model import random_planes

pytest.importorskip("jax.experimental.pallas.mosaic_gpu")


def _operands(block, rows=8, k=2048, outputs=64, layers=2):
    x = jax.ShapeDtypeStruct((rows, k), jnp.float32)
    activations = jax.eval_shape(lambda x: prepare(x, block), x)
    words = k // 256 * block.words
    weights = jax.ShapeDtypeStruct((layers, outputs // 16, words), jnp.uint32)
    return activations, weights, jax.ShapeDtypeStruct((1,), jnp.int32)


def _shape(block, tiles, operands, epilogue="none"):
    static: dict[str, Any] = dict(block=block, tiles=tiles, epilogue=epilogue)
    return jax.eval_shape(functools.partial(decode_product, **static), *operands)


@pytest.mark.parametrize(
    ("name", "rows", "tiles", "epilogue"),
    [
        ("q4_k", 8, Tiles(), "silu_gate"),
        ("q5_k", 8, Tiles(parts=2, warpgroups=2), "none"),
        ("q6_k", 16, Tiles(sharers=2), "none"),
        ("q8_0", 8, Tiles(overlap=True, stages=3), "none"),
        ("q2_k", 8, Tiles(), "none"),
        ("q3_k", 16, Tiles(), "none"),
        ("q4_0", 8, Tiles(), "silu_gate"),
        ("iq4_xs", 8, Tiles(), "silu_gate"),
        ("mxfp4", 16, Tiles(), "none"),
    ],
)
def test_a_product_lowers_for_a_gpu_on_a_host_without_one(name, rows, tiles, epilogue):
    block = BLOCKS[name]
    operands = _operands(block, rows=rows)
    run = functools.partial(decode_product, block=block, tiles=tiles, epilogue=epilogue)
    lowered = jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",))
    assert f"decode_product_{name}_kernel" in lowered.as_text()
    assert lowered.out_info.shape == (rows, 64 if epilogue == "none" else 32)


KINDS = ["q4_k", "q6_k", "q8_0", "q2_k", "q3_k", "q4_0", "q5_1", "iq4_xs", "mxfp4", "nvfp4"]
"""Formats with every kind of block, and of scales, among them."""

PUBLISHED = [
    *((248320, hidden) for hidden in (1024, 2048, 2560, 4096, 5120)),
    *((1024, ffn) for ffn in (2048, 3584)),
    *((2560, k) for k in (4096, 5120, 9216)),
    *((4096, k) for k in (8192, 12288)),
    *((5120, k) for k in (6144, 10240, 17408)),
    *((outputs, 5120) for outputs in (10240, 14336, 16384, 17408, 34816)),
]
"""Outputs and K of projections of the 0.8B to 27B models."""


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda b: b.format.name)
def test_a_default_cut_fits_the_projections_of_published_models(block, rows):
    for outputs, k in PUBLISHED:
        tiles = default_tiles(block, outputs, k, rows)
        operands = _operands(block, rows=rows, k=k, outputs=outputs)
        assert _shape(block, tiles, operands).shape == (rows, outputs)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda b: b.format.name)
def test_a_default_cut_keeps_two_warpgroups_busy_in_decoding(block):
    for outputs, k in PUBLISHED:
        assert default_tiles(block, outputs, k).warpgroups >= 2


def test_activations_prepared_for_another_block_are_refused():
    _, weights, layer = _operands(BLOCKS["q4_k"])
    other, *_ = _operands(BLOCKS["q6_k"])
    with pytest.raises(ValueError, match="prepare them for this block"):
        _shape(BLOCKS["q4_k"], Tiles(), (other, weights, layer))


def test_a_matrix_of_another_width_is_refused():
    activations, *_ = _operands(BLOCKS["q4_k"], k=1024)
    _, weights, layer = _operands(BLOCKS["q4_k"], k=2048)
    with pytest.raises(ValueError, match="do not hold K=1024"):
        _shape(BLOCKS["q4_k"], Tiles(), (activations, weights, layer))


def test_a_cut_that_needs_too_much_shared_memory_is_refused():
    with pytest.raises(ValueError, match="take fewer stages or more parts"):
        _shape(BLOCKS["q4_k"], Tiles(stages=8), _operands(BLOCKS["q4_k"], k=5120))


@pytest.mark.parametrize(
    "wrong",
    [dict(warpgroups=5), dict(stages=0), dict(parts=3), dict(parts=2, grid=131)],
    ids=str,
)
def test_impossible_cuts_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        Tiles(**wrong)


def test_an_unknown_epilogue_is_refused():
    with pytest.raises(ValueError, match="'none' or 'silu_gate'"):
        _shape(BLOCKS["q4_k"], Tiles(), _operands(BLOCKS["q4_k"]), epilogue="gelu")


def test_rows_of_any_size_are_scaled_into_half_precision():
    x = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
    x *= np.float32(10.0) ** np.array([-30, -5, 0, 3, 5, 10, 20, 30], np.float32)[:, None]
    activations = prepare(jnp.asarray(x), BLOCKS["q4_k"])
    largest = np.abs(x).max(1) / np.asarray(activations.scales)
    assert np.all((largest >= 16) & (largest < 32))
    values = np.asarray(activations.blocks)[:, :1024].view(np.float16)
    assert np.isfinite(values).all() and np.abs(values).max() <= 32


def test_a_row_of_zeros_is_prepared_as_zeros():
    activations = prepare(jnp.zeros((8, 256)), BLOCKS["q6_k"])
    assert np.all(np.asarray(activations.blocks).view(np.float16) == 0)
    assert np.isfinite(np.asarray(activations.scales)).all()


@pytest.mark.parametrize(
    ("name", "rows"), [*((name, 8) for name in BLOCKS), *((name, 16) for name in KINDS)]
)
def test_a_product_compiles_to_machine_code_without_spills(name, rows, h200):
    from bench import compile_kernels
    from bench.kernels import Case

    block = BLOCKS[name]
    case = Case(name=name, block=name, outputs=5120, k=5120, rows=rows)
    report = compile_kernels.compile_product(case, h200)
    assert report.spilled_bytes == 0 and not report.serialised
    # What a block of threads has for each, in eights.
    threads = 128 * (default_tiles(block, 5120, 5120, rows).warpgroups + 1)
    assert report.registers <= 65536 // threads // 8 * 8


@pytest.mark.parametrize("name", ["inputs", "head q6_k", "head iq4_xs", *KINDS])
def test_a_kernel_compiles_to_machine_code_without_spills(name, h200):
    from bench import compile_kernels
    from bench.head import HeadCase
    from bench.inputs import InputsCase
    from bench.prefill_products import PrefillCase

    if name == "inputs":
        report = compile_kernels.compile_inputs(InputsCase(name=name, block="q4_k", k=5120), h200)
    elif name.startswith("head"):
        block = name.removeprefix("head ")
        case = HeadCase(name=name, block=block, outputs=5120, adjusted=True)
        report = compile_kernels.compile_head(case, h200)
    else:
        case = PrefillCase(name=name, block=name, outputs=5120, k=5120, epilogue="silu_gate")
        report = compile_kernels.compile_prefill(case, h200)
    assert report.spilled_bytes == 0 and not report.serialised
    # Consumers of a prefill product take more for themselves when they start.
    assert report.registers <= (168 if name in KINDS else 128)


SIZES = [(512, 5120), (5120, 6144), (1040, 17408), (16, 256)]
MEASURED = ["q4_k", "q5_k", "q6_k", "q8_0"]
"""Formats of the figures."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "outputs", "k", "rows"),
    [
        (name, *size, rows)
        for name in BLOCKS
        for size in SIZES
        for rows in (8, 16)
        # A part alone of what the figures do not name, which keeps the sweep short.
        if name in MEASURED or (size, rows) in ((SIZES[0], 8), (SIZES[2], 16), (SIZES[3], 8))
    ],
)
def test_a_product_is_right_and_its_rows_stand_alone(name, outputs, k, rows):
    block = BLOCKS[name]
    planes = jax.tree.map(jnp.asarray, random_planes(block, outputs, k, size=1e-3))
    words = jnp.stack([jnp.zeros_like(block.tile(planes)), block.tile(planes)])
    tiles, layer = default_tiles(block, outputs, k, rows), jnp.ones((1,), jnp.int32)
    run = jax.jit(lambda x: decode_product(prepare(x, block), words, layer, block, tiles))
    x = jax.random.normal(jax.random.key(0), (rows, k)).at[:, 7].multiply(1000)
    got = run(x)
    want = jnp.matmul(x, block.format.unpack(planes).T, precision="highest")
    difference = np.asarray(got, np.float64) - np.asarray(want, np.float64)
    assert np.sqrt((difference**2).mean()) < 2.5e-3 * np.sqrt(np.square(want).mean())
    assert jnp.array_equal(run(x.at[1:].set(0))[0], got[0])
