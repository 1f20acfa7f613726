"""A server on loopback with the bundled model, shared by all tests of a run."""

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

import openjet_jax as oj

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

from openjet_jax.server.config import ServerConfig
from openjet_jax.server.serve import server_of


@contextlib.contextmanager
def running(model: oj.Model, **options) -> Iterator[str]:
    """Runs a server in a thread; yields its address."""
    config = ServerConfig(port=0, name="tiny", context=1024, **options)
    server = server_of(model, config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def model() -> oj.Model:
    return oj.load("tiny")


@pytest.fixture(scope="session")
def address(model: oj.Model) -> Iterator[str]:
    with running(model, agents=3) as address:
        yield address
