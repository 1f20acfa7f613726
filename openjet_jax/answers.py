"""From bursts of tokens to pieces of text: how an answer is generated, and where it ends.

Text is cut at stop strings here, on the host; stop ids and the length end generation on the device.
A burst may run past a stop string: tokens after the one that completes it are dropped.
"""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Float, Int

from openjet_jax.constraint import Constraint
from openjet_jax.conversation import Conversation
from openjet_jax.depth import DepthPolicy, parse_depth
from openjet_jax.dispatches import TopLogprobs, check_stop_ids
from openjet_jax.loading import Model
from openjet_jax.sampling import check_bias
from openjet_jax.settings import MAX_TOP_LOGPROBS, Sampling, SamplingKind
from openjet_jax.stats import Stats
from openjet_jax.stop_strings import StopMatcher
from openjet_jax.tokenizer import Detokenizer

NOT_FINITE = "the model's logits are not finite: some of its weights are damaged or out of range"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What `generate` returns.

    Attributes:
      text: the new text, without control tokens, cut before a stop string.
      token_ids: the new tokens, a stop id or the token completing a stop string included.
      logprobs: log-probability of each token under the unfiltered model.
      top_logprobs: for each token the likeliest in its place; empty unless asked for.
      finish_reason: "stop" at a stop id or stop string, "length" at the most tokens that fit,
        "timeout" at the deadline.
      stats: counts and times.
      accepted: for each cycle after the first token's, how many drafts survived.
    """

    text: str
    token_ids: Int[np.ndarray, " new"]
    logprobs: Float[np.ndarray, " new"]
    top_logprobs: list[TopLogprobs]
    finish_reason: str
    stats: Stats
    accepted: list[int]

    def as_dict(self) -> dict[str, object]:
        """Returns plain values, for JSON."""
        return {
            "text": self.text,
            "token_ids": self.token_ids.tolist(),
            "logprobs": [float(p) for p in self.logprobs],
            "finish_reason": self.finish_reason,
            "accepted": self.accepted,
            "stats": self.stats.as_dict(),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """What `stream` yields.

    Attributes:
      text: characters that are certain: whole, and not the beginning of a stop string.
      token_ids: tokens behind this piece; text may lag behind them.
      logprobs: of those tokens.
      top_logprobs: for each of them the likeliest in its place; empty unless asked for.
      cycles: (drafted, accepted) of the cycles that ran.
      finish_reason: None until the last piece.
      stats: counts and times so far.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    cycles: list[tuple[int, int]]
    finish_reason: str | None
    stats: Stats

    @classmethod
    def of_reading(cls, stats: Stats) -> "Piece":
        """Returns the piece of a dispatch that read and generated nothing."""
        return cls._empty(None, stats)

    @classmethod
    def of_end(cls, text: str, stats: Stats) -> "Piece":
        """Returns the last piece of an answer that ends with the context, without a token more."""
        return dataclasses.replace(cls._empty("length", stats), text=text)

    @classmethod
    def _empty(cls, finish_reason: str | None, stats: Stats) -> "Piece":
        return cls(
            text="",
            token_ids=[],
            logprobs=[],
            top_logprobs=[],
            cycles=[],
            finish_reason=finish_reason,
            stats=stats,
        )


def depth_policy(model: Model, depth: int | str | None) -> DepthPolicy:
    """Returns the policy asked for; for None the automatic one where the model can draft, else 0.

    Raises:
      ValueError: it is no depth, or asks for drafts that the model cannot make.
    """
    policy = parse_depth(depth if depth is not None else "auto" if model.config.has_mtp else 0)
    if policy.max_depth and not model.config.has_mtp:
        raise ValueError(f"{depth=} asks for drafts, but {model.without_mtp}; use depth=0")
    return policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How an answer is generated, checked; `answer_settings` says what each means.

    Attributes:
      sampling: how tokens are chosen.
      depth: how many drafts are made.
      max_new_tokens: most tokens to generate.
      stop: strings that end the text.
      stop_ids: ids that end it.
      cycles_per_dispatch: cycles between two looks of the host; None for the most compiled.
      constraint: restricts every token, or None.
      top_logprobs: likeliest tokens to report beside each.
      deadline: by `time.monotonic`, when the answer ends after the dispatch that runs; or None.
    """

    sampling: Sampling
    depth: DepthPolicy
    max_new_tokens: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    cycles_per_dispatch: int | None
    constraint: Constraint | None
    top_logprobs: int
    deadline: float | None

    @property
    def kind(self) -> SamplingKind:
        """The sampling program that is needed."""
        masked, ranked = self.constraint is not None, self.top_logprobs > 0
        return dataclasses.replace(self.sampling.kind, masked=masked, ranked=ranked)


def answer_settings(
    model: Model,
    *,
    max_new_tokens: int = 256,
    sampling: Sampling | None = None,
    depth: int | str | None = None,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    cycles_per_dispatch: int | None = None,
    constraint: Constraint | None = None,
    top_logprobs: int = 0,
    deadline: float | None = None,
) -> AnswerSettings:
    """Returns checked settings; arguments are those of `stream`.

    Raises:
      ValueError: a setting is off; the message names it, its limit and the way out.
    """
    StopMatcher(stop)
    if not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 1:
        raise ValueError(f"{max_new_tokens=} must be an integer, at least 1")
    if not isinstance(top_logprobs, int) or not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        raise ValueError(f"{top_logprobs=} must be in 0..{MAX_TOP_LOGPROBS}; 0 reports none")
    if ignore_eos and stop_ids:
        raise ValueError(f"ignore_eos contradicts {stop_ids=}; leave one out")
    config, sampling = model.config, sampling or Sampling()
    stops = () if ignore_eos else model.tokenizer.stop_ids if stop_ids is None else stop_ids
    check_stop_ids(stops, config.vocab)
    check_bias(sampling, config.vocab_used)
    return AnswerSettings(
        sampling=sampling,
        depth=depth_policy(model, depth),
        max_new_tokens=max_new_tokens,
        stop=tuple(stop),
        stop_ids=tuple(stops),
        cycles_per_dispatch=cycles_per_dispatch,
        constraint=constraint,
        top_logprobs=top_logprobs,
        deadline=deadline,
    )


def answer(
    model: Model,
    conversation: Conversation,
    settings: AnswerSettings,
    output_start: int | None = None,
) -> Iterator[Piece]:
    """Yields what follows the tokens that a conversation has read, a piece for each dispatch.

    A stop string ends it inside a burst: the conversation then holds tokens that no piece shows.

    Args:
      model: from `load`.
      conversation: of this model.
      settings: from `answer_settings`.
      output_start: as in `Conversation.run`.
    """
    bursts = conversation.run(
        settings.sampling,
        settings.depth,
        max_new_tokens=settings.max_new_tokens,
        stop_ids=settings.stop_ids,
        cycles_per_dispatch=settings.cycles_per_dispatch,
        constraint=settings.constraint,
        output_start=output_start,
        top_logprobs=settings.top_logprobs,
    )
    matcher, stats = StopMatcher(settings.stop), conversation.stats
    detokenizer = Detokenizer(model.tokenizer)
    for burst in bursts:
        if not np.isfinite(burst.logprobs).all():
            raise ValueError(NOT_FINITE)
        text, used = "", 0
        for token in burst.token_ids:
            text += matcher.push(detokenizer.push(token))
            used += 1
            if matcher.found is not None:
                break
        reason = None
        if burst.stopped or matcher.found is not None:
            reason = "stop"
        elif stats.new_tokens >= settings.max_new_tokens:
            reason = "length"
        elif settings.deadline is not None and time.monotonic() >= settings.deadline:
            reason = "timeout"
        if reason is not None and matcher.found is None:
            text += matcher.push(detokenizer.finish()) + matcher.finish()
        yield Piece(
            text=text,
            token_ids=burst.token_ids[:used],
            logprobs=burst.logprobs[:used],
            top_logprobs=burst.top_logprobs[:used],
            cycles=burst.cycles,
            finish_reason=reason,
            stats=stats,
        )
        if reason is not None:
            return
    tail = matcher.push(detokenizer.finish()) + matcher.finish()
    yield Piece.of_end(tail, stats)


def joined(pieces: Iterable[Piece]) -> Generation:
    """Returns the generation that the pieces make up."""
    pieces = list(pieces)
    cycles = [cycle for piece in pieces for cycle in piece.cycles]
    return Generation(
        text="".join(piece.text for piece in pieces),
        token_ids=np.asarray([i for piece in pieces for i in piece.token_ids], np.int32),
        logprobs=np.asarray([p for piece in pieces for p in piece.logprobs], np.float32),
        top_logprobs=[row for piece in pieces for row in piece.top_logprobs],
        finish_reason=str(pieces[-1].finish_reason),
        stats=pieces[-1].stats,
        accepted=[accepted for _, accepted in cycles[1:]],
    )
