"""Messages between a process and a rank that it has started, over a socket pair."""

from __future__ import annotations

import os
import socket
import struct

_LENGTH = struct.Struct("!Q")


class Link:
    """One end of a socket pair. A message is its length in 8 bytes, and then its bytes."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._received = bytearray()

    def send(self, message: bytes) -> None:
        """Send a message. Raises TimeoutError after the socket's timeout, and OSError if the other end is closed."""
        self.socket.sendall(_LENGTH.pack(len(message)))
        self.socket.sendall(message)

    def receive(self) -> bytes:
        """Return the next message; block until it is complete. Raises EOFError if the other end closes first."""
        while (message := self.message()) is None:
            if not self.read():
                raise EOFError("the other end has closed the socket")
        return message

    def read(self) -> bool:
        """Read the available bytes; return False if the other end is closed.

        Blocks if there are none. A non-blocking socket raises BlockingIOError instead.
        """
        try:
            data = self.socket.recv(1 << 20)
        except ConnectionResetError:
            return False
        self._received += data
        return bool(data)

    def read_rest(self) -> None:
        """Read all available bytes, without blocking. The socket stays non-blocking afterwards."""
        self.socket.setblocking(False)
        try:
            while self.read():
                pass
        except BlockingIOError:
            pass  # no more bytes yet: the other end is still open, in the rank or in a process that the rank has forked

    def message(self) -> bytes | None:
        """Remove the first message that was read, and return it; return ``None`` if no message is complete."""
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        message = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return message


def inherited(descriptor: int) -> Link:
    """Return the inherited end of a socket pair. New programs that this process starts do not inherit it; forks do."""
    os.set_inheritable(descriptor, False)
    return Link(socket.socket(fileno=descriptor))
