"""How many steps a round has time for, so that as many rounds end within the limit as a verdict takes.

More rounds of fewer steps tell more than few rounds of many: processes differ by more than the steps of one do.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from dualtrain.bench.plan import steps_of

_LEAST = 0.125
_USED = 0.97  # of a round's share of the time: one that takes a little longer than foreseen is still to end


class Pace:
    """The share of each workload's steps (``plan.LENGTHS``) that a round takes: ``effort``.

    The first of several rounds takes the least, and shows how long the contenders take to start, which no
    effort changes, and for their steps. What follows takes as much as there is time for, at the speed of the round before.

    Args:
        rounds: how many there should be.
        seconds: from now on, for all of them.
        most: the effort of a fast machine.
    """

    def __init__(self, rounds: int, seconds: float, most: float) -> None:
        self.effort = _LEAST if rounds > 1 else most
        self._most = most
        self._left = rounds
        self._ends = time.monotonic() + seconds
        #: Of each contender, the last time: the seconds that no effort changes, and those of a step of each workload.
        self._known: dict[str, tuple[float, Mapping[str, float]]] = {}

    def note(self, name: str, seconds: float, steps: Mapping[str, float]) -> None:
        """A contender took ``seconds`` in this round, with steps of so many seconds."""
        timed = sum(one * steps_of(job, self.effort) for job, one in steps.items())
        self._known[name] = max(0.0, seconds - timed), steps

    def end_round(self, names: Collection[str]) -> None:
        """Chooses the effort of the next round, in which these contenders run."""
        self._left -= 1
        each = _USED * self.seconds_left / max(1, self._left)
        self.effort = self._most
        while self.effort > _LEAST and self._seconds(names, self.effort) > each:
            self.effort = max(_LEAST, 0.98 * self.effort)

    def fits(self, names: Collection[str]) -> bool:
        """Whether these contenders would end in time, at the speed of their last round."""
        return self._seconds(names, self.effort) <= self.seconds_left

    @property
    def seconds_left(self) -> float:
        """Until all rounds are to have ended."""
        return self._ends - time.monotonic()

    def _seconds(self, names: Collection[str], effort: float) -> float:
        known = [self._known[name] for name in names if name in self._known]
        return sum(fixed + sum(one * steps_of(job, effort) for job, one in steps.items()) for fixed, steps in known)
