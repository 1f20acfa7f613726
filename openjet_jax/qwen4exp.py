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

from openjet_jax.attention_layers import (
    Attend,
    Window,
    attend_to_all,
    attention,
    attention_fill,
    window,
)
from openjet_jax.config import DecodeConfig, Qwen4ExpConfig
from openjet_jax.deltanet import deltanet
from openjet_jax.experts import experts
from openjet_jax.layer_loop import run_layers
from openjet_jax.layers import draft_embedding, rms_norm
from openjet_jax.ngrams import NgramState, add_ngrams, embed_ngrams, ngram_state
from openjet_jax.projections import project
from openjet_jax.qwen4exp_weights import IndexerWeights, Qwen4ExpMtpWeights, Qwen4ExpWeights
from openjet_jax.sparse_attention import (
    SparseCache,
    after_window,
    attend_sparse,
    index,
    sparse_cache,
)
from openjet_jax.state import KVCache, MtpRows
from openjet_jax.streams import add_to_streams, mix, stream_norm

type Caches = tuple[NgramState, KVCache]


def initial_caches(config: Qwen4ExpConfig, decode: DecodeConfig) -> Caches:
    """Returns the empty caches of the trunk."""
    layers, sparse = len(config.attention_layers), len(config.sparse_layers)
    return ngram_state(config), sparse_cache(config, decode, layers, sparse)


def initial_mtp_cache(config: Qwen4ExpConfig, decode: DecodeConfig) -> KVCache:
    """Returns the empty cache of the MTP block."""
    once = config.mtp_selection == "first"
    return sparse_cache(config, decode, 1, int(config.mtp_sparse), choose_once=once)


def hidden_width(config: Qwen4ExpConfig) -> int:
    """Returns the width of a trunk output row: all streams."""
    return config.width


def _attend(
    h: Float[Array, "rows hidden"],
    sparse: Int[Array, ""] | int | None,
    indexer: IndexerWeights | None,
    config: Qwen4ExpConfig,
    continues: Bool[Array, ""] | None = None,
) -> Attend:
    """Returns how a layer attends: sparsely, or to all where it is no sparse layer.

    Args:
      h: the layer's input.
      sparse: index among the sparse layers, None for another.
      indexer: of all sparse layers.
      config: the model's sizes.
      continues: whether the rows draft on from those of the last call.
    """
    if sparse is None:
        return attend_to_all

    def attend(q, kv, layer, at: Window):
        kv = index(h, sparse, kv, indexer, at, config)
        return attend_sparse(q, h, (layer, sparse), kv, indexer, at, config, continues)

    return attend


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
    at = window(start, jnp.arange(tokens.shape[0]) < num_live)
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
                gate="sigmoid",
                chunked=chunked,
            )
        else:
            attend = _attend(h, i if kind == "sparse" else None, weights.indexer, config)
            y, kv = attention(h, place[layer], kv, weights.attention, at, config, attend)
        x = add_to_streams(x, iota, y)
        with jax.named_scope("experts"):
            h, iota = mix(x, weights.ffn_streams, layer, config)
            x = add_to_streams(x, iota, experts(h, at.live, weights.experts, layer, config))
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


def _inputs(
    rows: MtpRows, weights: Qwen4ExpWeights, config: Qwen4ExpConfig
) -> tuple[Qwen4ExpMtpWeights, Float[Array, "rows width"], Window]:
    """Returns the block, its streams, and where in its cache the rows go.

    Each stream comes from the token's embedding and its own hidden stream.
    """
    mtp = weights.mtp
    assert mtp is not None
    hidden, shape = rows.hidden, (rows.tokens.shape[0], config.streams, config.hidden)
    if config.mtp_norm == "joint":
        normed = rms_norm(hidden, mtp.hidden_norm, config.eps).reshape(shape)
    else:
        normed = stream_norm(hidden, mtp.hidden_norm, config)
    embedded = draft_embedding(rows.tokens, weights, config.eps)
    both = jnp.concatenate([jnp.broadcast_to(embedded[:, None], shape), normed], -1)
    x = project(both.reshape(-1, 2 * config.hidden), mtp.join).reshape(hidden.shape)
    own = config.mtp_position == "token"
    return mtp, x, window(rows.start if own else rows.start - 1, rows.live)


def mtp_block(
    rows: MtpRows,
    kv: KVCache,
    weights: Qwen4ExpWeights,
    config: Qwen4ExpConfig,
    *,
    continues: Bool[Array, ""] | None = None,
) -> tuple[Float[Array, "rows width"], KVCache]:
    """Returns the block's streams, and its cache."""
    mtp, x, at = _inputs(rows, weights, config)
    h, iota = mix(x, mtp.mixer_streams, 0, config)
    attend = _attend(h, 0 if config.mtp_sparse else None, mtp.indexer, config, continues)
    y, kv = attention(h, 0, kv, mtp.attention, at, config, attend)
    x = add_to_streams(x, iota, y)
    h, iota = mix(x, mtp.ffn_streams, 0, config)
    x = add_to_streams(x, iota, experts(h, at.live, mtp.experts, 0, config))
    return x, after_window(kv, at)


def mtp_fill(
    rows: MtpRows,
    kv: KVCache,
    weights: Qwen4ExpWeights,
    config: Qwen4ExpConfig,
) -> KVCache:
    """Returns the block's cache with entries for the live rows, outputs not computed."""
    mtp, x, at = _inputs(rows, weights, config)
    h, _ = mix(x, mtp.mixer_streams, 0, config)
    kv = attention_fill(h, 0, kv, mtp.attention, at, config)
    if config.mtp_sparse:
        assert isinstance(kv, SparseCache)
        kv = index(h, 0, kv, mtp.indexer, at, config)
    return after_window(kv, at)
