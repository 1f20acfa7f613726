"""Sparse attention layers: the cache with its index keys and block keys, and what a layer does.

A position's index key is kept as it is projected; norm and rotation are applied to the mean of a
block's four, at the block's first position. Block keys outlive rollbacks; see `pooled_keys.py`.
"""

from dataclasses import replace

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from openjet_jax.config import DecodeConfig, Pooling, Qwen4ExpConfig
from openjet_jax.layers import rms_norm, rotate
from openjet_jax.qwen4exp_weights import IndexerWeights
from openjet_jax.state import KVCache, kv_cache, put_rows
from openjet_jax.weights import project
from pallas_kernels.pooled_keys import (
    POSITIONS,
    UpdateList,
    mean_keys,
    retained_after,
    store_keys,
    update_list,
)
from pallas_kernels.sparse_attention import (
    block_scores,
    select_blocks,
    sparse_attention_reference,
)


class SparseCache(KVCache):
    """Keys and values of attention layers, and of the sparse ones what selects blocks.

    Attributes:
      raw: index keys by position, without norm and rotation.
      pooled: block keys in float32, then scratch rows that nothing reads.
      retained: leading blocks whose keys are valid, the same for all layers.
      pooling: how block keys are maintained.
    """

    raw: Float[Array, "sparse_layers capacity index_width"]
    pooled: Float[Array, "sparse_layers blocks_and_scratch index_width"]
    retained: Int[Array, ""]
    pooling: Pooling = eqx.field(static=True)

    @property
    def blocks(self) -> int:
        """Blocks that there is room for."""
        return self.raw.shape[1] // POSITIONS

    @property
    def list_rows(self) -> int:
        """Rows of an update list."""
        return max(self.pooling.padding, 1)

    def committed(self, length: Int[Array, ""]) -> "SparseCache":
        """Returns the cache after a rollback to `length` positions."""
        kept = retained_after(self.retained, length)
        return replace(self, retained=kept if self.pooling.retention else jnp.int32(0))

    def planes(self) -> dict[str, Array]:
        """Returns what is kept position by position, [layers, capacity, ...] each."""
        return {**super().planes(), "raw": self.raw}

    def with_planes(self, planes: dict[str, Array]) -> "SparseCache":
        """Returns the cache with other contents; the next forward pools every block anew."""
        return replace(self, **planes, retained=jnp.int32(0))


class Window(eqx.Module):
    """The rows that a forward writes, and the block keys that it pools, the same for all layers.

    Attributes:
      start: position of the first row.
      live: rows that count.
      positions: of each row, -1 where it does not count.
      end: the position after the last live row.
      retained: leading blocks whose keys are valid before it.
    """

    start: Int[Array, ""]
    live: Bool[Array, " rows"]
    positions: Int[Array, " rows"]
    end: Int[Array, ""]
    retained: Int[Array, ""]


def window(start: Int[Array, ""], live: Bool[Array, " rows"], kv: KVCache) -> Window:
    """Returns the window of consecutive live rows from `start` on, which are the first ones."""
    rows = live.shape[0]
    retained = kv.retained if isinstance(kv, SparseCache) else jnp.int32(0)
    return Window(
        start=start,
        live=live,
        positions=jnp.where(live, start + jnp.arange(rows), -1),
        end=start + jnp.sum(live, dtype=jnp.int32),
        # Rows from `start` on are replaced, so a block that reaches there is no longer valid.
        retained=retained_after(retained, start),
    )


def sparse_cache(
    config: Qwen4ExpConfig, decode: DecodeConfig, layers: int, sparse_layers: int
) -> KVCache:
    """Returns an empty cache; a plain one where no layer is sparse."""
    kv = kv_cache(config, decode, layers)
    if not sparse_layers:
        return kv
    capacity, scratch = kv.k.shape[1], max(decode.pooling.padding, 1)
    return SparseCache(
        k=kv.k,
        v=kv.v,
        raw=jnp.zeros((sparse_layers, capacity, config.index_width), kv.k.dtype),
        pooled=jnp.zeros((sparse_layers, capacity // POSITIONS + scratch, config.index_width)),
        retained=jnp.int32(0),
        pooling=decode.pooling,
    )


def after_window[C: KVCache](kv: C, at: Window) -> C:
    """Returns the cache once every layer has pooled: all complete blocks are valid."""
    if not isinstance(kv, SparseCache):
        return kv
    return replace(kv, retained=at.end // POSITIONS)


def index(
    h: Float[Array, "rows hidden"],
    layer,
    kv: SparseCache,
    weights: IndexerWeights | None,
    at: Window,
    config: Qwen4ExpConfig,
) -> SparseCache:
    """Returns the cache with the rows' index keys, and the keys of the blocks that they complete.

    All index keys of the window are written before any block is pooled. A block that holds a draft
    is seen only by rows after it, which are rejected with it.
    """
    assert weights is not None
    keys = project(h, weights.k, layer)
    kv = replace(kv, raw=put_rows(kv.raw, layer, at.start, keys, at.live))
    complete, rows = at.end // POSITIONS, kv.list_rows

    def pool(i, pooled):
        updates = update_list(at.retained + i * rows, complete, rows, kv.blocks)
        keys = _block_keys(kv.raw, layer, updates, weights, config)
        return store_keys(pooled, layer, keys, updates, kv.pooling.rewrite_fillers)

    lists = (complete - at.retained + rows - 1) // rows
    if kv.pooling.rewrite_fillers:
        lists = jnp.maximum(lists, 1)
    return replace(kv, pooled=lax.fori_loop(0, lists, pool, kv.pooled))


def _block_keys(
    raw: Array, layer, updates: UpdateList, weights: IndexerWeights, config: Qwen4ExpConfig
) -> Float[Array, "rows index_width"]:
    """Returns the keys of a list's blocks; the barriers make them round alike in every program."""
    means = lax.optimization_barrier(mean_keys(raw, layer, updates.blocks))
    normed = rms_norm(means, weights.k_norm[layer], config.eps)[:, None]
    keys = rotate(normed, updates.blocks * POSITIONS, config)[:, 0]
    return lax.optimization_barrier(keys)


def selection(
    h: Float[Array, "rows hidden"],
    layer,
    kv: SparseCache,
    weights: IndexerWeights | None,
    at: Window,
    config: Qwen4ExpConfig,
) -> tuple[Int[Array, "rows selected"], Bool[Array, "rows selected"]]:
    """Returns the blocks that each row attends to, and which of them count."""
    assert weights is not None
    shape = (h.shape[0], config.index_heads, config.index_width)
    queries = rms_norm(
        project(h, weights.q, layer).reshape(shape), weights.q_norm[layer], config.eps
    )
    queries = rotate(queries, at.positions, config)
    scores = block_scores(queries, kv.pooled, layer, at.positions, kv.blocks)
    return select_blocks(scores, config.budget)


def attend_sparse(
    q: Float[Array, "rows heads width"],
    h: Float[Array, "rows hidden"],
    layers: tuple,
    kv: SparseCache,
    weights: IndexerWeights | None,
    at: Window,
    config: Qwen4ExpConfig,
) -> Float[Array, "rows heads width"]:
    """Returns attention over the selected blocks.

    Args:
      q: queries, normalised and rotated.
      h: the layer's input, which the index queries come from.
      layers: index among the attention layers, and among the sparse ones.
      kv: the cache with this window's rows and block keys.
      weights: of all indexers.
      at: the window.
      config: the model's sizes.
    """
    blocks, counted = selection(h, layers[1], kv, weights, at, config)
    return sparse_attention_reference(q, kv.k, kv.v, layers[0], blocks, counted, at.positions)
