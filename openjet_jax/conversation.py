"""A conversation on the device: read tokens, run cycles. The only host loop over programs.

The arrays never leave the device; the host reads a few integers a dispatch. Several cycles run in
one dispatch, so tokens arrive in bursts. A stop id ends a burst on the device.
"""

import copy
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from openjet_jax.compiled import Programs, flat
from openjet_jax.config import MAX_STOP_IDS, DecodeConfig
from openjet_jax.constraint import Constraint, restricted
from openjet_jax.depth import AutoDepth, CycleTime, DepthPolicy
from openjet_jax.dispatches import (
    Burst,
    burst_of,
    check_stop_ids,
    checked_ids,
    cycles_of,
    dispatches,
)
from openjet_jax.interrupts import undivided
from openjet_jax.sampling import initial_sampling_state
from openjet_jax.settings import Sampling
from openjet_jax.state import DecodeState, Request
from openjet_jax.state_checkpoints import KVBlock, StateCheckpoint
from openjet_jax.stats import Stats
from openjet_jax.weights import Weights

DISPATCH_S = 0.08
"""Seconds between two looks of the host: what it does between them is a fiftieth of that, and text
still streams."""


class Conversation:
    """One sequence of tokens and its state.

    Attributes:
      ids: every token so far, the newest included.
      state: the device side; programs consume and replace it.
      stats: of the current request.
      closed: whether its memory was freed.
      longest_dispatch: most cycles of a dispatch, however many were asked for: by default those
        compiled; fewer where something has to be done between two of them.
    """

    def __init__(self, weights: Weights, programs: Programs):
        """Starts an empty conversation.

        Args:
          weights: the model.
          programs: the model's programs.
        """
        self.weights, self.programs = flat(weights), programs
        self.ids: list[int] = []
        self.stats, self.closed = Stats(), False
        self._begun_at: int | None = None
        self._pace = 1  # cycles that take about as long as a dispatch should
        self.longest_dispatch = programs.decode.cycles_per_dispatch
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
        now = self.programs.num_compiled
        if self._begun_at is not None:
            compiled, self._begun_at = self._begun_at, now
        self.stats.compiled += now - compiled

    def begin(self, *gets: Callable[[], Callable]) -> None:
        """Starts making programs ready that later calls of `prepare` wait for."""
        self._begun_at = self.programs.num_compiled
        self.programs.begin(*gets)

    def check_room(self, count: int) -> None:
        """Raises ValueError unless `count` more tokens fit the context."""
        if len(self.ids) + count > self.decode.context:
            raise ValueError(
                f"{len(self.ids) + count} tokens do not fit context={self.decode.context}; "
                "shorten the text or ask for a larger context"
            )

    def read(self, ids: Sequence[int]) -> None:
        """Reads more tokens: all but the last go through the model, the last is the newest.

        Args:
          ids: new token ids, at least one.

        Raises:
          ValueError: there are none, one is outside the vocabulary, or the context is full.
        """
        for _ in self.reading(ids):
            pass

    def reading(self, ids: Sequence[int], borders: Iterable[int] = ()) -> Iterator[None]:
        """Reads as `read` does, and yields after each dispatch.

        Whoever stops iterating leaves a conversation of the tokens read so far.

        Args:
          ids: new token ids, at least one.
          borders: positions at which a dispatch ends, so that a checkpoint can be taken there.

        Raises:
          ValueError: as `read`.
        """
        new = checked_ids(ids, self.programs.config.vocab)
        self.check_room(len(new))
        known = np.asarray([*self.ids[-1:], *new], np.int32)
        plan = dispatches(self.decode.chunks, self.length, len(known) - 1, borders)
        self.prepare(
            *(partial(self.programs.prefill, rows) for rows in sorted({rows for rows, _ in plan}))
        )
        at = 0
        for rows, count in plan:
            start = time.perf_counter()
            tokens = np.zeros(rows + 1, np.int32)
            tokens[: count + 1] = known[at : at + count + 1]
            with undivided():
                self.state, _ = self.programs.prefill(rows)(
                    self.weights, self.state, tokens, np.int32(count)
                )
                jax.block_until_ready(self.state.length)
                added = known[at + bool(self.ids) : at + count + 1]
                self.ids += added.tolist()
            at += count
            self.stats.prefill_s += time.perf_counter() - start
            self.stats.prompt_tokens += len(added)
            yield

    @property
    def length(self) -> int:
        """Positions that went through the model: all but the newest token's."""
        return max(len(self.ids) - 1, 0)

    @property
    def sound(self) -> bool:
        """Whether host and device agree; a dispatch that failed leaves them apart."""
        length = self.state.length
        deleted = isinstance(length, jax.Array) and length.is_deleted()
        return not deleted and int(length) == self.length

    def checkpoint(self) -> StateCheckpoint:
        """Returns a copy of what the current position needs besides its caches."""
        self.prepare(self.programs.take_checkpoint)
        return self.programs.take_checkpoint()(self.state)

    def rewind(self, checkpoint: StateCheckpoint, ids: Sequence[int]) -> None:
        """Goes back to a checkpoint, cutting the caches.

        Args:
          checkpoint: of position `len(ids) - 1`, arrays of the device or of the host.
          ids: the text up to there and the newest token, which is read next.
        """
        self.prepare(self.programs.rewind)
        tokens = np.zeros(self.state.tokens.shape, np.int32)
        tokens[: len(ids)] = ids
        with undivided():
            self.state = self.programs.rewind()(
                self.state, checkpoint, tokens, np.int32(max(len(ids) - 1, 0))
            )
            self.ids = list(ids)

    def reset(self) -> None:
        """Starts over, with nothing read."""
        with undivided():
            self.ids = []
            del self.state  # or two states would be alive at once
            self.state = self.programs.start()()

    def close(self) -> None:
        """Frees the device's memory; the conversation can no longer be used."""
        self.ids, self.closed = [], True
        for leaf in jax.tree.leaves(self.state):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                leaf.delete()

    def fork(self) -> "Conversation":
        """Returns a second conversation with the same text, in memory of its own."""
        self.prepare(self.programs.fork)
        twin = copy.copy(self)
        twin.ids, twin.stats = list(self.ids), Stats()
        twin.state = self.programs.fork()(self.state)
        return twin

    def read_block(self, index: int) -> KVBlock:
        """Returns a copy of the caches' block of that index, in host memory."""
        self.prepare(self.programs.read_block)
        return jax.device_get(self.programs.read_block()(self.state, np.int32(index)))

    def write_block(self, block: KVBlock, index: int) -> None:
        """Puts a block into the caches; a `rewind` to a position behind it must follow."""
        self.prepare(self.programs.write_block)
        with undivided():
            self.state = self.programs.write_block()(self.state, block, np.int32(index))

    def hold_tokens(self) -> None:
        """Makes the draft vocabulary hold the text's own tokens, after caches were written."""
        if self.state.slots is None:
            return
        rows = self.decode.chunks[-1]
        self.prepare(partial(self.programs.hold_tokens, rows))
        for at in range(0, len(self.ids), rows):
            part = np.asarray(self.ids[at : at + rows], np.int32)
            tokens = np.pad(part, (0, rows - len(part)))
            with undivided():
                self.state = self.programs.hold_tokens(rows)(
                    self.weights, self.state, tokens, np.int32(len(part))
                )

    def run(
        self,
        sampling: Sampling,
        depth: DepthPolicy,
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        cycles_per_dispatch: int | None = None,
        constraint: Constraint | None = None,
        output_start: int | None = None,
        top_logprobs: int = 0,
    ) -> Iterator[Burst]:
        """Yields what each dispatch emits, until a stop id or the last token that fits.

        Args:
          sampling: how tokens are chosen.
          depth: how many drafts are made.
          max_new_tokens: most tokens to emit, cut to what the context still holds.
          stop_ids: ids that end generation; they are emitted.
          cycles_per_dispatch: cycles between two looks of the host; by default as many as take
            `DISPATCH_S`, at most those compiled.
          constraint: restricts every token; the host is asked before every cycle, so that a
            dispatch runs a single one.
          output_start: position from which penalties count tokens as output; by default all of them
            so far are prompt.
          top_logprobs: how many of the likeliest tokens to report beside each, at most
            `MAX_TOP_LOGPROBS`; more than none takes a program of its own.

        Raises:
          ValueError: nothing was read yet, or a limit is exceeded.
        """
        most = min(cycles_of(self.decode, cycles_per_dispatch), self.longest_dispatch)
        check_stop_ids(stop_ids, self.programs.config.vocab)
        if not self.ids:
            raise ValueError("nothing was read yet: a conversation starts with a prompt")
        kind = dataclasses.replace(sampling.kind, ranked=top_logprobs > 0)
        if constraint is not None:
            kind, most = dataclasses.replace(kind, masked=True), 1
        times = self.programs.cycle_times.setdefault(kind, CycleTime())
        policy = AutoDepth(depth.depth, times) if depth.auto else None
        remaining = min(max_new_tokens, self.decode.context - len(self.ids))
        self.prepare(partial(self.programs.cycles, kind, depth.max_depth))
        program = self.programs.cycles(kind, depth.max_depth)
        output_start = len(self.ids) if output_start is None else output_start
        self._ask(sampling, depth, remaining, stop_ids, output_start)
        while remaining > 0:
            start = time.perf_counter()
            if constraint is not None:
                self.state = restricted(self.state, constraint)
            # The first token is shown as soon as it exists.
            count = min(most, self._pace) if cycles_per_dispatch is None else most
            now = np.int32(count if self.stats.dispatches else 1)
            with undivided():
                self.state, infos, ran = program(self.weights, self.state, now)
                burst = burst_of(*jax.device_get((infos, ran)), top_logprobs)
                self.ids += burst.token_ids
            seconds = time.perf_counter() - start
            remaining -= len(burst.token_ids)
            self._count(burst, seconds)
            self._pace = max(1, round(DISPATCH_S * len(burst.cycles) / seconds))
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

    def _ask(self, sampling, depth: DepthPolicy, remaining: int, stop_ids, output_start) -> None:
        """Puts a request into the state; tokens before `output_start` are its prompt."""
        config = self.programs.config
        prompt, output = self.ids[:output_start], self.ids[output_start:]
        chosen = initial_sampling_state(
            sampling, config.vocab, config.vocab_used, prompt=prompt, output=output
        )
        stops = np.full(MAX_STOP_IDS, -1, np.int32)
        unique = sorted(set(stop_ids))
        stops[: len(unique)] = unique
        operands: dict[str, Any] = {
            "sampling": chosen,
            "stop_ids": stops,
            "remaining": np.int32(remaining),
            "allowed": self.state.request.allowed,
            "depth": np.int32(depth.depth),
            "depth_after_rejection": np.int32(depth.after_rejection),
        }
        request = Request(**operands)
        self.state = dataclasses.replace(
            self.state, request=request, num_drafts=np.int32(0), stopped=np.bool_(False)
        )

    def _count(self, burst: Burst, seconds: float) -> None:
        """Takes a burst into the stats."""
        stats = self.stats
        if not stats.dispatches:
            stats.first_token_s = stats.prefill_s + seconds
        stats.dispatches += 1
        stats.decode_s += seconds
        stats.new_tokens += len(burst.token_ids)
        stats.count(burst.cycles)
