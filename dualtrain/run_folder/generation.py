"""The files ``generation-N`` of a run's folder. Only the newest is valid.

Each process that locks the folder makes the file with the next number, and removes the older files. The process writes its
id and host into the file, locks the file (flock) and renews it every few seconds. A new file is written and locked under a
temporary name, and gets its number only if the number is free: of two processes that try, one succeeds.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import stat
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dualtrain.files import parse_json

#: Errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_NAME = re.compile(r"generation-([1-9][0-9]{0,17})")
_BYTES = 1024  # size of each file: it is constant, so that fdatasync need not write metadata


@dataclass(frozen=True)
class Owner:
    """The process of a generation.

    Attributes:
        process: its id.
        host: its host's name.
        machine: its host's identity; two hosts may have the same name.
        since: when it locked the folder, by its host's clock; for messages.
        job: name of the job of this process; empty if unknown.
        run: name of the job that the folder's run belongs to, which may be an earlier job; empty if unknown.
        renewals: the number of renewals so far; each renewal changes the file.
        ended: whether the process has left the folder.
    """

    process: int
    host: str
    machine: int
    since: str
    job: str = ""
    run: str = ""
    renewals: int = 0
    ended: bool = False

    def __str__(self) -> str:
        return f"process {self.process} on {self.host} since {self.since}"

    def write(self, descriptor: int) -> None:
        """Replace the content of a generation's file by this record. Raises OSError."""
        os.pwrite(descriptor, json.dumps(asdict(self)).ljust(_BYTES - 1).encode() + b"\n", 0)
        os.fdatasync(descriptor)  # other hosts see the new content only after this call


@dataclass(frozen=True)
class Seen:
    """A generation's file as another process sees it.

    Attributes:
        content: its bytes.
        owner: the process that the content names; ``None`` if it cannot be read.
        locked: whether the process holds the lock; ``None`` if the file system has no locks.
    """

    content: bytes
    owner: Owner | None
    locked: bool | None

    def __str__(self) -> str:
        return str(self.owner or "another process")


def path_of(folder: Path, number: int) -> Path:
    """Return the path of a generation's file."""
    return folder / f"generation-{number}"


def newest(folder: Path) -> int:
    """Return the number of the newest generation; 0 if there is none, or no folder. Raises OSError."""
    return max(_numbers(folder), default=0)


def look(folder: Path, number: int) -> Seen | None:
    """Read a generation's file; ``None`` if it has been removed. Raises OSError."""
    try:
        descriptor = os.open(path_of(folder, number), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path_of(folder, number)))
        # A shared lock, so that processes that look at the same time do not see each other's locks.
        free = _lock(descriptor, fcntl.LOCK_SH)
        content = os.pread(descriptor, 2 * _BYTES, 0)
    finally:
        os.close(descriptor)
    return Seen(content, _parse(content), None if free is None else not free)


def create(folder: Path, number: int, owner: Owner) -> int | None:
    """Make and lock a generation's file; return its descriptor; ``None`` if another process was faster. Raises OSError."""
    temporary = folder / f".generation-{number}.{secrets.token_hex(8)}.tmp"
    descriptor = _open_new(temporary)
    try:
        _lock(descriptor, fcntl.LOCK_EX)
        owner.write(descriptor)
        if _link(temporary, path_of(folder, number), descriptor):
            return descriptor
    except FileNotFoundError:  # another process was faster, and has removed temporary files
        if not folder.exists():
            os.close(descriptor)
            raise
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    os.close(descriptor)
    return None


def remove_older(folder: Path, number: int) -> None:
    """Remove the files of generations before ``number``, the oldest first. Raises OSError."""
    for older in sorted(_numbers(folder)):
        if older < number:
            path_of(folder, older).unlink(missing_ok=True)


def is_newest(folder: Path, number: int, status: os.stat_result) -> bool:
    """Return whether generation ``number``, whose file has this ``status``, is still the newest. Raises OSError.

    This opens the file, because network file systems look up other hosts' changes when a file is opened.
    """
    try:
        descriptor = os.open(path_of(folder, number), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        # If a person has removed the file or the folder, this generation stays valid until another process uses the folder.
        # That process then counts from 1 again, so its number may be lower.
        return newest(folder) in (0, number)
    try:
        return os.path.samestat(os.fstat(descriptor), status) and not os.path.lexists(path_of(folder, number + 1))
    finally:
        os.close(descriptor)


def _numbers(folder: Path) -> list[int]:
    try:
        return [int(found[1]) for name in os.listdir(folder) if (found := _NAME.fullmatch(name))]
    except FileNotFoundError:
        return []


def _open_new(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _link(temporary: Path, path: Path, descriptor: int) -> bool:
    """Link ``temporary`` to ``path``, if that name is free; return whether it was free."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return os.fstat(descriptor).st_nlink > 1  # the link may be ours: NFS may repeat a request that has succeeded
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return _rename(temporary, path)
    return True


def _rename(temporary: Path, path: Path) -> bool:
    """Do the same as :func:`_link` on a file system without hard links: an empty file reserves the name."""
    try:
        os.close(_open_new(path))
    except FileExistsError:
        return False
    temporary.replace(path)
    return True


def _lock(descriptor: int, kind: int) -> bool | None:
    """Lock an open file if it is free; return whether it was, or ``None`` if there are no file locks. Raises OSError."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _parse(content: bytes) -> Owner | None:
    try:
        owner = Owner(**parse_json(content.decode()))
    except (ValueError, TypeError):
        return None
    kinds = {field.name: field.type for field in fields(Owner)}
    return owner if all(type(getattr(owner, name)).__name__ == kind for name, kind in kinds.items()) else None
