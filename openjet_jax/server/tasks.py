"""What requests ask of the scheduler, and what it delivers."""

import dataclasses
import threading
import time
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


class Late(Exception):
    """A task's time was over before its first token."""

    def __init__(self):
        """Says so."""
        super().__init__("the request's time was over before its answer began; try again later")


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
      deadline: by `time.monotonic`, when it ends with what there is; None for never.
      top_logprobs: likeliest tokens to report beside each.
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
    deadline: float | None = None
    top_logprobs: int = 0
    deliver: Callable[[int, Delivery], None]
    cancelled: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def cancel(self) -> None:
        """Ends the task within one dispatch; nothing more is delivered after that."""
        self.cancelled.set()
