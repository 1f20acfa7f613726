"""What requests ask of the scheduler, and what it delivers."""

import dataclasses
import threading
from collections.abc import Callable, Sequence

from openjet_jax.answers import Piece
from openjet_jax.constraint import Constraint
from openjet_jax.settings import Sampling


class Busy(Exception):
    """The queue is full.

    Attributes:
      retry_after_s: when it may be worth trying again, in whole seconds.
    """

    def __init__(self, retry_after_s: int):
        """Takes what the attribute says."""
        super().__init__(f"the queue is full; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Stopping(Exception):
    """The server shuts down."""


@dataclasses.dataclass(frozen=True)
class Started:
    """Delivered to every answer once its prompt was read: tokens in all, and those not read."""

    prompt_tokens: int
    cached_tokens: int


type Delivery = Started | Piece | Exception


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What a request asks of the device.

    Attributes:
      ids: of the prompt.
      keep_tokens: whether earlier turns keep the tokens that the model cut them into.
      scope: tasks of other scopes share no prefix with this one.
      samplings: of each answer.
      max_new_tokens: of each answer.
      depth: drafts a cycle, as in `stream`.
      stop: strings that end an answer.
      constraint: makes the constraint of one answer; None for free text.
      deliver: called in the scheduler's thread with an answer's number and what came.
    """

    ids: Sequence[int]
    keep_tokens: bool
    scope: str
    samplings: tuple[Sampling, ...]
    max_new_tokens: int
    depth: int | str | None = None
    stop: tuple[str, ...] = ()
    constraint: Callable[[], Constraint] | None = None
    deliver: Callable[[int, Delivery], None]
    cancelled: threading.Event = dataclasses.field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Ends the task within one dispatch; nothing more is delivered after that."""
        self.cancelled.set()
