"""``python -m dualtrain.compare RUN RUN…``: print a table of finished runs, and whether their weights are equal.

With --one-result, the exit status is 1 unless there are two or more runs, and all have ended with the same weights, metrics
and number of steps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from dualtrain.console import given_path, parser_of, print_error, show, text_table
from dualtrain.errors import UserError
from dualtrain.run_table import labelled, read_summary, run_table

COLUMNS = ("backend", "launcher", "ranks", "accuracy", "precision", "samples/s", "seconds", "weights")
ONE_RESULT = ("ranks", "backend", "launcher", "val loss", "accuracy", "weights")

Run = tuple[str, dict[str, Any]]  # its label and its summary


def table(runs: Sequence[Run]) -> str:
    """Format finished runs (pairs of label and summary) as a table. The last line says which runs have equal weights."""
    models: dict[str, list[str]] = {}
    for label, summary in runs:
        models.setdefault(summary["weights_sha256"], []).append(label)
    names = " and ".join(dict.fromkeys(summary["backend"] for _, summary in runs))
    # The largest group of runs with equal weights comes first.
    groups = "; ".join(" = ".join(labels) for labels in sorted(models.values(), key=len, reverse=True))
    last = (
        "same weights: not known, since there is no second run to compare"
        if len(runs) < 2
        else f"same weights: yes, {names} ended with the same model, bit for bit"
        if len(models) == 1
        else f"same weights: no, the {len(runs)} runs ended with {len(models)} models: {groups}"
    )
    return "\n".join([*text_table(run_table(runs, COLUMNS)), "", last])


def one_result(runs: Sequence[Run], unfinished: Sequence[str]) -> tuple[str, bool]:
    """Format the runs, and compare their results exactly: weights, steps, and all metrics in their summaries.

    Args:
        runs: the runs that have ended.
        unfinished: a message for each run that has not ended.

    Returns:
        The table, and whether all runs have the same result. If so, the table's last line is "N runs, 1 hash". Otherwise,
        the last line also lists the reasons.
    """
    hashes = {summary["weights_sha256"] for _, summary in runs}
    number = len(runs) + len(unfinished)
    count = f"{number} run{'s' * (number != 1)}, {len(hashes)} hash{'es' * (len(hashes) != 1)}"
    faults = list(unfinished)
    if number < 2:
        faults.append("there is no second run to compare")
    names = _compared_names(runs)
    for label, summary in runs[1:]:
        first, expected = runs[0]
        differing = [name for name in names if summary.get(name) != expected.get(name)]
        if differing:
            faults.append(f"{label} differs from {first} in {', '.join(differing)}")
    last = f"{count}: {'; '.join(faults)}" if faults else count
    return "\n".join([*text_table(run_table(runs, ONE_RESULT)), "", last]), not faults


def _compared_names(runs: Sequence[Run]) -> list[str]:
    """Return the names of the values that are compared. A metric is compared if any run has it."""
    metrics = [name for _, summary in runs for name in summary if name.startswith(("train_", "val_"))]
    return list(dict.fromkeys(["weights_sha256", "steps", *metrics]))


def _compare_results(folders: Sequence[str]) -> int:
    runs, unfinished = [], []
    for folder, label in labelled(folders):
        try:
            runs.append((label, read_summary(folder)))
        except UserError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            missing = f"has no folder {str(folder)!r}: it was not started, or failed before it made the folder"
            unfinished.append(f"{label} {'has not ended' if folder.is_dir() else missing}")
    shown, same = one_result(runs, unfinished)
    show(shown)
    return 0 if same else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status: 2 for an error, 1 if --one-result finds no common result, else 0."""
    parser = parser_of("dualtrain.compare", str(__doc__))
    parser.add_argument("runs", nargs="+", type=given_path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--one-result", action="store_true", help="compare weights and metrics; exit status 1 if they differ"
    )
    try:
        given = parser.parse_args(arguments)
        if given.one_result:
            return _compare_results(given.runs)
        show(table([(label, read_summary(folder)) for folder, label in labelled(given.runs)]))
    except UserError as error:
        print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
