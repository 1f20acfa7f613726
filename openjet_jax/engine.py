"""`generate` and `stream`: from a prompt to text, with everything a user may ask for.

Text is cut at stop strings here, on the host; stop ids and the length end generation on the device.
A burst may run past a stop string: tokens after the one that completes it are dropped.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import jax
import numpy as np
from jaxtyping import Float, Int

from openjet_jax.compiled import Programs
from openjet_jax.config import DecodeConfig
from openjet_jax.constraint import Constraint
from openjet_jax.conversation import Conversation, checked_ids, chunk_sizes
from openjet_jax.depth import DepthPolicy, parse_depth
from openjet_jax.loading import Model
from openjet_jax.settings import Sampling
from openjet_jax.stats import Stats
from openjet_jax.stop_strings import StopMatcher
from openjet_jax.tokenizer import Detokenizer

type Prompt = str | Sequence[int] | np.ndarray | jax.Array

DEFAULT_CONTEXT = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What `generate` returns.

    Attributes:
      text: the new text, without control tokens, cut before a stop string.
      token_ids: the new tokens, a stop id or the token completing a stop string included.
      logprobs: log-probability of each token under the unfiltered model.
      finish_reason: "stop" at a stop id or stop string, "length" at the most tokens that fit.
      stats: counts and times.
      accepted: for each cycle after the first token's, how many drafts survived.
    """

    text: str
    token_ids: Int[np.ndarray, " new"]
    logprobs: Float[np.ndarray, " new"]
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
      cycles: (drafted, accepted) of the cycles that ran.
      finish_reason: None until the last piece.
      stats: counts and times so far.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    cycles: list[tuple[int, int]]
    finish_reason: str | None
    stats: Stats


def programs_for(model: Model, context: int | None = None, kv_dtype: str | None = None) -> Programs:
    """Returns the model's programs at a context and cache format, kept with the model.

    Args:
      model: the model.
      context: most positions; by default what the model was trained for, at most 4,096.
      kv_dtype: cache format; by default float32 on a CPU and bfloat16 elsewhere.

    Raises:
      ValueError: a context beyond the model's, or an unknown format.
    """
    if context is None:
        context = min(DEFAULT_CONTEXT, model.config.context)
    if context > model.config.context:
        raise ValueError(
            f"{context=} is more than the {model.config.context} positions the model knows"
        )
    if kv_dtype is None:
        kv_dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    decode = DecodeConfig(context=context, kv_dtype=kv_dtype)
    if decode not in model.programs:
        model.programs[decode] = Programs(model.config, decode, model.weights)
    return model.programs[decode]


def _prompt_ids(model: Model, prompt, messages, template_options) -> list[int]:
    """Returns the ids of a prompt or of a rendered conversation."""
    if (prompt is None) == (messages is None):
        raise ValueError("give either a prompt or messages")
    if messages is not None:
        return model.render(messages, **(template_options or {}))
    if template_options:
        raise ValueError(f"{template_options=} has a meaning for messages only")
    if isinstance(prompt, str):
        return model.tokenizer.encode(prompt)
    return checked_ids(prompt, model.config.vocab).tolist()


def _depth(model: Model, depth: int | str | None) -> DepthPolicy:
    """Returns the depth policy: as asked, else automatic where the model can draft."""
    policy = parse_depth(depth if depth is not None else "auto" if model.config.has_mtp else 0)
    if policy.max_depth and not model.config.has_mtp:
        raise ValueError(f"{depth=} asks for drafts, but {model.without_mtp}; use depth=0")
    return policy


def stream(
    model: Model,
    prompt: Prompt | None = None,
    *,
    messages: Sequence[Mapping] | None = None,
    template_options: Mapping | None = None,
    max_new_tokens: int = 256,
    sampling: Sampling | None = None,
    depth: int | str | None = None,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    context: int | None = None,
    kv_dtype: str | None = None,
    cycles_per_dispatch: int | None = None,
    conversation: Conversation | None = None,
    constraint: Constraint | None = None,
) -> Iterator[Piece]:
    """Yields text as it is generated, in bursts of one dispatch.

    Args:
      model: from `load`.
      prompt: text (control tokens in it are plain text), or token ids of any integer array type.
      messages: a conversation in place of a prompt, rendered by the model's own chat template.
      template_options: for the template: `tools`, `enable_thinking`, `reasoning_effort`, ...
      max_new_tokens: most tokens to generate; also limited by the context.
      sampling: how tokens are chosen; greedy by default.
      depth: drafts a cycle, 0..5, "4/3", or "auto"; by default automatic, or 0 without MTP. Text
        does not depend on it.
      stop: strings that end the text; they are not part of it.
      stop_ids: ids that end it, in place of the model's own.
      ignore_eos: goes on past every stop id.
      context: most positions, prompt and output together.
      kv_dtype: format of the key-value cache.
      cycles_per_dispatch: cycles between two looks of the host.
      conversation: continues this one: the prompt is appended to it.
      constraint: restricts every token, whatever the depth; see `Constraint`.

    Raises:
      ValueError: a setting is off; the message names it, its limit and the way out.
    """
    sampling = sampling or Sampling()
    policy, matcher = _depth(model, depth), StopMatcher(stop)
    if max_new_tokens < 1:
        raise ValueError(f"{max_new_tokens=} must be at least 1")
    if ignore_eos and stop_ids:
        raise ValueError(f"ignore_eos contradicts {stop_ids=}; leave one out")
    ids = _prompt_ids(model, prompt, messages, template_options)
    if conversation is None:
        conversation = Conversation(model.weights, programs_for(model, context, kv_dtype))
    conversation.stats = stats = Stats(ready_s=conversation.stats.ready_s)
    stops = () if ignore_eos else model.tokenizer.stop_ids if stop_ids is None else stop_ids
    programs, sizes = conversation.programs, chunk_sizes(conversation.decode.chunks, len(ids))
    kind = dataclasses.replace(sampling.kind, masked=constraint is not None)
    conversation.prepare(
        partial(programs.cycles, kind, policy.max_depth),
        *(partial(programs.prefill, rows) for rows in sorted(set(sizes))),
    )
    conversation.read(ids)
    bursts = conversation.run(
        sampling,
        policy,
        max_new_tokens=max_new_tokens,
        stop_ids=stops,
        cycles_per_dispatch=cycles_per_dispatch,
        constraint=constraint,
    )
    return _pieces(model, bursts, matcher, stats, max_new_tokens)


def _pieces(model, bursts, matcher: StopMatcher, stats: Stats, max_new_tokens) -> Iterator[Piece]:
    """Yields a piece for each burst, then ends at the first reason to."""
    detokenizer = Detokenizer(model.tokenizer)
    for burst in bursts:
        text, used = "", 0
        for token in burst.token_ids:
            text += matcher.push(detokenizer.push(token))
            used += 1
            if matcher.found is not None:
                break
        reason = None
        if burst.stopped or matcher.found is not None:
            reason = "stop"
        elif stats.new_tokens >= max_new_tokens:
            reason = "length"
        if reason is not None and matcher.found is None:
            text += matcher.push(detokenizer.finish()) + matcher.finish()
        yield Piece(
            text=text,
            token_ids=burst.token_ids[:used],
            logprobs=burst.logprobs[:used],
            cycles=burst.cycles,
            finish_reason=reason,
            stats=stats,
        )
        if reason is not None:
            return
    tail = matcher.push(detokenizer.finish()) + matcher.finish()
    yield Piece(
        text=tail, token_ids=[], logprobs=[], cycles=[], finish_reason="length", stats=stats
    )


def generate(model: Model, prompt: Prompt | None = None, **settings) -> Generation:
    """Returns the whole generation at once; arguments are those of `stream`."""
    pieces = list(stream(model, prompt, **settings))
    cycles = [cycle for piece in pieces for cycle in piece.cycles]
    return Generation(
        text="".join(piece.text for piece in pieces),
        token_ids=np.asarray([i for piece in pieces for i in piece.token_ids], np.int32),
        logprobs=np.asarray([p for piece in pieces for p in piece.logprobs], np.float32),
        finish_reason=str(pieces[-1].finish_reason),
        stats=pieces[-1].stats,
        accepted=[accepted for _, accepted in cycles[1:]],
    )
