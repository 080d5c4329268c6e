"""How many steps a round has time for, so that as many rounds end within the limit as a verdict takes.

More rounds of fewer steps tell more than few rounds of many: processes differ by more than the steps of one do.
"""

from __future__ import annotations

import time

_LEAST = 0.25  # of the most


class Pace:
    """The share of each workload's steps (``plan.LENGTHS``) that the next round takes: ``effort``.

    The first round takes half of ``most``, and shows how long it takes to start the contenders, which no effort changes,
    and to run their jobs. What follows takes as much as there is time for.

    Args:
        rounds: how many there should be.
        seconds: from now on, for all of them.
        most: the effort of a fast machine.
    """

    def __init__(self, rounds: int, seconds: float, most: float) -> None:
        self.effort = most / 2
        self._most = most
        self._left = rounds
        self._ends = time.monotonic() + seconds
        self._starting = self._running = 0.0  # seconds of the last round, the latter at an effort of 1

    def note(self, seconds: float, starting: float) -> None:
        """A round took ``seconds``, ``starting`` of them before the contenders' first steps ended."""
        self._left -= 1
        self._starting, self._running = starting, (seconds - starting) / self.effort
        if self._left and self._running:
            each = (self._ends - time.monotonic()) / self._left
            fitting = (each - self._starting) / self._running
            self.effort = min(self._most, max(self._most * _LEAST, fitting))

    def fits(self) -> bool:
        """Whether another round would end in time, at the speed of the last one."""
        return self.leaves(self._starting + self._running * self.effort)

    def leaves(self, seconds: float) -> bool:
        """Whether there is so much time."""
        return time.monotonic() + seconds <= self._ends
