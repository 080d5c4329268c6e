"""The control channel: one connection from every rank to rank 0's coordinator.

On rank 0, one thread receives the messages of all ranks, including rank 0, and passes them to the coordinator, which
answers. Messages to one rank arrive in the order in which they were sent.
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
from dualtrain.horovod_variables import Settings, log
from dualtrain.hvd.coordinator import Coordinator
from dualtrain.hvd.disagreement import Message
from dualtrain.rendezvous.connection import Connection, open_control_channel

_CLOSING_SECONDS = 2.5


class Control(Protocol):
    """A rank's end of the control channel."""

    def send(self, message: Message) -> None:
        """Send a message to the coordinator. Raises OSError if the connection is closed."""

    def answers(self) -> Iterator[Message]:
        """Yield the coordinator's messages to this rank; block until one arrives. The last is ``{"do": "down", …}``."""

    def close(self) -> None:
        """Close this end. Rank 0 waits up to 5 s for the other ranks to close their ends."""


def control(
    backend: Backend, address: str, settings: Settings, note: Callable[[str, str, int], None], cycle: Callable[[], None]
) -> Control:
    """Open the connections, and on rank 0 start the coordinator. Collective; blocks.

    Args:
        backend: the ranks.
        address: rank 0's address on the interface through which the ranks reach it.
        settings: how long calls may wait.
        note: called on rank 0 with each event of the coordinator.
        cycle: called on rank 0 whenever requests have arrived, before they are matched.
    """
    connections = open_control_channel(backend, address, "hvd")
    return (
        _CoordinatorEnd(backend.size, connections, settings, note, cycle)
        if backend.rank == 0
        else _WorkerEnd(connections[0])
    )


class _WorkerEnd:
    """The channel's end on a rank other than rank 0."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: Message) -> None:
        self._connection.send(message)

    def answers(self) -> Iterator[Message]:
        connection, messages = self._connection, self._connection.buffered()
        connection.socket.settimeout(None)
        try:
            while True:
                yield from messages
                messages = connection.receive()
        except (OSError, ValueError):
            yield {"do": "down", "why": "rank 0 has shut Horovod down, or its program has ended"}

    def close(self) -> None:
        with suppress(OSError):
            self._connection.socket.shutdown(socket.SHUT_RDWR)
        self._connection.socket.close()


class _CoordinatorEnd:
    """The channel's end on rank 0: the coordinator and its thread."""

    def __init__(
        self,
        size: int,
        connections: list[Connection],
        settings: Settings,
        note: Callable[[str, str, int], None],
        cycle: Callable[[], None],
    ) -> None:
        self._connections = {connection.rank: connection for connection in connections}
        self._cycle = cycle
        self._own: deque[Message] = deque()  # this rank's messages
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wake_up, self._waker = socket.socketpair()
        self._closing = threading.Event()
        waits = [seconds for seconds in (settings.stall_check, settings.stall_shutdown) if seconds]
        self._period = min(1.0, max(0.05, min(waits) / 4))
        self._coordinator = Coordinator(size, self._send_to, settings, note)
        self._thread = threading.Thread(target=self._serve, name="dualtrain-hvd-match", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        self._own.append(message)
        self._waker.send(b"!")

    def answers(self) -> Iterator[Message]:
        while True:
            yield self._answers.get()

    def close(self) -> None:
        self._closing.set()
        with suppress(OSError):
            self._waker.send(b"!")
        self._thread.join(2 * _CLOSING_SECONDS)
        self._waker.close()
        self._wake_up.close()

    def _send_to(self, rank: int, message: Message) -> None:
        if rank == 0:
            self._answers.put(message)
            return
        with suppress(OSError):  # reading from this connection fails too, and _receive handles that
            self._connections[rank].send(message)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_up, selectors.EVENT_READ)
            for connection in self._connections.values():
                connection.socket.settimeout(None)
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            try:
                for connection in self._connections.values():
                    for message in connection.buffered():
                        self._coordinator.receive(connection.rank, message)
                self._match(selector)
            except Exception as error:  # otherwise the ranks would wait for an answer forever
                log.exception("rank 0 cannot match calls any more")
                self._coordinator.shut_down(f"rank 0 cannot match calls any more ({type(error).__name__}: {error})")
            self._close_connections(selector)

    def _match(self, selector: selectors.BaseSelector) -> None:
        looked = time.monotonic()
        while not self._closing.is_set():
            for key, _ in selector.select(self._period):
                self._cycle()
                if key.data is not None:
                    self._receive(selector, key.data)
                else:
                    for _ in self._wake_up.recv(4096):
                        if self._own:
                            self._coordinator.receive(0, self._own.popleft())
            if time.monotonic() - looked > self._period:
                looked = time.monotonic()
                self._coordinator.look_for_stalls()

    def _receive(self, selector: selectors.BaseSelector, connection: Connection) -> None:
        try:
            for message in connection.receive():
                self._coordinator.receive(connection.rank, message)
        except (OSError, ValueError):
            self._drop(selector, connection)
            self._coordinator.receive(connection.rank, {"kind": "shutdown"})

    def _drop(self, selector: selectors.BaseSelector, connection: Connection) -> None:
        selector.unregister(connection.socket)
        connection.socket.close()

    def _close_connections(self, selector: selectors.BaseSelector) -> None:
        """Shut the connections down, and wait until the other ends have read all messages and closed; at most 2.5 s."""
        for connection in self._connections.values():
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)
        selector.unregister(self._wake_up)
        deadline = time.monotonic() + _CLOSING_SECONDS
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(0.1):
                try:
                    key.data.receive()
                except (OSError, ValueError):
                    self._drop(selector, key.data)
        for connection in self._connections.values():
            connection.socket.close()
