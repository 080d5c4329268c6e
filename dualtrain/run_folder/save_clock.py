"""Decide when a checkpoint is due by time, and measure the time that the training loop spends in saves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class SaveClock:
    """Clock of saves: the time since the last save began, and the time spent in all saves.

    Args:
        interval: seconds from one save until the next is due; 0: never.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._started = self._last = time.perf_counter()
        self._count, self._seconds = 0, 0.0

    @property
    def due(self) -> bool:
        """Return whether ``interval`` seconds have passed since the last save began, or since the start."""
        return 0 < self._interval <= time.perf_counter() - self._last

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Record that a save begins. If the block raises no exception, count the save and its seconds."""
        self._last = time.perf_counter()
        yield
        self._count, self._seconds = self._count + 1, self._seconds + time.perf_counter() - self._last

    def costs(self) -> dict[str, float]:
        """Return the number of saves, their seconds, and their fraction of the time since this clock was made."""
        whole = max(time.perf_counter() - self._started, 1e-9)
        return {"saves": self._count, "seconds": self._seconds, "fraction": self._seconds / whole}
