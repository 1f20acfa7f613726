"""Speculation over a model small enough to enumerate: its text is an exact sample of the target."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_reference
from scipy import stats

from openjet_jax.config import MAX_DEPTH, ROWS
from openjet_jax.sampling import (
    accept,
    adjust,
    choose,
    initial_sampling_state,
    observe,
)
from openjet_jax.settings import Sampling, SamplingKind

VOCAB, USED = 20, 12
PROMPT = [3, 1, 4]
RUNS, LENGTH = 4096, 3
BATCH, LONGEST = 128, 24

rng = np.random.default_rng(0)
TARGET = rng.normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32)
"""Logits after each token."""
IDS = np.array([7, 2, 9, 0, 11, 4, 1, -1, 3, 8], np.int32)
"""The drafter knows nine of the twelve tokens, and has an empty slot."""
DRAFTER = (TARGET[:, IDS] + rng.normal(0, 0.7, (VOCAB, len(IDS)))).astype(np.float32)

SETTINGS = {
    "plain": Sampling(temperature=1.0),
    "top-k": Sampling(temperature=0.7, top_k=5),
    "top-k with penalties": Sampling(
        temperature=1.3,
        top_k=8,
        top_p=0.9,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias={2: 1.0, 6: -1.0},
    ),
    "top-p and min-p": Sampling(temperature=1.5, top_p=0.85, min_p=0.05),
    "top-p with penalties": Sampling(
        temperature=0.9, top_p=0.9, repetition_penalty=0.8, presence_penalty=-0.7, logit_bias={5: 2}
    ),
}


def draft(state, kind, newest, position):
    ids = jnp.asarray(IDS)

    def step(i, carry):
        drafts, newest = carry
        logits = jnp.asarray(DRAFTER)[newest][None]
        logits = adjust(logits, state, kind, drafts, i[None], vocab_used=USED, ids=ids)
        newest = choose(logits, position + i[None], state, kind, ids)[0]
        return drafts.at[i].set(newest), newest

    drafts = jnp.zeros(ROWS - 1, jnp.int32)
    return jax.lax.fori_loop(0, MAX_DEPTH, step, (drafts, newest))[0]


def cycle(carry, kind, depth, biased):
    """Drafts, verifies, accepts, commits."""
    state, newest, position, text, accepted_before = carry
    drafts = draft(state, kind.draft, newest, position)
    rows = jnp.arange(ROWS)
    logits = jnp.asarray(TARGET)[jnp.concatenate([newest[None], drafts])]
    logits = adjust(logits, state, kind, drafts, rows, vocab_used=USED)
    tokens = choose(logits, position + rows, state, kind)
    # A biased rule takes a draft for the row's token wherever it is likely enough.
    likely = logits[rows[:-1], drafts] > logits[:-1].max(axis=-1) - 1
    taken = biased & jnp.pad(likely, (0, 1)) & (rows < depth)
    tokens = jnp.where(taken, jnp.pad(drafts, (0, 1)), tokens)
    accepted = accept(drafts, depth, tokens)
    state = observe(state, tokens, accepted + 1)
    text = jax.lax.dynamic_update_slice(text, tokens, (position - len(PROMPT),))
    return state, tokens[accepted], position + accepted + 1, text, accepted_before + accepted


@functools.partial(jax.jit, static_argnames="kind")
def speculate_batch(state, seeds, cycles, depth, biased, *, kind):
    def one(seed):
        text = jnp.zeros((LONGEST + 1) * ROWS, jnp.int32)  # what overshoots fits too
        seeded = dataclasses.replace(state, seed=seed)
        carry = seeded, jnp.int32(PROMPT[-1]), jnp.int32(len(PROMPT)), text, jnp.int32(0)
        carry = jax.lax.fori_loop(0, cycles, lambda _, c: cycle(c, kind, depth, biased), carry)
        return carry[-2], carry[-1]

    return jax.vmap(one)(seeds)


def speculate(sampling, seeds, length, depth=3, biased=False):
    """Texts [runs, length], and the drafts a cycle accepted on average."""
    state = initial_sampling_state(sampling, VOCAB, USED, PROMPT)
    texts, accepted = zip(
        *(
            speculate_batch(state, batch, length, depth, biased, kind=sampling.kind)
            for batch in seeds.reshape(-1, BATCH, 2)
        ),
        strict=True,
    )
    return np.concatenate(texts)[:, :length], np.mean(accepted) / length


def random_seeds(runs):
    return np.random.default_rng(1).integers(0, 2**32, (runs, 2), dtype=np.uint32)


@functools.cache
def marginals(name):
    """The target's distribution of each position [LENGTH, VOCAB], by enumeration."""
    sampling = SETTINGS[name]
    out = np.zeros((LENGTH, VOCAB))
    paths = {(): 1.0}
    for position in range(LENGTH):
        longer = {}
        for path, p in paths.items():
            logits = TARGET[[*PROMPT, *path][-1]]
            logits = sampling_reference.adjusted(logits, PROMPT, path, sampling, USED)
            step = p * sampling_reference.distribution(logits, sampling)
            out[position] += step
            longer |= {(*path, int(t)): step[t] for t in np.flatnonzero(step)}
        paths = longer
    return out


def p_values(texts, expected):
    """Chi-square by position; rare tokens share one bin, impossible ones must not occur."""
    out = []
    for position in range(LENGTH):
        p = expected[position]
        observed = np.bincount(texts[:, position], minlength=VOCAB)
        if observed[p == 0].any():
            return [0.0]
        common = p * len(texts) >= 8
        counts = np.append(observed[common], observed[~common].sum())
        masses = np.append(p[common], p[~common].sum())
        some = masses > 0
        out.append(stats.chisquare(counts[some], masses[some] * len(texts)).pvalue)
    return out


BONFERRONI = 1e-3 / (len(SETTINGS) * LENGTH)


@pytest.mark.parametrize("name", SETTINGS)
def test_speculative_text_has_the_distribution_of_the_target(name):
    texts, accepted = speculate(SETTINGS[name], random_seeds(RUNS), LENGTH)
    assert min(p_values(texts, marginals(name))) > BONFERRONI
    assert accepted > 0.3  # there was something to get wrong


@pytest.mark.parametrize("name", ["plain", "top-k with penalties", "top-p and min-p"])
def test_a_biased_acceptance_rule_is_caught(name):
    texts, _ = speculate(SETTINGS[name], random_seeds(RUNS), LENGTH, biased=True)
    assert min(p_values(texts, marginals(name))) < BONFERRONI


@pytest.mark.parametrize("name", SETTINGS)
def test_text_is_the_same_at_every_depth(name):
    seeds = random_seeds(BATCH)
    plain, none = speculate(SETTINGS[name], seeds, LONGEST, depth=0)
    means = [none]
    for depth in range(1, MAX_DEPTH + 1):
        text, accepted = speculate(SETTINGS[name], seeds, LONGEST, depth)
        np.testing.assert_array_equal(text, plain)
        means.append(accepted)
    assert means[0] == 0 and means == sorted(means) and means[-1] > 0.5


def test_text_is_that_of_one_token_at_a_time_in_numpy():
    sampling = dataclasses.replace(SETTINGS["top-k with penalties"], seed=2**40 + 12345)
    seed = initial_sampling_state(sampling, VOCAB, USED).seed
    texts, _ = speculate(sampling, np.tile(seed, (BATCH, 1)), LONGEST)
    expected: list[int] = []
    for _ in range(LONGEST):
        logits = TARGET[[*PROMPT, *expected][-1]]
        token = sampling_reference.next_token(logits, PROMPT, expected, sampling, USED)
        expected.append(token)
    np.testing.assert_array_equal(texts, np.tile(expected, (BATCH, 1)))


@pytest.mark.parametrize("spread", [0.15, 0.3, 0.6])
def test_shared_noise_accepts_nearly_as_often_as_ideal_rejection(spread):
    draws, vocab = 8000, 200
    generator = np.random.default_rng(5)
    target = generator.normal(0, 2, vocab)
    drafter = target + generator.normal(0, spread, vocab)
    sampling = Sampling(temperature=1.0, seed=1)
    state = initial_sampling_state(sampling, vocab, vocab)

    @jax.jit
    def sample(logits):
        def one(position):
            return choose(logits[None], position[None], state, SamplingKind(method="plain"))[0]

        return jax.lax.map(one, jnp.arange(draws), batch_size=1000)

    first, second = (sample(jnp.asarray(x, jnp.float32)) for x in (target, drafter))
    p, q = (sampling_reference.distribution(x, sampling) for x in (target, drafter))
    ideal = np.minimum(p, q).sum()
    assert 0.85 * ideal <= np.mean(np.asarray(first) == np.asarray(second)) <= ideal + 0.02
