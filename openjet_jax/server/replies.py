"""From pieces of generated text to the objects that OpenAI's clients read."""

import dataclasses
import json
import math
import secrets
from collections.abc import Sequence
from typing import Any

from openjet_jax.answers import Piece
from openjet_jax.dispatches import TopLogprobs
from openjet_jax.server.arguments import parameter_schemas, read_arguments
from openjet_jax.server.parsing import END_THINK, Call, Event, ReplyParser, Text
from openjet_jax.server.requests import Function
from openjet_jax.server.tasks import Started
from openjet_jax.stats import Stats
from openjet_jax.tokenizer import Tokenizer


def encoded(value: Any) -> bytes:
    """Returns JSON as UTF-8; a lone surrogate stays an escape, which is JSON again."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


@dataclasses.dataclass(frozen=True)
class ScoredToken:
    """A token of an answer: its id, its log-probability, and what else was likely there."""

    token: int
    logprob: float
    top: TopLogprobs


class Reply:
    """One answer as it comes: what to send now, and the whole at the end.

    Attributes:
      finish_reason: None until the last piece; "stop", "length" or "tool_calls".
      timed_out: whether the request's time ended it; to OpenAI's clients that is "length".
      num_tokens: generated so far.
      stats: of the generation, once a piece came.
    """

    finish_reason: str | None
    num_tokens: int
    stats: Stats | None

    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool):
        """Starts an empty answer.

        Args:
          tokenizer: of the model.
          logprobs: whether log-probabilities were asked for.
        """
        self._tokenizer, self._logprobs = tokenizer, logprobs
        self.finish_reason, self.num_tokens, self.stats = None, 0, None
        self.timed_out = False
        self.started = Started(0, 0)
        self.token_ids: list[int] = []
        self.tokens: list[ScoredToken] = []

    def take(self, piece: Piece) -> dict[str, Any]:
        """Returns what a piece adds to a choice, in the form of a chunk; empty if nothing."""
        self.num_tokens += len(piece.token_ids)
        self.stats, self.finish_reason = piece.stats, piece.finish_reason
        if piece.finish_reason == "timeout":
            self.finish_reason, self.timed_out = "length", True
        self.token_ids += piece.token_ids
        new = _scored(piece) if self._logprobs else []
        self.tokens += new
        return self._added(piece.text, piece.finish_reason is not None, new)

    def _added(self, text: str, final: bool, new: list[ScoredToken]) -> dict[str, Any]:
        raise NotImplementedError

    def token_text(self, token: int) -> str:
        """Returns a token's text; parts of characters show as U+FFFD."""
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


class TextReply(Reply):
    """An answer of /v1/completions."""

    def __init__(self, tokenizer: Tokenizer, *, logprobs: int | None):
        """Starts an empty answer.

        Args:
          tokenizer: of the model.
          logprobs: how many of the likeliest tokens to list; None lists no log-probabilities.
        """
        super().__init__(tokenizer, logprobs=logprobs is not None)
        self._ranked, self.text = bool(logprobs), ""
        self._offset = 0

    def _added(self, text: str, final: bool, new: list[ScoredToken]) -> dict[str, Any]:
        self.text += text
        if not (text or new or final):
            return {}
        return {"text": text, "logprobs": self._listed(new) if self._logprobs else None}

    def choice(self) -> dict[str, Any]:
        """Returns the whole choice, without its index."""
        self._offset = 0
        logprobs = self._listed(self.tokens) if self._logprobs else None
        return {"text": self.text, "logprobs": logprobs, "finish_reason": self.finish_reason}

    def _listed(self, tokens: list[ScoredToken]) -> dict[str, Any]:
        texts = [self.token_text(scored.token) for scored in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(scored.logprob) for scored in tokens],
            "top_logprobs": [self._top(scored) for scored in tokens] if self._ranked else None,
            "text_offset": offsets,
        }

    def _top(self, scored: ScoredToken) -> dict[str, float]:
        """Returns log-probabilities by text, the chosen token's among them, as OpenAI has it.

        Parts of characters are told apart by their bytes, written as OpenAI does.
        """
        found: dict[str, float] = {}
        for token, logprob in [*scored.top, (scored.token, scored.logprob)]:
            name, data = self.token_text(token), self._tokenizer.token_bytes(token)
            if name.encode() != data:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            found.setdefault(name, _finite(logprob))
        return found


class ChatReply(Reply):
    """An answer of /v1/chat/completions: reasoning, content and calls told apart."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        logprobs: bool,
        thinking: bool,
        functions: Sequence[Function] = (),
    ):
        """Starts an empty answer.

        Args:
          tokenizer: of the model.
          logprobs: as in `Reply`.
          thinking: whether the prompt ends inside a think block.
          functions: those that were offered.
        """
        super().__init__(tokenizer, logprobs=logprobs)
        names = [function.name for function in functions]
        self._parser = ReplyParser(thinking=thinking, tools=names)
        self._schemas = {f.name: parameter_schemas(f.parameters) for f in functions}
        self._thinking = thinking
        self.texts = {"reasoning": "", "content": ""}
        self.calls: list[dict[str, Any]] = []

    def _added(self, text: str, final: bool, new: list[ScoredToken]) -> dict[str, Any]:
        events = self._parser.push(text)
        if final:
            events += self._parser.finish()
        delta: dict[str, Any] = {}
        for event in events:
            self._merge(delta, event)
        if final and self.calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        if not (delta or new or final):
            return {}
        return {"delta": delta, "logprobs": self._listed(new) if self._logprobs else None}

    def _merge(self, delta: dict[str, Any], event: Event) -> None:
        if isinstance(event, Text):
            self.texts[event.channel] += event.text
            key = "content" if event.channel == "content" else "reasoning_content"
            delta[key] = delta.get(key, "") + event.text
            return
        call = self._call(event)
        delta.setdefault("tool_calls", []).append({"index": len(self.calls), **call})
        self.calls.append(call)

    def _call(self, call: Call) -> dict[str, Any]:
        arguments = read_arguments(call, self._schemas.get(call.name, {}))
        return {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(arguments, ensure_ascii=False),
            },
        }

    def choice(self) -> dict[str, Any]:
        """Returns the whole choice, without its index."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.texts["content"] or (None if self.calls else ""),
            "refusal": None,
        }
        if self.texts["reasoning"]:
            message["reasoning_content"] = self.texts["reasoning"]
        if self.calls:
            message["tool_calls"] = self.calls
        logprobs = self._listed(self.tokens) if self._logprobs else None
        return {"message": message, "logprobs": logprobs, "finish_reason": self.finish_reason}

    @property
    def reasoning_tokens(self) -> int:
        """Tokens before the end of the think block that the prompt opened."""
        end = self._tokenizer.user_defined_tokens.get(END_THINK)
        if not self._thinking:
            return 0
        return self.token_ids.index(end) if end in self.token_ids else self.num_tokens

    def _listed(self, tokens: list[ScoredToken]) -> dict[str, Any]:
        entries = [
            self._entry(scored.token, scored.logprob)
            | {"top_logprobs": [self._entry(*other) for other in scored.top]}
            for scored in tokens
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


def usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """Returns token counts of all answers to one prompt."""
    started = replies[0].started
    new = sum(reply.num_tokens for reply in replies)
    counts: dict[str, Any] = {
        "prompt_tokens": started.prompt_tokens,
        "completion_tokens": new,
        "total_tokens": started.prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": started.cached_tokens},
    }
    reasoning = [reply.reasoning_tokens for reply in replies if isinstance(reply, ChatReply)]
    if reasoning:
        counts["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
    return counts


def timings(reply: Reply) -> dict[str, Any]:
    """Returns what an answer cost and how well its drafts did; not part of OpenAI's interface."""
    stats = reply.stats or Stats()
    return {
        "prompt_n": reply.started.prompt_tokens - reply.started.cached_tokens,
        "prompt_ms": 1e3 * stats.prefill_s,
        "predicted_n": stats.new_tokens,
        "predicted_ms": 1e3 * stats.decode_s,
        "predicted_per_second": stats.decode_rate,
        "draft_n": sum(stats.drafted),
        "draft_n_accepted": sum(stats.accepted),
        "tokens_per_cycle": stats.tokens_per_cycle,
        "acceptance": [a for a, d in zip(stats.acceptance, stats.drafted, strict=True) if d],
        "timed_out": reply.timed_out,
    }


def _scored(piece: Piece) -> list[ScoredToken]:
    top = piece.top_logprobs or [[] for _ in piece.token_ids]
    return list(map(ScoredToken, piece.token_ids, piece.logprobs, top))


def _finite(logprob: float) -> float:
    """Returns a log-probability that JSON can hold; OpenAI writes -9999 for none."""
    return logprob if math.isfinite(logprob) else -9999.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Envelope:
    """What every object of one response has in common.

    Attributes:
      id: of the response.
      kind: "chat.completion" or "text_completion".
      created: seconds since 1970.
      model: name.
      fingerprint: what the text depends on besides the request: the checkpoint and the code.
    """

    id: str
    kind: str
    created: int
    model: str
    fingerprint: str

    def whole(self, replies: Sequence["ChatReply | TextReply"]) -> dict[str, Any]:
        """Returns a response that was not streamed."""
        choices = [{"index": i, **reply.choice()} for i, reply in enumerate(replies)]
        more = {"usage": usage(replies), "timings": timings(replies[0])}
        return self._object(self.kind, choices) | more

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Returns a piece of a stream."""
        kind = "chat.completion.chunk" if self.kind == "chat.completion" else self.kind
        return self._object(kind, choices) | more

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
