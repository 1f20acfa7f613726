"""The pieces of a layer as pure functions over arrays: norms, rotation, feed-forward, gates.

Everything is float32. Norm weights come from the file ready to multiply (no 1 is added).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from openjet_jax.config import ModelConfig
from openjet_jax.projections import LayerInput, gated, prepared_input, project, project_each
from openjet_jax.weights import AttentionWeights, FeedForwardWeights, PartProjection, Tiled, Weights


def rms_norm(
    x: Float[Array, "*rows width"], weight: Float[Array, "*trailing width"], eps: float
) -> Float[Array, "*rows width"]:
    """Returns `x / sqrt(mean(x^2) + eps) * weight` over the last axis (Zhang, Sennrich 2019)."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
    return x * scale * jnp.expand_dims(weight, range(x.ndim - weight.ndim))


def add_and_norm(
    x: Float[Array, "rows width"],
    added: Float[Array, "rows width"],
    norm: Float[Array, "layers width"],
    layer,
    eps: float,
    readers: Sequence[PartProjection],
) -> tuple[Float[Array, "rows width"], Float[Array, "rows width"] | LayerInput]:
    """Returns `x + added`, and `rms_norm` of it for projections: one launch where kernels read it.

    Args:
      x: the residual stream.
      added: what the block before gives to it.
      norm: weights of every layer.
      layer: whose to take; may be traced.
      eps: of the norm.
      readers: the projections.
    """
    rows = x.shape[0]
    if (rows == 8 or rows >= 16) and any(isinstance(w, Tiled) for w in readers):
        return prepared_input(x, added, norm, layer, eps, readers)
    x = x + added
    return x, rms_norm(x, norm[layer], eps)


def rotate(
    x: Float[Array, "rows heads width"], positions: Int[Array, " rows"], config: ModelConfig
) -> Float[Array, "rows heads width"]:
    """Returns x with its first `rotary` dimensions turned by position (RoPE, half-split pairs).

    Pair i is dimensions (i, i + rotary/2), turned by `position * theta^(-2i/rotary)` (Su et al.,
    2021); the angle is formed in float32. The other dimensions pass unchanged.
    """
    half = config.rotary // 2
    cos, sin = (table[:, None] for table in rotation(positions, config))
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin, rest], -1)


def rotation(
    positions: Int[Array, " rows"], config: ModelConfig
) -> tuple[Float[Array, "rows pairs"], Float[Array, "rows pairs"]]:
    """Returns cosine and sine of every row's and pair's angle, as `rotate` uses them."""
    half = config.rotary // 2
    frequencies = jnp.asarray(
        [config.rope_theta ** (-2 * i / config.rotary) for i in range(half)], jnp.float32
    )
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
    return jnp.cos(angles), jnp.sin(angles)


def draft_embedding(
    tokens: Int[Array, " rows"], weights: Weights, eps: float
) -> Float[Array, "rows hidden"]:
    """Returns normed embeddings as the MTP block takes them: its own, else the trunk's."""
    assert weights.mtp is not None
    embedding = weights.embedding if weights.mtp.embedding is None else weights.mtp.embedding
    return rms_norm(embedding.rows(tokens), weights.mtp.embed_norm, eps)


def feed_forward(
    h: Float[Array, "rows hidden"] | LayerInput, weights: FeedForwardWeights, layer
) -> Float[Array, "rows hidden"]:
    """Returns `down(silu(gate h) * up h)` of normed rows (Shazeer 2020, SwiGLU)."""
    return project(gated(h, weights.gate, weights.up, layer), weights.down, layer)


def attention_inputs(
    h: Float[Array, "rows hidden"] | LayerInput,
    weights: AttentionWeights,
    layer,
    positions: Int[Array, " rows"],
    config: ModelConfig,
) -> tuple[Array, Array, Array, Array]:
    """Returns queries, output gates [rows, heads, width] and keys, values [rows, kv_heads, width].

    Queries and keys are normalised per head and rotated. The rows of W_q are interleaved per head:
    the head's query, then its gate.
    """
    width = config.head_width
    both, k, v = project_each(h, weights.readers, layer)
    both = both.reshape(-1, config.heads, 2 * width)
    q = rms_norm(both[..., :width], weights.q_norm[layer], config.eps)
    k, v = _cache_entries(k, v, weights, layer, positions, config)
    return rotate(q, positions, config), both[..., width:], k, v


def keys_and_values(
    h: Float[Array, "rows hidden"] | LayerInput,
    weights: AttentionWeights,
    layer,
    positions: Int[Array, " rows"],
    config: ModelConfig,
) -> tuple[Float[Array, "rows kv_heads width"], Float[Array, "rows kv_heads width"]]:
    """Returns normalised and rotated keys, and values: what a cache stores."""
    k, v = project_each(h, weights.readers, layer, skip=1)
    return _cache_entries(k, v, weights, layer, positions, config)


def _cache_entries(
    k: Float[Array, "rows kv"],
    v: Float[Array, "rows kv"],
    weights: AttentionWeights,
    layer,
    positions: Int[Array, " rows"],
    config: ModelConfig,
) -> tuple[Float[Array, "rows kv_heads width"], Float[Array, "rows kv_heads width"]]:
    shape = (k.shape[0], config.kv_heads, config.head_width)
    k = rms_norm(k.reshape(shape), weights.k_norm[layer], config.eps)
    return rotate(k, positions, config), v.reshape(shape)


def attention_output(
    attended: Float[Array, "rows heads width"],
    gate: Float[Array, "rows heads width"],
    weights: AttentionWeights,
    layer,
) -> Float[Array, "rows hidden"]:
    """Returns the output projection of the sigmoid-gated heads."""
    heads = attended * jax.nn.sigmoid(gate)
    return project(heads.reshape(heads.shape[0], -1), weights.out, layer)
