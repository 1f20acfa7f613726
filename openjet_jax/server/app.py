"""The HTTP side: routes, streams of server-sent events, and what a client's leaving means."""

import asyncio
import contextlib
import importlib.resources
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from openjet_jax.answers import Piece
from openjet_jax.server.config import ServerConfig
from openjet_jax.server.errors import ApiError
from openjet_jax.server.metrics import CONTENT_TYPE, Metrics
from openjet_jax.server.openapi import description
from openjet_jax.server.replies import ChatReply, encoded, timings, usage
from openjet_jax.server.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    read_request,
)
from openjet_jax.server.security import Gate, error_response
from openjet_jax.server.service import Answers, Service

MAX_BODY_S = 60
"""Longest that a client may take to send a body, in seconds."""

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def create_app(service: Service, config: ServerConfig) -> Starlette:
    """Returns the application; it stops the service when it ends."""
    api = _Api(service, config)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette):
        yield
        await asyncio.to_thread(service.stop)

    return Starlette(
        routes=[
            Route("/", api.page),
            Route("/health", api.health),
            Route("/metrics", api.metrics),
            Route("/openapi.json", api.openapi),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.complete, methods=["POST"]),
        ],
        middleware=[Middleware(_Counting, service.metrics), Middleware(Gate, config)],
        exception_handlers={
            ApiError: _refused,
            HTTPException: _http_error,
            Exception: _unexpected,
        },
        lifespan=lifespan,
    )


class _Counting:
    """Counts responses by path and status."""

    def __init__(self, app, metrics: Metrics):
        self._app, self._metrics = app, metrics

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def counted(message):
            if message["type"] == "http.response.start":
                # Only paths that exist are told apart: others are a client's to invent.
                known = scope["path"] if "endpoint" in scope else "other"
                self._metrics.request(known, message["status"])
            await send(message)

        await self._app(scope, receive, counted)


class _Api:
    """The handlers."""

    def __init__(self, service: Service, config: ServerConfig):
        self._service, self._config = service, config
        page = importlib.resources.files("openjet_jax.server") / "page.html"
        self._page = page.read_bytes()

    async def page(self, _: Request) -> Response:
        return Response(self._page, media_type="text/html", headers=_PAGE_HEADERS)

    async def health(self, _: Request) -> Response:
        return _json({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE)

    async def openapi(self, _: Request) -> Response:
        return _json(description(self._service.name))

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._service.describe()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._service.name:
            raise ApiError(404, f"no model {name!r} here", param="model", code="model_not_found")
        return _json(self._service.describe())

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, self._service.chat)

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, self._service.complete)

    async def _generate[R: GenerationRequest](
        self, request: Request, kind: type[R], start: Callable[[R, str], Awaitable[Answers]]
    ) -> Response:
        arrived = time.perf_counter()
        asked = read_request(await self._body(request), kind)
        answers = await start(asked, request.state.scope)
        if asked.stream:
            with_usage = asked.stream_options is not None and bool(
                asked.stream_options.include_usage
            )
            return _Events(answers, self._events(answers, with_usage, arrived))
        return await self._whole(request, answers, arrived)

    async def _body(self, request: Request) -> bytes:
        """Returns a request's body, read no further than the limit."""
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            raise ApiError(415, "the body must be of Content-Type application/json")
        most, body = self._config.max_body_bytes, bytearray()
        try:
            async with asyncio.timeout(MAX_BODY_S):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise ApiError(413, f"the body is larger than {most} bytes")
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {MAX_BODY_S} s") from None
        return bytes(body)

    async def _pieces(self, answers: Answers, arrived: float):
        """Yields pieces as `Answers.pieces`, counting them."""
        first = True
        async with contextlib.aclosing(answers.pieces()) as pieces:
            async for number, reply, delivery in pieces:
                if not isinstance(delivery, Piece):
                    if number == 0:
                        cached = delivery.cached_tokens
                        self._service.metrics.prompt(delivery.prompt_tokens - cached, cached)
                    yield number, reply, None
                    continue
                if first:
                    self._service.metrics.first_token(time.perf_counter() - arrived)
                    first = False
                self._service.metrics.piece(delivery)
                yield number, reply, delivery

    async def _whole(self, request: Request, answers: Answers, arrived: float) -> Response:
        """Waits for all answers, or for the client to leave."""

        async def collect() -> None:
            async with contextlib.aclosing(self._pieces(answers, arrived)) as pieces:
                async for _, reply, piece in pieces:
                    if piece is not None:
                        reply.take(piece)

        collecting = asyncio.ensure_future(collect())
        leaving = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise ClientDisconnect
            await collecting
        finally:
            answers.task.cancel()
            for waiting in (collecting, leaving):
                waiting.cancel()
            await asyncio.gather(collecting, leaving, return_exceptions=True)
        return _json(answers.envelope.whole(answers.replies))

    async def _events(
        self, answers: Answers, with_usage: bool, arrived: float
    ) -> AsyncGenerator[bytes]:
        """Yields a stream of server-sent events; leaving it cancels the answers."""
        envelope, blank = answers.envelope, {"usage": None} if with_usage else {}
        try:
            async with contextlib.aclosing(self._pieces(answers, arrived)) as pieces:
                async for number, reply, piece in pieces:
                    if piece is None:
                        if isinstance(reply, ChatReply):
                            delta = {"role": "assistant", "content": ""}
                            yield _event(envelope.chunk([_choice(number, delta=delta)], **blank))
                        continue
                    added = reply.take(piece)
                    if not added:
                        continue
                    ended = reply.finish_reason is not None
                    more = blank | ({"timings": timings(reply)} if ended else {})
                    choice = _choice(number, finish_reason=reply.finish_reason, **added)
                    yield _event(envelope.chunk([choice], **more))
            if with_usage:
                yield _event(envelope.chunk([], usage=usage(answers.replies)))
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.as_dict())


class _Events(StreamingResponse):
    """A stream of server-sent events. However it ends, the answers end with it."""

    def __init__(self, answers: Answers, events: AsyncGenerator[bytes]):
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self._answers, self._source = answers, events

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.task.cancel()  # its own end, if it was never begun, would not do it
            await self._source.aclose()


def _choice(number: int, **fields) -> dict[str, object]:
    return {"index": number, "logprobs": None, "finish_reason": None} | fields


def _event(value: object) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"


def _json(value: object) -> Response:
    return Response(encoded(value), media_type="application/json")


async def _gone(request: Request) -> None:
    """Returns when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = error_response(ApiError(error.status_code, error.detail))
    answer.headers.update(error.headers or {})
    return answer


def _unexpected(_: Request, error: Exception) -> Response:
    return error_response(ApiError(500, f"unexpected: {type(error).__name__}"))
