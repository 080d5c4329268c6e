"""The events in ``attempts.jsonl``, and the deaths and recoveries that they show."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dualtrain.files import parse_json, read_text, write_whole
from dualtrain.run_folder.folder_lock import FolderLock
from dualtrain.run_folder.last_step import last_step_of

NAME = "attempts.jsonl"
UNKNOWN = "not known"

Event = dict[str, Any]
_NUMBER = (int, float)
_OPTIONAL_RANK = (int, type(None))
#: The fields that each kind of event must have, and their types.
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "start": {"attempt": str, "time": _NUMBER, "step": int},
    "failure": {"attempt": str, "time": _NUMBER, "cause": str, "rank": _OPTIONAL_RANK, "requested": bool},
    "death": {
        "attempt": str,
        "time": _NUMBER,
        "cause": str,
        "rank": _OPTIONAL_RANK,
        "requested": bool,
        "step": int,
        "trained": bool,
    },
    "recovery": {
        "attempt": str,
        "cause": str,
        "rank": _OPTIONAL_RANK,
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
        step: the last completed step; the step from which the attempt started if it completed none.
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
        # The cause may be the message of a BackendError, which begins with the step.
        cause = self.cause.removeprefix(f"after step {self.step}: ")
        what = "a failure of unknown cause" if cause == UNKNOWN else cause
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
        seconds: from the death to the end of the first step after it, or of the run if no step was left.
    """

    cause: str
    rank: int | None
    step: int
    steps_repeated: int
    seconds: float


def read_events(folder: Path) -> list[Event]:
    """Read the events of a run's folder, in order; skip lines that are not events. Raises OSError.

    If the file does not exist, there are no events.
    """
    try:
        text = read_text(folder / NAME, errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text.split("\n"):
        with suppress(ValueError, OverflowError):  # OverflowError: a number that does not fit into a float
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
    write_whole(folder / NAME, lines([*read_events(folder), *events]), lock.check)


def lines(events: Sequence[Event]) -> bytes:
    """Return the events as lines of ``attempts.jsonl``."""
    return "".join(json.dumps(event) + "\n" for event in events).encode()


def new_death(folder: Path, events: Sequence[Event]) -> Death | None:
    """Return the death of the newest attempt.

    If no failure is recorded, the cause is ``UNKNOWN``. The attempt may then still be running: this is not checked.
    Return ``None`` if there was no attempt, if the run has ended, or if ``events`` include this death already.
    """
    start = _newest_start(events)
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
    # Other ranks may have recorded the same failure earlier, without this value.
    transient = any(event.get("transient", False) for event in failures)
    return Death(name, failure["time"], *known, step, progress is not None, transient)


def last_death(folder: Path, events: Sequence[Event]) -> Death | None:
    """Return the death of the newest attempt, whether ``events`` include it or not; ``None`` if there is none."""
    start = _newest_start(events)
    recorded = (death for death in deaths_of(events) if start is not None and death.attempt == start["attempt"])
    return new_death(folder, events) or next(recorded, None)


def _newest_start(events: Sequence[Event]) -> Event | None:
    return next((event for event in reversed(events) if event["event"] == "start"), None)


def as_event(death: Death) -> Event:
    """Convert a death to an event."""
    return {"event": "death", **asdict(death)}


def deaths_of(events: Sequence[Event]) -> list[Death]:
    """Return the deaths among ``events``."""
    return [_from_event(Death, event) for event in events if event["event"] == "death"]


def _from_event(kind: Any, event: Event) -> Any:
    return kind(**{name: event[name] for name in kind.__dataclass_fields__ if name in event})


def recoveries_in(folder: Path) -> list[dict[str, Any]]:
    """Return the recoveries of the run in ``folder`` as plain values; an empty list if they cannot be read."""
    with suppress(OSError):
        return [asdict(_from_event(Recovery, event)) for event in read_events(folder) if event["event"] == "recovery"]
    return []


def unrecovered(events: Sequence[Event]) -> list[Death]:
    """Return the deaths from which no recovery is recorded."""
    recovered = {event["attempt"] for event in events if event["event"] == "recovery"}
    return [death for death in deaths_of(events) if death.attempt not in recovered]
