"""Ctrl-C at any line of the host's loops leaves a session that goes on as if it had not come."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
from sessions import answer, fresh, session, text

import openjet_jax as oj
from openjet_jax import checkpoint_store, conversation, session_memory
from openjet_jax.interrupts import undivided

FILES = {str(module.__file__) for module in (checkpoint_store, conversation, session_memory)}


type Place = tuple[str, int]


@contextlib.contextmanager
def interrupt_at(place: Place | None) -> Iterator[set[Place]]:
    """Sends SIGINT once, before a line of `FILES` first runs; yields the lines that ran."""
    seen: set[Place] = set()

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in FILES:
            return None
        here = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and here not in seen:
            seen.add(here)
            if here == place:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)


def edited_and_answered(ours: oj.Session, ids: list[int]) -> None:
    ours.replace(ids)
    answer(ours, 6)


def test_an_interrupt_at_any_line_leaves_host_and_device_in_step():
    base, new = session(), [*text(50), *text(40, seed=1)]
    base.append(text(80))
    answer(base, 6)
    whole = base.fork()
    with interrupt_at(None) as seen:
        edited_and_answered(whole, new)
    expected = fresh(new, 6)
    assert len(seen) > 100
    for number, place in enumerate(sorted(seen)):
        ours = base.fork()
        with pytest.raises(KeyboardInterrupt), interrupt_at(place):
            edited_and_answered(ours, new)
        assert ours._memory.conversation.sound, place
        if number % 8 == 0:
            ours.replace(new)
            assert answer(ours, 6) == expected, place
            assert ours.reuse.reused >= 32, place
        ours.close()


def test_an_undivided_block_ends_before_its_interrupt():
    steps = []
    with pytest.raises(KeyboardInterrupt), undivided(), undivided():
        signal.raise_signal(signal.SIGINT)
        steps.append("after the signal")
    assert steps and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_and_ignored_interrupts_are_left_alone():
    handlers = []

    def observe():
        with undivided():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=observe)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        observe()
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [before, signal.SIG_IGN]
