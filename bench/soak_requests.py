"""Random requests of every kind a caller can make, and what their answers must be."""

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal

import numpy as np

import openjet_jax as oj
from openjet_jax.answers import answer_settings
from openjet_jax.config import MAX_DEPTH

type Change = Literal["new", "more", "rollback", "edit"]

SESSIONS = 2
"""Sessions that are open at a time."""

NEW_TOKENS, USUAL, LONG, LATER = 48, 300, 3000, 60
"""Most tokens of an answer, a usual prompt, a long one, and a later turn."""


class Wrong(RuntimeError):
    """Something that a soak watches is not as it should be."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """One request.

    Attributes:
      kind: how its tokens are chosen, one of `KINDS`.
      ids: the prompt, or what a turn adds.
      settings: of `stream`.
      change: what a turn of a session does to the history first; None for a request without one.
      session: whose turn it is.
      where: share of the history that a rollback leaves, or that stands before an edit.
      leave_after: pieces after which the caller leaves; None for one who stays.
    """

    kind: str
    ids: tuple[int, ...]
    settings: dict[str, Any]
    change: Change | None = None
    session: int = 0
    where: float = 1.0
    leave_after: int | None = None

    def labels(self) -> list[str]:
        """Returns what it is counted as."""
        prompt = "long prompt" if len(self.ids) > USUAL else "usual prompt"
        found = [self.kind, f"depth {self.settings['depth']}", prompt]
        found += [f"turn: {self.change}" if self.change else "alone"]
        return found + ["with a stop string"] * ("stop" in self.settings)


def _penalties(random: np.random.Generator) -> dict[str, Any]:
    return {
        "repetition_penalty": random.uniform(1.0, 1.5),
        "presence_penalty": random.uniform(-1, 2),
        "frequency_penalty": random.uniform(-0.5, 1),
    }


def _warm(random: np.random.Generator) -> dict[str, Any]:
    return {"temperature": random.uniform(0.2, 1.5), "seed": int(random.integers(2**63))}


def _best(random: np.random.Generator) -> dict[str, Any]:
    return _warm(random) | {
        "top_k": int(random.integers(1, 65)),
        "top_p": random.uniform(0.5, 1),
        "min_p": random.choice([0.0, 0.05]),
    }


def _filtered(random: np.random.Generator) -> dict[str, Any]:
    return _warm(random) | {
        "top_k": int(random.choice([0, 200])),
        "top_p": random.uniform(0.5, 0.99),
        "min_p": random.choice([0.0, 0.1]),
    }


def _bias(random: np.random.Generator) -> dict[str, Any]:
    ids = random.choice(256, size=4, replace=False)
    return {"logit_bias": dict(zip(ids.tolist(), [-np.inf, -3.0, 1.5, 5.0], strict=True))}


KINDS: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "greedy": lambda random: {},
    "likeliest reported": lambda random: {},
    "temperature": _warm,
    "best tokens": _best,
    "filtered": _filtered,
    "greedy with penalties": _penalties,
    "best tokens, penalties, bias": lambda random: (
        _best(random) | _penalties(random) | _bias(random)
    ),
    "filtered with bias": lambda random: _filtered(random) | _bias(random),
}
"""Settings of `Sampling` by kind; each kind takes a program of its own."""

DEEPEST = (*(f"{MAX_DEPTH}/{after}" for after in range(MAX_DEPTH + 1)), "auto")
"""Depths that one program serves: all of 0..5 are drafted, after a rejection or automatically."""

DEPTHS = {"greedy": (0, 3, *DEEPEST)}
"""Depths by kind, where they are not `DEEPEST`: 0 and 3 take programs of their own."""


def depths_of(model: oj.Model, kind: str) -> tuple[int | str, ...]:
    """Returns the depths that requests of a kind have; 0 alone where the model cannot draft."""
    return DEPTHS.get(kind, DEEPEST) if model.config.has_mtp else (0,)


def programs_of(model: oj.Model) -> list[tuple[oj.SamplingKind, int]]:
    """Returns the kind and greatest depth of every program that requests take."""
    random, found = np.random.default_rng(0), {}
    for kind in KINDS:
        for depth in depths_of(model, kind):
            settings = answer_settings(model, **settings_of(random, kind), depth=depth)
            found[settings.kind, settings.depth.max_depth] = None
    return list(found)


def settings_of(random: np.random.Generator, kind: str) -> dict[str, Any]:
    """Returns settings of `stream` that choose tokens by a kind."""
    settings: dict[str, Any] = {"sampling": oj.Sampling(**KINDS[kind](random))}
    return settings | {"top_logprobs": 3} if kind == "likeliest reported" else settings


class Requests:
    """Draws requests.

    Attributes:
      stops: strings that some answers end at.
    """

    def __init__(self, model: oj.Model, context: int, seed: int, text: Sequence[int]):
        """Starts a sequence of requests, the same for the same arguments and stops.

        Args:
          model: from `load`.
          context: most positions.
          seed: of everything random.
          text: token ids that half of the prompts are cut from; the others are random ids.
        """
        self.model, self.context, self.text = model, context, list(text)
        self.random = np.random.default_rng(seed)
        self.stops: list[str] = []

    def prompt(self, count: int) -> tuple[int, ...]:
        """Returns a prompt of so many tokens."""
        if self.random.random() < 0.5:
            return tuple(self.random.integers(self.model.config.vocab_used, size=count).tolist())
        start = int(self.random.integers(len(self.text)))
        again = -(-(start + count) // len(self.text))
        return tuple((self.text * again)[start : start + count])

    def draw(self) -> Asked:
        """Returns the next request: a tenth leave midway, a quarter are turns of a session."""
        random = self.random
        kind = str(random.choice(list(KINDS)))
        depths = depths_of(self.model, kind)
        settings = settings_of(random, kind)
        settings |= {"depth": depths[random.integers(len(depths))]}
        settings |= {"max_new_tokens": self._length(1, NEW_TOKENS)}
        settings |= {"ignore_eos": bool(random.random() < 0.5)}
        change, where, leave_after = None, float(random.random()), None
        low, high = (1, USUAL) if random.random() < 0.96 else (USUAL + 1, LONG)
        if random.random() < 0.25:
            change, high = (
                random.choice(["new", "more", "more", "rollback", "edit"]),
                min(high, 900),
            )
            if change != "new":
                low, high = 1, LATER
        if random.random() < 0.1:
            leave_after = int(random.integers(1, 4))
            settings |= {"max_new_tokens": NEW_TOKENS, "cycles_per_dispatch": 1}
        elif self.stops and random.random() < 0.15:
            settings |= {"stop": (str(random.choice(self.stops)),)}
        count = min(self._length(low, high), self.context - NEW_TOKENS)
        return Asked(
            kind=kind,
            ids=self.prompt(count),
            settings=settings,
            change=change,  # pyright: ignore[reportArgumentType]
            session=int(random.integers(SESSIONS)),
            where=where,
            leave_after=leave_after,
        )

    def _length(self, low: int, high: int) -> int:
        """Returns a length, each order of magnitude as likely as another."""
        return int(np.exp(self.random.uniform(np.log(low), np.log(high + 1))))


@dataclasses.dataclass(kw_only=True)
class Answer:
    """What a request gave: tokens, text, and the reason of its end, None if the caller left."""

    token_ids: list[int]
    text: str
    reason: str | None


def answered(pieces: Iterator[oj.Piece], asked: Asked, vocab: int) -> Answer:
    """Returns an answer, left midway if the caller does.

    Args:
      pieces: of a request.
      asked: the request.
      vocab: ids that may come.

    Raises:
      Wrong: it is not as it was asked for, or a log-probability is not finite.
    """
    found = Answer(token_ids=[], text="", reason=None)
    logprobs: list[float] = []
    for number, piece in enumerate(pieces, 1):
        found.token_ids += piece.token_ids
        found.text += piece.text
        found.reason = piece.finish_reason
        logprobs += [*piece.logprobs, *(p for row in piece.top_logprobs for _, p in row)]
        if number == asked.leave_after and found.reason is None:
            assert isinstance(pieces, Generator)
            pieces.close()
            break
    count, most = len(found.token_ids), asked.settings["max_new_tokens"]
    stop = asked.settings.get("stop", ())
    ends = {"length"} if asked.leave_after is None else {"length", None}
    if stop or not asked.settings.get("ignore_eos"):
        ends |= {"stop"}
    finite = bool(np.isfinite(logprobs).all())
    checks = {
        "ids are of the vocabulary": all(0 <= token < vocab for token in found.token_ids),
        "log-probabilities are finite": finite and len(logprobs) >= count,
        "as many tokens as asked for": count == most if found.reason == "length" else count <= most,
        "it ends where it should": found.reason in ends,
        "text ends before a stop string": not any(string in found.text for string in stop),
    }
    if wrong := [what for what, holds in checks.items() if not holds]:
        raise Wrong(f"an answer of {count} tokens ({found.reason}) to {asked}: not {wrong}")
    return found
