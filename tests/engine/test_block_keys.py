"""States and block keys of qwen4exp under speculation, and the wrong rules that tests catch.

Where each invariant of the maintenance is tested; K is tests/kernels/test_pooled_keys.py, C is
test_cycle.py, Q is test_qwen4exp.py, and the rest is here. All but Q however_maintained are
hypothesis tests.

    I1   retained count: in range, exact after a forward      K retained_keys, windows_and_rollbacks
    I2   retained keys are pooled anew to the bit             K retained_keys, windows_and_rollbacks
    I3   block keys beyond the visible change nothing         K retained_keys, windows_and_rollbacks
    I4   rows beyond the length change nothing                C any_accepts, windows_and_rollbacks
    I5   destinations distinct, changed blocks first          K a_list_has, retained_keys
    I6   fillers leave bits alone                             K retained_keys, Q however_maintained
    I7   retained after a rollback                            K a_rollback_keeps, and as for I8
    I8   only changed blocks and scratch rows are written     windows_and_rollbacks
    I9   logits are those of one-by-one and of one reading    windows_and_rollbacks
    I10  states after keeping k are those of k tokens         windows_and_rollbacks
    I11  rollbacks compose; one to the length does nothing    rollbacks_compose
    I12  MTP rows come from trunk rows alone                  C any_accepts
    I13  padding, retention: the same tokens and bits         Q however_maintained, K retained_keys
    I14  everything selected is dense attention               Q with_everything_selected

Where each wrong rule is caught:

    rounding up in a rollback; by start alone; before rollback    wrong_rule_of_rollbacks, K
    fillers on real destinations                                  K wrong_rule
    scored, or pooled, before the window's keys are written       wrong_rule_of_windows, K
    rotated at the block's end or at the query; mean after norm   wrong_rule_of_pooling
    catch-up without trimming; without catching up                wrong_rule_of_drafting
    snapshot slot off by one, either way                          wrong_rule_of_rollbacks
    positions compared while cells were recycled                  K wrong_rule_of_descriptors
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import SPECULATING, case, relative_rms
from hypothesis import given, settings
from hypothesis import strategies as st
from states import assert_same_bits, folded, of_cache, of_recurrent, poisoned_cache, same_bits
from test_cycle import cycle, speculate, started

from openjet_jax import architectures, qwen4exp, sparse_attention
from openjet_jax.config import MAX_DEPTH, ROWS, Pooling
from openjet_jax.layers import rms_norm, rotate
from openjet_jax.settings import SamplingKind
from openjet_jax.state import RecurrentState
from pallas_kernels import pooled_keys
from pallas_kernels.pooled_keys import POSITIONS, update_list

BOUND = 2e-5
pytestmark = pytest.mark.xdist_group("block keys")  # they share a program

CYCLE = importlib.import_module("openjet_jax.cycle")  # the package has a function `cycle`


def load() -> Any:
    return case(SPECULATING["qwen4exp"], "qwen4exp")


def window_program() -> Callable[..., Any]:
    """Returns a compiled window of the trunk, which nothing is rolled back of yet."""
    model = load()

    def run(tokens, start, count, caches):
        streams, caches = qwen4exp.trunk(
            model.weights, model.config, tokens, start, count, caches, chunked=False
        )
        return architectures.logits(model.weights, streams, config=model.config), caches

    return jax.jit(run)


@functools.cache
def sound_program() -> Callable[..., Any]:
    return window_program()


def committed(caches, start: int, keep: int):
    """Returns the caches after a rollback to the first `keep` rows of a window."""
    recurrent, kv = caches
    return recurrent.committed(jnp.int32(keep)), kv.committed(jnp.int32(start + keep))


def empty() -> Any:
    model = load()
    return qwen4exp.initial_caches(model.config, model.programs.decode)


def fed(tokens, keep: int, wrong: int) -> np.ndarray:
    """Returns rows of the right tokens to keep and of wrong ones to roll back."""
    rows = np.zeros(ROWS, np.int32)
    rows[: keep + wrong] = tokens[: keep + wrong]
    rows[keep : keep + wrong] = (rows[keep : keep + wrong] + 7) % load().config.vocab_used
    return rows


@functools.cache
def one_by_one() -> list[tuple[np.ndarray, Any]]:
    """Returns the logits of every position, and the caches after it, fed one at a time."""
    caches, steps = empty(), []
    for n, token in enumerate(load().answers["tokens"]):
        logits, caches = sound_program()(fed([token], 1, 0), n, 1, caches)
        caches = committed(caches, n, 1)
        steps.append((np.asarray(logits[0]), caches))
    return steps


def pending(recurrent: RecurrentState, count: int) -> dict[str, Any]:
    """Returns the rows that wait to be folded."""
    assert int(recurrent.num_pending) == count
    rows = vars(recurrent.pending)
    return {name: plane[:, :count] for name, plane in rows.items()}


def play(run: Callable[..., Any], script) -> None:
    """Plays windows and rollbacks, and asserts the invariants after each.

    Args:
      run: from `window_program`.
      script: (kept, rolled back, event) of each window; the event "clear" forgets block keys.
    """
    model = load()
    config, tokens = model.config, model.answers["tokens"]
    golden = dict(zip(model.answers["logit_rows"].tolist(), model.answers["logits"], strict=True))
    caches, n = empty(), 0
    for keep, wrong, event in script:
        wrong = min(wrong, ROWS - keep, len(tokens) - n - keep)
        if wrong < 0:
            break
        recurrent, kv = caches
        if event == "clear":
            kv = dataclasses.replace(kv, retained=jnp.int32(0), pooled=kv.pooled * jnp.nan)
        kv, count, retained = poisoned_cache(kv, n), keep + wrong, int(kv.retained)
        assert 0 <= retained <= n // POSITIONS and (retained == n // POSITIONS or event)
        rows, before = fed(tokens[n:], keep, wrong), np.array(kv.pooled)
        logits, after = run(rows, n, count, (recurrent, kv))
        complete = (n + count) // POSITIONS
        assert int(after[1].retained) == complete
        blocks = np.nonzero((np.array(after[1].pooled).view(int) != before.view(int)).any((0, 2)))[
            0
        ]
        assert all(retained <= block < complete or block >= kv.blocks for block in blocks)
        caches = committed(after, n, keep)
        assert caches[1].pooled is after[1].pooled  # a rollback writes nothing
        _, exact = run(rows, n, keep, (recurrent, kv))  # without what is rolled back
        exact = committed(exact, n, keep)
        n += keep
        assert int(caches[1].retained) == min(complete, n // POSITIONS)
        assert_same_bits(of_recurrent(caches[0], config), of_recurrent(exact[0], config))
        assert_same_bits(pending(caches[0], keep), pending(exact[0], keep))
        stepwise = one_by_one()[n - 1][1]
        assert_same_bits(of_cache(caches[1], n), of_cache(stepwise[1], n))
        for row in range(keep):
            at = n - keep + row
            assert same_bits(logits[row], one_by_one()[at][0])
            if at in golden:
                assert relative_rms(logits[row], golden[at]) < BOUND


WINDOWS = st.lists(
    st.tuples(
        st.integers(1, MAX_DEPTH + 1), st.integers(0, MAX_DEPTH), st.sampled_from(["", "", "clear"])
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=20, deadline=None)
@given(WINDOWS)
def test_windows_and_rollbacks_leave_what_one_by_one_processing_leaves(script):
    play(sound_program(), script)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_rollbacks_compose_and_one_to_the_length_does_nothing(length, first, second):
    _, kv = empty()
    first, second = min(first, length), min(second, first, length)
    kv = dataclasses.replace(kv, retained=jnp.int32(length // POSITIONS))
    assert int(kv.committed(jnp.int32(length)).retained) == int(kv.retained)
    twice = kv.committed(jnp.int32(first)).committed(jnp.int32(second))
    assert int(twice.retained) == int(kv.committed(jnp.int32(second)).retained)
    assert all(a is b for a, b in zip(kv.planes().values(), twice.planes().values(), strict=True))


# Wrong rules: each replaces names of the model's modules while a program is traced.


def rounded_up(retained, length):
    return jnp.minimum(retained, (length + POSITIONS - 1) // POSITIONS)


def by_start_alone(retained, length):
    return jnp.minimum(retained, jnp.maximum(length - 1, 0) // POSITIONS + 1)


def as_before(retained, length):
    del length
    return retained


def pooled_before_written(h, layer, kv, weights, at, config):
    """Pools from the keys that were there before the window's."""
    unwritten = dataclasses.replace(at, live=at.live & False)
    early = sparse_attention.index(h, layer, kv, weights, unwritten, config)
    written = sparse_attention.index(h, layer, kv, weights, at, config)
    return dataclasses.replace(written, pooled=early.pooled)


def scored_before_written(attend: Callable[..., Any]):
    """Chooses blocks by the keys that were there before the window's."""

    def inner(q, h, layers, kv, weights, at, config, continues=None):
        early = jnp.where(
            jnp.arange(kv.pooled.shape[1])[None, :, None] < at.start // POSITIONS, kv.pooled, 0.0
        )
        out, _ = attend(
            q, h, layers, dataclasses.replace(kv, pooled=early), weights, at, config, continues
        )
        return out, kv

    return inner


def slot_off_by(rows: int):
    def committed(state, num_rows):
        return dataclasses.replace(state, start=num_rows + rows, num_pending=num_rows)

    return committed


def fold_off_by(rows: int):
    def committed(state, num_rows):
        return dataclasses.replace(state, start=num_rows, num_pending=num_rows + rows)

    return committed


WRONG_ROLLBACKS: dict[str, tuple[Any, str, Any]] = {
    "rounded up": (sparse_attention, "retained_after", rounded_up),
    "by start alone": (sparse_attention, "retained_after", by_start_alone),
    "as before the rollback": (sparse_attention, "retained_after", as_before),
    "conv slot one late": (RecurrentState, "committed", slot_off_by(1)),
    "conv slot one early": (RecurrentState, "committed", slot_off_by(-1)),
    "one row too few folded": (RecurrentState, "committed", fold_off_by(-1)),
}
WRONG_WINDOWS: dict[str, tuple[Any, str, Any]] = {
    "pooled before written": (qwen4exp, "index", pooled_before_written),
    "scored before written": (
        qwen4exp,
        "attend_sparse",
        scored_before_written(sparse_attention.attend_sparse),
    ),
}
SCRIPT = [(2, 4, ""), (4, 2, ""), (1, 5, ""), (3, 3, ""), (6, 0, ""), (2, 3, ""), (5, 1, "")] * 3


@pytest.mark.parametrize("name", WRONG_ROLLBACKS)
def test_every_wrong_rule_of_rollbacks_is_caught(name, monkeypatch):
    play(sound_program(), SCRIPT)
    monkeypatch.setattr(*WRONG_ROLLBACKS[name])
    with pytest.raises(AssertionError):
        play(sound_program(), SCRIPT)


@pytest.mark.parametrize("name", WRONG_WINDOWS)
def test_every_wrong_rule_of_windows_is_caught(name, monkeypatch):
    play(sound_program(), SCRIPT)
    monkeypatch.setattr(*WRONG_WINDOWS[name])
    with pytest.raises(AssertionError):
        play(window_program(), SCRIPT)


def pooled() -> float:
    """Returns how far block keys pooled from the golden index keys are from the golden ones."""
    model = load()
    z, weights = model.answers, model.weights.indexer
    blocks = z["pooled"].shape[1]
    updates = update_list(jnp.int32(0), jnp.int32(blocks), blocks, blocks)
    keys = sparse_attention._block_keys(jnp.asarray(z["raw"]), 0, updates, weights, model.config)
    return relative_rms(keys, z["pooled"][0])


def mean_after_norm(raw, layer, blocks):
    gain = load().weights.indexer.k_norm[layer]
    return pooled_keys.mean_keys(rms_norm(raw, gain, load().config.eps), layer, blocks)


WRONG_POOLING: dict[str, list[tuple[str, Any]]] = {
    "rotated at the block's end": [("rotate", lambda x, at, config: rotate(x, at + 3, config))],
    "rotated at the query": [("rotate", lambda x, at, config: rotate(x, 0 * at + 109, config))],
    "mean after norm": [("mean_keys", mean_after_norm), ("rms_norm", lambda x, gain, eps: x)],
}


@pytest.mark.parametrize("name", WRONG_POOLING)
def test_every_wrong_rule_of_pooling_is_caught(name, monkeypatch):
    assert pooled() < BOUND
    for attribute, wrong in WRONG_POOLING[name]:
        monkeypatch.setattr(sparse_attention, attribute, wrong)
    assert pooled() > 100 * BOUND


def cycle_program() -> Callable[..., Any]:
    """Returns a compiled cycle with at most two drafts, as of `Programs.cycles`."""
    kind, config = SamplingKind(), load().config
    run = functools.partial(CYCLE.cycles, config=config, kind=kind, max_depth=2, most=1)
    return jax.jit(run)


def without_trimming(monkeypatch) -> None:
    """Lets the MTP block's count of valid block keys outlive its provisional rows."""
    inside, draft = [], CYCLE._draft

    def outer(*args):
        inside.append(True)
        try:
            return draft(*args)
        finally:
            inside.pop()

    def retained_after(retained, length):
        return retained if inside else pooled_keys.retained_after(retained, length)

    monkeypatch.setattr(CYCLE, "_draft", outer)
    monkeypatch.setattr(sparse_attention, "retained_after", retained_after)


def without_catching_up(monkeypatch) -> None:
    """Leaves the provisional rows of accepted drafts in the MTP block's cache."""
    block = qwen4exp.mtp_block

    def newest_alone(rows, *args, **kwargs):
        live = rows.live & (jnp.arange(ROWS) == jnp.sum(rows.live) - 1)
        return block(dataclasses.replace(rows, live=live), *args, **kwargs)

    monkeypatch.setattr(qwen4exp, "mtp_block", newest_alone)


DRAFTS = [(2, 0, 2), (0, 2, 2), (1, 1, 2), (2, 0, 2), (0, 0, 2), (1, 0, 2), (0, 1, 2), (2, 0, 2)]


@pytest.mark.parametrize("change", [without_trimming, without_catching_up])
def test_every_wrong_rule_of_drafting_is_caught(change, monkeypatch):
    speculate(load(), DRAFTS)
    change(monkeypatch)
    with pytest.raises(AssertionError):
        speculate(load(), DRAFTS, cycle_program())


def test_one_compiled_cycle_serves_every_count_of_changed_blocks():
    model = load()
    state, _ = cycle(model, started(model))
    expected, compiled = folded(state, model.config), len(model.programs.events)
    kv: Any = started(model).kv
    blocks = int(kv.retained)
    for changed in range(blocks + 1):
        state = started(model)
        kv = state.kv
        keys = np.array(kv.pooled)
        keys[:, blocks - changed :] = np.nan
        kept = jnp.int32(blocks - changed)
        kv = dataclasses.replace(kv, retained=kept, pooled=jnp.asarray(keys))
        state, _ = cycle(model, dataclasses.replace(state, kv=kv))
        assert_same_bits(folded(state, model.config), expected)
    assert blocks > 16 and len(model.programs.events) == compiled


@pytest.mark.parametrize("retention", [True, False])
def test_windows_pool_few_rows_with_retention_and_all_of_them_without(retention):
    """Block keys are all NaN before a window; those that are not after it were pooled by it."""
    tokens, caches, n = load().answers["tokens"], empty(), 0
    for step in range(30):
        count = 1 + step % 6
        recurrent, kv = caches
        kv = dataclasses.replace(kv, pooled=kv.pooled * jnp.nan)
        _, after = sound_program()(fed(tokens[n:], count, 0), n, count, (recurrent, kv))
        complete = (n + count) // POSITIONS
        pooled = int(np.isfinite(after[1].pooled).all((0, 2)).sum())
        if retention:
            assert pooled == complete - n // POSITIONS <= -(-count // POSITIONS)
        else:
            assert pooled == complete
        keep = 1 + step % count
        recurrent, kv = after
        switched = dataclasses.replace(kv, pooling=Pooling(retention=retention))
        recurrent, switched = committed((recurrent, switched), n, keep)
        caches, n = (recurrent, dataclasses.replace(switched, pooling=kv.pooling)), n + keep
    assert n > 50
