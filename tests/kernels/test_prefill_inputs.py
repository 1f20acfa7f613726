"""What comes before a product of many rows in one launch: in a model of the grid, and on a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.cluster_model import Buffer, Grid

pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

from pallas_kernels.prefill_inputs import Plan, prefill_inputs, run_row  # noqa: E402
from pallas_kernels.prefill_product import (  # noqa: E402
    PrefillActivations,
    prefill_activations,
    prefill_tile,
)

EPS = 1e-6


def model(x, *, added=None, norm=None, layer=None, eps=0.0, wants_normed=False):
    """Returns what `prefill_inputs` stores, by name, computed by the model of a grid."""
    rows, k = x.shape
    plan = Plan(rows=rows, k=k, tile=prefill_tile(rows), eps=eps)
    shape = (plan.padded // plan.tile, k // 64, plan.tile * 32)
    stored = {
        "tiles": Buffer(np.full(shape, 0x7FFF7FFF, np.uint32)),
        "scales": Buffer(np.full(plan.padded, np.nan, np.float32)),
    }
    if added is not None:
        stored["stream"] = Buffer(np.full((rows, k), np.nan, np.float32))
    if wants_normed:
        stored["normed"] = Buffer(np.full((rows, k), np.nan, np.float32))
    given = {"x": x, "added": added, "norm": norm, "layer": layer}
    buffers = {name: Buffer(np.asarray(a)) for name, a in given.items() if a is not None}
    grid: Any = Grid(plan.padded, 1, 32 * plan.warps, 256)
    places = {name: grid.global_address(b) for name, b in {**buffers, **stored}.items()}
    with np.errstate(invalid="ignore", over="ignore"):
        run_row(grid, plan, places, grid.shared_address(None))
    return {name: buffer.values for name, buffer in stored.items()}


def on_the_card(x, **operands):
    made = jax.jit(functools.partial(prefill_inputs, **operands))(x)
    found = {"tiles": made.activations.tiles, "scales": made.activations.scales}
    found |= {"stream": made.stream, "normed": made.normed}
    return {name: np.asarray(a) for name, a in found.items() if a is not None}


def operands_of(rows: int, k: int, kind: str) -> dict[str, Any]:
    rng = np.random.default_rng(rows + k)
    x = rng.normal(size=(rows, k)).astype(np.float32)
    x[:, [3, 77]] *= 1000
    x[0] *= 1e5
    operands: dict[str, Any] = {"x": x}
    if kind != "prepared":
        operands["norm"] = rng.normal(1, 0.2, size=(2, k)).astype(np.float32)
        operands |= {"layer": np.array([1], np.int32), "eps": EPS, "wants_normed": True}
    if kind == "added":
        operands["added"] = rng.normal(size=(rows, k)).astype(np.float32)
    return operands


def halves(tiles):
    return np.ascontiguousarray(tiles).view(np.float16).astype(np.float64)


def assert_agrees(run, rows: int, k: int, kind: str) -> None:
    """Compares with float64 sums, and operands with those of `prefill_activations`."""
    operands = operands_of(rows, k, kind)
    got = run(**operands)
    stream = operands["x"] + operands.get("added", np.float32(0))
    normed = stream.astype(np.float64)
    if kind != "prepared":
        normed /= np.sqrt((normed**2).mean(-1, keepdims=True) + EPS)
        normed *= operands["norm"][1]
        np.testing.assert_allclose(got["normed"], normed, rtol=2e-6)
    if kind == "added":
        assert np.array_equal(got["stream"], stream)
    mine = jnp.asarray(got["normed"] if kind != "prepared" else stream)
    want: PrefillActivations = prefill_activations(mine)
    assert np.array_equal(got["scales"][:rows], np.asarray(want.scales)[:rows])
    assert np.all(got["scales"] > 0) and np.all(np.isfinite(got["scales"]))
    ours, theirs = halves(got["tiles"]), halves(want.tiles)
    # The reference rounds numbers below float16's normal ones twice.
    normal = np.abs(theirs) >= 2.0**-14
    assert np.array_equal(ours[normal], theirs[normal])
    assert np.all(np.abs(ours - theirs) <= 2.0**-24)


@pytest.mark.parametrize("kind", ["prepared", "normed", "added"])
@pytest.mark.parametrize(("rows", "k"), [(17, 256), (70, 4352), (130, 512)])
def test_one_launch_adds_norms_and_prepares(rows, k, kind):
    assert_agrees(model, rows, k, kind)


def test_a_row_of_zeros_is_prepared_as_zeros():
    got = model(np.zeros((20, 256), np.float32))
    assert not halves(got["tiles"]).any() and np.isfinite(got["scales"]).all()


def test_rows_do_not_see_each_other():
    operands = operands_of(20, 512, "added")
    other = {**operands, "x": operands["x"].copy()}
    other["x"][1:] *= -3
    got, changed = (model(**these) for these in (operands, other))
    assert np.array_equal(got["normed"][0], changed["normed"][0])
    assert np.array_equal(got["tiles"][0, :, :32], changed["tiles"][0, :, :32])


def test_rows_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="multiple of 256"):
        prefill_inputs(jnp.zeros((64, 300)))
    with pytest.raises(ValueError, match="come together"):
        prefill_inputs(jnp.zeros((64, 256)), norm=jnp.ones((1, 256)))


@pytest.mark.parametrize("k", [5120, 17408])
def test_it_compiles_to_machine_code_without_spills(k, h200):
    from bench.compile_kernels import compile_prefill_inputs

    assert compile_prefill_inputs(k, h200).spilled_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["prepared", "normed", "added"])
@pytest.mark.parametrize(("rows", "k"), [(64, 5120), (100, 17408), (2048, 5120), (300, 256)])
def test_one_launch_adds_norms_and_prepares_on_the_card(rows, k, kind):
    assert_agrees(on_the_card, rows, k, kind)
