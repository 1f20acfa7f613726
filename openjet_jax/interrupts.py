"""Ctrl-C between two steps, never inside one."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """Holds an interrupt (SIGINT) back until the block is over.

    A program consumes the state it is given. An interrupt between its start and the host's account
    of its result would leave a state that nobody holds, or one that is ahead of the host. Python
    runs signal handlers in the main thread alone, so other threads need no such care.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held = []
    signal.signal(signal.SIGINT, lambda *interrupt: held.append(interrupt))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            before(*held[0])
