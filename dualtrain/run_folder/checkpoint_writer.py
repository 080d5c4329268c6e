"""Write checkpoints in a thread of rank 0. The training loop waits while tensors are copied, not while they are written.

Checkpoints are written one at a time and in order, so a save also waits for the end of an earlier write. A write that fails
leaves the earlier files intact, and is reported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dualtrain.errors import UserError
from dualtrain.files import cure_of
from dualtrain.run_folder.checkpoint import BEST, Packed, drop_old, keep_as_best, path_of
from dualtrain.run_folder.folder_lock import FolderLock, SupersededError
from dualtrain.run_folder.run_dir import BEST_WEIGHTS, write_weights


@dataclass(frozen=True)
class _Best:
    """The best state so far, until its files are written."""

    step: int
    state: Packed
    weights: dict[str, torch.Tensor]


class Writer:
    """The writer of one run's checkpoints.

    Attributes:
        thread: the thread that writes, or has written; ``None`` before the first write and after :meth:`wait`.
        failed: why the last checkpoint could not be written; ``None`` if it was written.
        best_failed: why the files of the best state could not be written; ``None`` if they were written.

    Args:
        folder: the run's folder.
        kept: how many checkpoints are kept, not counting the best.
        report: called with a message if files could not be written or removed, usually in the thread that writes.
        timeout: seconds that :meth:`wait` waits for a write before it raises.
        lock: the folder's lock; after another process has taken the folder, nothing is written there.
    """

    def __init__(self, folder: Path, kept: int, report: Callable[[str], None], timeout: float, lock: FolderLock) -> None:
        self._folder = folder
        self._checkpoints = folder / "checkpoints"
        self._kept = kept
        self._report = report
        self._timeout = timeout
        self._lock = lock
        self.thread: threading.Thread | None = None
        self._bug: Exception | None = None
        self._best: _Best | None = None
        self.failed: OSError | None = None
        self.best_failed: OSError | None = None

    def write(self, step: int, state: Packed, best: dict[str, torch.Tensor] | None = None) -> None:
        """Start writing the checkpoint of ``step``; normally blocks only while an earlier checkpoint is written.

        If the system refuses to start a thread, the call writes the checkpoint itself.

        Args:
            step: the step of the checkpoint.
            state: what to write.
            best: the model's weights, if this state is the best so far. The files of the best state are then replaced; if
                that fails, the next write tries again.

        Raises the errors of :meth:`wait`.
        """
        self.wait()
        if best is not None:
            self._best = _Best(step, state, best)
        self.thread = threading.Thread(target=self._write, args=(step, state), name="dualtrain-checkpoint", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:  # the limit of threads is reached
            self.thread = None
            self._write(step, state)

    @property
    def busy(self) -> bool:
        """Return whether a write is in progress, so that the next write would wait."""
        return self.thread is not None and self.thread.is_alive()

    def wait(self) -> None:
        """Wait for the write in progress, if there is one.

        Raises:
            UserError: the write still continues after the timeout.
            Exception: an earlier write raised this error, which is neither an OSError nor a SupersededError.
        """
        if self.thread is not None:
            self.thread.join(self._timeout)
            if self.thread.is_alive():
                raise UserError(
                    f"writing a checkpoint to {str(self._checkpoints)!r} has taken {self._timeout:g} s so far: the disk "
                    "hangs or is slow; choose another --run-dir, or a longer --timeout",
                    transient=True,
                )
            self.thread = None
        if self._bug is not None:
            raise self._bug

    def remove_old(self) -> None:
        """Remove all but the newest checkpoints; report an OSError. Raises SupersededError.

        Do not call this while a write is in progress, or if the files of the best state are missing.
        """
        remove = partial(drop_old, self._checkpoints, self._kept, self._lock)
        self._try("old checkpoints could not be removed", remove)

    def unwritten(self) -> dict[str, OSError]:
        """Return what the last write could not write, and why."""
        errors = {"the last checkpoint": self.failed, "the files of the best evaluation": self.best_failed}
        return {what: error for what, error in errors.items() if error is not None}

    def _write(self, step: int, state: Packed) -> None:
        path, lock = path_of(self._checkpoints, step), self._lock
        try:
            self.failed = self._try(f"the checkpoint of step {step} could not be written", lambda: state.write(path, lock))
            if self.failed is None and self._best is not None:
                what = f"the files of the best evaluation (step {self._best.step}) could not be written"
                self.best_failed = self._try(what, lambda: self._write_best(step))
            # Remove old checkpoints last, and only if no write failed. If the best state's files are missing, a resumed run
            # writes them again from that state's checkpoint, which may be an old one.
            if self.failed is None and self.best_failed is None:
                self.remove_old()
        except SupersededError:
            pass  # the training loop checks the lock too, and ends the run on all ranks
        except Exception as error:  # raised in wait()
            self._bug = error

    def _try(self, what: str, action: Callable[[], None]) -> OSError | None:
        """Call ``action``. If it raises OSError, report ``what`` and the reason, and return the error."""
        try:
            action()
        except OSError as error:
            self._report(f"{what} ({error.strerror or error}): training continues; {cure_of(error)}")
            return error
        return None

    def _write_best(self, step: int) -> None:
        best = self._best
        if best is None:
            return
        if best.step == step:
            self._lock.check()
            keep_as_best(path_of(self._checkpoints, step))
        else:
            best.state.write(self._checkpoints / BEST, self._lock)
        write_weights(self._folder / BEST_WEIGHTS, best.weights, best.step, self._lock)
        self._best = None
