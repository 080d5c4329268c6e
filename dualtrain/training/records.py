"""The records of a run: the progress bar, lines on the screen, metrics.jsonl, TensorBoard. On rank 0 alone."""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn
from tqdm import tqdm

from dualtrain.config import OutputSection
from dualtrain.console import printable
from dualtrain.errors import UserError
from dualtrain.training.run_dir import MetricsFile


class Progress:
    """A progress bar on a terminal, plain lines elsewhere; on rank 0 alone (``shown``)."""

    def __init__(self, total: int, done: int, *, shown: bool, launcher: str) -> None:
        self._shown = shown
        # tqdm's own lock holds a semaphore in the file system, which a rank that exits at once would leave behind.
        tqdm.set_lock(threading.RLock())
        screen = shutil.get_terminal_size()
        self._bar = tqdm(
            total=total,
            initial=done,
            unit="step",
            file=sys.stdout,
            # Under mpirun, standard output is a terminal of mpirun's, which tags and collects the lines.
            disable=not (shown and sys.stdout.isatty() and launcher != "mpirun"),
            # tqdm draws nothing on a terminal of unknown size; shutil falls back to 80×24.
            ncols=screen.columns,
            nrows=screen.lines,
            mininterval=0.2,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()

    def step(self, values: dict[str, float]) -> None:
        """Advance by one optimizer step, of this ``loss``, ``accuracy`` and ``lr``."""
        self._bar.update()
        if not self._bar.disable:
            words = f"loss {values['loss']:.4f}, accuracy {values['accuracy']:.3f}, lr {values['lr']:.3g}"
            self._bar.set_postfix_str(words, refresh=False)

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        if self._shown:
            with suppress(OSError):  # a full disk or a closed pipe must not end the training
                tqdm.write(printable(line), file=sys.stdout)
                sys.stdout.flush()


class Records:
    """The records of one run; on other ranks than 0 the methods do nothing. Making them raises OSError if that fails.

    Args:
        folder: the run's.
        output: what is recorded, and how often.
        shown: whether this is rank 0.
        launcher: what started the process.
        total: optimizer steps in the whole run.
        done: steps before this start.
    """

    def __init__(self, folder: Path, output: OutputSection, *, shown: bool, launcher: str, total: int, done: int) -> None:
        self._bar = Progress(total, done, shown=shown, launcher=launcher)
        self._metrics = MetricsFile(folder, done, self._bar.print) if shown else None
        self._board = _board(folder, done) if shown and output.tensorboard else None
        self._every = output.log_every
        self._since, self._samples = time.perf_counter(), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.__exit__(kind, error, trace)
        for file in (self._metrics, self._board):
            if file is not None:
                with suppress(OSError):  # the failed write has been reported
                    file.close()

    def step(self, step: int, epoch: int, samples: int, values: dict[str, float]) -> None:
        """Record an optimizer step: its ``loss``, ``accuracy`` and ``lr``."""
        self._bar.step(values)
        self._samples += samples
        if step % self._every == 0:
            now = time.perf_counter()
            speed = self._samples / max(now - self._since, 1e-9)
            self._since, self._samples = now, 0
            self._write("step", step, epoch, {**values, "samples_per_second": speed})

    def epoch(self, step: int, epoch: int, epochs: int, values: dict[str, float]) -> None:
        """Record an evaluation."""
        self._write("epoch", step, epoch, values)
        losses = f"train loss {values['train_loss']:.4f}  val loss {values['val_loss']:.4f}"
        rest = f"val accuracy {values['val_accuracy']:.4f}  {values['samples_per_second']:.0f} samples/s"
        self._bar.print(f"epoch {epoch}/{epochs}  step {step}  {losses}  {rest}")
        self._since, self._samples = time.perf_counter(), 0  # without the time of the evaluation

    def print(self, line: str) -> None:
        """Print a line."""
        self._bar.print(line)

    def _write(self, kind: str, step: int, epoch: int, values: dict[str, float]) -> None:
        if self._metrics is not None:
            with self._reported("metrics.jsonl", step):
                self._metrics.write(step=step, epoch=epoch, kind=kind, **values)
        if self._board is not None:
            with self._reported("TensorBoard's events", step):
                for name, value in values.items():
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    @contextmanager
    def _reported(self, what: str, step: int) -> Iterator[None]:
        """Report a failed write, which does not end the training."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            self.print(f"{what}: step {step} could not be written ({reason}): training goes on; free space there")


def opening(settings: Mapping[str, Any], model: nn.Module) -> str:
    """Format all settings, and a table of the model's layers where torchinfo is installed."""
    values = ", ".join(f"{name}={value}" for name, value in settings.items())
    lines = [f"settings: {textwrap.fill(values, 116, subsequent_indent='  ')}"]
    with suppress(ImportError):
        import torchinfo

        lines.append(str(torchinfo.summary(model, depth=2, verbose=0, row_settings=("var_names",))))
    return "\n".join(lines)


def check_tensorboard(output: OutputSection) -> None:
    """Raise UserError where TensorBoard is requested and missing."""
    if output.tensorboard:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise UserError(f"--tensorboard needs a package that is missing ({error}): pip install tensorboard") from error


def _board(folder: Path, done: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else None)
