"""The records of a run: progress and messages on the screen, metrics.jsonl, TensorBoard. Only rank 0 keeps them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dualtrain.config import OutputSection
from dualtrain.errors import UserError
from dualtrain.files import cure_of
from dualtrain.run_folder.folder_lock import FolderLock
from dualtrain.run_folder.run_dir import MetricsFile
from dualtrain.training.progress import Progress

_CONTINUES = ": training continues"


class Records:
    """The records of one run. On ranks other than 0, the methods write and print nothing.

    Args:
        folder: the run's folder.
        output: what is recorded, and how often.
        shown: whether to write and print: True on rank 0.
        launcher: the launcher that started the process.
        total: optimizer steps in the whole run.
        done: optimizer steps that the run took before this start.
        evaluated: the step of the last evaluation before this start.
        lock: the folder's lock. If it is superseded, because another process uses the folder, nothing is written.

    Attributes:
        progress: the progress bar or lines.

    Raises:
        OSError: a file cannot be written.
        SupersededError: another process uses the folder.
    """

    def __init__(
        self,
        folder: Path,
        output: OutputSection,
        *,
        shown: bool,
        launcher: str,
        total: int,
        done: int,
        evaluated: int,
        lock: FolderLock,
    ) -> None:
        self.progress = Progress(total, done, shown=shown, launcher=launcher, seconds=output.log_seconds)
        self._lock = lock
        self._metrics = MetricsFile(folder, done, self.progress.warn, lock, evaluated) if shown else None
        self._board = _board(folder, done) if shown and output.tensorboard else None
        self._every = output.log_every
        self._since, self._samples = time.perf_counter(), 0

    def __enter__(self) -> Self:
        self.progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.__exit__(kind, error, trace)
        self.close()

    def close(self) -> None:
        """Close the files. Logs a warning if the last lines or events cannot be written: this must not end the run."""
        for what, file in (("metrics.jsonl", self._metrics), ("TensorBoard's events", self._board)):
            if file is not None:
                with self._reported(f"the end of {what}"):
                    file.close()

    def step(self, step: int, epoch: int, samples: int, values: dict[str, float]) -> None:
        """Count a step. Every ``output.log_every`` steps, record the ``loss``, ``accuracy``, ``lr`` and speed."""
        self.progress.step(samples, values)
        self._samples += samples
        if step % self._every == 0:
            now = time.perf_counter()
            speed = self._samples / max(now - self._since, 1e-9)
            self._since, self._samples = now, 0
            self._write("step", step, epoch, {**values, "samples_per_second": speed})

    def epoch(self, step: int, epoch: int, epochs: int, values: dict[str, float]) -> None:
        """Record an evaluation, and print its line."""
        self._write("epoch", step, epoch, values)
        losses = f"train loss {values['train_loss']:.4f}  val loss {values['val_loss']:.4f}"
        rest = f"val accuracy {values['val_accuracy']:.4f}  {values['samples_per_second']:.0f} samples/s"
        self.progress.print(f"epoch {epoch}/{epochs}  step {step}  {losses}  {rest}")
        self._since, self._samples = time.perf_counter(), 0  # the next speed must not include the evaluation's time

    def print(self, line: str) -> None:
        """Print a line."""
        self.progress.print(line)

    def warn(self, line: str) -> None:
        """Log a warning."""
        self.progress.warn(line)

    def _write(self, kind: str, step: int, epoch: int, values: dict[str, float]) -> None:
        if self._metrics is not None:
            with self._reported(f"metrics.jsonl: step {step}", _CONTINUES):
                if not self._lock.is_mine():
                    return  # another process uses the folder: the training loop will end this run on all ranks
                now = datetime.now(UTC).isoformat(timespec="milliseconds")
                self._metrics.write(step=step, epoch=epoch, kind=kind, **values, time=now)
        if self._board is not None:
            with self._reported(f"TensorBoard's events: step {step}", _CONTINUES):
                for name, value in values.items():
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    @contextmanager
    def _reported(self, what: str, consequence: str = "") -> Iterator[None]:
        """Log a warning if a write in the block raises OSError, which must not end the run.

        ``consequence``, such as ``_CONTINUES``, is appended to the reason in the warning.
        """
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            self.warn(f"{what} could not be written ({reason}){consequence}; {cure_of(error)}")


def check_tensorboard(output: OutputSection) -> None:
    """Raise UserError if TensorBoard is requested, but missing."""
    if output.tensorboard:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise UserError(f"--tensorboard needs a package that is missing ({error}): pip install tensorboard") from error


def _board(folder: Path, done: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else None)
