"""Queue that runs asynchronous calls one after another, in one thread.

A collective call may consist of several primitives (exchange sizes, then gather), and all ranks must start primitives in
the same order. So asynchronous calls run in the order of submission, and a blocking call first drains the queue.
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
    """Handle of a collective call in the queue."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def wait(self) -> T:
        return self._future.result()

    def done(self) -> bool:
        return self._future.done()


class SerialQueue:
    """Queue of calls that run one at a time, in the order of submission."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[Any] | None = None

    def submit(self, call: Callable[[], T]) -> Work[T]:
        """Run ``call`` after all earlier calls. Does not block; an exception of ``call`` is raised by ``wait``."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dualtrain-collectives")
        # The current CUDA stream is per thread: run the call on the stream of its caller.
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def on_stream() -> T:
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                return call()

        self._last = self._thread.submit(on_stream)
        return Queued(self._last)

    def drain(self) -> None:
        """Block until all calls submitted so far have ended, with or without an error."""
        if self._last is not None:
            self._last.exception()
            self._last = None

    def close(self) -> None:
        """Block until the thread has ended."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
