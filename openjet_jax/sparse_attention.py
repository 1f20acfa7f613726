"""Sparse attention layers: the cache with its index keys and block keys, and what a layer does.

A position's index key is kept as it is projected; norm and rotation are applied to the mean of a
block's four, at the block's first position. Block keys outlive rollbacks; see `pooled_keys.py`.
"""

from dataclasses import replace

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from openjet_jax.attention_layers import Window
from openjet_jax.config import DecodeConfig, Pooling, Qwen4ExpConfig
from openjet_jax.layers import rms_norm, rotate
from openjet_jax.projections import project
from openjet_jax.qwen4exp_weights import IndexerWeights
from openjet_jax.state import KVCache, kv_cache, put_rows
from pallas_kernels.cached_rows import Q8_0, CachedRows
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


class Chosen(eqx.Module):
    """What one row attended to.

    Attributes:
      blocks, counted: as from `selection`.
      position: of the row, the last that it saw.
    """

    blocks: Int[Array, " selected"]
    counted: Bool[Array, " selected"]
    position: Int[Array, ""]


class SparseCache(KVCache):
    """Keys and values of attention layers, and of the sparse ones what selects blocks.

    Attributes:
      raw: index keys by position, without norm and rotation.
      pooled: block keys in float32, then scratch rows that nothing reads.
      retained: leading blocks whose keys are valid, the same for all layers.
      chosen: what the first of a run of drafts attended to, where all attend to that; else None.
      pooling: how block keys are maintained.
    """

    raw: Float[Array, "sparse_layers capacity index_width"]
    pooled: Float[Array, "sparse_layers blocks_and_scratch index_width"]
    retained: Int[Array, ""]
    chosen: "Chosen | None"
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

    def planes(self) -> dict[str, CachedRows]:
        """Returns what is kept position by position, arrays [layers, capacity, ...]."""
        return {**super().planes(), "raw": self.raw}

    def with_planes(self, planes: dict[str, CachedRows]) -> "SparseCache":
        """Returns the cache with other contents; the next forward pools every block anew."""
        return replace(self, **planes, retained=jnp.int32(0))


def sparse_cache(
    config: Qwen4ExpConfig,
    decode: DecodeConfig,
    layers: int,
    sparse_layers: int,
    choose_once: bool = False,
) -> KVCache:
    """Returns an empty cache; a plain one where no layer is sparse.

    Args:
      config: the model's sizes.
      decode: context, cache format, and how block keys are maintained.
      layers: attention layers.
      sparse_layers: how many of them are sparse.
      choose_once: whether a run of drafts attends to what its first row selects.
    """
    kv = kv_cache(config, decode, layers)
    if not sparse_layers:
        return kv
    capacity, scratch = kv.k.shape[1], max(decode.pooling.padding, 1)
    chosen, selected = None, min(config.budget, capacity // POSITIONS)
    if choose_once:
        chosen = Chosen(
            blocks=jnp.zeros(selected, jnp.int32),
            counted=jnp.zeros(selected, jnp.bool_),
            position=jnp.int32(0),
        )
    # They are a small part of the cache, and choose what is read of the rest.
    index_dtype = jnp.dtype("bfloat16" if decode.kv_dtype == Q8_0 else decode.kv_dtype)
    return SparseCache(
        k=kv.k,
        v=kv.v,
        raw=jnp.zeros((sparse_layers, capacity, config.index_width), index_dtype),
        pooled=jnp.zeros((sparse_layers, capacity // POSITIONS + scratch, config.index_width)),
        retained=jnp.int32(0),
        chosen=chosen,
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
    is seen only by rows after it, which are rejected with it. Rows from the window's start on are
    replaced, so a block that reaches there is no longer valid.
    """
    assert weights is not None
    keys = project(h, weights.k, layer)
    kv = replace(kv, raw=put_rows(kv.raw, layer, at.start, keys, at.live))
    retained, complete = retained_after(kv.retained, at.start), at.end // POSITIONS
    rows = kv.list_rows

    def pool(i, pooled):
        updates = update_list(retained + i * rows, complete, rows, kv.blocks)
        keys = _block_keys(kv.raw, layer, updates, weights, config)
        return store_keys(pooled, layer, keys, updates, kv.pooling.rewrite_fillers)

    lists = (complete - retained + rows - 1) // rows
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
    continues: Bool[Array, ""] | None = None,
) -> tuple[Float[Array, "rows heads width"], SparseCache]:
    """Returns attention over the selected blocks, and the cache with what was chosen.

    Args:
      q: queries, normalised and rotated.
      h: the layer's input, which the index queries come from.
      layers: index among the attention layers, and among the sparse ones.
      kv: the cache with this window's rows and block keys.
      weights: of all indexers.
      at: the window.
      config: the model's sizes.
      continues: whether the rows draft on from those of the last call.
    """

    def select():
        return selection(h, layers[1], kv, weights, at, config)

    first, positions = kv.chosen, at.positions
    if first is None or continues is None:
        blocks, counted = select()
    else:
        shape = (positions.shape[0], first.blocks.shape[0])
        again = jnp.broadcast_to(first.blocks, shape), jnp.broadcast_to(first.counted, shape)
        blocks, counted = lax.cond(continues, lambda: again, select)
        positions = jnp.where(continues & at.live, first.position, positions)
        newest = jnp.argmax(positions)
        kv = replace(
            kv,
            chosen=Chosen(
                blocks=blocks[newest], counted=counted[newest], position=positions[newest]
            ),
        )
    out = sparse_attention_reference(q, kv.k, kv.v, layers[0], blocks, counted, positions)
    return out, kv
