"""How many drafts to make: fixed, fewer after a rejection, or chosen by measurement.

The device applies `depth` and `depth_after_rejection` by itself at the end of every cycle; the
policies here run on the host between dispatches. Changing the depth never compiles anything.
"""

import dataclasses

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
        """Raises ValueError if a depth is outside 0..5."""
        for value in (self.depth, self.after_rejection):
            if not 0 <= value <= MAX_DEPTH:
                raise ValueError(f"depth {value} must be in 0..{MAX_DEPTH}")

    @property
    def max_depth(self) -> int:
        """The depth that a program for this policy must be able to make."""
        return MAX_DEPTH if self.auto else max(self.depth, self.after_rejection)


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


class AutoDepth:
    """Picks the depth with the most expected tokens a second, with hysteresis.

    Acceptance by draft position is a running mean (each position given that the one before was
    accepted); the time of a cycle is a line through measured dispatches, `base + depth * draft`.
    Expected tokens of a cycle at depth d are `1 + sum_i prod_{j<=i} p_j`.
    """

    def __init__(self, depth: int, *, memory: float = 0.97, margin: float = 0.03):
        """Starts at `depth`.

        Args:
          depth: first choice.
          memory: how much of the past a running mean keeps at each observation.
          margin: relative gain that another depth must promise before it is taken.
        """
        self.depth = depth
        self.memory, self.margin = memory, margin
        self._accepted = [0.0] * MAX_DEPTH
        self._tried = [0.0] * MAX_DEPTH
        self._seconds: dict[int, float] = {}

    def acceptance(self, position: int) -> float:
        """Returns the estimated chance that draft `position` (from 0) survives if reached.

        Unseen positions are taken to be like the last seen one, a little worse.
        """
        weight = 2.0
        prior = 0.7 if position == 0 else 0.97 * self.acceptance(position - 1)
        return (self._accepted[position] + weight * prior) / (self._tried[position] + weight)

    def tokens(self, depth: int) -> float:
        """Returns the expected tokens of a cycle at a depth."""
        total, survives = 1.0, 1.0
        for position in range(depth):
            survives *= self.acceptance(position)
            total += survives
        return total

    def seconds(self, depth: int) -> float:
        """Returns the expected time of a cycle at a depth, interpolating between measured ones."""
        known = sorted(self._seconds)
        if not known:
            return 1.0 + 0.1 * depth
        if len(known) == 1:
            only = known[0]
            return self._seconds[only] * (1.0 + 0.1 * depth) / (1.0 + 0.1 * only)
        mean_d = sum(known) / len(known)
        mean_s = sum(self._seconds.values()) / len(known)
        spread = sum((d - mean_d) ** 2 for d in known)
        slope = sum((d - mean_d) * (self._seconds[d] - mean_s) for d in known) / spread
        fitted = mean_s + max(slope, 0.0) * (depth - mean_d)
        return self._seconds.get(depth, max(fitted, 1e-9))

    def observe(self, cycles: list[tuple[int, int]], seconds: float) -> None:
        """Takes in one dispatch.

        Args:
          cycles: (drafted, accepted) of each cycle that ran.
          seconds: time of the dispatch.
        """
        for drafted, accepted in cycles:
            for position in range(min(accepted + 1, drafted)):
                self._accepted[position] *= self.memory
                self._tried[position] *= self.memory
                self._accepted[position] += position < accepted
                self._tried[position] += 1
        if cycles and seconds > 0:
            each = seconds / len(cycles)
            old = self._seconds.get(self.depth, each)
            self._seconds[self.depth] = old + 0.2 * (each - old)

    def choose(self) -> int:
        """Returns the depth for the next dispatch, and makes it current."""
        rates = [self.tokens(d) / self.seconds(d) for d in range(MAX_DEPTH + 1)]
        best = max(range(MAX_DEPTH + 1), key=lambda d: rates[d])
        if rates[best] > rates[self.depth] * (1 + self.margin):
            self.depth = best
        return self.depth
