"""Residual streams: a block reads a gated mean of them, and what it gives is added to each.

    N[c] = rms(R[c]) g[c]            f = all N[c] side by side
    u    = mean_c sigmoid(W_up silu(W_down f / C))[c] N[c]
    R[c] <- R[c] + iota[c] block(u)      iota = 2 sigmoid(W_inject f / C)

Rows hold their C streams side by side, stream slowest. As in Qwen3.8-Flash-Next; hyper-connections
are Zhu et al. (2024).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from openjet_jax.config import Qwen4ExpConfig
from openjet_jax.layers import rms_norm
from openjet_jax.projections import project
from openjet_jax.qwen4exp_weights import StreamWeights


def stream_norm(
    x: Float[Array, "rows width"], gain: Float[Array, " width"], config: Qwen4ExpConfig
) -> Float[Array, "rows streams hidden"]:
    """Returns the streams of each row, each normed by itself."""
    split = x.reshape(x.shape[0], config.streams, config.hidden)
    return rms_norm(split, gain.reshape(config.streams, config.hidden), config.eps)


def mix(
    x: Float[Array, "rows width"], weights: StreamWeights, layer, config: Qwen4ExpConfig
) -> tuple[Float[Array, "rows hidden"], Float[Array, "rows streams"] | None]:
    """Returns a block's input, and the weights with which its output goes to each stream.

    Args:
      x: the streams.
      weights: of all layers.
      layer: index among them; may be traced.
      config: the model's sizes.
    """
    normed = stream_norm(x, weights.norm[layer], config)
    flat, scale = normed.reshape(x.shape), jnp.float32(1 / config.streams)
    low = jax.nn.silu(project(flat, weights.down, layer) * scale)
    gates = jax.nn.sigmoid(project(low, weights.up, layer)).reshape(normed.shape)
    mixed = jnp.sum(gates * normed, 1) * scale
    if weights.inject is None:
        return mixed, None
    return mixed, 2 * jax.nn.sigmoid(project(flat, weights.inject, layer) * scale)


def add_to_streams(
    x: Float[Array, "rows width"], iota: Float[Array, "rows streams"] | None, y: Array
) -> Float[Array, "rows width"]:
    """Returns the streams with a block's output y [rows, hidden] added to each by its weight."""
    assert iota is not None
    return x + (iota[:, :, None] * y[:, None]).reshape(x.shape)
