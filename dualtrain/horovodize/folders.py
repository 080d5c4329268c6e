"""Python files of a folder that use Horovod, for ``--check FOLDER``."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dualtrain.console import show
from dualtrain.errors import UserError
from dualtrain.horovodize.script_file import parse_scripts
from dualtrain.horovodize.source import Source

#: Lines that may import Horovod or a module that replaces it. Of a folder's files, only those with such a line
#: are parsed.
_IMPORTS = re.compile(
    rb"\b(import|from)\b([^#\r\n]|\\\r?\n){0,200}\b(horovod|dualtrain)\b|import_module\(\s*[\"'](horovod|dualtrain)\."
)
_LEFT_OUT = {"__pycache__", "node_modules", "site-packages"}
_PROGRESS_PERIOD = 5.0  # seconds


class Found(NamedTuple):
    """Result of the search for files to check.

    Attributes:
        sources: the files to check, by name.
        without_horovod: the number of files in the folders that import neither horovod nor its replacement.
        unreadable: names of files and folders that cannot be read or parsed.
    """

    sources: dict[str, Source]
    without_horovod: int
    unreadable: list[str]


def find_sources(names: Sequence[str]) -> Found:
    """Parse the named files as one program, and each Horovod script of the named folders on its own.

    A file that is in several of the folders, or is also named itself, is read once.

    Raises:
        UserError: a named file cannot be read, is a notebook, or is not valid Python; or no Python file can be
            found in a named folder.
    """
    folders = [name for name in names if os.path.isdir(name)]
    files = [name for name in names if name not in folders]
    sources = {name: source for name, (_, source) in parse_scripts(files).items()}
    read = {os.path.realpath(name) for name in files}
    without_horovod = 0
    unreadable: list[str] = []
    for name in (name for folder in folders for name in _python_files(folder, unreadable)):
        if os.path.realpath(name) in read:
            continue
        read.add(os.path.realpath(name))
        try:
            with open(name, "rb") as file:
                uses = _IMPORTS.search(file.read())
            source = parse_scripts([name])[name][1] if uses else None
            if source is not None and source.uses_horovod:
                sources[name] = source
            else:
                without_horovod += 1
        except (OSError, UserError):
            unreadable.append(name)
    return Found(sources, without_horovod, unreadable)


def _python_files(folder: str, unreadable: list[str]) -> Iterator[str]:
    """Yield the Python files below ``folder``, except in hidden folders, virtual environments and ``_LEFT_OUT``.

    A folder's files come before those in its subfolders; both are sorted by name. Folders that cannot be read are added to
    ``unreadable``. The folder that is being read is printed to standard error, at most every ``_PROGRESS_PERIOD`` seconds.

    Raises:
        UserError: after the last folder, if there was no such file.
    """
    found, shown = False, time.monotonic()
    for path, folders, files in os.walk(folder, onerror=lambda error: unreadable.append(str(error.filename))):
        kept = [name for name in folders if not name.startswith(".") and name not in _LEFT_OUT]
        folders[:] = sorted(name for name in kept if not os.path.exists(os.path.join(path, name, "pyvenv.cfg")))
        names = (os.path.join(path, name) for name in sorted(files) if name.endswith(".py"))
        for name in (None, *names):  # None: a folder without Python files shows progress too
            if time.monotonic() - shown > _PROGRESS_PERIOD:
                shown = time.monotonic()
                show(f"reading {path}", sys.stderr)
            if name is not None and os.path.isfile(name):
                found = True
                yield name
    if not found:
        raise UserError(f"the folder {folder!r} has no readable Python file: name a script, or the folder of your scripts")
