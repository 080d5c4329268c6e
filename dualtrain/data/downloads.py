"""Check of a dataset's files before torchvision downloads them, and the reason why files cannot be read.

The check is needed because torchvision would write through any link or device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dualtrain.errors import UserError


def missing(files: Sequence[Path], archives: Sequence[Path]) -> bool:
    """Return whether any of ``files`` is missing.

    Raises:
        UserError: a file is missing, and one of ``files`` or ``archives`` (the files to be fetched) is a symbolic link or
            not a regular file. The download would write to it.
    """
    # The methods of Path would raise PermissionError if the folder cannot be searched.
    if all(map(os.path.isfile, files)):
        return False
    for path in (*files, *archives):
        if os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):
            raise UserError(f"--download does not replace {str(path)!r}, which is not a regular file: delete it first")
    return True


def why_unreadable(error: Exception) -> str:
    """Return why the files of a dataset cannot be read, with the name of the file if ``error`` has it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{Path(error.filename).name}: {error.strerror}"
    return str(error) or "too large"  # a MemoryError may have no text
