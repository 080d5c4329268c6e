"""Record the attempts of a run in its folder. Each start of a run is an attempt.

The records say which failure ended an attempt, and how many steps and seconds the recovery took. ``attempts.jsonl`` has a
line for each event, and ``.progress`` holds the last step (:mod:`dualtrain.run_folder.last_step`). Each attempt
writes a new ``attempts.jsonl``, which begins with the earlier events, and, when it begins to train, a new ``.progress``. A
process of an earlier attempt still has the old files open, so it cannot write to the new ones.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from dualtrain.backends import Backend
from dualtrain.errors import (
    BackendError,
    DivergedError,
    NotSavedError,
    PeerFailure,
    StoppedError,
    UserError,
    is_transient,
)
from dualtrain.files import write_whole
from dualtrain.on_ranks import on_rank_zero
from dualtrain.run_folder.attempt_events import (
    NAME,
    UNKNOWN,
    Death,
    Event,
    Recovery,
    as_event,
    lines,
    new_death,
    read_events,
    unrecovered,
)
from dualtrain.run_folder.folder_lock import FolderLock, SupersededError
from dualtrain.run_folder.last_step import LastStep

_CAUSE_LENGTH = 300


class Attempt:
    """Recorder of this process's attempt at a run. It records nothing before :meth:`begin`.

    Only :meth:`begin` raises. Records that cannot be written are lost, so the cause of an attempt's end may stay unknown.

    Attributes:
        lock: the lock of the run's folder; after another process has taken the folder, nothing is recorded.
        folder: the run's folder.
    """

    def __init__(self, lock: FolderLock) -> None:
        self.lock = lock
        self._name = ""
        self._file: int | None = None  # attempts.jsonl
        self._last: LastStep | None = None
        self._step = 0
        self._failed = False
        self._waiting: list[Death] = []  # the deaths from which the run recovers with this attempt's first step
        self.folder = Path()
        self._writing = threading.Lock()  # the thread of ``backend.watch`` records too

    def begin(self, folder: Path, step: int, backend: Backend, settings: str = "") -> None:
        """Record the start of an attempt from ``step``, and the death of the previous attempt, if it died. Collective.

        ``settings`` is the result of :func:`dualtrain.run_folder.restarts.settings_hash`.

        Raises:
            UserError: the record cannot be read or written, or another process has the folder.
        """
        self.folder, self._step = folder, step
        self._name = on_rank_zero(backend, "run folder", lambda: self._begin(settings))
        with suppress(OSError):  # on another host, this path may be missing, or may hold an old attempt
            starts = [event["attempt"] for event in read_events(folder) if event["event"] == "start"]
            if starts[-1:] == [self._name]:
                self._file = os.open(folder / NAME, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _begin(self, settings: str) -> str:
        folder, name = self.folder, secrets.token_hex(8)
        events = read_events(folder)
        death = new_death(folder, events)
        if death is not None:
            events.append(as_event(death))
        self._waiting = unrecovered(events)
        events.append({"event": "start", "attempt": name, "time": time.time(), "step": self._step, "settings": settings})
        write_whole(folder / NAME, lines(events), self.lock.check)
        return name

    @property
    def is_newest(self) -> bool:
        """Return whether this is the newest attempt in the folder; false before :meth:`begin` and after :meth:`close`."""
        with suppress(OSError):
            return (
                self._file is not None
                and self.lock.is_mine()
                and os.path.samestat(os.fstat(self._file), (self.folder / NAME).stat())
            )
        return False

    def train(self) -> None:
        """Record that the attempt begins to train. Call this on rank 0 only."""
        with suppress(OSError, SupersededError):
            if self._file is not None:
                self._last = LastStep(self.folder, self._name, self._step, self.lock)

    def step(self, step: int) -> list[str]:
        """Record a completed step. Rank 0 alone writes it to the folder.

        The first call on rank 0 also records the recoveries, and returns one log line for each death from which the run has
        now recovered. All other calls return an empty list. If no step was left to train, call this with the last completed
        step at the end of the run.
        """
        self._step, start = step, self._step
        if self._last is not None:
            self._last.note(step)
        if not self._waiting:
            return []
        waiting, self._waiting = self._waiting, []
        return [self._record_recovery(death, start) for death in waiting]

    def _record_recovery(self, death: Death, start: int) -> str:
        repeated, seconds = max(0, death.step - start), max(0.0, time.time() - death.time)
        recovery = Recovery(death.cause, death.rank, death.step, repeated, round(seconds, 3))
        self._append({"event": "recovery", "attempt": death.attempt, **asdict(recovery)})
        steps = f"{repeated} step{'s' * (repeated != 1)} repeated"
        what = f"the next step ({self._step})" if self._step > start else "the run"
        return f"recovered: {death.describe()}; {steps}, {what} ended {seconds:.1f} s after the failure"

    def fail(self, cause: str, rank: int | None = None, *, requested: bool = False, transient: bool = False) -> None:
        """Record what ended this attempt. Only a rank's first call counts; the first record in the file is the cause."""
        if self._failed:
            return
        self._failed = True
        cause = (cause.strip().splitlines() or [UNKNOWN])[0][:_CAUSE_LENGTH]
        moment = {"attempt": self._name, "time": time.time(), "step": self._step}
        kind = {"requested": requested, "transient": transient}
        self._append({"event": "failure", **moment, "cause": cause, "rank": rank, **kind})

    def refuse(self, reason: str) -> None:
        """Record that a restart would end in the same way, and the ``reason``."""
        self._append({"event": "refusal", "reason": reason})

    def end(self) -> None:
        """Record that the run has ended."""
        self._append({"event": "end", "attempt": self._name})

    def _append(self, event: Event) -> None:
        with self._writing, suppress(OSError):
            if self._file is not None and self.lock.is_mine():
                size = os.fstat(self._file).st_size
                # On a full disk, the last line may be incomplete: do not join this event to it.
                begin = b"\n" if size and os.pread(self._file, 1, size - 1) != b"\n" else b""
                os.write(self._file, begin + lines([event]))

    def close(self) -> None:
        """Close the files; later records are discarded."""
        if self._last is not None:
            self._last.close()
            self._last = None
        with self._writing:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    @contextmanager
    def noting(self, backend: Backend) -> Iterator[None]:
        """Record what ends the block, an error or the failure of another rank; then close the files."""
        watch = backend.watch

        def note(failure: PeerFailure) -> None:
            if _records_failure_of(failure.rank, backend):
                self.fail(failure.reason, failure.rank)

        if watch is not None:
            watch.add_callback(note)
        try:
            yield
        except BaseException as error:
            self._record_error(error, backend)
            raise
        finally:
            if watch is not None:
                watch.remove_callback(note)
            self.close()

    def _record_error(self, error: BaseException, backend: Backend) -> None:
        failure = None if backend.watch is None else backend.watch.failure
        if isinstance(error, BackendError) and failure is not None:
            # This call records a quiet failure (a rank left normally), for which ``note`` is not called. After any other
            # failure, ``note`` has called ``fail`` already, and this call does nothing.
            if _records_failure_of(failure.rank, backend):
                self.fail(failure.reason, failure.rank)
        elif isinstance(error, StoppedError | KeyboardInterrupt | BackendError | DivergedError | NotSavedError):
            if backend.rank == 0:
                self._record_error_of_all(error)
        elif backend.rank == 0 or not (isinstance(error, UserError) and error.shared):
            self.fail(f"stopped: {type(error).__name__}: {error}", backend.rank, transient=is_transient(error))

    def _record_error_of_all(self, error: BaseException) -> None:
        if isinstance(error, StoppedError | KeyboardInterrupt):
            number = error.number if isinstance(error, StoppedError) else signal.SIGINT
            self.fail(f"{signal.Signals(number).name} stopped all ranks", requested=True)
        else:
            self.fail(str(error), transient=is_transient(error))


def _records_failure_of(failed: int, backend: Backend) -> bool:
    """Return whether this rank must record the failure of rank ``failed``: rank 0 does, or rank 1 if rank 0 failed."""
    return backend.rank == (0 if failed else 1)
