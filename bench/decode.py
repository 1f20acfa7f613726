"""Decoding end to end: plain and with drafts, by context, beside other engines where given.

    python -m bench.decode [MODEL] [--contexts 64 1024] [--depths 1 2 3 4 5] [--dispatches 24]
    python -m bench.decode 27B-planted.gguf --contexts 64 16384 131072 --peer llama-server
    python -m bench.decode 27B.gguf --transformers python    beside transformers, in bfloat16

Times are the host's, from one dispatch to the next, so they hold everything that a user waits for;
each gets the median over dispatches and its interval. Nothing is recorded unless greedy text is the
same at every depth and, with a peer, as the peer's for as long as both agree on the first token.

The names of the 27B's figures (`plain_64`, `cycle_d4`, `depth4_70`, ...) have the model's name
before them for any other model. `depth4_70` needs a file of `bench.synthetic_gguf --planted 0.7`.
"""

import argparse
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

import openjet_jax as oj
from bench.intervals import median
from bench.peers.llama_cpp import flags_for, running
from bench.peers.transformers import measured_by, sizes_of
from bench.sessions import source_text
from bench.summary import Figure, record
from openjet_jax.config import DecodeConfig
from openjet_jax.depth import DepthPolicy
from openjet_jax.described import CARDS
from openjet_jax.engine import decode_config, programs_for
from openjet_jax.memory import memory_plan, size_text

GATE_TOKENS = 48
BOUNDS: dict[str, tuple[str, Any, float | None, float | None]] = {
    "plain_64": ("tok/s", "higher", 140, 220),
    "plain_16k": ("tok/s", "higher", 130, 205),
    "cycle_d4": ("ms", "lower", 9.0, 5.8),
    "depth4_70": ("tok/s", "higher", 305, 470),
}
"""Unit, direction, must and aim, of a 27B in Q4_K_M on one H200."""


class FixedDepth(DepthPolicy):
    """A depth that runs in the program of the deepest, so that one program serves all."""

    @property
    def max_depth(self) -> int:
        """The deepest that is measured."""
        return self.deepest if self.depth else 0

    deepest = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What some dispatches gave.

    Attributes:
      seconds: of each dispatch.
      cycles: (drafted, accepted) of each cycle of each dispatch.
      token_ids: all tokens.
    """

    seconds: list[float]
    cycles: list[list[tuple[int, int]]]
    token_ids: list[int]

    def cycle_ms(self) -> dict[str, float]:
        """Returns the time of a cycle."""
        return median([1e3 * s / len(c) for s, c in zip(self.seconds, self.cycles, strict=True)])

    def rate(self) -> dict[str, float]:
        """Returns tokens a second, by dispatch."""
        pairs = zip(self.seconds, self.cycles, strict=True)
        return median([sum(accepted + 1 for _, accepted in c) / s for s, c in pairs])

    def by_accepted(self) -> dict[int, dict[str, float]]:
        """Returns the time of a cycle by how many drafts it accepted, where a dispatch is one."""
        found: dict[int, list[float]] = {}
        for seconds, cycles in zip(self.seconds, self.cycles, strict=True):
            if len(cycles) == 1:
                found.setdefault(cycles[0][1], []).append(1e3 * seconds)
        return {accepted: median(times) for accepted, times in sorted(found.items())}

    def acceptance(self) -> float:
        """Returns how often a draft behind right ones was right."""
        cycles = [cycle for dispatch in self.cycles for cycle in dispatch]
        reached = sum(min(accepted + 1, drafted) for drafted, accepted in cycles)
        return sum(accepted for _, accepted in cycles) / reached if reached else 0.0


def decoded(
    conversation: oj.Conversation, depth: int, dispatches: int, per_dispatch: int | None = None
) -> Run:
    """Returns what some dispatches gave, after two of which the first verifies no drafts.

    Args:
      conversation: has read its prompt.
      depth: drafts a cycle.
      dispatches: how many are measured.
      per_dispatch: cycles of each.
    """
    policy = FixedDepth(depth=depth, after_rejection=depth)
    bursts = conversation.run(
        oj.Sampling(), policy, max_new_tokens=10**9, cycles_per_dispatch=per_dispatch
    )
    tokens = [token for _ in range(2) for token in next(bursts).token_ids]
    run = Run(seconds=[], cycles=[], token_ids=tokens)
    for _ in range(dispatches):
        start = time.perf_counter()
        burst = next(bursts, None)
        if burst is None:
            raise ValueError("the context is full: give a smaller --dispatches")
        run.seconds.append(time.perf_counter() - start)
        run.cycles.append(burst.cycles)
        run.token_ids.extend(burst.token_ids)
    return run


def prompt_of(model: oj.Model, count: int) -> list[int]:
    """Returns token ids of the project's own source, over and over."""
    ids = model.tokenizer.encode(source_text())
    return (ids * -(-count // len(ids)))[:count]


def limit(model: oj.Model, context: int, kv_dtype: str | None) -> float | None:
    """Returns plain tokens a second if only memory were waited for; None on an unknown device.

    Read once a token: all weights but the embedding and the MTP block's, keys and values of the
    context, and the recurrent state, which is written too.
    """
    kind = jax.devices()[0].device_kind
    bandwidth = {card.name: card.bandwidth for card in CARDS.values()}.get(kind)
    if bandwidth is None:
        return None
    plan = memory_plan(model.config, model.tensors, decode_config(model.config, context, kv_dtype))
    skipped = ("embedding", "MTP block", "draft head")
    weights = sum(n for name, n in plan.weights.items() if name not in skipped)
    return bandwidth / (weights + plan.kv + 2 * plan.recurrent)


def measure(
    model: oj.Model, args: argparse.Namespace, save: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Returns all rows, JSON-ready; see the module.

    Args:
      model: from `load`.
      args: of the command line.
      save: keeps the rows so far, after each context, so that a run cut short leaves them.

    Raises:
      RuntimeError: the text depends on the depth.
    """
    FixedDepth.deepest = max(args.depths)
    # The longest run that is made after a prompt: tokens of every dispatch at full acceptance.
    cycles = DecodeConfig().cycles_per_dispatch
    spare = (args.dispatches + 2) * cycles * (max(args.depths) + 1) + GATE_TOKENS
    context = min(max(args.contexts) + spare, model.config.context)
    programs = programs_for(model, context, args.kv_dtype)
    conversation = oj.Conversation(model.weights, programs)
    rows: dict[str, Any] = {"contexts": [], "depths": [], "context": context}
    rows["kv_dtype"] = programs.decode.kv_dtype
    for at in args.contexts:
        conversation.reset()
        conversation.read(prompt_of(model, at))
        start, ids = conversation.checkpoint(), list(conversation.ids)
        plain = decoded(conversation, 0, args.dispatches)
        rows["contexts"].append({"context": at, "plain": plain.rate(), "ms": plain.cycle_ms()})
        print(rows["contexts"][-1], flush=True)
        for depth in args.depths if at == args.contexts[0] else args.depths[-1:]:
            conversation.rewind(start, ids)
            run = decoded(conversation, depth, args.dispatches)
            count = min(len(run.token_ids), len(plain.token_ids), GATE_TOKENS)
            if run.token_ids[:count] != plain.token_ids[:count]:
                raise RuntimeError(f"context {at}: the text at depth {depth} is another one")
            conversation.rewind(start, ids)
            single = decoded(conversation, depth, args.dispatches, per_dispatch=1)
            rows["depths"].append(
                {
                    "context": at,
                    "depth": depth,
                    "rate": run.rate(),
                    "cycle_ms": run.cycle_ms(),
                    "acceptance": run.acceptance(),
                    "by_accepted_ms": single.by_accepted(),
                }
            )
            print(rows["depths"][-1], flush=True)
        save(rows)
    rows["first_tokens"] = plain.token_ids[:GATE_TOKENS]
    stats = jax.devices()[0].memory_stats() or {}
    plan = memory_plan(
        model.config,
        model.tensors,
        programs.decode,
        backend=model.backend,
        host=jax.default_backend() == "cpu",
    )
    rows["memory"] = {"planned": plan.total, "peak": stats.get("peak_bytes_in_use")}
    rows["memory"]["temporary"] = programs.temporary_bytes()
    return rows


def beside(model: oj.Model, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns llama.cpp's rows: plain at every context, with drafts at the first."""
    found = []
    room = max(args.contexts) + args.peer_tokens + 64
    for depth in (0, max(args.depths)):
        flags = flags_for(args.peer_file or args.model, room, depth, args.peer_kv)
        with running(args.peer, flags) as server:
            for at in args.contexts:
                prompt = prompt_of(model, at)
                server.complete(prompt, 8)
                answers = [server.complete(prompt, args.peer_tokens) for _ in range(args.runs)]
                found.append(
                    {
                        "engine": "llama.cpp",
                        "context": at,
                        "depth": depth,
                        "rate": median([answer.decode_rate for answer in answers]),
                        "prefill": median([answer.prefill_rate for answer in answers]),
                        "accepted": sum(a.accepted for a in answers),
                        "drafted": sum(a.drafted for a in answers),
                        "token_ids": answers[0].token_ids[:GATE_TOKENS],
                        **server.facts(),
                    }
                )
                print({k: v for k, v in found[-1].items() if k != "token_ids"}, flush=True)
    return found


def beside_transformers(model: oj.Model, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the rows of transformers: plain at every context."""
    sizes = sizes_of(model.config, tied=all(entry.field != "head" for entry in model.tensors))
    asked = (args.contexts, args.peer_tokens, args.runs, args.compiled)
    found = measured_by(args.transformers, sizes, *asked)
    rows = found.pop("rows")
    for row in rows:
        print(row, flush=True)
    return [{"engine": "transformers", **row, **found} for row in rows]


def figures(
    rows: dict[str, Any], peers: list[dict[str, Any]], name: str, limits: dict[int, float | None]
) -> list[Figure]:
    """Returns the figures of the rows.

    Args:
      rows: from `measure`.
      peers: from `beside` and `beside_transformers`; the fastest counts.
      name: before every figure; empty for the model that the bounds are for.
      limits: tokens a second that memory allows, by context.
    """

    def figure(key: str, value: float, peer: float | None, share: float | None = None) -> Figure:
        unit, better, must, aim = BOUNDS.get(key, _unbounded(key))
        bounds = {} if name else {"must": must, "aim": aim}
        return Figure(
            name=f"{name}_{key}" if name else key,
            value=value,
            unit=unit,
            better=better,
            peer=peer,
            share_of_limit=share,
            **bounds,
        )

    rates: dict[tuple[int, int], float] = {}
    for row in peers:
        at = row["context"], row["depth"]
        rates[at] = max(rates.get(at, 0.0), row["rate"]["value"])
    found = []
    for row in rows["contexts"]:
        at, value = row["context"], row["plain"]["value"]
        most = limits.get(at)
        found.append(figure(f"plain_{short(at)}", value, rates.get((at, 0)), most and value / most))
    first = rows["contexts"][0]["context"]
    for row in rows["depths"]:
        if row["context"] != first:
            continue
        depth, value = row["depth"], row["rate"]["value"]
        found.append(figure(f"cycle_d{depth}", row["cycle_ms"]["value"], None))
        if abs(row["acceptance"] - 0.7) < 0.05:
            found.append(figure(f"depth{depth}_70", value, rates.get((first, depth))))
    return found


def _unbounded(key: str) -> tuple[str, Any, None, None]:
    return ("ms", "lower", None, None) if "cycle" in key else ("tok/s", "higher", None, None)


def short(count: int) -> str:
    """Returns a context as figures name it: 64, 16k."""
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)


def is_27b(config: oj.ModelConfig) -> bool:
    """Returns whether a model has the sizes that the bounds are for."""
    return (config.num_layers, config.hidden) == (64, 5120)


def name_of(model: oj.Model, asked: str) -> str:
    """Returns what figures of a model begin with."""
    return "" if is_27b(model.config) else pathlib.Path(asked).stem


def main() -> None:
    """Measures, checks and records."""
    parser = argparse.ArgumentParser(description="Time decoding end to end.")
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--dispatches", type=int, default=24, help="that are measured, each time")
    parser.add_argument("--kv-dtype")
    parser.add_argument("--peer", help="a llama-server: a program or an address")
    parser.add_argument("--peer-file", help="the .gguf, where MODEL is its checkpoint")
    parser.add_argument("--peer-kv", default="q8_0")
    parser.add_argument("--peer-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5, help="of the peer")
    parser.add_argument("--transformers", metavar="PYTHON", help="an interpreter that has them")
    parser.add_argument("--compiled", action="store_true", help="transformers by torch.compile")
    args = parser.parse_args()
    if args.transformers:
        # Its weights in bfloat16 need what JAX would take and not use.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    model = oj.load(args.model)
    name, details = name_of(model, args.model), {"model": args.model}
    limits = {at: limit(model, at, args.kv_dtype) for at in args.contexts}

    def save(rows: dict[str, Any], peers: Sequence[dict[str, Any]] = ()) -> pathlib.Path:
        found = figures(rows, list(peers), name, limits)
        return record("bench/decode.py", found, details={**details, **rows, "peers": peers})

    rows = measure(model, args, save)
    peers = beside(model, args) if args.peer else []
    peers += beside_transformers(model, args) if args.transformers else []
    for row in peers:
        if row.get("token_ids") and row["token_ids"][0] != rows["first_tokens"][0]:
            print("note: the peer's first token is another one; its text is in the results")
    for each in figures(rows, peers, name, limits):
        ratio = "" if each.peer is None else f"   {each.value / each.peer:.2f} x the peer"
        print(f"{each.name:24} {each.value:10.2f} {each.unit}{ratio}")
    memory = rows["memory"]
    print(f"memory: {size_text(memory['planned'])} planned, peak {memory['peak']}")
    print(save(rows, peers))


if __name__ == "__main__":
    main()
