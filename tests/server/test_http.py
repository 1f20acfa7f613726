"""Keys, hosts, sizes, and errors in OpenAI's form, over real sockets."""

import http.client
import json
import socket
import time
import urllib.parse
from typing import Any

import pytest

from bench.serving import server
from openjet_jax.server import app
from openjet_jax.server.config import ServerConfig
from openjet_jax.server.security import key_scope
from tests.server.conftest import CONTEXT, running

KEYS = ("first-key-1", "second-key-2")
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
JSON = {"Content-Type": "application/json"}


def ask(address, method, path, body=None, headers=JSON):
    where = urllib.parse.urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=300)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, data, dict(headers))
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    media = reply.headers.get_content_type()
    value: Any = json.loads(text) if media == "application/json" else text
    return reply.status, value


@pytest.fixture(scope="module")
def locked(ready_model):
    with running(ready_model, agents=2, api_keys=KEYS, max_body_bytes=2048) as address:
        yield address


@pytest.mark.parametrize(
    "method, path, body, headers, status",
    [
        ("GET", "/nowhere", None, JSON, 404),
        ("GET", "/v1/chat/completions", None, JSON, 405),
        ("POST", "/v1/chat/completions", b"{", JSON, 400),
        ("POST", "/v1/chat/completions", b"[" * 100_000, JSON, 400),
        ("POST", "/v1/chat/completions", b"\xff", JSON, 400),
        ("POST", "/v1/chat/completions", b"[]", JSON, 400),
        ("POST", "/v1/chat/completions", CHAT | {"messages": []}, JSON, 400),
        ("POST", "/v1/chat/completions", CHAT | {"model": "\ud800"}, JSON, 400),
        ("POST", "/v1/chat/completions", CHAT, {"Content-Type": "text/plain"}, 415),
        ("GET", "/v1/models", None, {"Host": "evil.example"}, 403),
        ("GET", "/v1/models", None, {"X-Long": "x" * 20_000}, 431),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "a", "seed": NaN}', JSON, 400),
    ],
)
def test_bad_requests_get_errors_and_no_failure(address, method, path, body, headers, status):
    answer, value = ask(address, method, path, body, headers)
    assert answer == status
    if isinstance(value, dict):
        assert set(value["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "message, param",
    [
        ({"role": "user", "content": "a", "name": "b"}, "messages[0].name"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "alien", "content": "a"}, "messages[0]"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "tool", "content": "a", "tool_call_id": "x"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "\ud800"}, "messages[0].content"),
    ],
)
def test_an_error_names_the_field(address, message, param):
    status, value = ask(address, "POST", "/v1/chat/completions", CHAT | {"messages": [message]})
    assert status == 400 and value["error"]["param"] == param


def test_a_broken_call_in_the_history_does_not_end_the_conversation(address):
    broken = {"name": "f", "arguments": '{"a": '}
    call = {"id": "c1", "type": "function", "function": broken}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "bad arguments"},
    ]
    status, _ = ask(address, "POST", "/v1/chat/completions", CHAT | {"messages": messages})
    assert status == 200


def test_a_prompt_beyond_the_context_is_refused(address):
    body = {"model": "tiny", "prompt": [1] * 1024}
    status, value = ask(address, "POST", "/v1/completions", body)
    assert status == 400 and value["error"]["code"] == "context_length_exceeded"


def test_without_a_key_there_is_no_answer(locked):
    for headers in ({}, {"Authorization": "Bearer wrong-key-3"}, {"Authorization": KEYS[0]}):
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            status, value = ask(locked, "GET", path, headers=headers)
            assert status == 401 and "key" in value["error"]["message"]
    assert ask(locked, "GET", "/health")[0] == 200


def test_a_body_beyond_the_limit_is_refused(locked):
    headers = JSON | {"Authorization": f"Bearer {KEYS[0]}"}
    status, _ = ask(locked, "POST", "/v1/completions", b" " * 4000, headers)
    assert status == 413


def test_a_body_that_does_not_arrive_is_given_up(locked, monkeypatch):
    monkeypatch.setattr(app, "MAX_BODY_S", 0.2)
    where = urllib.parse.urlsplit(locked)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Length: 9\r\n"
    head += f"Content-Type: application/json\r\nAuthorization: Bearer {KEYS[0]}\r\n\r\n{{"
    with socket.create_connection((where.hostname, where.port), timeout=60) as client:
        client.sendall(head.encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_two_keys_share_no_prefix(locked):
    body = CHAT | {"messages": [{"role": "user", "content": "The same secret text. " * 8}]}

    def cached(key):
        headers = JSON | {"Authorization": f"Bearer {key}"}
        status, value = ask(locked, "POST", "/v1/chat/completions", body, headers)
        assert status == 200
        found = value["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert value["timings"]["prompt_n"] == value["usage"]["prompt_tokens"] - found
        # The last token of a prompt goes through the first cycle: alone it takes no reading.
        assert (value["timings"]["prompt_ms"] > 0) == (value["timings"]["prompt_n"] > 1)
        return found

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) > 0
    assert cached(KEYS[1]) == 0


def test_a_client_that_leaves_frees_its_place(address):
    where = urllib.parse.urlsplit(address)

    def states():
        lines = ask(address, "GET", "/metrics")[1].decode().splitlines()
        return {
            line.split('"')[1]: float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith("openjet_conversations{")
        }

    for stream in (True, False):
        body = json.dumps(CHAT | {"stream": stream, "max_tokens": 900, "temperature": 2}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {where.netloc}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((where.hostname, where.port), timeout=60) as client:
            client.sendall(head.encode() + body)
            deadline = time.monotonic() + 60
            while not states()["running"]:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        while states()["running"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_conversations_outlive_the_server_under_their_key_alone(ready_model, tmp_path):
    body = CHAT | {"messages": [{"role": "user", "content": "Remember this text. " * 4}]}

    def cached(address, key):
        headers = JSON | {"Authorization": f"Bearer {key}"}
        _, value = ask(address, "POST", "/v1/chat/completions", body, headers)
        return value["usage"]["prompt_tokens_details"]["cached_tokens"]

    with running(ready_model, agents=2, api_keys=KEYS, session_dir=tmp_path) as address:
        assert cached(address, KEYS[0]) == 0
    assert len(list(tmp_path.iterdir())) == 1
    with running(ready_model, agents=2, api_keys=KEYS, session_dir=tmp_path) as address:
        assert cached(address, KEYS[1]) == 0
        assert cached(address, KEYS[0]) > 0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_conversation_outlives_the_process(ready_model, tmp_path):
    """A server in a process of its own, ended by SIGTERM and started again."""
    body = CHAT | {"temperature": 0, "max_tokens": 12}
    asked = [{"role": "user", "content": "Write a function. " * 8}]
    options = ("--context", str(CONTEXT), "--agents", "2", "--session-dir", str(tmp_path))
    with server(*options) as (address, _):
        status, value = ask(address, "POST", "/v1/chat/completions", body | {"messages": asked})
        assert status == 200
    said = {"role": "assistant", "content": value["choices"][0]["message"]["content"]}
    more = [*asked, said, {"role": "user", "content": "Shorter."}]
    with server(*options) as (address, _):
        _, restarted = ask(address, "POST", "/v1/chat/completions", body | {"messages": more})
    with running(ready_model, agents=1) as address:
        _, fresh = ask(address, "POST", "/v1/chat/completions", body | {"messages": more})
    known = value["usage"]["prompt_tokens"]
    assert restarted["usage"]["prompt_tokens_details"]["cached_tokens"] >= known
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert restarted["choices"][0]["message"] == fresh["choices"][0]["message"]


def test_a_request_ends_when_its_time_is_over(ready_model):
    with running(ready_model, agents=2, request_timeout_s=1.5) as address:
        # Greedy text of a small model repeats itself and does not stop.
        prompt = 'def factorial(n):\n    """Return n!."""\n'
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 900, "temperature": 0}
        start = time.monotonic()
        status, value = ask(address, "POST", "/v1/completions", body)
        assert status == 200 and 1.4 < time.monotonic() - start < 15
        assert value["choices"][0]["finish_reason"] == "length" and value["timings"]["timed_out"]
        assert 0 < value["usage"]["completion_tokens"] < 900
    with running(ready_model, agents=2, request_timeout_s=0.001) as address:
        status, value = ask(address, "POST", "/v1/chat/completions", CHAT)
        assert status == 503 and value["error"]["code"] == "request_timeout"


def test_keys_are_compared_whole():
    assert key_scope(KEYS, f"Bearer {KEYS[1]}") == key_scope(KEYS, f"bearer {KEYS[1]}") != None  # noqa: E711
    for given in (None, "", "Bearer", "Bearer ", KEYS[0], f"Basic {KEYS[0]}", "Bearer é"):
        assert key_scope(KEYS, given) is None


@pytest.mark.parametrize(
    "options",
    [
        {"host": "0.0.0.0"},
        {"agents": 9},
        {"agents": 0},
        {"api_keys": ("short",)},
        {"depth": "7"},
        {"request_timeout_s": 0},
        {"port": 70_000},
    ],
)
def test_a_setup_that_cannot_be_meant_is_refused(options):
    with pytest.raises(ValueError):
        ServerConfig(**options)
