"""What one dispatch takes and gives: token ids to read in programs' sizes, and tokens emitted."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int

from openjet_jax.config import MAX_STOP_IDS, DecodeConfig

type TopLogprobs = list[tuple[int, float]]
"""Ids and log-probabilities of the likeliest tokens of one row, best first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Burst:
    """What one dispatch emitted.

    Attributes:
      token_ids: ids in order.
      logprobs: log-probability of each under the unfiltered model.
      top_logprobs: what else was likely in the place of each; empty unless asked for.
      cycles: (drafted, accepted) of each cycle that ran.
      stopped: whether the last id is a stop id.
    """

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    cycles: list[tuple[int, int]]
    stopped: bool


def checked_ids(ids: Sequence[int] | np.ndarray, vocab: int) -> Int[np.ndarray, " n"]:
    """Returns token ids as int32.

    Raises:
      ValueError: there are none, they are not one row of integers, or one is outside 0..vocab-1.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"token ids must be one row of at least one integer, not {array.dtype}"
            f"{list(array.shape)}; a prompt needs at least one token"
        )
    wrong = array[(array < 0) | (array >= vocab)]
    if wrong.size:
        raise ValueError(f"token id {wrong[0]} must be in 0..{vocab - 1}")
    return array.astype(np.int32)


def check_stop_ids(ids: Sequence[int], vocab: int) -> None:
    """Raises ValueError if there are too many stop ids or one is outside the vocabulary."""
    if len(ids):
        checked_ids(ids, vocab)
    if len(set(ids)) > MAX_STOP_IDS:
        raise ValueError(f"{len(set(ids))} stop ids are too many; at most {MAX_STOP_IDS}")


def cycles_of(decode: DecodeConfig, cycles_per_dispatch: int | None) -> int:
    """Returns how many cycles a dispatch runs: as asked, by default the compiled most.

    Raises:
      ValueError: more than that are asked for, or none.
    """
    most = decode.cycles_per_dispatch
    count = most if cycles_per_dispatch is None else cycles_per_dispatch
    if not 1 <= count <= most:
        raise ValueError(f"{cycles_per_dispatch=} must be in 1..{most}")
    return count


def chunk_sizes(sizes: Sequence[int], count: int) -> list[int]:
    """Returns the program sizes that read `count` tokens, the largest first.

    What is left takes the next larger program, unless more than half of that would stay empty.
    """
    *smaller, largest = sizes
    whole, rest = divmod(count, largest)
    if not rest and whole:
        return [largest] * whole
    if smaller and 2 * rest <= largest:
        return [largest] * whole + chunk_sizes(smaller, rest)
    return [largest] * (whole + 1)


def dispatches(
    sizes: Sequence[int], start: int, count: int, borders: Iterable[int]
) -> list[tuple[int, int]]:
    """Returns (rows of the program, tokens it reads) of each dispatch that reads `count` tokens.

    Args:
      sizes: rows of the programs, ascending.
      start: position of the first token.
      count: tokens to read; none still takes one dispatch, which makes a first token the newest.
      borders: positions at which a dispatch ends.
    """
    plan = []
    inside = {border - start for border in borders if 0 < border - start < count}
    for at, end in itertools.pairwise([0, *sorted(inside), count]):
        for rows in chunk_sizes(sizes, end - at):
            plan.append((rows, min(rows, end - at)))
            at += rows
    return plan


def burst_of(infos, ran, top: int = 0) -> Burst:
    """Returns the readable form of one dispatch's infos, as NumPy arrays.

    Args:
      infos: of its cycles.
      ran: how many cycles ran.
      top: how many of the likeliest tokens to report beside each; 0 reports none.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    ranked: list[TopLogprobs] = []
    cycles: list[tuple[int, int]] = []
    for i in range(int(ran)):
        num_tokens = int(infos.num_tokens[i])
        ids += infos.tokens[i, :num_tokens].tolist()
        logprobs += infos.logprobs[i, :num_tokens].tolist()
        for row in range(num_tokens if top else 0):
            best = infos.top_ids[i, row, :top].tolist(), infos.top_logprobs[i, row, :top].tolist()
            ranked.append(list(zip(*best, strict=True)))
        cycles.append((int(infos.drafted[i]), int(infos.accepted[i])))
    return Burst(
        token_ids=ids,
        logprobs=logprobs,
        top_logprobs=ranked,
        cycles=cycles,
        stopped=bool(ran) and bool(infos.stopped[int(ran) - 1]),
    )
