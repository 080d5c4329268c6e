"""A pending collective call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dualtrain.hvd.disagreement import Message
from dualtrain.hvd.exceptions import HorovodInternalError

#: Seconds between two calls of ``progress`` in a wait: with unfinished operations in shared memory, and without.
SLICE_SECONDS, _IDLE_SECONDS = 5e-4, 0.25
#: A wait is reported after ``BLOCKED_SECONDS``, and then repeatedly, so that rank 0 finds ranks that wait for each other.
BLOCKED_SECONDS, _REPEAT_SECONDS = 5.0, 1.0


def _nothing(*_: Any) -> int:
    return 0


@dataclass
class Pending:
    """A call that this rank has made, with its tensors and, after it has ended, its result.

    Attributes:
        message: the request that was sent to the coordinator.
        tensors: this rank's inputs.
        outputs: where the results go; ``None`` for new tensors.
        on_open: function that the engine's thread calls with the two items of the result (the channel and the list of
            sparse gradients), before ``ended`` is set; only for a call that opens a channel.
        ended: set when there is a result or an error.
        facts: rank 0's description of the matched call, such as every rank's ``rows`` and ``splits``.
        events: GPU events after which the inputs are ready; after the call has ended, the events of the results.
        on_blocked: called with the message while the main thread waits, beginning after ``BLOCKED_SECONDS``.
        progress: advances operations in shared memory, for which other ranks may wait, and returns how many are left.
    """

    message: Message
    tensors: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] | None = None
    on_open: Callable[[Any, Any], None] | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    facts: Message = field(default_factory=dict)
    result: Any = None
    error: HorovodInternalError | None = None
    events: list[Any] = field(default_factory=list)
    on_blocked: Callable[[Message], object] = _nothing
    progress: Callable[[], int] = _nothing

    def wait_for_end(self) -> None:
        """Block until there is a result or an error."""
        limit = time.monotonic() + BLOCKED_SECONDS
        while not self.ended.wait(slice_seconds(self.progress)):
            # Report only waits of the main thread: while another thread waits, the program can still make calls.
            if time.monotonic() > limit and threading.current_thread() is threading.main_thread():
                self.on_blocked(self.message)
                limit = time.monotonic() + _REPEAT_SECONDS

    def wait(self) -> Any:
        """Block until the result can be used on the current stream; return it.

        Raises:
            HorovodInternalError: the call failed.
        """
        self.wait_for_end()
        if self.error is not None:
            # A new exception each time, because several callers may wait.
            raise HorovodInternalError(*self.error.args) from self.error
        for event in self.events:
            torch.cuda.current_stream().wait_event(event)
        return self.result


def slice_seconds(progress: Callable[[], int]) -> float:
    """Call ``progress``, and return how many seconds the caller may sleep before the next call of this function."""
    return SLICE_SECONDS if progress() else _IDLE_SECONDS
