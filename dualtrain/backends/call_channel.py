"""The control channel on which the ranks of a backend compare their calls: a connection from every rank to rank 0.

An exchange gathers a message of every rank on rank 0, and sends rank 0's reply to all other ranks: 2 * (size - 1) messages.
The caller's own thread sends and receives them. In a library such as Gloo, every message also passes through the library's
threads; if ranks outnumber cores, switching between threads takes most of the time of a short call.

Each message is sent as a frame: the number of bytes that follow (int64), then these bytes. Frames of different ranks may
differ in length.
"""

from __future__ import annotations

import socket
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from inspect import GEN_CLOSED, getgeneratorstate

from dualtrain.rendezvous.connection import Connection

HEADER = 8  # size of a frame's header in bytes; the header is the number of bytes that follow it


class CallChannel:
    """One rank's end of the connections, for one exchange at a time.

    If an exchange times out on this rank, the next exchange first finishes it, so that the ranks stay in step. Until then,
    the buffers of the exchange that timed out must not be changed. If an exchange fails in another way, or is interrupted
    while it sends or receives, all later exchanges fail, since it is unknown how much of it was received.

    Args:
        rank: this rank.
        size: the number of ranks.
        connections: on rank 0, one to every other rank; on other ranks, one to rank 0.
        await_all: function that runs an exchange: it calls ``next`` on the given iterator until the iterator ends. A call
            of ``next`` returns when a single send or receive has blocked for the time that :meth:`limit` sets, or raises
            OSError or ValueError.
    """

    def __init__(
        self, rank: int, size: int, connections: Sequence[Connection], await_all: Callable[[Iterator[None]], None]
    ) -> None:
        self._rank, self._size, self._await = rank, size, await_all
        self._sockets = [one.socket for one in sorted(connections, key=lambda one: one.rank)]
        self._unfinished: deque[Generator[None, None, None]] = deque()
        self._seconds = 0.0
        self.limit(0.25)
        for one in self._sockets:
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                # If a message is longer than the system's buffers, its sender waits until the other rank makes its call.
                # The system must not mistake this wait for a broken connection. ``watch.py`` detects a host that is cut
                # off.
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)

    def limit(self, seconds: float) -> None:
        """Set the time in seconds after which a blocked send or receive pauses, so that the caller can do other work."""
        if seconds != self._seconds:
            self._seconds = seconds
            for one in self._sockets:
                one.settimeout(seconds)

    def exchange(
        self,
        message: memoryview,
        rows: Sequence[memoryview],
        reply: memoryview,
        answer: Callable[[], memoryview],
        *,
        exact: bool = False,
    ) -> None:
        """Gather every other rank's frame ``message`` on rank 0, then copy rank 0's answer to all other ranks. Blocks.

        Fails if a connection ends, a frame is longer than its buffer, or an earlier exchange failed or was interrupted.

        Args:
            message: this rank's frame; not used on rank 0.
            rows: on rank 0, a buffer for the frame of each other rank, in rank order.
            reply: on other ranks, a buffer for the answer.
            answer: called on rank 0 when ``rows`` have arrived; returns the frame to send to the other ranks.
            exact: whether an answer that is shorter than ``reply`` is an error. Such an answer shows that rank 0 is in a
                different kind of exchange.
        """
        self._unfinished.append(self._steps(message, rows, reply, answer, exact))
        self._await(self._finish())

    def allgather(self, data: bytes) -> list[bytes]:
        """Return, on every rank, all ranks' ``data`` (of equal length) in rank order. Blocks. Fails as :meth:`exchange`."""
        length = len(data)
        rows = [memoryview(bytearray(HEADER + length)) for _ in self._sockets]
        reply = memoryview(bytearray(HEADER + length * self._size))

        def answer() -> memoryview:
            if any(_length(row) != length for row in rows):
                raise ValueError("the ranks sent messages of different lengths")
            reply[:] = _frame(b"".join([data, *(row[HEADER:] for row in rows)]))
            return reply

        self.exchange(memoryview(_frame(data)), rows, reply, answer, exact=True)
        gathered = bytes(reply[HEADER:])
        return [gathered[length * rank : length * (rank + 1)] for rank in range(self._size)]

    def close(self) -> None:
        """Close the connections, so that exchanges of the other ranks fail. May be called again."""
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # ends the connection even if a forked child has inherited it
            one.close()

    def _finish(self) -> Iterator[None]:
        """Run the unfinished exchanges, oldest first. If the oldest has failed before, close the connections and raise."""
        while self._unfinished:
            if getgeneratorstate(self._unfinished[0]) == GEN_CLOSED:
                self.close()  # so that the other ranks don't wait for this rank
                while len(self._unfinished) > 1:
                    self._unfinished.pop()  # don't keep the buffers of later exchanges alive
                raise ConnectionAbortedError("an earlier comparison of calls has failed or was interrupted on this rank")
            for _ in self._unfinished[0]:  # not ``yield from``, which would close the generator if the wait times out
                yield
            self._unfinished.popleft()

    def _steps(
        self,
        message: memoryview,
        rows: Sequence[memoryview],
        reply: memoryview,
        answer: Callable[[], memoryview],
        exact: bool,
    ) -> Generator[None, None, None]:
        if self._rank == 0:
            for one, row in zip(self._sockets, rows, strict=True):
                yield from _receive(one, row)
            frame = answer()
            for one in self._sockets:
                yield from _send(one, frame)
        else:
            yield from _send(self._sockets[0], message)
            yield from _receive(self._sockets[0], reply)
            if exact and HEADER + _length(reply) != len(reply):
                raise ValueError("the answer of rank 0 belongs to another kind of exchange")


def _send(peer: socket.socket, frame: memoryview) -> Iterator[None]:
    sent = 0
    while sent < len(frame):
        try:
            sent += peer.send(frame[sent:])
        except TimeoutError:
            yield


def _receive(peer: socket.socket, buffer: memoryview) -> Iterator[None]:
    received, end = 0, HEADER
    while received < end:
        try:
            count = peer.recv_into(buffer[received:])
        except TimeoutError:
            yield
            continue
        if count == 0:
            raise ConnectionResetError("a rank has closed its connection")
        if received < HEADER <= received + count:
            end = HEADER + _length(buffer)
        received += count
        if end > len(buffer) or received > max(end, HEADER):
            raise ValueError("a message does not have the expected length")


def _frame(data: bytes) -> bytearray:
    return bytearray(len(data).to_bytes(HEADER, sys.byteorder) + data)


def _length(frame: memoryview) -> int:
    """Return the number of bytes after the header of ``frame``."""
    return int.from_bytes(frame[:HEADER], sys.byteorder)
