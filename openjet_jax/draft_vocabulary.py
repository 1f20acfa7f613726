"""The drafter's smaller vocabulary: a fixed list, and slots for the sequence's own rare tokens.

Scoring 248,320 rows costs four times what the MTP block does. Drafts are scored over a list of
frequent tokens instead, plus a fixed number of slots that hold tokens of this sequence (prompt and
output) which the list lacks: identifiers in pasted code, names. Verification always uses the full
vocabulary, so the list changes acceptance and never text. Which tokens are listed is decided in
`draft_list`.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from openjet_jax.projections import project
from openjet_jax.weights import DraftHead, MtpWeights, Packed, Projection, Weights
from pallas_kernels.matmul_q4 import Q4_K, quantise_q4_k
from pallas_kernels.packed import Planes

HEAD_FORMATS = ("same", "q4")
"""How a draft head stores its rows: copied as they are, or rounded to q4_k."""

NUM_SLOTS = 256
"""Tokens of the sequence that the drafter can score beside the list."""

_CHUNK = 8192
"""Rows that are rounded at once, so that their float32 values need little memory."""


class DraftSlots(eqx.Module):
    """The head's rows of the tokens of the sequence that the list lacks, the newest `slots` ones.

    Attributes:
      ids: token of each slot, -1 where it is empty.
      planes: packed rows of the head, [slots, per row].
      seen: when each token was last in the sequence, by `clock`; -1 where the slot is empty.
      clock: tokens seen so far.
    """

    ids: Int[Array, " slots"]
    planes: Planes
    seen: Int[Array, " slots"]
    clock: Int[Array, ""]


def make_draft_head(head: Packed, ids: np.ndarray, vocab: int, form: str = "same") -> DraftHead:
    """Returns a draft head of some rows of the full head, on its device.

    Args:
      head: the full head, one layer.
      ids: token ids, distinct.
      vocab: rows of the full head.
      form: one of `HEAD_FORMATS`; the only place where a weight is ever rounded.

    Raises:
      ValueError: the list is empty, repeats an id, or names one outside the vocabulary; the form is
        unknown, or q4 of rows whose length is not a multiple of 256.
    """
    ids = np.asarray(ids, np.int32)
    if not ids.size or ids.min() < 0 or ids.max() >= vocab:
        raise ValueError(f"draft vocabulary: ids must be in 0..{vocab - 1} and at least one")
    if len(np.unique(ids)) != len(ids):
        raise ValueError("draft vocabulary: an id is listed twice; list each token once")
    if form not in HEAD_FORMATS:
        raise ValueError(f"draft head {form!r} is unknown; use one of {', '.join(HEAD_FORMATS)}")
    member = np.zeros(vocab, bool)
    member[ids] = True
    if form == "q4":
        name, planes = Q4_K.name, _rounded_rows(head, ids)
    else:
        name, planes = head.formats[head.table[0][0]], head.row_planes(jnp.asarray(ids))
    rows = Packed(
        stacks=({plane: values[None] for plane, values in planes.items()},),
        formats=(name,),
        table=((0, 0),),
        shape=(len(ids), head.shape[1]),
    )
    return DraftHead(head=rows, ids=jnp.asarray(ids), member=jnp.asarray(member))


def _rounded_rows(head: Packed, ids: np.ndarray) -> Planes:
    """Returns the q4_k planes of some rows of a head, rounded a chunk at a time."""
    try:
        Q4_K.plane_specs(*head.shape)
    except ValueError as error:
        raise ValueError(f"draft head 'q4' is not possible: {error}; use 'same'") from None
    size = min(_CHUNK, len(ids))
    padded = np.resize(ids, -(-len(ids) // size) * size).reshape(-1, size)
    rounded = jax.jit(lambda head, chunk: quantise_q4_k(head.rows(chunk)))
    parts = [jax.device_get(rounded(head, jnp.asarray(chunk))) for chunk in padded]
    whole = {name: np.concatenate([part[name] for part in parts])[: len(ids)] for name in parts[0]}
    return {name: jnp.asarray(plane) for name, plane in Q4_K.pack(whole).items()}


def full_head(weights: Weights, mtp: MtpWeights) -> Projection:
    """Returns the block's own head, or the trunk's that it shares."""
    return weights.head if mtp.head is None else mtp.head


def with_draft_head(
    weights: Weights, ids: np.ndarray | None, vocab: int, form: str = "same"
) -> Weights:
    """Returns the weights drafting over a list of tokens, or over the full vocabulary with None.

    Args:
      weights: as loaded, not tiled yet.
      ids: token ids, distinct.
      vocab: rows of the full head.
      form: one of `HEAD_FORMATS`.

    Raises:
      ValueError: there is no MTP block, or as `make_draft_head`.
    """
    mtp = weights.mtp
    if mtp is None:
        raise ValueError("the model has no MTP block, so it makes no drafts")
    head = full_head(weights, mtp)
    assert isinstance(head, Packed)
    draft = None if ids is None else make_draft_head(head, ids, vocab, form)
    return dataclasses.replace(weights, mtp=dataclasses.replace(mtp, draft=draft))


def empty_slots(weights: Weights) -> DraftSlots | None:
    """Returns slots without a token, or None where every token of the vocabulary is drafted.

    Args:
      weights: the model; shapes suffice.
    """
    mtp = weights.mtp
    if mtp is None or mtp.draft is None or mtp.draft.whole:
        return None
    ids = jnp.full(NUM_SLOTS, -1, jnp.int32)
    rows = jax.eval_shape(lambda head, ids: head.row_planes(ids), full_head(weights, mtp), ids)
    return DraftSlots(
        ids=ids,
        planes={name: jnp.zeros(row.shape, row.dtype) for name, row in rows.items()},
        seen=jnp.full(NUM_SLOTS, -1, jnp.int32),
        clock=jnp.int32(0),
    )


def hold(
    slots: DraftSlots | None, weights: Weights, tokens: Int[Array, " n"], count: Int[Array, ""]
) -> DraftSlots | None:
    """Returns the slots after `count` new tokens of the sequence.

    They hold the tokens that the list lacks and that were seen last, as many as there are slots:
    a function of the sequence, however it is cut into calls.

    Args:
      slots: from `empty_slots`; None stays None.
      weights: the model.
      tokens: new tokens in order; from `count` on, padding.
      count: how many count.
    """
    if slots is None:
        return None
    assert weights.mtp is not None and weights.mtp.draft is not None
    size, index = slots.ids.shape[0], jnp.arange(tokens.shape[0])
    live = index < count
    again = (tokens[:, None] == tokens[None]) & (index[None] > index[:, None]) & live[None]
    missing = live & ~weights.mtp.draft.member[tokens] & ~again.any(1)
    newest = missing & (jnp.cumsum(missing[::-1])[::-1] <= size)
    same = (slots.ids[:, None] == tokens[None]) & newest[None]
    seen = jnp.where(same.any(1), slots.clock + jnp.argmax(same, 1), slots.seen)
    new = newest & ~same.any(0)
    oldest_first = jnp.argsort(seen)
    at = jnp.where(new, oldest_first[jnp.cumsum(new) - 1], size)
    rows = full_head(weights, weights.mtp).row_planes(tokens)
    return DraftSlots(
        ids=slots.ids.at[at].set(tokens, mode="drop"),
        planes={n: x.at[at].set(rows[n], mode="drop") for n, x in slots.planes.items()},
        seen=seen.at[at].set(slots.clock + index, mode="drop"),
        clock=slots.clock + count,
    )


def draft_logits(
    weights: Weights, slots: DraftSlots | None, hidden: Float[Array, "rows hidden"]
) -> tuple[Float[Array, "rows n"], Int[Array, " n"] | None]:
    """Returns the drafter's logits and the token id of each column (None: the full head's own).

    A column whose id is -1 is an empty slot.

    Args:
      weights: the model; its MTP block must be there.
      slots: the sequence's own tokens, None where every token is drafted.
      hidden: normed output rows of the block.
    """
    mtp = weights.mtp
    assert mtp is not None
    head = full_head(weights, mtp)
    if mtp.draft is None:
        return project(hidden, head), None
    listed = project(hidden, mtp.draft.head)
    if slots is None:
        return listed, mtp.draft.ids
    own = slot_logits(weights, slots, hidden)
    return jnp.concatenate([listed, own], -1), jnp.concatenate([mtp.draft.ids, slots.ids])


def slot_logits(
    weights: Weights, slots: DraftSlots, hidden: Float[Array, "rows hidden"]
) -> Float[Array, "rows slots"]:
    """Returns the logits of the tokens that slots hold; of no meaning for an empty one."""
    assert weights.mtp is not None
    rows = full_head(weights, weights.mtp).unpack(slots.planes)
    return jnp.matmul(hidden, rows.T, precision=jax.lax.Precision.HIGHEST)
