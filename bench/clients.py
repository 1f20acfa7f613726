"""Clients of a server on loopback: requests of every kind, and what `/metrics` says.

Plain sockets, so that a client can leave at any moment and send what is no request.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import random
import re
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

MODEL, CLIENTS = "tiny", 8
WORDS = (
    "read write parse area lines stack merge path count sort file value name tree node sum".split()
)


@dataclasses.dataclass(frozen=True)
class Sent:
    """One request, and how its client behaves.

    Attributes:
      path: where it is sent.
      body: its bytes.
      statuses: those it may get.
      leave_after: events or, of whole answers, seconds after which the client leaves; None if not.
      media: of the body.
      missing: bytes that were announced and never come.
    """

    path: str
    body: bytes
    statuses: frozenset[int] = frozenset({200})
    leave_after: float | None = None
    media: str = "application/json"
    missing: int = 0

    @property
    def stream(self) -> bool:
        """Whether the answer comes as events."""
        return b'"stream": true' in self.body


def chat(words: Sequence[str], **fields: Any) -> dict[str, Any]:
    """Returns the body of a chat request."""
    message = {"role": "user", "content": "Write a function: " + " ".join(words)}
    return {"model": MODEL, "messages": [message], "temperature": 0, "max_tokens": 16} | fields


def any_request(rng: random.Random, longest: int) -> Sent:
    """Returns a request of one of the kinds that the load is made of, of at most so many words."""
    words = rng.choices(WORDS, k=rng.randint(4, longest))
    fields = {"max_tokens": rng.randint(1, longest // 3), "stream": rng.random() < 0.6}
    if rng.random() < 0.5:
        fields |= {"temperature": 1.0, "seed": rng.randrange(1000), "top_k": 20}
    path, body = "/v1/chat/completions", chat(words, **fields)
    if rng.random() < 0.3:
        path, body = "/v1/completions", fields | {"model": MODEL, "prompt": " ".join(words)}
    kind = rng.random()
    if kind < 0.6:
        return Sent(path, encoded(body))
    if kind < 0.82:
        limit = rng.randint(0, 6) if fields["stream"] else rng.uniform(0, 0.5)
        return Sent(path, encoded(body | {"max_tokens": 2 * longest}), leave_after=limit)
    return _bad(rng, path, body)


def _bad(rng: random.Random, path: str, body: dict[str, Any]) -> Sent:
    """Returns a request that must be refused, or that never arrives whole."""
    refused = frozenset({400})
    whole = encoded(body)
    match rng.randrange(7):
        case 0:
            return Sent(path, whole[: rng.randrange(1, len(whole))], refused)
        case 1:
            return Sent(path, encoded(body | {"never_heard_of": 1}), refused)
        case 2:
            return Sent(path, encoded(body | {"max_tokens": "many"}), refused)
        case 3:
            return Sent(path, encoded(body | {"model": "other"}), frozenset({404}))
        case 4:
            return Sent(path, whole, frozenset({415}), media="text/plain")
        case 5:
            return Sent(path, rng.randbytes(rng.randint(0, 300)), refused)
    return Sent(path, whole, leave_after=0, missing=100)


def encoded(body: dict[str, Any]) -> bytes:
    """Returns a body as JSON."""
    return json.dumps(body).encode()


type Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def opened(address: str) -> Connection:
    """Returns a connection to a server."""
    where = urllib.parse.urlsplit(address)
    return await asyncio.open_connection(where.hostname, where.port, limit=1 << 24)


def send(connection: Connection, sent: Sent) -> None:
    """Sends a request."""
    _, writer = connection
    head = f"POST {sent.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: {sent.media}\r\n"
    head += f"Content-Length: {len(sent.body) + sent.missing}\r\n\r\n"
    writer.write(head.encode() + sent.body)


async def ask(address: str, sent: Sent) -> tuple[int, list[bytes]]:
    """Sends a request and returns the status, 0 if the client left before it, and what came."""
    reader, writer = connection = await opened(address)
    try:
        send(connection, sent)
        if sent.leave_after is not None and not sent.stream:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(answer(reader), sent.leave_after)
            return 0, []
        return await answer(reader, sent.leave_after)
    finally:
        writer.transport.abort() if sent.leave_after is not None else writer.close()


async def answer(
    reader: asyncio.StreamReader, leave_after: float | None = None
) -> tuple[int, list[bytes]]:
    """Returns the status and the lines of the body, of a stream no more than `leave_after`."""
    if leave_after == 0:
        return 0, []
    status = int((await reader.readline()).split()[1])
    while await reader.readline() not in (b"\r\n", b""):
        pass
    lines = []
    while line := await reader.readline():
        lines.append(line)
        if leave_after is not None and sum(x.startswith(b"data:") for x in lines) >= leave_after:
            break
    return status, lines


async def metrics(connection: Connection) -> dict[str, float]:
    """Returns what /metrics says, by name and labels; the connection stays open."""
    reader, writer = connection
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    size = re.search(rb"(?i)content-length: (\d+)", head)
    assert size is not None
    text = (await reader.readexactly(int(size[1]))).decode()
    return {name: float(value) for name, value in re.findall(r"(?m)^(openjet_\S+) (\S+)$", text)}


@contextlib.asynccontextmanager
async def watching(address: str) -> AsyncIterator[Callable[[], Awaitable[dict[str, float]]]]:
    """Yields a function that returns the metrics, over one connection."""
    connection = await opened(address)
    try:
        yield functools.partial(metrics, connection)
    finally:
        connection[1].close()


def places(found: dict[str, float], state: str) -> int:
    """Returns how many conversations are in a state: waiting, running or idle."""
    return int(found[f'openjet_conversations{{state="{state}"}}'])


def programs(found: dict[str, float]) -> int:
    """Returns how many programs were made ready, compiled or found."""
    return sum(int(value) for name, value in found.items() if name.startswith("openjet_programs"))


async def settled(address: str, seconds: float = 10) -> dict[str, float]:
    """Returns the metrics once nothing runs or waits.

    Raises:
      TimeoutError: a place is stuck.
    """
    async with watching(address) as look, asyncio.timeout(seconds):
        while True:
            found = await look()
            if not places(found, "running") and not places(found, "waiting"):
                return found
            await asyncio.sleep(0.05)


async def load(
    address: str, count: int, *, clients: int = CLIENTS, seed: int = 0, longest: int = 36
) -> dict[int, int]:
    """Sends requests of every kind from several clients at once; returns counts by status.

    Raises:
      AssertionError: a request got a status it must not get, or a stream did not end as it should.
    """
    rng = random.Random(seed)
    left = [any_request(rng, longest) for _ in range(count)]
    statuses: dict[int, int] = {}

    async def client() -> None:
        while left:
            sent = left.pop()
            status, lines = await ask(address, sent)
            assert status in sent.statuses | ({0} if sent.leave_after is not None else set()), (
                sent,
                status,
                lines[:3],
            )
            if status == 200 and sent.stream and sent.leave_after is None:
                assert lines[-2:-1] == [b"data: [DONE]\n"] or b"data: [DONE]\n" in lines, lines[-4:]
            statuses[status] = statuses.get(status, 0) + 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return statuses
