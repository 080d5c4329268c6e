"""Choose the number of steps per round, so that enough rounds for a verdict fit into the time limit.

Many rounds of few steps are better than few rounds of many steps, because times differ more between processes than between
steps of one process.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from dualtrain.bench.plan import steps_of

_SMALLEST_FRACTION = 0.125
_USED = 0.97  # planned fraction of a round's time; the rest is a margin, because rounds may take longer than predicted


class Pace:
    """Chooses ``step_fraction``, the fraction of each workload's timed steps (``plan.LENGTHS``) that a round runs.

    The first of several rounds runs the smallest fraction. It measures the time of the contenders' timed steps, and their
    fixed time: the start, the discarded steps, and the jobs without steps. Later rounds run the largest fraction that fits
    into the remaining time at the speed of the previous round, or the smallest fraction if none fits.

    Args:
        rounds: number of rounds, if time permits.
        seconds: time limit for all rounds, from the construction on.
        largest_fraction: the largest fraction that a round runs.
    """

    def __init__(self, rounds: int, seconds: float, largest_fraction: float) -> None:
        self.step_fraction = _SMALLEST_FRACTION if rounds > 1 else largest_fraction
        self._largest_fraction = largest_fraction
        self._left = rounds
        self._ends = time.monotonic() + seconds
        #: For each contender, from its last round: fixed seconds, and seconds per step of each workload.
        self._known: dict[str, tuple[float, Mapping[str, float]]] = {}

    def note(self, name: str, seconds: float, step_seconds: Mapping[str, float]) -> None:
        """Record a contender's total ``seconds`` in this round, and its seconds per step of each workload."""
        timed = sum(one * steps_of(job, self.step_fraction) for job, one in step_seconds.items())
        self._known[name] = max(0.0, seconds - timed), step_seconds

    def end_round(self, names: Collection[str]) -> None:
        """Choose the step fraction of the next round, in which the contenders ``names`` run."""
        self._left -= 1
        each = _USED * self.seconds_left / max(1, self._left)
        self.step_fraction = self._largest_fraction
        while self.step_fraction > _SMALLEST_FRACTION and self._seconds(names, self.step_fraction) > each:
            self.step_fraction = max(_SMALLEST_FRACTION, 0.98 * self.step_fraction)

    def fits(self, names: Collection[str]) -> bool:
        """Return whether these contenders would end in time at the speed of their last round.

        A contender that has not run yet counts as 0 s.
        """
        return self._seconds(names, self.step_fraction) <= self.seconds_left

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit."""
        return self._ends - time.monotonic()

    def _seconds(self, names: Collection[str], step_fraction: float) -> float:
        known = [self._known[name] for name in names if name in self._known]
        return sum(fixed + sum(one * steps_of(job, step_fraction) for job, one in steps.items()) for fixed, steps in known)
