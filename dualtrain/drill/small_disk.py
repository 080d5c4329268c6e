"""A small file system for the run with faults, so that a fault can fill it. Mounting it needs root.

The file system is mounted in the drill's own mount namespace, which only the drill and its jobs see. The kernel removes it
when the last of these processes has ended, even if the drill was killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

from dualtrain.console import size_in_words

_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_MNT_DETACH = 2
_MARGIN = 16 << 20  # bytes beyond what all ``runs`` write
_MEMORY_DIVISOR = 4  # the file system may take at most 1/4 of the free memory


class SmallDisk:
    """A new file system at ``folder``, large enough for ``runs`` runs that each write as much as the folder ``example``.

    Raises:
        OSError: the file system cannot be mounted here, or there is too little free memory.
    """

    def __init__(self, folder: Path, example: Path, runs: int) -> None:
        size = runs * sum(path.stat().st_size for path in example.rglob("*") if path.is_file()) + _MARGIN
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if size > free // _MEMORY_DIVISOR:
            raise OSError(f"it needs {size_in_words(size)} of {size_in_words(free)} free memory")
        self._folder = folder
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._call("unshare", _CLONE_NEWNS)
        self._call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)  # hide later mounts from other namespaces
        folder.mkdir()
        try:
            self._call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode())
        except OSError:
            folder.rmdir()
            raise

    def _call(self, name: str, *arguments: object) -> None:
        """Call a function of the C library. Raises OSError if the function does not return 0."""
        if getattr(self._libc, name)(*arguments):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def close(self) -> None:
        """Copy the content to a new folder, unmount the file system, and replace the folder by the copy. Raises OSError."""
        kept = self._folder.with_name(f"{self._folder.name}.kept")
        shutil.copytree(self._folder, kept, symlinks=True)
        self._call("umount2", os.fsencode(self._folder), _MNT_DETACH)
        kept.replace(self._folder)


def fill(folder: Path) -> Path:
    """Fill the file system of ``folder`` to the last byte; return the file that fills it, which the caller removes."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return path
