"""The arithmetic of a warp, run on NumPy lanes, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_activations import prepare
from pallas_kernels.decode_blocks import BLOCKS
from tests.kernels.warp_model import random_planes, unit_product


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda b: b.format.name)
def test_a_warp_multiplies_what_the_format_unpacks(block, outliers, rows):
    planes = random_planes(block, 16, 512)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, 512)).astype(np.float32)
    if outliers:
        x[:, [3, 300]] *= 1000
        x[1] *= 1e5
    activations = jax.jit(prepare, static_argnums=1)(x, block)
    words = np.asarray(block.tile(planes))[0]
    got = unit_product(block, words, activations) * np.asarray(activations.scales)[:, None]
    matrix = np.asarray(block.format.unpack(planes), np.float64)
    want = x.astype(np.float64) @ matrix.T
    errors = np.sqrt(np.mean((got - want) ** 2, axis=1) / np.mean(want**2, axis=1))
    assert errors.max() < 2.5e-3
    # What the terms of a sum amount to without cancelling: rounding is relative to that.
    size = np.sqrt(x.astype(np.float64) ** 2 @ matrix.T**2)
    assert np.sqrt(np.mean(((got - want) / size) ** 2, axis=1)).max() < 6e-4


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda b: b.format.name)
def test_a_scale_that_is_no_number_spoils_its_own_output_alone(block, wrong):
    planes = random_planes(block, 16, 512)
    planes["d"][5, -1] = wrong
    x = np.random.default_rng(1).normal(size=(8, 512)).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        got = unit_product(block, np.asarray(block.tile(planes))[0], prepare(jnp.asarray(x), block))
    finite = np.isfinite(got)
    assert not finite[:, 5].any() and finite[:, np.arange(16) != 5].all()


@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda b: b.format.name)
def test_a_block_has_the_bits_of_its_packed_planes(block):
    planes = block.format.plane_specs(16, 256)
    assert 4 * block.words == sum(spec.size * spec.dtype.itemsize for spec in planes.values())


@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda b: b.format.name)
def test_a_weight_alone_is_the_one_that_the_format_unpacks_bit_for_bit(block):
    planes = random_planes(block, 16, 256)
    words, prepared = np.asarray(block.tile(planes))[0], jax.jit(prepare, static_argnums=1)
    got = []
    for x in jnp.eye(256, dtype=jnp.float32).reshape(16, 16, 256):
        activations = prepared(x, block)
        got.append(unit_product(block, words, activations) / 16)
    want = np.asarray(block.format.unpack(planes)).T
    assert np.array_equal(np.concatenate(got), want)


@pytest.mark.parametrize("exponent", [-100, 100])
def test_scales_that_no_float16_holds_are_kept(exponent):
    block = BLOCKS["mxfp4"]
    planes = random_planes(block, 16, 512)
    planes["d"] = np.ldexp(planes["d"].astype(np.float32), exponent).astype(planes["d"].dtype)
    x = np.random.default_rng(1).normal(size=(8, 512)).astype(np.float32)
    activations = prepare(jnp.asarray(x), block)
    got = unit_product(block, np.asarray(block.tile(planes))[0], activations)
    got = got.astype(np.float64) * np.asarray(activations.scales)[:, None]
    want = x.astype(np.float64) @ np.asarray(block.format.unpack(planes), np.float64).T
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 2.5e-3
