"""Bounded waits for the data workers, and messages that say why a worker has ended or a wait was too long."""

from __future__ import annotations

import errno
import multiprocessing.connection
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from dualtrain.errors import UserError
from dualtrain.processes import forkserver_pid, is_stopped, kill_forkserver, signal_name, start_thread

T = TypeVar("T")
#: The limit on the start of the workers is at least this: the fork server first imports torch, which a busy host delays.
START_SECONDS = 60.0
#: Errors of the folders that hold the workers' semaphores (/dev/shm) and sockets (TMPDIR).
_BAD_FOLDER = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT)
#: The cure for too many open files or processes, for messages.
_RAISE_LIMITS = (
    "raise the limits of open files and processes (ulimit -n, -u), or give fewer --workers (0: the rank reads the samples)"
)
#: Messages of torch's and multiprocessing's exceptions when a batch cannot be sent for lack of file descriptors.
_TOO_MANY_FILES = re.compile("too many open files|items of ancdata", re.I)


class Waits:
    """Limit on each wait for data workers: after ``limit`` seconds, a thread kills the workers, and torch raises an error.

    If no worker has started yet, the thread kills the fork server, which was to start them, but not before
    ``START_SECONDS``.

    DataLoader's own ``timeout`` is not used, because it would delay the detection of a worker that something else has
    killed. There is no thread if ``limit`` is 0.
    """

    def __init__(self, workers: Callable[[], Sequence[BaseProcess]], limit: float) -> None:
        self._workers, self._limit = workers, limit
        self._since: float | None = None  # when the current wait began
        self._late = ""  # description of the wait that was too long
        self._stop = threading.Event()
        if limit:
            start_thread(self._watch, "dualtrain-data")

    def end(self) -> None:
        """End the thread."""
        self._stop.set()

    def bound(self, wait: Callable[[], T]) -> T:
        """Return ``wait()``. Raises UserError if a worker has ended, the wait was too long, or too many files are open.

        Any other error of ``wait`` is raised unchanged.
        """
        self._since = time.monotonic()
        try:
            return wait()
        except Exception as error:  # its type varies: torch detects that a worker has ended, or the connection breaks
            problem = self._late or self._ended_worker(1.0 if isinstance(error, OSError | EOFError) else 0.0)
            if not problem and _TOO_MANY_FILES.search(str(error)):
                problem = f"the data workers cannot send their batches (too many open files): {_RAISE_LIMITS}"
            if problem:
                raise UserError(problem, transient=True) from error
            raise
        finally:
            self._since = None

    def each(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches, and limit the wait for each."""
        exhausted: Any = object()
        while (batch := self.bound(lambda: next(batches, exhausted))) is not exhausted:
            yield batch

    def _watch(self) -> None:
        tick, waited, before = min(1.0, self._limit), 0.0, None
        while not self._stop.wait(tick):
            # Add up ticks, not clock time: time in which this process is stopped (Ctrl-Z, a suspended job) must not count.
            since = self._since
            began = since is not None and since != before
            waited = 0.0 if since is None else min(tick, time.monotonic() - since) if began else waited + tick
            before = since
            workers = self._workers()
            limit = self._limit if workers else max(self._limit, START_SECONDS)
            if since is None or waited < limit:
                continue
            self._late = self._describe(limit)
            for worker in workers:
                worker.kill()
            if workers:
                return
            kill_forkserver()

    def _ended_worker(self, seconds: float) -> str:
        """Describe a worker that has ended, or ends within ``seconds``; return "" if none does."""
        workers = self._workers()
        if seconds:
            # The connection breaks before the worker's exit status is available: wait for the exit.
            multiprocessing.connection.wait([worker.sentinel for worker in workers], seconds)
        for number, worker in enumerate(workers):
            if worker.exitcode is not None:  # 0 too: the dataset's code may call sys.exit()
                by, cause = _end_in_words(worker.exitcode)
                return f"data worker {number} (process {worker.pid}) has ended with {by}: {cause}"
        return ""

    def _describe(self, seconds: float) -> str:
        """Describe a wait that was too long."""
        if not self._workers():
            server = forkserver_pid() or 0
            what = f"waited {seconds:g} s for the start of the data workers by the fork server (process {server})"
            if is_stopped(server):
                return f"{what}, which is stopped: find out what has stopped it (SIGSTOP, a debugger), then start again"
            return (
                f"{what}: its imports hang or are slow; repair the storage of the Python packages, give a longer "
                "--timeout, or --workers 0"
            )
        named = {worker: f"data worker {number} (process {worker.pid})" for number, worker in enumerate(self._workers())}
        stopped = [name for worker, name in named.items() if is_stopped(worker.pid or 0)]
        what = f"waited {seconds:g} s for a batch from {', '.join(stopped or named.values())}"
        if stopped:
            verb, pronoun = ("is", "it") if len(stopped) == 1 else ("are", "them")
            return (
                f"{what}, which {verb} stopped: find out what has stopped {pronoun} (SIGSTOP, a debugger), then start again"
            )
        return f"{what}: the storage hangs or is slow; repair it, or give a longer --timeout"


def unstarted(error: OSError) -> UserError:
    """Return the error for workers that could not be started."""
    folders = "make sure that /dev/shm and TMPDIR exist, are writable and have free space, or give --workers 0"
    cure = folders if error.errno in _BAD_FOLDER else f"set TMPDIR to a shorter path, or {_RAISE_LIMITS}"
    return UserError(f"the data workers cannot be started ({error}): {cure}", transient=True)


def unsent(error: Exception) -> UserError:
    """Return the error for a batch that a worker could not send. The usual cause is too little shared memory."""
    too_many_files = _TOO_MANY_FILES.search(str(error))
    cure = (
        _RAISE_LIMITS
        if too_many_files
        else "enlarge /dev/shm (docker run --shm-size), or give --workers 0 (the rank reads the samples)"
    )
    return UserError(f"a data worker cannot send a batch ({error}): {cure}", transient=True)


def _end_in_words(status: int) -> tuple[str, str]:
    """Return the signal or exit status that ended a worker, and its usual cause with the cure."""
    by = signal_name(-status) if status < 0 else f"exit status {status}"
    if -status == signal.SIGKILL:
        return by, "too little memory, in most cases; give fewer --workers, or --workers 0"
    if -status == signal.SIGBUS:
        return by, "too little shared memory, in most cases; enlarge /dev/shm, or give --workers 0"
    return by, "the dataset's code, or a library, ended it; to find the cause, read the samples in the rank (--workers 0)"
