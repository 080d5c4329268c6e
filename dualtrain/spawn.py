"""``--nproc N``: N ranks on this host without a launcher, as processes of the command line that was given.

The parent takes no part in the training. It serves the store that the ranks meet in, passes signals on to them, and
ends those that are left when one has failed. That a rank is gone they notice, and say, by themselves.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.process import BaseProcess
from types import FrameType

from dualtrain.console import say
from dualtrain.errors import UserError
from dualtrain.launchers import spawned
from dualtrain.processes import release, start_tracker
from dualtrain.training.signals import ignore_late_requests, note_early_requests, take_early_request

# torch and what imports it come later: a rank imports this file before it is tied to its parent.

STOPPING = (signal.SIGTERM, signal.SIGINT)
PASSED_ON = (*STOPPING, signal.SIGUSR1)
GRACE_SECONDS = 6.0  # the other ranks notice a failed one, say why they stop, and end
END_SECONDS = 3.0  # from SIGTERM to SIGKILL, and from that to giving up
REPORT_SECONDS = 0.5  # from a failed rank's end to the report of one that was killed before it
IMPATIENT_SECONDS = 2.0  # a signal may come twice at once, to a process and to its group; a person repeats it later
RANKS_PER_CORE = 16
_PR_SET_PDEATHSIG = 1


def spawn(arguments: Sequence[str], nproc: int) -> int:
    """Runs ``dualtrain.main.main(arguments)`` in ``nproc`` new processes and gives the job's exit status.

    Blocks until all have ended; for how long is up to them, until one fails, or a second SIGTERM or SIGINT comes. Each
    sees itself as a rank of the launcher ``"spawn"``. Call it in the main thread. A program other than dualtrain's own
    command line needs ``if __name__ == "__main__":`` around the call, since every rank imports it again.

    Returns:
        0 if all ranks end with 0. Else the status of the first one that did not, 128 + N if signal N has ended it;
        143 or 130 if they end after a SIGTERM or SIGINT that this process was sent.

    Raises:
        UserError: so many ranks are too many for this host's cores, or the system refuses to start them.
    """
    cores = len(os.sched_getaffinity(0))
    if nproc > RANKS_PER_CORE * cores:
        raise UserError(
            f"--nproc {nproc} is too many for this host: more than {RANKS_PER_CORE} ranks for each of its {cores} cores "
            f"do not get through their start; give {RANKS_PER_CORE * cores} at most"
        )
    with _signals() as inbox:
        from dualtrain.rendezvous.store import StoreServer, listen

        secret = secrets.token_hex(32)
        # The port is ours from here on: between a free one's number and its use, another program could take it.
        listening = listen("127.0.0.1", [0], nproc)
        rendezvous = listening.getsockname()
        store = StoreServer(listening, nproc, secret)
        job = _Job(inbox)
        try:
            job.start(arguments, [spawned(rank, nproc, rendezvous, secret) for rank in range(nproc)])
            return job.wait()
        finally:
            job.kill()
            store.close()


class _Job:
    """The ranks of one job, as their parent sees them."""

    def __init__(self, inbox: int) -> None:
        self._inbox = inbox
        self._processes: list[BaseProcess] = []
        self._status: int | None = None  # once a rank has failed
        self._save = False  # whether that was asked for when no rank was there
        self._told: tuple[int, float] | None = None  # the signal that asked to stop, and when
        self._means = [signal.SIGTERM, signal.SIGKILL]  # that are left to end the ranks with
        self._deadline: float | None = None  # for using the next of them

    def start(self, arguments: Sequence[str], places: Sequence[Mapping[str, str]]) -> None:
        """Starts a rank with each place's variables; returns before they have done anything."""
        from torch.multiprocessing import get_context

        from dualtrain.rendezvous.hosts import variables

        context = get_context("spawn")
        # A Python that is starting up answers a signal with a traceback: a rank has them held back until it can do
        # better. The tracker comes before, since its start ends the block.
        start_tracker()
        earlier = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        try:
            for rank, place in enumerate(places):
                self._listen(0.0)
                if self._told is not None:
                    self._status = 128 + self._told[0]
                if self._status is not None:
                    break  # those that have started are told, or end since one has failed
                process = context.Process(target=_rank, args=(list(arguments), os.getpid()), name=f"rank {rank}")
                with variables(place):
                    process.start()
                self._processes.append(process)
            self._listen(0.0)
            if self._save or take_early_request():
                self._send(signal.SIGUSR1)
        except OSError as error:
            raise UserError(
                f"rank {len(self._processes)} of {len(places)} could not be started ({error}): the system is short of "
                "processes or memory; give a smaller --nproc"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier)

    def wait(self) -> int:
        """Until all ranks have ended, or cannot be ended: the job's status."""
        while self._alive():
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            self._listen(left)
            if self._deadline is not None and time.monotonic() >= self._deadline and not self._press():
                break
        return self._status or 0

    def kill(self) -> None:
        """Ends what is left at once; blocks for a few seconds at most."""
        left = self._alive()
        self._send(signal.SIGKILL)
        for process in left:
            process.join(END_SECONDS)

    def _alive(self) -> list[BaseProcess]:
        return [process for process in self._processes if process.exitcode is None]

    def _send(self, number: int) -> None:
        for process in self._alive():
            assert process.pid is not None
            os.kill(process.pid, number)  # exists until exitcode has collected it

    def _listen(self, seconds: float | None) -> None:
        """Takes in what has happened, or does within ``seconds``."""
        if select.select([self._inbox], [], [], seconds)[0]:
            for number in os.read(self._inbox, 1024):
                self._hear(number)
        self._note_failure()

    def _hear(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return  # wakes the loop, which looks at all ranks
        if number in STOPPING and self._told is None:
            self._told = number, time.monotonic()
        elif number in STOPPING and self._told is not None:
            if time.monotonic() > self._told[1] + IMPATIENT_SECONDS:
                self._deadline = time.monotonic()
            return
        self._save = self._save or number == signal.SIGUSR1
        self._send(number)

    def _failed(self) -> dict[int, int]:
        """The rank of each exit status that is not 0; -N if signal N ended it."""
        return {process.exitcode: rank for rank, process in enumerate(self._processes) if process.exitcode}

    def _note_failure(self) -> None:
        failed = self._failed()
        if self._status is not None or not failed:
            return
        if self._told is not None:
            self._status = 128 + self._told[0]
            return  # they stop as they were told to, in their own time
        # A rank can notice that another one was killed, and end, before the system reports the killed one.
        deadline = time.monotonic() + REPORT_SECONDS
        while min(failed) > 0 and self._alive() and time.monotonic() < deadline:
            time.sleep(0.01)
            failed = self._failed()
        code = min(failed)  # a killed one (below 0) is why the others stop
        self._status = code if code > 0 else 128 - code
        self._deadline = time.monotonic() + GRACE_SECONDS
        if code < 0:
            by = signal.Signals(-code).name
            say(f"rank {failed[code]} of {len(self._processes)} was ended by {by}; the job stops")

    def _press(self) -> bool:
        """Uses the next means to end the ranks; False if none is left."""
        if not self._means:
            left = ", ".join(f"{process.name} (process {process.pid})" for process in self._alive())
            say(f"{left} did not end within {END_SECONDS:g} s of SIGKILL: the system holds it; see its state in ps")
            self._status = self._status or 128 + signal.SIGKILL
            return False
        self._send(self._means.pop(0))
        self._deadline = time.monotonic() + END_SECONDS
        return True


@contextmanager
def _signals() -> Iterator[int]:
    """Has the signals that come, and those of ended children, be bytes that can be read from a pipe."""
    inbox, outbox = os.pipe()
    os.set_blocking(outbox, False)

    def note(number: int, frame: FrameType | None) -> None:
        """Nothing: Python's own part of the handler has written the number, even where this one comes too late."""

    earlier = {number: signal.signal(number, note) for number in (*PASSED_ON, signal.SIGCHLD)}
    earlier_outbox = signal.set_wakeup_fd(outbox, warn_on_full_buffer=False)
    try:
        yield inbox
    finally:
        signal.set_wakeup_fd(earlier_outbox)
        for number, handler in earlier.items():
            signal.signal(number, handler)
        os.close(inbox)
        os.close(outbox)


def _rank(arguments: list[str], parent: int) -> None:
    """The life of a spawned rank."""
    _die_with(parent)
    # A session of its own: a terminal's Ctrl-C comes once, from the parent, and not from the terminal too.
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # that of its data workers is any process's, not its own
    note_early_requests()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        # By name: main stands above this file, and calls it.
        status: int = import_module("dualtrain.main").main(arguments)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    ignore_late_requests()
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        release()
        os._exit(status)  # as main does: exit handlers would wait for ranks that are gone


def _die_with(parent: int) -> None:
    """Has the system kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it has ended before it could matter
