"""Reading a prompt: known tokens through the trunk in chunks, leaving the state a cycle expects.

All but the last token are read here; the last one becomes the newest token, and the first cycle
emits what follows it. Reading onto a state with pending rows (the next turn of a conversation)
folds them first.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from openjet_jax.config import ModelConfig
from openjet_jax.draft import mtp_fill
from openjet_jax.model import trunk_chunk
from openjet_jax.state import DecodeState
from openjet_jax.weights import Weights


def prefill(
    weights: Weights,
    state: DecodeState,
    tokens: Int[Array, " rows_and_next"],
    count: Int[Array, ""],
    *,
    config: ModelConfig,
) -> tuple[DecodeState, Float[Array, "rows hidden"]]:
    """Returns the state with `count` more positions committed, and their normed hidden rows.

    Args:
      weights: the model.
      state: a conversation of n committed positions; a newest token it has is read again from
        `tokens[0]`.
      tokens: ids of positions n .. n + count, then padding: one more than are read, since the
        token after the last one read becomes the newest.
      count: how many tokens to read, from 0 (a first token alone) to the rows of this program.
      config: the model's sizes.
    """
    rows = tokens.shape[0] - 1
    start, index = state.length, jnp.arange(rows + 1)
    with jax.named_scope("prefill"):
        hidden, recurrent, kv = trunk_chunk(
            weights, config, tokens[:-1], start, count, state.recurrent, state.kv
        )
        mtp_kv = state.mtp_kv
        if mtp_kv is not None:
            before = jnp.concatenate([state.hidden[None], hidden[:-1]])
            live = index[:-1] < count
            mtp_kv = mtp_fill(tokens[:-1], before, start, live, mtp_kv, weights, config)
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
        stopped=jnp.bool_(False),
    )
    return state, hidden
