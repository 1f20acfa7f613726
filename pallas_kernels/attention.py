"""Causal attention of a few rows against a long key-value cache, by blocks of positions.

softmax(q k^T / sqrt(width)) v with float32 online softmax (Milakov and Gimelshein, 2018). Blocks
are fixed by position, so a row's bits depend on its own history alone: not on the capacity of the
cache, on the other rows, or on what stands in the cache beyond the row's position.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.cached_rows import CachedRows, block_of

BLOCK = 256
"""Positions of one block; caches hold a whole number of blocks."""


def attention_reference(
    q: Float[Array, "rows heads width"],
    k: CachedRows,
    v: CachedRows,
    positions: Int[Array, " rows"],
    end: Int[Array, ""],
    first: int = 0,
) -> Float[Array, "rows heads width"]:
    """Returns, for each row, attention over the keys at `first <= position <= positions[row]`.

    Args:
      q: queries, normalised and rotated. Head h reads KV head h // (heads / kv_heads).
      k: cached keys, any float dtype.
      v: cached values.
      positions: position of each row.
      end: blocks from this position on are not visited; at least 1 + the last live position.
      first: first position that holds a key.

    Returns:
      float32 outputs. A row that sees no key gets zeros.

    Raises:
      ValueError: the capacity is not a whole number of blocks (a slice would be clamped).
    """
    rows, heads, width = q.shape
    capacity, kv_heads, _ = k.shape
    if capacity % BLOCK:
        raise ValueError(f"{capacity=} must be a multiple of {BLOCK=}")
    group = heads // kv_heads
    scale = jnp.float32(1 / width**0.5)
    grouped = jnp.moveaxis(q.reshape(rows, kv_heads, group, width), 0, 2) * scale

    def body(block, carry):
        top, total, acc = carry
        start = block * BLOCK
        at = start + jnp.arange(BLOCK)
        keys, values = block_of(k, start, BLOCK), block_of(v, start, BLOCK)
        seen = (at[None, :] <= positions[:, None]) & (at[None, :] >= first)
        values = jnp.where(jnp.any(seen, 0)[:, None, None], values, 0.0)
        seen = seen[None, None]
        scores = jnp.einsum("kgrd,tkd->kgrt", grouped, keys, precision="highest")
        scores = jnp.where(seen, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, -1, keepdims=True))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights = jnp.exp(scores - base)
        shrink = jnp.exp(top - base)
        total = total * shrink + jnp.sum(weights, -1, keepdims=True)
        acc = acc * shrink + jnp.einsum("kgrt,tkd->kgrd", weights, values, precision="highest")
        return new_top, total, acc

    column = (kv_heads, group, rows, 1)
    carry = (
        jnp.full(column, -jnp.inf),
        jnp.zeros(column),
        jnp.zeros((kv_heads, group, rows, width)),
    )
    _, total, acc = lax.fori_loop(0, (end + BLOCK - 1) // BLOCK, body, carry)
    out = acc / jnp.where(total == 0, 1.0, total)
    return jnp.moveaxis(out, 2, 0).reshape(rows, heads, width)
