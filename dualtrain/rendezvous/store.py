"""Key-value store in which a job's processes find each other: one process serves it, and the others connect to it.

torch's own ``TCPStore`` lets any process that reaches its port read and write, for as long as the job runs. Here, both
ends prove that they know the job's secret before any request is accepted (:mod:`dualtrain.rendezvous.connection`), and
the listening socket closes when all ranks have joined; the ranks' connections stay open. Values are text.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol

from dualtrain.errors import UserError
from dualtrain.processes import start_thread
from dualtrain.rendezvous.connection import Connection, UnauthenticatedError

_SLICE_SECONDS = 1.0  # the longest wait in one request: threads that share a client take turns between requests
_GRACE_SECONDS = 3.0  # for clients to receive the reason why the job ends, and disconnect
_UNAUTHENTICATED = 64  # connections that may be in the handshake, besides those of the job's own processes
_DIAL_SECONDS = 5.0  # for one attempt to reach the server


class Store(Hashable, Protocol):
    """Interface of the server and the clients.

    Calls raise UserError after two processes have joined as the same rank or with different world sizes, and after the
    server could not start a thread for a process.
    """

    def call(self, what: str, key: str = "", value: Any = None, wait: float = 0.0) -> Any:
        """Carry out the operation ``what``. ``"get"`` and ``"has"`` wait for their keys for ``wait`` seconds at most.

        - ``"set"`` sets a value.
        - ``"get"`` returns a value, or None if there is none in time.
        - ``"add"`` adds a number to a value, and returns the sum.
        - ``"swap"`` takes ``[old, new]``. It sets the value to ``new`` if the value is ``old``, or if there is no value and
          ``old`` is ``""``. It returns the value that the key then has, or ``old`` if the key has none.
        - ``"drop"`` removes a key, and returns whether it was set.
        - ``"has"`` returns whether all keys of the list ``value`` are set in time.
        - ``"count"`` returns the number of keys.
        """
        ...

    def close(self) -> None:
        """On a client, disconnect; on the server, accept no further processes."""
        ...


class StoreServer:
    """Server for the ``size`` processes of a job, each with its own rank. Serves until the process that runs it ends.

    Args:
        listening: a bound socket that listens; it is closed when all processes have joined.
        size: number of processes of the job.
        secret: known to all processes of the job.
    """

    def __init__(self, listening: socket.socket, size: int, secret: str) -> None:
        self._listening = listening
        self._size = size
        self._secret = secret
        self._values: dict[str, str] = {}
        self._joined: dict[tuple[str, int], tuple[str, str]] = {}  # (world, rank): the process's id, and its description
        self._sizes: dict[str, tuple[int, str]] = {}  # world: its size, and the process that gave it first
        self._connected = 0
        self._handshakes = 0  # connections that are not authenticated yet
        self._closed = False
        self._broken: str | None = None
        self._changed = threading.Condition()
        start_thread(self._accept, "dualtrain-store")

    def join(self, rank: int, world: str, process: str, who: str, size: int) -> str | None:
        """Register a process; return why it is refused, or ``None``. A process that got no answer may join again.

        If two processes have the same rank, or the world sizes differ, all waiting and later calls fail too.
        """
        with self._changed:
            first, first_who = self._sizes.setdefault(world, (size, f"rank {rank}, {who}"))
            if first != size:
                return self._break(
                    f"rank {rank} ({who}) was started in a world of {size}, but another process in a world of {first} "
                    f"({first_who}): give every process the same world size"
                )
            if not 0 <= rank < self._size:
                return (
                    f"rank {rank} ({who}) is not one of this job's {self._size} ranks: "
                    "give every process the same world size"
                )
            other, other_who = self._joined.setdefault((world, rank), (process, who))
            if other != process:
                return self._break(
                    f"two processes are rank {rank} ({other_who}, and {who}): "
                    f"give each of the {self._size} its own rank, from 0 to {self._size - 1}"
                )
        return None

    def _break(self, reason: str) -> str:
        """Make all waiting and later calls fail with ``reason``, and return it. The caller holds ``_changed``."""
        self._broken = reason
        self._changed.notify_all()
        return reason

    def close_if_complete(self) -> None:
        """Stop listening if all processes have joined."""
        with self._changed:
            complete = len({process for process, _ in self._joined.values()}) >= self._size
        if complete:
            self.close()

    def call(self, what: str, key: str = "", value: Any = None, wait: float = 0.0, *, remote: bool = False) -> Any:
        """Carry out one operation: see :meth:`Store.call`. ``remote`` is true for a client's request."""
        with self._changed:
            if what in ("get", "has"):
                keys = [key] if what == "get" else value
                self._changed.wait_for(lambda: self._broken or all(each in self._values for each in keys), wait)
            if self._broken:
                if not remote:
                    # This process exits next, and the store with it: let the clients receive the reason first.
                    self._changed.wait_for(lambda: self._connected == 0, _GRACE_SECONDS)
                raise UserError(self._broken)
            result = self._apply(what, key, value)
            self._changed.notify_all()
            return result

    def close(self) -> None:
        """Stop listening; connected clients stay connected."""
        self._closed = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()

    def _apply(self, what: str, key: str, value: Any) -> Any:
        values = self._values
        if what == "set":
            values[key] = str(value)
        elif what == "add":
            values[key] = str(int(values.get(key, "0")) + int(value))
            return int(values[key])
        elif what == "swap":
            expected, new = value
            if values.get(key, "") == expected:
                values[key] = str(new)
            return values.get(key, expected)
        elif what == "drop":
            return values.pop(key, None) is not None
        elif what == "has":
            return all(each in values for each in value)
        elif what == "count":
            return len(values)
        elif what == "get":
            return values.get(key)
        else:
            raise ValueError(f"the store has no operation {what!r}")
        return None

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listening.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # probably too many open files: try again after unauthenticated peers are disconnected
                continue
            with self._changed:
                has_room = self._handshakes < _UNAUTHENTICATED + self._size
                self._handshakes += has_room
                self._connected += has_room
            if not has_room:
                accepted.close()
                continue
            # Each connection has its own thread, so that a peer which sends nothing does not delay the others.
            try:
                start_thread(self._serve, "dualtrain-store", (accepted,))
            except UserError as error:
                with self._changed:
                    self._handshakes -= 1
                    self._connected -= 1
                    self._break(f"rank 0's store cannot serve another process: {error}")
                accepted.close()

    def _serve(self, accepted: socket.socket) -> None:
        try:
            # Ignore clients that disconnect or fail the handshake.
            with accepted, suppress(OSError, ValueError, LookupError, TypeError):
                self._answer_requests(accepted)
        finally:
            with self._changed:
                self._connected -= 1
                self._changed.notify_all()

    def _answer_requests(self, accepted: socket.socket) -> None:
        try:
            connection = Connection.accept(accepted, self._secret, self._admit)
        finally:
            with self._changed:
                self._handshakes -= 1
        self.close_if_complete()
        accepted.settimeout(None)
        while True:
            for what, key, value, wait in connection.receive():
                connection.send(self._answer(what, key, value, wait))

    def _admit(self, rank: int, hello: Mapping[str, Any]) -> str | None:
        return self.join(rank, str(hello["world"]), str(hello["process"]), str(hello["who"]), int(hello["size"]))

    def _answer(self, what: str, key: str, value: Any, wait: float) -> dict[str, Any]:
        try:
            return {"value": self.call(what, key, value, wait, remote=True)}
        except UserError as error:
            return {"broken": str(error)}


class StoreClient:
    """Client of the job's server. Threads may share it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def call(self, what: str, key: str = "", value: Any = None, wait: float = 0.0) -> Any:
        """Carry out one operation: see :meth:`Store.call`.

        Raises:
            UserError: as :class:`Store`.
            OSError: the serving process has exited, or an exception such as KeyboardInterrupt has stopped an earlier call.
        """
        deadline = time.monotonic() + wait
        while True:
            left = max(0.0, deadline - time.monotonic())
            answer = self._ask([what, key, value, min(left, _SLICE_SECONDS)])
            if "broken" in answer:
                raise UserError(answer["broken"])
            if what not in ("get", "has") or answer["value"] not in (None, False) or left <= _SLICE_SECONDS:
                return answer["value"]

    def close(self) -> None:
        """Disconnect."""
        self._connection.socket.close()

    def _ask(self, request: list[Any]) -> dict[str, Any]:
        with self._lock:
            try:
                self._connection.send(request)
                [answer] = self._connection.receive()
            except BaseException:
                self.close()  # otherwise the next call would receive the reply to this request
                raise
            return dict(answer)


def serve(listening: socket.socket, size: int, secret: str, world: str = "") -> StoreServer:
    """Start a server on a listening socket, and register this process as rank 0 of ``world``. Does not block."""
    server = StoreServer(listening, size, secret)
    server.join(0, world, _process(), _who(), size)
    server.close_if_complete()
    return server


@contextmanager
def store_for_children(size: int) -> Iterator[tuple[tuple[str, int], str]]:
    """Serve a store for ``size`` processes that this process starts; yield its address and secret.

    After the block, the store accepts no new connections.
    """
    secret = secrets.token_hex(32)
    # Listen before the processes get the port: otherwise another program could bind the port first.
    listening = listen("127.0.0.1", [0], size)
    host, port = listening.getsockname()
    server = StoreServer(listening, size, secret)
    try:
        yield (host, port), secret
    finally:
        server.close()


def listen(host: str, ports: Sequence[int], backlog: int) -> socket.socket:
    """Listen on the first free port of ``ports`` (0 means any port) at ``host``. Raises OSError if it can use none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    family, _, _, _, where = min(found, key=lambda each: each[0] != socket.AF_INET)
    for port in ports:
        try:
            return socket.create_server((str(where[0]), port), family=family, backlog=max(backlog, 16))
        except OSError as error:
            if port == ports[-1]:
                raise error
    raise ValueError("no ports")


def dial(
    host: str, ports: Sequence[int], rank: int, size: int, secret: str, timeout: float, world: str = ""
) -> StoreClient:
    """Connect to the job's server at one of ``ports``, as ``rank`` of ``world``, which has ``size`` ranks.

    Blocks. The server may start later than this process, so failed attempts are repeated for ``timeout`` seconds. If
    there is a single port, this function gives up at once if the process there does not belong to this job.

    Raises:
        UserError: this job's server does not listen at any of the ports, or it refuses this rank.
    """
    deadline = time.monotonic() + timeout
    fields = {"world": world, "size": size, "process": _process(), "who": _who()}
    pause = 0.01
    while True:
        reasons, final = [], False
        for port in ports:
            try:
                seconds = min(_DIAL_SECONDS, max(0.1, deadline - time.monotonic()))
                connection = Connection.dial((host, port), rank, secret, seconds, fields)
                connection.socket.settimeout(None)
                return StoreClient(connection)
            except UserError:
                raise  # the server would refuse this process again
            except UnauthenticatedError:
                reasons.append("the process there is not of this job, or has another DUALTRAIN_SECRET")
                final = len(ports) == 1  # otherwise this job's server may listen at the next port
            except (OSError, ValueError, KeyError, TypeError) as error:
                reasons.append(getattr(error, "strerror", None) or str(error))
        if final or time.monotonic() > deadline:
            within = "" if final else f" within {timeout:g} s"
            raise UserError(
                f"rank {rank} could not meet the others at {host}:{ports[0]}{within} ({reasons[0]}): check that the "
                "address is rank 0's, that the port is open, and that all processes were started"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


@cache
def _process() -> str:
    """Random id of this process."""
    return secrets.token_hex(8)


def _who() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
