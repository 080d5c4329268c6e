"""The runs of ``--prove``: which side runs the script next, with how many steps."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from dualtrain.console import show
from dualtrain.horovodize.prove import plan
from dualtrain.horovodize.prove.comparison import different_end, first_difference
from dualtrain.horovodize.prove.evidence import Evidence, agrees
from dualtrain.horovodize.prove.launch import Job, RunError, Side
from dualtrain.horovodize.prove.records import RunRecord


def collect(job: Job, rounds: int, record: RunRecord | None) -> Evidence:
    """Run the script on both sides, and return the records.

    The runs, in this order (if Horovod's run was recorded earlier, only those with dualtrain):

    - A run on Horovod.
    - A run with dualtrain that reproduces Horovod's defects. If the script meets none of them, this run also counts as the
      run without defects.
    - If the script meets some, a run with dualtrain without defects, which may be shorter to save steps. After a shorter
      one, a full one follows if the weights of the shorter one do not differ from Horovod's, or if the run with defects
      ends differently than Horovod's.
    - If the run with defects fails, a full run without them.
    - If both sides agree, the second and later rounds. They only measure the speed; the side that runs first alternates.
    - If the weights differ, but optimizers, steps and exit status do not, a second run on Horovod, and one with dualtrain
      if ``rounds`` is above 1 and steps are left, or if Horovod's run was recorded. They show whether runs of the same side
      agree. Each round after the third then adds a full run on each side.

    The module ``plan`` computes the numbers of steps. If a run without defects fails with dualtrain, no more runs follow:
    the traceback is printed, and ``Evidence.failure`` is the error.

    Args:
        job: the script and its full runs.
        rounds: the requested number of rounds; a round is a run on Horovod, and one with dualtrain without defects.
        record: the record of Horovod's earlier run, or ``None``.

    Raises:
        RunError: a run on Horovod failed, hung, or took no step.
        UserError: a run's record cannot be read, or lacks a rank.
    """
    runs = _Runs(job, rounds, record)
    try:
        runs.first()
        if agrees(runs.evidence):
            runs.measure()
        elif different_end(runs.evidence.horovod[0], runs.evidence.full) is None:
            runs.repeat()
    except _DualtrainError as error:
        runs.evidence.failure = str(error.cause)
        if error.cause.traceback:
            show(error.cause.traceback.rstrip("\n"), sys.stderr)
    return runs.evidence


class _DualtrainError(Exception):
    """The script failed with dualtrain, after it had run on Horovod."""

    def __init__(self, cause: RunError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Runs:
    """The runs of one ``--prove`` so far, and the number of steps that they took."""

    def __init__(self, job: Job, rounds: int, record: RunRecord | None) -> None:
        self.job, self.rounds = job, rounds
        self.evidence = Evidence([] if record is None else [record], [], recorded=record is not None)
        self.sides: list[Side] = ["Horovod", "dualtrain"] if record is None else ["dualtrain"]
        self.spent = self.count = 0

    @property
    def left(self) -> int:
        return plan.steps_left(self.evidence.horovod[0].steps, self.spent)

    @property
    def summary_steps(self) -> list[int]:
        return plan.steps_with_summary(self.evidence.horovod[0])

    def first(self) -> None:
        """Run the script in full on each of ``sides``. The run with dualtrain reproduces the defects of Horovod.

        If the script meets some of these defects, or this run fails, also run it with dualtrain without the defects.
        """
        evidence = self.evidence
        if not evidence.recorded:
            evidence.horovod.append(self._run("Horovod"))
        try:
            compat = self._run("dualtrain", compat=True)
        except RunError as error:  # the script may work without the defects
            show(f"with the defects of Horovod: {error}", sys.stderr)
            self._plain()
            return
        if not compat.defects:
            evidence.dualtrain.append(compat)
            return
        evidence.compat = compat
        horovod = evidence.horovod[0]
        self._plain(self._plain_steps(compat))
        short = evidence.full is compat
        if short and (_equal_so_far(horovod, evidence.dualtrain[0]) or different_end(horovod, compat) is not None):
            self._plain()
        plain = evidence.full
        if plain is not compat and _equal_so_far(horovod, plain) and different_end(horovod, plain) is None:
            evidence.compat = None  # the defects do not change the weights of this script, or this Horovod lacks them

    def _plain_steps(self, compat: RunRecord) -> int:
        """Return the number of steps of the run without defects. Some of the remaining steps are kept for later runs."""
        steps = self.evidence.horovod[0].steps
        if agrees(self.evidence):
            reserve = plan.speed_reserve(steps, self.rounds, len(self.sides))
        else:
            reserve = plan.repeat_reserve(self.summary_steps, self.left)
        return plan.plain_steps(self.summary_steps, compat.first_defect, self.left - reserve)

    def measure(self) -> None:
        """Run the other rounds, which only measure the speed, because the sides agree."""
        steps = plan.speed_rounds(self.evidence.horovod[0].steps, self.rounds, self.left, len(self.sides))
        for number, steps_of_round in enumerate(steps, 1):
            self._round(number, steps_of_round)

    def repeat(self) -> None:
        """Run one or both sides again, if possible up to the first difference, to see whether the runs of a side agree.

        If Horovod's run was recorded earlier, run only dualtrain. Otherwise run Horovod, and dualtrain only with more than
        one round and enough steps left. Then make the rounds after the third.
        """
        evidence, horovod = self.evidence, self.evidence.horovod[0]
        difference = first_difference(horovod, evidence.full)
        needed = 0 if difference is None else plan.steps_to_reach(difference, horovod)
        if evidence.recorded:
            self._plain(plan.repeated_steps(self.summary_steps, needed, self.left))
        else:
            again = plan.repeated_steps(self.summary_steps, needed, self.left - plan.SHORTEST)
            evidence.horovod.append(self._run("Horovod", again))
            if self.rounds > 1 and self.left >= plan.SHORTEST:
                self._plain(min(self.left, max(needed, plan.SHORTEST)))
        for number in range(plan.PLANNED_ROUNDS, self.rounds):
            self._round(number)

    def _round(self, number: int, steps: int | None = None) -> None:
        """Run the script on each of ``sides``. The side that runs first alternates from round to round."""
        for side in self.sides[:: 1 if number % 2 == 0 else -1]:
            if side == "Horovod":
                self.evidence.horovod.append(self._run(side, steps))
            else:
                self._plain(steps)

    def _plain(self, steps: int | None = None) -> None:
        """Run the script with dualtrain, without Horovod's defects. Keep the longest run first in the list.

        Raises:
            _DualtrainError: the script failed.
        """
        try:
            found = self._run("dualtrain", steps)
        except RunError as error:
            raise _DualtrainError(error) from error
        dualtrain = self.evidence.dualtrain
        longest = not dualtrain or found.planned > dualtrain[0].planned
        dualtrain.insert(0 if longest else len(dualtrain), found)

    def _run(self, side: Side, steps: int | None = None, *, compat: bool = False) -> RunRecord:
        """Run the script for ``steps`` steps, or in full if ``steps`` is ``None`` or not below the first run's steps."""
        first = self.evidence.horovod[0] if self.evidence.horovod else None
        if steps is None or (first is not None and steps >= first.steps):
            steps = self.job.steps
        self.count += 1
        title = f"run {self.count}, {side}{' with the defects of Horovod' if compat else ''}"
        found = run(replace(self.job, steps=steps), side, title, compat)
        self.spent += found.steps
        return found


def _equal_so_far(horovod: RunRecord, other: RunRecord) -> bool:
    return first_difference(horovod, other) is None


def run(job: Job, side: Side, title: str, compat: bool = False) -> RunRecord:
    """Run the script once, print its number of steps and its duration to standard error, and return its record."""
    began = time.monotonic()
    found = job.record(side, title.replace(",", "").replace(" ", "-"), compat=compat)
    show(f"{title}: {found.steps} steps, {time.monotonic() - began:.1f} s", sys.stderr)
    return found
