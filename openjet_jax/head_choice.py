"""From rows before the head to chosen tokens: by the kernel that chooses as it multiplies, or not.

Greedy choices and those among the best candidates need no logits of a whole vocabulary: on an
sm_90 GPU the head's product keeps the best token of a row, or the best value of every 16, and the
log-sum-exp. Everything else, and every other device, computes logits and chooses from them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from openjet_jax.draft_vocabulary import DraftSlots, draft_logits, full_head, slot_logits
from openjet_jax.filters import best_candidates
from openjet_jax.projections import project
from openjet_jax.sampling import (
    SamplingState,
    adjust,
    choose,
    draw,
    log_probabilities,
    restrict,
    top_log_probabilities,
)
from openjet_jax.settings import CANDIDATES, SamplingKind
from openjet_jax.weights import Projection, Tiled, Weights

_SEEN = np.uint32(1 << 31)


def choose_tokens(
    x: Float[Array, "rows hidden"],
    head: Projection,
    positions: Int[Array, " rows"],
    state: SamplingState,
    kind: SamplingKind,
    drafts: Int[Array, " depth"],
    *,
    vocab_used: int,
    allowed: UInt32[Array, "rows words"] | None = None,
) -> tuple[Int[Array, " rows"], Float[Array, " rows"], tuple[Array | None, Array | None]]:
    """Returns every row's token, the model's own log-probability of it, and the likeliest tokens.

    The last are those of `top_log_probabilities` for a ranked kind, else None twice.

    Args:
      x: what the head projects.
      head: over the whole vocabulary.
      positions: absolute position that each row's token will take.
      state: settings and tokens seen.
      kind: the sampling program.
      drafts: row i's prefix ends with the first i of them.
      vocab_used: ids at and above it are never chosen.
      allowed: tokens that a constraint allows each row, one bit each; with `kind.masked`.
    """
    lengths = jnp.arange(x.shape[0], dtype=jnp.int32)
    allowed = allowed if kind.masked else None
    if not chooses_in_kernel(head, kind):
        raw = project(x, head)
        adjusted = adjust(raw, state, kind, drafts, lengths, vocab_used=vocab_used)
        if allowed is not None:
            adjusted = restrict(adjusted, allowed)
        chosen = choose(adjusted, positions, state, kind)
        logprobs = log_probabilities(raw, chosen, vocab_used=vocab_used)
        ranked = kind.ranked
        top = top_log_probabilities(raw, vocab_used=vocab_used) if ranked else (None, None)
        return chosen, logprobs, top
    assert isinstance(head, Tiled)
    found = head_choice(
        x, head, state, kind, drafts, lengths, vocab_used=vocab_used, allowed=allowed
    )
    if kind.method == "greedy":
        return found.column, found.logit - found.log_sum, (None, None)
    values, tokens, raw = candidates_of(
        found, state, kind, drafts, lengths, vocab_used=vocab_used, allowed=allowed
    )
    winner = draw(values, tokens, positions, state, kind)[:, None]
    chosen, logit = (jnp.take_along_axis(a, winner, axis=1)[:, 0] for a in (tokens, raw))
    return chosen, logit - found.log_sum, (None, None)


def choose_draft(
    x: Float[Array, "rows hidden"],
    weights: Weights,
    slots: DraftSlots | None,
    positions: Int[Array, " rows"],
    state: SamplingState,
    kind: SamplingKind,
    drafts: Int[Array, " depth"],
    lengths: Int[Array, " rows"],
    *,
    vocab_used: int,
) -> Int[Array, " rows"]:
    """Returns the drafter's token of each row.

    Args:
      x: what the draft head projects.
      weights: the model; its MTP block must be there.
      slots: the sequence's own tokens, None where every token is drafted.
      positions: absolute position that each row's token will take.
      state: settings and tokens seen.
      kind: the drafter's sampling program.
      drafts: draft tokens, in order.
      lengths: drafts in the prefix of each row.
      vocab_used: ids at and above it are never chosen.
    """
    mtp = weights.mtp
    assert mtp is not None
    head, ids = full_head(weights, mtp), None
    if mtp.draft is not None:
        head, ids = mtp.draft.head, mtp.draft.ids
    given = (state, kind, drafts, lengths)
    if not chooses_in_kernel(head, kind):
        raw, ids = draft_logits(weights, slots, x)
        adjusted = adjust(raw, *given, vocab_used=vocab_used, ids=ids)
        return choose(adjusted, positions, state, kind, ids)
    assert isinstance(head, Tiled)
    found = head_choice(x, head, *given, vocab_used=vocab_used, ids=ids)
    if kind.method == "greedy":
        values, columns = found.value[:, None], found.column[:, None]
        tokens = columns if ids is None else ids[columns]
    else:
        values, tokens, _ = candidates_of(found, *given, vocab_used=vocab_used, ids=ids)
    if slots is not None:
        own = slot_logits(weights, slots, x)
        own = adjust(own, *given, vocab_used=vocab_used, ids=slots.ids)
        own = jnp.where(jnp.isnan(own), -jnp.inf, own)
        if kind.method == "greedy":
            # The barrier keeps XLA from making every use of it search again.
            best, at = jax.lax.optimization_barrier((own.max(1), jnp.argmax(own, 1)))
            return jnp.where(best > found.value, slots.ids[at], tokens[:, 0])
        values = jnp.concatenate([values, own], 1)
        theirs = jnp.broadcast_to(slots.ids[None], own.shape)
        tokens = jnp.concatenate([tokens, theirs], 1)
        values, index = jax.lax.top_k(values, min(CANDIDATES, values.shape[1]))
        tokens = jnp.take_along_axis(tokens, index, axis=1)
    if kind.method == "greedy":
        return tokens[:, 0]
    winner = draw(values, tokens, positions, state, kind)[:, None]
    return jnp.take_along_axis(tokens, winner, axis=1)[:, 0]


def chooses_in_kernel(head: Projection, kind: SamplingKind) -> bool:
    """Returns whether the head's product chooses by itself."""
    if not isinstance(head, Tiled) or len(head.stacks) > 1 or kind.ranked:
        return False
    return kind.method in ("greedy", "top_k") and _tiles(head, 8).parts == 1


def _tiles(head: Tiled, rows: int) -> Any:
    from pallas_kernels.decode_blocks import BLOCKS
    from pallas_kernels.tile_choice import tiles_for

    device = jax.devices()[0].device_kind
    tiles = tiles_for(BLOCKS[head.formats[0]], *head.shape, rows, "choice", device)
    return dataclasses.replace(tiles, overlap=True)


def head_choice(
    x: Float[Array, "rows hidden"],
    head: Tiled,
    state: SamplingState,
    kind: SamplingKind,
    drafts: Int[Array, " depth"],
    lengths: Int[Array, " rows"],
    *,
    vocab_used: int,
    ids: Int[Array, " n"] | None = None,
    allowed: UInt32[Array, "rows words"] | None = None,
) -> Any:
    """Returns `Best` for a greedy kind and `Candidates` else, of `pallas_kernels.decode_head`.

    Args:
      x: at most eight rows.
      head: over the vocabulary, or over `ids`.
      state: settings and tokens seen.
      kind: the sampling program, greedy or top-k.
      drafts: draft tokens, in order.
      lengths: drafts in the prefix of each row.
      vocab_used: ids at and above it are never chosen.
      ids: token of each column; None where columns are tokens.
      allowed: columns that each row may choose, one bit each.
    """
    from pallas_kernels import decode_head
    from pallas_kernels.decode_blocks import BLOCKS
    from pallas_kernels.decode_inputs import decode_inputs

    rows, block = x.shape[0], BLOCKS[head.formats[0]]
    missing = ((0, 8 - rows), (0, 0))
    adjustments = None
    if kind.adjusted:
        history = state.counts.astype(jnp.uint32) | jnp.where(state.prompt_seen, _SEEN, 0)
        bias = state.bias
        if ids is not None:
            history, bias = history[ids], bias[ids]
        in_prefix = jnp.arange(drafts.shape[0])[None] < lengths[:, None]
        prefix = jnp.where(in_prefix, drafts[None], -1)
        unused = (missing[0], (0, decode_head.PREFIX - drafts.shape[0]))
        settings = (state.repetition, state.frequency, state.presence, jnp.float32(0))
        adjustments = decode_head.Adjustments(
            settings=jnp.stack(settings),
            bias=bias,
            history=history,
            prefix=jnp.pad(prefix, unused, constant_values=-1),
        )
    found: Any = decode_head.decode_head(
        decode_inputs(jnp.pad(x, missing), block).activations,
        head.stacks[0],
        jnp.zeros(1, jnp.int32),
        block,
        _tiles(head, 8),
        decode_head.HeadOperands(
            adjustments=adjustments,
            allowed=None if allowed is None else jnp.pad(allowed, missing),
            tokens=ids,
        ),
        used=vocab_used,
        candidates=kind.method != "greedy",
    )
    if kind.method == "greedy":
        return jax.tree.map(lambda a: a[:rows], found)
    return decode_head.Candidates(
        maxima=found.maxima[:rows], logits=found.logits[:, :rows], log_sum=found.log_sum[:rows]
    )


def candidates_of(
    found: Any,
    state: SamplingState,
    kind: SamplingKind,
    drafts: Int[Array, " depth"],
    lengths: Int[Array, " rows"],
    *,
    vocab_used: int,
    ids: Int[Array, " n"] | None = None,
    allowed: UInt32[Array, "rows words"] | None = None,
) -> tuple[Float[Array, "rows best"], Int[Array, "rows best"], Float[Array, "rows best"]]:
    """Returns the best `CANDIDATES` adjusted logits of each row, their tokens, and them unadjusted.

    They lie in the `CANDIDATES` units of 16 columns with the largest maxima, as in
    `best_candidates`. Arguments are those of `head_choice`, and what it found.
    """
    rows, units = found.maxima.shape
    chosen = jnp.sort(best_candidates(found.maxima)[1], axis=1)
    raw = found.logits[chosen, jnp.arange(rows)[:, None]].reshape(rows, -1)
    columns = (chosen[:, :, None] * 16 + jnp.arange(16)[None, None]).reshape(rows, -1)
    tokens = columns if ids is None else ids[columns]
    values = adjust(raw, state, kind, drafts, lengths, vocab_used=vocab_used, ids=tokens)
    if allowed is not None:
        words = jnp.take_along_axis(allowed, columns // 32, axis=1)
        bits = words >> (columns % 32).astype(jnp.uint32)
        values = jnp.where((bits & 1) != 0, values, -jnp.inf)
    values = jnp.where(jnp.isnan(values), -jnp.inf, values)
    values, index = jax.lax.top_k(values, min(CANDIDATES, units * 16))
    tokens, raw = (jnp.take_along_axis(a, index, axis=1) for a in (tokens, raw))
    return values, tokens, raw
