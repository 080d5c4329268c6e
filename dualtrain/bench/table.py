"""The results as text: the table, remarks, and the answer in the last line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from dualtrain.bench.measure import Results
from dualtrain.bench.plan import CURES, ENTRIES, ROUNDS, TUNED
from dualtrain.bench.rows import OTHER, Row, sweep_of
from dualtrain.bench.statistics import pairs_of
from dualtrain.console import size_in_words

HEAD = ("", "ratio", "95 % interval", "ms", "ms of the other", "weights", "target", "")


def cells(row: Row) -> list[str]:
    """Return the cells of a row as text."""
    digits = 2 if row.unit == "×" else 1
    sign = "≥" if row.unit == "×" else "≤"
    unit = "" if row.unit == "×" else f" {row.unit}"
    target = "" if row.target is None else f"{sign} {row.target:.{digits}f}{unit}"
    verdict = {None: "", True: "met", False: "not met"}[row.met]
    times = [f"{1e3 * seconds:.3f}" if seconds < 0.01 else f"{1e3 * seconds:.1f}" for seconds in row.seconds] or ["", ""]
    notes = ", ".join(part for part in (verdict, row.note) if part)
    interval = f"{row.found.low:.{digits}f} to {row.found.high:.{digits}f}"
    return [row.job, f"{row.found.value:.{digits}f}{unit}", interval, *times, row.weights, target, notes]


def text(results: Results, rows: Sequence[Row], world: str) -> str:
    """Return the whole report; the answer is its last line."""
    lines = [world, ""]
    widths = [max([len(HEAD[i]), *(len(cells(row)[i]) for row in rows)]) for i in range(len(HEAD))]
    for group, members in groupby(rows, key=lambda row: row.group):
        lines += [group, *("  " + _line(cells(row), widths) for row in members)]
    head = "  " + _line(HEAD, widths)
    lines[1:1] = ["", head, "-" * len(head)]
    lines += ["", *_sweep(results)]
    lines += list(remarks(results, rows))
    return "\n".join([*lines, "", answer(results, rows)])


def _line(parts: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()


def bytes_of(size: int) -> str:
    """Format a number of bytes; multiples of a million as "100 MB (10⁶)"."""
    if size % 1_000_000 == 0:
        return f"{size // 1_000_000} MB (10⁶)"
    return size_in_words(size)


def _sweep(results: Results) -> Iterator[str]:
    found = sweep_of(results)
    if not found:
        return
    sizes = sorted({size for one in found.values() for size in one})
    yield "allreduce, ms (median)"
    wide = max(map(len, found))
    yield "  " + " " * wide + "".join(f"{bytes_of(size):>15}" for size in sizes)
    for title, one in found.items():
        yield f"  {title:<{wide}}" + "".join(f"{1e3 * one[s]:>15.3f}" if s in one else f"{'–':>15}" for s in sizes)
    yield ""


def remarks(results: Results, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the remarks below the table: method, missing contenders, failures and targets that are not met."""
    pairs = f"{pairs_of(results.rounds)} of fresh processes"
    yield (
        f"ratios are of throughput, the first over the second: the median of {pairs} and its bootstrap 95 % interval; a "
        "target is met if the interval's lower end reaches it; for times, the upper end"
    )
    yield "on the CPU, dualtrain's script calls dualtrain.keep_freed_memory(); the others leave glibc's heap as it is"
    for name, reason in results.missing.items():
        yield f"{ENTRIES[name].title}: not measured: {reason}"
    for name, reasons in results.failures.items():
        if name not in results.missing:
            yield f"{ENTRIES[name].title}: failed in {len(reasons)} of its starts: {reasons[0]}"
    if any(row.weights == OTHER for row in rows):
        yield f"{OTHER}: the final weights differ from the raw script's; such a ratio meets no target"
    failed = [f"{row.group}: {row.job}" for row in rows if row.met is False]
    if failed:
        yield f"targets that are not met: {'; '.join(failed)}"
    unjudged = [row for row in rows if row.target is not None and row.met is None]
    if unjudged:
        yield f"targets that are not judged: {len(unjudged)}; a verdict needs {pairs_of(ROUNDS)}"


def answer(results: Results, rows: Sequence[Row]) -> str:
    """Return one line: whether to move from Horovod to torch, and how much faster that is."""
    question = "Should we move from Horovod to torch? "
    ours = max(("shm", "native"), key=results.count)  # the one that ran in more rounds
    most = max(map(results.count, ("hvd-gloo", "hvd-mpi")))
    parts, verdicts = [], []
    for horovod in (name for name in ("hvd-gloo", "hvd-mpi") if results.count(name) == most):
        found = [row for row in rows if (row.one, row.other) == (ours, horovod) and row.job != "empty"]
        if found:
            parts.append(f"{_range(found)} times the steps a second of {ENTRIES[horovod].title}")
            verdicts += found
    if not verdicts:
        return f"{question}Not answered: {_why(results)}"
    alike = all(row.weights != OTHER for row in verdicts)
    weights = "and ends with the same weights" if alike else "and ends with weights that differ in rounding"
    raw = [row for row in rows if row.one == TUNED and row.other.startswith("hvd") and row.job != "empty"]
    others = f"; raw DDP takes {_range(raw)} times" if raw else ""
    ranks = next(s.ranks for s in results.samples[ours] if s is not None)
    said = f"with {ranks} ranks here, {ENTRIES[ours].title} takes {' and '.join(parts)}, {weights}{others}."
    fewest = min(row.found.pairs for row in verdicts)
    few = "" if fewest >= ROUNDS else f" This rests on {pairs_of(fewest)} only: a verdict needs {ROUNDS}."
    return f"{question}{_word(verdicts)}: {said}{few}"


def _word(rows: Sequence[Row]) -> str:
    if all(row.found.low > 1 for row in rows):
        return "Yes"
    if all(row.found.high < 1 for row in rows):
        return "No"
    gains, losses = [row for row in rows if row.found.low > 1], [row for row in rows if row.found.high < 1]
    if not gains and not losses:
        return "For speed alone it makes no difference"
    jobs = ", ".join(dict.fromkeys(row.job for row in rows if row.found.low <= 1))
    return f"Yes, but for {jobs}" if gains else f"Not for speed: slower or equal with {jobs}"


def _range(rows: Sequence[Row]) -> str:
    low, high = (choose(rows, key=lambda row: row.found.value) for choose in (min, max))
    if low is high:
        return f"{low.found.value:.2f} ({low.job})"
    return f"{low.found.value:.2f} ({low.job}) to {high.found.value:.2f} ({high.job})"


def _why(results: Results) -> str:
    for name in ("hvd-gloo", "hvd-mpi"):
        if name in results.missing:
            return f"{ENTRIES[name].title} did not run ({results.missing[name]}); {CURES['horovod']} installs it."
    return "Horovod or dualtrain was not among the contenders."
