"""``python -m dualtrain.compare RUN RUN…``: finished runs side by side, and whether they ended with the same weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dualtrain.console import print_error, show
from dualtrain.errors import UserError
from dualtrain.files import read_json

_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "run": lambda s: s.get("run", "-"),
    "backend": lambda s: f"{s['backend']} ({s['transport']})",
    "launcher": lambda s: s["launcher"],
    "ranks": lambda s: str(s["world_size"]),
    "accuracy": lambda s: f"{s['val_accuracy']:.4f}",
    "precision": lambda s: "fp32" if s.get("amp", "off") == "off" else str(s["amp"]),
    "samples/s": lambda s: f"{s['samples_per_second']:.0f}",
    "seconds": lambda s: f"{s['seconds']:.1f}",
    "weights": lambda s: s["weights_sha256"][:16],
}


_KINDS: dict[str, Any] = dict.fromkeys(("backend", "transport", "launcher", "weights_sha256"), str)
_KINDS |= dict.fromkeys(("val_accuracy", "samples_per_second", "seconds", "world_size"), int | float)


def _item(summary: Any, name: str) -> Any:
    return summary.get(name) if isinstance(summary, dict) else None


def read(folder: str) -> dict[str, Any]:
    """Read the summary of a finished run.

    Raises:
        UserError: the folder holds none.
    """
    path = Path(folder) / "summary.json"
    try:
        summary = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder!r} holds no finished run (no readable summary.json): name a run's folder") from error
    wrong = [name for name, kinds in _KINDS.items() if not isinstance(_item(summary, name), kinds)]
    if wrong:
        raise UserError(f"{folder!r} has a summary.json without a usable {wrong[0]}: name a run's folder")
    return {**summary, "run": Path(folder).resolve().name}


def table(summaries: Sequence[dict[str, Any]]) -> str:
    """Format the runs as lines of text, then one line on their weights."""
    rows = [list(_COLUMNS), *([cell(summary) for cell in _COLUMNS.values()] for summary in summaries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    same = len({summary["weights_sha256"] for summary in summaries}) == 1
    names = " and ".join(dict.fromkeys(summary["backend"] for summary in summaries))
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
        show(table([read(folder) for folder in folders]))
    except UserError as error:
        print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
