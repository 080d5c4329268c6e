"""Knowing that a rank is gone, which one, and why.

A collective with a dead rank ends in a reset connection at its neighbours and in silence elsewhere, and neither says
who died. So every rank keeps one connection to rank 0 beside the backend's own. What breaks it is told to all: a rank
that raised sends its reason and traceback first, a rank that was killed just disappears, and every wait of a backend
(``Primitives.await_bounded``) asks here whether it still makes sense.
"""

from __future__ import annotations

import atexit
import selectors
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dualtrain.backends.lines import Line, cut_off, star

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
        #: What other ranks have waited for, for some time now.
        self.waiting: dict[int, list[str]] = {}
        self._heard = threading.Event()
        self._lock = threading.Lock()
        self._leaving = False
        self._lines = star(backend, address, "watch")
        if self._lines:  # a world of one has nobody to watch
            threading.Thread(target=self._listen, name="dualtrain-watch", daemon=True).start()

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

    def report_wait(self, what: str, *, ended: bool = False) -> None:
        """Sends the other ranks the operation that this one waits for, and once more when that has ``ended``."""
        self._send({"rank": self.backend.rank, "waits": what, "ended": ended})

    def _tell(self, loss: Loss) -> None:
        self._send(asdict(loss))

    def _send(self, message: dict[str, Any]) -> None:
        """To all ranks that have a line here, but the one that it is about."""
        with self._lock:
            for line in self._lines:
                if line.rank != message["rank"]:
                    try:
                        line.send(message)
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
                    except (OSError, ValueError, TypeError) as error:
                        selector.unregister(line.connection)
                        line.connection.close()
                        # Who was told goodbye hangs up without one.
                        if not self._leaving and line.rank not in farewells:
                            self._hear([asdict(Loss(line.rank, _end_of(line, error)))], farewells)

    def _hear(self, messages: list[dict[str, Any]], farewells: set[int]) -> None:
        for message in messages:
            if "waits" in message:
                self._note_wait(**message)
                if self.backend.rank == 0:
                    self._send(message)
                continue
            loss = Loss(**message)
            farewells.add(loss.rank)
            self._note(loss)
            if self.backend.rank == 0:
                self._tell(loss)

    def _note_wait(self, rank: int, waits: str, ended: bool) -> None:
        found = self.waiting.get(rank, [])  # several threads of a rank may wait
        self.waiting[rank] = [one for one in found if one != waits] if ended else [*found, waits]

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


def _end_of(line: Line, error: Exception) -> str:
    """What is known of a rank whose line ended without a message."""
    if cut_off(error):
        return f"cannot be reached: its host {line.address} no longer answers; the host is down, or the network to it"
    return "died: its process ended without a word"
