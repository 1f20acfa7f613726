"""What a conversation is on the device: caches, recurrent state, tokens; and what a cycle reports.

Positions below `length` are *committed*: their keys and values are in the caches. The recurrent
state lags behind: the rows accepted by the last cycle are *pending* until the next one folds them.
Nothing is copied or restored when drafts are rejected: lengths and starts move.
"""

from dataclasses import replace
from typing import Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from openjet_jax.config import MAX_STOP_IDS, ROWS, DecodeConfig, ModelConfig
from openjet_jax.draft_vocabulary import DraftSlots
from openjet_jax.sampling import SamplingState, initial_sampling_state, mask_words
from openjet_jax.settings import Sampling
from pallas_kernels.attention import BLOCK
from pallas_kernels.cached_rows import CachedRows, empty, like
from pallas_kernels.delta_rule import Rows


class KVCache(eqx.Module):
    """Keys (normalised, rotated) and values of some attention layers, by absolute position.

    Attributes:
      k, v: [layers, capacity, kv_heads, width] in the cache's format.
    """

    k: CachedRows
    v: CachedRows

    def write(self, layer, start, k, v, live: Bool[Array, " rows"]) -> Self:
        """Returns the cache with the live rows at `start`, `start + 1`, ...; others keep theirs."""

        def put(cache, rows):
            return put_rows(cache, layer, start, rows, live)

        return replace(
            self,
            k=jax.tree.map(put, self.k, like(self.k, k)),
            v=jax.tree.map(put, self.v, like(self.v, v)),
        )

    def committed(self, length: Int[Array, ""]) -> Self:
        """Returns the cache of `length` positions: what stands beyond is never read."""
        del length
        return self

    def planes(self) -> dict[str, CachedRows]:
        """Returns what is kept position by position, arrays [layers, capacity, ...]."""
        return {"k": self.k, "v": self.v}

    def with_planes(self, planes: dict[str, CachedRows]) -> Self:
        """Returns the cache with other contents; what is derived from them is computed anew."""
        return replace(self, **planes)


def put_rows(
    cache: Shaped[Array, "layers capacity ..."], layer, start, rows, live: Bool[Array, " rows"]
) -> Shaped[Array, "layers capacity ..."]:
    """Returns the cache with the live rows at `start`, `start + 1`, ... of one layer."""
    at = jnp.where(live, start + jnp.arange(rows.shape[0]), cache.shape[1])
    return cache.at[layer, at].set(rows.astype(cache.dtype), mode="drop")


class RecurrentState(eqx.Module):
    """State of the Gated DeltaNet layers.

    Attributes:
      delta: S of each layer and value head, before the pending rows.
      window: rows before the convolution: history, then the rows of the last cycle.
      start: where the history of the next row begins inside `window`, the same for all layers.
      pending: inputs of the delta rule of the last cycle's rows.
      num_pending: how many of them were accepted and wait to be folded.
    """

    delta: Float[Array, "layers value_heads width width"]
    window: Float[Array, "layers history_rows channels"]
    start: Int[Array, ""]
    pending: Rows
    num_pending: Int[Array, ""]

    def committed(self, num_rows: Int[Array, ""]) -> Self:
        """Returns the state with the first `num_rows` rows of the last cycle accepted."""
        return replace(self, start=num_rows, num_pending=num_rows)


class MtpRows(eqx.Module):
    """Consecutive positions that the MTP block takes.

    Attributes:
      tokens: token of each row's position.
      hidden: trunk output (or, between drafts, the block's own) of the position before.
      start: position of the first row.
      live: rows that count.
    """

    tokens: Int[Array, " rows"]
    hidden: Float[Array, "rows hidden"]
    start: Int[Array, ""]
    live: Bool[Array, " rows"]


class Request(eqx.Module):
    """What the current request asks of the device; changing any of it compiles nothing.

    Attributes:
      sampling: filters, penalties, noise.
      stop_ids: ids that end generation, padded with -1.
      remaining: tokens that may still be emitted.
      allowed: a bit for each token that a row may choose, lowest bit first; read by programs of a
        `masked` kind alone. The host sets it for the next cycle's drafts.
      depth: drafts to make at the end of a cycle.
      depth_after_rejection: drafts to make after a cycle that rejected one.
    """

    sampling: SamplingState
    stop_ids: Int[Array, " stop_ids"]
    remaining: Int[Array, ""]
    allowed: UInt32[Array, "rows words"]
    depth: Int[Array, ""]
    depth_after_rejection: Int[Array, ""]


class DecodeState(eqx.Module):
    """One conversation. The caches are the architecture's own classes.

    Attributes:
      tokens: ids of all positions, the newest token included; zeros beyond.
      length: committed positions n; the newest token is `tokens[n]`, not yet through the trunk.
      kv: cache of the trunk's attention layers, valid below `length`.
      mtp_kv: cache of the MTP block, valid below `length`; None without MTP.
      recurrent: the recurrent layers.
      hidden: trunk output of position `length - 1`, as the MTP block reads it.
      drafts: proposals for the positions after the newest token.
      num_drafts: how many of them count.
      slots: tokens of the sequence that the draft vocabulary lacks; None with the full one.
      request: the current request.
      stopped: whether the newest token ended generation.
    """

    tokens: Int[Array, " capacity"]
    length: Int[Array, ""]
    kv: KVCache
    mtp_kv: KVCache | None
    recurrent: RecurrentState
    hidden: Float[Array, " hidden"]
    drafts: Int[Array, " drafts"]
    num_drafts: Int[Array, ""]
    slots: DraftSlots | None
    request: Request
    stopped: Bool[Array, ""]


class CycleInfo(eqx.Module):
    """What the host may read of one cycle.

    Attributes:
      tokens: emitted ids, the accepted drafts and one more; zeros beyond `num_tokens`.
      logprobs: log-probability of each emitted token under the unfiltered model.
      top_logprobs, top_ids: the likeliest tokens of every row, best first; None unless the program
        is of a `ranked` kind.
      num_tokens: emitted tokens (0 only in a cycle that did not run).
      drafted: drafts this cycle verified.
      accepted: drafts that survived; before any cut at a stop token or the length.
      stopped: whether the last emitted token is a stop id.
    """

    tokens: Int[Array, " rows"]
    logprobs: Float[Array, " rows"]
    top_logprobs: Float[Array, "rows top"] | None
    top_ids: Int[Array, "rows top"] | None
    num_tokens: Int[Array, ""]
    drafted: Int[Array, ""]
    accepted: Int[Array, ""]
    stopped: Bool[Array, ""]


def capacity_for(context: int) -> int:
    """Returns cache rows for a context: a whole number of blocks, with R rows to spare."""
    return -(-(context + ROWS) // BLOCK) * BLOCK


def kv_cache(config: ModelConfig, decode: DecodeConfig, layers: int) -> KVCache:
    """Returns an empty cache of some attention layers.

    Raises:
      ValueError: the model's heads have no whole number of the format's groups.
    """
    shape = (layers, capacity_for(decode.context), config.kv_heads, config.head_width)
    return KVCache(k=empty(shape, decode.kv_dtype), v=empty(shape, decode.kv_dtype))


def recurrent_state(config: ModelConfig) -> RecurrentState:
    """Returns the state of the Gated DeltaNet layers before the first token."""
    layers, heads, width = len(config.gdn_layers), config.value_heads, config.gdn_width

    def rows(*shape):
        return jnp.zeros((layers, ROWS, *shape))

    return RecurrentState(
        delta=jnp.zeros((layers, heads, width, width)),
        window=jnp.zeros((layers, config.history + ROWS, config.conv_channels)),
        start=jnp.int32(0),
        pending=Rows(
            q=rows(config.key_heads, width),
            k=rows(config.key_heads, width),
            v=rows(heads, width),
            g=rows(heads),
            beta=rows(heads),
        ),
        num_pending=jnp.int32(0),
    )


def empty_request(vocab: int) -> Request:
    """Returns the request of a conversation that was asked for nothing yet."""
    zero = jnp.int32(0)
    return Request(
        sampling=jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            jax.eval_shape(lambda: initial_sampling_state(Sampling(), vocab, vocab)),
        ),
        stop_ids=jnp.full(MAX_STOP_IDS, -1, jnp.int32),
        remaining=zero,
        allowed=jnp.zeros((ROWS, mask_words(vocab)), jnp.uint32),
        depth=zero,
        depth_after_rejection=zero,
    )
