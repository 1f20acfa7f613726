"""Drafts and speed by kind of text: sampled coding prompts, and three classes read greedily.

    python -m bench.article [MODEL] [--tokens 160] [--depth 4]

Five coding prompts with two seeds each at temperature 1.0, top-p 0.95 and top-k 20; and greedy
Python, explanation and story. Acceptance at a position is the share of verified drafts that
survived there, with Wilson's interval. Gate: greedy and sampled text of the first prompt of every
class is the same without drafts.
"""

import argparse
from typing import Any

import openjet_jax as oj
from bench.intervals import median, share
from bench.summary import record

CODING = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "class Stack:\n    def __init__(self):\n",
    'def read_lines(path):\n    """Return the lines of a text file."""\n',
    'def merge(a, b):\n    """Merge two sorted lists."""\n',
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
)
GREEDY = {
    "Python": (CODING[0], CODING[1]),
    "explanation": (
        "The heap is a tree in which every parent is smaller than its children. This means that",
        "This module provides a parser for command lines. The parser",
    ),
    "story": (
        "Once upon a time there was a king who",
        "It was late in the evening when the old man came home and",
    ),
}
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "top_k": 20}
SEEDS = (0, 1)


def runs() -> list[tuple[str, str, oj.Sampling]]:
    """Returns class, prompt and sampling of every run."""
    sampled = [
        ("Python, sampled", prompt, oj.Sampling(**SAMPLED, seed=seed))
        for prompt in CODING
        for seed in SEEDS
    ]
    greedy = [(kind, prompt, oj.Sampling()) for kind, few in GREEDY.items() for prompt in few]
    return sampled + greedy


def measure(model: oj.Model, tokens: int, depth: int) -> list[dict[str, Any]]:
    """Returns a row for each class, JSON-ready.

    Args:
      model: from `load`.
      tokens: of every answer; stop tokens are ignored.
      depth: drafts a cycle.

    Raises:
      RuntimeError: text depends on the depth.
    """
    asked = runs()
    stats: dict[str, list[oj.Stats]] = {kind: [] for kind, *_ in asked}
    context = min(model.config.context, tokens + 256)
    for kind, prompt, sampling in asked:
        settings: dict[str, Any] = {"max_new_tokens": tokens, "sampling": sampling}
        settings |= {"ignore_eos": True, "context": context}
        if not stats[kind]:
            plain = oj.generate(model, prompt, depth=0, **settings)
            oj.generate(model, prompt, depth=depth, **settings)  # programs are ready from here on
        out = oj.generate(model, prompt, depth=depth, **settings)
        if not stats[kind] and out.token_ids.tolist() != plain.token_ids.tolist():
            raise RuntimeError(f"{kind}: the text at depth {depth} is another one")
        stats[kind].append(out.stats)
    return [_row(kind, found, depth) for kind, found in stats.items()]


def _row(kind: str, found: list[oj.Stats], depth: int) -> dict[str, Any]:
    drafted, accepted = (
        [sum(getattr(stats, name)[position] for stats in found) for position in range(depth)]
        for name in ("drafted", "accepted")
    )
    return {
        "class": kind,
        "runs": len(found),
        "tokens": sum(stats.new_tokens for stats in found),
        "tokens_per_cycle": sum(s.new_tokens for s in found) / sum(s.cycles for s in found),
        "rate": median([stats.decode_rate for stats in found]),
        "acceptance": [share(a, d) for a, d in zip(accepted, drafted, strict=True)],
    }


def main() -> None:
    """Measures and records."""
    parser = argparse.ArgumentParser(description="Time kinds of text.")
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--depth", type=int, default=4)
    args = parser.parse_args()
    rows = measure(oj.load(args.model), args.tokens, args.depth)
    for row in rows:
        accepted = " ".join(f"{found['value']:.2f}" for found in row["acceptance"])
        rate = row["rate"]
        print(
            f"{row['class']:16} {row['tokens_per_cycle']:.2f} tokens a cycle, accepted {accepted},"
            f" {rate['value']:.1f} tok/s ({rate['low']:.1f} to {rate['high']:.1f})"
        )
    details = {"model": args.model, "depth": args.depth, "rows": rows}
    print(record("bench/article.py", [], details=details))


if __name__ == "__main__":
    main()
