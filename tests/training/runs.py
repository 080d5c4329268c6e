"""Runs of one rank in the test's own process, and the contents of their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dualtrain.training.loop as loop
from dualtrain.backends import connect
from dualtrain.config import parse


class KilledError(BaseException):
    """Error that no ``except Exception`` handles. Unlike after SIGKILL, ``finally`` blocks still run."""


def train_alone(*arguments: str) -> dict[str, Any]:
    """Train on one rank with these flags; return the summary."""
    with connect("local") as backend:
        return loop.train(parse(arguments), backend)


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the contents and times of all files except the lock file ``generation-N``, which is rewritten regularly."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.match("generation-*")]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
