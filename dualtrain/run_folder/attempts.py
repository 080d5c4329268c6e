"""Record the attempts of a run in its folder. Each start of a run is an attempt.

The records say which failure ended an attempt, and how many steps and seconds the recovery took. ``attempts.jsonl`` has a
line for each event, and ``.progress`` holds the last step (:mod:`dualtrain.run_folder.last_step`). Each attempt replaces
both files. A process of an earlier attempt still has the old files open, so it cannot write to the new ones.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
from dualtrain.files import parse_json, read_text, write_whole
from dualtrain.on_ranks import on_rank_zero
from dualtrain.run_folder.folder_lock import FolderLock, SupersededError
from dualtrain.run_folder.last_step import LastStep, last_step_of

NAME = "attempts.jsonl"
UNKNOWN = "not known"
_CAUSE_LENGTH = 300

Event = dict[str, Any]
_NUMBER = (int, float)
_OPTIONAL_NUMBER = (int, type(None))
#: The fields that are read from each kind of event, and their types.
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "start": {"attempt": str, "time": _NUMBER, "step": int},
    "failure": {"attempt": str, "time": _NUMBER, "cause": str, "rank": _OPTIONAL_NUMBER, "requested": bool},
    "death": {
        "attempt": str,
        "time": _NUMBER,
        "cause": str,
        "rank": _OPTIONAL_NUMBER,
        "requested": bool,
        "step": int,
        "trained": bool,
    },
    "recovery": {
        "attempt": str,
        "cause": str,
        "rank": _OPTIONAL_NUMBER,
        "step": int,
        "steps_repeated": int,
        "seconds": _NUMBER,
    },
    "end": {"attempt": str},
    "refusal": {"reason": str},
}


@dataclass(frozen=True)
class Death:
    """End of an attempt that left the run unfinished.

    Attributes:
        attempt: the attempt's name.
        time: when a rank recorded the failure; else when ``.progress`` was last written; else when the attempt started.
        cause: the recorded cause, else ``UNKNOWN``.
        rank: the rank that failed first, if known.
        requested: whether a signal stopped all ranks.
        step: the last step that was completed.
        trained: whether the attempt had begun to train.
        transient: whether an error such as a full disk was the cause: a later attempt may succeed.
    """

    attempt: str
    time: float
    cause: str
    rank: int | None
    requested: bool
    step: int
    trained: bool
    transient: bool = False

    def describe(self) -> str:
        """Format the death: ``rank 1 died: its process ended without a report, after step 57``."""
        what = "a failure of unknown cause" if self.cause == UNKNOWN else self.cause
        who = "" if self.rank is None else f"rank {self.rank} "
        return f"{who}{what}, {f'after step {self.step}' if self.trained else 'while the run started'}"


@dataclass(frozen=True)
class Recovery:
    """Recovery from a death. ``summary.json`` lists all recoveries as ``recoveries``.

    Attributes:
        cause: the cause of the death.
        rank: the rank that failed first, if known.
        step: the last step that was completed before the death.
        steps_repeated: how many steps had to be computed again.
        seconds: from the death to the end of the first step after it.
    """

    cause: str
    rank: int | None
    step: int
    steps_repeated: int
    seconds: float


def read_events(folder: Path) -> list[Event]:
    """Read the events of a run's folder, in order; skip lines that are not events. Raises OSError."""
    try:
        text = read_text(folder / NAME, errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text.split("\n"):
        with suppress(ValueError):
            value = parse_json(line)
            if _is_event(value):
                found.append(value)
    return found


def _is_event(value: Any) -> bool:
    fields = _FIELDS.get(str(value.get("event"))) if isinstance(value, dict) else None
    if fields is None or not all(isinstance(value.get(name, ...), kind) for name, kind in fields.items()):
        return False
    # Older versions wrote failures without a step, and failures and deaths without ``transient``.
    if not isinstance(value.get("step", 0), int) or not isinstance(value.get("transient", False), bool):
        return False
    return all(math.isfinite(value[name]) for name in ("time", "seconds") if name in fields)


def append_events(folder: Path, lock: FolderLock, *events: Event) -> None:
    """Append events to a folder's file. Raises OSError, SupersededError."""
    # Replace the file: if a killed process left an incomplete last line, an appended event would be joined to it.
    write_whole(folder / NAME, _lines([*read_events(folder), *events]), lock.check)


def _lines(events: Sequence[Event]) -> bytes:
    return "".join(json.dumps(event) + "\n" for event in events).encode()


def new_death(folder: Path, events: Sequence[Event]) -> Death | None:
    """Return the death of the newest attempt; ``None`` if the run has ended, or ``events`` include this death already."""
    start = next((event for event in reversed(events) if event["event"] == "start"), None)
    if start is None:
        return None
    name = start["attempt"]
    own = [event for event in events if event.get("attempt") == name]
    if any(event["event"] in ("death", "end") for event in own):
        return None
    progress = last_step_of(folder, name)
    step, moment = progress or (start["step"], start["time"])
    # The first recorded failure is the cause of the others.
    failures = [event for event in own if event["event"] == "failure"]
    failure = next(iter(failures), None)
    if failure is None:
        return Death(name, moment, UNKNOWN, None, False, step, progress is not None)
    known = failure["cause"], failure["rank"], failure["requested"]
    # Rank 0 may have been killed before it wrote the last step. The rank that recorded the failure knows that step.
    step = max(step, failure.get("step", 0))
    # Other ranks record the same failure without this value, and may be first.
    transient = any(event.get("transient", False) for event in failures)
    return Death(name, failure["time"], *known, step, progress is not None, transient)


def as_event(death: Death) -> Event:
    """Convert a death to an event."""
    return {"event": "death", **asdict(death)}


def deaths_of(events: Sequence[Event]) -> list[Death]:
    """Return the deaths among ``events``."""
    return [_without_kind(Death, event) for event in events if event["event"] == "death"]


def _without_kind(kind: Any, event: Event) -> Any:
    return kind(**{name: event[name] for name in kind.__dataclass_fields__ if name in event})


def recoveries_in(folder: Path) -> list[dict[str, Any]]:
    """Return the recoveries of the run in ``folder`` as plain values; an empty list if they cannot be read."""
    with suppress(OSError):
        return [asdict(_without_kind(Recovery, event)) for event in read_events(folder) if event["event"] == "recovery"]
    return []


def _unrecovered(events: Sequence[Event]) -> list[Death]:
    """Return the deaths after which no step has been completed yet."""
    recovered = {event["attempt"] for event in events if event["event"] == "recovery"}
    return [death for death in deaths_of(events) if death.attempt not in recovered]


class Attempt:
    """Recorder of this process's attempt at a run. It records nothing before :meth:`begin`.

    Only :meth:`begin` raises. Records that cannot be written are lost, so the cause of a death may stay unknown.

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

    def begin(self, folder: Path, step: int, backend: Backend) -> None:
        """Record the start of an attempt from ``step``, and the death of the previous attempt, if it died. Collective.

        Raises:
            UserError: the record cannot be written, or another process has the folder.
        """
        self.folder, self._step = folder, step
        self._name = on_rank_zero(backend, "run folder", self._begin)
        with suppress(OSError):  # on another host, this path may not exist, or hold an old attempt
            starts = [event["attempt"] for event in read_events(folder) if event["event"] == "start"]
            if starts[-1:] == [self._name]:
                self._file = os.open(folder / NAME, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _begin(self) -> str:
        folder, name = self.folder, secrets.token_hex(8)
        events = read_events(folder)
        death = new_death(folder, events)
        if death is not None:
            events.append(as_event(death))
        self._waiting = _unrecovered(events)
        events.append({"event": "start", "attempt": name, "time": time.time(), "step": self._step})
        write_whole(folder / NAME, _lines(events), self.lock.check)
        return name

    @property
    def is_newest(self) -> bool:
        """Return whether this is the newest attempt in the folder."""
        with suppress(OSError):
            return (
                self._file is not None
                and self.lock.is_mine()
                and os.path.samestat(os.fstat(self._file), (self.folder / NAME).stat())
            )
        return False

    def train(self) -> None:
        """Record that the first step begins. On rank 0."""
        with suppress(OSError, SupersededError):
            if self._file is not None:
                self._last = LastStep(self.folder, self._name, self._step, self.lock)

    def step(self, step: int) -> list[str]:
        """Record a completed step. On rank 0.

        After the first step, return one log line for each death from which the run has now recovered.
        """
        self._step, start = step, self._step
        if self._last is not None:
            self._last.note(step)
        if not self._waiting:
            return []
        waiting, self._waiting = self._waiting, []
        return [self._recover(death, start) for death in waiting]

    def _recover(self, death: Death, start: int) -> str:
        repeated, seconds = max(0, death.step - start), max(0.0, time.time() - death.time)
        recovery = Recovery(death.cause, death.rank, death.step, repeated, round(seconds, 3))
        self._append({"event": "recovery", "attempt": death.attempt, **asdict(recovery)})
        steps = f"{repeated} step{'s' * (repeated != 1)} repeated"
        after = f"the next step ({self._step}) ended {seconds:.1f} s after the failure"
        return f"recovered: {death.describe()}; {steps}, {after}"

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
                os.write(self._file, _lines([event]))

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
        report = None if watch is None else watch.on_peer_failure

        def note(failure: PeerFailure) -> None:
            if _records_failure_of(failure.rank, backend):
                self.fail(failure.reason, failure.rank)
            if report is not None:
                report(failure)

        if watch is not None:
            watch.on_peer_failure = note
        try:
            yield
        except BaseException as error:
            self._record_error(error, backend)
            raise
        finally:
            if watch is not None:
                watch.on_peer_failure = report
            self.close()

    def _record_error(self, error: BaseException, backend: Backend) -> None:
        failure = None if backend.watch is None else backend.watch.failure
        if isinstance(error, BackendError) and failure is not None:
            # The failure is recorded already, unless it was reported before this attempt began.
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
