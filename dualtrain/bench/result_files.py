"""Write the files of the results: bench.json, bench.html and bench.svg."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from dualtrain.console import show
from dualtrain.errors import UserError
from dualtrain.files import write_whole

JSON, PAGE, CHART = "bench.json", "bench.html", "bench.svg"


def write_files(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    """Write ``files``, which are names and contents, to ``folder``, and print the paths.

    Each file is written before the next content is computed. If ``files`` has no chart, the chart of earlier results is
    removed.

    Raises:
        UserError: a file cannot be written.
    """
    names = set()
    try:
        for name, content in files:
            write_whole(folder / name, content.encode())
            show(folder / name, sys.stderr)
            names.add(name)
        if CHART not in names:
            (folder / CHART).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"the results cannot be written to {str(folder)!r} ({error.strerror or error}): give another --out"
        ) from error
