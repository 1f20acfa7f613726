"""What a conversation is on the device: caches, recurrent state, tokens; and what a cycle reports.

Positions below `length` are *committed*: their keys and values are in the caches. The recurrent
state lags behind: the rows accepted by the last cycle are *pending* until the next one folds them.
Nothing is copied or restored when drafts are rejected: lengths and starts move.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from openjet_jax.config import MAX_STOP_IDS, ROWS, DecodeConfig, ModelConfig
from openjet_jax.draft_vocabulary import DraftSlots
from openjet_jax.sampling import SamplingState, initial_sampling_state, mask_words
from openjet_jax.settings import Sampling
from pallas_kernels.attention import BLOCK
from pallas_kernels.delta_rule import Rows


class KVCache(eqx.Module):
    """Keys (normalised, rotated) and values of some attention layers, by absolute position."""

    k: Float[Array, "layers capacity kv_heads width"]
    v: Float[Array, "layers capacity kv_heads width"]

    def write(self, layer, start, k, v, live: Bool[Array, " rows"]) -> "KVCache":
        """Returns the cache with the live rows at `start`, `start + 1`, ...; others keep theirs."""
        capacity = self.k.shape[1]
        at = jnp.where(live, start + jnp.arange(k.shape[0]), capacity)

        def put(cache, rows):
            return cache.at[layer, at].set(rows.astype(cache.dtype), mode="drop")

        return KVCache(k=put(self.k, k), v=put(self.v, v))


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
    """One conversation.

    Attributes:
      tokens: ids of all positions, the newest token included; zeros beyond.
      length: committed positions n; the newest token is `tokens[n]`, not yet through the trunk.
      kv: cache of the trunk's attention layers, valid below `length`.
      mtp_kv: cache of the MTP block, valid on positions 1 .. length-1; None without MTP.
      recurrent: the Gated DeltaNet layers.
      hidden: trunk output (after the final norm) of position `length - 1`.
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
      num_tokens: emitted tokens (0 only in a cycle that did not run).
      drafted: drafts this cycle verified.
      accepted: drafts that survived; before any cut at a stop token or the length.
      stopped: whether the last emitted token is a stop id.
    """

    tokens: Int[Array, " rows"]
    logprobs: Float[Array, " rows"]
    num_tokens: Int[Array, ""]
    drafted: Int[Array, ""]
    accepted: Int[Array, ""]
    stopped: Bool[Array, ""]


def capacity_for(context: int) -> int:
    """Returns cache rows for a context: a whole number of blocks, with R rows to spare."""
    return -(-(context + ROWS) // BLOCK) * BLOCK


def initial_state(
    config: ModelConfig, decode: DecodeConfig, slots: DraftSlots | None = None
) -> DecodeState:
    """Returns the state of an empty conversation.

    Args:
      config: the model.
      decode: context and cache format.
      slots: `empty_slots` of the weights.
    """
    capacity = capacity_for(decode.context)
    zero = jnp.int32(0)

    def cache(layers: int) -> KVCache:
        shape = (layers, capacity, config.kv_heads, config.head_width)
        dtype = jnp.dtype(decode.kv_dtype)
        return KVCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))

    layers, heads, width = len(config.gdn_layers), config.value_heads, config.gdn_width

    def rows(*shape):
        return jnp.zeros((layers, ROWS, *shape))

    recurrent = RecurrentState(
        delta=jnp.zeros((layers, heads, width, width)),
        window=jnp.zeros((layers, config.history + ROWS, config.conv_channels)),
        start=zero,
        pending=Rows(
            q=rows(config.key_heads, width),
            k=rows(config.key_heads, width),
            v=rows(heads, width),
            g=rows(heads),
            beta=rows(heads),
        ),
        num_pending=zero,
    )
    request = Request(
        sampling=jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            jax.eval_shape(lambda: initial_sampling_state(Sampling(), config.vocab, config.vocab)),
        ),
        stop_ids=jnp.full(MAX_STOP_IDS, -1, jnp.int32),
        remaining=zero,
        allowed=jnp.zeros((ROWS, mask_words(config.vocab)), jnp.uint32),
        depth=zero,
        depth_after_rejection=zero,
    )
    return DecodeState(
        tokens=jnp.zeros(capacity, jnp.int32),
        length=zero,
        kv=cache(len(config.attention_layers)),
        mtp_kv=cache(1) if config.has_mtp else None,
        recurrent=recurrent,
        hidden=jnp.zeros(config.hidden),
        drafts=jnp.zeros(ROWS - 1, jnp.int32),
        num_drafts=zero,
        slots=slots,
        request=request,
        stopped=jnp.bool_(False),
    )
