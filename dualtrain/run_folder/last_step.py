"""``.progress`` in a run's folder: a file with the newest attempt's last step. Rank 0 overwrites it after every step."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path

from dualtrain.files import read_text, write_whole
from dualtrain.run_folder.folder_lock import FolderLock

PROGRESS = ".progress"


class LastStep:
    """Writer of an attempt's last step. Construction replaces the file; raises OSError, SupersededError.

    A process of an earlier attempt cannot change the new file, because that process has the replaced file open.

    Args:
        folder: the run's folder.
        attempt: the attempt's name.
        step: the last step before the attempt.
        lock: the folder's lock; nothing is written after another process has taken the folder.
    """

    def __init__(self, folder: Path, attempt: str, step: int, lock: FolderLock) -> None:
        self._attempt, self._lock = attempt, lock
        path = folder / PROGRESS
        write_whole(path, self._line(step), lock.check)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def note(self, step: int) -> None:
        """Write a completed step. If that fails, the file keeps an earlier step."""
        with suppress(OSError):
            if self._lock.is_mine():
                os.pwrite(self._descriptor, self._line(step), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _line(self, step: int) -> bytes:
        # Fixed length: after a shorter line, the end of the previous line would remain.
        return f"{self._attempt} {step:>20} {time.time():20.3f}\n".encode()


def last_step_of(folder: Path, attempt: str) -> tuple[int, float] | None:
    """Return an attempt's last step and the time at which this step was written.

    ``None`` if the file is unreadable or belongs to another attempt: then ``attempt`` has never written it, or a later
    attempt has replaced it.
    """
    with suppress(OSError, ValueError):
        name, step, moment = read_text(folder / PROGRESS).split()
        if name == attempt and math.isfinite(float(moment)):
            return int(step), float(moment)
    return None
