"""The qwen4exp model: what it does with rows, layer by layer, and its MTP block.

    R[c] <- embedding                                      for each of the C residual streams
    R <- R + ngrams(R)                                     before one of the layers
    R <- R + iota mixer(mix R);  R <- R + iota experts(mix R)    for every layer
    logits = head mix R

A mixer is Gated DeltaNet with a sigmoid gate, sparse attention, or attention to every position. The
trunk hands on its streams as they are: the final mix is the head's. The MTP block takes the streams
of the position before; its entry of position 0 pairs the first token with zeros.

The functions here are those of `architectures.Architecture`, where their arguments are described.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from openjet_jax.config import DecodeConfig, Qwen4ExpConfig
from openjet_jax.deltanet import deltanet
from openjet_jax.experts import experts
from openjet_jax.layer_loop import run_layers
from openjet_jax.layers import attention_inputs, attention_output, keys_and_values, rms_norm
from openjet_jax.ngrams import NgramState, add_ngrams, embed_ngrams, ngram_state
from openjet_jax.qwen4exp_weights import IndexerWeights, Qwen4ExpWeights
from openjet_jax.sparse_attention import (
    SparseCache,
    Window,
    after_window,
    attend_sparse,
    index,
    sparse_cache,
    window,
)
from openjet_jax.state import KVCache
from openjet_jax.streams import add_to_streams, mix, stream_norm
from openjet_jax.weights import AttentionWeights, project
from pallas_kernels.attention import attention_reference

type Caches = tuple[NgramState, KVCache]


def initial_caches(config: Qwen4ExpConfig, decode: DecodeConfig) -> Caches:
    """Returns the empty caches of the trunk."""
    layers, sparse = len(config.attention_layers), len(config.sparse_layers)
    return ngram_state(config), sparse_cache(config, decode, layers, sparse)


def initial_mtp_cache(config: Qwen4ExpConfig, decode: DecodeConfig) -> KVCache:
    """Returns the empty cache of the MTP block."""
    return sparse_cache(config, decode, 1, int(config.mtp_sparse))


def hidden_width(config: Qwen4ExpConfig) -> int:
    """Returns the width of a trunk output row: all streams."""
    return config.width


def _attention(
    h: Float[Array, "rows hidden"],
    layers: tuple,
    kv: KVCache,
    weights: AttentionWeights | None,
    indexer: IndexerWeights | None,
    at: Window,
    config: Qwen4ExpConfig,
) -> tuple[Float[Array, "rows hidden"], KVCache]:
    """Returns the layer's output rows, and the cache with the window's rows.

    Args:
      h: the layer's input.
      layers: index among the attention layers, and among the sparse ones; None for a dense layer.
      kv: the cache.
      weights: of all attention layers.
      indexer: of all sparse ones.
      at: the window.
      config: the model's sizes.
    """
    assert weights is not None
    i, sparse = layers
    q, gate, k, v = attention_inputs(h, weights, i, at.positions, config)
    kv = kv.write(i, at.start, k, v, at.live)
    if sparse is None:
        out = attention_reference(q, kv.k[i], kv.v[i], at.positions, at.end)
    else:
        assert isinstance(kv, SparseCache)
        kv = index(h, sparse, kv, indexer, at, config)
        out = attend_sparse(q, h, layers, kv, indexer, at, config)
    return attention_output(out, gate, weights, i), kv


def trunk(
    weights: Qwen4ExpWeights,
    config: Qwen4ExpConfig,
    tokens: Int[Array, " rows"],
    start: Int[Array, ""],
    num_live: Int[Array, ""],
    caches: Caches,
    *,
    chunked: bool,
) -> tuple[Float[Array, "rows width"], Caches]:
    """Returns the residual streams of every row before the final mix, and the caches."""
    recurrent, kv = caches
    live = jnp.arange(tokens.shape[0]) < num_live
    at = window(start, live, kv)
    kinds = tuple(
        "deltanet" if recurrent else "sparse" if sparse else "attention"
        for recurrent, sparse in zip(config.recurrent, config.sparse, strict=True)
    )
    place = jnp.asarray([config.recurrent[:i].count(False) for i in range(config.num_layers)])
    ngrams = weights.ngrams
    embedded, recurrent = embed_ngrams(tokens, num_live, recurrent, ngrams, config, chunked)

    def with_ngrams(layer, x, recurrent: NgramState):
        def add(x, rows):
            x, new = add_ngrams(
                x, embedded, num_live, replace(recurrent, ngrams=rows), ngrams, config, chunked
            )
            return x, new.ngrams

        def leave(x, rows):
            return x, rows

        x, rows = lax.cond(layer == config.ngram_layer, add, leave, x, recurrent.ngrams)
        return x, replace(recurrent, ngrams=rows)

    def layer(kind, layer, i, carry):
        x, recurrent, kv = carry
        if kind == "deltanet":
            x, recurrent = with_ngrams(layer, x, recurrent)
        h, iota = mix(x, weights.mixer_streams, layer, config)
        if kind == "deltanet":
            y, recurrent = deltanet(
                h,
                i,
                recurrent,
                weights.deltanet,
                config,
                num_live,
                gate=jax.nn.sigmoid,
                chunked=chunked,
            )
        else:
            layers = (place[layer], i if kind == "sparse" else None)
            y, kv = _attention(h, layers, kv, weights.attention, weights.indexer, at, config)
        x = add_to_streams(x, iota, y)
        with jax.named_scope("experts"):
            h, iota = mix(x, weights.ffn_streams, layer, config)
            x = add_to_streams(x, iota, experts(h, live, weights.experts, layer, config))
        return x, recurrent, kv

    x = jnp.tile(weights.embedding.rows(tokens), (1, config.streams))
    x, recurrent, kv = run_layers(kinds, (x, recurrent, kv), layer)
    if chunked:
        recurrent = recurrent.committed(jnp.int32(0))
    return x, (recurrent, after_window(kv, at))


def features(
    weights: Qwen4ExpWeights, config: Qwen4ExpConfig, hidden: Float[Array, "rows width"]
) -> Float[Array, "rows hidden"]:
    """Returns the mix of the streams that the head projects."""
    return mix(hidden, weights.final, 0, config)[0]


def mtp_features(
    weights: Qwen4ExpWeights, config: Qwen4ExpConfig, hidden: Float[Array, "rows width"]
) -> Float[Array, "rows hidden"]:
    """Returns the mix of the MTP block's streams that the draft head projects."""
    assert weights.mtp is not None
    return mix(hidden, weights.mtp.final, 0, config)[0]


def _join(
    tokens: Int[Array, " rows"],
    hidden: Float[Array, "rows width"],
    weights: Qwen4ExpWeights,
    config: Qwen4ExpConfig,
) -> Float[Array, "rows width"]:
    """Returns the block's streams: each from the token's embedding and its own hidden stream."""
    mtp = weights.mtp
    assert mtp is not None
    embedding = weights.embedding if mtp.embedding is None else mtp.embedding
    embedded = rms_norm(embedding.rows(tokens), mtp.embed_norm, config.eps)
    shape = (tokens.shape[0], config.streams, config.hidden)
    if config.mtp_norm == "joint":
        normed = rms_norm(hidden, mtp.hidden_norm, config.eps).reshape(shape)
    else:
        normed = stream_norm(hidden, mtp.hidden_norm, config)
    both = jnp.concatenate([jnp.broadcast_to(embedded[:, None], shape), normed], -1)
    joined = project(both.reshape(-1, 2 * config.hidden), mtp.join)
    return joined.reshape(tokens.shape[0], config.width)


def mtp_block(
    tokens: Int[Array, " rows"],
    hidden: Float[Array, "rows width"],
    start: Int[Array, ""],
    live: Bool[Array, " rows"],
    kv: KVCache,
    weights: Qwen4ExpWeights,
    config: Qwen4ExpConfig,
) -> tuple[Float[Array, "rows width"], KVCache]:
    """Returns the block's streams, and its cache."""
    mtp = weights.mtp
    assert mtp is not None
    at = window(start, live, kv)
    x = _join(tokens, hidden, weights, config)
    h, iota = mix(x, mtp.mixer_streams, 0, config)
    layers = (0, 0 if config.mtp_sparse else None)
    y, kv = _attention(h, layers, kv, mtp.attention, mtp.indexer, at, config)
    x = add_to_streams(x, iota, y)
    h, iota = mix(x, mtp.ffn_streams, 0, config)
    x = add_to_streams(x, iota, experts(h, live, mtp.experts, 0, config))
    return x, after_window(kv, at)


def mtp_fill(
    tokens: Int[Array, " rows"],
    hidden: Float[Array, "rows width"],
    start: Int[Array, ""],
    live: Bool[Array, " rows"],
    kv: KVCache,
    weights: Qwen4ExpWeights,
    config: Qwen4ExpConfig,
) -> KVCache:
    """Returns the block's cache with entries for the live rows, outputs not computed."""
    mtp = weights.mtp
    assert mtp is not None
    at = window(start, live, kv)
    h, _ = mix(_join(tokens, hidden, weights, config), mtp.mixer_streams, 0, config)
    k, v = keys_and_values(h, mtp.attention, 0, at.positions, config)
    kv = kv.write(0, start, k, v, live)
    if config.mtp_sparse:
        assert isinstance(kv, SparseCache)
        kv = index(h, 0, kv, mtp.indexer, at, config)
    return after_window(kv, at)
