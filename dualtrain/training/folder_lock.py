"""One process at a time uses a run's folder: the one of its newest generation (:mod:`dualtrain.training.generation`).

On one host, the lock on that generation's file says whether its process still lives. Between hosts there may be no locks,
so a start on another host waits for a renewal of the file. Where none comes it makes the next generation. A process that
was stopped, or cut off from the disk, looks before every write whether its generation is still the newest.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dualtrain.errors import UserError
from dualtrain.rendezvous.hosts import identity
from dualtrain.training import generation
from dualtrain.training.generation import Owner, Seen

WAIT_SECONDS = 6.0  # for a process of this host that is about to end, as at a restart
RENEW_SECONDS = 2.0
RENEWALS = 3  # that must not come from a process of another host, or have come
_POLL_SECONDS = 0.05

log = logging.getLogger("dualtrain")
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class SupersededError(UserError):
    """Another process has made a newer generation of the folder."""


class FolderLock:
    """The lock of at most one folder. Release it when nothing writes there any more.

    Attributes:
        job: the job of this process; empty if that is not known.
        run: the job whose run was in the folder when it was locked.
        generation: the number of this process's generation; 0 without a folder.
    """

    def __init__(self) -> None:
        self.job = self.run = ""
        self.generation = 0
        self._folder = Path()
        self._descriptor: int | None = None
        self._status = os.stat_result([0] * 10)  # of the generation's file
        self._owner: Owner | None = None
        self._superseded = threading.Event()
        self._stop = threading.Event()  # of the renewals
        self._released = False
        self._writing = threading.Lock()  # of the generation's file

    def take(self, folder: Path, limit: float, *, waits: bool = False) -> None:
        """Lock an existing folder; do nothing if this object has locked one already.

        Blocks where a process of another host has not left it, for some seconds until it is known to live or not.

        Args:
            folder: of a run.
            limit: seconds that this blocks at most.
            waits: whether to wait for a process that lives, up to ``WAIT_SECONDS`` or ``RENEWALS``, since it may end.

        Raises:
            UserError: another process uses it; the message names that.
            OSError: it cannot be read or written.
        """
        while self._descriptor is None:
            self._try(folder, limit, waits)

    def _try(self, folder: Path, limit: float, waits: bool) -> None:
        """Make the next generation, unless another process is faster."""
        number = generation.newest(folder)
        before = _await_end(folder, number, limit, waits) if number else None
        run = before.run if before else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        owner = Owner(os.getpid(), socket.gethostname(), identity(), since, self.job, run)
        number += 1
        descriptor = generation.create(folder, number, owner)
        if descriptor is None:
            return
        if generation.newest(folder) > number:  # this process was slow: there have been others since it looked
            generation.path_of(folder, number).unlink(missing_ok=True)
            os.close(descriptor)
            return
        self._folder, self.generation, self.run = folder, number, run
        self._owner, self._descriptor, self._status = owner, descriptor, os.fstat(descriptor)
        _held.add(self)
        generation.remove_older(folder, number)
        threading.Thread(target=self._renew, name="dualtrain-owner", daemon=True).start()

    @property
    def restarted(self) -> bool:
        """Whether an earlier start of this job has made the run in the folder."""
        return bool(self.job) and self.job == self.run

    def sign(self) -> None:
        """Note in the folder that the run in it is this job's, from now on. Raises OSError."""
        self._write(run=self.job)

    def is_mine(self) -> bool:
        """Return whether this process may write into the folder: no other one has made a newer generation."""
        if self._descriptor is not None and not generation.is_newest(self._folder, self.generation, self._status):
            self._superseded.set()
        return not self._superseded.is_set()

    def check(self) -> None:
        """Raise SupersededError where :meth:`is_mine` is false. To be called before every write into the folder."""
        if not self.is_mine():
            number = generation.newest(self._folder)
            other = generation.look(self._folder, number) if number else None
            raise SupersededError(
                f"{other or 'another process'} took over {str(self._folder)!r}, since this process had not renewed "
                f"generation {self.generation} for {RENEWALS * RENEW_SECONDS:g} s: this one ends, and changes "
                "nothing there",
                transient=True,
            )

    @property
    def superseded(self) -> bool:
        """Whether it is known that another process has made a newer generation; looked up every ``RENEW_SECONDS``."""
        return self._superseded.is_set()

    def release(self, after: threading.Thread | None = None) -> None:
        """Unlock the folder, if one is locked; once ``after``, which may still write there, has ended. Does not block."""
        if self._released:
            return
        self._released = True
        if after is None or not after.is_alive():
            self._leave()
            return

        def leave() -> None:
            after.join()
            self._leave()

        threading.Thread(target=leave, name="dualtrain-unlock", daemon=True).start()

    def _leave(self) -> None:
        self._stop.set()
        with suppress(OSError):
            self._write(ended=True)
        with self._writing:
            self.forget()

    def forget(self) -> None:
        """Close the file. It stays locked where this process was forked from the one that locked it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            with suppress(OSError):
                if not self.is_mine():
                    return
                self._write(renew=True)

    def _write(self, *, renew: bool = False, **values: bool | str) -> None:
        with self._writing:
            descriptor, owner = self._descriptor, self._owner
            if descriptor is None or owner is None:
                return
            self._owner = replace(owner, renewals=owner.renewals + renew, **values)  # type: ignore[arg-type]
            self._owner.write(descriptor)


def user_of(folder: Path) -> tuple[Seen | None, bool]:
    """Return the newest generation as it is seen, and whether it is known without waiting that its process lives."""
    number = generation.newest(folder)
    seen = generation.look(folder, number) if number else None
    return seen, bool(seen and seen.locked and _is_here(seen))


def refuse(folder: Path, user: object) -> UserError:
    """Return the error of a folder that is used."""
    return UserError(
        f"--run-dir {str(folder)!r} is used by {user}: wait for its end, or choose another folder", transient=True
    )


def _is_here(seen: Seen) -> bool:
    """Whether a generation's process is on this host, as far as is known: then its lock says whether it lives."""
    return seen.locked is not None and seen.owner is not None and seen.owner.machine == identity()


def _await_end(folder: Path, number: int, limit: float, waits: bool) -> Owner | None:
    """Wait until the process of generation ``number`` has left the folder; return what its file says at last.

    Raises:
        UserError: it lives, or may live at the end of ``limit``.
    """
    wait, owner = _Wait(folder, limit, waits), None
    while (seen := generation.look(folder, number)) is not None:  # else there is a newer one
        owner = seen.owner
        if wait.has_left(seen):
            break
        time.sleep(_POLL_SECONDS)
    return owner


class _Wait:
    """A wait for the end of the process that a folder is used by."""

    def __init__(self, folder: Path, limit: float, waits: bool) -> None:
        self._folder, self._limit, self._waits = folder, limit, waits
        self._began = self._changed = time.monotonic()
        self._renewals, self._last, self._said = 0, b"", False

    def has_left(self, seen: Seen) -> bool:
        """Return whether the process has left the folder, as it is seen now. Raises UserError if it is known to stay."""
        if seen.owner is not None and seen.owner.ended:
            return True
        return self._has_ended_here(seen) if _is_here(seen) else self._has_ended_elsewhere(seen)

    def _has_ended_here(self, seen: Seen) -> bool:
        if not seen.locked:
            return True
        seconds = min(WAIT_SECONDS, self._limit) if self._waits else 0.0
        if time.monotonic() >= self._began + seconds:
            raise refuse(self._folder, seen)
        self._say(f"is used by {seen}: waiting up to {seconds:g} s for its end")
        return False

    def _has_ended_elsewhere(self, seen: Seen) -> bool:
        now, seconds = time.monotonic(), RENEWALS * RENEW_SECONDS
        if self._last and seen.content != self._last:
            self._renewals, self._changed = self._renewals + 1, now
        self._last = seen.content
        if now >= self._changed + seconds:
            return True
        if self._renewals >= (RENEWALS if self._waits else 1):
            raise refuse(self._folder, seen)
        if now >= self._began + self._limit:
            raise UserError(
                f"--run-dir {str(self._folder)!r} may be used by {seen}: wait for its end, or give a --timeout above "
                f"{2 * seconds:g}, half of which is enough to know it",
                transient=True,
            )
        self._say(f"may be used by {seen}, which would renew its file there: waiting {seconds:g} s for that")
        return False

    def _say(self, what: str) -> None:
        if not self._said:
            log.warning("%r %s", str(self._folder), what)
            self._said = True


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
