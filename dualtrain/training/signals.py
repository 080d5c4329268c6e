"""Signals that request a save or a stop: the handler records them, and all ranks act on them at the end of a step."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, Self

from dualtrain.errors import StoppedError, UserError

# Import nothing else here: until this module is imported, a Ctrl-C ends the program with a traceback.

Handler = Callable[[int, FrameType | None], None]
#: The signals that save the run and end it. The system sends SIGHUP when the terminal of a run is closed.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: The signals for which every step has a control flag, in the order of the flags. The first two end the run, the last one
#: only saves a checkpoint.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
#: Index of SIGTERM's flag, which SIGHUP sets too. Rank 0 also sets this flag if another process uses the run's folder.
STOP = SIGNALS.index(signal.SIGTERM)
#: Index of SIGUSR1's flag. Rank 0 also sets this flag if a checkpoint is due by time.
SAVE = SIGNALS.index(signal.SIGUSR1)
_REPEAT_SECONDS = 2.0  # a launcher may repeat the SIGINT of one Ctrl-C within this time; a second Ctrl-C comes later


#: An entry for each SIGUSR1 that was received outside of the training loop.
_early: list[bool] = []


def is_ignored(number: int) -> bool:
    """Return whether ``number`` is SIGHUP and this process ignores it, as under ``nohup``: install no handler then."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def install(handlers: Mapping[signal.Signals, Handler]) -> dict[signal.Signals, Any]:
    """Install the signals' handlers, except for signals for which :func:`is_ignored` is true; return the old handlers."""
    return {number: signal.signal(number, handler) for number, handler in handlers.items() if not is_ignored(number)}


def end_on_early_interrupt() -> None:
    """Install a handler of SIGINT for use outside of the run, for example during imports.

    The handler ends this process; rank 0 prints one line. Raising an exception is not enough: modules written in C turn a
    KeyboardInterrupt during their import into other errors.
    """
    signal.signal(signal.SIGINT, _end_early)


def _end_early(number: int, frame: FrameType | None) -> None:
    try:
        from dualtrain.launchers import detect_world

        prints = detect_world().rank == 0  # one line for the job
    except (UserError, ImportError):  # ImportError: the signal came while the module was imported
        prints = True
    if prints:
        os.write(2, b"dualtrain: error: interrupted\n")
    os._exit(128 + number)


#: Set by :func:`interrupt`, the handler of SIGINT before and after the training loop. In the loop, :class:`Signals`
#: installs its own handler.
interrupted = threading.Event()
_times: list[float] = []  # the time of the SIGINT that has set ``interrupted``


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt for the first SIGINT, and end this process at a second Ctrl-C.

    Do nothing if a launcher repeats the first SIGINT, and raise nothing while a StoppedError is handled. The exception may
    become another error, or be lost, if it is raised in an import. So ``interrupted`` is set too.
    """
    now = time.monotonic()
    if interrupted.is_set():
        if now - _times[-1] > _REPEAT_SECONDS:
            os._exit(128 + number)
        return
    _times[:] = [now]
    interrupted.set()
    if not isinstance(sys.exc_info()[1], StoppedError):  # after a StoppedError, the run is saved, and will end soon
        raise KeyboardInterrupt


def note_early_requests() -> None:
    """Keep SIGUSR1 from ending this process before the first step and after the last one.

    If the signal comes before the first step, the state after the first step is saved. Call this only in a process whose
    sole task is training. While Python itself starts, only the parent process can keep the signal from ending this process,
    by blocking or ignoring the signal (``trap '' USR1``).
    """
    signal.signal(signal.SIGUSR1, lambda *_: _early.append(True))


def take_early_request() -> bool:
    """Return whether SIGUSR1 was received outside of the training loop, and clear that record."""
    count = len(_early)  # a signal may come at any time
    del _early[:count]
    return count > 0


def ignore_late_requests() -> None:
    """Keep SIGUSR1 from ending a process that is about to exit: Python removes its signal handlers before the end."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class Signals:
    """Context manager whose handlers record ``STOP_SIGNALS`` and SIGUSR1. Outside of the main thread, it installs none.

    It installs no handler of SIGHUP if this process ignores that signal, as under ``nohup``. A second Ctrl-C ends the
    process at once. A SIGINT or SIGUSR1 that came before the block, and had no effect yet, is recorded too.
    """

    def __init__(self) -> None:
        self._noted: dict[int, float] = {}
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if interrupted.is_set():  # other code, such as an import, has caught the KeyboardInterrupt
            interrupted.clear()
            self._noted[signal.SIGINT] = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            self._earlier = install(dict.fromkeys((*STOP_SIGNALS, signal.SIGUSR1), self._note))
            if take_early_request():
                self._noted[signal.SIGUSR1] = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        first = self._noted.setdefault(number, now)
        if number == signal.SIGINT and now - first > _REPEAT_SECONDS:
            os._exit(128 + number)  # a second Ctrl-C: exit now, since the current step may hang

    def take(self) -> list[float]:
        """Return 1 for each of ``SIGNALS`` that was received, else 0. SIGHUP counts as SIGTERM.

        A SIGUSR1 is returned once. The other signals are returned by every later call too.
        """
        requested = self._noted.pop(signal.SIGUSR1, None) is not None  # in one call: a signal may come at any time
        flags = [float(requested if number == signal.SIGUSR1 else number in self._noted) for number in SIGNALS]
        if self.received_hangup():
            flags[STOP] = 1.0
        return flags

    def received_hangup(self) -> bool:
        """Return whether SIGHUP was received."""
        return signal.SIGHUP in self._noted
