"""Refuse restarts that would end like the previous attempt: launchers would otherwise repeat the same failure.

The file ``do-not-restart.json`` forbids restarts of a run with the same settings: they fail at once, with the reason that
this file contains. The run writes the file if its loss diverged, or if an error that the user must fix ended the training.
The next start writes it if the run died too often in a row after the same step with the same settings.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from dualtrain.backends import Backend
from dualtrain.config import AUTO, OutputSection
from dualtrain.errors import DivergedError, UserError, is_final
from dualtrain.files import or_nothing, read_json, write_json
from dualtrain.run_folder import checkpoint
from dualtrain.run_folder.attempt_events import Death, Event, append_events, as_event, deaths_of, new_death, read_events
from dualtrain.run_folder.attempts import Attempt
from dualtrain.run_folder.folder_lock import FolderLock, SupersededError

NAME = "do-not-restart.json"
DEATHS = 3  # this many deaths in a row after the same step forbid a restart, not counting those by transient errors
ALL_DEATHS = 30  # this many forbid it even if transient errors, such as a full disk, caused all of them
#: Settings that do not affect how a run ends.
_UNRELATED = ("resume", "run_dir")


def check_restart(output: OutputSection, settings: Mapping[str, Any], lock: FolderLock) -> None:
    """Refuse a start that would end like the previous one. Call it on rank 0, after ``run_dir.enter``.

    A start with other settings is allowed. So is a start with a plain ``--resume`` or ``--resume FILE``, since these flags
    are given by a person. This does not apply to ``--resume auto``: a launcher that restarts a job gives it again.
    (In a restart, ``run_dir.enter`` may replace another value of ``output.resume`` by ``"auto"``.)

    Raises:
        UserError: with the reason why the run ended, and the cure.
        OSError: the files cannot be read or written.
    """
    if output.run_dir is None or output.resume not in (None, AUTO):
        return
    folder = Path(output.run_dir)
    if output.resume is None and checkpoint.found(folder / "checkpoints"):
        return  # the folder holds another run: run_dir.claim() refuses the start
    path = folder / NAME
    if not path.exists():
        _check_deaths(folder, settings, lock)
    found = or_nothing(partial(read_json, path))
    if isinstance(found.get("reason"), str) and found.get("settings") == _related(settings):
        raise UserError(
            f"{found['reason']}; the run would end in the same way again: repair the cause and remove {path}, or change "
            "the settings",
            forbids_restart=True,
        )


def _check_deaths(folder: Path, settings: Mapping[str, Any], lock: FolderLock) -> None:
    """Forbid the restart of a run that has died too often in a row, with these settings, after the same step.

    See ``DEATHS``.
    """
    events = read_events(folder)
    death = new_death(folder, events)
    if death is None:
        return
    own = settings_hash(settings)
    # Older versions wrote no hash of the settings.
    alike = {event["attempt"] for event in events if event["event"] == "start" and (event.get("settings") or own) == own}
    latest = list(takewhile(lambda each: each.attempt in alike, [death, *reversed(_since_refusal(events))]))
    repeated = repeated_deaths(latest[::-1])
    if not repeated:
        return
    step = repeated[0].step
    reason = (
        f"the run has died {len(repeated)} times in a row after step {step}, in step {step + 1} or in an evaluation or "
        f"save between these steps (the last time: {repeated[0].describe()})"
    )
    forbid_restart(folder, reason, settings, lock)
    # After a person has removed the file, these deaths must not count again.
    append_events(folder, lock, as_event(death), {"event": "refusal", "reason": reason})


def _since_refusal(events: Sequence[Event]) -> list[Death]:
    last = max((number for number, event in enumerate(events) if event["event"] == "refusal"), default=-1)
    return deaths_of(events[last + 1 :])


def repeated_deaths(deaths: Sequence[Death]) -> list[Death]:
    """Return the newest deaths that all occurred after the same step, if they forbid a restart; else an empty list.

    ``deaths`` begin with the oldest, the result begins with the newest.

    Deaths before an attempt began to train, and stops of all ranks by a signal, do not count.
    """
    counted = [death for death in reversed(deaths) if death.trained and not death.requested]
    row = list(takewhile(lambda death: death.step == counted[0].step, counted))
    lasting = sum(not death.transient for death in row)
    return row if lasting >= DEATHS or len(row) >= ALL_DEATHS else []


def forbid_restart(folder: Path, reason: str, settings: Mapping[str, Any], lock: FolderLock) -> None:
    """Write the file that makes later starts with these ``settings`` fail. Raises OSError, SupersededError."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    write_json(folder / NAME, {"reason": reason, "since": since, "settings": _related(settings)}, lock.check)


def allow_restart(folder: Path, lock: FolderLock) -> None:
    """Remove ``do-not-restart.json``, since this start was allowed. Raises OSError, SupersededError."""
    lock.check()
    (folder / NAME).unlink(missing_ok=True)


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Return a hash of the settings that affect how a run ends."""
    return hashlib.sha256(json.dumps(_related(settings), sort_keys=True).encode()).hexdigest()


def _related(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in _UNRELATED}


@contextmanager
def recorded(attempt: Attempt, settings: Mapping[str, Any], backend: Backend) -> Iterator[None]:
    """Record the error that ends the block, and forbid a restart that would end in the same way. Closes the attempt.

    Args:
        attempt: an attempt that has begun.
        settings: the settings of this start by name, as its command line gives them.
        backend: the backend of all ranks.
    """
    with attempt.noting(backend):
        try:
            yield
        except (UserError, DivergedError) as error:
            shared = isinstance(error, DivergedError) or error.shared
            if is_final(error) and attempt.is_newest and not (shared and backend.rank):
                with suppress(OSError, SupersededError):
                    # If this write fails, the restart gets the same error, and writes the file.
                    forbid_restart(attempt.folder, str(error), settings, attempt.lock)
                attempt.refuse(str(error))
            if isinstance(error, UserError):
                error.forbids_restart = is_final(error)
            raise
