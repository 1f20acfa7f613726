import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_reference
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from openjet_jax.filters import best_candidates, keep_candidates, keep_tokens
from openjet_jax.settings import CANDIDATES, Sampling

best = jax.jit(best_candidates)
keep_best = jax.jit(keep_candidates)
keep_all = jax.jit(keep_tokens)


def tied_rows(seed, rows, vocab, levels, banned):
    """Rows with many equal logits, some of them -inf."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-levels, levels + 1, (rows, vocab)).astype(np.float32) / 8
    logits[rng.random((rows, vocab)) < banned] = -np.inf
    return logits


def in_order(row):
    return np.lexsort((np.arange(len(row)), -row.astype(np.float64)))


@pytest.mark.parametrize("vocab", [1, 20, 64, 4096, 4097, 10_007, 65_536])
@pytest.mark.parametrize("levels, banned", [(1, 0.0), (40, 0.5), (10**6, 0.0), (40, 0.999)])
def test_best_candidates_are_those_of_a_sort_with_ties_and_bans(vocab, levels, banned):
    logits = tied_rows(vocab, 3, vocab, levels, banned)
    values, index = best(logits)
    for row in range(3):
        expected = in_order(logits[row])[:CANDIDATES]
        np.testing.assert_array_equal(index[row], expected)
        np.testing.assert_array_equal(values[row], logits[row, expected])


def test_best_candidates_of_a_banned_row_are_its_first_tokens():
    _, index = best(np.full((1, 5000), -np.inf, np.float32))
    np.testing.assert_array_equal(index[0], np.arange(CANDIDATES))


@pytest.mark.parametrize("top_k", [1, 2, 63, 65, 200, 299, 300, 1000, 0])
@pytest.mark.parametrize("levels", [1, 30, 10**6])
def test_threshold_search_keeps_exactly_the_top_k_of_a_sort(top_k, levels):
    logits = tied_rows(top_k, 4, 300, levels, 0.2)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    kept = keep_all(logits, weights, jnp.int32(top_k), jnp.float32(1), jnp.float32(0))
    for row in range(4):
        expected = np.zeros(300, bool)
        expected[in_order(logits[row])[: top_k or 300]] = True
        np.testing.assert_array_equal(kept[row], expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    levels=st.sampled_from([2, 30, 10**6]),
    banned=st.sampled_from([0.0, 0.3]),
    temperature=st.sampled_from([0.3, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 64, 90, 150]),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_both_filters_keep_what_a_sort_keeps(
    seed, levels, banned, temperature, top_k, top_p, min_p
):
    logits = tied_rows(seed, 1, 100, levels, banned) / np.float32(max(1, levels / 30))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assume(_is_clear(logits[0], sampling))
    expected = sampling_reference.distribution(logits[0].astype(np.float64), sampling) > 0
    limits = jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p)
    weights = np.exp((logits - logits.max()) / np.float32(temperature))
    # A token of weight 0 may be kept or not: it is never chosen.
    some = weights[0] > 0
    kept = np.asarray(keep_all(logits, weights, *limits))[0]
    np.testing.assert_array_equal(kept[some], expected[some])
    if 0 < top_k <= CANDIDATES:
        values, index = best(logits)
        weights = np.exp((values - logits.max()) / np.float32(temperature))
        kept = np.zeros(100, bool)
        kept[index[0]] = np.asarray(keep_best(weights, *limits))[0]
        np.testing.assert_array_equal(kept[some], expected[some])


def _is_clear(row, sampling):
    """Whether no sum lies so close to top_p that rounding decides, nor a ratio to min_p."""
    p = np.exp((row.astype(np.float64) - row.max()) / sampling.temperature)
    ratios = np.abs(p - sampling.min_p)
    p = p[in_order(row)][: sampling.top_k or len(p)]
    sums = np.abs(np.cumsum(p) / p.sum() - sampling.top_p)
    close = sampling.top_p < 1 and sums.min() < 1e-5
    return not close and not ((ratios > 0) & (ratios < 1e-6)).any()


def test_top_p_keeps_the_token_that_crosses_the_line_and_equals_from_the_lowest_position():
    logits = np.zeros((1, 8), np.float32)
    limits = jnp.int32(0), jnp.float32(0.3), jnp.float32(0)
    expected = np.arange(8) < 3
    np.testing.assert_array_equal(keep_all(logits, np.exp(logits), *limits)[0], expected)
    np.testing.assert_array_equal(keep_best(np.exp(logits), *limits)[0], expected)


def test_top_p_counts_only_the_mass_that_top_k_kept_among_equals():
    logits = np.array([[1.0, 0, 0, 0, 0, 0]], np.float32)
    weights = np.exp(logits - 1)
    limits = jnp.int32(3), jnp.float32(0.75), jnp.float32(0)
    # top-k keeps weights e, 1, 1: the first is .576 of their sum, the first two are .788.
    expected = [True, True, False, False, False, False]
    np.testing.assert_array_equal(keep_all(logits, weights, *limits)[0], expected)
    np.testing.assert_array_equal(keep_best(weights, *limits)[0], expected)


def test_rows_do_not_look_at_each_other():
    logits = tied_rows(3, 8, 500, 50, 0.1)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    limits = jnp.int32(90), jnp.float32(0.8), jnp.float32(0.01)
    together = np.asarray(keep_all(logits, weights, *limits))
    logits[1:], weights[1:] = -np.inf, 0
    np.testing.assert_array_equal(keep_all(logits, weights, *limits)[0], together[0])
