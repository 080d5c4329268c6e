"""Ranks as child processes: start them, send them a function, and wait until all have ended.

Each child process is a new interpreter and not a fork, because torch's threads do not survive a fork. It does not import
the caller's main program. So the caller may be a notebook, and a script needs no ``if __name__ == "__main__":``.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from dualtrain.errors import RankFailedError, UserError
from dualtrain.functions.link import Link
from dualtrain.functions.outcome import Outcome
from dualtrain.functions.payload import loads
from dualtrain.processes import signal_name

log = logging.getLogger(__name__)

START_SECONDS = 600.0  # longest wait until a new Python interpreter reads the function that it must call
#: When a rank reports that a collective operation has failed, a different rank may be the cause. Wait this long at most for
#: the error of that rank, because it shows the cause.
GRACE_SECONDS = 6.0
END_SECONDS = 3.0  # from SIGTERM to SIGKILL, and from SIGKILL to the end of the wait
EXIT_SECONDS = 60.0  # for the exit handlers of all ranks, after all functions have returned

_PROGRAM = "import sys; sys.path[:] = {path!r}; from dualtrain.functions.rank import main; main({descriptor}, {parent})"


class Child:
    """A process that is one rank. The constructor starts it, and raises OSError if it cannot."""

    def __init__(self, rank: int, size: int, env: Mapping[str, str], executable: str) -> None:
        self.rank = rank
        self.size = size
        self.status: int | None = None  # exit status; -N if signal N has ended the process
        self.started = False  # whether the process has read its function
        self.start_by = time.monotonic() + START_SECONDS
        self.outcome: Outcome | None = None
        ours, theirs = socket.socketpair()
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores other entries, too
        program = _PROGRAM.format(path=path, descriptor=theirs.fileno(), parent=os.getpid())
        try:
            # A new session: Ctrl-C reaches only the caller, and signals to the group reach all processes of the rank.
            self._process = subprocess.Popen(
                [executable, "-c", program],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            try:
                self.pidfd = os.pidfd_open(self._process.pid)  # readable when the process has ended
            except OSError:
                self._process.kill()
                self._process.wait()
                raise
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.link = Link(ours)

    def send(self, payload: bytes) -> None:
        """Send the function. If the process has ended, do nothing: :meth:`failure` reports its end.

        Raises:
            UserError: the process does not read the function in time.
        """
        self.link.socket.settimeout(START_SECONDS)
        try:
            self.link.send(payload)
        except TimeoutError:
            raise self.late_start() from None
        except OSError:
            pass

    def late_start(self) -> UserError:
        """Return the exception for a process that did not read its function in time."""
        return UserError(
            f"rank {self.rank} of {self.size} did not start within {START_SECONDS:g} s: the system is short of memory or "
            "processor time, or the interpreter does not start; start fewer ranks, or check the interpreter"
        )

    def update(self) -> None:
        """Update ``started``, ``outcome`` and ``status`` without blocking."""
        if self.outcome is None:
            self.link.read_rest()
        found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            self.status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            if self.outcome is None:
                self.link.read_rest()
        while self.outcome is None and (message := self.link.message()) is not None:
            if self.started:
                self.outcome = loads(message)
            self.started = True  # the first message is empty: it only shows that the process has read its function

    def failure(self) -> RankFailedError | None:
        """Return the exception that describes this rank's failure, or ``None``."""
        if self.outcome is not None and self.outcome.result is None:
            return self.outcome.failure(self.rank, self.size)
        if self.status is None or (self.status == 0 and self.outcome is not None):
            return None
        when = "before" if self.outcome is None else "after"
        return RankFailedError(
            f"rank {self.rank} of {self.size} {_end_in_words(self.status)} {when} its function returned", self.rank
        )

    def signal(self, number: int) -> None:
        """Send a signal to the rank and the processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)  # the id is not reused before close() reaps the process

    def close(self) -> None:
        """Reap the process, and close its descriptors. If it does not end in time, it is not reaped."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        os.close(self.pidfd)
        self.link.socket.close()


def _end_in_words(status: int) -> str:
    return f"exited with status {status}" if status >= 0 else f"was ended by {signal_name(-status)}"


def run_children(
    ranks: Sequence[int],
    size: int,
    environments: Sequence[Mapping[str, str]],
    payload: bytes,
    executable: str | None,
) -> list[bytes]:
    """Run a pickled call in a new process for each of ``ranks``; return the pickled results. Blocks until all have ended.

    Args:
        ranks: the ranks to start here.
        size: number of ranks of the job.
        environments: all environment variables of each rank.
        payload: result of :func:`dualtrain.functions.payload.pickled_call`.
        executable: the Python interpreter; ``None`` for that of this process.

    Raises:
        RankFailedError: the function failed on a rank, its result cannot be pickled, or a rank's process ended before the
            function returned or with a status other than 0. The other ranks were ended.
        UserError: the processes cannot be started, or do not start in time.
    """
    children: list[Child] = []
    returned = False
    try:
        try:
            for rank, env in zip(ranks, environments, strict=True):
                children.append(Child(rank, size, env, executable or sys.executable))
        except OSError as error:
            raise UserError(
                f"rank {ranks[len(children)]} of {size} could not be started ({error}): check the interpreter's path, "
                "or start fewer ranks"
            ) from error
        for child in children:
            child.send(payload)
        results = _collect(children)
        returned = True
        return results
    finally:
        _end(children, all_returned=returned)


def _collect(children: Sequence[Child]) -> list[bytes]:
    """Return the results of all ranks. Blocks until all ranks have ended, or ``EXIT_SECONDS`` after all functions returned.

    Raises:
        RankFailedError: a rank failed. If several failed, prefer an error that no other rank caused (``by_peer`` is
            False).
        UserError: a rank did not start in time.
    """
    end: float | None = None
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.link.socket, selectors.EVENT_READ, child)
            selector.register(child.pidfd, selectors.EVENT_READ, child)
        while selector.get_map():
            starting = [child for child in children if not child.started and child.status is None]
            deadline = min((child.start_by for child in starting), default=None) if end is None else end
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            for child in {key.data for key, _ in selector.select(left)}:
                _advance(child, selector)
            failures = [failure for child in children if (failure := child.failure()) is not None]
            end = _deadline(children, failures, end)
            now = time.monotonic()
            late = [child for child in starting if not child.started and now >= child.start_by]
            if late or (end is not None and now >= end):
                break
    if failures:
        raise next((failure for failure in failures if not failure.by_peer), failures[0])
    if late:
        raise late[0].late_start()
    return [child.outcome.result or b"" for child in children if child.outcome is not None]


def _advance(child: Child, selector: selectors.BaseSelector) -> None:
    """Read what the child has sent; unregister its descriptors that are no longer needed."""
    child.update()
    sockets = selector.get_map()
    if child.outcome is not None and child.link.socket in sockets:
        selector.unregister(child.link.socket)
    if child.status is not None:
        for each in (child.link.socket, child.pidfd):
            if each in sockets:
                selector.unregister(each)


def _deadline(children: Sequence[Child], failures: Sequence[RankFailedError], current: float | None) -> float | None:
    """Return the time at which to stop waiting, or ``None`` while no rank has failed and some functions still run."""
    now = time.monotonic()
    if any(not failure.by_peer for failure in failures):
        return now
    if failures:
        return now + GRACE_SECONDS if current is None else current
    if all(child.outcome is not None for child in children):
        return now + EXIT_SECONDS if current is None else current
    return None


def _end(children: Sequence[Child], all_returned: bool) -> None:
    """End the ranks that still run, with the processes that they have started, and close every child.

    Unless all functions have returned (``all_returned``), also end the processes that a rank started and left behind.
    Blocks for some seconds, or longer if the kernel does not end the processes.
    """
    left = [child for child in children if child.status is None]
    if all_returned and left:
        names = ", ".join(f"rank {child.rank}" for child in left)
        log.warning("%s did not exit within %g s after returning: ended by a signal", names, EXIT_SECONDS)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in left:
            child.signal(number)
        _await_end(left)
        left = [child for child in left if child.status is None]
    for child in children:
        if not all_returned:
            child.signal(signal.SIGKILL)  # ends the processes that the rank has started
        if child.status is None:
            log.warning("rank %d did not end within %g s of SIGKILL: it is blocked in the kernel", child.rank, END_SECONDS)
        child.close()


def _await_end(children: Sequence[Child]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while any(child.status is None for child in children) and time.monotonic() < deadline:
        with selectors.DefaultSelector() as selector:
            for child in children:
                if child.status is None:
                    selector.register(child.pidfd, selectors.EVENT_READ)
            selector.select(max(0.0, deadline - time.monotonic()))
        for child in children:
            child.update()
