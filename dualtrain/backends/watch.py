"""Knowing that a rank is gone, which one, and why.

A collective with a dead rank ends in a reset connection at its neighbours and in silence elsewhere, and neither says
who died. So every rank keeps one connection to rank 0 beside the backend's own. What breaks it is told to all: a rank
that raised sends its reason and traceback first, a rank that was killed just disappears, and every wait of a backend
(``Primitives.await_bounded``) asks here whether it still makes sense.

Lines of JSON over TCP; who calls must know a secret of this job; the listening socket is closed when all have called.
"""

from __future__ import annotations

import atexit
import json
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dualtrain.errors import BackendError

if TYPE_CHECKING:
    from dualtrain.backends.collectives import Backend


@dataclass(frozen=True)
class Loss:
    """Which rank is gone and what is known of it. ``quiet`` where it left in good order: only who waits for it minds."""

    rank: int
    reason: str
    quiet: bool = False

    def describe(self) -> str:
        """For people: one line, then the lost rank's traceback if it sent one."""
        return f"rank {self.rank} {self.reason}"


_LINE_BYTES = 1 << 20


class _Line:
    """One end of a connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.connection = connection
        self.rank = rank
        self._rest = b""
        self.early: list[dict[str, Any]] = []  # what came together with the greeting
        connection.settimeout(5.0)
        # The kernel asks after a silent peer, so that a host cut off from the network counts as gone within 10 s.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 9000)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: dict[str, object]) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived, one at least. Raises OSError or ValueError when there will be none."""
        while b"\n" not in self._rest:
            data = self.connection.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the other end has hung up")
            self._rest += data
            if len(self._rest) > _LINE_BYTES:
                raise ValueError("a line without an end")
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]


class Watch:
    """One rank's end of the job's lifelines.

    Args:
        backend: a connected backend; making the watch is a collective call on it.
        address: rank 0's address on the interface that the ranks reach it by.
    """

    def __init__(self, backend: Backend, address: str) -> None:
        self.backend = backend
        self.loss: Loss | None = None
        self.on_loss: Callable[[Loss], None] | None = None
        self._heard = threading.Event()
        self._lock = threading.Lock()
        self._leaving = False
        self._lines: list[_Line] = []
        if backend.size > 1:  # a world of one has nobody to watch, and opens no socket
            self._lines = self._accept(address) if backend.rank == 0 else [self._dial()]
            threading.Thread(target=self._listen, name="dualtrain-watch", daemon=True).start()

    def _accept(self, address: str) -> list[_Line]:
        """Rank 0 listens until every other rank has called."""
        backend, secret, callers = self.backend, secrets.token_hex(32), dict[int, _Line]()
        with socket.create_server((address, 0), backlog=backend.size) as server:
            deadline = time.monotonic() + backend.timeout
            backend.broadcast_object({"at": server.getsockname()[:2], "secret": secret}, name="watch")
            while len(callers) < backend.size - 1:
                try:
                    server.settimeout(max(deadline - time.monotonic(), 0.001))
                    connection, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, backend.size)) - set(callers))
                    raise BackendError(f"ranks {missing} did not connect to rank 0 within {backend.timeout:g} s") from None
                line = _Line(connection, rank=-1)
                try:
                    hello, *line.early = line.receive()
                    if not secrets.compare_digest(str(hello["secret"]), secret):
                        raise ValueError("not of this job")
                    line.rank = int(str(hello["rank"]))
                except (OSError, ValueError, KeyError, TypeError, RecursionError):
                    connection.close()  # a stranger
                    continue
                callers[line.rank] = line
        return list(callers.values())

    def _dial(self) -> _Line:
        where = self.backend.broadcast_object(name="watch")
        try:
            line = _Line(socket.create_connection(tuple(where["at"]), timeout=self.backend.timeout), rank=0)
            line.send({"rank": self.backend.rank, "secret": where["secret"]})
        except OSError as error:
            raise BackendError(f"rank {self.backend.rank} cannot reach rank 0 at {where['at']} ({error})") from error
        return line

    def guard(self) -> None:
        """Has an uncaught exception of this process announced, and its end too, for programs that do not close."""
        earlier = sys.excepthook

        def last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.announce("".join(traceback.format_exception(kind, error, trace)).strip())
            earlier(kind, error, trace)

        sys.excepthook = last_words
        atexit.register(self.leave)

    def announce(self, reason: str) -> None:
        """Tells the other ranks that this one stops, and why: a message, or a formatted traceback."""
        if not self._leaving:
            self._leaving = True
            headline = reason.strip().splitlines()[-1]
            details = "" if headline == reason.strip() else f"\n{reason.strip()}"
            self._tell(Loss(self.backend.rank, f"stopped: {headline}{details}"))

    def leave(self) -> None:
        """Tells the other ranks that this one is done."""
        if not self._leaving:
            self._leaving = True
            self._tell(Loss(self.backend.rank, "has left the job", quiet=True))
            for line in self._lines:
                # The other end reads this to its end and hangs up; that ends the listening thread here.
                with suppress(OSError):
                    line.connection.shutdown(socket.SHUT_WR)

    def settle(self, seconds: float) -> None:
        """Blocks until the reason of a loss is known, at most ``seconds``."""
        if self._lines:
            self._heard.wait(seconds)

    def _tell(self, loss: Loss) -> None:
        with self._lock:
            for line in self._lines:
                if line.rank != loss.rank:
                    try:
                        line.send(asdict(loss))
                    except OSError:
                        pass  # gone itself: the listening thread sees that, and says so

    def _listen(self) -> None:
        """Until every connection has ended: what comes in is noted, and rank 0 passes it on to the others."""
        farewells: set[int] = set()
        with selectors.DefaultSelector() as selector:
            for line in self._lines:
                selector.register(line.connection, selectors.EVENT_READ, line)
                self._hear(line.early, farewells)
            while selector.get_map():
                for key, _ in selector.select():
                    line = key.data
                    try:
                        self._hear(line.receive(), farewells)
                    except (OSError, ValueError, TypeError):
                        selector.unregister(line.connection)
                        line.connection.close()
                        # Who was told goodbye hangs up without one.
                        if not self._leaving and line.rank not in farewells:
                            died = Loss(line.rank, "died: its process ended without a word")
                            self._hear([asdict(died)], farewells)

    def _hear(self, messages: list[dict[str, Any]], farewells: set[int]) -> None:
        for message in messages:
            loss = Loss(**message)
            farewells.add(loss.rank)
            self._note(loss)
            if self.backend.rank == 0:
                self._tell(loss)

    def _note(self, loss: Loss) -> None:
        # The first loud loss is the cause; what follows (others stopping because of it) is not news.
        known = self.loss is not None and not self.loss.quiet
        if self._leaving or known or (loss.quiet and self.loss is not None):
            return
        self.loss = loss
        if not loss.quiet:
            self._heard.set()
            if self.on_loss is not None:
                self.on_loss(loss)
