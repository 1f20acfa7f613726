"""The device side of a session: brought into line with a history by reading as little as it can.

Where to start from is the furthest of four: the live state, if the history only went on; the last
checkpoint before the history changed; a prefix that another session left; or nothing. Caches are
cut, never copied, except for blocks that come from the prefix cache.
"""

import copy
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from openjet_jax.checkpoint_store import CheckpointFacts, CheckpointStore, Kind, nbytes_of
from openjet_jax.config import MAX_DEPTH
from openjet_jax.conversation import Conversation
from openjet_jax.prefix_cache import GRAIN, Prefix, PrefixCache
from openjet_jax.state_checkpoints import StateCheckpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reuse:
    """What a reading kept and what it read; their sum is the length of the history.

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
    """Counts and bytes of a session.

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Where a reading starts.

    Attributes:
      kind: what it starts from.
      kept: tokens it need not read.
      common: tokens that the history shares with what the device holds.
      prefix: of the prefix cache, if it starts from one.
    """

    kind: Literal["live", "checkpoint", "prefix", "nothing"]
    kept: int
    common: int
    prefix: Prefix | None = None


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns how many leading ids are the same."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return int(np.argmax(np.asarray(a[:size]) != np.asarray(b[:size])))


class SessionMemory:
    """A conversation, its checkpoints, and the prefixes it shares.

    Attributes:
      conversation: the device side.
      checkpoints: of its text.
      reuse: what the last reading kept and read.
    """

    def __init__(
        self,
        conversation: Conversation,
        checkpoints: CheckpointStore,
        every: int,
        prefixes: PrefixCache | None,
        root: bytes,
        marks: Collection[int],
    ):
        """Takes an empty conversation.

        Args:
          conversation: where to read.
          checkpoints: where to keep checkpoints.
          every: most positions between two of them.
          prefixes: shared with other sessions, or None.
          root: where the chains of this session's prefixes begin.
          marks: ids that begin and end turns.
        """
        self.conversation, self.checkpoints, self.reuse = conversation, checkpoints, Reuse()
        self._every, self._prefixes, self._root = every, prefixes, root
        self._marks = marks
        self._taken = 0
        # No dispatch may run past where two checkpoints are due.
        most = max(1, every // (MAX_DEPTH + 1))
        conversation.longest_dispatch = min(conversation.longest_dispatch, most)

    def check_room(self, count: int) -> None:
        """Raises ValueError unless a history of `count` tokens fits the context."""
        context = self.conversation.decode.context
        if count > context:
            raise ValueError(
                f"{count} tokens do not fit {context=}; shorten the history, or start a session "
                "with a larger context"
            )

    def source(self, ids: list[int]) -> Source:
        """Returns where reading this history would start; changes nothing."""
        known = self.conversation.ids
        common, most = common_length(known, ids), len(ids) - 1
        best = Source(kind="nothing", kept=0, common=common)
        at = self.checkpoints.position_before(min(common, most))
        if at:
            best = Source(kind="checkpoint", kept=at, common=common)
        if known and common == len(known):
            best = Source(kind="live", kept=common, common=common)
        if self._prefixes is not None and best.kept < most:
            prefix = self._prefixes.find(self._root, ids, most)
            # A few tokens are read faster than a prefix is copied.
            if prefix is not None and prefix.position >= best.kept + GRAIN:
                at = prefix.position
                best = Source(kind="prefix", kept=at, common=common, prefix=prefix)
        return best

    def reading(self, ids: list[int]) -> Iterator[None]:
        """Brings the device into line with a history, yielding after each dispatch of reading.

        Args:
          ids: the history, at least one token, within the context.
        """
        self.mend()
        conversation, source = self.conversation, self.source(ids)
        shared = source.kept if source.kind == "prefix" else 0
        self._start_from(source, ids)
        self.reuse = Reuse(reused=source.kept, read=len(ids) - source.kept, shared=shared)
        # What was read ahead for the same answer was not reused.
        stats = conversation.stats
        stats.reused_tokens = max(0, source.kept - stats.prompt_tokens)
        new, parting = ids[len(conversation.ids) :], self._parting(source, ids)
        if new and source.kind == "live":
            self._take("turn")
        borders = {parting, *self._borders(source, ids)}
        for _ in conversation.reading(new, borders) if new else ():
            if conversation.length == parting:
                self.publish()
            if conversation.length in borders:
                self._take("interval")
            yield
        if new or source.kind != "live":
            self._take("prompt")

    def after_burst(self) -> None:
        """Takes a checkpoint if the next dispatch might run past where one is due."""
        most = self.conversation.longest_dispatch * (MAX_DEPTH + 1)
        if self.conversation.length + most > self._taken + self._every:
            self._take("interval")

    def publish(self) -> None:
        """Puts what was read so far into the prefix cache, if there is one."""
        if self._prefixes is None or not self.conversation.length:
            return
        conversation = self.conversation
        ids, checkpoint = conversation.ids[: conversation.length], conversation.checkpoint()
        self._prefixes.put(self._root, ids, checkpoint, conversation.read_block)

    def remember(self, checkpoints: Iterable[tuple[int, Kind, StateCheckpoint]]) -> None:
        """Takes in checkpoints of the text that the conversation was given."""
        for checkpoint in checkpoints:
            self.checkpoints.put(*checkpoint)
        self._taken = max(self.checkpoints.positions, default=0)

    def mend(self) -> None:
        """Forgets everything if a dispatch that failed left host and device apart."""
        if not self.conversation.sound:
            self._forget()

    def fork(self) -> "SessionMemory":
        """Returns a second memory of the same text; checkpoints and prefixes are shared."""
        twin = copy.copy(self)
        twin.conversation, twin.checkpoints = self.conversation.fork(), self.checkpoints.fork()
        return twin

    def facts(self, ids: list[int]) -> SessionFacts:
        """Returns counts and bytes for a history."""
        return SessionFacts(
            tokens=len(ids),
            unread=len(ids) - (self.source(ids).kept if ids else 0),
            context=self.conversation.decode.context,
            checkpoints=self.checkpoints.facts,
            state_bytes=nbytes_of(self.conversation.state),
        )

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.conversation.closed

    def close(self) -> None:
        """Frees the device's memory and the checkpoints."""
        self.conversation.close()
        self.checkpoints.drop_after(-1)

    def _start_from(self, source: Source, ids: list[int]) -> None:
        """Puts the device where reading starts, and drops the checkpoints of text that is gone.

        Those go first: whatever interrupts the rest, no checkpoint of another text is left.
        """
        conversation, at = self.conversation, source.kept
        if source.kind == "live":
            return
        if source.kind == "nothing":
            if conversation.ids:
                self._forget()
            return
        if source.prefix is not None:
            assert self._prefixes is not None
            self._prefixes.use(source.prefix)
            conversation.ids = []  # whatever interrupts the writing leaves an unsound conversation
            self.checkpoints.drop_after(min(source.common, at))
            for index, block in enumerate(source.prefix.blocks):
                conversation.write_block(block, index)
            conversation.rewind(source.prefix.checkpoint, ids[: at + 1])
            conversation.hold_tokens()
            self.checkpoints.put(at, "interval", source.prefix.checkpoint)
        else:
            checkpoint = self.checkpoints.use(at)
            self.checkpoints.drop_after(at)
            conversation.rewind(checkpoint, ids[: at + 1])
        self._taken = at
        conversation.stats.prompt_tokens += 1  # the newest token goes through the model once more

    def _forget(self) -> None:
        self.checkpoints.drop_after(-1)
        self._taken = 0
        self.conversation.reset()

    def _borders(self, source: Source, ids: list[int]) -> list[int]:
        """Returns where to take checkpoints on the way.

        At intervals; where an edit began; and before the last mark, where the model's own turn
        begins: many templates drop what that turn thought once it is history.
        """
        borders = list(range(self._taken + self._every, len(ids), self._every))
        if source.kind == "checkpoint":
            borders.append(source.common)
        marked = (at for at in range(len(ids) - 1, source.kept, -1) if ids[at] in self._marks)
        return borders + list(itertools.islice(marked, 1))

    def _parting(self, source: Source, ids: list[int]) -> int:
        """Returns where a new text parts from an earlier one, 0 where none does or it is known."""
        if self._prefixes is None:
            return 0
        parting = self._prefixes.parting(self._root, ids)
        fresh = source.kind in ("nothing", "prefix")
        return parting if fresh and source.kept < parting < len(ids) - 1 else 0

    def _take(self, kind: Kind) -> None:
        """Takes a checkpoint of the current position, unless there is one."""
        position = self.conversation.length
        self._taken = position
        if position and position not in self.checkpoints.positions:
            self.checkpoints.put(position, kind, self.conversation.checkpoint())
