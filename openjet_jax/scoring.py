"""Logits at every position of a token sequence: what other engines are compared with."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float

from openjet_jax.answers import NOT_FINITE
from openjet_jax.compiled import Programs
from openjet_jax.dispatches import checked_ids, chunk_sizes, dispatches
from openjet_jax.engine import programs_for
from openjet_jax.loading import Model

ROWS_AT_ONCE = 64
"""Positions whose logits are computed together."""


def score(
    model: Model,
    ids: Sequence[int] | np.ndarray,
    *,
    mtp: bool = False,
    kv_dtype: str | None = None,
) -> dict:
    """Returns the logits that follow each token of a sequence read from an empty state.

    Padding vocabulary is not masked.

    Args:
      model: from `load`.
      ids: token ids [T], at least one; two with `mtp`.
      mtp: whether to run the MTP block over the sequence too.
      kv_dtype: format of the key-value cache, as in `stream`.

    Returns:
      `logits` [T, vocab] float32 and, with `mtp`, `mtp_logits` [T-1, vocab]: row i is the block on
      token i + 1 and the trunk's hidden row i, and predicts token i + 2.

    Raises:
      ValueError: ids are empty, too many, or outside the vocabulary; or there is no MTP block; or
        an unknown format; or logits are not finite, since the weights are damaged.
    """
    known = checked_ids(ids, model.config.vocab)
    if mtp and not model.config.has_mtp:
        raise ValueError(f"mtp_logits: {model.without_mtp}")
    if mtp and len(known) < 2:
        raise ValueError("mtp_logits need at least two tokens")
    if len(known) > model.config.context:
        raise ValueError(
            f"{len(known)} tokens are more than the {model.config.context} positions the model "
            "knows; score a shorter sequence"
        )
    context = max(256, 1 << (len(known) - 1).bit_length())
    programs = programs_for(model, min(context, model.config.context), kv_dtype)
    hidden = read_hidden(model, programs, known)
    parts = [hidden[at : at + ROWS_AT_ONCE] for at in range(0, len(hidden), ROWS_AT_ONCE)]
    arrays = {"logits": np.concatenate([logits_of(model, programs, part) for part in parts])}
    if not mtp:
        return arrays
    kv, at, mtp_rows = programs.start()().mtp_kv, 1, []
    for rows in chunk_sizes(programs.decode.chunks, len(known) - 1):
        count = min(rows, len(known) - at)
        chunk = _padded(known[at : at + count], rows)
        past = _padded(hidden[at - 1 : at - 1 + count], rows)
        run = programs.mtp_logits(rows)
        kv, out = run(model.weights, kv, chunk, past, np.int32(at), np.int32(count))
        mtp_rows.append(_finite(np.asarray(out)[:count]))
        at += count
    return arrays | {"mtp_logits": np.concatenate(mtp_rows)}


def read_hidden(
    model: Model, programs: Programs, ids: np.ndarray, borders: Iterable[int] = ()
) -> Float[np.ndarray, "tokens hidden"]:
    """Returns the trunk's output row of each token of a sequence read from an empty state.

    Args:
      model: from `load`.
      programs: the model's, of a context that holds the sequence.
      ids: token ids.
      borders: positions at which a dispatch ends.
    """
    state, at, hidden = programs.start()(), 0, []
    for rows, count in dispatches(programs.decode.chunks, 0, len(ids), borders):
        chunk = _padded(ids[at : at + count], rows + 1)
        state, out = programs.prefill(rows)(model.weights, state, chunk, np.int32(count))
        hidden.append(np.asarray(out)[:count])
        at += count
    return np.concatenate(hidden)


def logits_of(
    model: Model, programs: Programs, hidden: Float[np.ndarray, "rows hidden"]
) -> Float[np.ndarray, "rows vocab"]:
    """Returns the logits of at most `ROWS_AT_ONCE` rows of `read_hidden`.

    Raises:
      ValueError: they are not finite.
    """
    run = programs.logits(ROWS_AT_ONCE)
    logits = run(model.weights, _padded(hidden, ROWS_AT_ONCE))
    return _finite(np.asarray(logits)[: len(hidden)])


def _finite(logits: np.ndarray) -> np.ndarray:
    """Returns logits; raises ValueError if one is not finite."""
    if not np.isfinite(logits).all():
        raise ValueError(NOT_FINITE)
    return logits


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    """Returns rows followed by zeros, `size` in all; ids are int32, others float32."""
    padded = np.zeros((size, *rows.shape[1:]), np.int32 if rows.ndim == 1 else np.float32)
    padded[: len(rows)] = rows
    return padded
