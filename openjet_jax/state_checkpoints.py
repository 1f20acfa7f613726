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
from pallas_kernels.cached_rows import CachedRows


class StateCheckpoint(eqx.Module):
    """What a position left behind that cannot be cut.

    Attributes:
      recurrent: the Gated DeltaNet layers, pending rows included.
      hidden: trunk output of the position before.
    """

    recurrent: RecurrentState
    hidden: Float[Array, " hidden"]


class KVBlock(eqx.Module):
    """What the caches hold of `BLOCK` consecutive positions, [positions, layers, ...] each.

    Attributes:
      trunk: planes of the trunk's cache by name.
      mtp: of the MTP block's; None without MTP.
    """

    trunk: dict[str, CachedRows]
    mtp: dict[str, CachedRows] | None


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
        kv=state.kv.committed(length),
        mtp_kv=None if state.mtp_kv is None else state.mtp_kv.committed(length),
        recurrent=checkpoint.recurrent,
        hidden=checkpoint.hidden,
        num_drafts=jnp.int32(0),
        stopped=jnp.bool_(False),
    )


def read_block(state: DecodeState, index: Int[Array, ""]) -> KVBlock:
    """Returns the caches' planes from position `index * BLOCK` on, beyond the length too."""

    def cut(cache: KVCache) -> dict[str, CachedRows]:
        return jax.tree.map(
            lambda x: jnp.swapaxes(lax.dynamic_slice_in_dim(x, index * BLOCK, BLOCK, 1), 0, 1),
            cache.planes(),
        )

    mtp = state.mtp_kv
    return KVBlock(trunk=cut(state.kv), mtp=None if mtp is None else cut(mtp))


def write_block(state: DecodeState, block: KVBlock, index: Int[Array, ""]) -> DecodeState:
    """Returns the state with a block in its caches, at positions `index * BLOCK` on."""

    def put(cache: KVCache, parts: dict[str, CachedRows]) -> KVCache:
        def over(plane, part):
            part = jnp.swapaxes(part, 0, 1)
            return lax.dynamic_update_slice_in_dim(plane, part, index * BLOCK, 1)

        return cache.with_planes(jax.tree.map(over, cache.planes(), parts))

    mtp = state.mtp_kv
    if mtp is not None:
        assert block.mtp is not None
        mtp = put(mtp, block.mtp)
    return replace(state, kv=put(state.kv, block.trunk), mtp_kv=mtp)


def hold_tokens(
    weights: Weights, state: DecodeState, tokens: Int[Array, " n"], count: Int[Array, ""]
) -> DecodeState:
    """Returns the state drafting from the first `count` of these tokens of its text too."""
    return replace(state, slots=hold(state.slots, weights, tokens, count))
