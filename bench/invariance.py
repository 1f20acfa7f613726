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
from openjet_jax.draft_vocabulary import make_draft_head, with_draft_head
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


def main() -> int:
    """Compares; prints one line a setting; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    model = oj.load(args.model)
    pieces = prompts(model.tokenizer, args.prompts)
    greedy = oj.Sampling()
    sampled = oj.Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=11)
    failed = False
    for name, sampling in (("greedy", greedy), ("sampled", sampled)):
        reference = [text(model, ids, 0, args.tokens, sampling, 1) for ids in pieces]
        settings: list[tuple[object, int]] = [
            (0, 4),
            (1, 2),
            (2, 3),
            (3, 4),
            (4, 4),
            (5, 1),
            (5, 4),
        ]
        for depth, count in [*settings, ("4/3", 4), ("auto", 4)]:
            same = [
                text(model, ids, depth, args.tokens, sampling, count) == expected
                for ids, expected in zip(pieces, reference, strict=True)
            ]
            failed |= not all(same)
            print(
                f"{name}, depth {depth}, {count} cycles: {sum(same)}/{len(same)} equal", flush=True
            )
        if model.weights.mtp is None:
            continue
        few = np.arange(512, dtype=np.int32)
        draft = make_draft_head(model.weights.head, few, model.config.vocab)
        small = oj.load(args.model)
        small = type(small)(
            **{**vars(small), "programs": {}, "weights": with_draft_head(small.weights, draft)}
        )
        same = [
            text(small, ids, 4, args.tokens, sampling, 4) == expected
            for ids, expected in zip(pieces, reference, strict=True)
        ]
        failed |= not all(same)
        print(
            f"{name}, depth 4, 512 draft ids and slots: {sum(same)}/{len(same)} equal", flush=True
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
