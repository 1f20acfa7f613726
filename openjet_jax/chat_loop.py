"""`openjet-jax chat`: one conversation in a terminal, turn after turn.

A turn reads only what the template adds to the tokens already there; where the template rewrites
history (reasoning of earlier turns is dropped, say), the conversation is read again and the line
under the answer says so.
"""

import sys

from openjet_jax.conversation import Conversation
from openjet_jax.engine import programs_for, stream
from openjet_jax.loading import Model


def chat_loop(model: Model, system: str | None, settings: dict) -> None:
    """Talks until end of input; an interrupt stops the answer, a second one the loop.

    Args:
      model: from `load`.
      system: system message, or None.
      settings: arguments of `stream`.
    """
    messages: list[dict] = [{"role": "system", "content": system}] if system else []
    options = settings.pop("template_options", None) or {}
    programs = programs_for(model, settings.pop("context"), settings.pop("kv_dtype"))
    conversation = Conversation(model.weights, programs)
    print("Ctrl-D ends the conversation, Ctrl-C stops an answer.", file=sys.stderr)
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        ids = model.render(messages, **options)
        known = len(conversation.ids)
        if conversation.ids != ids[:known]:
            conversation, known = Conversation(model.weights, programs), 0
        answer = _answer(model, conversation, ids[known:], settings)
        messages.append({"role": "assistant", "content": answer})


def _answer(model: Model, conversation: Conversation, ids: list[int], settings: dict) -> str:
    """Prints an answer as it comes and one line of figures; returns the answer."""
    answer, stats = "", None
    try:
        for piece in stream(model, ids, conversation=conversation, **settings):
            answer += piece.text
            stats = piece.stats
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print(f"\n\n[{stats}]\n", flush=True)
    return answer
