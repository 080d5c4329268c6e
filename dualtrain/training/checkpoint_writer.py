"""Writing checkpoints beside the loop: it waits for the copy of the state, not for the disk.

One at a time and in order, in a thread of rank 0. A write that fails leaves the files before it whole, and is reported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dualtrain.errors import UserError
from dualtrain.training.checkpoint import BEST, Packed, drop_old, keep_as_best, path_of
from dualtrain.training.run_dir import BEST_WEIGHTS, write_weights


@dataclass(frozen=True)
class _Best:
    """The best state so far, as long as its files are not durable."""

    step: int
    state: Packed
    weights: dict[str, torch.Tensor]


class Writer:
    """Writes the checkpoints of one run.

    Args:
        folder: the run's.
        kept: how many checkpoints are kept, beside the best.
        say: called with the report of a write that failed, from the writing thread.
        patience: seconds that one write may take.
    """

    def __init__(self, folder: Path, kept: int, say: Callable[[str], None], patience: float) -> None:
        self._folder = folder
        self._checkpoints = folder / "checkpoints"
        self._kept = kept
        self._say = say
        self._patience = patience
        self._thread: threading.Thread | None = None
        self._bug: Exception | None = None
        self._best: _Best | None = None
        self.failed: OSError | None = None  # the error of the last write

    def write(self, step: int, state: Packed, best: dict[str, torch.Tensor] | None = None) -> None:
        """Writes the checkpoint of ``step``; blocks only while an earlier one is written.

        ``best``: the model's weights, where this state is the best so far. Its files replace those of the best before it;
        where that fails, the next write tries again.
        """
        self.wait()
        if best is not None:
            self._best = _Best(step, state, best)
        self._thread = threading.Thread(target=self._write, args=(step, state), name="dualtrain-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Blocks until the write under way, if there is one, has ended. Raises UserError where that takes too long."""
        if self._thread is not None:
            self._thread.join(self._patience)
            if self._thread.is_alive():
                raise UserError(
                    f"a checkpoint has been on its way to {str(self._checkpoints)!r} for {self._patience:g} s: the disk "
                    "hangs or is slow; choose another --run-dir, or a longer --timeout"
                )
            self._thread = None
        if self._bug is not None:
            raise self._bug

    def _write(self, step: int, state: Packed) -> None:
        try:
            state.write(path_of(self._checkpoints, step))
            self._write_best(step)
            # Last: until the best has its files, the checkpoint of its step is the only one that can give them back.
            drop_old(self._checkpoints, self._kept)
            self.failed = None
        except OSError as error:
            self.failed = error
            reason = error.strerror or error
            self._say(f"the checkpoint of step {step} could not be written ({reason}): training goes on; free that place")
        except Exception as error:  # for the thread that waits
            self._bug = error

    def _write_best(self, step: int) -> None:
        best = self._best
        if best is None:
            return
        if best.step == step:
            keep_as_best(path_of(self._checkpoints, step))
        else:
            best.state.write(self._checkpoints / BEST)
        write_weights(self._folder / BEST_WEIGHTS, best.weights, best.step)
        self._best = None
