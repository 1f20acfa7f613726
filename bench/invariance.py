"""Text is the same at every depth, dispatch size and draft vocabulary: 20 prompts x 256 tokens.

    python -m bench.invariance [--model tiny] [--prompts 20] [--tokens 256]

Prompts are pieces of the running Python's standard library, and the model's text for each is
compared across settings. Nothing here is timed; it exits with 1 at the first difference.
"""

import argparse
import pathlib
import sys
import sysconfig

import numpy as np

import openjet_jax as oj
from openjet_jax.conversation import Conversation
from openjet_jax.depth import parse_depth
from openjet_jax.engine import programs_for

SOURCES = ("textwrap", "heapq", "shlex", "csv", "sched", "graphlib", "json/decoder", "bisect")


def prompts(tokenizer, count: int) -> list[list[int]]:
    """Returns token ids of `count` pieces of 30 to 300 tokens, cut at line ends."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    pieces = []
    for i in range(count):
        text = (library / f"{SOURCES[i % len(SOURCES)]}.py").read_text()
        lines = text.splitlines(keepends=True)
        first = (37 * i) % max(len(lines) - 40, 1)
        ids = tokenizer.encode("".join(lines[first : first + 4 + i]))
        pieces.append(ids[:300])
    return pieces


def text(model, ids, depth, tokens: int, sampling, count: int | None = None) -> list[int]:
    """Returns the ids generated after a prompt, stop tokens ignored."""
    conversation = Conversation(model.weights, programs_for(model, 1024))
    conversation.read(ids)
    bursts = conversation.run(
        sampling, parse_depth(depth), max_new_tokens=tokens, cycles_per_dispatch=count
    )
    return [token for burst in bursts for token in burst.token_ids]


GREEDY = (
    *((depth, 4, False) for depth in (5, 4, 3, 2, 1, 0, "4/3", "auto")),
    (4, 1, False),
    (4, 3, False),
    (4, 4, True),
)
SAMPLED = ((5, 4, False), (2, 3, False), (0, 4, False), (4, 4, True))
"""(depth, cycles a dispatch, whether drafts are scored over 512 ids and the slots alone)."""


def main() -> int:
    """Compares; prints one line a setting; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--only", choices=("greedy", "sampled"))
    args = parser.parse_args()
    model = oj.load(args.model)
    pieces = prompts(model.tokenizer, args.prompts)
    failed = False
    few = oj.load(args.model, draft_vocab=np.arange(512))
    for name, sampling, settings in (
        ("greedy", oj.Sampling(), GREEDY),
        ("sampled", oj.Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=11), SAMPLED),
    ):
        if args.only not in (None, name):
            continue
        reference = None
        for depth, count, listed in settings:
            chosen = few if listed else model
            texts = [text(chosen, ids, depth, args.tokens, sampling, count) for ids in pieces]
            reference = reference or texts
            same = sum(a == b for a, b in zip(texts, reference, strict=True))
            failed |= same < len(texts)
            words = (
                f"{name}, depth {depth}, {count} cycles, {'512 ids' if listed else 'full'} drafts"
            )
            print(f"{words}: {same}/{len(texts)} equal", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
