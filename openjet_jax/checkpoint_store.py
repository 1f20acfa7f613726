"""Checkpoints of one session's recurrent state: where they are, and which go when room is short.

What a checkpoint is worth is what it spares: the tokens from the checkpoint before it, which would
have to be read again without it, and the less the longer ago it was made or used. The checkpoint
worth least moves to host memory first, and goes first from there. One that goes makes the next one
worth more, so a long history is thinned out evenly, and most where it is oldest.
"""

import copy
import dataclasses
from typing import Literal

import jax

from openjet_jax.state_checkpoints import StateCheckpoint

type Kind = Literal["prompt", "turn", "interval"]

KINDS = ("prompt", "turn", "interval")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointBudget:
    """Bytes that the checkpoints of one session may take.

    Attributes:
      device_bytes: on the device; what does not fit moves to host memory.
      host_bytes: in host memory; what does not fit is dropped.
    """

    device_bytes: int = 512 << 20
    host_bytes: int = 4 << 30

    def __post_init__(self):
        """Raises ValueError naming a negative size."""
        for name in ("device_bytes", "host_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """One checkpoint.

    Attributes:
      position: tokens whose effect it holds.
      kind: where it was taken: at the end of a prompt or a turn, or in between.
      place: where it is kept.
      nbytes: its size.
    """

    position: int
    kind: Kind
    place: Literal["device", "host"]
    nbytes: int


@dataclasses.dataclass(kw_only=True)
class _Kept:
    """A checkpoint and when it was last made or used, on the store's own clock."""

    position: int
    kind: Kind
    checkpoint: StateCheckpoint
    on_device: bool
    used: int

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.checkpoint)


class CheckpointStore:
    """The checkpoints of one session within a budget.

    Attributes:
      budget: the most bytes.
    """

    def __init__(self, budget: CheckpointBudget):
        """Starts empty."""
        self.budget = budget
        self._kept: list[_Kept] = []
        self._clock = 0

    def put(self, position: int, kind: Kind, checkpoint: StateCheckpoint) -> None:
        """Keeps a checkpoint in place of any other of its position, and makes room for it."""
        self._kept = [kept for kept in self._kept if kept.position != position]
        self._clock += 1
        on_device = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(checkpoint))
        kept = _Kept(
            position=position,
            kind=kind,
            checkpoint=checkpoint,
            on_device=on_device,
            used=self._clock,
        )
        self._kept.append(kept)
        self._kept.sort(key=lambda kept: kept.position)
        self._make_room()

    def position_before(self, limit: int) -> int | None:
        """Returns the last position with a checkpoint that is at most `limit`, or None."""
        return max((p for p in self.positions if p <= limit), default=None)

    def use(self, position: int) -> StateCheckpoint:
        """Returns the checkpoint of a position."""
        self._clock += 1
        kept = next(kept for kept in self._kept if kept.position == position)
        kept.used = self._clock
        return kept.checkpoint

    def drop_after(self, position: int) -> None:
        """Drops the checkpoints behind a position, whose text is no longer there."""
        self._kept = [kept for kept in self._kept if kept.position <= position]

    def fork(self) -> "CheckpointStore":
        """Returns a store of the same checkpoints, which both keep from now on."""
        twin = copy.copy(self)
        twin._kept = [copy.copy(kept) for kept in self._kept]
        return twin

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions with a checkpoint, ascending."""
        return tuple(kept.position for kept in self._kept)

    @property
    def facts(self) -> tuple[CheckpointFacts, ...]:
        """What is kept, in order of position."""
        return tuple(
            CheckpointFacts(
                position=kept.position,
                kind=kept.kind,
                place="device" if kept.on_device else "host",
                nbytes=kept.nbytes,
            )
            for kept in self._kept
        )

    def peek(self, position: int) -> StateCheckpoint:
        """Returns the checkpoint of a position without counting it as used."""
        return next(kept.checkpoint for kept in self._kept if kept.position == position)

    def _make_room(self) -> None:
        while self._bytes(True) > self.budget.device_bytes:
            kept = self._least(True)
            kept.checkpoint, kept.on_device = jax.device_get(kept.checkpoint), False
        while self._bytes(False) > self.budget.host_bytes:
            self._kept.remove(self._least(False))

    def _bytes(self, on_device: bool) -> int:
        return sum(kept.nbytes for kept in self._kept if kept.on_device == on_device)

    def _least(self, on_device: bool) -> _Kept:
        """Returns the checkpoint of one place that is worth least."""
        worth, before = {}, 0
        for index, kept in enumerate(self._kept):
            spared = kept.position - before
            worth[index] = usefulness(spared, self._clock - kept.used)
            before = kept.position
        index = min(
            (i for i in worth if self._kept[i].on_device == on_device), key=worth.__getitem__
        )
        return self._kept[index]


def usefulness(spared: int, age: int) -> float:
    """Returns what something kept is worth: tokens it spares, over one plus its age in uses."""
    return spared / (1 + age)


def nbytes_of(tree: object) -> int:
    """Returns the bytes of all arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
