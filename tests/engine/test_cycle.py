"""Speculation changes nothing: states and text equal one-by-one processing, bit for bit."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from golden import SPECULATING, case, fixed
from hypothesis import given, settings
from hypothesis import strategies as st
from states import assert_same_bits, folded, poisoned

from openjet_jax.config import MAX_DEPTH, MAX_STOP_IDS, ROWS
from openjet_jax.depth import DepthPolicy
from openjet_jax.sampling import initial_sampling_state
from openjet_jax.settings import Sampling, SamplingKind
from openjet_jax.state import DecodeState, Request

GREEDY = SamplingKind()


@pytest.fixture(scope="module", params=SPECULATING)
def model(request):
    return case(SPECULATING[request.param], request.param)


def ask(model, state: DecodeState, depth: int, remaining: int = 1000) -> DecodeState:
    config = model.config
    operands: dict[str, Any] = {
        "sampling": initial_sampling_state(Sampling(), config.vocab, config.vocab_used),
        "stop_ids": np.full(MAX_STOP_IDS, -1, np.int32),
        "remaining": np.int32(remaining),
        "allowed": state.request.allowed,
        "depth": np.int32(depth),
        "depth_after_rejection": np.int32(depth),
    }
    return dataclasses.replace(state, request=Request(**operands))


def cycle(model, state: DecodeState, drafts=(), *, max_depth: int = MAX_DEPTH, run=None):
    """Runs one cycle on the given drafts, with the model's own program or another."""
    row = np.zeros(ROWS - 1, np.int32)
    row[: len(drafts)] = drafts
    state = dataclasses.replace(state, drafts=row, num_drafts=np.int32(len(drafts)))
    run = run or model.programs.cycles(GREEDY, max_depth)
    state, infos, ran = run(model.weights, state, np.int32(1))
    assert int(ran) == 1
    return state, jax.tree.map(lambda x: np.asarray(x)[0], infos)


def started(model, depth: int = 0) -> DecodeState:
    (rows,) = model.programs.decode.chunks
    ids = model.answers["tokens"]
    tokens = np.zeros(rows + 1, np.int32)
    tokens[: len(ids)] = ids
    run = model.programs.prefill(rows)
    state, _ = run(model.weights, model.programs.start()(), tokens, np.int32(len(ids) - 1))
    return ask(model, state, depth)


@functools.cache
def decoded_one_by_one(architecture: str):
    """The greedy text, and for each length the state after plain decoding to it."""
    model = case(SPECULATING[architecture], architecture)
    state, text, states = started(model), [], {}
    for _ in range(30):
        state, info = cycle(model, state, max_depth=0)
        text.append(int(info.tokens[0]))
        states[int(state.length)] = folded(state, model.config)
    return text, states


@pytest.fixture
def one_by_one(model):
    return decoded_one_by_one(model.config.architecture)


def speculate(model, script, run=None) -> None:
    """Asserts that cycles leave the text and the state of one-by-one decoding.

    Each (good, bad, own) of the script drafts some right tokens, then some wrong ones. They stand
    in for `own` drafts of the model's, whose provisional rows are left in its cache. The caches are
    full of NaN where no committed position is.
    """
    text, states = decoded_one_by_one(model.config.architecture)
    state, done = started(model), 0
    for good, bad, own in script:
        right = text[done : done + good]
        wrong = [(t + 1) % 256 for t in text[done + good : done + good + bad]]
        state = ask(model, poisoned(state), own)
        state, info = cycle(model, state, (right + wrong)[:MAX_DEPTH], run=run)
        assert int(info.accepted) == len(right)
        assert info.tokens[: int(info.num_tokens)].tolist() == text[done : done + len(right) + 1]
        done += int(info.num_tokens)
        if done > 22:
            break
    state, info = cycle(model, state, run=run)  # folds what the last cycle accepted
    assert int(info.tokens[0]) == text[done]
    # One more pending row each: the two states then differ in nothing.
    assert_same_bits(folded(state, model.config), states[int(state.length)])


DEPTHS = st.integers(0, MAX_DEPTH)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(DEPTHS, DEPTHS, DEPTHS), max_size=5))
def test_any_accepts_and_rejections_leave_the_state_of_one_by_one_decoding(model, script):
    speculate(model, script)


def test_drafts_beyond_their_count_and_poison_beyond_the_length_change_nothing(model, one_by_one):
    text, states = one_by_one
    state = started(model)
    n, drafts = int(state.length), np.arange(ROWS - 1, dtype=np.int32)
    state = dataclasses.replace(poisoned(state), drafts=drafts)
    run = model.programs.cycles(GREEDY, MAX_DEPTH)
    state, infos, _ = run(model.weights, state, np.int32(1))
    assert np.asarray(infos.tokens)[0, 0] == text[0]
    assert_same_bits(folded(state, model.config), states[n + 1])


@pytest.mark.parametrize("good", range(4))
def test_reading_more_onto_pending_rows_equals_folding_by_a_cycle(model, one_by_one, good):
    text, _ = one_by_one
    more = model.answers["tokens"][:7]

    def read(state):
        newest = int(state.tokens[int(state.length)])
        (rows,) = model.programs.decode.chunks
        tokens = np.zeros(rows + 1, np.int32)
        tokens[: len(more) + 1] = [newest, *more]
        run = model.programs.prefill(rows)
        return run(model.weights, state, tokens, np.int32(len(more)))[0]

    pending, info = cycle(model, started(model), text[:good])
    assert int(info.num_tokens) == good + 1
    stepwise = started(model)
    for _ in range(good + 1):
        stepwise, _ = cycle(model, stepwise)
    assert_same_bits(folded(read(pending), model.config), folded(read(stepwise), model.config))


def test_a_stop_id_among_accepted_drafts_ends_the_state_there(model, one_by_one):
    text, states = one_by_one
    position = next(i for i in range(1, 5) if text[i] not in text[:i])
    state = started(model)
    stops = np.full(MAX_STOP_IDS, -1, np.int32)
    stops[3] = text[position]
    request = dataclasses.replace(state.request, stop_ids=stops)
    state, info = cycle(model, dataclasses.replace(state, request=request), text[:5])
    assert info.tokens.tolist() == text[: position + 1] + [0] * (ROWS - position - 1)
    assert bool(info.stopped) and bool(state.stopped)
    assert int(state.num_drafts) == 0
    before = int(started(model).length)
    assert int(state.length) == before + position + 1
    assert np.array_equal(folded(state, model.config)["k"], states[before + position + 1]["k"])


def test_the_length_cuts_accepted_drafts(model, one_by_one):
    text, _ = one_by_one
    state, info = cycle(model, ask(model, started(model), 5, remaining=3), text[:5])
    assert info.tokens[:4].tolist() == [*text[:3], 0]
    assert int(info.num_tokens) == 3 and int(state.request.remaining) == 0


@pytest.mark.parametrize("model", ["qwen35"], indirect=True)
def test_text_is_the_same_at_every_depth_and_dispatch_size(model):
    reference = None
    for depth in range(MAX_DEPTH + 1):
        for count in (1, 4):
            conversation = model.conversation(model.answers["tokens"])
            policy = DepthPolicy(depth=depth, after_rejection=depth)
            bursts = conversation.run(
                Sampling(), policy, max_new_tokens=40, cycles_per_dispatch=count
            )
            tokens = [token for burst in bursts for token in burst.token_ids]
            reference = reference or tokens
            assert tokens == reference
            assert conversation.ids == [*model.answers["tokens"].tolist(), *tokens]


SAMPLED = [
    Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=1),
    Sampling(temperature=0.7, seed=2**63 + 5),
    Sampling(temperature=1.3, top_p=0.9, min_p=0.02, seed=3),
    Sampling(
        temperature=0.9,
        top_k=40,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={7: 3.0, 11: -2.0},
        seed=4,
    ),
    Sampling(temperature=0.0, repetition_penalty=1.3, logit_bias={7: 2.0}),
]


@pytest.mark.parametrize(
    ("model", "sampling"),
    [("qwen35", sampling) for sampling in SAMPLED] + [("qwen4exp", s) for s in SAMPLED[2:4]],
    indirect=["model"],
    ids=lambda s: s if isinstance(s, str) else f"{s.kind.method}-{s.kind.adjusted}",
)
def test_sampled_text_is_the_same_at_every_depth(model, sampling):
    texts, accepted = [], 0
    for depth in (0, 1, 3, 5):
        conversation = model.conversation(model.answers["tokens"])
        policy = fixed(depth, model)
        bursts = list(conversation.run(sampling, policy, max_new_tokens=40))
        texts.append([token for burst in bursts for token in burst.token_ids])
        accepted += sum(a for burst in bursts for _, a in burst.cycles)
    assert all(text == texts[0] for text in texts)
    assert accepted > 0
