"""Who may ask, and how much: keys, hosts and sizes, checked before a body is read."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from openjet_jax.server.config import LOOPBACK, ServerConfig
from openjet_jax.server.errors import ApiError
from openjet_jax.server.replies import encoded

OPEN_PATHS = frozenset({"/", "/health"})
"""Answered without a key: they tell nothing about anyone's text."""

MAX_HEADER_BYTES = 16 << 10
"""Most bytes of all headers together."""


def error_response(error: ApiError) -> Response:
    """Returns an error as a response."""
    return Response(
        encoded(error.as_dict()),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


def scope_of(key: str) -> str:
    """Returns the name of a key's scope, from which the key cannot be told."""
    return hashlib.sha256(key.encode()).hexdigest()


def key_scope(keys: Sequence[str], authorization: str | None) -> str | None:
    """Returns the scope of the key in an `Authorization` header, None if it is none of `keys`.

    All keys are compared, each in constant time, so that time tells nothing.
    """
    scheme, _, given = (authorization or "").partition(" ")
    found = None
    for key in keys:
        if hmac.compare_digest(key.encode(), given.strip().encode("utf-8", "replace")):
            found = scope_of(key)
    return found if scheme.lower() == "bearer" else None


class Gate:
    """Lets requests through that have a key and name this host.

    Without a key the server answers only requests addressed to the machine itself by name or
    number, so that no page in a browser reaches it by a name of its own (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, config: ServerConfig):
        """Stands before `app`."""
        self._app, self._config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers or passes on."""
        if scope["type"] == "http":
            try:
                scope.setdefault("state", {})["scope"] = self._scope_of(scope)
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            return

    def _scope_of(self, scope: Scope) -> str:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            raise ApiError(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes")
        headers = Headers(scope=scope)
        if not self._config.api_keys:
            host = headers.get("host", "").rsplit(":", 1)[0].strip("[]").lower()
            if host not in LOOPBACK:
                raise ApiError(403, f"host {host!r} is not this machine; use 127.0.0.1")
            return ""
        found = key_scope(self._config.api_keys, headers.get("authorization"))
        if found is None and scope["path"] not in OPEN_PATHS:
            raise ApiError(
                401,
                "give a valid API key in the header `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found or ""
