"""Reading and writing of files: the one place that opens what a user names, and that replaces what a run has written.

Only regular files are read: a FIFO, a terminal or ``/dev/zero`` would block a read, or never end it. A file is replaced
as a whole: its new content is durable before it gets the name, and a temporary file never goes through a symbolic link.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
#: Of directories that cannot be synchronized: some network file systems, and those without permission to read.
_UNSYNCHRONIZED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM)
_TEMPORARY = re.compile(r"\.(?P<name>.+?)(\.[0-9a-f]{16})?\.tmp")


def open_regular(path: str | Path) -> BinaryIO:
    """Opens a regular file for reading, without blocking.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    try:
        _check_regular(path, os.stat(path).st_mode)  # without opening a device, which may act on it
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except ValueError as error:  # a null character in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: str | Path) -> None:
    """Raises OSError if ``path`` leads to no regular file, without opening it."""
    _check_regular(path, os.stat(path).st_mode)


def _check_regular(path: str | Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(path))


@contextmanager
def readable_path(path: str | Path) -> Iterator[str]:
    """A path to the regular file ``path``, for libraries that open a path themselves; valid inside the block.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    with open_regular(path) as file:
        yield f"/proc/self/fd/{file.fileno()}"  # the file that was checked, whatever its name leads to by now


def read_text(path: str | Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """The text of a regular file. Raises OSError, or UnicodeDecodeError."""
    with open_regular(path) as file:
        return file.read().decode(encoding, errors)


def read_json(path: str | Path) -> Any:
    """The value in a regular file of JSON. Raises OSError, or ValueError where it is no JSON."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that replaces ``path`` at the end of the block, once its content is durable.

    An error in the block, or a full disk, leaves ``path`` as it was.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Replaces a file by ``data``: all of it or nothing. Raises OSError."""
    with replacing(path) as file:
        file.write(data)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces a file by ``value`` as JSON: all of it or nothing. Raises OSError."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def link_whole(source: Path, target: Path) -> None:
    """Makes ``target`` a second name of the file ``source``, or a copy where the file system has no links.

    Raises:
        OSError: it cannot be written.
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.hardlink_to(source)
    except OSError:
        with open_regular(source) as file, replacing(target) as copy:
            shutil.copyfileobj(file, copy)
        return
    try:
        temporary.replace(target)
    finally:
        # Two names of one file: a rename of one to the other does nothing.
        temporary.unlink(missing_ok=True)
    _sync_folder(target.parent)


def remove_temporary(folder: Path, names: re.Pattern[str]) -> None:
    """Removes what a process that was killed has left of writing files with these ``names``. Raises OSError."""
    for path in folder.iterdir():
        found = _TEMPORARY.fullmatch(path.name)
        if found and names.fullmatch(found["name"]) and stat.S_ISREG(path.lstat().st_mode):
            path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Makes the names in ``folder`` durable, where the file system can."""
    descriptor = -1
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSYNCHRONIZED:
            raise
    finally:
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)
