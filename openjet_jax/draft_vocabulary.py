"""The drafter's smaller vocabulary: a fixed list, and slots for the sequence's own rare tokens.

Scoring 248,320 rows costs four times what the MTP block does. Drafts are scored over a list of
frequent tokens instead, plus a fixed number of slots that hold tokens of this sequence (prompt and
output) which the list lacks: identifiers in pasted code, names. Verification always uses the full
vocabulary, so the list changes acceptance and never text.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from openjet_jax.weights import DraftHead, MtpWeights, Packed, Projection, Weights, project
from pallas_kernels.packed import Planes

DEFAULT_SIZE = 32_768
"""Rows of the default list, and the largest vocabulary that drafts with its full head."""

NUM_SLOTS = 256
"""Tokens of the sequence that the drafter can score beside the list."""


class DraftSlots(eqx.Module):
    """Rows of the head for tokens of the sequence that the list lacks; the newest win.

    Attributes:
      ids: token of each slot, -1 where it is empty.
      planes: packed rows of the head, [slots, per row].
      held: whether a token id is in a slot.
      next: slot that the next token takes.
    """

    ids: Int[Array, " slots"]
    planes: Planes
    held: Bool[Array, " vocab"]
    next: Int[Array, ""]


def default_ids(vocab_used: int, added: set[int] | frozenset[int] = frozenset()) -> np.ndarray:
    """Returns the default list: `DEFAULT_SIZE` ids, the added tokens and the lowest others.

    A byte-level BPE numbers its tokens in the order its merges were learnt, most frequent first, so
    low ids are the frequent tokens of the tokenizer's own training text. `openjet-jax draft-vocab`
    counts a user's text instead.

    Args:
      vocab_used: ids at and above this are padding.
      added: ids of control and user-defined tokens: they open and close every turn.
    """
    others = [i for i in range(vocab_used) if i not in added]
    chosen = sorted(added) + others[: max(DEFAULT_SIZE - len(added), 0)]
    return np.asarray(sorted(chosen[:DEFAULT_SIZE]), np.int32)


def make_draft_head(head: Packed, ids: np.ndarray, vocab: int) -> DraftHead:
    """Returns a draft head that is an exact copy of some rows of the full head.

    Args:
      head: the full head, one layer.
      ids: token ids, distinct.
      vocab: rows of the full head.

    Raises:
      ValueError: the list is empty, repeats an id, or names one outside the vocabulary.
    """
    ids = np.asarray(ids, np.int32)
    if not ids.size or ids.min() < 0 or ids.max() >= vocab:
        raise ValueError(f"draft vocabulary: ids must be in 0..{vocab - 1} and at least one")
    if len(np.unique(ids)) != len(ids):
        raise ValueError("draft vocabulary: an id is listed twice; list each token once")
    member = np.zeros(vocab, bool)
    member[ids] = True
    planes = {name: plane[None] for name, plane in head.row_planes(jnp.asarray(ids)).items()}
    rows = Packed(
        stacks=(planes,),
        formats=(head.formats[head.table[0][0]],),
        table=((0, 0),),
        shape=(len(ids), head.shape[1]),
    )
    return DraftHead(head=rows, ids=jnp.asarray(ids), member=jnp.asarray(member))


def _full_head(weights: Weights, mtp: MtpWeights) -> Projection:
    return weights.head if mtp.head is None else mtp.head


def with_draft_head(weights: Weights, draft: DraftHead | None) -> Weights:
    """Returns the weights drafting with a draft head, or over the full vocabulary with None."""
    if weights.mtp is None:
        raise ValueError("the model has no MTP block, so it makes no drafts")
    return dataclasses.replace(weights, mtp=dataclasses.replace(weights.mtp, draft=draft))


def empty_slots(weights: Weights) -> DraftSlots | None:
    """Returns slots without a token, or None where drafts use the full vocabulary.

    Args:
      weights: the model; shapes suffice.
    """
    mtp = weights.mtp
    if mtp is None or mtp.draft is None:
        return None
    head = _full_head(weights, mtp)
    stack = head.stacks[head.table[0][0]]
    return DraftSlots(
        ids=jnp.full(NUM_SLOTS, -1, jnp.int32),
        planes={n: jnp.zeros((NUM_SLOTS, *x.shape[2:]), x.dtype) for n, x in stack.items()},
        held=jnp.zeros(mtp.draft.member.shape, bool),
        next=jnp.int32(0),
    )


def hold(
    slots: DraftSlots | None, weights: Weights, tokens: Int[Array, " n"], count: Int[Array, ""]
) -> DraftSlots | None:
    """Returns the slots after `count` new tokens of the sequence: the newest missing ones stay.

    Args:
      slots: from `empty_slots`; None stays None.
      weights: the model.
      tokens: new tokens in order; from `count` on, padding.
      count: how many count.
    """
    if slots is None:
        return None
    assert weights.mtp is not None and weights.mtp.draft is not None
    size, vocab = slots.ids.shape[0], slots.held.shape[0]
    index = jnp.arange(tokens.shape[0])
    live = index < count
    same_later = (tokens[:, None] == tokens[None]) & (index[None] > index[:, None]) & live[None]
    new = live & ~weights.mtp.draft.member[tokens] & ~slots.held[tokens] & ~same_later.any(1)
    total = new.sum()
    rank = jnp.cumsum(new) - 1
    kept = new & (rank >= total - size)
    at = jnp.where(kept, (slots.next + rank) % size, size)
    evicted = jnp.where(kept, slots.ids.at[at].get(mode="clip"), -1)
    held = slots.held.at[jnp.where(evicted >= 0, evicted, vocab)].set(False, mode="drop")
    held = held.at[jnp.where(kept, tokens, vocab)].set(True, mode="drop")
    ids = slots.ids.at[at].set(tokens, mode="drop")
    planes = _full_head(weights, weights.mtp).row_planes(jnp.maximum(ids, 0))
    return DraftSlots(ids=ids, planes=planes, held=held, next=(slots.next + total) % size)


def draft_logits(
    weights: Weights, slots: DraftSlots | None, hidden: Float[Array, "rows hidden"]
) -> tuple[Float[Array, "rows n"], Int[Array, " n"] | None]:
    """Returns the drafter's logits and the token id of each column (None: the full vocabulary).

    A column whose id is -1 is an empty slot.

    Args:
      weights: the model; its MTP block must be there.
      slots: the sequence's own tokens, None where drafts use the full vocabulary.
      hidden: normed output rows of the block.
    """
    mtp = weights.mtp
    assert mtp is not None
    head = _full_head(weights, mtp)
    if mtp.draft is None or slots is None:
        return project(hidden, head), None
    own = jnp.matmul(hidden, head.unpack(slots.planes).T, precision=jax.lax.Precision.HIGHEST)
    listed = project(hidden, mtp.draft.head)
    return jnp.concatenate([listed, own], -1), jnp.concatenate([mtp.draft.ids, slots.ids])
