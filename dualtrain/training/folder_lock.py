"""The lock by which one process at a time uses a run's folder: a flock on ``.lock`` in it, which ends with the process.

The file stays: removing it would let two processes lock two files of one name. It names the process that locked it last.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import weakref
from pathlib import Path

from dualtrain.errors import UserError
from dualtrain.files import parse_json

NAME = ".lock"
WAIT_SECONDS = 6.0  # for a process that is about to end, as at a restart
_POLL_SECONDS = 0.05
#: Of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_CONTENT = 4096  # bytes of the file that are read

log = logging.getLogger("dualtrain")
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """The lock of at most one folder. Release it when nothing writes there any more."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def take(self, folder: Path, seconds: float = 0.0) -> None:
        """Lock an existing folder; do nothing if this object has locked one already.

        Blocks for ``seconds`` at most while another process has the lock, and logs that. Where the file system has no
        locks, a warning is logged.

        Raises:
            UserError: another process has it; the message names it.
            OSError: the file cannot be opened.
        """
        if self._descriptor is not None:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(folder / NAME, flags, 0o666)
        try:
            _lock(descriptor, folder, seconds)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _held.add(self)

    def release(self, after: threading.Thread | None = None) -> None:
        """Unlock the folder, if one is locked; once ``after``, which may still write there, has ended. Does not block."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if after is None or not after.is_alive():
            os.close(descriptor)
            return

        def close() -> None:
            after.join()
            os.close(descriptor)

        threading.Thread(target=close, name="dualtrain-unlock", daemon=True).start()


def _lock(descriptor: int, folder: Path, seconds: float) -> None:
    deadline, waits = time.monotonic() + seconds, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                log.warning("%r cannot be locked (%s): nothing keeps a second job out of it", str(folder), error.strerror)
                return
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        else:
            break
        user = _user(descriptor)
        if time.monotonic() >= deadline:
            raise UserError(f"--run-dir {str(folder)!r} is used by {user}: wait for its end, or choose another folder")
        if not waits:
            log.warning("%r is used by %s: waiting up to %g s for its end", str(folder), user, seconds)
            waits = True
        time.sleep(_POLL_SECONDS)
    own = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(own) + "\n").encode(), 0)


def _user(descriptor: int) -> str:
    """Name the process that has the lock."""
    try:
        found = parse_json(os.pread(descriptor, _CONTENT, 0).decode())
        return f"process {found['process']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has not written its name yet
        return "another process"


def _forget_all() -> None:
    for lock in list(_held):
        lock.release()  # closes the file here; the lock stays that of the parent


os.register_at_fork(after_in_child=_forget_all)
