"""Lock a run's folder, so that only one process uses it.

Each process that uses the folder makes a generation, which is a numbered file (``generation.py``). Only the process of the
newest generation may write. On its host, a lock on the file shows whether that process still runs. Other hosts may not see
the lock, so the process also renews the file every few seconds. A process that starts on a different host waits for a
renewal; if there is none, it makes the next generation. But the earlier process may still exist: it may be suspended or
cut off from the disk, and continue later. So every process checks before each write that its generation is the newest.
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
from dualtrain.processes import start_thread
from dualtrain.rendezvous.hosts import identity
from dualtrain.run_folder import generation
from dualtrain.run_folder.generation import Owner, Seen

WAIT_SECONDS = 6.0  # longest wait for a process of the same host to leave the folder, for example after a restart
RENEW_SECONDS = 2.0
#: A process on a different host counts as ended if it misses this many renewals. ``take(waits=True)`` fails after the other
#: process has renewed its file this many times.
RENEWALS = 3
_POLL_SECONDS = 0.05

log = logging.getLogger("dualtrain")
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class SupersededError(UserError):
    """Another process has made a newer generation of the folder, or a copy has replaced the folder."""


class FolderLock:
    """The lock of at most one folder. Release it when nothing writes into the folder any more.

    Attributes:
        job: the name of this process's job; empty if unknown.
        run: name of the job that made the folder's run or resumed it last, as it was when this process locked the folder;
            empty if unknown.
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
        self._stop = threading.Event()  # ends the renewals
        self._released = False
        self._writing = threading.Lock()  # held while the generation's file is written

    def take(self, folder: Path, limit: float, *, waits: bool = False) -> None:
        """Lock an existing folder; do nothing if this object has locked a folder already.

        If a process on a different host has not left the folder, wait some seconds to find out whether that process runs.

        Args:
            folder: the run's folder.
            limit: the longest wait, in seconds, even if several processes use the folder one after another.
            waits: whether to wait until a running process ends. The wait takes at most ``WAIT_SECONDS``, or ``RENEWALS``
                renewals if that process is on another host.

        Raises:
            UserError: another process uses the folder (the message names that process), or no thread can be started.
            OSError: the folder cannot be read or written.
        """
        wait = _Wait(folder, limit, waits)
        while self._descriptor is None:
            self._try_to_take(folder, wait)

    def _try_to_take(self, folder: Path, wait: _Wait) -> None:
        """Wait until the newest generation's process has left; make the next generation, unless another process does."""
        number = generation.newest(folder)
        before = wait.await_end(number) if number else None
        run = before.run if before else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        owner = Owner(os.getpid(), socket.gethostname(), identity(), since, self.job, run)
        number += 1
        descriptor = generation.create(folder, number, owner)
        if descriptor is None:
            return
        self._folder, self.generation, self.run = folder, number, run
        self._owner, self._descriptor, self._status = owner, descriptor, os.fstat(descriptor)
        _held.add(self)
        if generation.newest(folder) > number:  # this process was slow: others have made newer generations
            generation.path_of(folder, number).unlink(missing_ok=True)
            self.forget()
            return
        generation.remove_older(folder, number)
        start_thread(self._renew, "dualtrain-owner")

    @property
    def restarted(self) -> bool:
        """Return whether an earlier start of this job made the run in the folder, or was the last to resume it."""
        return bool(self.job) and self.job == self.run

    def record_job(self) -> None:
        """Record in the folder that its run now belongs to this job. Raises OSError."""
        self._write(run=self.job)

    def is_mine(self) -> bool:
        """Return whether this process may write into the folder: its generation is the newest, and its file no copy.

        Raises OSError if the folder cannot be read.
        """
        if self._descriptor is not None and not generation.is_newest(self._folder, self.generation, self._status):
            self._superseded.set()
        return not self._superseded.is_set()

    def check(self) -> None:
        """Raise SupersededError if :meth:`is_mine` is false. Call this before every write into the folder.

        Raises OSError if the folder cannot be read.
        """
        if not self.is_mine():
            number = generation.newest(self._folder)
            other = generation.look(self._folder, number) if number else None
            if other is not None and _is_copied(other.owner, number, self._owner, self.generation):
                raise SupersededError(
                    f"{str(self._folder)!r} was replaced by a copy while this process used it: this process ends, and "
                    "changes nothing in the copy; start again with --resume auto to continue from its newest checkpoint",
                    transient=True,
                )
            raise SupersededError(
                f"{other or 'another process'} took over {str(self._folder)!r}, because this process had not renewed "
                f"generation {self.generation} for {RENEWALS * RENEW_SECONDS:g} s: this process ends, and changes "
                "nothing in the folder",
                transient=True,
            )

    @property
    def superseded(self) -> bool:
        """Return whether another process is known to have made a newer generation; checked every ``RENEW_SECONDS``."""
        return self._superseded.is_set()

    def release(self, writer: threading.Thread | None = None) -> None:
        """Unlock the folder, if any. Does not wait for the thread ``writer``.

        While ``writer`` runs, it may write into the folder: a new thread then waits for its end, and unlocks.
        """
        if self._released:
            return
        self._released = True
        if writer is None or not writer.is_alive():
            self._leave()
            return

        def leave() -> None:
            writer.join()
            self._leave()

        threading.Thread(target=leave, name="dualtrain-unlock", daemon=True).start()

    def _leave(self) -> None:
        self._stop.set()
        with suppress(OSError):
            self._write(ended=True)
        with self._writing:
            self.forget()

    def forget(self) -> None:
        """Close the file, which unlocks it. In a forked child process, the parent's lock stays in place."""
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
    """Return the newest generation, and whether its process certainly runs. Does not wait."""
    number = generation.newest(folder)
    seen = generation.look(folder, number) if number else None
    return seen, bool(seen and seen.locked and _is_here(seen))


def in_use(folder: Path, user: object) -> UserError:
    """Return the error for a folder that ``user`` uses."""
    return UserError(
        f"--run-dir {str(folder)!r} is used by {user}: wait for its end, or choose another folder", transient=True
    )


def _is_copied(found: Owner | None, number: int, own: Owner | None, own_number: int) -> bool:
    """Return whether the record ``found``, of generation ``number``, came with a copy of the folder.

    A copy has this process's own record, which may lack later renewals, or, if it is older, that of an earlier generation.
    """
    if found is None or own is None:
        return False
    same = (found.process, found.machine, found.since) == (own.process, own.machine, own.since)
    return same or (number < own_number and found.since < own.since)


def _is_here(seen: Seen) -> bool:
    """Return whether a generation's process is certainly on this host, so that its lock shows whether the process runs."""
    return seen.locked is not None and seen.owner is not None and seen.owner.machine == identity()


class _Wait:
    """All waits of one call of :meth:`FolderLock.take`. Together they take at most ``limit`` seconds."""

    def __init__(self, folder: Path, limit: float, waits: bool) -> None:
        self._folder, self._limit, self._waits = folder, limit, waits
        self._ends = time.monotonic() + limit

    def await_end(self, number: int) -> Owner | None:
        """Wait until the process of generation ``number`` has left the folder.

        Returns:
            The last content of the generation's file; ``None`` if it cannot be parsed, or if the file was removed before
            it was read.

        Raises:
            UserError: the process runs, or may still run when ``limit`` seconds are over.
            OSError: the folder cannot be read.
        """
        self._began = self._changed = time.monotonic()
        self._renewals, self._last, self._warned = 0, b"", False
        owner = None
        while (seen := generation.look(self._folder, number)) is not None:  # None: removed for a newer generation
            owner = seen.owner
            if self._has_left(seen):
                break
            time.sleep(_POLL_SECONDS)
        return owner

    def _has_left(self, seen: Seen) -> bool:
        """Return whether ``seen`` shows that the process has left the folder. Raises UserError: see :meth:`await_end`."""
        if seen.owner is not None and seen.owner.ended:
            return True
        return self._has_ended_here(seen) if _is_here(seen) else self._has_ended_elsewhere(seen)

    def _has_ended_here(self, seen: Seen) -> bool:
        """Do the same as :meth:`_has_left`, for a process on this host."""
        if not seen.locked:
            return True
        seconds = min(WAIT_SECONDS, self._limit) if self._waits else 0.0
        if time.monotonic() >= min(self._began + seconds, self._ends):
            raise in_use(self._folder, seen)
        self._warn_once(f"is used by {seen}: waiting up to {seconds:g} s for its end")
        return False

    def _has_ended_elsewhere(self, seen: Seen) -> bool:
        """Do the same as :meth:`_has_left`, for a process that may be on a different host."""
        now, seconds = time.monotonic(), RENEWALS * RENEW_SECONDS
        if self._last and seen.content != self._last:
            self._renewals, self._changed = self._renewals + 1, now
        self._last = seen.content
        if now >= self._changed + seconds:
            return True
        if self._renewals >= (RENEWALS if self._waits else 1):
            raise in_use(self._folder, seen)
        if now >= self._ends:
            enough = 2 * max(seconds, self._limit)
            raise UserError(
                f"--run-dir {str(self._folder)!r} may be used by {seen}: wait for its end, or give a --timeout above "
                f"{enough:g} s, since at most half of the timeout is spent on waiting for that process",
                transient=True,
            )
        self._warn_once(f"may be used by {seen}: waiting {seconds:g} s for a renewal of that process's file")
        return False

    def _warn_once(self, what: str) -> None:
        if not self._warned:
            log.warning("%r %s", str(self._folder), what)
            self._warned = True


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
