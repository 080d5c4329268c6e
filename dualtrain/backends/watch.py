"""Detect that a rank has failed: which one, and why.

A collective with a dead rank ends in a reset connection at its neighbours and in silence elsewhere, and neither names
the rank that died. So every rank keeps one connection to rank 0 beside the backend's own. Rank 0 forwards what it
receives to all: a rank that raised sends its reason and traceback first; the connection of a rank that was killed
breaks. Every wait of a backend (``Primitives.await_bounded``) checks for such a failure.
"""

from __future__ import annotations

import atexit
import selectors
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any

from dualtrain.errors import PeerFailure
from dualtrain.rendezvous.connection import Connection, Ranks, cut_off, open_control_channel

#: A report of a peer failure, or of an operation that a rank waits for, as JSON.
Message = dict[str, Any]


class Watch:
    """Watch of one rank over all others.

    Making one is collective over ``ranks`` and blocks.

    Args:
        ranks: all ranks of the job.
        address: rank 0's address on the interface that the other ranks reach it by.

    Attributes:
        failure: the first failure that is known; a rank that left in good order counts only until there is another.
        on_peer_failure: called once, in the watch's thread, with the first failure that is not quiet.
        waiting: by rank, the operations that it has waited for, for some time now.
    """

    def __init__(self, ranks: Ranks, address: str) -> None:
        self.start(ranks.rank, open_control_channel(ranks, address, "watch"))

    def start(self, rank: int, connections: list[Connection]) -> None:
        """Start to watch as rank ``rank``, over these connections."""
        self.rank = rank
        self.failure: PeerFailure | None = None
        self.on_peer_failure: Callable[[PeerFailure], None] | None = None
        self.waiting: dict[int, list[str]] = {}
        self._connections = connections
        self._reported = threading.Event()
        self._sending = threading.Lock()
        self._leaving = False
        self._unhook: Callable[[], None] = _do_nothing
        if connections:
            threading.Thread(target=self._receive_all, name="dualtrain-watch", daemon=True).start()

    @property
    def peer_failed(self) -> bool:
        """Whether a rank is known to have failed, other than by leaving in good order."""
        return self.failure is not None and not self.failure.quiet

    def report_at_exit(self) -> None:
        """Report an uncaught exception of this process to the other ranks, and its exit if it does not close.

        For this it chains ``sys.excepthook`` and registers an exit handler, the only places where a library learns of
        either: without them the other ranks would wait for a rank whose program failed outside of dualtrain, or know
        only that its connection broke. The earlier hook is called too, and :meth:`leave` undoes both.
        """
        earlier = sys.excepthook

        def report_and_print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.announce("".join(traceback.format_exception(kind, error, trace)).strip())
            earlier(kind, error, trace)

        def unhook() -> None:
            atexit.unregister(self.leave)
            # A hook that was installed later keeps calling this one, which then only calls the earlier one.
            if sys.excepthook is report_and_print:
                sys.excepthook = earlier

        sys.excepthook = report_and_print
        atexit.register(self.leave)
        self._unhook = unhook

    def announce(self, reason: str) -> None:
        """Report to the other ranks that this one stops for ``reason``: a message, or a formatted traceback."""
        if not self._leaving:
            self._leaving = True
            headline = reason.strip().splitlines()[-1]
            details = "" if headline == reason.strip() else f"\n{reason.strip()}"
            self.send(asdict(PeerFailure(self.rank, f"stopped: {headline}{details}")))

    def leave(self) -> None:
        """Report to the other ranks that this one leaves in good order."""
        self._unhook()
        self._unhook = _do_nothing
        if not self._leaving:
            self._leaving = True
            self.send(asdict(PeerFailure(self.rank, "has left the job", quiet=True)))
            for connection in self._connections:
                # The peer reads up to the end of stream, then closes: that ends the receiving thread here.
                with suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_WR)

    def wait_for_report(self, seconds: float) -> None:
        """Block until a peer failure that is not quiet is known, at most for ``seconds``."""
        if self._connections:
            self._reported.wait(seconds)

    def report_wait(self, what: str, *, ended: bool = False) -> None:
        """Report to the other ranks that this one waits for the operation ``what``, or no longer does."""
        self.send({"rank": self.rank, "waits": what, "ended": ended})

    def send(self, message: Message) -> None:
        """Send ``message`` on all connections but that of the rank which it is about."""
        with self._sending:
            for connection in self._connections:
                if connection.rank != message["rank"]:
                    with suppress(OSError):  # the receiving thread reports the broken connection
                        connection.send(message)

    def note(self, message: Message) -> None:
        """Record a message about another rank.

        Raises:
            TypeError: it is not of a kind that :meth:`send` sends.
        """
        if "waits" in message:
            self._note_wait(**message)
        else:
            self._note_failure(PeerFailure(**message))

    def _receive_all(self) -> None:
        """Receive until every connection has ended; rank 0 forwards what it receives."""
        left: set[int] = set()  # ranks that have reported that they stop or leave
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
                self._handle(connection.buffered(), left)
            while selector.get_map():
                for key, _ in selector.select():
                    connection = key.data
                    try:
                        self._handle(connection.receive(), left)
                    except (OSError, ValueError, TypeError) as error:
                        selector.unregister(connection.socket)
                        connection.socket.close()
                        if not self._leaving and connection.rank not in left:
                            failure = PeerFailure(connection.rank, _end_of(connection, error))
                            self._handle([asdict(failure)], left)

    def _handle(self, messages: list[Message], left: set[int]) -> None:
        for message in messages:
            self.note(message)
            if "waits" not in message:
                left.add(message["rank"])
            if self.rank == 0:
                self.send(message)

    def _note_wait(self, rank: int, waits: str, ended: bool) -> None:
        found = self.waiting.get(rank, [])  # several threads of a rank may wait
        self.waiting[rank] = [one for one in found if one != waits] if ended else [*found, waits]

    def _note_failure(self, failure: PeerFailure) -> None:
        # The first failure that is not quiet is the cause; later ones are its consequences.
        if self._leaving or self.peer_failed or (failure.quiet and self.failure is not None):
            return
        self.failure = failure
        if not failure.quiet:
            self._reported.set()
            if self.on_peer_failure is not None:
                self.on_peer_failure(failure)

    # -- names of version 0.1, for one version --------------------------------------------------------------------------

    @property
    def loss(self) -> PeerFailure | None:
        """Deprecated name of ``failure``."""
        _warn("Watch.loss", "Watch.failure")
        return self.failure

    @property
    def on_loss(self) -> Callable[[PeerFailure], None] | None:
        """Deprecated name of ``on_peer_failure``."""
        _warn("Watch.on_loss", "Watch.on_peer_failure")
        return self.on_peer_failure

    @on_loss.setter
    def on_loss(self, function: Callable[[PeerFailure], None] | None) -> None:
        _warn("Watch.on_loss", "Watch.on_peer_failure")
        self.on_peer_failure = function

    def settle(self, seconds: float) -> None:
        """Deprecated name of :meth:`wait_for_report`."""
        _warn("Watch.settle", "Watch.wait_for_report")
        self.wait_for_report(seconds)


def _do_nothing() -> None:
    pass


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is called {new} now; the old name goes with the next version", DeprecationWarning, stacklevel=3)


def __getattr__(name: str) -> Any:
    if name == "Loss":
        _warn("dualtrain.backends.watch.Loss", "dualtrain.PeerFailure")
        return PeerFailure
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _end_of(connection: Connection, error: Exception) -> str:
    """Why a rank failed whose connection ended without a message."""
    if cut_off(error):
        return f"cannot be reached: its host {connection.address} no longer answers; the host is down, or the network to it"
    return "died: its process ended without a report"
