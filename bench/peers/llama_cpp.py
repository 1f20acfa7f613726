"""llama.cpp beside us: a `llama-server` driven over HTTP, on the same file and the same tokens.

    python -m bench.peers.llama_cpp MODEL.gguf [--server llama-server] [--depth 4] [--context 64]

The server is one on PATH, a path, or the address of one that runs. Times are those it reports of
itself, without HTTP. To build one for a CUDA GPU, in a folder of its own:

    pip download --no-deps --no-binary :all: llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DGGML_CUDA=ON -DCMAKE_BUILD_TYPE=Release
    cmake --build build --target llama-server -j
"""

import argparse
import contextlib
import dataclasses
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

READY_S, ANSWER_S = 600.0, 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What one completion took, as the server counts.

    Attributes:
      token_ids: generated ids; empty where the server does not return them.
      prompt_tokens, prompt_s: read.
      new_tokens, decode_s: generated.
      drafted, accepted: drafts; 0 without speculation.
    """

    token_ids: list[int]
    prompt_tokens: int
    prompt_s: float
    new_tokens: int
    decode_s: float
    drafted: int
    accepted: int

    @property
    def decode_rate(self) -> float:
        """Generated tokens a second."""
        return self.new_tokens / self.decode_s

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prompt_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaServer:
    """A server that answers.

    Attributes:
      url: its address.
      version: what the program says of itself; None for one that ran already.
      flags: what it was started with.
    """

    url: str
    version: str | None = None
    flags: tuple[str, ...] = ()

    def complete(self, prompt: Sequence[int], new_tokens: int) -> Answer:
        """Returns a greedy completion of token ids, read from nothing and past every stop.

        Raises:
          RuntimeError: the server refuses, or its answer lacks the times.
        """
        body = {
            "prompt": list(prompt),
            "n_predict": new_tokens,
            "temperature": 0.0,
            "cache_prompt": False,
            "ignore_eos": True,
            "return_tokens": True,
        }
        answer = self._request("/completion", body)
        try:
            times = answer["timings"]
            return Answer(
                token_ids=list(answer.get("tokens") or []),
                prompt_tokens=times["prompt_n"],
                prompt_s=times["prompt_ms"] / 1e3,
                new_tokens=times["predicted_n"],
                decode_s=times["predicted_ms"] / 1e3,
                drafted=times.get("draft_n", 0),
                accepted=times.get("draft_n_accepted", 0),
            )
        except (KeyError, TypeError) as error:
            raise RuntimeError(f"{self.url}: the answer has no times: {error!r}") from None

    def ready(self) -> bool:
        """Returns whether the model is loaded."""
        try:
            return self._request("/health").get("status") == "ok"
        except RuntimeError:
            return False

    def facts(self) -> dict[str, Any]:
        """Returns what is recorded of it."""
        build = self._request("/props").get("build_info")
        return {"version": self.version, "build": build, "flags": list(self.flags)}

    def _request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace")
            raise RuntimeError(f"{self.url}{path}: {error.code}: {reason:.300}") from None
        except (OSError, ValueError) as error:
            raise RuntimeError(f"{self.url}{path}: {error}") from None


def flags_for(model: str, context: int, depth: int, kv: str) -> tuple[str, ...]:
    """Returns the flags of a fair run: all on the GPU, flash attention, one conversation.

    Args:
      model: the .gguf file.
      context: positions.
      depth: drafts of the MTP block; 0 for none.
      kv: format of the cache, such as q8_0 or f16.
    """
    flags = ["-m", model, "-c", str(context), "-np", "1", "-ngl", "999", "-fa", "on"]
    flags += ["-ctk", kv, "-ctv", kv]
    if depth:
        # Every cycle drafts as many, however unsure the drafter is: as ours do.
        flags += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(depth)]
        flags += ["--spec-draft-p-min", "0"]
    return tuple(flags)


@contextlib.contextmanager
def running(server: str, flags: Sequence[str]) -> Iterator[LlamaServer]:
    """Yields a server that is ready, and stops it afterwards if it was started here.

    Args:
      server: a program's name or path, or the address of a server that runs (the flags are then its
        own affair).
      flags: of the program.

    Raises:
      RuntimeError: there is no such program, or it ends or is not ready in time; its last words are
        shown.
    """
    if server.startswith("http"):
        yield LlamaServer(url=server.rstrip("/"))
        return
    program = shutil.which(server)
    if program is None:
        raise RuntimeError(f"{server}: no such program; give a path or an address")
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    version = " ".join((said.stdout + said.stderr).split())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        command = [program, *flags, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        there = LlamaServer(url=f"http://127.0.0.1:{port}", version=version, flags=tuple(flags))
        try:
            deadline = time.monotonic() + READY_S
            while not there.ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{program} is not ready: ...{log.read()[-1000:]}")
                time.sleep(0.2)
            yield there
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main() -> None:
    """Prints what one completion takes."""
    parser = argparse.ArgumentParser(description="Time llama.cpp on a file.")
    parser.add_argument("model")
    parser.add_argument("--server", default="llama-server")
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--kv", default="q8_0")
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    room = args.context + args.tokens + 64
    with running(args.server, flags_for(args.model, room, args.depth, args.kv)) as server:
        print(json.dumps(server.facts()))
        prompt = [index % 200 for index in range(args.context)]
        for _ in range(3):
            answer = server.complete(prompt, args.tokens)
            print(f"{answer.decode_rate:.1f} tok/s, prefill {answer.prefill_rate:.0f} tok/s")


if __name__ == "__main__":
    main()
