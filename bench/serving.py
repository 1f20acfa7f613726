"""A server under load: memory, places, programs, cancellations and fair shares, over real sockets.

    python -m bench.serving [--phases load leaving shares] [--requests 500] [--leaves 100]

Three servers of the bundled model, each a process of its own, one after the other:

    load     8 clients, requests of many kinds: whole answers, streams, streams left at any moment,
             bodies that are no request. As many before them fill prefixes and checkpoints to their
             limits; then memory at the beginning and at the end, medians of many samples.
    leaving  3 long streams and a client that leaves its own, again and again: how long until its
             place is free, seen from outside.
    shares   8 streams of different kinds for the same time: how the device's time was divided.

Gates: no status that a request of its kind must not get, no place still taken at the end, every
place usable, no program made ready after the warm-up, no connection left open.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.clients import (
    CLIENTS,
    MODEL,
    WORDS,
    Sent,
    answer,
    ask,
    chat,
    encoded,
    load,
    opened,
    places,
    programs,
    send,
    settled,
    watching,
)
from bench.manifest import ROOT, device_folder, manifest
from bench.summary import RESULTS, Figure, record
from openjet_jax.loading import load_tokenizer

PHASES, STEADY = ("load", "leaving", "shares"), 3

SERVE = """
import os, signal, sys, threading
from openjet_jax.cli import main

def end_with_parent():
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
sys.exit(main(["serve", *sys.argv[1:]]))
"""
"""Standard input ends with the process that started this one, however that ended."""


@contextlib.contextmanager
def server(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Runs a server in a process of its own; yields its address and the process."""
    command = [sys.executable, "-c", SERVE, MODEL, "--name", MODEL, "--port", "0", *options]
    env, pipe = os.environ | {"PYTHONPATH": str(ROOT)}, subprocess.PIPE
    process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("serving on "):
                break
        yield line.removeprefix("serving on ").strip(), process
        assert process.poll() is None, "the server ended by itself"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdin.close()
        process.stdout.close()


def resident(pid: int) -> int:
    """Returns a process's resident bytes."""
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGESIZE"
    )


def open_files(pid: int) -> int:
    """Returns how many files and sockets a process holds open."""
    return len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir()))


@dataclasses.dataclass(frozen=True)
class Sample:
    """What the server's process held at a moment: resident bytes, open files and sockets."""

    resident: int
    files: int


def sample(pid: int) -> Sample:
    """Returns a sample of a process."""
    return Sample(resident(pid), open_files(pid))


async def loaded(address: str, pid: int, requests: int) -> dict[str, Any]:
    """Returns what a load did to a server: its memory before and after, and what was left taken."""
    samples = []
    await load(address, requests, seed=1)
    before = await settled(address)

    async def watch() -> None:
        while True:
            samples.append(sample(pid))
            await asyncio.sleep(0.25)

    watching = asyncio.ensure_future(watch())
    statuses = await load(address, requests, seed=2)
    watching.cancel()
    after = await settled(address)
    fifth = len(samples) // 5
    early, late = (
        statistics.median(each.resident for each in part)
        for part in (samples[:fifth], samples[-fifth:])
    )
    return {
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "resident_early": early,
        "resident_late": late,
        "growth": late / early - 1,
        "programs_made": programs(after) - programs(before),
        "files_early": samples[0].files,
        "files_left": sample(pid).files,
        "all_places_usable": await _usable(address),
    }


async def _usable(address: str) -> bool:
    """Returns whether as many answers run at once as there are places."""
    asked = [asyncio.ensure_future(_long(address, number)) for number in range(CLIENTS)]
    try:
        with contextlib.suppress(TimeoutError):
            await _running(address, CLIENTS)
            return True
        return False
    finally:
        await _ended(asked)
        await settled(address)


async def _running(address: str, count: int, seconds: float = 60) -> None:
    """Waits until so many answers run; raises TimeoutError if they do not."""
    async with watching(address) as look, asyncio.timeout(seconds):
        while places(await look(), "running") < count:
            await asyncio.sleep(0.05)


async def _ended(asked: Sequence[asyncio.Future[Any]]) -> None:
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


def _long(address: str, number: int, **fields: Any):
    """Returns a stream that goes on for long: the tokens that end an answer are banned."""
    stops = {str(token): -100 for token in load_tokenizer(MODEL).stop_ids}
    body = chat(
        random.Random(number).choices(WORDS, k=8 + 40 * (number % 2)),
        **{"stream": True, "max_tokens": 3500, "seed": number, "logit_bias": stops} | fields,
    )
    return ask(address, Sent("/v1/chat/completions", encoded(body)))


async def left(address: str, times: int) -> dict[str, Any]:
    """Returns how long a place stays taken after its client has left, beside `STEADY` others.

    Counted in dispatches that ended from just before the client leaves until `/metrics` shows its
    place free: the first was under way, so two are less than two dispatches' time.
    """
    steady = [asyncio.ensure_future(_long(address, number)) for number in range(STEADY)]
    dispatches, delays, rng = [], [], random.Random(0)
    count = "openjet_dispatch_seconds_count"
    try:
        await _running(address, STEADY)
        async with watching(address) as look:
            begin = await look()
            for _ in range(times):
                body = chat(rng.choices(WORDS, k=8), stream=True, max_tokens=500)
                reader, writer = connection = await opened(address)
                send(connection, Sent("/v1/chat/completions", encoded(body)))
                await answer(reader, rng.randint(1, 3))
                await asyncio.sleep(rng.uniform(0, 0.2))
                before, found = await look(), {}
                writer.transport.abort()
                start = time.perf_counter()
                assert places(before, "running") == STEADY + 1, "an answer ended by itself"
                while not found or places(found, "running") > STEADY:
                    found = await look()
                delays.append(time.perf_counter() - start)
                dispatches.append(int(found[count] - before[count]))
            end = await look()
        assert not any(each.done() for each in steady), "a steady stream ended: times are void"
    finally:
        await _ended(steady)
    seconds = end["openjet_dispatch_seconds_sum"] - begin["openjet_dispatch_seconds_sum"]
    return {
        "times": times,
        "dispatches": {str(n): dispatches.count(n) for n in sorted(set(dispatches))},
        "p99_dispatches": sorted(dispatches)[math.ceil(0.99 * times) - 1],
        "median_s": statistics.median(delays),
        "p99_s": sorted(delays)[math.ceil(0.99 * times) - 1],
        "dispatch_s": seconds / (end[count] - begin[count]),
    }


async def shared(address: str) -> dict[str, Any]:
    """Returns what part of the device's time each of 8 answers had until the server ended them."""
    for temperature in (0, 1):  # their programs become ready
        await _long(address, 0, temperature=temperature, max_tokens=1)
    asked = [_long(address, n, temperature=n // 2 % 2) for n in range(CLIENTS)]
    spent, tokens = [], []
    for status, lines in await asyncio.gather(*asked):
        assert status == 200
        events = [json.loads(x[6:]) for x in lines if x.startswith(b"data: {")]
        timings = events[-1]["timings"]
        assert timings["timed_out"], "an answer ended by itself: its share says nothing"
        spent.append(timings["prompt_ms"] + timings["predicted_ms"])
        tokens.append(timings["predicted_n"])
    mean = statistics.mean(spent)
    return {
        "device_ms": spent,
        "tokens": tokens,
        "largest_deviation": max(abs(each / mean - 1) for each in spent),
    }


def measured(phase: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns what one phase finds, on a server of its own.

    Raises:
      AssertionError: a gate is not held.
    """
    options = {
        "load": ("--context", "2048", "--prefix-mib", "32"),
        "leaving": ("--agents", str(STEADY + 1)),
        "shares": ("--request-timeout", str(args.share_seconds)),
    }
    command = ("--agents", str(CLIENTS), *options[phase])
    with server(*command):
        pass  # its programs are on the disk now: no compiler's memory is measured
    with server(*command) as (address, process):
        if phase == "leaving":
            return asyncio.run(left(address, args.leaves))
        if phase == "shares":
            return asyncio.run(shared(address))
        found = asyncio.run(loaded(address, process.pid, args.requests))
    assert found["programs_made"] == 0 and found["all_places_usable"], found
    assert found["files_left"] <= found["files_early"] + 2, found
    return found


def figures_of(phase: str, found: dict[str, Any]) -> list[Figure]:
    """Returns the figures that a phase gives."""

    def lower(name: str, value: float, unit: str, **bounds: float) -> Figure:
        return Figure(name=f"serving_{name}", value=value, unit=unit, better="lower", **bounds)

    if phase == "load":
        return [lower("memory_growth", 100 * found["growth"], "%", must=2.0)]
    if phase == "shares":
        return [lower("share_deviation", 100 * found["largest_deviation"], "%", must=10.0)]
    return [
        lower("cancellation_p99", found["p99_dispatches"], "dispatches", must=2.0),
        lower("dispatch", 1e3 * found["dispatch_s"], "ms"),
    ]


def main() -> None:
    """Measures, checks and records; details of phases left out stay as they were."""
    parser = argparse.ArgumentParser(description="Put servers of the bundled model under load.")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--leaves", type=int, default=100)
    parser.add_argument("--share-seconds", type=float, default=60)
    args = parser.parse_args()
    path, figures = RESULTS / device_folder() / "serving.json", []
    kept = json.loads(path.read_text()) if path.exists() else {}
    details = {phase: kept[phase] for phase in PHASES if phase in kept}
    for phase in args.phases:
        found, facts = measured(phase, args), manifest()
        details[phase] = found | {name: facts[name] for name in ("commit", "date")}
        print(phase, details[phase], flush=True)
        figures += figures_of(phase, found)
    print(record("bench/serving.py", figures, details=details))


if __name__ == "__main__":
    main()
