"""Logits at every position of a token sequence: what other engines are compared with."""

from collections.abc import Sequence

import numpy as np

from openjet_jax.answers import NOT_FINITE
from openjet_jax.dispatches import checked_ids, chunk_sizes
from openjet_jax.engine import programs_for
from openjet_jax.loading import Model


def score(model: Model, ids: Sequence[int] | np.ndarray, *, mtp: bool = False) -> dict:
    """Returns the logits that follow each token of a sequence read from an empty state.

    Padding vocabulary is not masked.

    Args:
      model: from `load`.
      ids: token ids [T], at least one; two with `mtp`.
      mtp: whether to run the MTP block over the sequence too.

    Returns:
      `logits` [T, vocab] float32 and, with `mtp`, `mtp_logits` [T-1, vocab]: row i is the block on
      token i + 1 and the trunk's hidden row i, and predicts token i + 2.

    Raises:
      ValueError: ids are empty, too many, or outside the vocabulary; or there is no MTP block; or
        logits are not finite, since the weights are damaged.
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
    programs = programs_for(model, min(context, model.config.context))
    state, at = programs.start()(), 0
    hidden, logits, mtp_rows = [], [], []
    for rows in chunk_sizes(programs.decode.chunks, len(known)):
        count = min(rows, len(known) - at)
        chunk = _padded(known[at : at + count], rows + 1)
        state, out = programs.prefill(rows)(model.weights, state, chunk, np.int32(count))
        logits.append(np.asarray(programs.logits(rows)(model.weights, out))[:count])
        hidden.append(np.asarray(out)[:count])
        at += count
    arrays = {"logits": _finite(logits)}
    if not mtp:
        return arrays
    kv, at, before = programs.start()().mtp_kv, 1, np.concatenate(hidden)
    for rows in chunk_sizes(programs.decode.chunks, len(known) - 1):
        count = min(rows, len(known) - at)
        chunk = _padded(known[at : at + count], rows)
        past = np.zeros((rows, before.shape[1]), np.float32)
        past[:count] = before[at - 1 : at - 1 + count]
        run = programs.mtp_logits(rows)
        kv, out = run(model.weights, kv, chunk, past, np.int32(at), np.int32(count))
        mtp_rows.append(np.asarray(out)[:count])
        at += count
    return arrays | {"mtp_logits": _finite(mtp_rows)}


def _finite(rows: list[np.ndarray]) -> np.ndarray:
    """Returns chunks of logits as one array."""
    joined = np.concatenate(rows)
    if not np.isfinite(joined).all():
        raise ValueError(NOT_FINITE)
    return joined


def _padded(ids: np.ndarray, size: int) -> np.ndarray:
    """Returns ids followed by zeros, `size` in all."""
    padded = np.zeros(size, np.int32)
    padded[: len(ids)] = ids
    return padded
