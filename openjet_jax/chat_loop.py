"""`openjet-jax chat`: one conversation in a terminal, turn after turn.

A turn reads only what the template adds to the tokens already there; where the template rewrites
history (it drops the reasoning of earlier turns, say), what it rewrote is read again: the line
under an answer says how many tokens were read.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

from openjet_jax.loading import Model
from openjet_jax.session import Session


def chat_loop(model: Model, system: str | None, settings: dict) -> None:
    """Talks until end of input; an interrupt stops the answer, a second one the loop.

    What a turn cannot be answered for (the context is full, say) is said and the turn taken back.

    Args:
      model: from `load`.
      system: system message, or None.
      settings: arguments of `stream`.

    Raises:
      ValueError: the model has no chat template, or a setting is off.
    """
    messages: list[dict] = [{"role": "system", "content": system}] if system else []
    options = settings.pop("template_options", None) or {}
    model.render([*messages, {"role": "user", "content": "Hello"}], **options)
    session = Session(model, context=settings.pop("context"), kv_dtype=settings.pop("kv_dtype"))
    typed = sys.stdin.isatty()
    if typed:
        print("Ctrl-D ends the conversation, Ctrl-C stops an answer.", file=sys.stderr)
    while True:
        try:
            text = input("> " if typed else "")
        except (EOFError, KeyboardInterrupt):
            if typed:
                print()
            return
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        try:
            session.converse(messages, **options)
            answer = _answer(session, settings)
        except ValueError as error:
            print(f"openjet-jax: {error}", file=sys.stderr)
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


def _answer(session: Session, settings: dict) -> str:
    """Prints an answer as it comes and one line of figures; returns the answer."""
    answer, stats = "", None
    with _deferred_interrupt() as interrupted:
        for piece in session.stream(**settings):
            answer, stats = answer + piece.text, piece.stats
            print(piece.text, end="", flush=True)
            if interrupted.is_set():
                print(" [stopped]", end="")
                break
    print(f"\n\n[{stats}]\n", flush=True)
    return answer


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Yields an event that the first interrupt sets; a second one raises KeyboardInterrupt.

    So the answer stops between two bursts, with every token shown that the history holds.
    """
    event = threading.Event()

    def note(signum, frame) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
