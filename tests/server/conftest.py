"""A server on loopback with the bundled model, shared by all tests of a run."""

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

import openjet_jax as oj

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

from openjet_jax.config import MAX_DEPTH
from openjet_jax.engine import programs_for
from openjet_jax.server.config import ServerConfig
from openjet_jax.server.serve import server_of
from openjet_jax.settings import SamplingKind

CONTEXT = 1024


@contextlib.contextmanager
def running(model: oj.Model, **options) -> Iterator[str]:
    """Runs a server in a thread; yields its address."""
    config = ServerConfig(port=0, name="tiny", context=CONTEXT, **options)
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
def ready_model(model: oj.Model) -> oj.Model:
    """The model with its programs made ready, so that no client waits for a compiler."""
    programs = programs_for(model, CONTEXT)
    kinds = [SamplingKind(), SamplingKind(method="top_k")]
    kinds += [SamplingKind(masked=True), SamplingKind(ranked=True)]
    programs.prepare(
        programs.start,
        programs.take_checkpoint,
        programs.rewind,
        programs.fork,
        programs.read_block,
        programs.write_block,
        *(partial(programs.prefill, rows) for rows in programs.decode.chunks),
        *(partial(programs.cycles, kind, MAX_DEPTH) for kind in kinds),
    )
    return model


@pytest.fixture(scope="session")
def address(ready_model: oj.Model) -> Iterator[str]:
    with running(ready_model, agents=3) as address:
        yield address
