"""The n-gram embedding: rows of a hashed table join the residual of one layer.

    e    = the table's rows of a token's n-grams, side by side
    k[c] = rms((W_key e)[c]) g_key[c]      q[c] = rms(R[c]) g_query[c]      v = W_value e
    s[c] = <k[c], q[c]> / sqrt(D)          G[c] = sigmoid(sign(s) sqrt(max(|s|, 1e-6))) v
    U[c] = rms(G[c]) g_conv[c]
    R[c] <- R[c] + G[c] + silu(sum_j taps_j U[c] of j dilations ago)

The state is what the convolution and the hashes read of the past: rows of U, and token ids.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from openjet_jax.config import ROWS, Qwen4ExpConfig
from openjet_jax.projections import project
from openjet_jax.qwen4exp_weights import NgramWeights
from openjet_jax.state import RecurrentState, recurrent_state
from openjet_jax.streams import stream_norm
from pallas_kernels.ngram_hash import ngram_rows

LEAST_SCORE = 1e-6
"""Floor under the root of a score."""


class NgramState(RecurrentState):
    """The DeltaNet layers' state, and that of the n-gram embedding, which moves with it.

    Attributes:
      ngrams: rows of U: history, then the rows of the last cycle, as in `window`.
      ids: token ids in the same way.
    """

    ngrams: Float[Array, "ngram_rows streams_width"]
    ids: Int[Array, " id_rows"]


def ngram_state(config: Qwen4ExpConfig) -> NgramState:
    """Returns the state before the first token, where end tokens stand for the past."""
    recurrent = recurrent_state(config)
    return NgramState(
        **{name: getattr(recurrent, name) for name in RecurrentState.__dataclass_fields__},
        ngrams=jnp.zeros((config.ngram_history + ROWS, config.width)),
        ids=jnp.full(config.ngram - 1 + ROWS, config.ngram_end, jnp.int32),
    )


def windowed(window: Array, start: Int[Array, ""], rows: Array, history: int) -> Array:
    """Returns the history of the first row, and the rows behind it."""
    return jnp.concatenate([lax.dynamic_slice_in_dim(window, start, history), rows])


def kept(window: Array, joined: Array, num_live, history: int, chunked: bool) -> Array:
    """Returns the window to store: a cycle's whole one, or what a chunk leaves as history."""
    new = lax.dynamic_slice_in_dim(joined, num_live, history) if chunked else joined
    return lax.dynamic_update_slice(window, new, (0,) * window.ndim)


def embed_ngrams(
    tokens: Int[Array, " rows"],
    num_live: Int[Array, ""],
    state: NgramState,
    weights: NgramWeights,
    config: Qwen4ExpConfig,
    chunked: bool,
) -> tuple[Float[Array, "rows hidden"], NgramState]:
    """Returns e of every row, and the state with the rows' ids."""
    joined = windowed(state.ids, state.start, tokens, config.ngram - 1)
    rows = ngram_rows(
        joined,
        multipliers=config.ngram_multipliers,
        sizes=config.ngram_sizes,
        offsets=config.ngram_offsets,
        end=config.ngram_end,
    )
    embedded = weights.table.take(rows.reshape(-1)).reshape(tokens.shape[0], config.hidden)
    ids = kept(state.ids, joined, num_live, config.ngram - 1, chunked)
    return embedded, replace(state, ids=ids)


def add_ngrams(
    x: Float[Array, "rows width"],
    embedded: Float[Array, "rows hidden"],
    num_live: Int[Array, ""],
    state: NgramState,
    weights: NgramWeights,
    config: Qwen4ExpConfig,
    chunked: bool,
) -> tuple[Float[Array, "rows width"], NgramState]:
    """Returns the streams with the embedded n-grams, and the state with the rows of U."""
    rows = x.shape[0]
    key = stream_norm(project(embedded, weights.key), weights.key_norm, config)
    query = stream_norm(x, weights.query_norm, config)
    score = jnp.sum(key * query, -1) * jnp.float32(config.hidden**-0.5)
    root = jnp.sign(score) * jnp.sqrt(jnp.maximum(jnp.abs(score), LEAST_SCORE))
    value = project(embedded, weights.value)
    gated = (jax.nn.sigmoid(root)[..., None] * value[:, None]).reshape(rows, config.width)
    u = stream_norm(gated, weights.conv_norm, config).reshape(rows, config.width)
    joined = windowed(state.ngrams, state.start, u, config.ngram_history)
    mixed = sum(
        weights.conv[None, :, tap] * joined[tap * config.ngram : tap * config.ngram + rows]
        for tap in range(config.ngram_taps)
    )
    ngrams = kept(state.ngrams, joined, num_live, config.ngram_history, chunked)
    return x + gated + jax.nn.silu(mixed), replace(state, ngrams=ngrams)
