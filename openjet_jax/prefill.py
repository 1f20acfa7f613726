"""Reading a prompt: known tokens through the trunk in chunks, leaving the state a cycle expects.

All but the last token are read here; the last one becomes the newest token, and the first cycle
emits what follows it. Reading onto a state with pending rows (the next turn of a conversation)
folds them first.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from openjet_jax.architectures import architecture_of
from openjet_jax.config import ModelConfig
from openjet_jax.draft_vocabulary import full_head, hold
from openjet_jax.projections import project
from openjet_jax.state import DecodeState, KVCache, MtpRows
from openjet_jax.weights import Weights


def prefill(
    weights: Weights,
    state: DecodeState,
    tokens: Int[Array, " rows_and_next"],
    count: Int[Array, ""],
    *,
    config: ModelConfig,
) -> tuple[DecodeState, Float[Array, "rows hidden"]]:
    """Returns the state with `count` more positions committed, and their trunk output rows.

    Args:
      weights: the model.
      state: a conversation of n committed positions; a newest token it has is read again from
        `tokens[0]`.
      tokens: ids of positions n .. n + count, then padding: one more than are read, since the
        token after the last one read becomes the newest.
      count: how many tokens to read, from 0 (a first token alone) to the rows of this program.
      config: the model's sizes.
    """
    model, rows = architecture_of(config), tokens.shape[0] - 1
    start, index = state.length, jnp.arange(rows + 1)
    with jax.named_scope("prefill"):
        hidden, (recurrent, kv) = model.trunk(
            weights, config, tokens[:-1], start, count, (state.recurrent, state.kv), chunked=True
        )
        mtp_kv = state.mtp_kv
        if mtp_kv is not None:
            before = jnp.concatenate([state.hidden[None], hidden[:-1]])
            entries = MtpRows(
                tokens=tokens[:-1], hidden=before, start=start, live=index[:-1] < count
            )
            mtp_kv = model.mtp_fill(entries, mtp_kv, weights, config)
    at = jnp.where(index <= count, start + index, state.tokens.shape[0])
    state = replace(
        state,
        tokens=state.tokens.at[at].set(tokens, mode="drop"),
        length=start + count,
        kv=kv,
        mtp_kv=mtp_kv,
        recurrent=recurrent,
        hidden=jnp.where(count > 0, hidden[count - 1], state.hidden),
        num_drafts=jnp.int32(0),
        slots=hold(state.slots, weights, tokens, count + 1),
        stopped=jnp.bool_(False),
    )
    return state, hidden


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
    """Returns the MTP block's cache and logits over known tokens: what scoring a text needs.

    Args:
      weights: the model.
      kv: the block's cache, valid below `start`.
      tokens: ids of positions `start` and on; from `count` on, padding.
      hidden: trunk output of the position before each.
      start: position of the first row.
      count: rows that count.
      config: the model's sizes.
    """
    assert weights.mtp is not None
    model, live = architecture_of(config), jnp.arange(tokens.shape[0]) < count
    entries = MtpRows(tokens=tokens, hidden=hidden, start=start, live=live)
    out, kv = model.mtp_block(entries, kv, weights, config)
    features = model.mtp_features(weights, config, out)
    return kv, project(features, full_head(weights, weights.mtp))
