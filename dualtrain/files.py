"""Reading and writing of files: safe opening of files that the user names, and atomic replacement of files of a run.

Only regular files are read, since a read of a FIFO, a terminal or ``/dev/zero`` would block or never end. A file is
replaced as a whole: the new content is durable before the rename. A temporary file is never opened through a symbolic link.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
#: Error numbers to ignore when a folder is synchronized. Some network file systems cannot synchronize folders, and the
#: folder's permissions may forbid reading it.
_UNSYNCHRONIZED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM)
_BAD_PATHS = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
)
_TEMPORARY = re.compile(r"\.(?P<name>.+?)(\.[0-9a-f]{16})?\.tmp")


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading, without blocking.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    check_regular(path)  # before opening: merely opening a device may have an effect
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: str | Path) -> None:
    """Raise OSError if ``path`` is not a regular file, without opening it."""
    try:
        _check_regular(path, os.stat(path).st_mode)
    except ValueError as error:  # a null character in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from error


def _check_regular(path: str | Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a special file")  # such as an eventfd
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(path))


@contextmanager
def readable_path(path: str | Path) -> Iterator[str]:
    """Yield a path to the regular file ``path``, for libraries that open it themselves; valid inside the block.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    with open_regular(path) as file:
        # This path leads to the file that was checked, even if the file's name now belongs to a different file.
        yield f"/proc/self/fd/{file.fileno()}"


def absolute(path: str | Path) -> Path:
    """Return the absolute path of ``path``: it stays valid if the user's code changes the current folder.

    If ``path`` is relative and the current folder has been removed, return ``path`` itself: its use then raises OSError.
    """
    try:
        return Path(path).absolute()
    except FileNotFoundError:
        return Path(path)


def real(path: str | Path) -> Path:
    """Return the absolute path of ``path`` with all symbolic links resolved.

    If ``path`` is relative and the current folder has been removed, return ``path`` itself.
    """
    try:
        return Path(os.path.realpath(path))
    except FileNotFoundError:
        return Path(path)


def names_in(folder: Path) -> list[str]:
    """Return the names in ``folder``; none if it does not exist. Raises OSError if it cannot be read, unlike ``glob()``."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def read_text(path: str | Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Read the text of a regular file. Raises OSError, or UnicodeDecodeError."""
    with _named_in_errors(path), open_regular(path) as file:
        return file.read().decode(encoding, errors)


@contextmanager
def _named_in_errors(path: str | Path) -> Iterator[None]:
    """Make an OSError of the block name ``path``.

    A failed read or write of an open file names no file. A failed rename also names the temporary file.
    """
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        del error.filename2  # None would be printed as a second name
        raise


def read_json(path: str | Path) -> Any:
    """Read the JSON value in a regular file. Raises OSError, or ValueError if the file is not JSON."""
    return parse_json(read_text(path))


def or_nothing(read: Callable[[], Any]) -> dict[str, Any]:
    """Return the dict that ``read`` returns; an empty one if it raises OSError or ValueError, or returns anything else."""
    try:
        value = read()
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def parse_json(text: str) -> Any:
    """Parse a JSON text. Raises ValueError, also if the text is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with ``None`` for values that are infinite or not a number: JSON has no such numbers."""
    return {name: None if isinstance(one, float) and not math.isfinite(one) else one for name, one in values.items()}


def cure_of(error: OSError, folder: str = "the run folder", path_cure: str = "") -> str:
    """Return what the user can do about an ``error`` of a write into ``folder``.

    Return ``path_cure``, if it is given, for an error of a wrong path, or of a path that the user may not write to.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"free space on the disk of {folder}"
    if error.errno == errno.EFBIG:
        return "raise the limit of file sizes (ulimit -f)"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (ulimit -n)"
    return path_cure if path_cure and error.errno in _BAD_PATHS else f"repair the disk or the permissions of {folder}"


def _allow() -> None:
    """Raise no error: the default of ``check``."""


@contextmanager
def replacing(path: Path, check: Callable[[], None] = _allow) -> Iterator[BinaryIO]:
    """Yield a new file. At the end of the block, make the file's content durable, then replace ``path`` by the file.

    An error in the block, or a full disk, leaves ``path`` as it was. The same holds for an error of ``check``, which is
    called before anything is written, and again before the file is replaced.

    Raises:
        OSError: the file cannot be written; or, after ``path`` was replaced, its folder cannot be made durable.
    """
    check()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        check()
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_named(path: Path, data: bytes) -> None:
    """Make or replace a file that the user names; see :func:`write_whole` and :func:`check_named`. Raises OSError."""
    write_whole(path, data, lambda: check_named(path))


def check_named(path: Path) -> None:
    """Raise OSError if ``path`` is a folder, device, FIFO or socket, or a link to one or to an open file.

    As root, a program that replaced ``/dev/null`` or ``/dev/stdout`` by a file would damage the system.
    """
    with suppress(FileNotFoundError):
        check_regular(path)
        if path.is_symlink() and os.readlink(path).startswith("/proc/"):  # /dev/stdout, if it is redirected to a file
            raise OSError(errno.EINVAL, "a link to an open file, not a regular file", str(path))


def write_whole(path: Path, data: bytes, check: Callable[[], None] = _allow) -> None:
    """Make or replace a file with ``data``, whole or not at all; ``check`` as in :func:`replacing`. Raises OSError."""
    with _named_in_errors(path), replacing(path, check) as file:
        file.write(data)


def rewrite(path: Path, data: bytes) -> None:
    """Replace the content of an existing file, whole or not at all, and keep its mode.

    Keeps the owner if this process may set it. If ``path`` is a symbolic link, replaces the content of the link's target.

    Raises:
        OSError: the file cannot be written.
    """
    path = path.resolve()
    status = path.stat()
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    with replacing(path) as file:
        if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
            with suppress(PermissionError):
                os.fchown(file.fileno(), status.st_uid, status.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
        file.write(data)


def write_json(path: Path, value: dict[str, Any], check: Callable[[], None] = _allow) -> None:
    """Make or replace a file with ``value`` as JSON; see :func:`write_whole`."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode(), check)


def link_whole(source: Path, target: Path) -> None:
    """Make ``target`` a hard link to ``source``, or a copy if no hard link can be made.

    Raises:
        OSError: the file cannot be written.
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
        # The rename does nothing if ``target`` was a link to this file already.
        temporary.unlink(missing_ok=True)
    _sync_folder(target.parent)


def aside_of(path: Path, name: Path) -> Path:
    """Return a path under which to keep the file ``path``: the first free one of ``name``.aside, ``name``.aside-2, ….

    A path is free if it does not exist, or is a link to the same file as ``path``. So two links to one file get the same
    result if the caller passes the same ``name`` for both.
    """
    target, number = name.with_name(f"{name.name}.aside"), 1
    while target.exists() and not target.samefile(path):
        number += 1
        target = name.with_name(f"{name.name}.aside-{number}")
    return target


def remove_temporary(folder: Path, names: re.Pattern[str]) -> None:
    """Remove temporary files of killed processes, if the files that they would replace match ``names``. Raises OSError.

    Call this only while no other process writes such files: their temporary files would be removed too.
    """
    for path in folder.iterdir():
        found = _TEMPORARY.fullmatch(path.name)
        if found and names.fullmatch(found["name"]) and stat.S_ISREG(path.lstat().st_mode):
            path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable, if the file system can."""
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
