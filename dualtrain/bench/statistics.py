"""Median of pairs of measurements, with its confidence interval."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DRAWS = 4000


def pairs_of(count: int) -> str:
    """Return "1 pair", "2 pairs" and so on."""
    return f"{count} pair{'s' * (count > 1)}"


@dataclass(frozen=True)
class Estimate:
    """A median with its bootstrap 95 % interval."""

    value: float
    low: float
    high: float
    pairs: int


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median of ``values``, one for each pair, and its bootstrap 95 % interval."""
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(values, k=len(values))) for _ in range(DRAWS))
    low, high = medians[round(0.025 * (DRAWS - 1))], medians[round(0.975 * (DRAWS - 1))]
    return Estimate(statistics.median(values), low, high, len(values))
