"""The results as text: the table, remarks, and a last line that answers whether to move from Horovod to torch.

The argument ``targets`` of these functions chooses whether the developers' targets and their verdicts are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from dualtrain.bench.measure import Results
from dualtrain.bench.plan import ENTRIES, ROUNDS, TUNED
from dualtrain.bench.rows import NONE, NOT_MET, NOT_SHOWN, OTHER, Row, sweep_of
from dualtrain.bench.statistics import rounds_of
from dualtrain.console import size_in_words

HEAD = ("", "ratio", "interval", "ms", "reference ms", "weights", "")
TARGET_HEAD = ("target", "")


def head(targets: bool) -> list[str]:
    """Return the heading of the table."""
    return [*HEAD, *(TARGET_HEAD if targets else ())]


def cells(row: Row, targets: bool) -> list[str]:
    """Return the cells of a row as text."""
    digits = 2 if row.unit == "×" else 1
    unit = "" if row.unit == "×" else f" {row.unit}"
    times = [milliseconds(seconds) for seconds in row.seconds] or ["", ""]
    interval = f"{row.found.low:.{digits}f} to {row.found.high:.{digits}f}"
    shown = [row.job, f"{row.found.value:.{digits}f}{unit}", interval, *times, row.weights, row.accuracies]
    if targets:
        sign = "≥" if row.unit == "×" else "≤"
        target = "" if row.target is None else f"{sign} {row.target:.{digits}f}{unit}"
        shown += [target, ", ".join(part for part in (row.verdict, row.note) if part)]
    return shown


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds, with three decimals below 10 ms."""
    return f"{1e3 * seconds:.3f}" if seconds < 0.01 else f"{1e3 * seconds:.1f}"


def text(results: Results, rows: Sequence[Row], machine: Mapping[str, str], *, targets: bool) -> str:
    """Return the whole report; its last line is the answer (see :func:`answer`)."""
    lines, heading = [*(f"{name}: {value}" for name, value in machine.items()), ""], head(targets)
    table = [heading, *(cells(row, targets) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for group, members in groupby(rows, key=lambda row: row.group):
        lines += [group, *("  " + _line(cells(row, targets), widths) for row in members)]
    first = "  " + _line(heading, widths)
    lines[len(machine) : len(machine)] = ["", first, "-" * len(first)]
    lines += ["", *_sweep(results)]
    lines += list(remarks(results, rows, targets))
    return "\n".join([*lines, "", answer(results, rows)])


def _line(parts: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()


def bytes_of(size: int) -> str:
    """Format a number of bytes; a multiple of a million is formatted as "100 MB (10⁶)"."""
    if size % 1_000_000 == 0:
        return f"{size // 1_000_000} MB (10⁶)"
    return size_in_words(size)


def sweep_table(results: Results) -> list[list[str]]:
    """Return the table of all-reduce times in ms by size, beginning with its heading; empty if none was measured."""
    found = sweep_of(results)
    sizes = sorted({size for one in found.values() for size in one})
    rows = [[title, *(f"{1e3 * one[s]:.3f}" if s in one else "–" for s in sizes)] for title, one in found.items()]
    return [["", *map(bytes_of, sizes)], *rows] if found else []


def _sweep(results: Results) -> Iterator[str]:
    table = sweep_table(results)
    if table:
        yield "allreduce, ms (median)"
        wide = max(len(title) for title, *_ in table)
        yield from (f"  {title:<{wide}}" + "".join(f"{cell:>15}" for cell in row) for title, *row in table)
        yield ""


def remarks(results: Results, rows: Sequence[Row], targets: bool) -> Iterator[str]:
    """Yield the remarks below the table: method, missing contenders, failures, weights that differ, and verdicts."""
    several = [row.found for row in rows if row.found.pairs > 1]  # one value has no interval
    levels = {found.pairs: f"{100 * found.level:.1f} % ({rounds_of(found.pairs)})" for found in several}
    if rows:
        likely = ", ".join(levels[pairs] for pairs in sorted(levels, reverse=True))
        method = f", and an interval that contains the true median with a probability of {likely}" if levels else ""
        yield f"ratios are the first contender's throughput divided by the second's: the median over the rounds{method}"
    yield (
        "on the CPU, dualtrain's scripts call dualtrain.keep_freed_memory(), which changes the settings of glibc's heap. "
        "The script on dualtrain.hvd also requests huge pages, as horovodize does, and so does dualtrain.main. Contenders "
        "in the same process as dualtrain have these settings too; all others have the defaults"
    )
    for name, reason in results.missing.items():
        yield f"{ENTRIES[name].title}: not measured: {reason}"
    for name, reasons in results.failures.items():
        if name not in results.missing:
            yield f"{ENTRIES[name].title}: failed in {len(reasons)} of its starts: {reasons[0]}"
    if any(row.weights == OTHER for row in rows):
        meaning = "the final weights of the two contenders differ from each other or from a raw script's"
        yield f"{OTHER}: {meaning}" + "; such a ratio meets no target" * targets
    if targets:
        yield from _verdicts(rows)


def _verdicts(rows: Sequence[Row]) -> Iterator[str]:
    yield "a target is 'met' if the whole interval reaches it, 'not met' if no part of the interval does, else 'not shown'"
    for verdict in (NOT_MET, NOT_SHOWN):
        named = [f"{row.group}: {row.job}" for row in rows if row.verdict == verdict]
        if named:
            yield f"targets that are {verdict}: {'; '.join(named)}"
    unjudged = [row for row in rows if row.target is not None and not row.verdict]
    if unjudged:
        yield f"targets that are not judged: {len(unjudged)}; a verdict needs {rounds_of(ROUNDS)}"


def answer(results: Results, rows: Sequence[Row]) -> str:
    """Return the line that says whether to move from Horovod to torch, and how much faster torch is.

    If there is no answer, the line says why.
    """
    question = "Should we move from Horovod to torch? "
    ours = max(("shm", "native"), key=results.count)  # the transport that ran in more rounds
    most = max(map(results.count, ("hvd-gloo", "hvd-mpi")))
    parts, compared = [], []
    for horovod in (name for name in ("hvd-gloo", "hvd-mpi") if results.count(name) == most):
        found = [row for row in rows if (row.one, row.other) == (ours, horovod) and row.job != "empty"]
        if found:
            parts.append(f"{_range(found)} times as many steps per second as {ENTRIES[horovod].title}")
            compared += found
    if not compared:
        return f"{question}Not answered: {_why_unanswered(results)}"
    found_weights = {row.weights for row in compared}
    if OTHER in found_weights:
        weights = ", and ends with different weights"
    else:
        weights = "" if NONE in found_weights else ", and ends with the same weights"
    raw = [row for row in rows if row.one == TUNED and row.other.startswith("hvd") and row.job != "empty"]
    others = f"; raw DDP runs {_range(raw)} times as many steps as Horovod" if raw else ""
    ranks = next(s.ranks for s in results.samples[ours] if s is not None)
    said = f"with {ranks} rank{'s' * (ranks != 1)} here, {ENTRIES[ours].title} runs {' and '.join(parts)}{weights}{others}."
    fewest = min(row.found.pairs for row in compared)
    few = "" if fewest >= ROUNDS else f" This is based on only {rounds_of(fewest)}: a verdict needs {ROUNDS}."
    return f"{question}{_yes_or_no(compared)}: {said}{few}"


def _yes_or_no(rows: Sequence[Row]) -> str:
    jobs = list(dict.fromkeys(row.job for row in rows))
    exceptions = [job for job in jobs if any(row.found.low <= 1 for row in rows if row.job == job)]
    gains, losses = [row for row in rows if row.found.low > 1], [row for row in rows if row.found.high < 1]
    if not exceptions:
        return "Yes"
    if len(losses) == len(rows):
        return "No"
    if not gains and not losses:
        return "No measurable difference in speed"
    if len(gains) > len(losses) and len(exceptions) < len(jobs):
        return f"Yes, except for {', '.join(exceptions)}"
    return f"Not for speed (torch is slower or not measurably different in these jobs: {', '.join(exceptions)})"


def _range(rows: Sequence[Row]) -> str:
    low, high = (choose(rows, key=lambda row: row.found.value) for choose in (min, max))
    if low is high:
        return f"{low.found.value:.2f} ({low.job})"
    return f"{low.found.value:.2f} ({low.job}) to {high.found.value:.2f} ({high.job})"


def _why_unanswered(results: Results) -> str:
    horovod, ours = ("hvd-gloo", "hvd-mpi"), ("shm", "native")
    for name in (*horovod, *ours):
        if name in results.missing:
            return f"{ENTRIES[name].title} did not run ({results.missing[name]})."
    if any(map(results.count, horovod)) and any(map(results.count, ours)):
        return "Horovod and dualtrain ran in no common round."
    return "Horovod or dualtrain was not among the contenders."
