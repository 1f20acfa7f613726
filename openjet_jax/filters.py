"""Top-k, top-p and min-p as pure functions of arrays, exact and without sorting a vocabulary.

All of them keep a prefix of one order: larger logits first, lower positions first among equals.
Logits hold no NaN here. Knows no state, no noise.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from openjet_jax.settings import CANDIDATES


def best_candidates(
    logits: Float[Array, "rows vocab"],
) -> tuple[Float[Array, "rows best"], Int[Array, "rows best"]]:
    """Returns the best `CANDIDATES` values of each row and their positions, as `lax.top_k` does.

    The best 64 elements lie in the 64 blocks of 64 with the largest maxima: each block ahead of
    another holds an element ahead of all of the other's. `lax.top_k` over a whole vocabulary is a
    full sort on a GPU.
    """
    rows, vocab = logits.shape
    if vocab <= CANDIDATES**2:
        values, index = jax.lax.top_k(logits, min(CANDIDATES, vocab))
        return values, index
    padding = -vocab % CANDIDATES
    blocks = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    blocks = blocks.reshape(rows, -1, CANDIDATES)
    _, chosen = jax.lax.top_k(blocks.max(axis=-1), CANDIDATES)
    # In order of position again, so that lax.top_k breaks ties by position.
    chosen = jnp.sort(chosen, axis=-1)
    finalists = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, -1)
    values, index = jax.lax.top_k(finalists, CANDIDATES)
    block = jnp.take_along_axis(chosen, index // CANDIDATES, axis=-1)
    return values, block * CANDIDATES + index % CANDIDATES


def keep_candidates(
    weights: Float[Array, "rows best"],
    top_k: Int[Array, ""],
    top_p: Float[Array, ""],
    min_p: Float[Array, ""],
) -> Bool[Array, "rows best"]:
    """Returns which candidates survive top-k, then top-p, then min-p.

    Args:
      weights: probabilities relative to the best, `exp((logit - best) / temperature)`, in
        descending order.
      top_k: candidates kept; 0 or more than there are keeps all.
      top_p: probability kept, the crossing token included; 1 keeps all.
      min_p: least probability kept, relative to the best.
    """
    among = (jnp.arange(weights.shape[-1])[None] < top_k) | (top_k == 0)
    weights = jnp.where(among, weights, 0)
    before = jnp.cumsum(weights, axis=-1) - weights
    needed = before < top_p * weights.sum(axis=-1, keepdims=True)
    return among & (needed | (top_p >= 1)) & (weights >= min_p)


def keep_tokens(
    logits: Float[Array, "rows vocab"],
    weights: Float[Array, "rows vocab"],
    top_k: Int[Array, ""],
    top_p: Float[Array, ""],
    min_p: Float[Array, ""],
) -> Bool[Array, "rows vocab"]:
    """Returns which tokens of a whole vocabulary survive top-k, then top-p, then min-p.

    A threshold is found bit by bit, the largest for which enough tokens, or enough probability,
    lie at or above it. Tokens equal to the last threshold are kept from the lowest position on,
    as many as are needed.

    Args:
      logits: decide the order.
      weights: as in `keep_candidates`, in any order; a monotone function of the logits.
      top_k: tokens kept; 0 keeps all.
      top_p: probability kept, the crossing token included; 1 keeps all.
      min_p: least probability kept, relative to the best.
    """
    rows, vocab = logits.shape
    keys = _ordered_keys(logits)
    wanted = jnp.where((top_k == 0) | (top_k > vocab), vocab, top_k)
    lowest = _largest(lambda t: (keys >= t).sum(axis=-1, keepdims=True) >= wanted, 32, rows)
    above = keys > lowest
    spare = wanted - above.sum(axis=-1, keepdims=True)
    inside = jnp.where(above, weights, 0)
    tied_mass = spare.astype(weights.dtype) * _weight_at(keys, weights, lowest)

    def mass(threshold):
        strictly = jnp.where(keys >= threshold, inside, 0).sum(axis=-1, keepdims=True)
        return strictly + jnp.where(threshold <= lowest, tied_mass, 0)

    target = top_p * mass(lowest)
    cut = jnp.maximum(lowest, _largest(lambda t: mass(t) >= target, 32, rows))
    cut = jnp.where(top_p >= 1, lowest, cut)
    missing = target - jnp.where(keys > cut, inside, 0).sum(axis=-1, keepdims=True)
    weight = jnp.maximum(_weight_at(keys, weights, cut), jnp.finfo(weights.dtype).tiny)
    limit = jnp.where(cut == lowest, spare, vocab)
    # Clipped before the cast too: an integer holds no quotient of a large and a tiny weight.
    needed = jnp.clip(jnp.ceil(missing / weight), 1, vocab).astype(jnp.int32)
    quota = jnp.where(top_p >= 1, limit, jnp.minimum(needed, limit))
    tied = keys == cut
    position = jnp.arange(vocab, dtype=jnp.uint32)[None]
    bound = _largest(
        lambda b: (tied & (position < b)).sum(axis=-1, keepdims=True) <= quota,
        vocab.bit_length(),
        rows,
    )
    return ((keys > cut) | (tied & (position < bound))) & (weights >= min_p)


def _ordered_keys(x: Float[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """Returns unsigned integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(
    holds: Callable[[UInt[Array, "rows 1"]], Bool[Array, "rows 1"]], bits: int, rows: int
) -> UInt[Array, "rows 1"]:
    """Returns the largest number below 2**bits for which `holds`, true up to it and false after."""

    def step(i, found):
        candidate = found | (jnp.uint32(1 << (bits - 1)) >> i.astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, found)

    return jax.lax.fori_loop(0, bits, step, jnp.zeros((rows, 1), jnp.uint32))


def _weight_at(
    keys: UInt[Array, "rows vocab"],
    weights: Float[Array, "rows vocab"],
    key: UInt[Array, "rows 1"],
) -> Float[Array, "rows 1"]:
    """Returns the weight of the tokens with this key; equal keys have equal weights."""
    return jnp.where(keys == key, weights, 0).max(axis=-1, keepdims=True)
