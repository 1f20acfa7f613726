"""From process start to the first token of the bundled model: cold, and through the caches.

    python -m bench.startup [--runs 3]

Each run is a fresh process that loads `tiny` and generates. Cold starts with an empty cache: the
model is converted and every program compiled. Warm runs find both on disk. Gate: every run gives
the same text, and a warm one compiles nothing.
"""

import argparse
import json
import os
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
start, prompt, count = float(sys.argv[1]), sys.argv[2], int(sys.argv[3])
model = oj.load("tiny")
loaded, first, ids = time.time() - start, None, []
for piece in oj.stream(model, prompt, max_new_tokens=count, ignore_eos=True):
    ids += piece.token_ids
    first = first or time.time() - start
print(json.dumps({"loaded": loaded, "first": first, "ids": ids, "stats": piece.stats.as_dict()}))
"""
PROMPT = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'
NEW_TOKENS = 192


def one_run(cache: str) -> dict[str, Any]:
    """Returns times in seconds since the process was started, the tokens and the stats of a run.

    Args:
      cache: directory that stands in for the user's cache.

    Raises:
      subprocess.CalledProcessError: the run failed; its output has been shown.
    """
    env = {**os.environ, "OPENJET_CACHE": cache, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, str(time.time()), PROMPT, str(NEW_TOKENS)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Measures, checks and records."""
    parser = argparse.ArgumentParser(description="Time the way to the first token.")
    parser.add_argument("--runs", type=int, default=3, help="warm runs; the median counts")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as cache:
        cold, *warm = [one_run(cache) for _ in range(runs + 1)]
    for run in warm:
        if run["ids"] != cold["ids"]:
            raise SystemExit("a warm run gave other text than the cold one: nothing is recorded")
        if run["stats"]["compiled"]:
            raise SystemExit(f"a warm run compiled {run['stats']['compiled']} programs")

    def median(value) -> float:
        return statistics.median(value(run) for run in warm)

    def seconds(name: str, value: float, must: float | None = None) -> Figure:
        return Figure(name=name, value=value, unit="s", better="lower", must=must)

    rate = median(lambda run: run["stats"]["decode_tokens_per_s"])
    figures = [
        seconds("tiny_first_token_cold", cold["first"], must=15.0),
        seconds("tiny_first_token_warm", median(lambda run: run["first"]), must=6.0),
        seconds("tiny_loaded_warm", median(lambda run: run["loaded"])),
        Figure(name="tiny_decode", value=rate, unit="tok/s", better="higher"),
    ]
    for figure in figures:
        print(f"{figure.name:24} {figure.value:8.2f} {figure.unit}")
    print(record("bench/startup.py", figures))


if __name__ == "__main__":
    main()
