"""Choosing from a head's outputs as they are made: every thread's work in NumPy, on any host."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_activations import prepare
from pallas_kernels.decode_blocks import BLOCKS
from pallas_kernels.decode_cuts import Tiles, default_tiles
from pallas_kernels.decode_head import (
    Adjustments,
    Candidates,
    Choice,
    HeadOperands,
    _over_workers,
    decode_head,
    decode_head_reference,
)
from pallas_kernels.decode_product import decode_product
from tests.kernels.block_model import Threads
from tests.kernels.warp_model import random_planes

WORKERS = 5


def modelled(logits: np.ndarray, operands: HeadOperands, *, used: int, candidates: bool) -> Any:
    """Returns what the kernel makes of logits [R, N], its units dealt to several consumers."""
    rows, columns = logits.shape
    given, masks = operands.adjustments, operands.allowed
    plan = Choice(
        used=used,
        rows=rows,
        adjusted=given is not None,
        masked=0 if masks is None else masks.shape[1],
        listed=operands.tokens is not None,
        candidates=candidates,
    )
    units = columns // 16
    stored = {
        "best": np.zeros((WORKERS, 5, rows), np.uint32),
        "maxima": np.full((units, rows), np.nan, np.float32),
        "logits": np.full((units, rows, 16), np.nan, np.float32),
    }
    arrays = {"allowed": masks, "tokens": operands.tokens}
    if given is not None:
        arrays |= {name: getattr(given, name) for name in given.__dataclass_fields__}
    arrays = {name: np.asarray(array) for name, array in arrays.items() if array is not None}
    isa = Threads(128, 1)
    places = {name: isa.place(array) for name, array in {**arrays, **stored}.items()}
    thread = isa.thread_index()
    for worker in range(WORKERS):
        state = plan.start(isa)
        for unit in range(worker, units, WORKERS):
            early = plan.fetch(isa, places, unit, thread)
            for tile in range(rows // 8):
                logit = logits[(thread >> 4) + 8 * tile, unit * 16 + (thread & 15)]
                state[tile] = plan.take(
                    isa, places, np.uint32(unit), thread, tile, logit, early, state[tile]
                )
        plan.finish(isa, places, worker, thread, state)
    best = _over_workers(jnp.asarray(stored["best"]))
    if not candidates:
        return best
    maxima, kept = jnp.asarray(stored["maxima"].T), jnp.asarray(stored["logits"])
    return Candidates(maxima=maxima, logits=kept, log_sum=best.log_sum)


def operands_of(rows, columns, kind, seed=0):
    rng = np.random.default_rng(seed)
    given = allowed = tokens = None
    if "adjusted" in kind:
        history = rng.integers(0, 3, columns).astype(np.uint32)
        history |= (rng.random(columns) < 0.2).astype(np.uint32) << 31
        prefix = np.full((rows, 8), -1, np.int32)
        for row in range(rows):
            prefix[row, : row % 8] = rng.integers(0, columns, row % 8)
        given = Adjustments(
            settings=jnp.asarray([2, 0.25, 0.75, 0], jnp.float32),
            bias=jnp.asarray(np.where(rng.random(columns) < 0.1, -np.inf, 0.5).astype(np.float32)),
            history=jnp.asarray(history),
            prefix=jnp.asarray(prefix),
        )
    if "masked" in kind:
        words = rng.integers(0, 2**32, (rows, -(-columns // 32)), np.uint32)
        allowed = jnp.asarray(words & words[::-1])
    if "listed" in kind:
        tokens = jnp.asarray(rng.permutation(2 * columns)[:columns].astype(np.int32))
    return HeadOperands(adjustments=given, allowed=allowed, tokens=tokens)


KINDS = ["plain", "adjusted", "masked", "adjusted masked", "listed", "adjusted listed"]


@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [8, 16])
def test_a_choice_is_that_of_the_whole_row(rows, kind, candidates):
    columns = 1040
    # Steps of a quarter: there are equals, and sums are exact.
    rng = np.random.default_rng(1)
    logits = (np.round(4 * rng.normal(0, 3, (rows, columns))) / 4).astype(np.float32)
    logits[0, 7], logits[1] = -0.0, np.minimum(logits[1], 0)
    operands = operands_of(rows, columns, kind)
    limits: dict[str, Any] = dict(
        used=1000 if "listed" not in kind else 1500, candidates=candidates
    )
    got = modelled(logits, operands, **limits)
    want = decode_head_reference(jnp.asarray(logits), operands, **limits)
    np.testing.assert_allclose(got.log_sum, want.log_sum, rtol=1e-6)
    for name in ("maxima", "logits") if candidates else ("value", "column", "logit"):
        assert np.array_equal(getattr(got, name), getattr(want, name)), name


def test_rows_without_a_choice_and_rows_with_a_nan():
    logits = np.random.default_rng(2).normal(size=(8, 64)).astype(np.float32)
    logits[0, 5], logits[1, 40] = np.nan, 1e30
    none = jnp.zeros((8, 2), jnp.uint32).at[:6].set(0xFFFFFFFF)
    got = modelled(logits, HeadOperands(allowed=none), used=64, candidates=False)
    want: Any = decode_head_reference(
        jnp.asarray(logits), HeadOperands(allowed=none), used=64, candidates=False
    )
    assert np.array_equal(got.column, want.column) and not np.asarray(got.column[6:]).any()
    assert got.column[1] == 40 and np.isnan(got.log_sum[0])
    assert np.all(np.asarray(got.value[6:]) == -np.inf)


def _arguments(rows=8, k=512, columns=1040, kind="plain", name="q6_k"):
    block = BLOCKS[name]
    x = jax.random.normal(jax.random.key(0), (rows, k))
    planes = jax.tree.map(jnp.asarray, random_planes(block, columns, k, size=1e-3))
    words, layer = block.tile(planes)[None], jnp.zeros((1,), jnp.int32)
    tiles = default_tiles(block, columns, k, rows)
    return (prepare(x, block), words, layer, block, tiles), operands_of(rows, columns, kind)


@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("q6_k", "plain"), ("q6_k", "adjusted masked"), ("q4_0", "plain"), ("iq4_xs", "adjusted")],
)
def test_a_head_lowers_for_a_gpu_on_a_host_without_one(name, kind, candidates):
    (x, words, layer, block, tiles), operands = _arguments(kind=kind, name=name)
    run = functools.partial(decode_head, block=block, tiles=tiles, used=1000, candidates=candidates)
    traced = jax.jit(run).trace(x, words, layer, operands=operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f"decode_product_{name}_kernel" in text


def test_a_choice_from_parts_of_sums_is_refused():
    (x, words, layer, block, _), operands = _arguments()
    with pytest.raises(ValueError, match="needs whole sums"):
        decode_head(x, words, layer, block, Tiles(parts=2), operands, used=9, candidates=False)


@pytest.mark.gpu
@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "rows", "k", "columns"),
    [
        ("q6_k", 8, 5120, 20480),
        ("q6_k", 16, 512, 1040),
        ("q4_0", 16, 512, 1040),
        ("iq4_xs", 8, 512, 1040),
    ],
)
def test_a_choice_on_the_card_is_that_of_the_product(name, rows, k, columns, kind, candidates):
    (x, words, layer, block, tiles), operands = _arguments(rows, k, columns, kind, name)
    logits = jax.jit(lambda: decode_product(x, words, layer, block, tiles))()
    limits = dict(used=columns - 40, candidates=candidates)
    run = jax.jit(functools.partial(decode_head, block=block, tiles=tiles, **limits))
    got, again = (run(x, words, layer, operands=operands) for _ in range(2))
    want = decode_head_reference(logits, operands, **limits)
    np.testing.assert_allclose(got.log_sum, want.log_sum, rtol=1e-5)
    for name in ("maxima", "logits") if candidates else ("value", "column", "logit"):
        assert np.array_equal(getattr(got, name), getattr(want, name)), name
    assert all(map(np.array_equal, jax.tree.leaves(got), jax.tree.leaves(again)))
