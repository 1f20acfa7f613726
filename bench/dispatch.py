"""Cycles a dispatch: how long a reader waits between bursts, and what a dispatch costs.

    python -m bench.dispatch [--model tiny] [--tokens 256] [--depth 3]

One program runs 1, 2, 4 or 8 cycles a dispatch. Gate: the text is the same for all of them. Times
are the host's, from asking for a burst to holding it; medians over the dispatches of all repeats.
"""

import argparse
import statistics
import time

import openjet_jax as oj
from bench.summary import Figure, record
from openjet_jax.compiled import Programs
from openjet_jax.config import DecodeConfig
from openjet_jax.conversation import Conversation
from openjet_jax.depth import parse_depth

PROMPT = 'class Stack:\n    """A stack of items."""\n'
COUNTS = (1, 2, 4, 8)


def main() -> None:
    """Measures, checks and records."""
    parser = argparse.ArgumentParser(description="Time bursts against cycles a dispatch.")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--depth", default="3")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model = oj.load(args.model)
    decode = DecodeConfig(context=1024, cycles_per_dispatch=max(COUNTS))
    programs = Programs(model.config, decode, model.weights)
    ids = model.tokenizer.encode(PROMPT)
    texts, bursts, rates = set(), {c: [] for c in COUNTS}, {c: [] for c in COUNTS}
    for _ in range(args.repeats):
        for count in COUNTS:
            conversation = Conversation(model.weights, programs)
            conversation.read(ids)
            run = conversation.run(
                oj.Sampling(),
                parse_depth(args.depth),
                max_new_tokens=args.tokens,
                cycles_per_dispatch=count,
            )
            next(run)
            begin = at = time.perf_counter()
            for _ in run:
                now = time.perf_counter()
                bursts[count].append(now - at)
                at = now
            rates[count].append(conversation.stats.new_tokens / (at - begin))
            texts.add(tuple(conversation.ids))
    if len(texts) != 1:
        raise SystemExit("the text depends on the cycles a dispatch: nothing is recorded")
    figures = []
    for count in COUNTS:
        burst, rate = statistics.median(bursts[count]), statistics.median(rates[count])
        figures += [
            Figure(name=f"burst_{count}_cycles", value=1e3 * burst, unit="ms", better="lower"),
            Figure(name=f"decode_{count}_cycles", value=rate, unit="tok/s", better="higher"),
        ]
    for figure in figures:
        print(f"{figure.name:20} {figure.value:8.1f} {figure.unit}")
    print(record("bench/dispatch.py", figures))


if __name__ == "__main__":
    main()
