"""Rows of a cache in q8_0: how far off a value may be, whatever its size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import BLOCK, attention_reference
from pallas_kernels.cached_rows import GROUP, Q8Rows, empty, like, quantized, values


def rows(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_no_value_is_off_by_more_than_half_a_scale(size):
    x = size * rows(5, 3, 64)
    packed = jax.jit(quantized)(x)
    off = np.abs(np.asarray(values(packed), np.float64) - np.asarray(x, np.float64))
    groups = off.reshape(5, 3, 2, GROUP).max(-1)
    assert np.all(groups <= 0.5001 * np.asarray(packed.scales, np.float64))
    largest = np.abs(np.asarray(x, np.float64)).reshape(5, 3, 2, GROUP).max(-1)
    assert np.all(np.asarray(packed.scales, np.float64) <= largest / 127 * (1 + 2**-8))


def test_scales_have_the_same_bits_in_and_out_of_a_program():
    x = rows(64, 2, 64)
    alone, compiled = quantized(x), jax.jit(lambda x: quantized(x * 1.0))(x)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_zeros_and_a_row_of_one_size_are_kept_exactly():
    x = jnp.stack([jnp.zeros(64), jnp.full(64, 2.0) * 127])
    np.testing.assert_array_equal(values(quantized(x)), x)


def test_an_empty_cache_takes_rows_in_its_own_format():
    cache = empty((4, 64), "q8_0")
    assert isinstance(cache, Q8Rows) and cache.shape == (4, 64)
    assert jax.tree.map(jnp.shape, like(cache, rows(4, 64))) == jax.tree.map(jnp.shape, cache)
    floats = like(empty((4, 64), "bfloat16"), rows(4, 64))
    assert isinstance(floats, jax.Array) and floats.dtype == jnp.bfloat16
    bits = sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) * 8
    assert bits == 8.5 * 4 * 64


def test_a_width_that_is_no_whole_number_of_groups_is_refused():
    with pytest.raises(ValueError, match="must be a multiple of GROUP=32"):
        empty((4, 48), "q8_0")
    with pytest.raises(ValueError, match="must be a multiple of GROUP=32"):
        quantized(rows(4, 48))


def test_attention_over_q8_rows_is_attention_over_their_values():
    k, v = (quantized(rows(BLOCK, 2, 64, seed=seed)) for seed in (1, 2))
    q, positions = rows(3, 4, 64), jnp.array([7, 100, -1])
    ours = attention_reference(q, k, v, positions, jnp.int32(101))
    theirs = attention_reference(q, values(k), values(v), positions, jnp.int32(101))
    np.testing.assert_array_equal(ours, theirs)
