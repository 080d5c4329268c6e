"""``--nproc N``: start N ranks on this host without a launcher; every rank gets the same arguments.

The parent takes no part in the training. It serves the store in which the ranks meet, passes signals on to them, and
ends the remaining ranks when a rank has failed. The ranks detect and report a failed rank by themselves.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from types import FrameType

from dualtrain.console import print_error
from dualtrain.cores import too_many_ranks, usable_cores
from dualtrain.errors import UserError
from dualtrain.files import cure_of
from dualtrain.launchers import NOT_SAVED, TRY_AGAIN, given_job, new_job, spawned
from dualtrain.processes import JOB_SIGNALS, LIMIT_CURE, release, signal_at_parents_end, signal_name, start_tracker
from dualtrain.training.signals import (
    STOP_SIGNALS,
    end_on_early_interrupt,
    ignore_late_requests,
    install,
    note_early_requests,
    take_early_request,
)

# Don't import torch here. The parent does not need torch. A rank must import this file quickly: before the import has
# ended, the rank cannot detect that its parent has ended.

Body = Callable[[list[str]], int]

GRACE_SECONDS = 6.0  # for the other ranks to detect and report a failed rank, and exit
END_SECONDS = 3.0  # from SIGTERM to SIGKILL, and the longest wait after SIGKILL
REPORT_SECONDS = 0.5  # to wait for a killed rank's exit status: ranks that fail because of the kill may be reaped first
#: Statuses of a rank after a transient error, such as a full disk, each with the job's status if no restart follows.
TRANSIENT = {TRY_AGAIN: 2, NOT_SAVED: 1}
#: The wait before the first restart after a transient error, and the longest wait before a later restart. An attempt that
#: lasts longer than the longest wait is assumed to have made progress.
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 30.0
#: A second stop signal within this time is ignored: a sender may signal this process, and then its process group, which
#: includes this process.
REPEAT_SECONDS = 2.0

log = logging.getLogger("dualtrain")


def spawn(body: Body, arguments: Sequence[str], nproc: int, restarts: int = 0) -> int:
    """Run ``body(arguments)`` in ``nproc`` new processes, and return the job's exit status.

    Blocks until the processes have exited. There is no time limit while all of them run, or while they stop after a first
    stop signal (SIGTERM, SIGINT or SIGHUP). If a process fails, also after such a signal, or if a second signal arrives
    later than ``REPEAT_SECONDS`` after the first, the remaining processes are ended within a few seconds. Each process is a
    rank of the launcher ``"spawn"``. Call this in the main thread. A program other than dualtrain's own command line needs
    ``if __name__ == "__main__":`` around the call, since every rank imports the program again.

    Args:
        body: a function at the top of a module; returns a process's exit status, or a key of ``TRANSIENT`` after an
            error that a restart may avoid, such as a full disk.
        arguments: the argument of ``body``.
        nproc: the number of processes.
        restarts: how often the job may be restarted after a rank has failed. A restart starts all ranks again. There is no
            restart if the first rank that failed has status 2 (an error that a restart would repeat), after a stop signal,
            or if a rank has survived SIGKILL. Before a restart after a transient error, the call waits 1 s, the next time
            2 s, then 4 s and so on, at most 30 s. The waits begin at 1 s again after an attempt that has lasted longer than
            30 s or has ended with another error.

    Returns:
        0 if all ranks end with 0. Else the status of the first rank that failed, or 128 + N if signal N killed that rank.
        If several ranks fail at about the same time, the status of a killed rank is preferred to all others, and any
        other status is preferred to 1. A key of ``TRANSIENT`` is replaced by its value.
        If this process received a stop signal before a rank failed, or while it waited before a restart: 128 plus the
        signal's number, for example 143.

    Raises:
        UserError: ``nproc`` is too large for this host's cores, the system refuses to start so many processes, or
            ``DUALTRAIN_JOB`` is invalid.
    """
    if (reason := too_many_ranks(nproc, usable_cores())) is not None:
        raise UserError(f"--nproc {nproc} is too many for this host: {reason}")
    name = given_job() or new_job()  # a restart finds its run by this name
    wait, save = 0.0, False
    with _signals() as inbox:
        for restart in range(1, restarts + 2):
            job, began = _Job(inbox, save=save), time.monotonic()
            ranks_status = _run(job, body, arguments, nproc, name)
            status = TRANSIENT.get(ranks_status, ranks_status)
            if restart > restarts or not job.may_restart(ranks_status):
                break
            wait = _next_wait(wait, ranks_status, time.monotonic() - began)
            when = f" in {wait:g} s" if wait else ""
            log.warning("the job has ended with status %d: restart %d of %d%s", status, restart, restarts, when)
            stopped_by, save = job.pause(wait)
            if stopped_by is not None:
                if stopped_by == signal.SIGINT:
                    print_error("interrupted")
                return 128 + stopped_by
        return status


def _next_wait(last_wait: float, status: int, seconds: float) -> float:
    """Return how long to wait before a restart. The attempt lasted ``seconds``; ``last_wait`` is the wait before it."""
    if status not in TRANSIENT:
        return 0.0
    if seconds > LONGEST_WAIT_SECONDS:
        return FIRST_WAIT_SECONDS
    return min(2 * last_wait or FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS)


def _run(job: _Job, body: Body, arguments: Sequence[str], nproc: int, name: str) -> int:
    """Start the ranks of ``job``, wait until all have exited, and return the job's status."""
    from dualtrain.rendezvous.store import store_for_children

    with store_for_children(nproc) as (rendezvous, secret):
        try:
            job.start(body, arguments, [spawned(rank, nproc, rendezvous, secret, name) for rank in range(nproc)])
            return job.wait()
        finally:
            job.kill()


class _Job:
    """The processes of one start of the job. The parent starts and signals them, and waits for them."""

    def __init__(self, inbox: int, *, save: bool = False) -> None:
        self._inbox = inbox
        self._processes: list[BaseProcess] = []
        self._status: int | None = None  # the job's exit status, after a rank has failed
        self._save = save  # whether SIGUSR1 has requested a checkpoint; the signal is passed on to ranks that start later
        self._stopped: tuple[int, float] | None = None  # the stop signal that was received, and when
        self._unsent = [signal.SIGTERM, signal.SIGKILL]  # the signals that end the ranks and were not sent yet, in order
        self._deadline: float | None = None  # when the next signal is sent

    def start(self, body: Body, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        """Start one rank for each set of environment variables in ``environments``. Does not wait for the ranks.

        After a stop signal or the failure of a rank, start no more ranks. Raises UserError if a rank cannot be started.
        """
        from dualtrain.rendezvous.hosts import variables

        context = get_context("spawn")
        # A Python interpreter that is starting up exits on a signal with a traceback: block signals until the rank has
        # handlers. The resource tracker is started first, since starting it unblocks signals.
        start_tracker()
        earlier = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
        try:
            for rank, environment in enumerate(environments):
                self._handle_signals(0.0)
                if self._stopped is not None:
                    self._status = 128 + self._stopped[0]
                    if self._stopped[0] == signal.SIGINT and not self._processes:
                        print_error("interrupted")  # otherwise rank 0 prints it
                if self._status is not None:
                    break  # the ranks that run have received the signal, or exit because a rank has failed
                given = (body, list(arguments), os.getpid(), sys.orig_argv)
                process = context.Process(target=_rank, args=given, name=f"rank {rank}")
                with variables(environment):
                    process.start()
                self._processes.append(process)
            self._handle_signals(0.0)
            if self._save or take_early_request():
                self._send(signal.SIGUSR1)
        except OSError as error:
            cure = f"the system is short of processes or memory; {LIMIT_CURE}"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                cure = cure_of(error)
            raise UserError(
                f"rank {len(self._processes)} of {len(environments)} could not be started ({error}): {cure}"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier)

    def may_restart(self, status: int) -> bool:
        """Return whether a restart may help the job, which has ended with ``status``.

        A restart does not help after success (0), after an error that a restart would repeat (2), after a stop signal, or
        if a rank has survived SIGKILL.
        """
        return status not in (0, 2) and self._stopped is None and not self._alive()

    def pause(self, seconds: float) -> tuple[int | None, bool]:
        """Wait for ``seconds`` before a restart; a stop signal ends the wait.

        Return that signal, or ``None``, and whether a checkpoint was requested during the wait.
        """
        deadline = time.monotonic() + seconds
        self._save = False
        while self._stopped is None and (left := deadline - time.monotonic()) > 0:
            self._handle_signals(left)
        return None if self._stopped is None else self._stopped[0], self._save

    def wait(self) -> int:
        """Wait until all ranks have exited, or a rank has survived SIGKILL; return the job's status."""
        while self._alive():
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            self._handle_signals(left)
            if self._deadline is not None and time.monotonic() >= self._deadline and not self._escalate():
                break
        self._note_failure()  # a rank may have failed after the last check
        return self._status or 0

    def kill(self) -> None:
        """Kill the remaining ranks; blocks for at most ``END_SECONDS`` per rank."""
        left = self._alive()
        self._send(signal.SIGKILL)
        for process in left:
            process.join(END_SECONDS)

    def _alive(self) -> list[BaseProcess]:
        return [process for process in self._processes if process.exitcode is None]

    def _send(self, number: int) -> None:
        for process in self._alive():
            assert process.pid is not None
            os.kill(process.pid, number)  # the pid is not reused: only reading exitcode reaps the process

    def _handle_signals(self, seconds: float | None) -> None:
        """Wait for signals, for ``seconds`` at most (``None``: no limit); handle those received, and note failed ranks."""
        if select.select([self._inbox], [], [], seconds)[0]:
            for number in os.read(self._inbox, 1024):
                self._handle(number)
        self._note_failure()

    def _handle(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return  # wakes the loop, which checks all ranks
        if number in STOP_SIGNALS and self._stopped is None:
            self._stopped = number, time.monotonic()
        elif number in STOP_SIGNALS and self._stopped is not None:
            if time.monotonic() > self._stopped[1] + REPEAT_SECONDS:
                self._deadline = time.monotonic()
            return
        self._save = self._save or number == signal.SIGUSR1
        self._send(number)

    def _failed(self) -> dict[int, int]:
        """Return, for each exit status other than 0, a rank that has it. Status -N means that signal N ended the rank."""
        return {process.exitcode: rank for rank, process in enumerate(self._processes) if process.exitcode}

    def _note_failure(self) -> None:
        """If a rank has failed, set the job's status and the deadline of the others, and print which rank was killed.

        Blocks for ``REPORT_SECONDS`` at most.
        """
        failed = self._failed()
        if self._stopped is not None and failed:
            self._note_stop(failed, self._stopped[0])
        if self._status is not None or not failed:
            return
        # A rank can detect that another rank was killed, and exit, before the system reports the killed rank.
        deadline = time.monotonic() + REPORT_SECONDS
        while min(failed) > 0 and self._alive() and time.monotonic() < deadline:
            time.sleep(0.01)
            failed = self._failed()
        # A killed rank (status below 0) is the cause of other failures. A rank that fails because of another ends with 1.
        code = min(failed, key=lambda code: (code > 0, code == 1, code))
        self._status = code if code > 0 else 128 - code
        self._deadline = time.monotonic() + GRACE_SECONDS
        if code < 0:
            by = signal_name(-code)
            print_error(f"rank {failed[code]} of {len(self._processes)} was ended by {by}; the job stops")

    def _note_stop(self, failed: Mapping[int, int], number: int) -> None:
        """Set the job's status after the stop signal ``number``. If another cause has ended a rank, set a deadline."""
        self._status = 128 + number if self._status is None else self._status
        # Don't limit the time that the ranks need to save. But if a rank has failed, the others cannot save, and a rank
        # that still runs after the grace period hangs, or was stopped by SIGSTOP.
        if self._deadline is None and failed.keys() - {128 + number, -number}:
            self._deadline = time.monotonic() + GRACE_SECONDS

    def _escalate(self) -> bool:
        """Send the next stronger signal to the ranks; return False if none is left."""
        if not self._unsent:
            left = ", ".join(f"{process.name} (process {process.pid})" for process in self._alive())
            print_error(
                f"{left} did not end within {END_SECONDS:g} s of SIGKILL: a hang in the kernel; see the state in ps"
            )
            self._status = self._status or 128 + signal.SIGKILL
            return False
        self._send(self._unsent.pop(0))
        self._deadline = time.monotonic() + END_SECONDS
        return True


@contextmanager
def _signals() -> Iterator[int]:
    """Deliver signals, including SIGCHLD, as bytes on a self-pipe. SIGHUP stays ignored under ``nohup``."""
    inbox, outbox = os.pipe()
    os.set_blocking(outbox, False)

    def note(number: int, frame: FrameType | None) -> None:
        """Do nothing: Python has written the number to the pipe before it calls this handler."""

    # Set the pipe before the handlers: a signal that arrives between these calls must not be lost.
    earlier_outbox = signal.set_wakeup_fd(outbox, warn_on_full_buffer=False)
    earlier = install(dict.fromkeys((*JOB_SIGNALS, signal.SIGCHLD), note))
    try:
        yield inbox
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(earlier_outbox)
        os.close(inbox)
        os.close(outbox)


def _rank(body: Body, arguments: list[str], parent: int, command: list[str]) -> None:
    """Run ``body`` as a spawned rank, and exit if its status is not 0; ``command`` is the parent's command line."""
    sys.orig_argv = command  # for the run's records: the command line of this process shows only multiprocessing
    signal_at_parents_end(signal.SIGKILL, parent)
    # Start a session: the rank then receives a Ctrl-C once, from the parent, and not from the terminal too.
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # data workers use the default start method
    note_early_requests()
    end_on_early_interrupt()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)
        status = body(arguments)
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
        os._exit(status)  # skips the exit handlers, which would wait for ranks that have exited
