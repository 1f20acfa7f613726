"""Drives headless Chromium over its debugging pipe: enough to click, read and take pictures."""

import base64
import contextlib
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Iterator

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One page; commands are JSON between NUL bytes."""

    def __init__(self, commands: int, replies: int):
        self._commands, self._replies = commands, os.fdopen(replies, "rb")
        self._numbers, self._session = itertools.count(1), None
        self.requests: list[str] = []
        self.failures: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        os.close(self._commands)
        self._replies.close()

    def call(self, method: str, **params):
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == number:
                assert "error" not in reply, reply
                return reply["result"]
            if reply.get("method") == "Network.requestWillBeSent":
                self.requests.append(reply["params"]["request"]["url"])
            if reply.get("method") == "Runtime.exceptionThrown":
                self.failures.append(str(reply["params"]["exceptionDetails"]))

    def _read(self) -> dict:
        message = bytearray()
        while (byte := self._replies.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            message += byte
        return json.loads(message)

    def evaluate(self, expression: str):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60):
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression} did not become true"
            time.sleep(0.1)
        return value

    def screenshot(self, path: pathlib.Path) -> bytes:
        data = base64.b64decode(self.call("Page.captureScreenshot")["data"])
        path.write_bytes(data)
        return data


@contextlib.contextmanager
def opened(profile: pathlib.Path) -> Iterator[Page]:
    """Starts Chromium with a profile of its own."""
    assert CHROMIUM is not None
    from_us, commands = os.pipe()
    replies, to_us = os.pipe()
    # The browser finds its pipe at descriptors 3 and 4.
    shell = f'exec "$@" 3<&{from_us} 4>&{to_us}'
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    options += [f"--user-data-dir={profile}", "--window-size=1000,800", "--disable-dev-shm-usage"]
    process = subprocess.Popen(
        ["bash", "-c", shell, "chromium", CHROMIUM, *options],
        pass_fds=(from_us, to_us),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(from_us)
    os.close(to_us)
    with contextlib.ExitStack() as stack:
        stack.callback(process.wait, 20)
        stack.callback(process.terminate)
        page = Page(commands, replies)
        stack.callback(page.close)
        yield page
