"""Median of paired measurements, with its confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.98  # smallest confidence level; an interval from the smallest to the largest of seven values has 98.4 %


def rounds_of(count: int) -> str:
    """Return "1 round", "2 rounds" and so on."""
    return f"{count} round{'s' * (count != 1)}"


@dataclass(frozen=True)
class Estimate:
    """A median with its order-statistic interval.

    Attributes:
        value: the median.
        low: the lower end of the interval.
        high: the upper end of the interval.
        pairs: number of values. Each round in which the contender, or both compared contenders, ran gives one value.
        level: probability that such an interval contains the true median, whatever the distribution of the values.
    """

    value: float
    low: float
    high: float
    pairs: int
    level: float


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median of ``values``, one per round, and the narrowest order-statistic interval with a level ≥ ``LEVEL``.

    The interval is from the k-th smallest to the k-th largest value. With fewer than seven values, it is from the smallest
    to the largest value, and its level is lower than ``LEVEL``.
    """
    ordered, count = sorted(values), len(values)
    k = max([each for each in range(1, (count + 1) // 2 + 1) if level_of(count, each) >= LEVEL], default=1)
    return Estimate(statistics.median(ordered), ordered[k - 1], ordered[count - k], count, level_of(count, k))


def level_of(count: int, k: int) -> float:
    """Return the probability that an interval of order statistics contains the true median.

    The interval is from the k-th smallest to the k-th largest of ``count`` values. The interval does
    not contain the true median if fewer than ``k`` values are below the median, or fewer than ``k`` are above it.
    Each value is below the median with probability 1/2, and above it with probability 1/2.
    """
    return 1 - 2 * sum(math.comb(count, below) for below in range(k)) / (1 << count)
