"""A soak: many requests of every kind on one model, watched for whatever should not change.

    python -m bench.soak [MODEL] [--requests 1000] [--kv-dtype q8_0] [--seed 0] [--minutes 10]

Lengths, depths, sampling, stop strings, edits of histories and callers who leave midway are random,
from one seed. Once every kind of request was made, no program may be made ready and nothing be
compiled; probes, which come again every hundred requests, must give the same tokens each time;
log-probabilities must be finite and states free of NaN; memory must not grow by more than 2 % from
the first quarter of the requests to the end, each time with no session open. Nothing is recorded
where one of these fails, or something raises. A run that is out of time records how far it came.
"""

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import pathlib
import sys
import time
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import monitoring

import openjet_jax as oj
from bench.decode import name_of
from bench.serving import resident
from bench.sessions import source_text
from bench.soak_requests import (
    KINDS,
    LATER,
    LONG,
    NEW_TOKENS,
    SESSIONS,
    Answer,
    Asked,
    Change,
    Requests,
    Wrong,
    answered,
    depths_of,
    programs_of,
    settings_of,
)
from bench.summary import RESULTS, Figure, record
from openjet_jax.compiled import CompileEvent
from openjet_jax.engine import programs_for

MUST, MOST_GROWTH = 1000, 2.0
"""Requests that must be made, and most growth of memory in percent."""

PROBE_EVERY, TURNS, STOPS, TEXT = 100, 8, 12, 20_000
"""Requests between probes, turns of a session, usual characters that some answers end at, and
characters that prompts are cut from."""

PROBE_TOKENS, WARM_TOKENS = 24, 16
PROBES = (
    ("greedy", 0, 40),
    ("greedy", "auto", 150),
    ("best tokens, penalties, bias", "5/2", 90),
    ("filtered", "5/5", 600),
)
"""Kind, depth and length of the prompt of what is asked again and again."""

COMPILING = "/jax/core/compile/backend_compile_duration"


def device_bytes() -> int:
    """Returns the bytes in use on the device, or the process's where the device does not count."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["bytes_in_use"] if "bytes_in_use" in stats else resident(os.getpid())


def memory() -> dict[str, int]:
    """Returns bytes of the device and of the process, once what is free has gone back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return {"device": device_bytes(), "process": resident(os.getpid())}


@jax.jit
def nans_in(state: oj.DecodeState) -> jax.Array:
    """Returns how many numbers of a state are NaN."""
    floats = (x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating))
    return jnp.stack([jnp.isnan(x).sum() for x in floats]).sum()


def check_state(conversation: oj.Conversation) -> None:
    """Raises Wrong if a state holds a NaN."""
    if count := int(nans_in(conversation.state)):
        raise Wrong(f"a state of {len(conversation.ids)} tokens holds {count} NaN")


class Soak:
    """Makes requests of one model and watches it.

    Attributes:
      num_requests: made since the warm-up, or the beginning of a run.
      counts: of them by label, and how answers ended.
      answers: tokens of every round of probes.
    """

    def __init__(self, model: oj.Model, requests: Requests, kv_dtype: str | None):
        """Takes a model and what is asked of it; `warm_up` comes next."""
        self.model, self.requests, self.kv_dtype = model, requests, kv_dtype
        self.programs = programs_for(model, requests.context, kv_dtype)
        self.num_requests, self.counts = 0, Counter[str]()
        self.answers: list[list[list[int]]] = []
        self._sessions: list[oj.Session | None] = [None] * SESSIONS
        self._turns = [0] * SESSIONS
        self._warm, self._num_compiled = 0, 0

    def warm_up(self) -> None:
        """Makes all programs ready, side by side, and every kind of request once."""
        programs = self.programs
        programs.prepare(
            programs.start,
            programs.take_checkpoint,
            programs.rewind,
            *(partial(programs.prefill, rows) for rows in programs.decode.chunks),
            *(partial(programs.cycles, *each) for each in programs_of(self.model)),
        )
        text = ""
        for number, kind in enumerate(KINDS):
            for depth in depths_of(self.model, kind):
                settings = settings_of(self.requests.random, kind)
                settings |= {"depth": depth, "max_new_tokens": WARM_TOKENS, "ignore_eos": True}
                asked = Asked(kind=kind, ids=self.requests.prompt(LATER), settings=settings)
                text += self.one(asked).text
                change: Change = ("more", "rollback", "edit")[number % 3]
                settings = settings | {"cycles_per_dispatch": 1}
                turn = dataclasses.replace(asked, settings=settings, change=change, where=0.5)
                self.one(dataclasses.replace(turn, leave_after=2))
        long = self.requests.prompt(min(LONG, self.requests.context - NEW_TOKENS))
        settings = {"depth": depths_of(self.model, "greedy")[-1], "max_new_tokens": 2}
        self.one(Asked(kind="greedy", ids=long, settings=settings))
        usual = Counter(text.replace("\ufffd", "")).most_common(STOPS)
        self.requests.stops = [character for character, _ in usual]
        self.probe()
        self.close()
        self._warm = len(self._events())

    def one(self, asked: Asked) -> Answer:
        """Makes a request and returns its answer.

        Raises:
          Wrong: the answer is not as it was asked for.
        """
        vocab = self.model.config.vocab_used
        if asked.change is None:
            where = {"context": self.requests.context, "kv_dtype": self.kv_dtype}
            pieces = oj.stream(self.model, asked.ids, **where, **asked.settings)
            found = answered(pieces, asked, vocab)
        else:
            session = self._session(asked)
            before = session.ids
            pieces = session.stream(every_dispatch=asked.leave_after is not None, **asked.settings)
            found = answered(pieces, asked, vocab)
            if session.ids != (*before, *found.token_ids):
                raise Wrong(f"the history is not what {asked} and its answer make it")
        self.num_requests += 1
        self.counts.update(asked.labels())
        self.counts[f"ended: {found.reason or 'the caller left'}"] += 1
        return found

    def _session(self, asked: Asked) -> oj.Session:
        """Returns a session with the history that a turn wants; full or old ones are left."""
        at, context = asked.session, self.requests.context
        session = self._sessions[at]
        room = session is not None and len(session.ids) + len(asked.ids) + NEW_TOKENS <= context
        if session is None or not room or asked.change == "new" or self._turns[at] >= TURNS:
            if session is not None:
                session.close()
            session = oj.Session(self.model, context=context, kv_dtype=self.kv_dtype)
            self._sessions[at], self._turns[at] = session, 0
        self._turns[at] += 1
        cut = int(asked.where * len(session.ids))
        if asked.change == "edit":
            session.replace([*session.ids[:cut], *asked.ids, *session.ids[cut:]])
            return session
        if asked.change == "rollback":
            session.truncate(cut)
        session.append(asked.ids)
        return session

    def probe(self) -> None:
        """Makes the probes, and looks at the states of open sessions too.

        Raises:
          Wrong: a probe gives other tokens than before, or a state holds a NaN.
        """
        for session in filter(None, self._sessions):
            check_state(session._memory.conversation)
        given = [self._probe(*probe) for probe in PROBES]
        self.answers.append(given)
        changed = [i for i, tokens in enumerate(given) if tokens != self.answers[0][i]]
        if changed:
            raise Wrong(f"probes {changed} give other tokens after {self.num_requests} requests")

    def _probe(self, kind: str, depth: int | str, length: int) -> list[int]:
        """Returns the tokens of an answer, and of another after an edit of its history."""
        settings = settings_of(np.random.default_rng(length), kind)
        settings |= {"depth": depth if self.model.config.has_mtp else 0}
        settings |= {"max_new_tokens": PROBE_TOKENS, "ignore_eos": True}
        session = oj.Session(self.model, context=self.requests.context, kv_dtype=self.kv_dtype)
        text = self.requests.text * -(-length // len(self.requests.text))
        session.append(text[:length])
        found = session.generate(**settings).token_ids.tolist()
        session.replace([*session.ids[: length // 2], *text[:9], *session.ids[length // 2 :]])
        found += session.generate(**settings).token_ids.tolist()
        check_state(session._memory.conversation)
        session.close()
        return found

    def check_programs(self) -> None:
        """Raises Wrong if a program was made ready, or anything compiled, since the warm-up."""
        names = [event.name for event in self._events()[self._warm :]]
        if names or self._num_compiled:
            counts = f"{self._num_compiled} compilations after {self.num_requests} requests"
            raise Wrong(f"made ready after the warm-up: {names}; {counts}")

    def run(self, count: int, deadline: float) -> dict[str, Any]:
        """Returns what some requests did, JSON-ready; see the module.

        Args:
          count: requests.
          deadline: by `time.monotonic`, when no further one is made.

        Raises:
          Wrong: something is not as it should be.
        """
        start, first = time.monotonic(), {}
        self.num_requests, self._num_compiled = 0, 0
        self.counts.clear()
        monitoring.register_event_duration_secs_listener(self._note)
        try:
            while self.num_requests < count and time.monotonic() < deadline:
                self.one(self.requests.draw())
                if self.num_requests % PROBE_EVERY == 0:
                    self.probe()
                    self.check_programs()
                    seconds = time.monotonic() - start
                    print(f"{self.num_requests} requests, {seconds:.0f} s", flush=True)
                if self.num_requests == max(1, count // 4):
                    self.close()
                    first = memory()
            seconds = time.monotonic() - start
            self.probe()
            self.check_programs()
        finally:
            monitoring.unregister_event_duration_listener(self._note)
        self.close()
        if not first:
            raise Wrong(f"{self.num_requests} of {count} requests in time, less than a quarter")
        last = memory()
        return {
            "requests": self.num_requests,
            "seconds": seconds,
            "memory_after_a_quarter": first,
            "memory_at_the_end": last,
            "growth": {name: 100 * (last[name] / first[name] - 1) for name in first},
            "programs": [event.name for event in self._events()],
            "compiled_after_warm_up": self._num_compiled,
            "rounds_of_equal_probes": len(self.answers),
            "counts": dict(sorted(self.counts.items())),
        }

    def close(self) -> None:
        """Closes all sessions."""
        for session in filter(None, self._sessions):
            session.close()
        self._sessions = [None] * SESSIONS

    def _events(self) -> list[CompileEvent]:
        return [event for programs in self.model.programs.values() for event in programs.events]

    def _note(self, event: str, duration_secs: float, **facts: str | int) -> None:
        if event == COMPILING:
            self._num_compiled += 1


def figures(found: dict[str, Any], name: str) -> list[Figure]:
    """Returns the figures of a run.

    Args:
      found: from `Soak.run`.
      name: before every figure; empty for a 27B.

    Raises:
      Wrong: memory grew too much.
    """
    growth = found["growth"]["device"]
    if growth > MOST_GROWTH:
        raise Wrong(f"memory grew by {growth:.2f} %, more than {MOST_GROWTH} %: {found}")
    before = f"{name}_" if name else ""
    measured: Any = (
        ("soak_requests", found["requests"], "requests", "higher", MUST),
        ("soak_memory_growth", growth, "%", "lower", MOST_GROWTH),
    )
    return [
        Figure(name=before + key, value=value, unit=unit, better=better, must=must)
        for key, value, unit, better, must in measured
    ]


def soaked(model: oj.Model, args: argparse.Namespace) -> dict[str, Any]:
    """Returns what a whole soak found.

    Args:
      model: from `load`.
      args: of the command line.

    Raises:
      Wrong: something is not as it should be.
    """
    begun = time.monotonic()
    context = min(model.config.context, LONG + NEW_TOKENS)
    text = model.tokenizer.encode(source_text()[:TEXT])
    soak = Soak(model, Requests(model, context, args.seed, text), args.kv_dtype)
    soak.warm_up()
    warm_up = time.monotonic() - begun
    print(f"warm-up: {warm_up:.0f} s", flush=True)
    found = soak.run(args.requests, begun + 60 * args.minutes)
    return {
        "context": context,
        "kv_dtype": soak.programs.decode.kv_dtype,
        "warm_up_s": warm_up,
        **found,
    }


def main() -> int:
    """Soaks, checks and records; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make many requests; watch what must not change.")
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--requests", type=int, default=MUST)
    parser.add_argument("--kv-dtype", default="q8_0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="when it ends, done or not")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="where to record")
    args = parser.parse_args()
    model = oj.load(args.model)
    try:
        found = soaked(model, args)
        measured = figures(found, name_of(model, args.model))
    except Wrong as wrong:
        print(f"{wrong}: nothing is recorded", file=sys.stderr)
        return 1
    for figure in measured:
        print(f"{figure.name:24} {figure.value:10.2f} {figure.unit}")
    details = {"model": args.model, "seed": args.seed, "asked_for": args.requests, **found}
    print(json.dumps(details, indent=1))
    print(record("bench/soak.py", measured, args.results, details))
    if found["requests"] < args.requests:
        print(f"out of time: {found['requests']} of {args.requests} requests were made")
    return 0


if __name__ == "__main__":
    sys.exit(main())
