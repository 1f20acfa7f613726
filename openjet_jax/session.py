"""A conversation that lasts: appended to, edited, forked, saved, and never read twice in vain.

A session is a history of token ids. Changing the history costs nothing; what the device holds is
brought into line with it when tokens are next read, from the nearest checkpoint on. So a turn reads
its new tokens, an edit what follows the checkpoint before it, and a stop string leaves the history
that was reported, however far the device ran past it.

    session = oj.Session(model)
    session.converse([{"role": "user", "content": "Hello"}])
    print(session.generate(max_new_tokens=200).text, session.reuse)
"""

import copy
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from openjet_jax.answers import AnswerSettings, Generation, Piece, answer, answer_settings, joined
from openjet_jax.checkpoint_store import CheckpointBudget, CheckpointStore
from openjet_jax.conversation import Conversation
from openjet_jax.dispatches import checked_ids, cycles_of
from openjet_jax.engine import Prompt, programs_for, prompt_ids
from openjet_jax.loading import Model
from openjet_jax.prefix_cache import PrefixCache, root_of
from openjet_jax.session_file import opened_session, save_session
from openjet_jax.session_memory import Reuse, SessionFacts, SessionMemory
from openjet_jax.stats import Stats
from openjet_jax.token_splice import spliced

CHECKPOINT_EVERY = 2048


class Session:
    """One conversation of one model. Not safe to use from two threads at once.

    Attributes:
      model: the model.
    """

    model: Model

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
        if checkpoint_every < 1:
            raise ValueError(f"{checkpoint_every=} must be at least 1; {CHECKPOINT_EVERY} is usual")
        if prefixes is not None and isolation_key is None:
            raise ValueError("prefixes are shared between sessions of one isolation_key; give it")
        self.model = model
        conversation = Conversation(model.weights, programs_for(model, context, kv_dtype))
        root = root_of(isolation_key or "", model.hash, conversation.decode.kv_dtype)
        marks = frozenset(model.tokenizer.control_tokens.values())
        store = CheckpointStore(budget or CheckpointBudget())
        self._memory = SessionMemory(conversation, store, checkpoint_every, prefixes, root, marks)
        self._ids: list[int] = []
        self._answer_start = 0
        self._open: Generator | None = None
        self._read_ahead = False  # whether the stats are of a reading that no answer followed yet

    @classmethod
    def restore(cls, model: Model, path: str | os.PathLike[str], **settings: Any) -> Self:
        """Returns a saved session; it goes on bit for bit as the saved one would have.

        Args:
          model: the model it was saved from.
          path: from `save`.
          **settings: of `__init__`; the cache format is the file's own, and so is the context if
            none is given.

        Raises:
          SessionFileError: the file is damaged, of another version or of another model, or does not
            fit the context. Nothing large is allocated before all of it is checked.
        """
        with opened_session(path, model) as file:
            context = settings.pop("context", None) or file.header.context
            file.check_context(context)
            kv_dtype = file.header.kv_dtype
            session = cls(model, context=context, kv_dtype=kv_dtype, **settings)
            file.load(session._memory)
        session._ids, session._answer_start = file.ids, file.header.answer_start
        return session

    @property
    def reuse(self) -> Reuse:
        """What the last reading kept and what it read."""
        return self._memory.reuse

    @property
    def ids(self) -> tuple[int, ...]:
        """The history."""
        return tuple(self._ids)

    @property
    def text(self) -> str:
        """The history as text, control tokens included."""
        return self.model.tokenizer.decode(self._ids, skip_special=False)

    def append(self, prompt: Prompt) -> int:
        """Adds text (control tokens in it are plain text) or token ids; returns how many tokens.

        Raises:
          ValueError: an id is outside the vocabulary, or the history would exceed the context;
            the history is then as before.
        """
        ids = prompt_ids(self.model, prompt)
        self._become([*self._ids, *ids])
        return len(ids)

    def replace(self, prompt: Prompt) -> None:
        """Makes the history this text or these ids; what it shares with the old stays read."""
        self._become(prompt_ids(self.model, prompt))

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
        ids = self.model.render(messages, **template_options)
        if keep_tokens:
            ids = spliced(self._ids, ids, self.model.tokenizer)
        self._become(ids)

    def truncate(self, length: int) -> None:
        """Cuts the history to its first `length` tokens.

        Raises:
          ValueError: it is negative or more than there are.
        """
        if not 0 <= length <= len(self._ids):
            raise ValueError(f"{length=} must be in 0..{len(self._ids)}, the tokens there are")
        self._become(self._ids[:length])

    def reusable(self, ids: Sequence[int] | np.ndarray) -> int:
        """Returns how many tokens `replace(ids)` would not have to read; changes nothing."""
        return self._memory.source(checked_ids(ids, self.model.config.vocab).tolist()).kept

    def read(self) -> Reuse:
        """Reads what is unread, and returns (also in `reuse`) what was kept and what was read."""
        for _ in self.reading():
            pass
        return self.reuse

    def reading(self) -> Iterator[int]:
        """Yields the tokens still unread after each dispatch of reading; closing it stops there."""
        self._begin()
        self._open = self._reading()
        return self._open

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
            `ignore_eos`, `cycles_per_dispatch`, `constraint`, `top_logprobs`,
            `deadline`.

        Raises:
          ValueError: the history is empty or full, or a setting is off.
        """
        checked = answer_settings(self.model, **settings)
        cycles_of(self._memory.conversation.decode, checked.cycles_per_dispatch)
        self._begin()
        self._memory.check_room(len(self._ids) + 1)
        self._open = self._answering(checked, continued, every_dispatch)
        return self._open

    def generate(self, *, continued: bool = False, **settings: Any) -> Generation:
        """Returns a whole answer at once; see `stream`."""
        return joined(self.stream(continued=continued, **settings))

    def fork(self) -> "Session":
        """Returns a session with the same history, in device memory of its own."""
        self._end_stream()
        self._memory.mend()
        twin = copy.copy(self)
        twin._memory, twin._ids = self._memory.fork(), list(self._ids)
        return twin

    def publish(self) -> None:
        """Puts what was read so far into the prefix cache; without one, does nothing."""
        self._end_stream()
        self._memory.publish()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the session to a file, readable by its owner alone; a killed save leaves the old.

        Raises:
          OSError: the system refuses, or another process saves to this path.
        """
        self._end_stream()
        self._memory.mend()
        save_session(path, self.model, self._memory, self._ids, self._answer_start)

    def inspect(self) -> SessionFacts:
        """Returns counts and bytes."""
        return self._memory.facts(self._ids)

    def close(self) -> None:
        """Frees the device's memory and all checkpoints; the session can no longer be used."""
        self._end_stream()
        self._memory.close()

    def _become(self, ids: list[int]) -> None:
        """Makes ids the history. Of an answer stays what was not changed."""
        self._end_stream()
        self._memory.check_room(len(ids))
        cut = ids == self._ids[: len(ids)]
        self._answer_start = min(self._answer_start, len(ids)) if cut else len(ids)
        self._ids = ids

    def _begin(self) -> None:
        """Ends what is open and makes sure that there is something to read."""
        self._end_stream()
        if not self._ids:
            raise ValueError("the history is empty; append a prompt first")

    def _end_stream(self) -> None:
        if self._memory.closed:
            raise ValueError("the session is closed; start or restore another")
        if self._open is not None:
            self._open.close()
            self._open = None

    def _reading(self) -> Generator[int]:
        conversation = self._memory.conversation
        self._start_stats()
        self._read_ahead = True
        for _ in self._memory.reading(self._ids):
            yield len(self._ids) - len(conversation.ids)

    def _start_stats(self) -> Stats:
        """Returns the stats of the answer to come: what was read ahead for it counts."""
        conversation = self._memory.conversation
        if not self._read_ahead:
            conversation.stats = Stats()
        return conversation.stats

    def _answering(
        self, settings: AnswerSettings, continued: bool, every_dispatch: bool
    ) -> Generator[Piece]:
        conversation = self._memory.conversation
        stats = self._start_stats()
        self._read_ahead = False
        kind, depth = settings.kind, settings.depth.max_depth
        conversation.prepare(partial(conversation.programs.cycles, kind, depth))
        for _ in self._memory.reading(self._ids):
            if every_dispatch:
                yield Piece.of_reading(stats)
        self._answer_start = self._answer_start if continued else len(self._ids)
        for piece in answer(self.model, conversation, settings, self._answer_start):
            self._ids += piece.token_ids
            if piece.finish_reason is None:
                self._memory.after_burst()
            yield piece
