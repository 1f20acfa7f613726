import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_reference
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scipy import stats

from openjet_jax.config import ROWS
from openjet_jax.sampling import (
    accept,
    adjust,
    choose,
    gumbel,
    gumbel_from_bits,
    initial_sampling_state,
    log_probabilities,
    observe,
    top_log_probabilities,
)
from openjet_jax.settings import Sampling, SamplingKind

VOCAB, USED = 100, 97
ALL_PENALTIES = Sampling(
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.25,
    logit_bias={3: 2.0, 5: -math.inf, 96: -1.5},
)


@functools.partial(jax.jit, static_argnames="kind")
def verify(logits, state, kind, drafts, position):
    """What a cycle does with its rows: every row with its own prefix."""
    rows = jnp.arange(ROWS)
    logits = adjust(logits, state, kind, drafts, rows, vocab_used=USED)
    return logits, choose(logits, position + rows, state, kind)


jitted_choose = jax.jit(choose, static_argnames="kind")


def request(sampling, prompt=(), generated=()):
    state = initial_sampling_state(sampling, VOCAB, USED, prompt)
    past_the_count = np.full(64, 7)
    tokens = np.concatenate([generated, past_the_count]).astype(np.int32)
    return observe(state, jnp.asarray(tokens), len(generated))


@hypothesis_settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rng=st.integers(0, 2**32 - 1).map(np.random.default_rng),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 8, 64, 80]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.05]),
    adjusted=st.booleans(),
)
def test_every_row_equals_one_token_at_a_time_in_numpy(
    rng, seed, temperature, top_k, top_p, min_p, adjusted
):
    sampling = dataclasses.replace(
        ALL_PENALTIES if adjusted else Sampling(),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
    logits = rng.normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
    prompt, generated = rng.integers(0, USED, 12).tolist(), rng.integers(0, 12, 9)
    drafts = rng.integers(0, 12, ROWS - 1).astype(np.int32)
    state = request(sampling, prompt, generated)
    position = len(prompt) + len(generated)
    got_logits, got = verify(logits, state, sampling.kind, drafts, position)
    for row in range(ROWS):
        prefix = [*generated, *drafts[:row]]
        args = logits[row], prompt, prefix, sampling, USED
        expected = sampling_reference.adjusted(*args)
        np.testing.assert_allclose(got_logits[row], expected, rtol=1e-5, atol=1e-5)
        assert got[row] == sampling_reference.next_token(*args)


def test_threefry_of_the_reference_gives_the_published_vectors():
    assert sampling_reference.threefry((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
    ones = (0xFFFFFFFF, 0xFFFFFFFF)
    assert sampling_reference.threefry(ones, ones) == (0x1CB996FC, 0xBB002BE7)


def test_noise_is_finite_and_monotone_over_all_bit_patterns():
    edges = [0, 1, 2**8, 2**23, 2**24 - 1, 2**31 - 1, 2**31, 2**32 - 129, 2**32 - 2, 2**32 - 1]
    steps = np.arange(0, 2**32, 65_537, dtype=np.uint32)
    bits = np.sort(np.concatenate([np.array(edges, np.uint32), steps]))
    noise = np.asarray(jax.jit(gumbel_from_bits)(bits))
    assert np.isfinite(noise).all()
    assert (np.diff(noise) <= 1e-6).all()
    assert noise[0] > 22 and noise[-1] < -2.8


def test_noise_is_standard_gumbel_and_depends_on_seed_position_and_token():
    def draw(seed, first, tokens):
        positions = jnp.arange(first, first + 50)[:, None]
        return np.asarray(gumbel(jnp.array(seed, jnp.uint32), positions, tokens[None]))

    def correlation(a, b):
        return abs(np.corrcoef(a.ravel(), b.ravel())[0, 1])

    tokens = jnp.arange(400)
    base = draw([1, 2], 10, tokens)
    assert stats.kstest(base.ravel(), "gumbel_r").pvalue > 1e-3
    np.testing.assert_array_equal(draw([1, 2], 11, tokens)[:-1], base[1:])
    np.testing.assert_array_equal(draw([1, 2], 10, tokens[::-1]), base[:, ::-1])
    assert correlation(draw([2, 2], 10, tokens), base) < 0.03
    assert correlation(draw([1, 3], 10, tokens), base) < 0.03
    assert correlation(base[1:], base[:-1]) < 0.03
    assert correlation(base[:, 1:], base[:, :-1]) < 0.03


def test_greedy_takes_the_lowest_id_among_equals_and_never_nan_or_padding():
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[0, [4, 9]] = 1
    logits[1, [2, 9]] = np.nan, 1
    logits[2, :] = np.nan
    logits[3, 98] = 5
    logits[4, [0, 1]] = -0.0, 0.0
    logits[4, 2:] = -1
    logits[5, [3, 6]] = np.inf
    drafts = np.zeros(ROWS - 1, np.int32)
    _, tokens = verify(logits, request(Sampling()), Sampling().kind, drafts, 0)
    np.testing.assert_array_equal(tokens[:6], [4, 9, 0, 0, 0, 3])


@pytest.mark.parametrize("method", ["plain", "top_k", "full"])
def test_sampling_survives_nan_infinity_and_banned_rows(method):
    logits = np.random.default_rng(0).normal(0, 1, (ROWS, VOCAB)).astype(np.float32)
    logits[0, :50] = np.nan
    logits[1, 20] = np.inf
    logits[2, :] = -np.inf
    logits[3, np.arange(VOCAB) != 8] = -np.inf
    state = request(Sampling(temperature=1.0, top_k=20, top_p=0.9))
    kind = SamplingKind(method=method)
    _, tokens = verify(logits, state, kind, np.zeros(ROWS - 1, np.int32), 0)
    assert 50 <= tokens[0] < USED
    np.testing.assert_array_equal(tokens[1:4], [20, 0, 8])


def test_a_row_depends_on_its_own_logits_and_prefix_only():
    rng = np.random.default_rng(1)
    sampling = dataclasses.replace(ALL_PENALTIES, temperature=1.0, top_p=0.9, seed=5)
    state = request(sampling, [1, 2], [3, 4])
    logits = rng.normal(0, 1, (ROWS, VOCAB)).astype(np.float32)
    drafts = rng.integers(0, USED, ROWS - 1).astype(np.int32)
    base_logits, base = verify(logits, state, sampling.kind, drafts, 4)
    for row in range(ROWS):
        other = np.full_like(logits, np.nan)
        other[row] = logits[row]
        later = drafts.copy()
        later[row:] = 11
        got_logits, got = verify(other, state, sampling.kind, later, 4)
        np.testing.assert_array_equal(got_logits[row], base_logits[row])
        assert got[row] == base[row]


def test_the_full_search_and_the_blocks_choose_the_same_tokens():
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(0, 2, (64, 4500)).astype(np.float32))
    sampling = Sampling(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, seed=2**64 - 1)
    state = initial_sampling_state(sampling, 4500, 4500)
    rows = jnp.arange(64)
    by_blocks = jitted_choose(logits, rows, state, SamplingKind(method="top_k"))
    by_search = jitted_choose(logits, rows, state, SamplingKind(method="full"))
    np.testing.assert_array_equal(by_blocks, by_search)


@pytest.mark.parametrize("method", ["greedy", "plain", "top_k", "full"])
def test_permuted_columns_with_their_ids_choose_the_same_tokens(method):
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1, (ROWS, VOCAB)).astype(np.float32)
    kind = SamplingKind(method=method, adjusted=True)
    sampling = dataclasses.replace(ALL_PENALTIES, temperature=1.0, top_k=20, top_p=0.8)
    state = request(sampling, [9, 8], [7, 6, 7])
    drafts = jnp.asarray(rng.integers(0, USED, ROWS - 1).astype(np.int32))
    rows = jnp.arange(ROWS)
    _, expected = verify(logits, state, kind, drafts, 0)
    empty_slots = [-1, VOCAB + 3]
    ids = np.concatenate([rng.permutation(VOCAB), empty_slots]).astype(np.int32)
    columns = logits[:, np.clip(ids, 0, VOCAB - 1)]
    columns[:, -2:] = 100
    ids = jnp.asarray(ids)
    adjusted = adjust(jnp.asarray(columns), state, kind, drafts, rows, vocab_used=USED, ids=ids)
    np.testing.assert_array_equal(choose(adjusted, rows, state, kind, ids), expected)


def test_observing_counts_duplicates_and_ignores_what_lies_past_the_count():
    state = request(Sampling(), [5, 5, 9], [4, 4, 4, 2])
    assert set(np.flatnonzero(state.prompt_seen)) == {5, 9}
    np.testing.assert_array_equal(state.counts[:8], [0, 0, 1, 0, 3, 0, 0, 0])
    state = observe(state, jnp.array([2, 4, 1], jnp.int32), jnp.int32(2))
    np.testing.assert_array_equal(state.counts[:8], [0, 0, 2, 0, 4, 0, 0, 0])


@pytest.mark.parametrize(
    "tokens, num_drafts, accepted",
    [
        ([1, 2, 3, 9], 3, 3),
        ([1, 2, 3, 9], 2, 2),
        ([1, 2, 3, 9], 0, 0),
        ([0, 2, 3, 9], 3, 0),
        ([1, 0, 3, 9], 3, 1),
        ([1, 2, 0, 9], 3, 2),
    ],
)
def test_accepted_is_the_longest_prefix_of_drafts_that_were_chosen(tokens, num_drafts, accepted):
    assert accept(jnp.array([1, 2, 3]), num_drafts, jnp.array(tokens)) == accepted


def test_log_probabilities_are_of_raw_logits_over_the_used_vocabulary():
    logits = np.random.default_rng(4).normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    logits[:, USED:] = 50
    tokens = np.arange(ROWS, dtype=np.int32)
    used = logits[:, :USED].astype(np.float64)
    expected = used[tokens, tokens] - np.log(np.exp(used).sum(axis=1))
    got = log_probabilities(jnp.asarray(logits), jnp.asarray(tokens), vocab_used=USED)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_the_likeliest_tokens_are_of_raw_logits_over_the_used_vocabulary():
    logits = np.random.default_rng(5).normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    logits[:, USED:] = 50
    logits[:, 7] = logits[:, 3]
    used = logits[:, :USED].astype(np.float64)
    log_p = used - np.log(np.exp(used).sum(axis=1, keepdims=True))
    order = np.argsort(-log_p, axis=1, kind="stable")[:, :20]
    values, ids = top_log_probabilities(jnp.asarray(logits), vocab_used=USED)
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(values, np.take_along_axis(log_p, order, 1), rtol=1e-5)


def test_every_number_a_user_sets_is_an_operand():
    logits = np.zeros((ROWS, VOCAB), np.float32)
    drafts = np.zeros(ROWS - 1, np.int32)
    first = Sampling(temperature=1.0, top_k=3, presence_penalty=0.1)
    program = verify.lower(logits, request(first), first.kind, drafts, 0).as_text()
    other = dataclasses.replace(
        ALL_PENALTIES, temperature=0.3, top_k=60, top_p=0.5, min_p=0.1, seed=2**63
    )
    assert other.kind == first.kind
    state = request(other, [1], [2])
    assert verify.lower(logits, state, other.kind, drafts, 9).as_text() == program


def test_a_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="token 97 must be below vocab_used=97"):
        initial_sampling_state(Sampling(logit_bias={97: 1.0}), VOCAB, USED)
