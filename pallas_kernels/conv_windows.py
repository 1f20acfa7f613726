"""What rollback needs of a convolution's past: windows of one row of history and new inputs.

X = history, then the inputs of a forward. The history after keeping its first k inputs is
X[k : k + s], so X alone, kept until the count is known, serves every count: the engine stores X and
moves a start. Engines that must have the history in a fixed place write a window for each count;
`write_windows` does it from one load of each row, where `separable_windows` finds that it may.

Method: "Over 107tok/s Qwen3.8-Flash-Next on M3 Ultra" (2026), Algorithms 4 and 5. NumPy.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

MOST_COPIES = 8
LEAST_COPIES = 2
MOST_ROWS = 8
MOST_JOINED = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """Bytes of a buffer, from `start` to before `stop`."""

    buffer: str
    start: int
    stop: int

    def overlaps(self, other: "Span") -> bool:
        """Returns whether two spans share a byte."""
        same = self.buffer == other.buffer
        return same and self.start < other.stop and other.start < self.stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowCopy:
    """A copy that follows the joining of history and inputs.

    Attributes:
      first: row of X where the window begins.
      target: where it is written.
      buffer_bytes: size of the buffer that it is written to.
      dtype: of the copy.
      regular: whether its source is a view of X in the known layout.
    """

    first: int
    target: Span
    buffer_bytes: int
    dtype: str = "float32"
    regular: bool = True


def separable_windows(
    history: Span,
    inputs: Span,
    joined: Span,
    num_history: int,
    num_inputs: int,
    copies: Sequence[WindowCopy],
    pending: Sequence[Span] = (),
) -> tuple[list[WindowCopy], bool]:
    """Returns the copies that one pass can write with X, and whether it must wait (Algorithm 4).

    The first copy that does not qualify ends the search; fewer than two are not worth it.

    Args:
      history: S.
      inputs: T.
      joined: X, S and then T.
      num_history: rows of S.
      num_inputs: rows of T.
      copies: what follows, in order.
      pending: writes that may not have happened yet.
    """
    sizes_fit = 1 <= num_history <= MOST_ROWS and 1 <= num_inputs <= MOST_ROWS
    if not sizes_fit or num_history + num_inputs > MOST_JOINED:
        return [], False
    taken: list[WindowCopy] = []
    for copy in copies[:MOST_COPIES]:
        in_window = 0 <= copy.first <= num_inputs
        in_bounds = 0 <= copy.target.start < copy.target.stop <= copy.buffer_bytes
        others = (history, inputs, joined, *(other.target for other in taken))
        apart = not any(copy.target.overlaps(other) for other in others)
        if not (copy.dtype == "float32" and copy.regular and in_window and in_bounds and apart):
            break
        taken.append(copy)
    if len(taken) < LEAST_COPIES:
        return [], False
    waits = any(copy.target.overlaps(span) for copy in taken for span in pending)
    return taken, waits


def write_windows(
    history: np.ndarray, inputs: np.ndarray, firsts: Sequence[int]
) -> tuple[np.ndarray, list[np.ndarray], int]:
    """Returns X, the windows, and how many numbers were loaded for each channel (Algorithm 5).

    Bits are copied, not values: NaN payloads survive.

    Args:
      history: float32 [s, channels].
      inputs: float32 [n, channels].
      firsts: row of X where each window of s rows begins.
    """
    words = np.concatenate([history.view(np.uint32), inputs.view(np.uint32)])
    size = len(history)
    windows = [words[first : first + size].copy().view(np.float32) for first in firsts]
    return words.view(np.float32), windows, len(words)


def loads_of_separate_copies(num_history: int, num_inputs: int, num_windows: int) -> int:
    """Returns numbers loaded for each channel where X and every window are passes of their own."""
    return num_history + num_inputs + num_windows * num_history


def window_start(num_inputs: int, dropped: int) -> int:
    """Returns where the history begins in X once the last `dropped` inputs are taken back."""
    return max(0, num_inputs - dropped)
