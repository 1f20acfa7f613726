"""How many drafts to make: fixed, fewer after a rejection, or chosen by measurement.

The device applies `depth` and `depth_after_rejection` by itself at the end of every cycle; the
policies here run on the host between dispatches. Changing the depth never compiles anything.
"""

import dataclasses

import numpy as np

from openjet_jax.config import MAX_DEPTH

AUTO = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthPolicy:
    """A request's rule for draft depth.

    Attributes:
      depth: drafts a cycle; the first choice of an automatic policy.
      after_rejection: drafts in the cycle after one that rejected a draft.
      auto: whether `AutoDepth` picks the depth between dispatches.
    """

    depth: int
    after_rejection: int
    auto: bool = False

    def __post_init__(self):
        """Raises ValueError if a depth is outside 0..5, or larger after a rejection."""
        if not 0 <= self.depth <= MAX_DEPTH:
            raise ValueError(f"depth {self.depth} must be in 0..{MAX_DEPTH}")
        if not 0 <= self.after_rejection <= self.depth:
            raise ValueError(
                f"depth {self.after_rejection} after a rejection must be in 0..{self.depth}"
            )

    @property
    def max_depth(self) -> int:
        """The depth that a program for this policy must be able to make."""
        return MAX_DEPTH if self.auto else self.depth


def parse_depth(depth: int | str) -> DepthPolicy:
    """Returns the policy a user's setting names.

    Args:
      depth: 0..5 (fixed), "4/3" (four drafts, three in the cycle after a rejection), or "auto".

    Raises:
      ValueError: anything else; the message says what is allowed.
    """
    text = str(depth)
    if text == AUTO:
        return DepthPolicy(depth=3, after_rejection=3, auto=True)
    first, slash, second = text.partition("/")
    if first.isdecimal() and (second.isdecimal() if slash else not second):
        return DepthPolicy(depth=int(first), after_rejection=int(second or first))
    raise ValueError(
        f'{depth=} is not a draft depth; use 0..{MAX_DEPTH}, "4/3" (3 after a rejection) or "auto"'
    )


class CycleTime:
    """The time of a cycle, `base + depth * draft` seconds, from measured dispatches.

    A line is its true shape: every depth verifies the same padded rows, and drafts run one after
    another. So each measurement tells of every depth, tried or not. The two numbers are tracked by
    a Kalman filter (Kalman 1960) in which the base drifts, as it does when the context grows.

    Attributes:
      count: measurements taken in.
    """

    NOISE, DRIFT = 0.05, 0.01
    """Standard deviation of a measurement, and of the base's change between two, relative."""

    MOST = 1.3
    """A dispatch that takes longer than this times the expected was held up by something else."""

    def __init__(self):
        """Starts without measurements: a draft is taken to cost 8 % of the base."""
        self.count = 0
        self._line = np.array([1.0, 0.08])
        self._spread = np.zeros((2, 2))

    def __call__(self, depth: int) -> float:
        """Returns the expected seconds of a cycle; relative ones before the first measurement."""
        return float(self._line @ (1.0, depth))

    def observe(self, depth: int, seconds: float) -> None:
        """Takes in the mean time of a dispatch's cycles at a depth."""
        if not self.count:
            base = seconds / self(depth)
            self._line = self._line * base
            self._spread = np.diag([0.1 * base, 0.05 * base]) ** 2
        self.count += 1
        x, expected = np.array([1.0, depth]), self(depth)
        self._spread[0, 0] += (self.DRIFT * expected) ** 2
        gain = self._spread @ x / (x @ self._spread @ x + (self.NOISE * expected) ** 2)
        surprise = min(seconds, self.MOST * expected) - expected
        self._line = np.maximum(self._line + gain * surprise, 1e-3 * self._line)
        self._spread = self._spread - np.outer(gain, x @ self._spread)


class AutoDepth:
    """Picks the depth with the most expected tokens a second.

    Expected tokens of a cycle at depth d are `1 + sum_{i<=d} prod_{j<=i} p_j`, with p_j the chance
    that draft j survives if those before it did (`Stats` counts the products). Each p_j is a mean
    of evidence that fades and of a prior, a little less than p_{j-1}: what has not been tried for
    long is thought to be like what is tried, so no depth is left for good.
    """

    PROBES = (MAX_DEPTH, 2)
    """Depths of the first dispatches while cycle times are unknown: two ends of the line."""

    FIRST, STEP, WEIGHT = 0.75, 0.95, 3.0
    """Prior of p_1, of p_j relative to p_{j-1}, and its weight in observations."""

    def __init__(
        self,
        depth: int,
        times: CycleTime | None = None,
        *,
        memory: float = 0.98,
        margin: float = 0.01,
    ):
        """Starts at `depth`.

        Args:
          depth: first choice.
          times: of this program, as far as they are known; shared by all requests that run it.
          memory: how much of the evidence on acceptance a cycle leaves.
          margin: relative gain that another depth must promise before it is taken.
        """
        self.depth = depth
        self.times = CycleTime() if times is None else times
        self.memory, self.margin = memory, margin
        self._accepted, self._tried = np.zeros(MAX_DEPTH), np.zeros(MAX_DEPTH)
        self._probes = [] if self.times.count else list(self.PROBES)
        self._dispatches = 0

    def tokens(self, depth: int) -> float:
        """Returns the expected tokens of a cycle at a depth."""
        total, survives, p = 1.0, 1.0, self.FIRST / self.STEP
        for accepted, tried in zip(self._accepted[:depth], self._tried[:depth], strict=True):
            p = (accepted + self.WEIGHT * self.STEP * p) / (tried + self.WEIGHT)
            survives *= p
            total += survives
        return total

    def observe(self, cycles: list[tuple[int, int]], seconds: float) -> None:
        """Takes in one dispatch at the current depth.

        The time of the first one is left out: it holds what a program does once.

        Args:
          cycles: (drafted, accepted) of each cycle that ran.
          seconds: time of the dispatch.
        """
        for drafted, accepted in cycles:
            self._accepted *= self.memory
            self._tried *= self.memory
            self._accepted[:accepted] += 1
            self._tried[: min(accepted + 1, drafted)] += 1
        if cycles and self._dispatches:
            self.times.observe(self.depth, seconds / len(cycles))
        self._dispatches += 1

    def choose(self) -> int:
        """Returns the depth for the next dispatch, and makes it current."""
        if self._probes:
            self.depth = self._probes.pop(0)
            return self.depth
        rates = [self.tokens(depth) / self.times(depth) for depth in range(MAX_DEPTH + 1)]
        best = int(np.argmax(rates))
        if rates[best] > rates[self.depth] * (1 + self.margin):
            self.depth = best
        return self.depth
