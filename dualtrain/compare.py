"""``python -m dualtrain.compare RUN RUN…``: finished runs side by side, and whether they ended with the same weights.

With --one-result, exit status 1 unless all runs have ended, with the same weights and the same metrics.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dualtrain.console import parser_of, print_error, show
from dualtrain.errors import UserError
from dualtrain.files import read_json

Columns = Mapping[str, Callable[[dict[str, Any]], str]]

_COLUMNS: Columns = {
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
#: What --one-result compares, and where each run computed.
_ONE_RESULT: Columns = {
    "run": _COLUMNS["run"],
    "ranks": _COLUMNS["ranks"],
    "backend": lambda s: s["backend"],
    "transport": lambda s: s["transport"],
    "launcher": _COLUMNS["launcher"],
    "weights": _COLUMNS["weights"],
    "val accuracy": lambda s: repr(s["val_accuracy"]),
    "val loss": lambda s: repr(s.get("val_loss", "-")),
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
    same = len({summary["weights_sha256"] for summary in summaries}) == 1
    names = " and ".join(dict.fromkeys(summary["backend"] for summary in summaries))
    last = (
        f"same weights: yes, {names} ended with the same model, bit for bit"
        if same
        else f"same weights: no, {names} ended with different bits"
    )
    return "\n".join([*_lines(_COLUMNS, summaries), "", last])


def one_result(summaries: Sequence[dict[str, Any]], unfinished: Sequence[str]) -> tuple[str, bool]:
    """Format the runs and compare their weights and metrics, all numbers of the last evaluation, by their bits.

    Args:
        summaries: of the runs that have ended.
        unfinished: names of the others.

    Returns:
        The table, whose last line is "N runs, 1 hash" where all have one result, and else says which differ; and whether
        they have.
    """
    hashes = list(dict.fromkeys(summary["weights_sha256"] for summary in summaries))
    count = f"{len(summaries) + len(unfinished)} runs, {len(hashes)} hash{'es' * (len(hashes) != 1)}"
    faults = [f"{name} has not ended" for name in unfinished]
    for summary in summaries[1:]:
        differing = [name for name in _results(summaries) if summary.get(name) != summaries[0].get(name)]
        if differing:
            faults.append(f"{summary['run']} differs from {summaries[0]['run']} in {', '.join(differing)}")
    lines = _lines(_ONE_RESULT, summaries) if summaries else []
    return "\n".join([*lines, "", ": ".join([count, "; ".join(faults)]) if faults else count]), not faults


def _results(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the values in any of ``summaries`` that one result has in common."""
    metrics = [name for summary in summaries for name in summary if name.startswith(("train_", "val_"))]
    return list(dict.fromkeys(["weights_sha256", "steps", *metrics]))


def _lines(columns: Columns, summaries: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table with a row for each summary."""
    rows = [list(columns), *([cell(summary) for cell in columns.values()] for summary in summaries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _compare_results(folders: Sequence[str]) -> int:
    summaries, unfinished = [], []
    for folder in folders:
        try:
            summaries.append(read(folder))
        except UserError:
            unfinished.append(Path(folder).resolve().name)
    shown, same = one_result(summaries, unfinished)
    show(shown)
    return 0 if same else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status: 0, 2 where a run cannot be read, 1 where --one-result finds several."""
    parser = parser_of("dualtrain.compare", str(__doc__))
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--one-result", action="store_true", help="compare weights and metrics; exit status 1 if they differ"
    )
    try:
        given = parser.parse_args(arguments)
        if given.one_result:
            return _compare_results(given.runs)
        show(table([read(folder) for folder in given.runs]))
    except UserError as error:
        print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
