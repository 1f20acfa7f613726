"""From a checked request to answers: prompts, settings, tasks. Knows no HTTP."""

import asyncio
import dataclasses
import functools
import secrets
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from openjet_jax.answers import Piece, answer_settings
from openjet_jax.engine import programs_for
from openjet_jax.loading import Model
from openjet_jax.prefix_cache import PrefixCache
from openjet_jax.server.config import ServerConfig
from openjet_jax.server.errors import ApiError, bad_request
from openjet_jax.server.grammar import GrammarConstraint, GrammarVocabulary, grammar_of
from openjet_jax.server.messages import chat_prompt
from openjet_jax.server.metrics import Metrics
from openjet_jax.server.replies import ChatReply, Envelope, Reply, TextReply
from openjet_jax.server.requests import ChatRequest, CompletionRequest, GenerationRequest
from openjet_jax.server.samplings import samplings_of
from openjet_jax.server.scheduler import Scheduler
from openjet_jax.server.security import scope_of
from openjet_jax.server.session_folder import SessionFolder
from openjet_jax.server.tasks import Busy, Delivery, Late, Started, Stopping, Task
from openjet_jax.session import Session
from openjet_jax.settings import Sampling, SamplingKind


@dataclasses.dataclass(eq=False)
class Answers:
    """The answers to one request while they come.

    Attributes:
      envelope: what all objects of the response share.
      replies: one for each choice.
      task: what the device was asked.
      arrived: what came, in order: a choice's number and a delivery.
    """

    envelope: Envelope
    replies: list[ChatReply] | list[TextReply]
    task: Task
    arrived: asyncio.Queue[tuple[int, Delivery]]

    async def pieces(self) -> AsyncGenerator[tuple[int, Reply, Piece | Started]]:
        """Yields what comes until every choice is finished; closing it cancels what is left.

        Raises:
          ApiError: the device failed or the server shuts down.
        """
        left = len(self.replies)
        try:
            while left:
                number, delivery = await self.arrived.get()
                if isinstance(delivery, Exception):
                    raise _failure(delivery)
                reply = self.replies[number]
                if isinstance(delivery, Started):
                    reply.started = delivery
                elif delivery.finish_reason is not None:
                    left -= 1
                yield number, reply, delivery
        finally:
            self.task.cancel()


class Service:
    """One model behind the interface of OpenAI.

    Attributes:
      name: what clients call the model.
      metrics: counters.
    """

    def __init__(self, model: Model, config: ServerConfig):
        """Starts the scheduler's thread; programs are made ready by `warm_up` or when needed."""
        self._model, self._config = model, config
        self.name = config.name or str(model.facts.get("name") or model.directory.name)
        self.created = int(time.time())
        self.programs = programs_for(model, config.context, config.kv_dtype)
        self._max_depth = answer_settings(model, depth=config.depth).depth.max_depth
        self._compiling = threading.Lock()
        self._scopes = [scope_of(key) for key in config.api_keys] or [""]
        folder = config.session_dir
        self._folder = None if folder is None else SessionFolder(folder)
        self._prefixes = PrefixCache(config.prefix_bytes)
        self._scheduler = Scheduler(
            self._new_session,
            kept=self._kept_sessions(),
            agents=config.agents,
            queue_len=config.queue_len,
            observe=lambda seconds: self.metrics.dispatch(seconds),
        )
        self.metrics = Metrics(self._scheduler.counts, self._program_counts)

    def _program_counts(self) -> dict[str, int]:
        compiled = self.programs.num_compiled
        return {"compiled": compiled, "found": len(self.programs.events) - compiled}

    def _new_session(self, scope: str) -> Session:
        kv_dtype = self._config.kv_dtype
        return Session(self._model, kv_dtype=kv_dtype, **self._session_settings(scope))

    def _restored(self, path: Path, scope: str) -> Session:
        return Session.restore(self._model, path, **self._session_settings(scope))

    def _session_settings(self, scope: str) -> dict[str, Any]:
        return {
            "context": self._config.context,
            "budget": self._config.checkpoints,
            "prefixes": self._prefixes,
            "isolation_key": scope,
        }

    @functools.cached_property
    def _grammar_vocabulary(self) -> GrammarVocabulary:
        return GrammarVocabulary(self._model.tokenizer)

    def warm_up(self) -> None:
        """Makes the programs of ordinary requests ready; others are made when first asked for."""
        programs = self.programs
        sampled = samplings_of(self._model, CompletionRequest(model=self.name, prompt=""))[0]
        programs.prepare(
            programs.start,
            programs.take_checkpoint,
            programs.rewind,
            programs.fork,
            programs.read_block,
            programs.write_block,
            *(functools.partial(programs.prefill, rows) for rows in programs.decode.chunks),
            *(
                functools.partial(programs.cycles, kind, self._max_depth)
                for kind in {Sampling().kind, sampled.kind}
            ),
        )

    def _prepare(self, kind: SamplingKind) -> None:
        """Makes a program ready in a request's own thread, so that no other request waits."""
        with self._compiling:
            self.programs.cycles(kind, self._max_depth)

    def stop(self) -> None:
        """Ends running answers and the scheduler's thread; keeps conversations if asked to.

        Raises:
          OSError: they cannot be written.
        """
        kept = self._scheduler.stop()
        if self._folder is not None:
            self._folder.save(kept, self._scopes)

    def _kept_sessions(self) -> list[tuple[str, Session]]:
        if self._folder is None:
            return []
        return self._folder.load(self._restored, self._scopes, self._config.agents)

    def describe(self) -> dict[str, object]:
        """Returns the model's entry in /v1/models."""
        # A file keeps 32-bit numbers: 0.7, not 0.699999988.
        numbers = {
            name: float(f"{value:.7g}") if isinstance(value, float) else value
            for name, value in (self._model.facts.get("sampling") or {}).items()
        }
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": str(self._model.facts.get("author") or "local"),
            "max_model_len": self.programs.decode.context,
            "default_sampling": numbers,
        }

    async def chat(self, request: ChatRequest, scope: str) -> Answers:
        """Starts answering a conversation.

        Raises:
          ApiError: what was asked cannot be done, or not now.
        """
        self._check_model(request)
        prompt = await asyncio.to_thread(chat_prompt, self._model, request)
        grammar = grammar_of(request, prompt)
        constraint = None
        if grammar is not None:
            await asyncio.to_thread(self._check_grammar, *grammar)
            constraint = functools.partial(GrammarConstraint, self._grammar_vocabulary, grammar[0])
        most = request.max_completion_tokens or request.max_tokens
        if request.max_completion_tokens and request.max_tokens:
            raise bad_request(
                "max_tokens is the old name of max_completion_tokens; give one", "max_tokens"
            )
        replies = [
            ChatReply(
                self._model.tokenizer,
                logprobs=bool(request.logprobs),
                thinking=prompt.thinking,
                functions=[tool.function for tool in prompt.tools],
            )
            for _ in range(request.n or 1)
        ]
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
        return await self._submit(
            request, "chat.completion", prompt.ids, most, replies, scope, constraint
        )

    async def complete(self, request: CompletionRequest, scope: str) -> Answers:
        """Starts continuing a text.

        Raises:
          ApiError: what was asked cannot be done, or not now.
        """
        self._check_model(request)
        prompt = request.prompt
        if isinstance(prompt, str):
            try:
                prompt = await asyncio.to_thread(self._model.tokenizer.encode, prompt)
            except ValueError as error:
                raise bad_request(f"prompt: {error}", "prompt") from None
        wrong = [i for i in prompt if not 0 <= i < self._model.config.vocab_used]
        if not prompt or wrong:
            what = f"token {wrong[0]} is not in the vocabulary" if wrong else "it is empty"
            raise bad_request(f"prompt: {what}", "prompt")
        replies = [
            TextReply(self._model.tokenizer, logprobs=request.logprobs)
            for _ in range(request.n or 1)
        ]
        most = request.max_tokens or 16  # OpenAI's default
        return await self._submit(request, "text_completion", prompt, most, replies, scope, None)

    def _check_grammar(self, grammar: str, param: str) -> None:
        self._grammar_vocabulary.check(grammar, param)

    def _check_model(self, request: GenerationRequest) -> None:
        if request.model != self.name:
            raise ApiError(
                404,
                f"the model {request.model!r} is not served here; this is {self.name!r}",
                param="model",
                code="model_not_found",
            )
        if request.stream_options is not None and not request.stream:
            raise bad_request("stream_options needs stream=true", "stream_options")
        if (request.n or 1) > self._config.agents:
            raise bad_request(
                f"n={request.n} is more than the {self._config.agents} conversations that this "
                "server holds; start it with a larger --agents",
                "n",
            )

    async def _submit(
        self, request, kind: str, ids: list[int], most: int | None, replies, scope: str, constraint
    ) -> Answers:
        limit_s = self._config.request_timeout_s
        deadline = None if limit_s is None else time.monotonic() + limit_s
        context = self.programs.decode.context
        room = context - len(ids)
        if room < 1:
            raise bad_request(
                f"the prompt has {len(ids)} tokens; the context of {context} must hold it and an "
                "answer",
                "messages" if kind == "chat.completion" else "prompt",
                "context_length_exceeded",
            )
        limit = self._config.max_tokens
        if most is not None and limit is not None and most > limit:
            raise bad_request(f"max_tokens={most} must be at most {limit}", "max_tokens")
        samplings = samplings_of(self._model, request)
        kind_needed = dataclasses.replace(
            samplings[0].kind, masked=constraint is not None, ranked=request.alternatives > 0
        )
        await asyncio.to_thread(self._prepare, kind_needed)
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue()

        def deliver(number: int, delivery: Delivery) -> None:
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, (number, delivery))
            except RuntimeError:  # the loop has ended, and with it the client
                task.cancel()

        stop = request.stop
        task = Task(
            ids=ids,
            # Text is a function of the request alone where a seed asks for that.
            keep_tokens=request.seed is None and kind == "chat.completion",
            scope=scope,
            samplings=samplings,
            max_new_tokens=min(most or room, limit or room, room),
            depth=self._config.depth,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            constraint=constraint,
            top_logprobs=request.alternatives,
            deadline=deadline,
            deliver=deliver,
        )
        try:
            self._scheduler.submit(task)
        except Busy as error:
            seconds = str(error.retry_after_s)
            raise ApiError(
                429, str(error), code="queue_full", headers={"Retry-After": seconds}
            ) from None
        except Stopping as error:
            raise _failure(error) from None
        prefix = "chatcmpl" if kind == "chat.completion" else "cmpl"
        envelope = Envelope(
            id=f"{prefix}-{secrets.token_hex(12)}",
            kind=kind,
            created=int(time.time()),
            model=self.name,
            fingerprint=f"fp_{self._model.hash[:12]}",
        )
        return Answers(envelope, replies, task, arrived)


def _failure(error: Exception) -> ApiError:
    """Returns what a client is told of a failure."""
    if isinstance(error, Stopping):
        return ApiError(503, "the server is shutting down", headers={"Retry-After": "10"})
    if isinstance(error, Late):
        return ApiError(503, str(error), code="request_timeout", headers={"Retry-After": "10"})
    if isinstance(error, ValueError):
        return bad_request(str(error))
    return ApiError(500, f"the answer failed: {error}")
