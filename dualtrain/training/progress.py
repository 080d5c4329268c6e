"""Show the progress of a run: a bar on a terminal, and elsewhere a line every few seconds. Only rank 0 shows it."""

from __future__ import annotations

import logging
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

from tqdm import tqdm

from dualtrain.console import encodable, printable, show_progress
from dualtrain.processes import start_thread

T = TypeVar("T")
log = logging.getLogger("dualtrain")
_END_SECONDS = 1.0  # longest wait for a line that is being printed
_PAUSE_SECONDS = 5.0  # a ``Ticker`` block that begins within this time after the end of another continues that one


class Ticker:
    """A thread that prints ``line()`` every ``seconds`` inside its ``with`` block; never if ``seconds`` is 0.

    A block that begins within five seconds after the end of another one continues that block: lines are printed at the
    times at which one long block would print them.

    Attributes:
        printed: the time of the last line; before the first line, the time when the first of the continued blocks began.
    """

    _last = 0.0, -math.inf  # the last block of this process: its ``printed``, and the time of its end

    def __init__(self, seconds: float, line: Callable[[], str]) -> None:
        self._seconds, self._line = seconds, line
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        if self._seconds:
            now, (printed, ended) = time.monotonic(), Ticker._last
            self.printed = printed if now - ended < _PAUSE_SECONDS else now
            self._thread = start_thread(self._run, "progress")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        if self._seconds:
            self._thread.join(_END_SECONDS)
            Ticker._last = self.printed, time.monotonic()

    def _run(self) -> None:
        while not self._ended.wait(max(0.0, self.printed + self._seconds - time.monotonic())):
            self.printed = time.monotonic()
            show_progress(self._line())


class Waiting(Ticker):
    """A thread that prints, in its ``with`` block, how long the current phase has lasted, if ``shown`` (on rank 0)."""

    def __init__(self, what: str, seconds: float, *, shown: bool) -> None:
        super().__init__(seconds if shown else 0, lambda: f"{self._what} for {duration(time.monotonic() - self._began)}")
        self.phase(what)

    def phase(self, what: str) -> None:
        """Begin the phase ``what``."""
        self._what, self._began = what, time.monotonic()


def duration(seconds: float) -> str:
    """Format a time in its two largest units: ``45 s``, ``12 min 5 s``, ``3 h 5 min``, ``2 d 4 h``."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds % 60)} s" if minutes else f"{int(seconds)} s"


class Progress:
    """A progress bar on a terminal; elsewhere a line every ``seconds``, even if no step ends. Only rank 0 shows it.

    Args:
        total: optimizer steps in the whole run.
        done: steps before this start.
        shown: whether this is rank 0.
        launcher: the launcher that started the process.
        seconds: the time between lines; 0 for no lines.
    """

    def __init__(self, total: int, done: int, *, shown: bool, launcher: str, seconds: float) -> None:
        self._shown = shown
        # tqdm's own lock holds a semaphore in the file system. If a rank exits by os._exit, the semaphore would remain.
        tqdm.set_lock(threading.RLock())
        screen = shutil.get_terminal_size()
        self._bar = tqdm(
            total=total,
            initial=done,
            unit="step",
            file=sys.stdout,
            # mpirun gives ranks a terminal as standard output, but collects and tags their lines.
            disable=not (shown and sys.stdout.isatty() and launcher != "mpirun"),
            # tqdm draws nothing on a terminal of unknown size; shutil falls back to 80×24.
            ncols=screen.columns,
            nrows=screen.lines,
            mininterval=0.2,
        )
        self._ticker = Ticker(seconds if shown and self._bar.disable else 0, self._line)
        self._step, self._total, self._samples, self._loss = done, total, 0, 0.0
        self._line_step, self._line_samples, self._line_time = done, 0, time.monotonic()
        #: The number of the first step after this start, and the time of its end. The time left is estimated without this
        #: step, since it may include compilation or the start of workers.
        self._first: tuple[int, float] | None = None
        self.phase("starting")

    def __enter__(self) -> Self:
        self._ticker.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ticker.__exit__(kind, error, trace)
        self._bar.close()

    def phase(self, what: str, batches: int = 0) -> None:
        """Begin the phase ``what`` of ``batches`` batches (see :meth:`counted`).

        A line names the phase if no step has ended since the last line, or if the phase has counted a batch.
        """
        self._phase, self._phase_began, self._batches, self._all_batches = what, time.monotonic(), 0, batches

    def counted(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the ``batches`` of this phase, and count them."""
        for batch in batches:
            self._batches += 1
            yield batch

    def step(self, samples: int, values: dict[str, float]) -> None:
        """Advance by one optimizer step of ``samples`` samples; ``values`` are its ``loss``, ``accuracy`` and ``lr``."""
        self._step, self._samples, self._loss = self._step + 1, self._samples + samples, values["loss"]
        if self._first is None:
            self._first = self._step, time.monotonic()
        self._bar.update()
        if not self._bar.disable:
            words = f"loss {values['loss']:.4f}, accuracy {values['accuracy']:.3f}, lr {values['lr']:.3g}"
            self._bar.set_postfix_str(words, refresh=False)

    def _line(self) -> str:
        """Format the run's position, and its speed since the last line.

        Format the phase instead of the speed if no step has ended since then, or if the phase has counted a batch.
        """
        now = time.monotonic()
        steps, samples, seconds = self._step - self._line_step, self._samples - self._line_samples, now - self._line_time
        self._line_step, self._line_samples, self._line_time = self._step, self._samples, now
        position = f"step {self._step}/{self._total}"
        if not steps or self._batches:
            elapsed, finished, count = now - self._phase_began, self._batches - 1, self._all_batches
            batch = f", batch {self._batches} of {count}" if self._batches else ""
            left = f", {duration(elapsed / finished * (count - finished))} left" if finished > 0 else ""
            return f"{position}: {self._phase} for {duration(elapsed)}{batch}{left}"
        speed = f"{samples / max(seconds, 1e-9):.0f} samples/s"
        return f"{position}  loss {self._loss:.4f}  {speed}{self._left(now)}"

    def _left(self, now: float) -> str:
        """Format the time left, including evaluations and checkpoints; empty until this start has completed two steps."""
        if self._first is None or self._step == self._first[0]:
            return ""
        each = (now - self._first[1]) / (self._step - self._first[0])
        return f"  {duration(each * (self._total - self._step))} left"

    def print(self, line: str) -> None:
        """Print a line; above the bar, if there is one."""
        if not self._shown:
            return
        if self._bar.disable:
            show_progress(line)  # in one write: tqdm would write the line break separately
            return
        with suppress(OSError):  # a closed terminal must not end the training
            tqdm.write(encodable(printable(line), sys.stdout), file=sys.stdout)
            sys.stdout.flush()

    def warn(self, line: str) -> None:
        """Log a warning; above the bar, if there is one."""
        if self._shown:
            with suppress(OSError), tqdm.external_write_mode(sys.stderr):  # as in print
                log.warning("%s", line)
