"""What a run tells of itself while it goes: the bar, lines on the screen, metrics.jsonl, TensorBoard. On rank 0 alone."""

from __future__ import annotations

import dataclasses
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

from dualtrain.config import Config
from dualtrain.errors import UserError
from dualtrain.training.progress import Progress
from dualtrain.training.run_dir import MetricsFile


class Records:
    """The records of one run; on other ranks than 0 they do nothing. Making them raises OSError if that fails.

    Args:
        folder: the run's.
        config: its settings.
        shown: whether this is rank 0.
        launcher: what started the process.
        total: optimizer steps in the whole run.
        done: steps before this start.
    """

    def __init__(self, folder: Path, config: Config, *, shown: bool, launcher: str, total: int, done: int) -> None:
        self._bar = Progress(total, done, shown=shown, launcher=launcher)
        self._metrics = MetricsFile(folder, done, self._bar.say) if shown else None
        self._board = _board(folder, done) if shown and config.tensorboard else None
        self._every = config.log_every
        self._since, self._samples = time.perf_counter(), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.__exit__(kind, error, trace)
        for file in (self._metrics, self._board):
            if file is not None:
                with suppress(OSError):  # what could not be written has been reported
                    file.close()

    def step(self, step: int, epoch: int, samples: int, values: dict[str, float]) -> None:
        """One optimizer step is done: its ``loss``, ``accuracy`` and ``lr``."""
        self._bar.step(values)
        self._samples += samples
        if step % self._every == 0:
            now = time.perf_counter()
            speed = self._samples / max(now - self._since, 1e-9)
            self._since, self._samples = now, 0
            self._write("step", step, epoch, {**values, "samples_per_second": speed})

    def epoch(self, step: int, epoch: int, epochs: int, values: dict[str, float]) -> None:
        """An evaluation is done."""
        self._write("epoch", step, epoch, values)
        losses = f"train loss {values['train_loss']:.4f}  val loss {values['val_loss']:.4f}"
        rest = f"val accuracy {values['val_accuracy']:.4f}  {values['samples_per_second']:.0f} samples/s"
        self._bar.say(f"epoch {epoch}/{epochs}  step {step}  {losses}  {rest}")
        self._since, self._samples = time.perf_counter(), 0  # the evaluation's time is not the training's

    def say(self, line: str) -> None:
        """A line for people."""
        self._bar.say(line)

    def _write(self, kind: str, step: int, epoch: int, values: dict[str, float]) -> None:
        if self._metrics is not None:
            with self._going_on("metrics.jsonl", step):
                self._metrics.write(step=step, epoch=epoch, kind=kind, **values)
        if self._board is not None:
            with self._going_on("TensorBoard's events", step):
                for name, value in values.items():
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    @contextmanager
    def _going_on(self, what: str, step: int) -> Iterator[None]:
        """Reports what cannot be written, which is no reason to end the training."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            self.say(f"{what}: step {step} could not be written ({reason}): training goes on; free that place")


def opening(config: Config, model: nn.Module) -> str:
    """Return the whole configuration as text, and a table of the model's layers where torchinfo is installed."""
    settings = ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())
    lines = [f"settings: {textwrap.fill(settings, 116, subsequent_indent='  ')}"]
    with suppress(ImportError):
        import torchinfo

        lines.append(str(torchinfo.summary(model, depth=2, verbose=0, row_settings=("var_names",))))
    return "\n".join(lines)


def check_tensorboard(config: Config) -> None:
    """Raises UserError where TensorBoard is wanted and missing."""
    if config.tensorboard:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise UserError(f"--tensorboard needs a package that is missing ({error}): pip install tensorboard") from error


def _board(folder: Path, done: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else None)
