"""Medians and shares with intervals of 95 %."""

import math
from collections.abc import Sequence

import numpy as np


def median(values: Sequence[float]) -> dict[str, float]:
    """Returns the median of some measurements, its interval, and how many there were.

    The interval goes from one order statistic to another (a binomial of p = 1/2, by its normal
    approximation); of fewer than six values it is all of them.
    """
    ordered = np.sort(np.asarray(values, float))
    count, half = len(ordered), 0.98 * math.sqrt(len(ordered))
    low, high = math.floor(count / 2 - half), math.ceil(count / 2 + half)
    if count < 6:
        low, high = 0, count - 1
    low, high = max(low, 0), min(high, count - 1)
    return {
        "value": float(np.median(ordered)),
        "low": float(ordered[low]),
        "high": float(ordered[high]),
        "count": count,
    }


def share(successes: int, trials: int) -> dict[str, float]:
    """Returns a share and Wilson's interval (1927); without a trial, 0 and anything."""
    if not trials:
        return {"value": 0.0, "low": 0.0, "high": 1.0, "count": 0}
    z, p = 1.96, successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + (z / (2 * trials)) ** 2)
    return {"value": p, "low": centre - half, "high": centre + half, "count": trials}
