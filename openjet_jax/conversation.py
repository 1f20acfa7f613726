"""A conversation on the device: read tokens, run cycles. The only host loop over programs.

The arrays never leave the device; the host reads a few integers a dispatch. Several cycles run in
one dispatch, so tokens arrive in bursts. A stop id ends a burst on the device.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import numpy as np
from jaxtyping import Int

from openjet_jax.compiled import Programs
from openjet_jax.config import MAX_STOP_IDS, DecodeConfig
from openjet_jax.constraint import Constraint
from openjet_jax.depth import AutoDepth, DepthPolicy
from openjet_jax.sampling import initial_sampling_state
from openjet_jax.settings import Sampling
from openjet_jax.state import DecodeState, Request
from openjet_jax.stats import Stats
from openjet_jax.weights import Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Burst:
    """What one dispatch emitted.

    Attributes:
      token_ids: ids in order.
      logprobs: log-probability of each under the unfiltered model.
      cycles: (drafted, accepted) of each cycle that ran.
      stopped: whether the last id is a stop id.
    """

    token_ids: list[int]
    logprobs: list[float]
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


def chunk_sizes(sizes: Sequence[int], count: int) -> list[int]:
    """Returns the program sizes that read `count` tokens: the largest first, then the best fit."""
    whole, rest = divmod(count, sizes[-1])
    tail = [next(size for size in sizes if size >= rest)] if rest or not whole else []
    return [sizes[-1]] * whole + tail


class Conversation:
    """One sequence of tokens and its state.

    Attributes:
      ids: every token so far, the newest included.
      state: the device side; programs consume and replace it.
      stats: of the current request.
    """

    def __init__(self, weights: Weights, programs: Programs):
        """Starts an empty conversation.

        Args:
          weights: the model.
          programs: the model's programs.
        """
        self.weights, self.programs = weights, programs
        self.ids: list[int] = []
        self.stats = Stats()
        self.prepare(programs.start)
        self.state: DecodeState = programs.start()()

    @property
    def decode(self) -> DecodeConfig:
        """The shapes this conversation lives in."""
        return self.programs.decode

    def prepare(self, *gets: Callable[[], Callable]) -> None:
        """Makes programs ready, counted apart from the work they do; see `Programs.prepare`."""
        start, compiled = time.perf_counter(), self.programs.num_compiled
        self.programs.prepare(*gets)
        self.stats.ready_s += time.perf_counter() - start
        self.stats.compiled += self.programs.num_compiled - compiled

    def read(self, ids: Sequence[int]) -> None:
        """Reads more tokens: all but the last go through the model, the last is the newest.

        Args:
          ids: new token ids, at least one.

        Raises:
          ValueError: there are none, one is outside the vocabulary, or the context is full.
        """
        new = checked_ids(ids, self.programs.config.vocab)
        if len(self.ids) + len(new) > self.decode.context:
            raise ValueError(
                f"{len(self.ids) + len(new)} tokens do not fit context={self.decode.context}; "
                "shorten the text or ask for a larger context"
            )
        known = np.asarray([*self.ids[-1:], *new], np.int32)
        sizes = chunk_sizes(self.decode.chunks, len(known) - 1)
        self.prepare(*(partial(self.programs.prefill, rows) for rows in sorted(set(sizes))))
        start, at = time.perf_counter(), 0
        for rows in sizes:
            count = min(rows, len(known) - 1 - at)
            tokens = np.zeros(rows + 1, np.int32)
            tokens[: count + 1] = known[at : at + count + 1]
            self.state, _ = self.programs.prefill(rows)(
                self.weights, self.state, tokens, np.int32(count)
            )
            at += count
        jax.block_until_ready(self.state.length)
        self.ids += new.tolist()
        self.stats.prefill_s += time.perf_counter() - start
        self.stats.prompt_tokens += len(new)

    def run(
        self,
        sampling: Sampling,
        depth: DepthPolicy,
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        cycles_per_dispatch: int | None = None,
        constraint: Constraint | None = None,
    ) -> Iterator[Burst]:
        """Yields what each dispatch emits, until a stop id or the last token that fits.

        Args:
          sampling: how tokens are chosen.
          depth: how many drafts are made.
          max_new_tokens: most tokens to emit, cut to what the context still holds.
          stop_ids: ids that end generation; they are emitted.
          cycles_per_dispatch: cycles between two looks of the host; the compiled most by default.
          constraint: restricts every token; the host is asked before every cycle, so that a
            dispatch runs a single one.

        Raises:
          ValueError: nothing was read yet, or a limit is exceeded.
        """
        most = self.decode.cycles_per_dispatch
        count = most if cycles_per_dispatch is None else cycles_per_dispatch
        if not 1 <= count <= most:
            raise ValueError(f"cycles_per_dispatch={count} must be in 1..{most}")
        if len(set(stop_ids)) > MAX_STOP_IDS:
            raise ValueError(f"{len(set(stop_ids))} stop ids are too many; at most {MAX_STOP_IDS}")
        if not self.ids:
            raise ValueError("nothing was read yet: a conversation starts with a prompt")
        kind = sampling.kind
        if constraint is not None:
            kind, count = dataclasses.replace(kind, masked=True), 1
        policy = AutoDepth(depth.depth) if depth.auto else None
        remaining = min(max_new_tokens, self.decode.context - len(self.ids))
        self.prepare(partial(self.programs.cycles, kind, depth.max_depth))
        program = self.programs.cycles(kind, depth.max_depth)
        self._ask(sampling, depth, remaining, stop_ids)
        while remaining > 0:
            start = time.perf_counter()
            if constraint is not None:
                self._restrict(constraint)
            self.state, infos, ran = program(self.weights, self.state, np.int32(count))
            burst = _burst(jax.device_get((infos, ran)))
            seconds = time.perf_counter() - start
            remaining -= len(burst.token_ids)
            self._count(burst, seconds)
            if constraint is not None:
                constraint.advance(burst.token_ids)
            if policy is not None:
                policy.observe(burst.cycles, seconds)
                chosen = np.int32(policy.choose())
                request = dataclasses.replace(
                    self.state.request, depth=chosen, depth_after_rejection=chosen
                )
                self.state = dataclasses.replace(self.state, request=request)
            yield burst
            if burst.stopped:
                return

    def _ask(self, sampling: Sampling, depth: DepthPolicy, remaining: int, stop_ids) -> None:
        """Puts a request into the state; tokens so far are its prompt."""
        config = self.programs.config
        chosen = initial_sampling_state(sampling, config.vocab, config.vocab_used, prompt=self.ids)
        stops = np.full(MAX_STOP_IDS, -1, np.int32)
        unique = sorted(set(stop_ids))
        stops[: len(unique)] = unique
        request = Request(
            sampling=chosen,
            stop_ids=stops,
            remaining=np.int32(remaining),
            allowed=self.state.request.allowed,
            depth=np.int32(depth.depth),
            depth_after_rejection=np.int32(depth.after_rejection),
        )
        self.state = dataclasses.replace(
            self.state, request=request, num_drafts=np.int32(0), stopped=np.bool_(False)
        )

    def _restrict(self, constraint: Constraint) -> None:
        """Puts into the state what the rows of the next cycle may choose."""
        drafts, num_drafts = jax.device_get((self.state.drafts, self.state.num_drafts))
        allowed = jax.device_put(constraint.masks(drafts[: int(num_drafts)].tolist()))
        request = dataclasses.replace(self.state.request, allowed=allowed)
        self.state = dataclasses.replace(self.state, request=request)

    def _count(self, burst: Burst, seconds: float) -> None:
        """Takes a burst into the conversation's ids and stats."""
        stats = self.stats
        if not stats.dispatches:
            stats.first_token_s = stats.prefill_s + seconds
        stats.dispatches += 1
        stats.decode_s += seconds
        stats.new_tokens += len(burst.token_ids)
        stats.count(burst.cycles)
        self.ids += burst.token_ids


def _burst(fetched) -> Burst:
    """Returns the readable form of one dispatch's infos."""
    infos, ran = fetched
    ids: list[int] = []
    logprobs: list[float] = []
    cycles: list[tuple[int, int]] = []
    for i in range(int(ran)):
        num_tokens = int(infos.num_tokens[i])
        ids += infos.tokens[i, :num_tokens].tolist()
        logprobs += infos.logprobs[i, :num_tokens].tolist()
        cycles.append((int(infos.drafted[i]), int(infos.accepted[i])))
    return Burst(
        token_ids=ids,
        logprobs=logprobs,
        cycles=cycles,
        stopped=bool(ran) and bool(infos.stopped[int(ran) - 1]),
    )
