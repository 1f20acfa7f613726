"""Attention layers from cache to cache, over the rows of a window."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from openjet_jax.config import ModelConfig
from openjet_jax.layers import attention_inputs, attention_output, keys_and_values, rotation
from openjet_jax.projections import LayerInput, project, project_parts
from openjet_jax.state import KVCache
from openjet_jax.weights import AttentionWeights
from pallas_kernels.attention import attention_reference


class Window(eqx.Module):
    """The rows that a forward takes, the same for all layers.

    Attributes:
      start: position of the first row.
      live: rows that count.
      positions: of each row, -1 where it does not count.
      end: the position after the last live row; at least `start`.
      first: first position that a cache has an entry of.
    """

    start: Int[Array, ""]
    live: Bool[Array, " rows"]
    positions: Int[Array, " rows"]
    end: Int[Array, ""]
    first: int = eqx.field(static=True)


def window(start: Int[Array, ""], live: Bool[Array, " rows"], first: int = 0) -> Window:
    """Returns the window of consecutive live rows from `start` on; none counts before `first`."""
    at = start + jnp.arange(live.shape[0])
    live = live & (at >= first)
    positions = jnp.where(live, at, -1)
    end = jnp.maximum(start, jnp.max(positions) + 1)
    return Window(start=start, live=live, positions=positions, end=end, first=first)


type Attend[C] = Callable[[Float[Array, "rows heads width"], C, Array, Window], tuple[Array, C]]
"""(queries, cache with the window's keys and values, layer, window) -> (output, cache)."""


def attend_to_all[C: KVCache](
    q: Float[Array, "rows heads width"], kv: C, layer, at: Window
) -> tuple[Float[Array, "rows heads width"], C]:
    """Returns attention over every position up to each row's own, and the cache as it is."""
    out = attention_reference(q, kv.k[layer], kv.v[layer], at.positions, at.end, first=at.first)
    return out, kv


def attention[C: KVCache](
    h: Float[Array, "rows hidden"] | LayerInput,
    layer,
    kv: C,
    weights: AttentionWeights | None,
    at: Window,
    config: ModelConfig,
    attend: Attend[C] = attend_to_all,
) -> tuple[Float[Array, "rows hidden"], C]:
    """Returns a gated attention layer's output rows, and the cache with their keys and values.

    Args:
      h: the layer's input.
      layer: index among the layers of the cache and the weights; may be traced.
      kv: the cache.
      weights: of all layers.
      at: the window.
      config: the model's sizes.
      attend: what the rows attend to.
    """
    assert weights is not None
    if weights.kernels and attend is attend_to_all and _has_kernels(kv, at, config):
        return _by_kernels(h, layer, kv, weights, at, config)
    q, gate, k, v = attention_inputs(h, weights, layer, at.positions, config)
    kv = kv.write(layer, at.start, k, v, at.live)
    if weights.kernels and attend is attend_to_all:
        from pallas_kernels.attention_prefill import attn_prefill, fits

        if fits(q, kv.k):
            index = jnp.asarray(layer, jnp.int32)
            gated = attn_prefill(q, kv.k, kv.v, index, at.start, at.end, gate, at.first)
            return project(gated.reshape(gated.shape[0], -1), weights.out, layer), kv
    out, kv = attend(q, kv, layer, at)
    return attention_output(out, gate, weights, layer), kv


def _has_kernels(kv: KVCache, at: Window, config: ModelConfig) -> bool:
    """Returns whether a cycle's rows have kernels for these sizes and this format of a cache."""
    # Mosaic takes a second to import, and only an sm_90 GPU needs it.
    from pallas_kernels import attention_decode, attention_inputs

    heads, rows = config.heads, at.live.shape[0]
    q: Any = jax.ShapeDtypeStruct((rows, heads, config.head_width), jnp.float32)
    plain, pairs = type(kv) is KVCache, config.rotary // 2
    return (
        plain and attention_decode.fits(q, kv.k) and attention_inputs.fits(heads, kv.k, pairs, rows)
    )


def _by_kernels[C: KVCache](
    h: Float[Array, "rows hidden"] | LayerInput,
    layer,
    kv: C,
    weights: AttentionWeights,
    at: Window,
    config: ModelConfig,
) -> tuple[Float[Array, "rows hidden"], C]:
    """Returns what `attention` does, of a cycle's rows, by one kernel on each side of the cache."""
    from pallas_kernels.attention_decode import attn_decode
    from pallas_kernels.attention_inputs import attn_inputs

    parts, index = project_parts(h, weights.readers, layer), jnp.asarray(layer, jnp.int32)
    q, (k, v) = attn_inputs(
        [part.rows for part in parts],
        (weights.q_norm, weights.k_norm),
        rotation(at.positions, config),
        (kv.k, kv.v),
        index,
        at.positions,
        heads=config.heads,
        first=tuple(part.first for part in parts),
        eps=config.eps,
    )
    # The rows of W_q are interleaved per head: the head's query, then its gate.
    gate, width = parts[0], config.head_width
    columns = gate.rows.shape[1], gate.first + width, 2 * width
    gated = attn_decode(
        q, k, v, index, at.positions, at.end, gate.rows, at.first, gate_columns=columns
    )
    out = project(gated.reshape(gated.shape[0], -1), weights.out, layer)
    return out, replace(kv, k=k, v=v)


def attention_fill[C: KVCache](
    h: Float[Array, "rows hidden"] | LayerInput,
    layer,
    kv: C,
    weights: AttentionWeights,
    at: Window,
    config: ModelConfig,
) -> C:
    """Returns the cache with the rows' keys and values, outputs not computed; see `attention`."""
    k, v = keys_and_values(h, weights, layer, at.positions, config)
    return kv.write(layer, at.start, k, v, at.live)
