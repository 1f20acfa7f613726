"""Attention of a few rows over selected blocks of four positions, and the selection itself.

    score_b = sum_h relu(q_h . K_b)        over index queries h and block keys K
    a row at p sees the blocks with 4b + 3 <= p; the `budget` best are selected, the lower id among
    equals; the positions after its last complete block, itself included, are always added

A row that completes its block has no positions after it, and its own block competes like any other.
Up to `budget` complete blocks the selection is everything, which is plain causal attention.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cached_rows import CachedRows
from pallas_kernels.cached_rows import values as cached_values
from pallas_kernels.pooled_keys import POSITIONS

TILE = 64
"""Blocks scored at once; capacities are a whole number of tiles."""

ROWS_AT_ONCE = 8
"""Rows that gather together: a chunk of a prompt would not fit otherwise."""


def block_scores(
    queries: Float[Array, "rows heads width"],
    pooled: Float[Array, "layers blocks_and_scratch width"],
    layer,
    positions: Int[Array, " rows"],
    capacity: int,
) -> Float[Array, "rows capacity"]:
    """Returns each row's score of every block, -inf where it does not see the block.

    Work grows with the history, not with the capacity. What stands in blocks that no row sees has
    no influence.

    Args:
      queries: index queries, normalised and rotated.
      pooled: block keys of all layers.
      layer: the layer; may be traced.
      positions: of each row; -1 for a row that sees nothing.
      capacity: blocks, a multiple of `TILE`.

    Raises:
      ValueError: the capacity is not a whole number of tiles.
    """
    if capacity % TILE:
        raise ValueError(f"{capacity=} must be a multiple of {TILE=}")
    rows, _, width = queries.shape

    def tile(i, scores):
        keys = lax.dynamic_slice(pooled, (layer, i * TILE, 0), (1, TILE, width))[0]
        products = jnp.einsum("rhd,bd->rhb", queries, keys, precision="highest")
        found = jnp.sum(jax.nn.relu(products), 1)
        last = (i * TILE + jnp.arange(TILE)) * POSITIONS + POSITIONS - 1
        found = jnp.where(last[None] <= positions[:, None], found, -jnp.inf)
        return lax.dynamic_update_slice(scores, found, (0, i * TILE))

    seen = (jnp.max(positions) + 1) // POSITIONS
    scores = jnp.full((rows, capacity), -jnp.inf)
    return lax.fori_loop(0, (seen + TILE - 1) // TILE, tile, scores)


def select_blocks(
    scores: Float[Array, "rows capacity"], budget: int
) -> tuple[Int[Array, "rows selected"], Bool[Array, "rows selected"]]:
    """Returns the blocks that each row reads, in ascending order, and which of them count.

    Args:
      scores: from `block_scores`.
      budget: most blocks; of equal scores the lower ids are taken.
    """
    capacity = scores.shape[1]
    best, blocks = lax.top_k(scores, min(budget, capacity))
    blocks = jnp.sort(jnp.where(best == -jnp.inf, capacity, blocks), axis=-1)
    return jnp.minimum(blocks, capacity - 1), blocks < capacity


def sparse_attention_reference(
    q: Float[Array, "rows heads width"],
    k: CachedRows,
    v: CachedRows,
    layer,
    blocks: Int[Array, "rows selected"],
    counted: Bool[Array, "rows selected"],
    positions: Int[Array, " rows"],
) -> Float[Array, "rows heads width"]:
    """Returns, for each row, attention over its selected blocks and the positions after them.

    Args:
      q: queries, normalised and rotated. Head h reads KV head h // (heads / kv_heads).
      k: cached keys of all layers [layers, capacity, kv_heads, width].
      v: cached values.
      layer: the layer; may be traced.
      blocks: selected blocks of each row.
      counted: which of them count.
      positions: of each row; a row at -1 gets zeros.
    """
    rows, heads, width = q.shape
    layers, capacity, kv_heads, _ = k.shape
    by_block = (layers, capacity // POSITIONS, POSITIONS, kv_heads, -1)
    k, v = jax.tree.map(lambda x: x.reshape(by_block), (k, v))
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, width) * jnp.float32(width**-0.5)
    tail = (positions + 1) // POSITIONS
    seen = jnp.broadcast_to(counted[..., None], (*counted.shape, POSITIONS))
    lanes = tail[:, None] * POSITIONS + jnp.arange(POSITIONS)[None]
    in_tail = (lanes <= positions[:, None]) & (lanes < capacity)
    seen = jnp.concatenate([seen, in_tail[:, None]], 1).reshape(rows, -1)
    tail = jnp.minimum(tail, capacity // POSITIONS - 1)
    blocks = jnp.concatenate([blocks, tail[:, None]], 1)

    def row(inputs):
        q, blocks, seen = inputs
        keys, values = (
            cached_values(x[layer, blocks]).reshape(-1, kv_heads, width) for x in (k, v)
        )
        scores = jnp.einsum("kgd,tkd->kgt", q, keys, precision="highest")
        scores = jnp.where(seen[None, None], scores, -jnp.inf)
        top = jnp.max(scores, -1, keepdims=True)
        weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
        total = jnp.sum(weights, -1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1.0, total)
        values = jnp.where(seen[:, None, None], values, 0.0)
        return jnp.einsum("kgt,tkd->kgd", weights, values, precision="highest")

    out = lax.map(row, (grouped, blocks, seen), batch_size=min(rows, ROWS_AT_ONCE))
    return out.reshape(rows, heads, width)
