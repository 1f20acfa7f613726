"""The arithmetic of a warp, run on NumPy lanes, against float64."""

import jax
import numpy as np
import pytest

from pallas_kernels.decode_activations import prepare
from pallas_kernels.decode_blocks import BLOCKS
from tests.kernels.warp_model import unit_product


def _planes(block, rows, k, seed=0):
    rng = np.random.default_rng(seed)
    planes = {}
    for name, spec in block.format.plane_specs(rows, k).items():
        if spec.dtype == np.float16:
            planes[name] = rng.normal(0, 1e-2, spec.shape).astype(np.float16)
        else:
            limit = 64 if name in ("scales", "mins") and spec.dtype == np.uint8 else 256
            values = rng.integers(0, limit, spec.shape)
            planes[name] = values.astype(np.uint8).view(spec.dtype)
    return planes


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda b: b.format.name)
def test_a_warp_multiplies_what_the_format_unpacks(block, outliers, rows):
    planes = _planes(block, 16, 512)
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
    # What the terms of a sum amount to without cancelling: rounding is relative to that.
    size = np.sqrt(x.astype(np.float64) ** 2 @ matrix.T**2)
    assert np.sqrt(np.mean(((got - want) / size) ** 2, axis=1)).max() < 6e-4
