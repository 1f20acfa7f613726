"""The MTP block: it predicts the token after next from a token and the hidden row before it.

Its own attention cache must hold an entry for every position but 0, prompt included: the entry of
position p comes from token p and the trunk's normed hidden row of p - 1. Drafts are made by feeding
the block its own output; what that writes is overwritten when true hidden rows are known.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from openjet_jax.config import ModelConfig
from openjet_jax.layers import (
    attention_inputs,
    attention_output,
    feed_forward,
    keys_and_values,
    rms_norm,
)
from openjet_jax.state import KVCache
from openjet_jax.weights import MtpWeights, Weights, project
from pallas_kernels.attention import attention_reference


def _join(
    tokens: Int[Array, " rows"],
    hidden: Float[Array, "rows hidden"],
    weights: Weights,
    mtp: MtpWeights,
    eps: float,
) -> Float[Array, "rows hidden"]:
    """Returns the block's residual stream: embedding and hidden row, normed and projected."""
    embedding = weights.embedding if mtp.embedding is None else mtp.embedding
    both = [
        rms_norm(embedding.rows(tokens), mtp.embed_norm, eps),
        rms_norm(hidden, mtp.hidden_norm, eps),
    ]
    return project(jnp.concatenate(both, -1), mtp.join)


def mtp_block(
    tokens: Int[Array, " rows"],
    hidden: Float[Array, "rows hidden"],
    start: Int[Array, ""],
    live: Bool[Array, " rows"],
    kv: KVCache,
    weights: Weights,
    config: ModelConfig,
) -> tuple[Float[Array, "rows hidden"], KVCache]:
    """Returns normed output rows (the head's input and the next step's hidden), and the cache.

    Args:
      tokens: token of each row's position.
      hidden: trunk output (or, between drafts, this block's) of the position before.
      start: position of the first row; the live rows are consecutive.
      live: rows that count.
      kv: the block's cache.
      weights: the model; its MTP block must be there.
      config: its sizes.
    """
    mtp = weights.mtp
    assert mtp is not None
    positions = jnp.where(live, start + jnp.arange(tokens.shape[0]), -1)
    y = _join(tokens, hidden, weights, mtp, config.eps)
    h = rms_norm(y, mtp.attention.norm[0], config.eps)
    q, gate, k, v = attention_inputs(h, mtp.attention, 0, positions, config)
    kv = kv.write(0, start, k, v, live & (positions > 0))
    out = attention_reference(q, kv.k[0], kv.v[0], positions, jnp.max(positions) + 1, first=1)
    y = y + attention_output(out, gate, mtp.attention, 0)
    y = y + feed_forward(y, mtp.ffn, 0, config.eps)
    return rms_norm(y, mtp.head_norm, config.eps), kv


def mtp_fill(
    tokens: Int[Array, " rows"],
    hidden: Float[Array, "rows hidden"],
    start: Int[Array, ""],
    live: Bool[Array, " rows"],
    kv: KVCache,
    weights: Weights,
    config: ModelConfig,
) -> KVCache:
    """Returns the block's cache with entries for the live rows.

    Only keys and values are computed: with a single layer nothing later needs the outputs.
    Arguments are those of `mtp_block`.
    """
    mtp = weights.mtp
    assert mtp is not None
    positions = jnp.where(live, start + jnp.arange(tokens.shape[0]), -1)
    y = _join(tokens, hidden, weights, mtp, config.eps)
    h = rms_norm(y, mtp.attention.norm[0], config.eps)
    k, v = keys_and_values(h, mtp.attention, 0, positions, config)
    return kv.write(0, start, k, v, live & (positions > 0))


def mtp_logits(weights: Weights, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
    """Returns the block's full-vocabulary logits of its normed output rows."""
    assert weights.mtp is not None
    return project(hidden, weights.head if weights.mtp.head is None else weights.mtp.head)




def mtp_chunk(
    weights: Weights,
    kv: KVCache,
    tokens: Int[Array, " rows"],
    hidden: Float[Array, "rows hidden"],
    start: Int[Array, ""],
    count: Int[Array, ""],
    *,
    config: ModelConfig,
) -> tuple[KVCache, Float[Array, "rows vocab"]]:
    """Returns the block's cache and logits over known tokens: what scoring a text needs.

    Args:
      weights: the model.
      kv: the block's cache, valid below `start`.
      tokens: ids of positions `start` and on; from `count` on, padding.
      hidden: trunk output of the position before each.
      start: position of the first row.
      count: rows that count.
      config: the model's sizes.
    """
    live = jnp.arange(tokens.shape[0]) < count
    out, kv = mtp_block(tokens, hidden, start, live, kv, weights, config)
    return kv, mtp_logits(weights, out)
