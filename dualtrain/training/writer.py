"""Writing checkpoints beside the loop: it waits for the copy of the state, not for the disk.

One at a time and in order, in a thread of rank 0. A write that fails leaves the files before it whole, and is said.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from dualtrain.errors import UserError
from dualtrain.training.checkpoint import Packed, drop_old, keep_as_best, path_of


class Writer:
    """Writes the checkpoints of one folder.

    Args:
        folder: where they are kept.
        kept: how many of them, beside the best.
        say: told of a write that failed, from the writing thread.
        patience: seconds that one write may take.
    """

    def __init__(self, folder: Path, kept: int, say: Callable[[str], None], patience: float) -> None:
        self._folder = folder
        self._kept = kept
        self._say = say
        self._patience = patience
        self._thread: threading.Thread | None = None
        self._bug: Exception | None = None
        self.failed: OSError | None = None  # what became of the last write

    def write(self, step: int, state: Packed, *, best: bool, then: Callable[[], None] | None = None) -> None:
        """Writes the checkpoint of ``step``, and calls ``then`` after it; blocks only while an earlier one is written."""
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(step, state, best, then), name="dualtrain-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Blocks until the write under way, if there is one, has ended. Raises UserError where that takes too long."""
        if self._thread is not None:
            self._thread.join(self._patience)
            if self._thread.is_alive():
                raise UserError(
                    f"a checkpoint has been on its way to {str(self._folder)!r} for {self._patience:g} s: the disk hangs "
                    "or is slow; choose another --run-dir, or a longer --timeout"
                )
            self._thread = None
        if self._bug is not None:
            raise self._bug

    def _write(self, step: int, state: Packed, best: bool, then: Callable[[], None] | None) -> None:
        path = path_of(self._folder, step)
        try:
            state.write(path)
            if best:
                keep_as_best(path)
            if then is not None:
                then()
            drop_old(self._folder, self._kept)
            self.failed = None
        except OSError as error:
            self.failed = error
            self._say(f"the checkpoint of step {step} could not be written ({error}): training goes on; free that place")
        except Exception as error:  # for the thread that waits
            self._bug = error
