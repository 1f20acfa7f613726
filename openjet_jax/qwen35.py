"""The qwen35 model: what it does with rows, layer by layer, and its MTP block.

    x <- embedding
    x <- x + mixer(rms_norm(x));  x <- x + swiglu(rms_norm(x))      for every layer
    logits = head rms_norm(x)

The MTP block predicts the token after next from a token and the normed trunk row before it. Its
cache must hold an entry for every position but 0, prompt included: the entry of position p comes
from token p and the trunk's row of p - 1. Drafts are made by feeding the block its own output; what
that writes is overwritten when true rows are known.

The functions here are those of `architectures.Architecture`, where their arguments are described.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from openjet_jax.attention_layers import Window, attention, attention_fill, window
from openjet_jax.config import DecodeConfig, Qwen35Config
from openjet_jax.deltanet import deltanet
from openjet_jax.layer_loop import run_layers
from openjet_jax.layers import add_and_norm, draft_embedding, feed_forward, rms_norm
from openjet_jax.projections import LayerInput, project
from openjet_jax.state import KVCache, MtpRows, RecurrentState, kv_cache, recurrent_state
from openjet_jax.weights import Qwen35MtpWeights, Qwen35Weights

type Caches = tuple[RecurrentState, KVCache]


def initial_caches(config: Qwen35Config, decode: DecodeConfig) -> Caches:
    """Returns the empty caches of the trunk."""
    return recurrent_state(config), kv_cache(config, decode, len(config.attention_layers))


def initial_mtp_cache(config: Qwen35Config, decode: DecodeConfig) -> KVCache:
    """Returns the empty cache of the MTP block."""
    return kv_cache(config, decode, 1)


def hidden_width(config: Qwen35Config) -> int:
    """Returns the width of a trunk output row."""
    return config.hidden


def trunk(
    weights: Qwen35Weights,
    config: Qwen35Config,
    tokens: Int[Array, " rows"],
    start: Int[Array, ""],
    num_live: Int[Array, ""],
    caches: Caches,
    *,
    chunked: bool,
) -> tuple[Float[Array, "rows hidden"], Caches]:
    """Returns the trunk's output rows, after the final norm, and the caches."""
    at = window(start, jnp.arange(tokens.shape[0]) < num_live)
    kinds = tuple("deltanet" if recurrent else "attention" for recurrent in config.recurrent)

    def layer(kind, layer, i, carry):
        x, y, recurrent, kv = carry
        mixer = weights.deltanet if kind == "deltanet" else weights.attention
        assert mixer is not None and mixer.norm is not None
        x, h = add_and_norm(x, y, mixer.norm, i, config.eps, mixer.readers)
        if kind == "deltanet":
            y, recurrent = deltanet(
                h,
                i,
                recurrent,
                weights.deltanet,
                config,
                num_live,
                gate="silu",
                chunked=chunked,
            )
        else:
            y, kv = attention(h, i, kv, weights.attention, at, config)
        with jax.named_scope("feed_forward"):
            x, h = add_and_norm(x, y, weights.ffn.norm, layer, config.eps, weights.ffn.readers)
            y = feed_forward(h, weights.ffn, layer)
        return x, y, recurrent, kv

    # A block's output is added by the next one, together with its norm.
    x = weights.embedding.rows(tokens)
    carry, unrolled = (x, jnp.zeros_like(x), *caches), weights.kernels and not chunked
    x, y, recurrent, kv = run_layers(kinds, carry, layer, unrolled=unrolled)
    if chunked:
        recurrent = recurrent.committed(jnp.int32(0))
    return rms_norm(x + y, weights.final_norm, config.eps), (recurrent, kv)


def features(
    weights: Qwen35Weights, config: Qwen35Config, hidden: Float[Array, "rows hidden"]
) -> Float[Array, "rows hidden"]:
    """Returns what the head projects: the trunk's output rows themselves."""
    del weights, config
    return hidden


mtp_features = features


def _inputs(
    rows: MtpRows, weights: Qwen35Weights, config: Qwen35Config
) -> tuple[
    Qwen35MtpWeights,
    Float[Array, "rows hidden"],
    Float[Array, "rows hidden"] | LayerInput,
    Window,
]:
    """Returns the block, its residual stream, that normed, and where in its cache the rows go.

    The stream comes from embedding and hidden row; the cache has no entry of position 0.
    """
    mtp = weights.mtp
    assert mtp is not None and mtp.attention.norm is not None
    embedded = draft_embedding(rows.tokens, weights, config.eps)
    both = jnp.concatenate([embedded, rms_norm(rows.hidden, mtp.hidden_norm, config.eps)], -1)
    joined, norm, readers = project(both, mtp.join), mtp.attention.norm, mtp.attention.readers
    y, h = add_and_norm(joined, jnp.zeros_like(joined), norm, 0, config.eps, readers)
    return mtp, y, h, window(rows.start, rows.live, first=1)


def mtp_block(
    rows: MtpRows,
    kv: KVCache,
    weights: Qwen35Weights,
    config: Qwen35Config,
    *,
    continues: Bool[Array, ""] | None = None,
) -> tuple[Float[Array, "rows hidden"], KVCache]:
    """Returns the block's normed output rows, and its cache."""
    del continues
    mtp, y, h, at = _inputs(rows, weights, config)
    out, kv = attention(h, 0, kv, mtp.attention, at, config)
    y, h = add_and_norm(y, out, mtp.ffn.norm, 0, config.eps, mtp.ffn.readers)
    y = y + feed_forward(h, mtp.ffn, 0)
    return rms_norm(y, mtp.head_norm, config.eps), kv


def mtp_fill(
    rows: MtpRows,
    kv: KVCache,
    weights: Qwen35Weights,
    config: Qwen35Config,
) -> KVCache:
    """Returns the block's cache with entries for the live rows, outputs not computed."""
    mtp, _, h, at = _inputs(rows, weights, config)
    return attention_fill(h, 0, kv, mtp.attention, at, config)
