"""From process start to the first token: cold, and through the caches.

    python -m bench.startup [--runs 3] [--model tiny]

Each run is a fresh process that loads the model and generates. Cold starts with an empty cache:
every program is compiled, and a .gguf converted. Warm runs find both on disk. Gate: every run gives
the same text, and a warm one compiles nothing.

A warm start has to take no longer than the imports and one and a half times what cannot be spared,
loading the weights and reading the prompt; `warm_over_bound` is the share of that.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from bench.manifest import ROOT
from bench.summary import Figure, record

CHILD = """
import json, sys, time
import openjet_jax as oj
start, name, prompt, count = float(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
load, stream = oj.load, oj.stream  # this imports JAX
imported = time.time() - start
model = load(name)
loaded, first, ids = time.time() - start, None, []
for piece in stream(model, prompt, max_new_tokens=count, ignore_eos=True):
    ids += piece.token_ids
    first = first or time.time() - start
times = {"imported": imported, "loaded": loaded, "first": first}
print(json.dumps(times | {"ids": ids, "stats": piece.stats.as_dict()}))
"""
PROMPT = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'
NEW_TOKENS = 192


def one_run(cache: str, model: str, tokens: int) -> dict[str, Any]:
    """Returns times in seconds since the process was started, the tokens and the stats of a run.

    Args:
      cache: directory that stands in for the user's cache.
      model: what to load.
      tokens: how many to generate.

    Raises:
      subprocess.CalledProcessError: the run failed; its output has been shown.
    """
    env = {**os.environ, "OPENJET_CACHE": cache, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, str(time.time()), model, PROMPT, str(tokens)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Measures, checks and records."""
    parser = argparse.ArgumentParser(description="Time the way to the first token.")
    parser.add_argument("--runs", type=int, default=3, help="warm runs; the median counts")
    parser.add_argument("--model", default="tiny", help="a checkpoint, a .gguf, or tiny")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        runs = [one_run(cache, args.model, args.tokens) for _ in range(args.runs + 1)]
    cold, *warm = runs
    for run in warm:
        if run["ids"] != cold["ids"]:
            raise SystemExit("a warm run gave other text than the cold one: nothing is recorded")
        if run["stats"]["compiled"]:
            raise SystemExit(f"a warm run compiled {run['stats']['compiled']} programs")

    name = pathlib.Path(args.model).stem

    def median(value) -> float:
        return statistics.median(value(run) for run in warm)

    def seconds(what: str, value: float, must: float | None = None) -> Figure:
        return Figure(name=f"{name}_{what}", value=value, unit="s", better="lower", must=must)

    def over_bound(run: dict[str, Any]) -> float:
        needed = run["loaded"] - run["imported"] + run["stats"]["prefill_s"]
        return run["first"] / (run["imported"] + 1.5 * needed)

    bundled = args.model == "tiny"
    rate = median(lambda run: run["stats"]["decode_tokens_per_s"])
    figures = [
        seconds("first_token_cold", cold["first"], must=15.0 if bundled else None),
        seconds(
            "first_token_warm", median(lambda run: run["first"]), must=6.0 if bundled else None
        ),
        seconds("loaded_warm", median(lambda run: run["loaded"])),
        Figure(
            name=f"{name}_warm_over_bound",
            value=median(over_bound),
            unit="x",
            better="lower",
            must=1.0,
        ),
        Figure(name=f"{name}_decode", value=rate, unit="tok/s", better="higher"),
    ]
    for figure in figures:
        print(f"{figure.name:28} {figure.value:8.2f} {figure.unit}")
    print(record("bench/startup.py", figures, details={"runs": runs}))


if __name__ == "__main__":
    main()
