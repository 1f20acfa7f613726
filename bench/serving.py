"""A server under load: memory, places, programs, cancellations and fair shares, over real sockets.

    python -m bench.serving [--requests 500]

Three servers of the bundled model, each a process of its own, one after the other:

    load     8 clients, requests of many kinds: whole answers, streams, streams left at any moment,
             bodies that are no request. Memory is compared once a quarter of them is done and at
             the end, with the median of many samples.
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
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench.clients import (
    CLIENTS,
    MODEL,
    WORDS,
    Sent,
    ask,
    chat,
    encoded,
    load,
    metrics,
    places,
    programs,
    settled,
)
from bench.manifest import ROOT
from bench.summary import Figure, record
from openjet_jax.loading import load_tokenizer

STEADY = 3


@contextlib.contextmanager
def server(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Runs a server in a process of its own; yields its address and the process."""
    command = [sys.executable, "-m", "openjet_jax.cli", "serve", MODEL, "--name", MODEL]
    command += ["--port", "0", *options]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("serving on "):
                break
        yield line.removeprefix("serving on ").strip(), process
        assert process.poll() is None, "the server ended by itself"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
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
    quarter, samples = requests // 4, []
    await load(address, quarter, seed=1)
    before = await settled(address)

    async def watch() -> None:
        while True:
            samples.append(sample(pid))
            await asyncio.sleep(0.25)

    watching = asyncio.ensure_future(watch())
    statuses = await load(address, requests - quarter, seed=2)
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
        deadline = time.monotonic() + 30
        while places(await metrics(address), "running") < CLIENTS:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True
    finally:
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await settled(address)


def _long(address: str, number: int, **fields: Any):
    """Returns a stream that goes on for long: the tokens that end an answer are banned."""
    stops = {str(token): -100 for token in load_tokenizer(MODEL).stop_ids}
    body = chat(
        random.Random(number).choices(WORDS, k=8 + 40 * (number % 2)),
        **{"stream": True, "max_tokens": 3500, "seed": number, "logit_bias": stops} | fields,
    )
    return ask(address, Sent("/v1/chat/completions", encoded(body)))


async def left(address: str, times: int) -> dict[str, Any]:
    """Returns how long a place stays taken after its client has left, beside `STEADY` others."""
    steady = [asyncio.ensure_future(_long(address, number)) for number in range(STEADY)]
    delays: list[float] = []
    rng = random.Random(0)
    try:
        while places(await metrics(address), "running") < STEADY:
            await asyncio.sleep(0.05)
        begin = await metrics(address)
        for _ in range(times):
            body = chat(rng.choices(WORDS, k=8), stream=True, max_tokens=500, temperature=2.0)
            leave = rng.randint(1, 3)
            await ask(address, Sent("/v1/chat/completions", encoded(body), leave_after=leave))
            closed = time.perf_counter()
            while places(await metrics(address), "running") > STEADY:
                await asyncio.sleep(0.001)
            delays.append(time.perf_counter() - closed)
        end = await metrics(address)
        assert not any(each.done() for each in steady), "a steady stream ended: times are void"
    finally:
        for each in steady:
            each.cancel()
        await asyncio.gather(*steady, return_exceptions=True)
    name = "openjet_dispatch_seconds"
    count, seconds = (end[f"{name}_{part}"] - begin[f"{name}_{part}"] for part in ("count", "sum"))
    delays.sort()
    p99 = delays[min(len(delays) - 1, int(0.99 * len(delays)))]
    return {
        "times": times,
        "dispatch_s": seconds / count,
        "median_s": statistics.median(delays),
        "p99_s": p99,
        "p99_dispatches": p99 / (seconds / count),
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


def main() -> None:
    """Measures, checks and records."""
    parser = argparse.ArgumentParser(description="Put servers of the bundled model under load.")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--leaves", type=int, default=60)
    parser.add_argument("--share-seconds", type=float, default=20)
    args = parser.parse_args()
    many = ("--agents", str(CLIENTS))
    with server(*many, "--context", "2048", "--prefix-mib", "32") as (address, process):
        under_load = asyncio.run(loaded(address, process.pid, args.requests))
    print(under_load, flush=True)
    with server("--agents", str(STEADY + 1)) as (address, process):
        leaving = asyncio.run(left(address, args.leaves))
    print(leaving, flush=True)
    with server(*many, "--request-timeout", str(args.share_seconds)) as (address, process):
        shares = asyncio.run(shared(address))
    print(shares, flush=True)
    assert under_load["programs_made"] == 0 and under_load["all_places_usable"], under_load
    assert under_load["files_left"] <= under_load["files_early"] + 2, under_load

    def lower(name: str, value: float, unit: str, **bounds: float) -> Figure:
        return Figure(name=name, value=value, unit=unit, better="lower", **bounds)

    figures = [
        lower("serving_memory_growth", 100 * under_load["growth"], "%", must=2.0),
        lower("serving_cancellation_p99", leaving["p99_dispatches"], "dispatches", must=2.0),
        lower("serving_share_deviation", 100 * shares["largest_deviation"], "%", must=10.0),
        lower("serving_dispatch", 1e3 * leaving["dispatch_s"], "ms"),
    ]
    details = {"load": under_load, "leaving": leaving, "shares": shares}
    print(record("bench/serving.py", figures, details=details))


if __name__ == "__main__":
    main()
