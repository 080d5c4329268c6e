"""Control channel of Horovod's API: a connection to rank 0's coordinator from each of the other ranks.

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
from dualtrain.hvd.coordinator import ENDED, Coordinator
from dualtrain.hvd.disagreement import Message
from dualtrain.processes import start_thread
from dualtrain.rendezvous.connection import Connection, frame, open_control_channel

_CLOSING_SECONDS = 2.5


class Control(Protocol):
    """A rank's end of the control channel."""

    def send(self, message: Message) -> None:
        """Send a message to the coordinator. Raises OSError if the connection is closed."""

    def answers(self) -> Iterator[Message]:
        """Yield the coordinator's messages to this rank; block until one arrives. The last is ``{"do": "down", …}``."""

    def close(self) -> None:
        """Close this end.

        On rank 0, wait until the other ends are closed and the coordinator's thread has ended, for at most 5 s.
        """


def control(
    backend: Backend, address: str, settings: Settings, note: Callable[[str, str, int], None], cycle: Callable[[], None]
) -> Control:
    """Open the connections, and on rank 0 start the coordinator. Collective; blocks.

    Args:
        backend: the world.
        address: rank 0's address on the interface through which the ranks reach it.
        settings: how long calls may wait.
        note: called on rank 0 with each event of the coordinator; see ``Coordinator``.
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
            yield {"do": "down", "why": f"rank 0 {ENDED}"}

    def close(self) -> None:
        with suppress(OSError):
            self._connection.socket.shutdown(socket.SHUT_RDWR)
        self._connection.socket.close()


class _Outbox:
    """Queue of messages to one rank. Sending does not block.

    A rank may leave its messages unread for a long time, because it executes a long call or its process is stopped.
    Meanwhile, the coordinator's thread must serve the other ranks, and report which rank a call waits for.
    """

    def __init__(self, connection: Connection) -> None:
        self._socket = connection.socket
        self._unsent = bytearray()
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Unread messages must not end the connection after a timeout. ``watch.py`` detects a host that is cut off.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)

    def send(self, message: Message) -> bool:
        """Send ``message`` after the earlier ones; return whether all is sent. Raises OSError if the connection ended."""
        self._unsent += frame(message)
        return self.flush()

    def flush(self) -> bool:
        """Send as much as the system accepts now, and return whether all is sent."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return False
        return True


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
        self._outboxes = {connection.rank: _Outbox(connection) for connection in connections}
        self._selector = selectors.DefaultSelector()
        self._cycle = cycle
        self._own_messages: deque[Message] = deque()  # sent by rank 0 itself
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wake_up, self._waker = socket.socketpair()
        self._closing = threading.Event()
        waits = [seconds for seconds in (settings.stall_check, settings.stall_shutdown) if seconds]
        self._period = min(1.0, max(0.05, min(waits) / 4))
        self._coordinator = Coordinator(size, self._send_to, settings, note)
        self._thread = start_thread(self._serve, "dualtrain-hvd-match")

    def send(self, message: Message) -> None:
        self._own_messages.append(message)
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
            if not self._outboxes[rank].send(message):
                self._select_for(self._connections[rank], selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _select_for(self, connection: Connection, events: int) -> None:
        self._selector.modify(connection.socket, events, connection)

    def _serve(self) -> None:
        with self._selector as selector:
            selector.register(self._wake_up, selectors.EVENT_READ)
            for connection in self._connections.values():
                connection.socket.settimeout(None)
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            try:
                for connection in self._connections.values():
                    for message in connection.buffered():
                        self._coordinator.receive(connection.rank, message)
                self._handle_messages()
            except Exception as error:  # otherwise the ranks would wait for an answer forever
                log.exception("rank 0 cannot match calls any more")
                self._coordinator.shut_down(f"rank 0 cannot match calls any more ({type(error).__name__}: {error})")
            self._close_connections()

    def _handle_messages(self) -> None:
        last_look = time.monotonic()
        while not self._closing.is_set():
            for key, events in self._selector.select(self._period):
                if key.data is not None and events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if not events & selectors.EVENT_READ:
                    continue
                self._cycle()
                if key.data is not None:
                    self._receive(key.data)
                else:
                    for _ in self._wake_up.recv(4096):
                        if self._own_messages:
                            self._coordinator.receive(0, self._own_messages.popleft())
            if time.monotonic() - last_look > self._period:
                last_look = time.monotonic()
                self._coordinator.look_for_stalls()

    def _flush(self, connection: Connection) -> bool:
        """Send more of the unsent messages, and return whether all are sent."""
        try:
            sent = self._outboxes[connection.rank].flush()
        except OSError:
            sent = True  # reading from this connection fails too
        if sent:
            self._select_for(connection, selectors.EVENT_READ)
        return sent

    def _receive(self, connection: Connection) -> None:
        try:
            for message in connection.receive():
                self._coordinator.receive(connection.rank, message)
        except (OSError, ValueError):
            self._drop(connection)
            self._coordinator.receive(connection.rank, {"kind": "shutdown"})

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _close_connections(self) -> None:
        """Shut the connections down, and wait until the other ends have read all messages and closed; at most 2.5 s."""
        selector, deadline = self._selector, time.monotonic() + _CLOSING_SECONDS
        selector.unregister(self._wake_up)
        for key in list(selector.get_map().values()):
            if self._flush(key.data):
                _end_sending(key.data)
        while selector.get_map() and time.monotonic() < deadline:
            for key, events in selector.select(0.1):
                if events & selectors.EVENT_WRITE and self._flush(key.data):
                    _end_sending(key.data)
                if events & selectors.EVENT_READ:
                    try:
                        key.data.receive()
                    except (OSError, ValueError):
                        self._drop(key.data)
        for connection in self._connections.values():
            connection.socket.close()


def _end_sending(connection: Connection) -> None:
    with suppress(OSError):
        connection.socket.shutdown(socket.SHUT_WR)
