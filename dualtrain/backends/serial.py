"""Asynchronous calls, one after another.

A derived call is several primitives with decisions between them (exchange sizes, then gather), and all ranks must
issue primitives in one order. So asynchronous calls run in one thread in the order of submission, and whoever issues
a primitive outside that thread first lets it finish (``settle``): the order on the wire is the order of the program.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from dualtrain.backends.base import Work

T = TypeVar("T")


class Queued(Work[T]):
    """A derived call that runs, or waits for its turn, in the queue's thread."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def wait(self) -> T:
        return self._future.result()

    def done(self) -> bool:
        return self._future.done()


class SerialQueue:
    """Runs calls one at a time, in the order in which they were submitted."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[Any] | None = None

    def submit(self, call: Callable[[], T]) -> Work[T]:
        """Has ``call`` run after all earlier ones. Does not block; what it raises is raised by ``wait``."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dualtrain-collectives")
        # A CUDA stream belongs to the thread: the call goes on the stream that its caller is on.
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def on_stream() -> T:
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                return call()

        self._last = self._thread.submit(on_stream)
        return Queued(self._last)

    def settle(self) -> None:
        """Blocks until everything submitted so far has ended, well or not."""
        if self._last is not None:
            self._last.exception()
            self._last = None

    def close(self) -> None:
        """Blocks until the thread has ended."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
