"""Checkpoints of one session's recurrent state: where they are, and which go when room is short."""

import dataclasses
from typing import Literal


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
    kind: Literal["prompt", "turn", "interval"]
    place: Literal["device", "host"]
    nbytes: int
