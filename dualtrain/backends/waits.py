"""Bounded waits for other ranks, which end if a rank fails. After an interrupted call, later calls raise an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dualtrain.backends.watch import Watch
from dualtrain.differences import ranks_in_words
from dualtrain.errors import BackendError, PeerFailedError, PeerFailure, one_line
from dualtrain.launchers import World

T = TypeVar("T")

_ONE_THREAD = "their calls have no common order on all ranks, so make a channel() for the second thread"
_POLL_SECONDS = 0.25  # how often a wait checks for failed ranks
#: How long a wait blocks at a time while other operations are unfinished.
SLICE_SECONDS = 5e-4
_REPORT_SECONDS = 1.0  # a wait that lasts longer, or over a third of the timeout, is reported to the other ranks
_LEFT_SECONDS = 1.0  # how long a wait goes on after a rank has left: data that the rank sent before may still arrive
_REASON_SECONDS = 2.0  # when a connection breaks, wait this long for the failed rank's own report


class Waits:
    """One rank of a world of processes, its waits for the other ranks, and the errors that end them.

    Attributes:
        world: this process's rank and the number of ranks, in the job or, for a group, in the group.
        timeout: the longest time in seconds that any wait lasts.
        members: for each rank of this backend, its rank in the job. The two may differ: a group's own ranks begin at 0.
        watch: detects failed ranks; ``None`` until :func:`dualtrain.connect` has started it.
        meanwhile: called during waits for the communication library. Advances other operations: a rank for which this rank
            waits may itself wait for one of them. Does not block. Returns how many of these operations are unfinished.
        on_wait: called about four times a second, or more often, during a wait, with this backend, the operation and the
            seconds waited.
        interrupted: the type of the exception, such as KeyboardInterrupt, that has stopped a call; ``None`` if none has.
            See :meth:`whole_call`. Also set if a comparison of calls, a sum or a send has failed on this rank alone.
    """

    watch: Watch | None = None
    meanwhile: Callable[[], int] | None = None
    on_wait: Callable[[Any, str, float], None] | None = None
    interrupted: type[BaseException] | None = None
    _ended_by_leaving = False  # whether an operation failed because a rank had left normally; later ones fail at once

    def __init__(self, world: World, timeout: float) -> None:
        self.world = world
        self.timeout = timeout
        self.members: tuple[int, ...] = tuple(range(world.size))
        self._turn = threading.RLock()  # held during a call

    @property
    def rank(self) -> int:
        """Index of this process in the backend, from 0."""
        return self.world.rank

    @property
    def job_rank(self) -> int:
        """This process's rank in the job, which error messages name. In a group, ``rank`` may be another number."""
        return self.members[self.rank]

    @property
    def size(self) -> int:
        """Number of processes in the backend."""
        return self.world.size

    def await_bounded(self, what: str, finished: Callable[[float], bool], *, skip_meanwhile: bool = False) -> None:
        """Call ``finished(seconds)`` until it returns True. Each call blocks for about ``seconds`` at most.

        Reports a long wait to the other ranks (see ``_REPORT_SECONDS``). With ``skip_meanwhile``, does not call
        ``meanwhile``: ``finished`` itself advances other operations.

        Raises:
            PeerFailedError: a rank has failed, or a member of this backend has left the job.
            BackendError: ``finished`` raised, or the backend's timeout has passed.
        """
        start = time.monotonic()
        reported = False
        meanwhile = None if skip_meanwhile else self.meanwhile
        left_at: float | None = None  # seconds after ``start`` at which a rank was found to have left normally
        try:
            while not finished(SLICE_SECONDS if meanwhile is not None and meanwhile() else _POLL_SECONDS):
                seconds = time.monotonic() - start
                failure = self._peer_failure()
                if failure is not None and failure.quiet:
                    left_at = seconds if left_at is None else left_at
                    failure = failure if self._ended_by_leaving or seconds - left_at >= _LEFT_SECONDS else None
                if failure is not None:
                    raise self._peer_failed_error(what, failure)
                if self.on_wait is not None:
                    self.on_wait(self, what, seconds)
                if self.watch is not None and not reported and seconds > min(_REPORT_SECONDS, self.timeout / 3):
                    reported = True
                    self.watch.report_wait(what)
                if seconds > self.timeout:
                    raise TimeoutError(self._timeout_message())
        except BackendError:
            raise
        except Exception as error:  # libraries raise many types, and each means that the operation failed
            raise self.failure(what, error, waited=True) from error
        # Not in a ``finally``: after a timeout, this rank stays reported as waiting. The other ranks time out at about the
        # same moment, and must not name this rank as missing.
        if self.watch is not None and reported:
            self.watch.report_wait(what, ended=True)

    def failure(self, what: str, error: BaseException, *, waited: bool = False) -> BackendError:
        """Return the :class:`BackendError` for ``error``, which has ended the operation ``what``.

        The message of a TimeoutError is complete. For any other error, wait for up to ``_REASON_SECONDS`` for a report that
        explains it. With ``waited=True`` (the operation was waiting for other ranks), also report this wait, and name the
        ranks that have not reported a wait.

        Raises:
            PeerFailedError: a report has arrived that a rank has failed, or that a member of this backend has left the job.
        """
        reason = one_line(error) or type(error).__name__
        if self.watch is not None and not isinstance(error, TimeoutError):
            if waited:
                self.watch.report_wait(what)
            # A broken connection is often noticed before the failed rank's report arrives.
            if not self._ended_by_leaving:
                self.watch.wait_for_report(_REASON_SECONDS)
            failure = self._peer_failure()
            if failure is not None:
                raise self._peer_failed_error(what, failure) from error
            missing = self._missing(dict(self.watch.waiting)) if waited else []
            if missing:
                reason = f"waited for {_missing_text(missing)} ({reason})"
        return BackendError(f"{what} failed on {self._in_words()}: {reason}")

    def _in_words(self) -> str:
        """Return ``rank 0 of 2`` or, if the members' ranks in the job are not 0, 1, …, ``rank 2 of ranks 0, 2``."""
        of_job = self.members == tuple(range(self.size))
        return f"rank {self.job_rank} of {self.size if of_job else ranks_in_words(self.members)}"

    def _timeout_message(self) -> str:
        """Return the message of a timeout.

        It names the ranks that have not reached the operation or, if all ranks wait, the operations in which they wait.
        """
        late = f"waited {self.timeout:g} s for"
        others = self._others()
        if self.watch is None or not others:
            return f"{late} the other ranks, one of which has not reached this operation, or hangs"
        waiting = dict(self.watch.waiting)
        missing = self._missing(waiting)
        if missing:
            return f"{late} {_missing_text(missing)}"
        elsewhere = "; ".join(f"rank {rank} in {waiting[rank][-1]}" for rank in others)
        cure = "make the same calls in the same order on every rank"
        same = len({waiting[rank][-1] for rank in (*others, self.job_rank) if waiting.get(rank)}) == 1
        if same and not self.world.single_host:
            cure = f"check the network between the ranks' hosts, and {cure}"  # a broken link is the usual cause
        return f"{late} the other ranks, which wait too ({elsewhere}); {cure}"

    def _others(self) -> list[int]:
        """Return the other members of this backend, by their ranks in the job."""
        return [rank for rank in self.members if rank != self.job_rank]

    def _missing(self, waiting: Mapping[int, list[str]]) -> list[int]:
        """Return the other ranks that have not reported a wait. Call this only after this rank has reported its own."""
        own, others = self.job_rank, self._others()
        if own != 0 and 0 in others and not waiting.get(own):
            return [0]  # rank 0 has not sent this rank's report back, so it forwards no reports of other ranks either
        return [rank for rank in others if not waiting.get(rank)]

    def _peer_failure(self) -> PeerFailure | None:
        """Return the first known failure of any rank of the job.

        If there is none, return the report of a member of this backend that has left normally, or ``None``.
        """
        watch = self.watch
        if watch is None or watch.peer_failed:
            return watch.failure if watch is not None else None
        left = dict(watch.left)  # a copy, since the watch's thread may change it
        return next((left[rank] for rank in self._others() if rank in left), None)

    def check_peers(self, what: str) -> None:
        """Raise PeerFailedError for the operation ``what`` if a rank is known to have failed."""
        if self.watch is not None and self.watch.peer_failed and self.watch.failure is not None:
            raise self._peer_failed_error(what, self.watch.failure)

    def _peer_failed_error(self, what: str, failure: PeerFailure) -> PeerFailedError:
        self._ended_by_leaving = self._ended_by_leaving or failure.quiet
        return PeerFailedError(f"{what} cannot end on {self._in_words()}: {failure.describe()}", failure)

    def whole_call(self, call: Callable[[], T]) -> T:
        """Return the result of ``call``, which makes collective calls.

        If an exception such as KeyboardInterrupt stops ``call``, the other ranks may already have their results, or may
        still wait for this rank. Later calls of this rank would not match theirs. So if there are other ranks, each later
        call raises BackendError, and the first one also reports the interruption to them.

        Raises:
            BackendError: an earlier call was stopped, or failed on this rank alone; or another thread is in a call.
        """
        if self.interrupted is not None and self.size > 1:
            raise BackendError(self._report_interruption(self.interrupted))
        acquired: list[bool] = []
        try:
            # ``extend`` acquires the lock and records this in one step of the interpreter. Signal handlers run between two
            # steps, so ``finally`` releases the lock in any case.
            acquired.extend(map(self._turn.acquire, (False,)))
            if True not in acquired:
                raise BackendError(f"two threads call this backend at once on rank {self.job_rank}: {_ONE_THREAD}")
            return call()
        except Exception:
            raise
        except BaseException as error:
            self.interrupted = error.__class__  # not type(error): a second Ctrl-C may raise at this call
            raise
        finally:
            if True in acquired:
                self._turn.release()

    def send_data(self, step: Callable[[], T]) -> T:
        """Return the result of ``step``, the step of a call in which this rank sends data that the other ranks wait for.

        If ``step`` raises, for example because there is too little memory, report the error to the other ranks in place of
        the data. Later calls of this rank then fail, as after an interruption. Otherwise, a library that matches operations
        by their order would give the other ranks the data of this rank's next operation. A BackendError needs no report.
        """
        try:
            return step()
        except BackendError:
            raise
        except Exception as error:
            if self.size > 1:
                self.interrupted = type(error)
                self._report_interruption(self.interrupted)
            raise

    def abandon(self, error: BackendError) -> None:
        """Make later calls of this rank fail if ``error`` has ended a comparison or a sum on this rank alone.

        The other ranks may still complete the comparison or the sum, and then wait for this rank's data. A library that
        matches operations by their order would give them the data of this rank's next call.
        """
        only_here = error.__cause__ is not None  # an error without a cause is raised on all ranks
        # After the failure of a peer, later calls raise this error again.
        if only_here and not isinstance(error, PeerFailedError):
            self.interrupted = type(error)

    def _report_interruption(self, kind: type[BaseException]) -> str:
        """Report to the other ranks that an exception of type ``kind`` has stopped a call of this rank; return the text."""
        number = self.job_rank
        how = "failed or timed out" if issubclass(kind, BackendError) else f"was interrupted by {kind.__name__}"
        reason = (
            f"a collective call on rank {number} {how}, so that the calls of rank {number} no longer match those of the "
            "other ranks: restart the ranks"
        )
        if self.watch is not None:
            self.watch.announce(reason)
        return reason


def _missing_text(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    if len(ranks) > 1:
        return f"ranks {numbers}, which have not reached this operation, or hang"
    return f"rank {numbers}, which has not reached this operation, or hangs"
