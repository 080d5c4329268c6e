"""Being told to stop: a signal is noted in its handler, and acted on by all ranks at the end of a step."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

#: In the order in which they travel between ranks. The first two end the run, the last one only has it saved.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_IMPATIENT_SECONDS = 2.0  # a launcher repeats a Ctrl-C at once; a person does it later


#: Whether SIGUSR1 has come before there was anything to save.
_early: list[bool] = []


def note_early_requests() -> None:
    """Has a SIGUSR1 that comes before the first step, or after the last, not end this process.

    One that comes before has the state after the first step saved. For a process that is a rank and nothing else. While
    Python itself starts, only a parent can help, that blocks the signal or has it ignored (``trap '' USR1``).
    """
    signal.signal(signal.SIGUSR1, lambda *_: _early.append(True))


def take_early_request() -> bool:
    """Whether a SIGUSR1 has come before there was anything to save; asked once."""
    came = bool(_early)
    _early.clear()
    return came


def ignore_late_requests() -> None:
    """Has a SIGUSR1 not end a process that is about to end by itself: Python's last act is to drop its handlers."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class Signals:
    """Notes signals while it is entered. In a thread other than the main one it notes nothing."""

    def __init__(self) -> None:
        self._noted: dict[int, float] = {}
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._note) for number in SIGNALS}
            if take_early_request():
                self._noted[signal.SIGUSR1] = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        first = self._noted.setdefault(number, now)
        if number == signal.SIGINT and now - first > _IMPATIENT_SECONDS:
            os._exit(128 + number)  # asked twice: the step that should end does not

    def take(self) -> list[float]:
        """1 for each of ``SIGNALS`` that has come and was not taken yet, else 0. Those that end the run stay noted."""
        news = [float(number in self._noted) for number in SIGNALS]
        self._noted.pop(signal.SIGUSR1, None)
        return news
