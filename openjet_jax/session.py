"""A conversation that lasts: appended to, edited, forked, saved, and never read twice in vain.

A session is a history of token ids. Changing the history costs nothing; what the device holds is
brought into line with it when tokens are next read, from the nearest checkpoint on. So a turn reads
its new tokens, an edit what follows the checkpoint before it, and a stop string leaves the history
that was reported, however far the device ran past it.

    session = oj.Session(model)
    session.converse([{"role": "user", "content": "Hello"}])
    print(session.generate(max_new_tokens=200).text, session.reuse)
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from openjet_jax.checkpoint_store import CheckpointBudget, CheckpointFacts
from openjet_jax.engine import Generation, Piece, Prompt
from openjet_jax.loading import Model
from openjet_jax.prefix_cache import PrefixCache

CHECKPOINT_EVERY = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reuse:
    """What the last reading kept and what it read; their sum is the length of the history.

    Attributes:
      reused: tokens that were not read again, wherever they came from.
      read: tokens that were read.
      shared: of the reused ones, those that came from the prefix cache.
    """

    reused: int = 0
    read: int = 0
    shared: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionFacts:
    """What `Session.inspect` returns.

    Attributes:
      tokens: length of the history.
      unread: tokens that the device would have to read before it could answer.
      context: most tokens the history can have.
      checkpoints: in order of position.
      state_bytes: caches and state on the device, without checkpoints.
    """

    tokens: int
    unread: int
    context: int
    checkpoints: tuple[CheckpointFacts, ...]
    state_bytes: int


class Session:
    """One conversation of one model. Not safe to use from two threads at once.

    Attributes:
      model: the model.
      reuse: what the last reading kept and read.
    """

    model: Model
    reuse: Reuse

    def __init__(
        self,
        model: Model,
        *,
        context: int | None = None,
        kv_dtype: str | None = None,
        checkpoint_every: int = CHECKPOINT_EVERY,
        budget: CheckpointBudget | None = None,
        prefixes: PrefixCache | None = None,
        isolation_key: str | None = None,
    ):
        """Starts an empty session.

        Args:
          model: from `load`.
          context: most positions, as in `stream`.
          kv_dtype: format of the key-value cache, as in `stream`.
          checkpoint_every: most positions between two checkpoints of the recurrent state.
          budget: bytes that checkpoints may take on the device and in host memory.
          prefixes: prefixes shared with other sessions; None shares nothing.
          isolation_key: only sessions of the same key share prefixes; needed with `prefixes`.

        Raises:
          ValueError: a setting is off; the message names it, its limit and the way out.
        """
        raise NotImplementedError

    @classmethod
    def restore(cls, model: Model, path: str | os.PathLike[str], **settings: Any) -> Self:
        """Returns a saved session; it goes on bit for bit as the saved one would have.

        Args:
          model: the model it was saved from.
          path: from `save`.
          **settings: of `__init__`; the cache format is the file's own.

        Raises:
          SessionFileError: the file is damaged, of another version or of another model, or does not
            fit the context. Nothing large is allocated before all of it is checked.
        """
        raise NotImplementedError

    @property
    def ids(self) -> tuple[int, ...]:
        """The history."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        """The history as text, control tokens included."""
        raise NotImplementedError

    def append(self, prompt: Prompt) -> int:
        """Adds text (control tokens in it are plain text) or token ids; returns how many tokens.

        Raises:
          ValueError: an id is outside the vocabulary, or the history would exceed the context;
            the history is then as before.
        """
        raise NotImplementedError

    def replace(self, prompt: Prompt) -> None:
        """Makes the history exactly this text or these ids; what it shares with the old is kept.

        Raises:
          ValueError: as `append`.
        """
        raise NotImplementedError

    def converse(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        keep_tokens: bool = True,
        **template_options: Any,
    ) -> None:
        """Makes the history the prompt of a whole conversation, by the model's chat template.

        Args:
          messages: every turn from the first, as the template takes them.
          keep_tokens: where earlier turns have the same text, their tokens stay as the model
            generated them, though the tokenizer would cut the text otherwise, so that they need
            not be read again. False makes the history a function of the messages alone.
          **template_options: `tools`, `enable_thinking`, `reasoning_effort`, ...

        Raises:
          ChatError: the template refuses the conversation.
          ValueError: no template, or the context is exceeded.
        """
        raise NotImplementedError

    def truncate(self, length: int) -> None:
        """Cuts the history to its first `length` tokens.

        Raises:
          ValueError: it is negative or more than there are.
        """
        raise NotImplementedError

    def reusable(self, ids: Sequence[int] | np.ndarray) -> int:
        """Returns how many tokens `replace(ids)` would not read again; changes nothing.

        The prefix cache is looked at too, under this session's key alone.
        """
        raise NotImplementedError

    def read(self) -> Reuse:
        """Reads what is unread, and returns (also in `reuse`) what was kept and what was read.

        Raises:
          ValueError: the history is empty.
        """
        raise NotImplementedError

    def reading(self) -> Iterator[int]:
        """Yields the tokens still unread after each dispatch of reading; closing it stops there.

        Raises:
          ValueError: the history is empty.
        """
        raise NotImplementedError

    def stream(
        self, *, continued: bool = False, every_dispatch: bool = False, **settings: Any
    ) -> Iterator[Piece]:
        """Reads what is unread, then yields an answer as it is generated; it joins the history.

        After each piece the history holds exactly the tokens of the pieces so far. Closing the
        iterator ends the answer there, and so does anything else done with the session.

        Args:
          continued: goes on with the last answer: penalties count its tokens as output, so that
            the text is that of one longer answer. Otherwise they are prompt.
          every_dispatch: also yields a piece without tokens after every dispatch of reading, so
            that a scheduler gets the device back between two of them.
          **settings: of `stream`: `max_new_tokens`, `sampling`, `depth`, `stop`, `stop_ids`,
            `ignore_eos`, `cycles_per_dispatch`.

        Raises:
          ValueError: the history is empty or full, or a setting is off.
        """
        raise NotImplementedError

    def generate(self, *, continued: bool = False, **settings: Any) -> Generation:
        """Returns a whole answer at once; see `stream`."""
        raise NotImplementedError

    def fork(self) -> "Session":
        """Returns a session with the same history; neither sees what the other does next.

        Caches and state are copied on the device; checkpoints, which never change, are shared.
        """
        raise NotImplementedError

    def publish(self) -> None:
        """Puts what was read so far into the prefix cache; without one, does nothing."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the session to a file, readable by its owner alone; the old file stays until then.

        Raises:
          OSError: the system refuses, the disk is full, or another process saves to this path.
        """
        raise NotImplementedError

    def inspect(self) -> SessionFacts:
        """Returns counts and bytes."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees the device's memory and all checkpoints; the session can no longer be used."""
        raise NotImplementedError
