"""`chat` in a terminal of its own: it streams, stops at an interrupt, and goes on where it was."""

import contextlib
import io
import os
import pathlib
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from openjet_jax.cli import main

ROOT = pathlib.Path(__file__).parents[1]
INTERRUPT, END = b"\x03", b"\x04"

pytestmark = pytest.mark.xdist_group("tiny")


class Terminal:
    """What is typed into a program and what it shows, line ends and echo included."""

    def __init__(self, handle: int):
        self.handle = handle
        self.shown = b""

    def type(self, text: bytes) -> None:
        os.write(self.handle, text)

    def until(self, pattern: bytes, seconds: float = 120) -> bytes:
        """Returns what was shown up to a pattern, and takes it away."""
        limit = time.monotonic() + seconds
        while (found := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < limit, self.shown
            if select.select([self.handle], [], [], 1)[0]:
                self.shown += os.read(self.handle, 4096)
        part, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return part


@contextlib.contextmanager
def chat(*options: str) -> Iterator[tuple[Terminal, subprocess.Popen]]:
    """Runs `chat tiny` in a new terminal."""
    ours, theirs = pty.openpty()
    start = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    start += "from openjet_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    child = subprocess.Popen(
        [sys.executable, "-c", start, "chat", "tiny", *options],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    os.close(theirs)
    try:
        yield Terminal(ours), child
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def test_an_answer_streams_an_interrupt_ends_it_and_the_end_of_input_the_program():
    with chat("-n", "100000", "--ignore-eos", "--context", "256") as (terminal, child):
        terminal.until(b"> ")
        terminal.type(b"Write a parser.\n")
        terminal.until(rb"def \w")
        terminal.type(INTERRUPT)
        shown = terminal.until(rb"(\d+) generated at.*\r\n")
        assert b"[stopped]" in shown and int(re.findall(rb"(\d+) generated", shown)[0]) < 200
        terminal.until(b"> ")
        terminal.type(END)
        assert child.wait(60) == 0


def test_a_turn_reads_only_what_is_new_and_one_that_does_not_fit_is_taken_back(monkeypatch, capsys):
    turns = ["Write a function that adds.", "word " * 300, "Thanks."]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{turn}\n" for turn in turns)))
    system = "You are a helpful programmer and like short answers." * 3
    assert main(["chat", "tiny", "--system", system, "-n", "40", "--context", "256"]) == 0
    shown = capsys.readouterr()
    first, second = (int(n) for n in re.findall(r"(\d+) tokens read", shown.out))
    assert second < first / 2
    assert shown.err.count("tokens do not fit context=256") == 1
