"""What is checked before torchvision downloads a dataset, which opens and writes whatever stands under its names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dualtrain.errors import UserError


def missing(files: Sequence[Path], archives: Sequence[Path]) -> bool:
    """Whether one of ``files`` is not there.

    Raises:
        UserError: it is so, and another of them, or of the ``archives`` that are downloaded, is no regular file.
    """
    if all(path.is_file() for path in files):
        return False
    for path in (*files, *archives):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise UserError(f"--download does not replace {str(path)!r}, which is no regular file: delete it first")
    return True
