"""Reading prompts, starting up, and a second turn on top of a first.

    python -m bench.prefill [MODEL] [--lengths 512 2048] [--turns 256] [--runs 3]
    python -m bench.prefill 27B.gguf --lengths 512 2048 8192 32768 --turns 2700 12000 --peer ...

A prompt is read from an empty state, the MTP block's cache filled, until every program is done; the
first run makes programs ready and does not count. `load_s`, `first_token_s` (after loading) and
`cold_compile_s` come from fresh processes, files in the page cache: the first with no program kept,
the others with all of them. Gates: reading in two parts gives logits that agree with reading at
once to 1e-5 relative RMS (1e-2 with a bfloat16 cache, 2e-2 with q8_0), and every process gives
the same tokens.
"""

import argparse
import os
import tempfile
import time
from typing import Any

import jax
import numpy as np

import openjet_jax as oj
from bench.decode import name_of, prompt_of, short
from bench.intervals import median
from bench.peers.llama_cpp import flags_for, running
from bench.startup import one_run
from bench.summary import Figure, record
from openjet_jax.architectures import logits
from openjet_jax.engine import programs_for

BOUNDS: dict[str, tuple[str, Any, float | None, float | None]] = {
    "prefill_2k": ("tok/s", "higher", 5500, 9000),
    "prefill_8k": ("tok/s", "higher", 5500, 9000),
    "load_s": ("s", "lower", 20, 8),
    "first_token_s": ("s", "lower", 3, 1),
    "cold_compile_s": ("s", "lower", 180, 60),
}
"""Unit, direction, must and aim, of a 27B in Q4_K_M on one H200."""

DIFFERENCE = {"float32": 1e-5, "bfloat16": 1e-2, "q8_0": 2e-2}


def read_s(conversation: oj.Conversation, ids: list[int]) -> float:
    """Returns seconds to read more tokens."""
    start = time.perf_counter()
    conversation.read(ids)
    jax.block_until_ready(conversation.state)
    return time.perf_counter() - start


def gate(model: oj.Model, conversation: oj.Conversation, ids: list[int]) -> float:
    """Returns how far the last logits are apart when a prompt is read in two parts.

    Raises:
      RuntimeError: they are too far apart.
    """
    found = []
    for parts in ([ids], [ids[: len(ids) // 3], ids[len(ids) // 3 :]]):
        conversation.reset()
        for part in parts:
            conversation.read(part)
        hidden = conversation.state.hidden[None]
        found.append(np.asarray(logits(model.weights, hidden, config=model.config), np.float64))
    once, twice = found
    difference = float(np.sqrt(np.mean((once - twice) ** 2) / np.mean(once**2)))
    if not difference < DIFFERENCE[conversation.decode.kv_dtype]:
        raise RuntimeError(f"reading in two parts differs by {difference:.1e}")
    return difference


def measure(model: oj.Model, args: argparse.Namespace) -> dict[str, Any]:
    """Returns rows of prompts and second turns, JSON-ready."""
    context = min(max(args.lengths) + max(args.turns, default=0) + 64, model.config.context)
    conversation = oj.Conversation(model.weights, programs_for(model, context, args.kv_dtype))
    ids = prompt_of(model, context - 1)
    found: dict[str, Any] = {"prompts": [], "turns": [], "kv_dtype": conversation.decode.kv_dtype}
    found["difference"] = gate(model, conversation, ids[: min(args.lengths)])
    for length in args.lengths:
        times = []
        for _ in range(args.runs + 1):
            conversation.reset()
            times.append(read_s(conversation, ids[:length]))
        rate = median([length / seconds for seconds in times[1:]])
        found["prompts"].append({"tokens": length, "rate": rate})
        print(found["prompts"][-1], flush=True)
    for turn in args.turns:
        times = []
        for _ in range(args.runs + 1):
            conversation.reset()
            conversation.read(ids[: args.lengths[0]])
            times.append(read_s(conversation, ids[:turn]))
        found["turns"].append(
            {"after": args.lengths[0], "tokens": turn, "seconds": median(times[1:])}
        )
        print(found["turns"][-1], flush=True)
    return found


def startup(model: str, runs: int) -> dict[str, Any]:
    """Returns what starting takes in fresh processes, in seconds.

    Raises:
      SystemExit: processes differ in their tokens, or a warm one compiled.
    """
    with tempfile.TemporaryDirectory(dir=os.environ.get("OPENJET_CACHE")) as cache:
        cold, *warm = [one_run(cache, model, 32) for _ in range(runs + 1)]
    if any(run["ids"] != cold["ids"] or run["stats"]["compiled"] for run in warm):
        raise SystemExit("a warm start gave other tokens, or compiled: nothing is recorded")
    return {
        "load_s": median([run["loaded"] - run["imported"] for run in warm]),
        "first_token_s": median([run["first"] - run["loaded"] for run in warm]),
        "cold_compile_s": {"value": cold["stats"]["ready_s"], "count": 1},
    }


def figures(
    rows: dict[str, Any], starts: dict[str, Any], peers: dict[int, float], name: str
) -> list[Figure]:
    """Returns the figures of `measure` and `startup`, beside the peer's rates by prompt length."""
    values = {f"prefill_{short(row['tokens'])}": row["rate"]["value"] for row in rows["prompts"]}
    beside = {f"prefill_{short(length)}": rate for length, rate in peers.items()}
    values |= {key: found["value"] for key, found in starts.items()}
    found = []
    for key, value in values.items():
        unit, better, must, aim = BOUNDS.get(key, ("tok/s", "higher", None, None))
        bounds = {} if name else {"must": must, "aim": aim}
        label = f"{name}_{key}" if name else key
        found.append(
            Figure(
                name=label, value=value, unit=unit, better=better, peer=beside.get(key), **bounds
            )
        )
    return found


def main() -> None:
    """Measures, checks and records."""
    parser = argparse.ArgumentParser(description="Time reading and starting up.")
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--turns", type=int, nargs="*", default=[256])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--starts", type=int, default=3, help="warm ones; 0 measures none")
    parser.add_argument("--kv-dtype")
    parser.add_argument("--peer", help="a llama-server: a program or an address")
    parser.add_argument("--peer-file", help="the .gguf, where MODEL is its checkpoint")
    parser.add_argument("--peer-kv", default="q8_0")
    args = parser.parse_args()
    model = oj.load(args.model)
    name, rows = name_of(model, args.model), measure(model, args)
    peers = {}
    if args.peer:
        prompts = {length: prompt_of(model, length) for length in args.lengths}
        flags = flags_for(args.peer_file or args.model, max(args.lengths) + 64, 1, args.peer_kv)
        with running(args.peer, flags) as server:
            rows["peer"] = server.facts()
            for length, prompt in prompts.items():
                rates = [server.complete(prompt, 1).prefill_rate for _ in range(args.runs + 1)]
                peers[length] = median(rates[1:])["value"]
    del model  # the processes that start now need the device's memory
    starts = startup(args.model, args.starts) if args.starts else {}
    found = figures(rows, starts, peers, name)
    for each in found:
        print(f"{each.name:28} {each.value:10.2f} {each.unit}")
    details = {"model": args.model, **rows, "startup": starts}
    print(record("bench/prefill.py", found, details=details))


if __name__ == "__main__":
    main()
