"""What comes before a product in one launch: every thread's work, run in NumPy, on any host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_activations import operand_words
from pallas_kernels.decode_blocks import BLOCKS
from pallas_kernels.decode_inputs import (
    Inputs,
    _Plan,
    decode_inputs,
    decode_inputs_reference,
    run_row,
)
from pallas_kernels.decode_words import Block
from tests.kernels.block_model import Threads

KINDS = {block.operand: block for block in BLOCKS.values()}


def modelled(
    block: Block, rows: int, operands: dict[str, np.ndarray], eps: float, also: Block | None = None
):
    """Returns what the kernel stores, by name; NaN where it stores nothing."""
    k = operands["x"].shape[1]
    plan = _Plan(block=block, also=also, rows=rows, blocks=k // 256, eps=eps)
    stored: dict[str, np.ndarray] = {
        name: np.full((plan.blocks, operand_words(kind, rows)), 0x7FFF7FFF, np.uint32)
        for name, kind in plan.operands
    }
    stored["scales"] = np.full(rows, np.nan, np.float32)
    for name, cause in (("stream", "added"), ("normed", "norm")):
        if cause in operands:
            stored[name] = np.full((rows, k), np.nan, np.float32)
    for row in range(rows):
        isa = Threads(32 * plan.warps, 64)
        places = {name: isa.place(array) for name, array in {**operands, **stored}.items()}
        zero = np.zeros(isa.threads, np.uint32)
        run_row(isa, plan, places, zero, zero + np.uint32(row))
    return stored


def inputs(rows, k, kind):
    rng = np.random.default_rng(rows + k)
    x = rng.normal(size=(rows, k)).astype(np.float32)
    x[:, [3, 77]] *= 1000
    x[1] *= 1e5
    x[2] = 0
    operands: dict[str, np.ndarray] = {"x": x}
    if kind != "prepared":
        operands["norm"] = rng.normal(1, 0.2, size=(2, k)).astype(np.float32)
        operands["layer"] = np.array([1], np.int32)
    if kind == "added":
        operands["added"] = rng.normal(size=(rows, k)).astype(np.float32)
    return operands


def halves(words):
    return np.ascontiguousarray(words).view(np.float16).astype(np.float64)


@pytest.mark.parametrize("kind", ["prepared", "normed", "added"])
@pytest.mark.parametrize(("rows", "k"), [(8, 256), (16, 2304), (8, 8704)])
@pytest.mark.parametrize("block", KINDS.values(), ids=lambda b: b.format.name)
def test_one_launch_adds_norms_and_prepares(block, rows, k, kind):
    operands = inputs(rows, k, kind)
    got = modelled(block, rows, operands, 1e-6)
    want = decode_inputs_reference(**jax.tree.map(jnp.asarray, operands), block=block, eps=1e-6)
    if kind == "added":
        assert np.array_equal(got["stream"], want.stream)
    if kind != "prepared":
        np.testing.assert_allclose(got["normed"], want.normed, rtol=1e-6)
    zero = np.flatnonzero(~np.asarray(want.normed).any(1))
    alive = np.setdiff1d(np.arange(rows), zero)
    assert np.array_equal(got["scales"][alive], np.asarray(want.activations.scales)[alive])
    values = 1024 * rows // 8
    ours, theirs = got["blocks"], np.asarray(want.activations.blocks)
    a, b = halves(ours[:, :values]), halves(theirs[:, :values])
    # The reference rounds numbers below float16's normal ones twice.
    normal = np.abs(b) >= 2.0**-14
    if kind == "prepared":
        assert np.array_equal(a[normal], b[normal])
    # One unit in the last place where a norm rounds differently, and rarely.
    assert np.all(np.abs(a - b) <= np.maximum(2.0**-10 * np.abs(b), 2.0**-24))
    assert np.mean((a != b)[normal]) < 2e-3
    words = 8 * block.num_offsets * rows // 8
    for first, last, eights in (
        (values, values + words, block.num_offsets // 8),
        (values + words, ours.shape[1], 1),
    ):
        # High and low parts of sums, added: what the products make of them.
        both = (
            halves(part[:, first:last]).reshape(-1, 32, 2, eights, 2).sum(2)
            for part in (ours, theirs)
        )
        mine, sums = both
        if sums.size:
            assert np.abs(mine - sums).max() < 2e-4 * np.abs(sums).max()


def test_rows_for_two_kinds_of_block_are_those_for_each():
    operands = inputs(8, 2304, "added")
    one, other = BLOCKS["q4_k"], BLOCKS["q6_k"]
    both = modelled(one, 8, operands, 1e-6, also=other)
    apart = [modelled(block, 8, operands, 1e-6) for block in (one, other)]
    assert np.array_equal(both["blocks"], apart[0]["blocks"])
    assert np.array_equal(both["blocks_also"], apart[1]["blocks"])
    assert np.array_equal(both["scales"], apart[1]["scales"])


def test_a_row_of_zeros_is_prepared_as_zeros():
    got = modelled(BLOCKS["q4_k"], 8, {"x": np.zeros((8, 256), np.float32)}, 0.0)
    assert not halves(got["blocks"]).any() and np.isfinite(got["scales"]).all()


def test_rows_do_not_see_each_other():
    operands = inputs(8, 512, "added")
    other = {name: array.copy() for name, array in operands.items()}
    other["x"][1:] *= -3
    got, changed = (modelled(BLOCKS["q4_k"], 8, these, 1e-6) for these in (operands, other))
    assert np.array_equal(got["normed"][0], changed["normed"][0])
    assert got["scales"][0] == changed["scales"][0]
    first = (slice(None), slice(0, 1024))
    lanes = np.arange(1024).reshape(8, 32, 4)[:, :4].ravel()
    assert np.array_equal(got["blocks"][first][:, lanes], changed["blocks"][first][:, lanes])


@pytest.mark.parametrize("kind", ["prepared", "added"])
def test_it_lowers_for_a_gpu_on_a_host_without_one(kind):
    operands = jax.tree.map(jnp.asarray, inputs(8, 5120, kind))
    run = functools.partial(_fields, block=BLOCKS["q4_k"])
    lowered = jax.jit(run).trace(operands).lower(lowering_platforms=("cuda",))
    assert "decode_inputs_kernel" in lowered.as_text()


def _fields(operands, block):
    made: Inputs = decode_inputs(**operands, block=block, eps=1e-6)
    return made.stream, made.normed, made.activations


def test_sizes_that_no_block_has_are_refused():
    with pytest.raises(ValueError, match="pad them"):
        decode_inputs(jnp.zeros((4, 256)), BLOCKS["q4_k"])
    with pytest.raises(ValueError, match="come together"):
        decode_inputs(jnp.zeros((8, 256)), BLOCKS["q4_k"], norm=jnp.ones((1, 256)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["prepared", "normed", "added"])
@pytest.mark.parametrize(("rows", "k"), [(8, 256), (8, 5120), (16, 5120), (8, 17408)])
@pytest.mark.parametrize("block", KINDS.values(), ids=lambda b: b.format.name)
def test_one_launch_is_right_on_the_card(block, rows, k, kind):
    operands = inputs(rows, k, kind)
    model = modelled(block, rows, operands, 1e-6)
    run = jax.jit(functools.partial(_fields, block=block))
    stream, normed, activations = run(jax.tree.map(jnp.asarray, operands))
    if kind == "added":
        assert np.array_equal(stream, model["stream"])
    if kind != "prepared":
        np.testing.assert_allclose(normed, model["normed"], rtol=1e-6)
    assert np.array_equal(activations.scales, model["scales"])
    ours, theirs = halves(np.asarray(activations.blocks)), halves(model["blocks"])
    different = np.mean(ours != theirs)
    assert different == 0 if kind == "prepared" else different < 1e-2
    assert np.abs(ours - theirs).max() <= 2.0**-5
