"""Worker processes that run test bodies as the ranks of many worlds, one after another.

A test body is a module-level function ``fn(backend, *args)``, which workers import by its name; arguments and results are
pickled. Only one world is open at a time, because a process can be in only one world of torch and Horovod. If a body fails
on any rank, all processes are ended, because the world is no longer usable.

Every wait for a worker has a timeout. A worker exits when the process that started it has exited, because the pipe between
them closes.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import os
import pickle
import queue
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from pathlib import Path
from typing import Any

from dualtrain.bench import meet
from dualtrain.processes import JOB_SIGNALS
from tests.forked import server

ROOT = Path(__file__).resolve().parent.parent
OPEN_SECONDS = 90.0  # importing torch and Horovod on a busy machine, and the rendezvous
CALL_SECONDS = 120.0  # longer than a backend's timeout, so that the backend's error is reported
AFTER_FAILURE_SECONDS = 15.0  # for the other ranks to detect a failed rank
EXIT_SECONDS = 10.0
TIMEOUT = 60.0  # of the backends
_used_ports: set[int] = set()


def free_port() -> int:
    """Return a free port that this function has not returned before.

    With torch, each process counts its worlds at an address, and a world's keys in the store contain this count. If a world
    of four ranks got the port of an earlier world of two, the counts would differ, and the ranks would not meet.
    """
    while (port := meet.free_port()) in _used_ports:
        pass
    _used_ports.add(port)
    return port


class RankError(AssertionError):
    """Failure of a call, death of a process, or timeout, on at least one rank. The message has the failed ranks' errors."""


@dataclass(frozen=True)
class Outcome:
    """Result of one call on one rank: its value, or an ``error`` (a traceback, the exit code, or a timeout)."""

    rank: int
    value: Any = None
    error: str | None = None


def reference(fn: Callable[..., Any]) -> tuple[str, str]:
    """Return the names of the module and the function by which other processes import ``fn``.

    Raises:
        TypeError: ``fn`` is a lambda, a local function, or an object without a name.
    """
    if "<" in getattr(fn, "__qualname__", "<"):
        raise TypeError(f"{fn!r} cannot be sent to other processes: test bodies are functions at the top of a module")
    return fn.__module__, fn.__qualname__


@contextmanager
def named(case: tuple[Any, ...]) -> Iterator[None]:
    """Add ``case`` to the message of an error."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {case}")
        raise


def in_turn(backend: Any, fn: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> None:
    """Run ``fn(backend, *case)`` for each case."""
    for case in cases:
        with named(case):
            fn(backend, *case)


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        # Leave out Horovod's variables: with some tuning variables set, a second initialization crashes.
        env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        self.process = server().Process(target=_work, args=(theirs, env), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, *message: Any) -> None:
        try:
            self.connection.send_bytes(pickle.dumps(message))
        except OSError:
            pass  # the process died; answer() reports its death

    def answer(self) -> tuple[Any, str | None]:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(EXIT_SECONDS)
            return None, f"the process died with exit code {self.process.exitcode}"

    def end(self, seconds: float) -> None:
        """Wait until the process ends; kill it after ``seconds``."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join(EXIT_SECONDS)


class Pool:
    """``processes`` workers, started at the first use and again after a failure."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.open: tuple[str, int] | None = None
        self._workers: list[_Worker] = []

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        return [worker.process.pid for worker in self._workers]

    def start(self) -> None:
        """Start the processes, unless they are running."""
        if not self._workers:
            self._workers = [_Worker() for _ in range(self.processes)]

    def connect(self, name: str, size: int) -> None:
        """Open the world of ``size`` ranks on the backend ``name``, unless it is already open.

        First close the world that is open. Raises RankError, as :meth:`run`.
        """
        if self.open == (name, size):
            return
        self.disconnect()
        self.start()
        message = "open", name, size, free_port()
        self._values_or_raise(self._call(size, *message, what=f"opening the {name} world of {size}", seconds=OPEN_SECONDS))
        self.open = name, size

    def disconnect(self) -> None:
        """Close the open world; the processes keep running. Raises RankError, as :meth:`run`."""
        if self.open is not None:
            name, size = self.open
            self._values_or_raise(self._call(size, "close", what=f"closing the {name} world of {size}"))
            self.open = None

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``fn(backend, *args)`` on every rank of the open world; return results in rank order. Raises RankError."""
        return self._values_or_raise(self.outcomes(fn, *args))

    def outcomes(self, fn: Callable[..., Any], *args: Any, seconds: float = CALL_SECONDS) -> list[Outcome]:
        """Like :meth:`run`, but return failures as values. A failure on any rank ends the processes."""
        assert self.open is not None
        outcomes = self._call(self.open[1], "call", *reference(fn), args, what=fn.__qualname__, seconds=seconds)
        if any(outcome.error for outcome in outcomes):
            self.close()
        return outcomes

    def close(self) -> None:
        """End the processes; kill those that do not exit by themselves."""
        workers, self._workers, self.open = self._workers, [], None
        for worker in workers:
            worker.connection.close()
        deadline = time.monotonic() + EXIT_SECONDS
        for worker in workers:
            worker.end(max(0.0, deadline - time.monotonic()))

    def _values_or_raise(self, outcomes: list[Outcome]) -> list[Any]:
        """Return the values. If a rank has failed, end the processes and raise RankError."""
        failed = [outcome for outcome in outcomes if outcome.error]
        if failed:
            self.close()
            texts = (f"---- rank {outcome.rank} of {len(outcomes)}: {outcome.error}" for outcome in failed)
            raise RankError("\n".join(texts))
        return [outcome.value for outcome in outcomes]

    def _call(self, size: int, *message: Any, what: str, seconds: float = CALL_SECONDS) -> list[Outcome]:
        """Send ``message`` to the first ``size`` workers, and return their outcomes. Blocks for about ``seconds`` at most.

        After the first failure, blocks for ``AFTER_FAILURE_SECONDS`` at most. A worker that has not answered by then prints
        its stack traces.
        """
        workers = self._workers[:size]
        for rank, worker in enumerate(workers):
            worker.send(*message, rank) if message[0] == "open" else worker.send(*message)
        deadline = time.monotonic() + seconds
        waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
        outcomes: dict[int, Outcome] = {}
        while waiting:
            ready: Sequence[Any] = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                rank = waiting.pop(connection)
                outcomes[rank] = Outcome(rank, *workers[rank].answer())
                if outcomes[rank].error:
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE_SECONDS)
            if not ready:
                for rank in waiting.values():
                    with suppress(ProcessLookupError):
                        os.kill(workers[rank].process.pid, signal.SIGUSR1)  # the worker then prints its stack traces
                    outcomes[rank] = Outcome(rank, error=f"no answer in time while waiting for {what}; see stderr")
                time.sleep(0.5)
                break
        return [outcomes[rank] for rank in range(size)]


# -- in the worker ------------------------------------------------------------------------------------------------


def _read(connection: Connection, inbox: queue.SimpleQueue[Any]) -> None:
    """Put the parent's messages into ``inbox``. When the pipe closes, put ``None``, wait, and end the process."""
    try:
        while True:
            inbox.put(pickle.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        inbox.put(None)
    time.sleep(EXIT_SECONDS / 2)
    os._exit(1)  # the parent has exited or closed the pipe, but the main thread is still blocked


def _explain(error: BaseException) -> str:
    try:
        return "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    except Exception:  # repr() of a local variable failed
        return "".join(traceback.format_exception(error))


def _serve(connection: Connection) -> None:
    import torch

    from dualtrain import connect
    from dualtrain.launchers import World

    torch.set_num_threads(1)
    warnings.filterwarnings("error", module=r"(dualtrain|tests)(\.|$)")
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    backend = None
    while (message := inbox.get()) is not None:
        kind, *rest = message
        value, error = None, None
        try:
            if kind == "open":
                name, size, port, rank = rest
                world = World(rank, size, rank, size, launcher="environment", rendezvous=("127.0.0.1", port))
                transport = "shm" if name == "shm" else "native"
                backend = connect(name.replace("shm", "torch"), world=world, timeout=TIMEOUT, transport=transport)
            elif kind == "call":
                module, qualname, args = rest
                value = attrgetter(qualname)(importlib.import_module(module))(backend, *args)
                # Free optimizers that are in reference cycles. Otherwise, the next test has several optimizers.
                gc.collect()
            else:
                backend.close()
                backend = None
            answer = pickle.dumps((value, None))
        except BaseException as failure:
            error = _explain(failure)
            if backend is not None:
                backend.abort(f"{type(failure).__name__}: {failure}")
            answer = pickle.dumps((None, error))
        try:
            connection.send_bytes(answer)
        except OSError:
            break  # the parent has exited or closed the pipe
    if backend is not None:
        backend.close()


def _work(connection: Connection, env: dict[str, str]) -> None:
    """Main function of a worker."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)
    os.environ.clear()
    os.environ.update(env)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _serve(connection)
    atexit._run_exitfuncs()
