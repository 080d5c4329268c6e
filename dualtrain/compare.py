"""``python -m dualtrain.compare RUN RUN…``: finished runs side by side, and whether they ended with the same weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualtrain.console import print_error, show
from dualtrain.errors import UserError
from dualtrain.run_table import read_summary, run_table

COLUMNS = ("backend", "launcher", "ranks", "accuracy", "precision", "samples/s", "seconds", "weights")


def table(runs: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Format finished runs, each a label and a summary, as lines of text; then one line on their weights."""
    rows = run_table(runs, COLUMNS)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    same = len({summary["weights_sha256"] for _, summary in runs}) == 1
    names = " and ".join(dict.fromkeys(summary["backend"] for _, summary in runs))
    lines.append("")
    lines.append(
        f"same weights: yes, {names} ended with the same model, bit for bit"
        if same
        else f"same weights: no, {names} ended with different bits"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status: 0, or 2 where a run cannot be read."""
    folders = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not folders or "--help" in folders or "-h" in folders:
            show(__doc__)
            return 0 if folders else 2
        show(table([(Path(folder).resolve().name, read_summary(Path(folder))) for folder in folders]))
    except UserError as error:
        print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
