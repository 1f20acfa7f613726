"""The chunked delta rule against one step after another in float64, on inputs that are hard."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta_rule import CHUNK, Rows, delta_rule_chunked, unit_lower_inverse

WIDTH, KEY_HEADS, VALUE_HEADS = 32, 2, 4


def rows(count: int, *, keys: str, strength: float, decay: float) -> Rows:
    rng = np.random.default_rng(0)

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    k = unit(rng.standard_normal((count, KEY_HEADS, WIDTH)))
    if keys == "equal":
        k[:] = k[0]
    elif keys == "alternating":
        k[::2], k[1::2] = k[0], k[1]
    elif keys == "close":
        k = unit(k[:1] + 0.02 * k)
    return Rows(
        q=jnp.asarray(unit(rng.standard_normal(k.shape)) / WIDTH**0.5, jnp.float32),
        k=jnp.asarray(k, jnp.float32),
        v=jnp.asarray(rng.standard_normal((count, VALUE_HEADS, WIDTH)), jnp.float32),
        g=jnp.full((count, VALUE_HEADS), decay, jnp.float32),
        beta=jnp.full((count, VALUE_HEADS), strength, jnp.float32),
    )


def in_order(x: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Returns the state and the outputs of the four lines that define the rule, in float64."""
    x = jax.tree.map(lambda a: np.asarray(a, np.float64), x)
    state = np.zeros((VALUE_HEADS, WIDTH, WIDTH))
    outs = np.zeros(x.v.shape)
    for i in range(len(x.g)):
        for p in range(VALUE_HEADS):
            q, k = x.q[i, p % KEY_HEADS], x.k[i, p % KEY_HEADS]
            state[p] *= np.exp(x.g[i, p])
            state[p] += np.outer(k, x.beta[i, p] * (x.v[i, p] - k @ state[p]))
            outs[i, p] = q @ state[p]
    return state, outs


def relative_rms(y, x: np.ndarray) -> float:
    return float(np.sqrt(np.mean((np.asarray(y, np.float64) - x) ** 2) / np.mean(x**2)))


@pytest.mark.parametrize("keys", ["random", "equal", "alternating", "close"])
@pytest.mark.parametrize(("strength", "decay"), [(0.999, -1e-4), (0.5, -0.1), (0.9, -8.0)])
def test_chunks_give_what_single_steps_give_however_alike_the_keys_are(keys, strength, decay):
    x = rows(3 * CHUNK, keys=keys, strength=strength, decay=decay)
    state, outs = jax.jit(delta_rule_chunked)(
        jnp.zeros((VALUE_HEADS, WIDTH, WIDTH)), x, jnp.int32(3 * CHUNK)
    )
    expected_state, expected_outs = in_order(x)
    assert relative_rms(state, expected_state) < 1e-5
    assert relative_rms(outs, expected_outs) < 1e-5


def test_the_inverse_of_a_matrix_of_ones_is_exact():
    ones = jnp.tril(jnp.ones((CHUNK, CHUNK)), -1)
    np.testing.assert_array_equal(unit_lower_inverse(ones), np.eye(CHUNK) - np.eye(CHUNK, k=-1))
