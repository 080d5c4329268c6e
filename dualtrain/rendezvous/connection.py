"""Connections between rank 0 and every other rank, for words rather than tensors.

A star of TCP connections that carry lines of JSON. Rank 0 listens on one address, tells the others where and a secret
of this job, and closes the listening socket when all have called.
"""

from __future__ import annotations

import errno
import json
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from dualtrain.errors import BackendError

if TYPE_CHECKING:
    from dualtrain.backends.collectives import Backend

LINE_BYTES = 1 << 24
_NETWORK = {errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN}


class Line:
    """One end of a connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket, rank: int, longest: int = LINE_BYTES) -> None:
        self.connection = connection
        self.rank = rank
        self.address = str(connection.getpeername()[0])
        self.longest = longest
        self._rest = b""
        self._sending = threading.Lock()
        self.early: list[Any] = []  # what came together with the greeting
        connection.settimeout(5.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel asks after a silent peer, so that a host cut off from the network counts as gone within 10 s.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 9000)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: Any) -> None:
        """Sends one message; blocks while the other end's buffers are full. May be called by several threads."""
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            self.connection.sendall(data)

    def receive(self) -> list[Any]:
        """The messages that have arrived, one at least. Raises OSError or ValueError when there will be none."""
        while b"\n" not in self._rest:
            data = self.connection.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the other end has hung up")
            self._rest += data
            if len(self._rest) > self.longest:
                raise ValueError("a line without an end")
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]


def cut_off(error: Exception) -> bool:
    """Whether the network ended a line, or a host that is down: a process that ends has its kernel close the line."""
    return isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno in _NETWORK)


def star(backend: Backend, address: str, name: str) -> list[Line]:
    """The lines from rank 0 to every other rank, or from another rank to rank 0. Collective; blocks.

    Args:
        backend: the ranks; where and the secret are broadcast on it.
        address: rank 0's address on the interface that the ranks reach it by.
        name: what the lines are for, in reports.

    Raises:
        BackendError: a rank did not call within the backend's timeout, or rank 0 cannot be reached.
    """
    if backend.size == 1:
        return []
    return _accept(backend, address, name) if backend.rank == 0 else [_dial(backend, name)]


def _accept(backend: Backend, address: str, name: str) -> list[Line]:
    secret, callers = secrets.token_hex(32), dict[int, Line]()
    with socket.create_server((address, 0), backlog=backend.size) as server:
        deadline = time.monotonic() + backend.timeout
        backend.broadcast_object({"at": server.getsockname()[:2], "secret": secret}, name=name)
        while len(callers) < backend.size - 1:
            try:
                server.settimeout(max(deadline - time.monotonic(), 0.001))
                connection, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, backend.size)) - set(callers))
                raise BackendError(
                    f"{name}: ranks {missing} did not connect to rank 0 within {backend.timeout:g} s"
                ) from None
            try:
                line = Line(connection, rank=-1)
                hello, *line.early = line.receive()
                if not secrets.compare_digest(str(hello["secret"]), secret):
                    raise ValueError("not of this job")
                line.rank = int(str(hello["rank"]))
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                connection.close()  # a stranger
                continue
            callers[line.rank] = line
    return list(callers.values())


def _dial(backend: Backend, name: str) -> Line:
    where = backend.broadcast_object(name=name)
    try:
        line = Line(socket.create_connection(tuple(where["at"]), timeout=backend.timeout), rank=0)
        line.send({"rank": backend.rank, "secret": where["secret"]})
    except OSError as error:
        raise BackendError(f"{name}: rank {backend.rank} cannot reach rank 0 at {where['at']} ({error})") from error
    return line
