"""A smaller draft vocabulary, a 4-bit draft head: other drafts, the same text."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import CACHE, DECODE, case, fixed, names
from hypothesis import given, settings
from hypothesis import strategies as st

from openjet_jax.architectures import logits
from openjet_jax.compiled import Programs, ProgramStore
from openjet_jax.config import MAX_DEPTH, DecodeConfig
from openjet_jax.conversation import Conversation
from openjet_jax.depth import DepthPolicy
from openjet_jax.draft_vocabulary import (
    NUM_SLOTS,
    draft_logits,
    empty_slots,
    hold,
    make_draft_head,
    with_draft_head,
)
from openjet_jax.loading import load
from openjet_jax.settings import Sampling
from openjet_jax.tiling import tiled
from openjet_jax.weights import Packed, Tiled

FEW = 8
LISTED = np.arange(5, 45, 2)
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, top_k=20, top_p=0.95, seed=7)


def full_head(weights) -> Packed:
    assert isinstance(weights.head, Packed)
    return weights.head


@functools.cache
def listed(name: str, architecture: str = "qwen35", form: str = "same"):
    """Returns a golden case that drafts over `LISTED`."""
    model = case(name, architecture)
    weights = with_draft_head(model.weights, LISTED, model.config.vocab, form)
    programs = Programs(model.config, DECODE, weights, ProgramStore(CACHE))
    return dataclasses.replace(model, weights=weights, programs=programs)


@functools.cache
def few_slots():
    """Returns weights, an empty set of a few slots, and `hold` compiled for it."""
    weights = listed("q8_0").weights
    slots = empty_slots(weights)
    assert slots is not None and slots.ids.shape == (NUM_SLOTS,)
    few = jax.tree.map(lambda x: x[:FEW] if x.ndim else x, slots)
    return weights, few, jax.jit(lambda slots, tokens, count: hold(slots, weights, tokens, count))


def last_missing(sequence, size) -> set[int]:
    """The tokens that the list lacks, in order of their last occurrence: the last `size`."""
    order: dict[int, None] = {}
    for token in sequence:
        if token not in LISTED:
            order.pop(token, None)
            order[token] = None
    return set(list(order)[-size:])


def held(slots) -> set[int]:
    ids = np.asarray(slots.ids)
    live = ids[ids >= 0].tolist()
    assert len(live) == len(set(live))
    return set(live)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 59), max_size=24), max_size=6),
    st.integers(0, 287),
)
def test_slots_hold_the_last_seen_tokens_that_the_list_lacks(pieces, padding):
    weights, slots, run = few_slots()
    sequence: list[int] = []
    for piece in pieces:
        tokens = np.full(24, padding, np.int32)
        tokens[: len(piece)] = piece
        slots = run(slots, tokens, np.int32(len(piece)))
        sequence += piece
        assert held(slots) == last_missing(sequence, FEW)
    rows = weights.head.row_planes(np.maximum(slots.ids, 0))
    filled = np.asarray(slots.ids) >= 0
    for name, plane in slots.planes.items():
        np.testing.assert_array_equal(np.asarray(plane)[filled], np.asarray(rows[name])[filled])


def test_slot_columns_are_the_full_head_s_logits():
    weights, slots, run = few_slots()
    slots = run(slots, np.arange(24, dtype=np.int32) * 12, np.int32(24))
    hidden = jax.random.normal(jax.random.key(0), (3, weights.head.shape[1]))
    drafted, ids = draft_logits(weights, slots, hidden)
    full = np.asarray(logits(weights, hidden, config=case("q8_0").config))
    assert ids is not None and drafted.shape == (3, len(LISTED) + FEW)
    assert set(np.asarray(ids)) == {*LISTED.tolist(), *held(slots)}
    np.testing.assert_allclose(drafted, full[:, np.asarray(ids)], rtol=1e-5, atol=1e-5)


def test_slots_of_a_tiled_head_hold_its_rows():
    weights = load("tiny", draft_vocab=512).weights
    tokens = jnp.arange(8000, 8004)
    rows = jax.tree.map(np.asarray, full_head(weights).row_planes(tokens))
    head = tiled(full_head(weights), keep_rows=True)
    assert isinstance(head, Tiled)
    weights = dataclasses.replace(weights, head=head)
    slots = hold(empty_slots(weights), weights, tokens, jnp.int32(4))
    assert slots is not None and held(slots) == set(tokens.tolist())
    for name, plane in slots.planes.items():
        np.testing.assert_array_equal(plane[:4], rows[name])


def test_a_head_over_the_whole_vocabulary_needs_no_slots():
    weights = load("tiny", draft_head="q4").weights
    assert empty_slots(weights) is None
    hidden = jax.random.normal(jax.random.key(0), (8, weights.head.shape[1]))
    rounded, ids = draft_logits(weights, None, hidden)
    exact = np.asarray(logits(weights, hidden, config=case("q8_0").config))
    np.testing.assert_array_equal(ids, np.arange(weights.head.shape[0]))
    error = np.linalg.norm(np.asarray(rounded) - exact) / np.linalg.norm(exact)
    assert 0.01 < error < 0.08


@pytest.mark.parametrize(
    ("ids", "form", "message"),
    [
        ([], "same", "at least one"),
        ([1, 1], "same", "twice"),
        ([288], "same", "0..287"),
        ([-1], "same", "0..287"),
        ([1], "q5", "same, q4"),
        ([1], "q4", "multiple of 256.*use 'same'"),
    ],
)
def test_a_head_that_cannot_be_made_is_refused(ids, form, message):
    head = full_head(case("q8_0").weights)
    with pytest.raises(ValueError, match=message):
        make_draft_head(head, np.asarray(ids, int), 288, form)


def generated(model, sampling, depth=3, count=48):
    conversation = model.conversation(model.answers["tokens"])
    prompt = held(conversation.state.slots) if conversation.state.slots else set()
    bursts = list(conversation.run(sampling, fixed(depth, model), max_new_tokens=count))
    return [t for burst in bursts for t in burst.token_ids], conversation, prompt


LISTING = [("qwen35", "q8_0", "same"), ("qwen4exp", "f32_mtp", "same")]
if "iq4_mix" in names("qwen4exp"):  # in ../shared/golden; the small ones are too narrow
    LISTING.append(("qwen4exp", "iq4_mix", "q4"))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("architecture", "name", "form"), LISTING)
def test_a_draft_vocabulary_never_changes_text(architecture, name, form, sampling, monkeypatch):
    monkeypatch.setattr(DepthPolicy, "max_depth", MAX_DEPTH)  # one program for all depths
    model = listed(name, architecture, form)
    plain, _, _ = generated(case(name, architecture), sampling, depth=0)
    for depth in (1, 3, 5):
        text, conversation, prompt = generated(model, sampling, depth)
        assert text == plain
        assert sum(conversation.stats.accepted) > 0
        assert prompt == last_missing(model.answers["tokens"].tolist(), NUM_SLOTS)
        assert held(conversation.state.slots) == last_missing(conversation.ids, NUM_SLOTS)


def test_lists_of_one_size_share_their_programs():
    model = listed("q8_0")
    text, _, _ = generated(model, GREEDY)
    ready = len(model.programs.events)
    other = with_draft_head(model.weights, LISTED + 1, model.config.vocab)
    assert generated(dataclasses.replace(model, weights=other), GREEDY)[0] == text
    assert len(model.programs.events) == ready


def test_the_bundled_model_writes_the_same_with_a_list_of_512_through_a_4_bit_head():
    texts, accepted = [], []
    for draft_vocab, draft_head in (("full", None), (512, "q4")):
        model = load("tiny", draft_vocab=draft_vocab, draft_head=draft_head)
        decode = DecodeConfig(context=256, chunks=(64,))
        programs = Programs(model.config, decode, model.weights, ProgramStore(CACHE))
        conversation = Conversation(model.weights, programs)
        conversation.read(model.tokenizer.encode("class Stack:\n    def push(self, item):\n"))
        policy = fixed(4, model)  # pyright: ignore[reportArgumentType]
        bursts = list(conversation.run(SAMPLED, policy, max_new_tokens=120))
        texts.append([token for burst in bursts for token in burst.token_ids])
        accepted.append(sum(conversation.stats.accepted))
    assert texts[0] == texts[1]
    assert accepted[0] != accepted[1]  # there was something to get wrong


def test_rows_that_are_rounded_a_chunk_at_a_time_are_those_rounded_at_once(monkeypatch):
    head = full_head(case("q4_k_s").weights)
    whole = make_draft_head(head, np.arange(100), 288, "q4")
    monkeypatch.setattr("openjet_jax.draft_vocabulary._CHUNK", 32)
    parts = make_draft_head(head, np.arange(100), 288, "q4")
    for ours, theirs in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert whole.head.shape == (100, 256) and isinstance(whole.head, Packed)
    assert np.isfinite(whole.head.dense(0)).all()
