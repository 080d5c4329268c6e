"""``.progress`` in a run's folder: the last step of the newest attempt, which rank 0 writes.

Before each write it looks whether the folder is still this process's, which takes a round trip on a network file system.
The loop writes a step itself where that takes a small part of a step; else a thread writes the newest one.
"""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from dualtrain.files import read_text, write_whole
from dualtrain.training.folder_lock import FolderLock

PROGRESS = ".progress"
SHARE = 0.02  # of a step's time, that the loop may take to write the step
CLOSE_SECONDS = 5.0  # for the last write; a disk that hangs must not keep a run from its end


class LastStep:
    """The writer of an attempt's last step; begins with a file of its own. Raises OSError, SupersededError.

    A process of an earlier attempt changes nothing: it has the file open that this one has replaced.

    Args:
        folder: the run's.
        attempt: its name.
        step: the last one so far.
        lock: of the folder; nothing is written there once it is superseded.
    """

    def __init__(self, folder: Path, attempt: str, step: int, lock: FolderLock) -> None:
        self._attempt, self._lock = attempt, lock
        self._noted = step, time.time()
        path = folder / PROGRESS
        write_whole(path, self._line(), lock.check)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._seconds = 0.0  # of the last write
        self._writing = threading.Lock()
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="dualtrain-last-step", daemon=True)
        self._thread.start()

    def note(self, step: int) -> None:
        """Write a completed step, here if that is quick, else in the thread."""
        now, before = time.time(), self._noted[1]
        self._noted = step, now
        if self._seconds < SHARE * (now - before) and self._writing.acquire(blocking=False):
            try:
                self._write()
            finally:
                self._writing.release()
        else:
            self._changed.set()

    def close(self) -> None:
        """Write the newest step, and nothing more. Blocks for ``CLOSE_SECONDS`` at most."""
        self._closed = True
        self._changed.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        ends = False
        while not ends:
            self._changed.wait()
            self._changed.clear()
            ends = self._closed
            with self._writing:
                self._write()
        os.close(self._descriptor)

    def _write(self) -> None:
        began = time.perf_counter()
        with suppress(OSError):  # the last step is that of an earlier write then
            if self._lock.is_mine():
                os.pwrite(self._descriptor, self._line(), 0)
        self._seconds = time.perf_counter() - began

    def _line(self) -> bytes:
        step, moment = self._noted
        # Of one length: a shorter one would leave the end of the one before.
        return f"{self._attempt} {step:>20} {moment:20.3f}\n".encode()


def last_step_of(folder: Path, attempt: str) -> tuple[int, float] | None:
    """Return the last step of an attempt, and its time; ``None`` if it has not begun to train."""
    with suppress(OSError, ValueError):
        name, step, moment = read_text(folder / PROGRESS).split()
        if name == attempt and math.isfinite(float(moment)):
            return int(step), float(moment)
    return None
