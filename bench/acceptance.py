"""How many drafts of the bundled model survive: by position, at every depth, greedy and sampled.

    python -m bench.acceptance [--tokens 64]

The engine continues code and prose that the model was not trained on, at depth 5. Then, at every
position of each text, five drafts are made as `cycle` makes them. Whether one survives does not
depend on where cycles began, so a walk over the text gives the counts of every depth and draft
head, as `Stats` defines them: the share of *verified* drafts at a position that survived. Nothing
counts unless the engine itself gives the same text and the same counts where it is run: on every
text with the full head, on the first with the list.

Where tokens are sampled, every draft that is reached (the text agrees with those before it) is
also compared with what two other rules would accept there, p being the target's filtered
distribution and q the drafter's: rejection sampling, which is ideal (Leviathan et al. 2023),
accepts sum(min(p, q)), and a greedy draft survives with p(argmax q).
"""

import argparse
import ast
import dataclasses
import functools
import heapq
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np

import openjet_jax as oj
from bench.summary import Figure, record
from openjet_jax.architectures import architecture_of, logits
from openjet_jax.config import MAX_DEPTH, ROWS
from openjet_jax.depth import parse_depth
from openjet_jax.draft_list import added_ids, count_files, frequent_ids
from openjet_jax.draft_vocabulary import NUM_SLOTS, draft_logits
from openjet_jax.engine import programs_for
from openjet_jax.filters import keep_tokens
from openjet_jax.sampling import choose, initial_sampling_state
from openjet_jax.state import MtpRows
from openjet_jax.stats import Stats

LIBRARY = pathlib.Path(sysconfig.get_path("stdlib"))

CODE = ("textwrap", "shlex", "csv", "sched", "graphlib", "json/decoder")
"""Modules of Python 3.12 that the model was not trained on: 30 lines from two fifths of each on."""

PROSE = ("textwrap", "sched", "json/decoder", "numpy/lib/_arraypad_impl")
"""Modules, not trained on either, whose longest docstrings are continued, and heapq's essay."""

OTHER = "argparse ast configparser difflib inspect optparse pathlib statistics tarfile typing"
"""Modules whose tokens are counted for the list."""

LIST_SIZE, PROMPT_TOKENS, CONTEXT = 2048, 160, 320

SAMPLINGS = {
    "greedy": oj.Sampling(),
    "T=1, top-k 20, top-p 0.95": oj.Sampling(temperature=1.0, top_k=20, top_p=0.95),
    "T=1": oj.Sampling(temperature=1.0),
}


def prompts(tokenizer) -> list[tuple[str, list[int]]]:
    """Returns class and token ids of every prompt."""
    found = []
    for name in CODE:
        lines = (LIBRARY / f"{name}.py").read_text().splitlines(keepends=True)
        found.append(("code", "".join(lines[len(lines) * 2 // 5 :][:30])))
    for name in PROSE:
        root = pathlib.Path(np.__file__).parents[1] if name.startswith("numpy") else LIBRARY
        nodes = ast.walk(ast.parse((root / f"{name}.py").read_text()))
        documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
        docs = (ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented))
        found.append(("prose", max(docs, key=len)))
    essay = heapq.__about__  # pyright: ignore[reportAttributeAccessIssue]
    found += [("prose", essay), ("prose", essay[len(essay) // 2 :])]
    return [(kind, tokenizer.encode(text)[:PROMPT_TOKENS]) for kind, text in found]


def continued(model: oj.Model, ids, sampling: oj.Sampling, depth: int, tokens: int):
    """Returns the engine's continuation and (drafted, accepted) of its cycles after the first."""
    conversation = oj.Conversation(model.weights, programs_for(model, CONTEXT))
    conversation.read(ids)
    policy = dataclasses.replace(parse_depth(depth), auto=False)
    bursts = list(conversation.run(sampling, policy, max_new_tokens=tokens))
    cycles = [cycle for burst in bursts for cycle in burst.cycles]
    return [token for burst in bursts for token in burst.token_ids], cycles[1:]


@functools.cache
def _reader(config):
    return jax.jit(functools.partial(oj.prefill, config=config))


def read(model: oj.Model, ids: list[int]):
    """Returns the MTP block's cache and the hidden rows over a whole text."""
    tokens = np.zeros(CONTEXT + 1, np.int32)
    tokens[: len(ids)] = ids
    state = programs_for(model, CONTEXT).start()()
    state, hidden = _reader(model.config)(model.weights, state, tokens, np.int32(len(ids)))
    return state.mtp_kv, hidden


def probabilities(scores, sampling, kind):
    """Returns the filtered distribution [rows, n] that `choose` samples from."""
    best = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp((scores - best) / sampling.temperature)
    if kind.method != "plain":
        limits = (sampling.top_k, sampling.top_p, sampling.min_p)
        weights = jnp.where(keep_tokens(scores, weights, *limits), weights, 0)
    return weights / weights.sum(axis=-1, keepdims=True)


@functools.partial(jax.jit, static_argnames=("config", "kind"))
def drafted(weights, kv, hidden, text, positions, sampling, *, config, kind):
    """Returns, for newest tokens at some positions, five drafts [positions, 5] and two rates.

    The rates, of sampled tokens alone, are sum(min(p, q)) and p(argmax q) of each draft. They hold
    where the drafts before it agree with the text.

    Args:
      weights: the model.
      kv: of the MTP block, from `read`.
      hidden: rows from `read`.
      text: all token ids, padded.
      positions: of the newest tokens.
      sampling: the request's sampling state.
      config: static.
      kind: static.
    """
    model, row, column = architecture_of(config), jnp.arange(ROWS), jnp.arange(config.vocab)
    sampled = kind.method != "greedy"

    def scores_of(rows, newest):
        scores, ids = draft_logits(weights, None, rows)
        if ids is not None:
            own = logits(weights, rows, config=config)
            seen = jnp.zeros(config.vocab, bool)
            seen = seen.at[jnp.where(jnp.arange(len(text)) <= newest, text, config.vocab)].set(
                True, mode="drop"
            )
            own = jnp.where(seen[None], own, -jnp.inf)
            scores = own.at[:, ids].set(scores)
        return jnp.where(column[None] < config.vocab_used, scores, -jnp.inf)

    def at(newest):
        def step(carry, i):
            token, before, kv = carry
            tokens = jnp.where(row == 0, token, 0)
            fed = jnp.where(row[:, None] == 0, before, 0.0)
            entries = MtpRows(tokens=tokens, hidden=fed, start=newest + i, live=row < 1)
            out, kv = model.mtp_block(entries, kv, weights, config, continues=i > 0)
            features = model.mtp_features(weights, config, out[:1])
            scores = scores_of(features, newest)
            draft = choose(scores, (newest + 1 + i)[None], sampling, kind.draft)[0]
            rates = jnp.zeros(2)
            if sampled:
                target = logits(weights, hidden[newest + i][None], config=config)
                target = jnp.where(column[None] < config.vocab_used, target, -jnp.inf)
                p = probabilities(target, sampling, kind)[0]
                q = probabilities(scores, sampling, kind.draft)[0]
                rates = jnp.stack([jnp.minimum(p, q).sum(), p[jnp.argmax(q)]])
            return (draft, out[0], kv), (draft, rates)

        start = (text[newest], hidden[newest - 1], kv)
        return jax.lax.scan(step, start, jnp.arange(MAX_DEPTH))[1]

    drafts, rates = jax.lax.map(at, positions, batch_size=16)
    return drafts, rates[..., 0], rates[..., 1]


@dataclasses.dataclass(kw_only=True)
class Tally:
    """What one class of prompts gave with one draft head.

    Attributes:
      stats: by depth, drafts verified and accepted by position, tokens and cycles.
      reached: by position, how many drafts stood behind agreeing ones alone.
      coupled, ideal, greedy: sums over those: agreeing, and what the other rules would accept.
    """

    stats: list[Stats] = dataclasses.field(
        default_factory=lambda: [Stats() for _ in range(MAX_DEPTH)]
    )
    reached: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(MAX_DEPTH))
    coupled: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(MAX_DEPTH))
    ideal: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(MAX_DEPTH))
    greedy: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(MAX_DEPTH))

    def compare(self, agreed: np.ndarray, ideal: np.ndarray, greedy: np.ndarray) -> None:
        """Takes in the drafts [positions, 5] of a text: how many agreed in a row, and two rates."""
        position = np.arange(MAX_DEPTH)[None]
        reached = position <= agreed[:, None]
        self.reached += reached.sum(0)
        self.coupled += (position < agreed[:, None]).sum(0)
        self.ideal += np.where(reached, ideal, 0).sum(0)
        self.greedy += np.where(reached, greedy, 0).sum(0)


def walk(agreed: np.ndarray, depth: int) -> list[tuple[int, int]]:
    """Returns (drafted, accepted) of the cycles at a depth, given how many drafts agree where."""
    cycles, at = [], 0
    while at < len(agreed):
        cycles.append((depth, min(int(agreed[at]), depth)))
        at += cycles[-1][1] + 1
    return cycles


def tally_text(model: oj.Model, tally: Tally, text: list[int], first: int, sampling: oj.Sampling):
    """Takes one text into a tally; returns how many drafts agree at each position.

    Args:
      model: drafts with its own head.
      tally: of the text's class.
      text: prompt and continuation.
      first: position of the first token of the continuation.
      sampling: what it was sampled with.
    """
    kv, hidden = read(model, text)
    positions = np.arange(first, len(text) - MAX_DEPTH)
    padded = np.zeros(CONTEXT, np.int32)
    padded[: len(text)] = text
    config = model.config
    state = initial_sampling_state(sampling, config.vocab, config.vocab_used)
    drafts, *rates = jax.device_get(
        drafted(
            model.weights, kv, hidden, padded, positions, state, config=config, kind=sampling.kind
        )
    )
    following = np.stack([text[n + 1 : n + 1 + MAX_DEPTH] for n in positions])
    agreed = np.cumprod(drafts == following, axis=1).sum(axis=1)
    if sampling.temperature:
        tally.compare(agreed, *rates)
    for depth, stats in enumerate(tally.stats, start=1):
        cycles = walk(agreed, depth)
        stats.count(cycles)
        stats.new_tokens += sum(accepted + 1 for _, accepted in cycles)
    return agreed


def check(name: str, engine: list[tuple[int, int]], agreed: np.ndarray, depth: int) -> None:
    """Raises RuntimeError unless the engine's counts are those of the walk."""
    ours = walk(agreed, depth)[:-1]
    if engine[: len(ours)] != ours:
        raise RuntimeError(f"{name}, depth {depth}: the engine counts {engine}, the walk {ours}")


def rows_of(kind: str, sampling: str, head: str, tally: Tally) -> list[dict[str, object]]:
    """Returns the results of every depth, JSON-ready; the comparison of rules at the deepest."""
    rows: list[dict[str, object]] = [
        {
            "text": kind,
            "sampling": sampling,
            "head": head,
            "depth": depth,
            "cycles": stats.cycles,
            "tokens_per_cycle": stats.tokens_per_cycle,
            "acceptance": stats.acceptance[:depth],
        }
        for depth, stats in enumerate(tally.stats, start=1)
    ]
    if tally.reached.any():
        rows[-1]["reached"] = tally.reached.tolist()
        for rule in ("coupled", "ideal", "greedy"):
            sums = getattr(tally, rule)
            rows[-1][rule] = (sums / np.maximum(tally.reached, 1)).tolist()
            rows[-1][f"{rule}_mean"] = float(sums.sum() / tally.reached.sum())
    return rows


def figures(rows: list[dict]) -> list[Figure]:
    """Returns what the project states of the coupling."""
    compared = [row for row in rows if "reached" in row]
    means = {
        rule: sum(np.dot(row[rule], row["reached"]) for row in compared)
        for rule in ("coupled", "ideal", "greedy")
    }
    least = min(row["coupled_mean"] / row["ideal_mean"] for row in compared)
    share = functools.partial(Figure, unit="%", better="higher")
    return [
        share(
            name="coupled drafts accepted, of ideal rejection sampling",
            value=100 * means["coupled"] / means["ideal"],
            must=85,
        ),
        share(name="the same, worst text and setting", value=100 * least, must=85),
        share(
            name="greedy drafts accepted, of ideal rejection sampling",
            value=100 * means["greedy"] / means["ideal"],
        ),
    ]


def main() -> None:
    """Measures every setting, and files the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    tokens = parser.parse_args().tokens
    full = oj.load("tiny", draft_vocab="full")
    asked = prompts(full.tokenizer)
    counts = count_files(full.tokenizer, [LIBRARY / f"{name}.py" for name in OTHER.split()])
    ids = frequent_ids(counts, added_ids(full.tokenizer), LIST_SIZE)
    heads = {
        "full": full,
        f"{LIST_SIZE:,} ids": oj.load("tiny", draft_vocab=ids),
        f"{LIST_SIZE:,} ids, q4": oj.load("tiny", draft_vocab=ids, draft_head="q4"),
    }
    rows = []
    for name, sampling in SAMPLINGS.items():
        tallies = {(kind, head): Tally() for kind, _ in asked for head in heads}
        for i, (kind, prompt) in enumerate(asked):
            seeded = dataclasses.replace(sampling, seed=i)
            new, engine = continued(full, prompt, seeded, MAX_DEPTH, tokens)
            text = prompt + new
            assert len(set(text) - set(ids.tolist())) <= NUM_SLOTS
            for head, model in heads.items():
                tally = tallies[kind, head]
                agreed = tally_text(model, tally, text, len(prompt), seeded)
                if head == "full":
                    check(f"{name}, prompt {i}", engine, agreed, MAX_DEPTH)
                elif i == 0 and sampling.kind.method != "top_k" and not head.endswith("q4"):
                    again, engine = continued(model, prompt, seeded, MAX_DEPTH, tokens)
                    if again != new:
                        raise RuntimeError(f"{name}, {head}: the text is another one")
                    check(f"{name}, {head}, prompt {i}", engine, agreed, MAX_DEPTH)
        for (kind, head), tally in tallies.items():
            rows += rows_of(kind, name, head, tally)
            print(rows[-1], flush=True)
    details = {"tokens": tokens, "prompts": len(asked), "rows": rows}
    record("bench/acceptance.py", figures(rows), details=details)


if __name__ == "__main__":
    main()
