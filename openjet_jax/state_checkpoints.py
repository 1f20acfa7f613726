"""Parts of a conversation's state that are taken out and put back: checkpoints and cache blocks.

Keys and values can be cut at any position; the recurrent state only where a checkpoint was taken.
A checkpoint is all that is needed to go on from its position besides the caches below it. Rows
pending when it was taken stay pending in it, so nothing is rounded another way on its account.
"""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from openjet_jax.draft_vocabulary import hold
from openjet_jax.state import DecodeState, KVCache, RecurrentState
from openjet_jax.weights import Weights
from pallas_kernels.attention import BLOCK


class StateCheckpoint(eqx.Module):
    """What a position left behind that cannot be cut.

    Attributes:
      recurrent: the Gated DeltaNet layers, pending rows included.
      hidden: trunk output of the position before.
    """

    recurrent: RecurrentState
    hidden: Float[Array, " hidden"]


class KVBlock(eqx.Module):
    """Keys and values of `BLOCK` consecutive positions, position by position.

    Attributes:
      k, v: of the trunk's attention layers.
      mtp_k, mtp_v: of the MTP block; None without MTP.
    """

    k: Float[Array, "positions layers kv_heads width"]
    v: Float[Array, "positions layers kv_heads width"]
    mtp_k: Float[Array, "positions one kv_heads width"] | None
    mtp_v: Float[Array, "positions one kv_heads width"] | None


def copied[T](tree: T) -> T:
    """Returns a copy of every array: donating one of the two leaves the other."""
    return jax.tree.map(jnp.copy, tree)


def take_checkpoint(state: DecodeState) -> StateCheckpoint:
    """Returns a copy of what position `state.length` needs besides its caches."""
    return copied(StateCheckpoint(recurrent=state.recurrent, hidden=state.hidden))


def rewind(
    state: DecodeState,
    checkpoint: StateCheckpoint,
    tokens: Int[Array, " capacity"],
    length: Int[Array, ""],
) -> DecodeState:
    """Returns the state of a checkpoint's position; caches are cut there, not copied.

    Args:
      state: its caches hold the checkpoint's text at least up to `length`.
      checkpoint: taken at `length`.
      tokens: ids of positions 0 .. length, the newest token included; zeros beyond.
      length: committed positions.
    """
    return replace(
        state,
        tokens=tokens,
        length=length,
        recurrent=checkpoint.recurrent,
        hidden=checkpoint.hidden,
        num_drafts=jnp.int32(0),
        stopped=jnp.bool_(False),
    )


def read_block(state: DecodeState, index: Int[Array, ""]) -> KVBlock:
    """Returns keys and values of positions `index * BLOCK` on; what lies beyond the length too."""

    def cut(cache):
        block = lax.dynamic_slice_in_dim(cache, index * BLOCK, BLOCK, 1)
        return jnp.swapaxes(block, 0, 1)

    mtp = state.mtp_kv
    return KVBlock(
        k=cut(state.kv.k),
        v=cut(state.kv.v),
        mtp_k=None if mtp is None else cut(mtp.k),
        mtp_v=None if mtp is None else cut(mtp.v),
    )


def write_block(state: DecodeState, block: KVBlock, index: Int[Array, ""]) -> DecodeState:
    """Returns the state with a block's keys and values at positions `index * BLOCK` on."""

    def put(cache, part):
        return lax.dynamic_update_slice_in_dim(cache, jnp.swapaxes(part, 0, 1), index * BLOCK, 1)

    kv = KVCache(k=put(state.kv.k, block.k), v=put(state.kv.v, block.v))
    mtp = state.mtp_kv
    if mtp is not None:
        mtp = KVCache(k=put(mtp.k, block.mtp_k), v=put(mtp.v, block.mtp_v))
    return replace(state, kv=kv, mtp_kv=mtp)


def hold_tokens(
    weights: Weights, state: DecodeState, tokens: Int[Array, " n"], count: Int[Array, ""]
) -> DecodeState:
    """Returns the state drafting from the first `count` of these tokens of its text too."""
    return replace(state, slots=hold(state.slots, weights, tokens, count))
