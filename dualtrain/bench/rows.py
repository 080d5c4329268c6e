"""Rows of the result table: throughput ratios and costs, each with its interval, target and verdict.

The verdict is "met" if the whole interval reaches the target, "not met" if no part of the interval reaches it, and "not
shown" in all other cases. Where the plan allows noise, the noise floor lowers the target. The verdict is also "not met" if
the final weights of the two contenders differ from each other or from a raw script's. Rows with fewer rounds than
``ROUNDS`` get no verdict, because their intervals are too uncertain.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dualtrain.bench.measure import Results
from dualtrain.bench.plan import AGAIN, COMPARISONS, COSTS, ENTRIES, OURS, ROUNDS, TUNED, Comparison, Cost
from dualtrain.bench.statistics import Estimate, estimate, rounds_of

#: Raw scripts. If a row compares none of them, and its contenders ran in separate processes, ``_weights`` also compares the
#: weights of one raw script: the first in this order that ran.
RAW = (TUNED, "ddp", "hvd-gloo", "hvd-mpi")
WITHOUT_REDUCTION = {"alone", "one-number"}  # contenders whose ranks end with different weights
UNITS = {"ms": 1e3, "µs": 1e6}
BUFFERS = ", its buffers"
SAME, OTHER, NONE = "same", "other numerics", "–"
MET, NOT_MET, NOT_SHOWN = "met", "not met", "not shown"


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        group: heading above this row.
        job: the job that was measured; for a cost, its title.
        found: the ratio or the cost.
        unit: "×" for a ratio, else the unit of the cost.
        seconds: for a ratio, the median seconds of both contenders.
        weights: ``SAME``, ``OTHER`` or ``NONE``, the comparison of the final weights (see ``_weights``).
        target: value that the interval should reach, if there is one.
        verdict: ``MET``, ``NOT_MET`` or ``NOT_SHOWN``; empty without a target or with too few rounds.
        note: remark on the verdict, or the reason why there is no verdict.
        accuracies: for an epoch, the accuracies of both contenders.
        one: name of the contender that is measured.
        other: name of the contender with which ``one`` is compared; empty if there is none.
    """

    group: str
    job: str
    found: Estimate
    unit: str = "×"
    seconds: tuple[float, ...] = ()
    weights: str = NONE
    target: float | None = None
    verdict: str = ""
    note: str = ""
    accuracies: str = ""
    one: str = ""
    other: str = ""


def rows_of(results: Results) -> list[Row]:
    """Return all rows for which there are samples, comparisons first."""
    rows: list[Row] = []
    for comparison in COMPARISONS:
        pairs = results.pairs(comparison.one, comparison.other, comparison.shared_entry)
        jobs = [job for job in pairs[0][0].seconds if job in pairs[0][1].seconds] if pairs else []
        rows += [_ratio(comparison, job, results, rows) for job in jobs if _compared(comparison, job)]
    return rows + [row for cost in COSTS if (row := _cost(cost, results)) is not None]


def _compared(comparison: Comparison, job: str) -> bool:
    """Return whether a job gets a ratio. Costs have separate rows; allreduces without a target have a separate table."""
    return job not in ("start", "stall", "trainer") and (not job.startswith("sweep") or job in comparison.targets)


def _ratio(comparison: Comparison, job: str, results: Results, earlier_rows: list[Row]) -> Row:
    one, other, shared_entry = comparison.one, comparison.other, comparison.shared_entry
    pairs = [(a, b) for a, b in results.pairs(one, other, shared_entry) if job in a.seconds and job in b.seconds]
    found = estimate([b.seconds[job] / a.seconds[job] for a, b in pairs])
    weights = _weights(job, comparison, results)
    target = comparison.targets.get(job, comparison.targets.get("*") if weights != NONE else None)
    verdict, note = "", _unjudged(target, found)
    if target is not None and not note:
        floor = noise_floor(earlier_rows, job) if comparison.allow_noise else 0.0
        least = target * (1 - floor)
        verdict = NOT_MET if weights == OTHER else _verdict(found.low >= least, found.high < least)
        note = f"within the noise of {100 * floor:.0f} %" if verdict == MET and found.low < target else ""
    accuracies = ""
    if job == "epoch":
        means = [sum(s.accuracy or 0.0 for s in side) / len(pairs) for side in zip(*pairs, strict=True)]
        accuracies = f"accuracy {means[0]:.3f} and {means[1]:.3f}"
    medians = tuple(estimate([s.seconds[job] for s in side]).value for side in zip(*pairs, strict=True))
    group = f"{ENTRIES[one].title} / {ENTRIES[other].title}" + ", in the same processes" * bool(shared_entry)
    return Row(group, job, found, "×", medians, weights, target, verdict, note, accuracies, one, other)


def _verdict(reached: bool, missed: bool) -> str:
    """Return the verdict, given whether the whole interval reaches the target, and whether no part of it does."""
    return MET if reached else NOT_MET if missed else NOT_SHOWN


def _unjudged(target: float | None, found: Estimate) -> str:
    """Return the reason why a row with a target gets no verdict; an empty string for any other row."""
    if target is None or found.pairs >= ROUNDS:
        return ""
    return f"{rounds_of(found.pairs)}: not judged"


def _weights(job: str, comparison: Comparison, results: Results) -> str:
    """Compare the final weights of both contenders in each round. Return SAME, OTHER, or NONE if no round has all
    the weights to compare.

    If neither is a raw script, the weights of one raw script are compared too, unless both contenders run in the same
    processes. A second raw script is not compared: with 3 or more ranks its weights may differ, because the libraries sum
    in different orders. Contenders in ``WITHOUT_REDUCTION`` are left out.
    """
    pair = {comparison.one, comparison.other} - WITHOUT_REDUCTION
    rounds = []
    for number in range(results.rounds):
        compared = _hashes(job, pair, results, number, comparison.shared_entry)
        # Contenders in the same processes run more steps than a raw script, so their weights differ from its weights.
        raw = {} if pair & set(RAW) or comparison.shared_entry else _hashes(job, RAW, results, number)
        rounds.append({**dict(list(raw.items())[:1]), **compared})
    side_by_side = len(pair) > 1 and comparison.shared_entry != ""
    if not any((side_by_side or found.keys() & set(RAW)) and pair <= found.keys() for found in rounds):
        return NONE
    return SAME if all(len(set(found.values())) <= 1 for found in rounds) else OTHER


def _hashes(job: str, names: Collection[str], results: Results, number: int, shared_entry: str = "") -> dict[str, str]:
    """Return the hashes of the contenders' final weights in one round.

    Do not compare hashes of different rounds, which may run different numbers of steps.
    """
    columns = {name: results.column(name, shared_entry)[number : number + 1] for name in names}
    return {name: s.sha256[job] for name, column in columns.items() for s in column if s is not None and job in s.sha256}


def noise_floor(rows: list[Row], job: str) -> float:
    """Return how far the interval of ``AGAIN`` extends from the ratio 1, on its longer side; 0 without a row for the job.

    ``AGAIN`` runs the same script as ``TUNED``, so that their ratio should be 1.
    A job in the channels_last layout (``resnet18-cl``) has the noise floor of the plain job (``resnet18``).
    """
    model = job.partition("-")[0]
    found = [row.found for row in rows if row.one == AGAIN and row.job == model]
    return max(0.0, 1 - found[0].low, found[0].high - 1) if found else 0.0


def _cost(cost: Cost, results: Results) -> Row | None:
    if cost.other:
        pairs = results.pairs(cost.one, cost.other)
        values = [
            a.seconds[cost.job] - b.seconds[cost.job] for a, b in pairs if cost.job in a.seconds and cost.job in b.seconds
        ]
    else:
        samples = results.samples.get(cost.one, ())
        values = [s.seconds[cost.job] for s in samples if s is not None and cost.job in s.seconds]
    if not values:
        return None
    found = estimate([value * UNITS[cost.unit] for value in values])
    note = _unjudged(cost.target, found)
    verdict = ""
    if cost.target is not None and not note:
        verdict = _verdict(found.high <= cost.target, found.low > cost.target)
    return Row("costs", cost.title, found, cost.unit, (), NONE, cost.target, verdict, note, "", cost.one, cost.other)


def sweep_of(results: Results) -> dict[str, dict[int, float]]:
    """Return the median seconds of an allreduce by contender and bytes, on plain tensors and on dualtrain's own buffers."""
    found: dict[str, dict[int, float]] = {}
    for name, column in results.samples.items():
        samples = [s for s in column if s is not None]
        for key in samples[0].seconds if samples else ():
            kind, _, rest = key.partition("/")
            size, _, way = rest.partition("/")
            if kind == "sweep" and (way or ENTRIES[name].module == OURS):
                title = ENTRIES[name].title + ("" if way else BUFFERS)
                found.setdefault(title, {})[int(size)] = estimate([s.seconds[key] for s in samples]).value
    return found
