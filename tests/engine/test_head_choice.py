"""Tokens chosen while the head multiplies are those chosen from its logits.

Product and choice are their references here; the kernels' own tests compare them.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openjet_jax import head_choice
from openjet_jax.draft_vocabulary import draft_logits, empty_slots, hold
from openjet_jax.head_choice import choose_draft, choose_tokens, chooses_in_kernel
from openjet_jax.loading import load
from openjet_jax.projections import project
from openjet_jax.sampling import (
    adjust,
    choose,
    initial_sampling_state,
    log_probabilities,
    observe,
    restrict,
)
from openjet_jax.settings import Sampling, SamplingKind
from openjet_jax.tiling import tiled
from openjet_jax.weights import Packed, Tiled
from pallas_kernels import decode_head, decode_inputs, decode_product, tile_choice
from pallas_kernels.decode_cuts import Tiles
from pallas_kernels.formats import FORMATS
from pallas_kernels.tile_choice import Product, Winner

VOCAB, USED, K = 1056, 1050, 256
DRAFTS = jnp.asarray([5, 9, 5, 1000, 3, 2, 1], jnp.int32)


DENSE: dict[tuple[int, ...], jax.Array] = {}
"""The matrices that words stand for, by the shape of the words."""


def tiles_of(packed: Packed) -> Tiled:
    dense, words = packed.dense(0), tiled(jax.tree.map(jnp.copy, packed), keep_rows=False)
    assert isinstance(words, Tiled)
    DENSE[words.stacks[0].shape] = dense
    return words


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    def unprepared(x, block):
        return types.SimpleNamespace(activations=types.SimpleNamespace(x=x, operand=block.operand))

    def product(prepared, weights, *_, first=0):
        return jnp.matmul(prepared.x, DENSE[weights.shape].T, precision="highest")

    def choosing(x, weights, layer, block, tiles, operands, *, used, candidates):
        logits = product(x, weights)
        return decode_head.decode_head_reference(logits, operands, used=used, candidates=candidates)

    monkeypatch.setattr(decode_product, "decode_product", product)
    monkeypatch.setattr(decode_inputs, "decode_inputs", unprepared)
    monkeypatch.setattr(decode_head, "decode_head", choosing)


@pytest.fixture(scope="module", params=["q6_k", "iq4_xs"])
def head(request):
    rng, planes = np.random.default_rng(0), {}
    for name, spec in FORMATS[request.param].plane_specs(VOCAB, K).items():
        values = rng.integers(0, 256, spec.shape).astype(np.uint8)
        if spec.dtype == np.float16:
            values = rng.normal(0, 2e-4, spec.shape).astype(np.float16)
        planes[name] = jnp.asarray(values.view(spec.dtype))[None]
    packed = Packed(stacks=(planes,), formats=(request.param,), table=((0, 0),), shape=(VOCAB, K))
    return tiles_of(packed)


def state_of(vocab, used, **settings):
    sampling = Sampling(seed=3, logit_bias={7: 2.0, 8: -np.inf}, **settings)
    state = initial_sampling_state(sampling, vocab, used, prompt=[4, 5, 6])
    return observe(state, jnp.asarray([10, 11, 10], jnp.int32), 3)


SETTINGS = [
    dict(temperature=0.0),
    dict(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
    dict(temperature=0.8, top_k=64),
]
PENALTIES = dict(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("adjusted", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_rows_get_the_tokens_that_their_logits_give(head, settings, adjusted, masked):
    state = state_of(VOCAB, USED, **settings, **PENALTIES)
    method = Sampling(**settings).kind.method
    kind = SamplingKind(method=method, adjusted=adjusted, masked=masked)
    assert chooses_in_kernel(head, kind)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(8, K)).astype(np.float32))
    allowed = jnp.asarray(rng.integers(0, 2**32, (8, VOCAB // 32), np.uint32))
    positions = jnp.arange(100, 108, dtype=jnp.int32)
    chosen, logprobs, _ = choose_tokens(
        x, head, positions, state, kind, DRAFTS, vocab_used=USED, allowed=allowed
    )
    raw = project(x, head)
    logits = adjust(raw, state, kind, DRAFTS, jnp.arange(8), vocab_used=USED)
    logits = restrict(logits, allowed) if masked else logits
    want = choose(logits, positions, state, kind)
    assert np.array_equal(chosen, want)
    expected = log_probabilities(raw, want, vocab_used=USED)
    np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [dict(method="plain"), dict(method="full"), dict(ranked=True)])
def test_other_kinds_choose_from_logits(head, kind):
    assert not chooses_in_kernel(head, SamplingKind(**kind))


def test_a_head_that_chooses_goes_through_its_own_winner(head, monkeypatch):
    (name,), default = head.formats, Tiles(overlap=True)
    choosing = Product(block=name, outputs=VOCAB, k=K, rows=8, epilogue="choice")
    plain = dataclasses.replace(choosing, epilogue="none")
    found = {
        product: Winner(
            product=product,
            tiles=Tiles(stages=stages),
            us=1.0,
            default_us=2.0,
            commit=None,
            date="",
        )
        for product, stages in ((choosing, 3), (plain, 1))
    }
    assert head_choice._tiles(head, 8) == default
    monkeypatch.setattr(tile_choice, "winners_on", lambda device: found)
    assert head_choice._tiles(head, 8) == dataclasses.replace(default, stages=3)


@pytest.fixture(scope="module")
def drafting():
    weights = load("tiny", draft_vocab=512).weights
    slots = hold(empty_slots(weights), weights, jnp.arange(8000, 8004), jnp.int32(4))
    assert weights.mtp is not None and weights.mtp.draft is not None
    assert isinstance(weights.mtp.draft.head, Packed)
    rows = tiles_of(weights.mtp.draft.head)
    draft = dataclasses.replace(weights.mtp.draft, head=rows)
    mtp = dataclasses.replace(weights.mtp, draft=draft)
    return dataclasses.replace(weights, mtp=mtp), slots


@pytest.mark.parametrize("adjusted", [False, True])
@pytest.mark.parametrize("settings", SETTINGS[:2], ids=str)
def test_drafts_are_those_of_the_list_and_the_slots(drafting, settings, adjusted):
    weights, slots = drafting
    vocab = weights.head.shape[0]
    state = state_of(vocab, vocab, **settings, **PENALTIES)
    kind = SamplingKind(method=Sampling(**settings).kind.method, adjusted=adjusted)
    rng, found = np.random.default_rng(2), set()
    for position in range(4):
        x = jnp.asarray(rng.normal(size=(1, K)).astype(np.float32))
        at, lengths = jnp.full(1, position, jnp.int32), jnp.full(1, 2, jnp.int32)
        given = (state, kind, DRAFTS, lengths)
        got = choose_draft(x, weights, slots, at, *given, vocab_used=vocab)
        raw, ids = draft_logits(weights, slots, x)
        logits = adjust(raw, *given, vocab_used=vocab, ids=ids)
        want = choose(logits, at, state, kind, ids)
        assert np.array_equal(got, want)
        found.add(int(got[0]))
    assert len(found) > 1
