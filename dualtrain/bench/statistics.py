"""What pairs of measurements say: their median, and how far it can be trusted."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DRAWS = 4000


def pairs_of(count: int) -> str:
    """How many, in words."""
    return f"{count} pair{'s' * (count > 1)}"


@dataclass(frozen=True)
class Estimate:
    """A median with its bootstrap 95 % interval."""

    value: float
    low: float
    high: float
    pairs: int


def estimate(values: Sequence[float]) -> Estimate:
    """The median of ``values``, one of each pair, and the middle 95 % of the medians of as many drawn with replacement."""
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(values, k=len(values))) for _ in range(DRAWS))
    low, high = medians[round(0.025 * (DRAWS - 1))], medians[round(0.975 * (DRAWS - 1))]
    return Estimate(statistics.median(values), low, high, len(values))
