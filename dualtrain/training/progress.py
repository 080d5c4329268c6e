"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere, on rank 0 alone."""

from __future__ import annotations

import shutil
import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from tqdm import tqdm

from dualtrain.console import printable


class Progress:
    """A bar over the optimizer steps of a run, with one line for each epoch."""

    def __init__(self, total: int, done: int, *, shown: bool, launcher: str) -> None:
        self._shown = shown
        # Its own lock is shared by processes, and a semaphore that a rank which stops at once would leave behind.
        tqdm.set_lock(threading.RLock())
        screen = shutil.get_terminal_size()
        self._bar = tqdm(
            total=total,
            initial=done,
            unit="step",
            file=sys.stdout,
            # mpirun gives its processes a terminal of its own, and tags and collects what they write to it.
            disable=not (shown and sys.stdout.isatty() and launcher != "mpirun"),
            # tqdm draws nothing on a terminal that does not know its size; this falls back to 80×24.
            ncols=screen.columns,
            nrows=screen.lines,
            mininterval=0.2,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()

    def step(self, values: dict[str, float]) -> None:
        """One optimizer step is done: its ``loss``, ``accuracy`` and ``lr``."""
        self._bar.update()
        if not self._bar.disable:
            words = f"loss {values['loss']:.4f}, accuracy {values['accuracy']:.3f}, lr {values['lr']:.3g}"
            self._bar.set_postfix_str(words, refresh=False)

    def say(self, line: str) -> None:
        """A line of its own, above the bar."""
        if self._shown:
            with suppress(OSError):  # a full disk or a closed pipe behind it is no reason to lose the training
                tqdm.write(printable(line), file=sys.stdout)
                sys.stdout.flush()
