"""Number of steps that each run of ``--prove`` takes: pure functions of what is known after the first runs.

The first run of each side (Horovod and dualtrain) takes all steps. With up to 3 rounds, all runs together take less than
three times the steps of one run, or less than 150 steps if that is more. They may take more in two cases: the weights
differ only in the last steps or at the end; or dualtrain reproduced defects of Horovod, and therefore also runs without
them.
"""

from __future__ import annotations

from collections import Counter

from dualtrain.horovodize import recorder
from dualtrain.horovodize.prove.comparison import Difference
from dualtrain.horovodize.prove.records import RunRecord

BUDGET_FACTOR = 3  # all runs together take less than 3 times the steps of one run
LEAST_BUDGET = 150  # with fewer steps, the start of the processes takes longer than the steps
SPEED_PART = 6  # a run that only measures the speed takes 1/6 of the steps
SHORTEST = 5  # smallest number of steps of a run, because the first step is not timed
PLANNED_ROUNDS = 3  # the budget is for this number of rounds; the user may request more


def steps_left(steps: int, spent: int) -> int:
    """Return how many steps further runs may take, if the script takes ``steps`` and all runs so far took ``spent``."""
    return max(BUDGET_FACTOR * steps, LEAST_BUDGET) - 1 - spent


def steps_with_summary(run: RunRecord) -> list[int]:
    """Return the steps after which ``run`` summarized its weights, and its last step, but not step 0 (the start)."""
    return sorted({step for step in recorder.marks(run.planned) if 0 < step < run.steps} | {run.steps})


def speed_rounds(steps: int, rounds: int, left: int, sides: int) -> list[int]:
    """Return the number of steps of a run in each round after the first one; these rounds only measure the speed.

    ``left`` limits the steps of the rounds up to ``PLANNED_ROUNDS``; any later rounds have the same length. If ``left`` is
    too small for ``SHORTEST`` steps in each run up to ``PLANNED_ROUNDS``, there are fewer rounds.
    """
    if rounds == 1:
        return []
    share = left // (sides * (min(rounds, PLANNED_ROUNDS) - 1))
    length = min(steps, max(SHORTEST, steps // SPEED_PART), share)
    if length >= min(steps, SHORTEST):
        return [length] * (rounds - 1)
    return [SHORTEST] * min(rounds - 1, max(left, 0) // (sides * SHORTEST))


def speed_reserve(steps: int, rounds: int, sides: int) -> int:
    """Return the number of steps to keep for the rounds after the first one, up to ``PLANNED_ROUNDS``."""
    return sides * (min(rounds, PLANNED_ROUNDS) - 1) * max(SHORTEST, steps // SPEED_PART)


def repeated_steps(summary_steps: list[int], needed: int, left: int) -> int:
    """Return the number of steps of a second run on a side.

    The run ends at the last of the ``summary_steps`` that ``left`` allows. But it takes at least ``needed`` steps, or as
    many as the first run if these are fewer.

    Args:
        summary_steps: the result of :func:`steps_with_summary` for the first run.
        needed: the number of steps that the run needs to reach the first difference.
        left: the number of steps that are left for this run.
    """
    return min(max(needed, _last(summary_steps, left)), summary_steps[-1])


def repeat_reserve(summary_steps: list[int], left: int) -> int:
    """Return how many of the ``left`` steps :func:`plain_steps` should leave for later runs.

    They are for a second run on one side, and one of ``SHORTEST`` steps on the other.
    """
    return repeated_steps(summary_steps, 0, min(left - 2 * SHORTEST, 3 * summary_steps[-1] // 4)) + SHORTEST


def plain_steps(summary_steps: list[int], first_defect: int, left: int) -> int:
    """Return the number of steps of the run without Horovod's defects.

    This run shows how far the defects change the weights. It ends at the last of the ``summary_steps`` that ``left``
    allows. But even if ``left`` allows fewer, the run takes at least ``SHORTEST`` steps and more than ``first_defect`` (the
    step after which a reproduced defect was first found), or as many as the first run if these are fewer.
    """
    after_defect = next((step for step in summary_steps if step > first_defect), summary_steps[-1])
    return max(
        after_defect,
        _last(summary_steps, left),
        next((step for step in summary_steps if step >= SHORTEST), summary_steps[-1]),
    )


def _last(summary_steps: list[int], left: int) -> int:
    """Return the last of the ``summary_steps`` that ``left`` allows, or the first one if it allows none."""
    return max((step for step in summary_steps if step <= left), default=summary_steps[0])


def steps_to_reach(difference: Difference, run: RunRecord) -> int:
    """Return the number of steps per optimizer that a new run needs to reach ``difference``, which was found in ``run``."""
    if difference.at_end:
        return run.steps
    events = run.ranks[difference.rank].seconds[: difference.order // 2 + 1]
    counts = Counter(number for number, _ in events).values()
    # One more, so that the recorder does not end the run before the step at which the difference was found.
    return 1 + max(max(counts), sum(counts) // recorder.TOTAL_FACTOR)
