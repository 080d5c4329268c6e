"""The verdict from the records of both sides: the runs on Horovod, and the runs with dualtrain."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from dualtrain.horovodize.prove.comparison import (
    Difference,
    common_step,
    different_end,
    different_tensors,
    distance,
    first_difference,
    moved,
    unequal_options,
)
from dualtrain.horovodize.prove.evidence import Evidence, agrees
from dualtrain.horovodize.prove.records import RunRecord

#: Up to this relative value, the first difference between the sides may be rounding.
ROUNDING = 1e-5
#: Up to this relative value, the difference at the end of a run on another platform counts as rounding.
OTHER_PLATFORM = 1e-3
#: If two runs with the same library differ by more than this relative value, nothing is proven: such a large
#: difference could hide an error of a library.
LARGEST_SPREAD = 1e-2
#: Second limit, beside LARGEST_SPREAD and OTHER_PLATFORM: the difference must also be at most this fraction of the change
#: of the weights over all steps together.
PART_OF_TRAINING = 0.1


@dataclass
class Verdict:
    """The result of ``--prove``.

    Attributes:
        line: the verdict in one line.
        status: the exit status: 0 if the script gives the same result, else 1.
        details: more lines: causes, defects and their lines in the script, the distance between the weights.
        difference: the first difference between the sides, or between two runs of one side if the script is not repeatable;
            ``None`` if there is none, or if the script fails or ends differently with dualtrain.
    """

    line: str
    status: int
    details: list[str] = field(default_factory=list)
    difference: Difference | None = None


def verdict_of(evidence: Evidence, causes: Sequence[str], races: Sequence[str] = ()) -> Verdict:
    """Return the verdict.

    ``causes`` are findings of ``--check`` that may explain a difference between the sides, the likeliest first. ``races``
    are findings that may explain a difference between two runs of one side.
    """
    verdict = _verdict(evidence, [evidence.script_change, *causes] if evidence.script_change else causes, races)
    if evidence.script_change and not any(evidence.script_change in line for line in (verdict.line, *verdict.details)):
        verdict.details.insert(0, f"note: {evidence.script_change}")
    if evidence.dualtrain and not evidence.failure:
        verdict.details += _not_compared(evidence)
    step = _not_finite(evidence.horovod[0])
    if step is not None:
        verdict.details.append(
            f"note: weights on Horovod are NaN or infinite after step {step}, so later steps prove nothing"
        )
    return verdict


def _not_compared(evidence: Evidence) -> list[str]:
    """Return a note if the sides ended with different sets of tensors: the values of these were not compared."""
    found = different_tensors(evidence.horovod[0], evidence.full)
    if found is None:
        return []
    on_horovod, with_dualtrain = (repr(name) if name else "none" for name in found[1:])
    return [
        f"note: the tensors at the end of the script were not compared, because rank {found[0]} broadcast different "
        f"tensors on the two sides: only on Horovod: {on_horovod}; only with dualtrain: {with_dualtrain}"
    ]


def _not_finite(run: RunRecord) -> int | None:
    """Return the first step after which summarized weights of a rank are not finite, or ``None``."""
    optimizers = [optimizer for rank in run.ranks for optimizer in rank.optimizers]
    pairs = [(step, weights.tensors) for optimizer in optimizers for step, weights in optimizer.weights.items()]
    found = [step for step, tensors in pairs if not all(math.isfinite(tensor.norm) for tensor in tensors)]
    return min(found, default=None)


def _verdict(evidence: Evidence, causes: Sequence[str], races: Sequence[str]) -> Verdict:
    if evidence.failure:
        return Verdict(f"fails with dualtrain, but not on Horovod: {evidence.failure}", 1)
    horovod, dualtrain = evidence.horovod[0], evidence.dualtrain[0]
    other_end = different_end(horovod, evidence.full)
    if other_end is not None:
        return Verdict(f"ends differently: {other_end}", 1, list(causes))
    difference = first_difference(horovod, dualtrain)
    steps = f"{horovod.steps} steps{_all_steps_note(horovod)}"
    if evidence.difference_of_repeats is not None:
        return _by_spread(evidence, evidence.difference_of_repeats, races)
    if difference is None:
        return Verdict(f"same bits for {steps}{speed(evidence)}", 0)
    if evidence.platform_differences:
        compat = _compat_with_equal_options(evidence)
        options = unequal_options(horovod, dualtrain)
        if compat is not None or not options:
            return _by_tolerance(evidence, difference, compat, compat_required=bool(options))
        difference = replace(difference, options=options)
    if evidence.compat is not None and agrees(evidence):
        return _by_defects(evidence, difference, steps)
    return _differs(evidence, difference, causes)


def _all_steps_note(run: RunRecord) -> str:
    """Return a note for the number of steps, if the script ended before the requested number; else an empty string."""
    return "" if all(rank.end and rank.end.reason == "steps" for rank in run.ranks) else ", all that the script takes"


def speed(evidence: Evidence) -> str:
    """Return a text such as ", 1.40× Horovod's speed"; an empty string if there are no :func:`ratios`."""
    found = ratios(evidence)
    return f", {statistics.median(found):.2f}× Horovod's speed" if found else ""


def ratios(evidence: Evidence) -> list[float]:
    """Return, for each round, dualtrain's steps per second divided by Horovod's, over the steps that both runs took.

    Rounds with too few steps for a speed are left out. With --against, the list is empty: the runs of Horovod may be from
    another machine.
    """
    if evidence.recorded:
        return []
    pairs = [
        (a, b, min(len(run.ranks[0].seconds) for run in (a, b)))
        for a, b in zip(evidence.horovod, evidence.dualtrain, strict=False)
    ]
    rates = [(a.speed_of_first(count), b.speed_of_first(count)) for a, b, count in pairs]
    return [b / a for a, b in rates if a and b]


def _by_defects(evidence: Evidence, difference: Difference, steps: str) -> Verdict:
    assert evidence.compat is not None
    listed = _defects(evidence.compat)
    line = f"same bits for {steps}, once these defects of Horovod are reproduced: {listed}{speed(evidence)}"
    details = _places(evidence.compat)
    apart, step = distance(evidence.horovod[0], evidence.dualtrain[0])
    details.append(
        f"without these defects (dualtrain reproduces them only with DUALTRAIN_HVD_COMPAT=1), the weights differ from "
        f"step {difference.step} on, and {_amount(apart)} after step {step}"
    )
    return Verdict(line, 0, details, difference)


def _defects(run: RunRecord) -> str:
    return "; ".join(dict.fromkeys(defect for defect, _, _ in run.defects))


def _places(run: RunRecord) -> list[str]:
    """Return one line for each place in the script at which a defect of Horovod was reproduced."""
    return [f"{file}:{number}: {defect}" for defect, file, number in run.defects]


def _differs(evidence: Evidence, difference: Difference, causes: Sequence[str]) -> Verdict:
    details, with_defects = [], ""
    if evidence.compat is not None and evidence.compat.defects:
        after = first_difference(evidence.horovod[0], evidence.compat)
        details += _places(evidence.compat)
        if after is not None and after.order > difference.order:
            # The defects explain the first difference. Report the first one that remains with the defects reproduced.
            details.append(f"without these defects, the weights differ {where(difference)}")
            difference = after
            with_defects = f", once these defects of Horovod are reproduced ({_defects(evidence.compat)})"
        elif after is not None:
            details.append(f"with these defects of Horovod reproduced, the weights still differ {where(after)}")
    recorded_cause = evidence.script_change or _cause_in_records(evidence, difference)
    likely = recorded_cause or (
        causes[0] if causes else "no known cause was found; dualtrain horovodize --check lists all findings"
    )
    details = [*(f"possible cause: {cause}" for cause in causes if cause != likely), *details]
    compared = evidence.compat if with_defects and evidence.compat is not None else evidence.dualtrain[0]
    apart, step = distance(evidence.horovod[0], compared)
    if not any(run.steps >= difference.step for run in evidence.dualtrain[1:]):
        details.append(
            f"not checked: whether dualtrain's own runs agree up to step {difference.step}; --rounds 4 adds a run of "
            "each side with all steps"
        )
    reproduced = ", with these defects reproduced" if with_defects else ""
    details.append(f"all weights together differ {_amount(apart)} after step {step}{reproduced}")
    return Verdict(f"differs {where(difference)}{with_defects}: {likely}", 1, details, difference)


def where(difference: Difference) -> str:
    """Return a description such as "from step 7 on in 'fc.weight' by 3e-04 relative"."""
    names = ", ".join(repr(name) for name in difference.names[:3])
    more = f" and {len(difference.names) - 3} more" if len(difference.names) > 3 else ""
    step = f"from step {difference.step} on" if difference.step else "before the first step"
    step = f"at the end, after step {difference.step}," if difference.at_end else step
    by = ""
    if difference.relative is not None:
        when = "" if difference.measured == difference.step else f" at step {difference.measured}"
        by = f" {_amount(difference.relative, digits=0)}{when}" if difference.relative else " in the last bits"
    rank = f" on rank {difference.rank}" if difference.rank else ""
    return f"{step} in {names}{more}{by}{rank}"


def _amount(relative: float, digits: int = 1) -> str:
    """Return a text such as "by 3.0e-04 relative"."""
    return f"by {relative:.{digits}e} relative" if math.isfinite(relative) else "in values that are NaN or infinite"


def _cause_in_records(evidence: Evidence, difference: Difference) -> str:
    if difference.options:
        name, one, other = difference.options[0]
        return f"the optimizer's {name!r} is {one} on Horovod and {other} with dualtrain; find what sets it in the script"
    if not difference.step:
        return (
            "the initial weights differ between the two sides; find what the script reads from its launcher, or from a "
            "checkpoint that an earlier run has written"
        )
    size = evidence.horovod[0].size
    if size > 2 and difference.relative is not None and difference.relative <= ROUNDING:
        return f"rounding: sums over {size} ranks can be computed in several orders; with --nproc 2 there is only one order"
    return ""


def _compat_with_equal_options(evidence: Evidence) -> RunRecord | None:
    """Return the run with Horovod's defects, or ``None``.

    The run must have reproduced a defect, and have the same end and the same optimizer options as the run on Horovod.
    """
    horovod, compat = evidence.horovod[0], evidence.compat
    if compat is None or not compat.defects or different_end(horovod, compat) is not None:
        return None
    return None if unequal_options(horovod, compat) else compat


def _by_tolerance(
    evidence: Evidence, difference: Difference, compat: RunRecord | None, *, compat_required: bool
) -> Verdict:
    """Compare Horovod's run with dualtrain's longest run without Horovod's defects, or with ``compat``.

    ``compat`` is used if it is closer to Horovod's run, or if ``compat_required`` is set.
    """
    horovod = evidence.horovod[0]
    apart, step = distance(horovod, evidence.dualtrain[0])
    differences = "; ".join(evidence.platform_differences)
    details = [f"first difference: {where(difference)}"]
    with_defects = ""
    if compat is not None and (compat_required or distance(horovod, compat)[0] < apart):
        details += [*_places(compat), f"without these defects, weights differ {_amount(apart)} after step {step}"]
        apart, _ = distance(horovod, compat)
        with_defects = f", once these defects of Horovod are reproduced: {_defects(compat)}"
    if apart <= min(OTHER_PLATFORM, PART_OF_TRAINING * moved(horovod)):
        line = (
            f"same weights within {apart:.1e} relative after step {step}, on another platform ({differences}){with_defects}"
        )
        return Verdict(line, 0, details, difference)
    if apart <= OTHER_PLATFORM:
        line = (
            f"differs {_amount(apart)} after step {step}, and all steps together changed the weights by only "
            f"{moved(horovod):.1e}; {PART_OF_TRAINING:.0%} of that is allowed for another platform ({differences}): "
            "compare more --steps, or find the cause of the difference"
        )
        return Verdict(line, 1, details, difference)
    line = (
        f"differs {_amount(apart)} after step {step}; {OTHER_PLATFORM:g} is allowed for another platform ({differences}): "
        "record on a machine like this one, or compare on the machine that made the record"
    )
    return Verdict(line, 1, details, difference)


def _by_spread(evidence: Evidence, repeats: Difference, races: Sequence[str]) -> Verdict:
    """Compare the sides by distance, because the script is not repeatable.

    The limit is twice the script's spread: the largest distance between two runs on Horovod. With --against there is only
    one run on Horovod; the largest distance between two runs with dualtrain is used instead. The proof also fails if the
    spread is too large (``LARGEST_SPREAD``, ``PART_OF_TRAINING``), or if several runs on Horovod agree, but those with
    dualtrain do not. ``repeats`` is the first difference between two runs of the same side; ``races`` are possible causes
    of it.
    """
    only_dualtrain = not any(first_difference(a, b) for a, b in combinations(evidence.horovod, 2))
    pair = "two runs with dualtrain" if only_dualtrain else "two runs on Horovod"
    details = [
        f"not repeatable: {pair} differ {where(repeats)}",
        "to compare bits, make the script repeatable: set OMP_NUM_THREADS=1, and give --seed 1, which seeds torch, numpy "
        "and random on each rank before the script starts",
        *(f"possible cause: {race}" for race in races),
    ]
    if only_dualtrain and len(evidence.horovod) > 1:
        line = f"repeatable on Horovod, but not with dualtrain: {pair} differ {where(repeats)}"
        return Verdict(line, 1, details[1:], repeats)
    runs = evidence.dualtrain if only_dualtrain else evidence.horovod
    compared, with_defects = evidence.dualtrain, ""
    if evidence.full is evidence.compat:
        apart, step, widest = _distances(evidence.horovod, evidence.dualtrain, runs)
        details += _places(evidence.compat)
        details.append(f"without these defects, Horovod and dualtrain differ by {apart:.1e} after step {step}")
        compared = [evidence.compat]
        with_defects = f", once these defects of Horovod are reproduced ({_defects(evidence.compat)})"
    apart, step, widest = _distances(evidence.horovod, compared, runs)
    measured = f"Horovod and dualtrain differ by {apart:.1e} after step {step}, and {pair} differ by up to {widest:.1e}"
    if widest > min(LARGEST_SPREAD, PART_OF_TRAINING * moved(evidence.horovod[0])):
        details.append(f"all steps together changed the weights by {moved(evidence.horovod[0]):.1e}")
        return Verdict(f"not repeatable, so nothing is proven: {measured}", 1, details, repeats)
    if apart <= 2 * widest:  # twice, because the spread is known from a few runs only
        line = f"within twice the script's own spread{with_defects}{speed(evidence)}: {measured}"
        return Verdict(line, 0, details, repeats)
    return Verdict(f"differs by more than twice the script's own spread{with_defects}: {measured}", 1, details, repeats)


def _distances(
    horovod: list[RunRecord], dualtrain_runs: list[RunRecord], repeated: list[RunRecord]
) -> tuple[float, int, float]:
    """Return (distance between the sides, step after which it was computed, largest distance between ``repeated`` runs).

    A run is left out if it has fewer steps than the longest of ``dualtrain_runs``, and also fewer than the second longest
    of the ``repeated`` runs. Both distances compare weights after the same step: the last one that all remaining runs have
    summarized. The distance between the sides is the median over all remaining pairs.
    """
    steps = min(max(run.steps for run in dualtrain_runs), sorted(run.steps for run in repeated)[-2])
    long = [run for run in (*horovod, *dualtrain_runs, *repeated) if run.steps >= steps]
    limit = common_step(long)
    between = [distance(a, b, limit) for a in horovod for b in dualtrain_runs if a in long and b in long]
    widest = max(distance(a, b, limit)[0] for a, b in combinations(repeated, 2) if a in long and b in long)
    apart, step = statistics.median_high(between)
    return apart, step, widest
