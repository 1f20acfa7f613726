"""Where the time of a cycle goes: kernels of a profiler trace, by the scope they were written in.

    python -m bench.phases [MODEL] [--depth 4] [--tokens 32] [--context 512]

A trace is made as `openjet-jax generate --profile` makes it. XLA names every operation by the
instruction it runs, and the program's text says in which `jax.named_scope` that stands: the
innermost of `SCOPES` is its phase. On a GPU that is the time of kernels; on a CPU operations run
side by side on several cores, and their times add up to more than the cycle's.
"""

import argparse
import collections
import pathlib
import re
import tempfile
import warnings
from typing import Any

import jax

import openjet_jax as oj
from bench.decode import name_of
from bench.summary import Figure, record
from openjet_jax.answers import depth_policy
from openjet_jax.engine import programs_for
from openjet_jax.profiling import profiled

SCOPES = (
    "deltanet attention feed_forward head sample commit draft_head draft verify prefill".split()
)
OTHER = "outside scopes"
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*metadata=\{.*?op_name="([^"]*)"', re.M)
_CONTAINERS = re.compile(r"^(while|call|conditional|end: )")


def scopes_of(text: str) -> dict[str, str]:
    """Returns the phase of every instruction of a program.

    Args:
      text: the compiled program, as XLA prints it.
    """
    return {name: phase_of(scope) for name, scope in _INSTRUCTION.findall(text)}


def phase_of(scope: str) -> str:
    """Returns the phase of an instruction's scope, such as jit(cycles)/while/body/verify/head."""
    parts = scope.split("/")
    inner = next((part for part in reversed(parts) if part in SCOPES), OTHER)
    # The MTP block has attention and a feed-forward of its own.
    return f"draft: {inner}" if "draft" in parts and not inner.startswith("draft") else inner


def times_by_phase(trace: pathlib.Path, phases: dict[str, str]) -> dict[str, float]:
    """Returns microseconds of each phase in a trace; what is in no program is not counted.

    Args:
      trace: a directory that the profiler wrote to.
      phases: of instructions, from `scopes_of`.

    Raises:
      ValueError: there is no trace, or it names none of the instructions.
    """
    files = sorted(trace.rglob("*.xplane.pb"))
    if not files:
        raise ValueError(f"{trace} holds no trace")
    found: collections.Counter[str] = collections.Counter()
    with warnings.catch_warnings():
        # The reader's own types lack a module, which Python warns of when they are first used.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes:
            # A GPU's other lines tell the same kernels again.
            on_gpu = "GPU" in plane.name
            for line in plane.lines:
                if on_gpu and not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    names = [str(v) for k, v in event.stats if k == "hlo_op"] or [event.name]
                    if names[0] in phases and not _CONTAINERS.match(names[0]):
                        found[phases[names[0]]] += event.duration_ns / 1e3
    if not found:
        raise ValueError(f"{trace} names no instruction of the program: was it another run?")
    return dict(found)


def measure(model: oj.Model, prompt: str, settings: dict[str, Any]) -> tuple[list[dict], int]:
    """Returns time by phase of a cycle, JSON-ready, and how many cycles there were.

    Args:
      model: from `load`.
      prompt: what is continued; reading it is not counted.
      settings: of `generate`; depth, context and max_new_tokens at least.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = profiled(model, pathlib.Path(folder), {"prompt": prompt, **settings})
        programs = programs_for(model, settings["context"])
        policy = depth_policy(model, settings["depth"])
        cycles: Any = programs.cycles(oj.Sampling().kind, policy.max_depth)
        times = times_by_phase(pathlib.Path(folder), scopes_of(str(cycles.as_text())))
    count = out.stats.cycles
    rows = [{"phase": phase, "us": us / count} for phase, us in sorted(times.items())]
    return rows, count


def main() -> None:
    """Measures and records."""
    parser = argparse.ArgumentParser(description="Tell where a cycle's time goes.")
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args()
    model = oj.load(args.model)
    settings = {"depth": args.depth, "max_new_tokens": args.tokens, "context": args.context}
    prompt = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'
    rows, count = measure(model, prompt, {**settings, "ignore_eos": True})
    total = sum(row["us"] for row in rows)
    for row in sorted(rows, key=lambda row: -row["us"]):
        print(f"{row['phase']:24} {row['us']:10.1f} us {row['us'] / total:6.1%}")
    name = name_of(model, args.model)
    label = f"{name}_cycle_d{args.depth}_device" if name else f"cycle_d{args.depth}_device"
    figure = Figure(name=label, value=total / 1e3, unit="ms", better="lower")
    details = {"model": args.model, "depth": args.depth, "cycles": count, "phases": rows}
    print(record("bench/phases.py", [figure], details=details))


if __name__ == "__main__":
    main()
