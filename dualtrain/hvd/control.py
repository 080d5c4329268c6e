"""The way to rank 0's coordinator and back.

Every rank has one line to rank 0. There, one thread reads them all, and this rank's own messages, and lets the
coordinator answer. What a rank is told arrives in the order in which the coordinator said it.
"""

from __future__ import annotations

import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

from dualtrain.backends import Backend
from dualtrain.hvd.coordinator import Coordinator, Message
from dualtrain.hvd.settings import Settings, log
from dualtrain.rendezvous.connection import Connection, open_control_channel

_FAREWELL_SECONDS = 2.5


class Control(Protocol):
    """One rank's end of the way."""

    def send(self, message: Message) -> None:
        """Brings a message to the coordinator. Raises OSError when the way is gone."""

    def answers(self) -> Iterator[Message]:
        """What the coordinator tells this rank; blocks for the next. The last one is ``{"do": "down", …}``."""

    def close(self) -> None:
        """Hangs up, after everything that was said has been heard. Blocks for a moment."""


def control(
    backend: Backend, address: str, settings: Settings, note: Callable[[str, str, int], None], cycle: Callable[[], None]
) -> Control:
    """Opens the lines, and on rank 0 starts the coordinator. Collective; blocks.

    Args:
        backend: the ranks.
        address: rank 0's address on the interface that the ranks reach it by.
        settings: how long calls may wait.
        note: gets the coordinator's events, on rank 0.
        cycle: called on rank 0 when it looks for matching calls.
    """
    lines = open_control_channel(backend, address, "hvd")
    return _Center(backend.size, lines, settings, note, cycle) if backend.rank == 0 else _Spoke(lines[0])


class _Spoke:
    """Any rank's end but rank 0's."""

    def __init__(self, line: Connection) -> None:
        self._line = line

    def send(self, message: Message) -> None:
        self._line.send(message)

    def answers(self) -> Iterator[Message]:
        line, messages = self._line, self._line.buffered()
        line.socket.settimeout(None)
        try:
            while True:
                yield from messages
                messages = line.receive()
        except (OSError, ValueError):
            yield {"do": "down", "why": "rank 0 has shut Horovod down, or its program has ended"}

    def close(self) -> None:
        with suppress(OSError):
            self._line.socket.shutdown(socket.SHUT_RDWR)
        self._line.socket.close()


class _Center:
    """Rank 0's end: the coordinator, and a thread for it."""

    def __init__(
        self,
        size: int,
        lines: list[Connection],
        settings: Settings,
        note: Callable[[str, str, int], None],
        cycle: Callable[[], None],
    ) -> None:
        self._lines = {line.rank: line for line in lines}
        self._cycle = cycle
        self._own: deque[Message] = deque()  # this rank's messages
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._ear, self._bell = socket.socketpair()
        self._closing = threading.Event()
        waits = [seconds for seconds in (settings.stall_check, settings.stall_shutdown) if seconds]
        self._period = min(1.0, max(0.05, min(waits) / 4))
        self._coordinator = Coordinator(size, self._tell, settings, note)
        self._thread = threading.Thread(target=self._serve, name="dualtrain-hvd-match", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        self._own.append(message)
        self._bell.send(b"!")

    def answers(self) -> Iterator[Message]:
        while True:
            yield self._answers.get()

    def close(self) -> None:
        self._closing.set()
        with suppress(OSError):
            self._bell.send(b"!")
        self._thread.join(2 * _FAREWELL_SECONDS)
        self._bell.close()
        self._ear.close()

    def _tell(self, rank: int, message: Message) -> None:
        if rank == 0:
            self._answers.put(message)
            return
        with suppress(OSError):  # its line is read too, where this is noticed
            self._lines[rank].send(message)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._ear, selectors.EVENT_READ)
            for line in self._lines.values():
                line.socket.settimeout(None)
                selector.register(line.socket, selectors.EVENT_READ, line)
            try:
                for line in self._lines.values():
                    for message in line.buffered():
                        self._coordinator.receive(line.rank, message)
                self._match(selector)
            except Exception as error:  # nobody else would answer the ranks
                log.exception("rank 0 cannot match calls any more")
                self._coordinator.shut_down(f"rank 0 cannot match calls any more ({type(error).__name__}: {error})")
            self._farewell(selector)

    def _match(self, selector: selectors.BaseSelector) -> None:
        looked = time.monotonic()
        while not self._closing.is_set():
            for key, _ in selector.select(self._period):
                self._cycle()
                if key.data is not None:
                    self._hear(selector, key.data)
                else:
                    for _ in self._ear.recv(4096):
                        if self._own:
                            self._coordinator.receive(0, self._own.popleft())
            if time.monotonic() - looked > self._period:
                looked = time.monotonic()
                self._coordinator.look_for_stalls()

    def _hear(self, selector: selectors.BaseSelector, line: Connection) -> None:
        try:
            for message in line.receive():
                self._coordinator.receive(line.rank, message)
        except (OSError, ValueError):
            self._hang_up(selector, line)
            self._coordinator.receive(line.rank, {"kind": "shutdown"})

    def _hang_up(self, selector: selectors.BaseSelector, line: Connection) -> None:
        selector.unregister(line.socket)
        line.socket.close()

    def _farewell(self, selector: selectors.BaseSelector) -> None:
        """Ends the lines. The other ends read what was sent, then hang up: nothing is lost on the way."""
        for line in self._lines.values():
            with suppress(OSError):
                line.socket.shutdown(socket.SHUT_WR)
        selector.unregister(self._ear)
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(0.1):
                try:
                    key.data.receive()
                except (OSError, ValueError):
                    self._hang_up(selector, key.data)
        for line in self._lines.values():
            line.socket.close()
