"""The first difference between two records, and the distance of their weights. Pure functions of the records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dualtrain.horovodize.prove.records import OptimizerRecord, RankRecord, RunRecord, Summary


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        step: the step after which the weights differ; 0 is before the first step.
        optimizer: the optimizer's index; 0 if ``at_end`` is set.
        rank: the first rank on which the weights differ.
        names: the tensors that differ.
        relative: the largest difference of these tensors, relative to their norms, after step ``measured``;
            ``None`` if there is no such step.
        measured: the first step, from ``step`` on, whose weights both runs summarized; ``None`` if there is none.
        options: the optimizer's options that differ at ``step`` or, if none do, at ``measured``: (name, value in the first
            run, value in the second run).
        order: position of the step among the steps of all optimizers on this rank, as in ``OptimizerRecord.order``.
        at_end: whether the difference was found in the weights at the end of the script, not in those after a step.
    """

    step: int
    optimizer: int
    rank: int
    names: tuple[str, ...]
    relative: float | None
    measured: int | None
    options: tuple[tuple[str, object, object], ...] = ()
    order: int = 0
    at_end: bool = False


def first_difference(one: RunRecord, other: RunRecord) -> Difference | None:
    """Return the first difference of the weights of two runs of equal size; ``None`` if all compared bits are equal.

    Only steps that both runs have taken are compared. If these agree, the final tensors are compared, but only if both runs
    have ended at the same point with the same set of tensors.

    The steps of several optimizers are compared in the order in which ``one`` took them.
    """
    found: list[Difference] = []
    for rank, (a, b) in enumerate(zip(one.ranks, other.ranks, strict=True)):
        for number, (x, y) in enumerate(zip(a.optimizers, b.optimizers, strict=False)):
            difference = _first(x, y, number, rank)
            if difference is not None:
                found.append(difference)
    return min(found, key=lambda each: (each.order, each.rank), default=None) or _at_the_end(one, other)


def _at_the_end(one: RunRecord, other: RunRecord) -> Difference | None:
    """Return the difference of the final tensors; ``None`` if they are equal, or cannot be compared on any rank."""
    for rank, (a, b) in enumerate(zip(one.ranks, other.ranks, strict=True)):
        if not _have_comparable_ends(a, b):
            continue
        pairs = [(x, y) for x, y in zip(a.state, b.state, strict=True) if x.summary.sha256 != y.summary.sha256]
        if pairs:
            relative = max(relative_difference(x.summary, y.summary) for x, y in pairs)
            names = tuple(x.name for x, _ in pairs)
            return Difference(a.steps, 0, rank, names, relative, a.steps, order=2 * len(a.seconds) + 1, at_end=True)
    return None


def _have_comparable_ends(one: RankRecord, other: RankRecord) -> bool:
    """Return whether the tensors at the end of both runs can be compared."""
    return _ended_alike(one, other) and [each[:3] for each in one.state] == [each[:3] for each in other.state]


def _ended_alike(one: RankRecord, other: RankRecord) -> bool:
    """Return whether both runs have ended at the same point, and recorded tensors there."""
    if not (one.state and other.state) or one.end is None or other.end is None or one.end.reason != other.end.reason:
        return False
    return [each.steps for each in one.optimizers] == [each.steps for each in other.optimizers]


def different_tensors(one: RunRecord, other: RunRecord) -> tuple[int, str, str] | None:
    """Return the first rank on which the runs end with different sets of tensors, and two names; ``None`` if there is none.

    The first name is that of a tensor that only ``one`` has, the second that of a tensor that only ``other`` has; "" if
    there is no such tensor. If the sets differ, the values of the final tensors are not compared. Ranks on which the runs
    ended at different points are left out.
    """
    for rank, (a, b) in enumerate(zip(one.ranks, other.ranks, strict=True)):
        if _ended_alike(a, b) and not _have_comparable_ends(a, b):
            first, second = (Counter(each[:3] for each in run.state) for run in (a, b))
            only = [next((name for _, name, _ in more), "") for more in (first - second, second - first)]
            return rank, only[0], only[1]
    return None


def _first(one: OptimizerRecord, other: OptimizerRecord, number: int, rank: int) -> Difference | None:
    """Return the first difference after a step of optimizer ``number`` on ``rank``; ``None`` if there is none."""
    summarized = sorted(one.weights.keys() & other.weights.keys())
    for step in range(min(one.steps, other.steps) + 1):
        differing = _tensors_that_differ(one, other, step)
        if differing:
            measured = next((each for each in summarized if each >= step), None)
            relative, options = None, _different_options(one, other, step)
            if measured is not None:
                a, b = one.weights[measured], other.weights[measured]
                relative = max(relative_difference(a.tensors[i], b.tensors[i]) for i in differing)
                options = options or _different_options(one, other, measured)
            names = tuple(one.names[i] for i in differing)
            return Difference(step, number, rank, names, relative, measured, options, one.order[step])
    return None


def _tensors_that_differ(one: OptimizerRecord, other: OptimizerRecord, step: int) -> list[int]:
    """Return the indices of the tensors whose bits differ after ``step``."""
    differing = set()
    if step:
        differing = {i for i, (a, b) in enumerate(zip(one.sums[step - 1], other.sums[step - 1], strict=False)) if a != b}
    if step in one.weights and step in other.weights:
        pairs = zip(one.weights[step].tensors, other.weights[step].tensors, strict=False)
        differing |= {i for i, (a, b) in enumerate(pairs) if a.sha256 != b.sha256}
    return sorted(differing)


def _different_options(one: OptimizerRecord, other: OptimizerRecord, step: int) -> tuple[tuple[str, object, object], ...]:
    if step not in one.weights or step not in other.weights:
        return ()
    pairs = zip(one.weights[step].options, other.weights[step].options, strict=False)
    return tuple((name, a[name], b[name]) for a, b in pairs for name in a if name in b and not _equal(a[name], b[name]))


def _equal(one: object, other: object) -> bool:
    """Return whether two options are equal. A NaN equals only another NaN."""
    return one == other or (one != one and other != other)


def unequal_options(one: RunRecord, other: RunRecord) -> tuple[tuple[str, object, object], ...]:
    """Return the options in which an optimizer differs between the runs, after the first summarized step with a difference.

    Each option is a tuple (name, value in ``one``, value in ``other``). The result is empty if no option differs.
    Numbers within a millionth of each other (relative) count as equal, because versions of torch compute a schedule's
    learning rates differently.
    """
    for a, b in zip(one.ranks, other.ranks, strict=True):
        for x, y in zip(a.optimizers, b.optimizers, strict=False):
            for step in sorted(x.weights.keys() & y.weights.keys()):
                found = tuple(each for each in _different_options(x, y, step) if not _close(*each[1:]))
                if found:
                    return found
    return ()


def _close(one: object, other: object) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_close, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


def relative_difference(one: Summary, other: Summary) -> float:
    """Return the difference of two tensors relative to their norms, estimated from norms and sampled values.

    The result is infinite if a norm is not finite.
    """
    if not (math.isfinite(one.norm) and math.isfinite(other.norm)):
        return math.inf
    scale = max(_norm(one.values), _norm(other.values))
    by_values = _norm([a - b for a, b in zip(one.values, other.values, strict=False)])
    largest = max(one.norm, other.norm)
    by_norms = abs(one.norm - other.norm) / largest if largest > 0 else 0.0
    return max(by_values / scale if scale > 0 else 0.0, by_norms)


def distance(one: RunRecord, other: RunRecord, limit: int | None = None) -> tuple[float, int]:
    """Return (distance of all weights relative to their norm, step after which it was computed).

    For each rank, the compared tensors are:

    - if both runs ended at the same point with the same set of tensors, at step ``limit`` or earlier: the tensors at the
      end of the runs. Weights, buffers and integers have separate distances, of which the largest counts.
    - otherwise: the weights of each optimizer after the last step, up to ``limit``, that both runs summarized. If these
      steps differ between optimizers, the largest is returned.

    The distance is estimated from sampled values and norms; of all ranks' distances, the largest is returned. It is
    infinite if tensors that differ are not finite.
    """
    found = []
    for a, b in zip(one.ranks, other.ranks, strict=True):
        if _have_comparable_ends(a, b) and (limit is None or a.steps <= limit):
            groups = [
                [(x.numel, x.summary, y.summary) for x, y in zip(a.state, b.state, strict=True) if x.group == group]
                for group in ("weights", "buffers", "integers")
            ]
            found.append((max(map(_relative, groups)), a.steps))
            continue
        steps, tensors = [], []
        for x, y in zip(a.optimizers, b.optimizers, strict=False):
            both = x.weights.keys() & y.weights.keys()
            step = max((step for step in both if limit is None or step <= limit), default=None)
            if step is not None:
                steps.append(step)
                tensors += list(zip(x.numels, x.weights[step].tensors, y.weights[step].tensors, strict=False))
        found.append((_relative(tensors), max(steps, default=0)))
    return max(found)


def common_step(runs: Sequence[RunRecord]) -> int:
    """Return the last step that all ``runs`` have summarized for the optimizer of rank 0 that took the most steps."""
    optimizers = [max(run.ranks[0].optimizers, key=lambda each: each.steps) for run in runs]
    return max(set.intersection(*(set(each.weights) for each in optimizers)))


def moved(run: RunRecord) -> float:
    """Return the distance from the initial to the last summarized weights, relative to their norm.

    Of all ranks' distances, the smallest is returned.
    """
    found = []
    for rank in run.ranks:
        tensors: list[tuple[int, Summary, Summary]] = []
        for each in rank.optimizers:
            if 0 in each.weights:
                last = each.weights[max(each.weights)]
                tensors += list(zip(each.numels, each.weights[0].tensors, last.tensors, strict=False))
        found.append(_relative(tensors))
    return min(found)


def _relative(tensors: Iterable[tuple[int, Summary, Summary]]) -> float:
    """Return the distance of some tensors, given as (number of elements, one, other), relative to their norm."""
    apart = total = 0.0
    for numel, one, other in tensors:
        if one.sha256 != other.sha256 or math.isfinite(one.norm):  # else both have the same NaN or infinite values
            apart += _norm_of_difference(numel, one, other) ** 2
            total += max(one.norm, other.norm) ** 2
    return math.sqrt(apart / total) if 0 < apart < math.inf else apart


def _norm_of_difference(numel: int, one: Summary, other: Summary) -> float:
    """Estimate the norm of the difference of two tensors from samples. It is at least the difference of their norms.

    The result is infinite if a norm is not finite.
    """
    if not (math.isfinite(one.norm) and math.isfinite(other.norm)):
        return math.inf
    by_values = _norm([a - b for a, b in zip(one.values, other.values, strict=False)])
    return max(by_values * math.sqrt(numel / max(len(one.values), 1)), abs(one.norm - other.norm))


def _norm(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


def different_end(horovod: RunRecord, dualtrain: RunRecord) -> str | None:
    """Return a description of how the sides end differently (optimizers, parameters, steps, exit status), or ``None``."""
    for rank, (a, b) in enumerate(zip(horovod.ranks, dualtrain.ranks, strict=True)):
        if [each.names for each in a.optimizers] != [each.names for each in b.optimizers]:
            return f"the optimizers of rank {rank} have different parameters"
        for number, (x, y) in enumerate(zip(a.optimizers, b.optimizers, strict=True)):
            if x.steps != y.steps:
                return f"optimizer {number} of rank {rank} takes {x.steps} steps on Horovod and {y.steps} with dualtrain"
        if a.end is not None and b.end is not None and a.end.status != b.end.status:
            return f"rank {rank} ends with exit status {a.end.status} on Horovod and {b.end.status} with dualtrain"
    return None
