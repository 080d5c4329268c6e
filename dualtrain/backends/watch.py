"""Detect that a rank has failed, which rank it is, and why it failed.

When a rank exits in a collective, the connections of some ranks are reset, and other ranks wait without an error. No
message names the rank that exited. So every rank has one connection to rank 0 in addition to the backend's own. A rank
with an uncaught exception sends the reason and the traceback before it exits. If a rank is killed, its connection breaks.
In both cases, rank 0 informs all ranks. A failure of rank 0 itself reaches every other rank directly, over its connection.
Every wait of a backend (``Waits.await_bounded``) checks for such a failure.
"""

from __future__ import annotations

import atexit
import logging
import os
import selectors
import socket
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any

from dualtrain.errors import PeerFailure
from dualtrain.processes import start_thread
from dualtrain.rendezvous.connection import Connection, Ranks, cut_off, open_control_channel

log = logging.getLogger(__name__)

#: A report of a peer failure, or of an operation that a rank waits for. It is sent as JSON.
Message = dict[str, Any]

#: Beginnings of a formatted traceback, without indentation.
_TRACES = ("Traceback (", "Exception Group Traceback (")
#: Beginnings of lines in a formatted exception that has a cause. Python writes the first two after the cause;
#: multiprocessing writes the third before the traceback of a cause in another process.
_CAUSES = ("The above exception was", "During handling of the above exception", '"""')
_WATCHES: weakref.WeakSet[Watch] = weakref.WeakSet()
_HEADLINE = 400  # largest number of characters in the first line of a reason; the complete reason follows this line


class Watch:
    """One rank's record of the failures and long waits of all other ranks.

    Construction is collective over ``ranks`` and blocks. If a rank leaves the job normally, this is recorded as a quiet
    failure, which is an error only for operations that wait for that rank.

    Args:
        ranks: all ranks of the job.
        address: rank 0's address on the interface through which the other ranks reach it.

    Attributes:
        failure: the first known failure; if it is quiet, the first failure that is not quiet replaces it.
        left: the quiet failure of each rank that has left the job normally.
        on_peer_failure: a function of the program, or ``None``. Setting a function calls :meth:`add_callback`. So a
            function that is set after a failure is called at once, even if it was called before.
        waiting: for each rank, the operations for which it has reported a long wait that has not ended, or a failed wait.
            Rank 0 also sends each of these reports back to its sender. So every other rank finds its own wait here, as long
            as rank 0's process does not hang.
    """

    def __init__(self, ranks: Ranks, address: str) -> None:
        self.start(ranks.rank, open_control_channel(ranks, address, "watch"))

    def start(self, rank: int, connections: list[Connection]) -> None:
        """Start to watch as rank ``rank``, over these connections."""
        self.rank = rank
        self.failure: PeerFailure | None = None
        self.left: dict[int, PeerFailure] = {}
        self._callbacks: list[Callable[[PeerFailure], None]] = []
        self._on_peer_failure: Callable[[PeerFailure], None] | None = None
        self.waiting: dict[int, list[str]] = {}
        self._connections = connections
        self._reported = threading.Event()
        self._sending = threading.Lock()
        self._recording = threading.Lock()
        self._leaving = False
        self._process = os.getpid()
        self._unhook: Callable[[], None] = _do_nothing
        _WATCHES.add(self)
        if connections:
            start_thread(self._receive_all, "dualtrain-watch")

    @property
    def peer_failed(self) -> bool:
        """Return whether ``failure`` is known and is not quiet."""
        return self.failure is not None and not self.failure.quiet

    def add_callback(self, function: Callable[[PeerFailure], None]) -> None:
        """Call ``function`` once, with the first failure that is not quiet.

        If this failure is known already, call ``function`` now, in this thread. Otherwise, the watch's thread calls it when
        the failure is known. The watch's thread calls all functions in the reverse order of their addition, and logs their
        errors.
        """
        with self._recording:
            self._callbacks.append(function)
            failure = self.failure if self.peer_failed else None
        if failure is not None:
            function(failure)

    def remove_callback(self, function: Callable[[PeerFailure], None]) -> None:
        """Undo :meth:`add_callback`. If a failure has just been recorded, ``function`` may still be called."""
        with self._recording:
            self._callbacks.remove(function)

    @property
    def on_peer_failure(self) -> Callable[[PeerFailure], None] | None:
        """The program's own function. See the class."""
        return self._on_peer_failure

    @on_peer_failure.setter
    def on_peer_failure(self, function: Callable[[PeerFailure], None] | None) -> None:
        if self._on_peer_failure is not None:
            self.remove_callback(self._on_peer_failure)
        self._on_peer_failure = function
        if function is not None:
            self.add_callback(function)

    def report_at_exit(self) -> None:
        """Report to the other ranks when this process has an uncaught exception, or exits without closing its backend.

        Installs ``sys.excepthook`` and an exit handler, which :meth:`leave` removes. Without them, the other ranks would
        wait for a rank whose program failed outside of dualtrain, or know only that its connection broke. The earlier
        hook is called as well. In a forked child, the hook and the handler report nothing: the rank itself still runs.
        """
        earlier_hook = sys.excepthook

        def report_and_print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.announce("".join(traceback.format_exception(kind, error, trace)).strip())
            earlier_hook(kind, error, trace)

        def unhook() -> None:
            atexit.unregister(self.leave)
            # Keep a hook that was installed later. It may call ``report_and_print``, which now only calls ``earlier_hook``.
            if sys.excepthook is report_and_print:
                sys.excepthook = earlier_hook

        sys.excepthook = report_and_print
        atexit.register(self.leave)
        self._unhook = unhook

    def announce(self, reason: str) -> None:
        """Report to the other ranks that this rank stops for ``reason``: a message, or a formatted traceback.

        Does nothing if this rank has already reported its end, or in a forked child.
        """
        if self._may_leave():
            self._leaving = True
            headline = _headline(reason)
            details = reason.strip().removeprefix(headline).strip("\n")
            self.send(asdict(PeerFailure(self.rank, f"stopped: {headline}\n{details}".rstrip())))

    def leave(self) -> None:
        """Report to the other ranks that this rank leaves the job normally, and undo :meth:`report_at_exit`.

        Reports nothing if this rank has already reported its end, or in a forked child.
        """
        self._unhook()
        self._unhook = _do_nothing
        if self._may_leave():
            self._leaving = True
            self.send(asdict(PeerFailure(self.rank, "has left the job", quiet=True)))
            for connection in self._connections:
                # The peer reads to the end of the stream and closes the connection, which ends the receiving thread here.
                with suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_WR)

    def close_connections(self) -> None:
        """Close this process's copies of the connections. Called in a forked child.

        A connection ends when no process has it open any more. If a child that outlives its rank kept it open, the other
        ranks would not notice that the rank was killed.
        """
        for connection in self._connections:
            connection.socket.close()

    def _may_leave(self) -> bool:
        """Return whether this process may report that the rank leaves: once, and not in a forked child of the rank."""
        return not self._leaving and self._process == os.getpid()

    def wait_for_report(self, seconds: float) -> None:
        """Block until a failure that is not quiet is known and the callbacks have returned, at most for ``seconds``.

        Do not call this in the watch's thread.
        """
        if self._connections:
            self._reported.wait(seconds)

    def report_wait(self, what: str, *, ended: bool = False) -> None:
        """Report to the other ranks that this rank waits for the operation ``what``, or no longer waits for it."""
        self.send({"rank": self.rank, "waits": what, "ended": ended})

    def send(self, message: Message) -> None:
        """Send ``message`` on all connections; a report of a failure is not sent to the failed rank itself."""
        with self._sending:
            for connection in self._connections:
                if "waits" in message or connection.rank != message["rank"]:
                    with suppress(OSError):  # the receiving thread reports the broken connection
                        connection.send(message)

    def note(self, message: Message) -> None:
        """Record the report ``message``.

        Raises:
            TypeError: the message does not have the fields of a wait or of a failure.
        """
        if "waits" in message:
            self._note_wait(**message)
        else:
            self._note_failure(PeerFailure(**message))

    def _receive_all(self) -> None:
        """Receive until every connection has ended; rank 0 forwards what it receives."""
        reported: set[int] = set()  # ranks whose failure was reported, quiet or not
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
                self._receive(connection, connection.buffered, selector, reported)
            while selector.get_map():
                for key, _ in selector.select():
                    self._receive(key.data, key.data.receive, selector, reported)

    def _receive(
        self,
        connection: Connection,
        read: Callable[[], list[Message]],
        selector: selectors.BaseSelector,
        reported: set[int],
    ) -> None:
        """Handle the messages that ``read`` returns.

        If ``read`` raises an error, or a message is malformed, close the connection. Then also record that the peer has
        failed (rank 0 reports it too), unless the peer or this rank has already reported its own end.
        """
        try:
            self._handle(read(), reported)
        except (OSError, ValueError, TypeError) as error:
            selector.unregister(connection.socket)
            connection.socket.close()
            if not self._leaving and connection.rank not in reported:
                failure = PeerFailure(connection.rank, _end_of(connection, error))
                self._handle([asdict(failure)], reported)

    def _handle(self, messages: list[Message], reported: set[int]) -> None:
        for message in messages:
            self.note(message)
            if "waits" not in message:
                reported.add(message["rank"])
            if self.rank == 0:
                self.send(message)

    def _note_wait(self, rank: int, waits: str, ended: bool) -> None:
        earlier_waits = self.waiting.get(rank, [])  # several threads of a rank may wait
        self.waiting[rank] = [one for one in earlier_waits if one != waits] if ended else [*earlier_waits, waits]

    def _note_failure(self, failure: PeerFailure) -> None:
        if failure.quiet and not self._leaving:
            self.left[failure.rank] = failure
        with self._recording:
            # The first failure that is not quiet is the cause; later ones are its consequences.
            if self._leaving or self.peer_failed or (failure.quiet and self.failure is not None):
                return
            self.failure = failure
            callbacks = self._callbacks[::-1]
        if failure.quiet:
            return
        for function in callbacks:
            try:
                function(failure)
            except (Exception, SystemExit):  # after a SystemExit, this thread would end
                log.exception("the callback for a failed rank failed (%s)", failure.describe())
        self._reported.set()

    # -- deprecated names -----------------------------------------------------------------------------------------------

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


def _headline(reason: str) -> str:
    """Return ``reason`` in one line, cut off after ``_HEADLINE`` characters.

    If it begins with a formatted traceback, return the type and the message of the exception. Leave out a later traceback.
    """
    lines = reason.strip().splitlines()
    traces = [number for number, line in enumerate(lines) if line.lstrip(" +").startswith(_TRACES)]
    before = lines[: traces[0]] if traces else []
    caused = any(line.startswith(_CAUSES) for line in before)  # then ``before`` is a cause that has no traceback
    if before and not caused:
        lines = before
    elif caused or (lines and lines[0].startswith("Traceback (")):
        # The exception follows the indented lines of the last frame. The exception's message may have several lines.
        last = max(number for number, line in enumerate(lines) if line.startswith(("  File ", "Traceback (")))
        after = range(last + 1, len(lines))
        first = next((number for number in after if not lines[number].startswith(" ")), len(lines) - 1)
        lines = lines[first:]
    elif lines and lines[0].startswith("+ Exception Group Traceback ("):
        # Each line begins with "| ". The frames' lines have further spaces, and lines with "+" separate the exceptions.
        inner = [line.strip().removeprefix("| ") for line in lines]
        lines = [line for line in inner if not line.startswith((" ", "+"))][:1]
    text = " ".join(" ".join(lines).split())
    if not text:
        return "no reason was given"
    return text if len(text) <= _HEADLINE else f"{text[:_HEADLINE]}…"


def _do_nothing() -> None:
    pass


def _close_in_child() -> None:
    for watch in list(_WATCHES):
        watch.close_connections()


os.register_at_fork(after_in_child=_close_in_child)


def _warn(old: str, new: str) -> None:
    text = f"{old} is now called {new}; the old name will be removed in version 0.3.0"
    warnings.warn(text, DeprecationWarning, stacklevel=3)


def __getattr__(name: str) -> Any:
    if name == "Loss":
        _warn("dualtrain.backends.watch.Loss", "dualtrain.PeerFailure")
        return PeerFailure
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _end_of(connection: Connection, error: Exception) -> str:
    """Describe the failure of a rank whose connection ended without a report."""
    if cut_off(error):
        return f"cannot be reached: its host {connection.address} no longer answers; the host or the network to it is down"
    return "died: its process ended without a report"
