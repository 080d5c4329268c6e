"""Run a job undisturbed, then with faults at moments that a seed determines, and measure each recovery."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dualtrain.drill.faults import FAULTS, FULL_DISK, STOP_RANK, Fault
from dualtrain.drill.job import Job
from dualtrain.drill.small_disk import SmallDisk
from dualtrain.errors import UserError
from dualtrain.files import read_json

_POLL_SECONDS = 0.002
_EXIT_SECONDS = 0.03  # wait this long after a fault before listing the survivors: killed processes have ended by then
#: Largest number of consecutive faults after the same step: a run that fails there a third time refuses to restart.
_REPEATS = 2
_BY_TIME = 0.25  # fraction of the faults that are injected after a random time, not after a step
_COMPARED = ("weights_sha256", "steps", "epochs", "val_loss", "val_accuracy", "train_loss", "best")


@dataclass
class Row:
    """One fault and what followed.

    Attributes:
        fault: the fault's name.
        target: the processes or the file that the fault was injected into.
        moment: when the fault was injected, in words.
        detected: seconds until the launcher, or a rank that survived the fault, has ended; ``None`` if neither has.
        recovered: seconds until the first step after the restart, or until the job's end if there is no such step;
            ``None`` if the job ended without a restart.
        repeated: steps that were computed again.
    """

    fault: str
    target: str
    moment: str
    detected: float | None = None
    recovered: float | None = None
    repeated: int = 0


@dataclass
class Report:
    """The result of a drill.

    Attributes:
        rows: one for each fault.
        undisturbed: the summary without faults.
        disturbed: the summary with faults.
        problems: the differences and failures; empty if there are none.
    """

    rows: list[Row] = field(default_factory=list)
    undisturbed: dict[str, Any] = field(default_factory=dict)
    disturbed: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """Return the report as plain values; ``holds`` is true if there are no problems."""
        return {**asdict(self), "holds": not self.problems}


class Exercise:
    """A drill in ``folder``.

    Args:
        folder: for both runs and their outputs.
        flags: the flags of ``dualtrain.main``.
        nproc: the number of ranks.
        horovod: whether horovodrun starts the job, instead of torchrun.
        seed: the seed of the faults and their moments.
        limit: seconds without progress after which the drill gives up.
        progress: called with each line of progress.
    """

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str],
        nproc: int,
        *,
        horovod: bool,
        seed: int,
        limit: float,
        progress: Callable[[str], None],
    ) -> None:
        self._folder, self._flags, self._nproc, self._horovod = folder, list(flags), nproc, horovod
        self._generator, self._limit, self._progress = random.Random(seed), limit, progress
        self._steps: list[int] = []  # the steps after which faults were injected
        self.report = Report()

    def run(self, faults: int) -> Report:
        """Carry out the drill with at most this number of ``faults``. Blocks until both runs have ended.

        Raises:
            UserError: the undisturbed run cannot be started, fails, or takes no step for ``limit`` seconds.
        """
        began = time.monotonic()
        self.report.undisturbed = self._undisturbed()
        steps, seconds = self.report.undisturbed["steps"], time.monotonic() - began
        weights = self.report.undisturbed["weights_sha256"][:16]
        self._progress(f"undisturbed: {steps} step{'s' * (steps != 1)} in {seconds:.1f} s, weights {weights}")
        disk = self._small_disk(faults)
        try:
            self._disturb(faults, steps, [*self._kinds(), *([] if disk is None else [FULL_DISK])])
        finally:
            if disk is not None:
                self._keep_folder(disk)
        return self.report

    def _kinds(self) -> list[Fault]:
        """Return the faults that need no small file system. With one rank, report that ``STOP_RANK`` is left out."""
        if self._nproc > 1:
            return list(FAULTS)
        self._progress(f"without the fault {STOP_RANK.name!r}: only another rank would detect it, and the job has one rank")
        return [fault for fault in FAULTS if fault is not STOP_RANK]

    def _keep_folder(self, disk: SmallDisk) -> None:
        """Replace the small file system by a copy of its files. If this fails, add a problem to the report."""
        try:
            disk.close()
        except OSError as error:
            # shutil.Error lists all files that could not be copied, each with the paths and the reason.
            reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror or error
            self.report.problems.append(f"the folder of the run with faults could not be kept ({reason})")

    def _small_disk(self, faults: int) -> SmallDisk | None:
        """Mount a small file system, which a fault can fill, for the run with faults; return ``None`` if that fails."""
        try:
            return SmallDisk(self._folder / "disturbed", self._folder / "undisturbed", faults + 3)
        except OSError as error:
            reason = error.strerror or error
            self._progress(f"without the fault {FULL_DISK.name!r}: no file system can be mounted ({reason})")
            return None

    def _disturb(self, faults: int, steps: int, kinds: Sequence[Fault]) -> None:
        """Run the job with faults, and compare the result."""
        job = Job(self._folder / "disturbed", self._flags, self._nproc, horovod=self._horovod, restarts=faults + 3)
        try:
            job.start()
            for number, (fault, step) in enumerate(self._plan(faults, steps, kinds), 1):
                if job.status() == 0:
                    done = len(self.report.rows)
                    self._progress(
                        f"the job has ended after {done} of {faults} faults: give the job more steps for the other faults"
                    )
                    break
                self._progress(f"fault {number} of {faults}: {self._run_fault(job, fault, step)}")
            self._wait(job, job.restart_if_failed, "the end of the run")
        except (TimeoutError, UserError) as error:
            self.report.problems.append(str(error))
        finally:
            left = job.end()
        if left and not self.report.problems:
            found = "1 process was" if len(left) == 1 else f"{len(left)} processes were"
            self.report.problems.append(f"{found} left behind")
        self._compare(job)

    def _undisturbed(self) -> dict[str, Any]:
        """Run the job without faults; return its summary. Raises UserError: see :meth:`run`."""
        job = Job(self._folder / "undisturbed", self._flags, self._nproc, horovod=self._horovod, restarts=0)
        try:
            job.start()
            self._wait(job, lambda: job.status() is not None, "the undisturbed run")
            if job.status() != 0:
                raise UserError(f"the job fails without any fault ({job.last_error()}): repair the job; see {job.log}")
        except TimeoutError as error:
            raise UserError(f"{error}; see {job.log}") from error
        finally:
            job.end()
        summary: dict[str, Any] = read_json(job.folder / "summary.json")
        return summary

    def _plan(self, faults: int, steps: int, kinds: Sequence[Fault]) -> list[tuple[Fault, int]]:
        """Return the faults in a random order, all kinds about equally often; each has the step after which it is due."""
        planned: list[Fault] = []
        while len(planned) < faults:
            planned += self._generator.sample(kinds, len(kinds))
        due_steps = sorted(self._generator.randrange(max(1, steps - 1)) for _ in range(faults))
        return list(zip(planned, due_steps, strict=False))

    def _run_fault(self, job: Job, fault: Fault, step: int) -> str:
        """Wait for the fault's moment, inject it, and wait for the recovery. Return a line for ``progress``.

        Add a row to the report, unless the job has ended before the fault.
        """
        moment = self._await_moment(job, step)
        row = Row(fault.name, self._inject(job, fault), moment)
        if not row.target:
            return f"{fault.name}: not carried out, since the job has ended"
        self.report.rows.append(row)
        injected, (inode, last_step), starts = time.monotonic(), job.position(), len(job.starts())
        time.sleep(_EXIT_SECONDS)
        survivors = set(job.ranks().values())

        def recovered() -> bool:
            if row.detected is None and (job.status() is not None or survivors - set(job.ranks().values())):
                row.detected = time.monotonic() - injected
            if job.restart_if_failed():
                return True
            new_starts = job.starts()[starts:]
            new_inode, new_step = job.position()
            return bool(new_starts) and new_inode != inode and new_step > new_starts[-1]

        self._wait(job, recovered, f"the recovery from {fault.name}")
        new_starts = job.starts()[starts:]
        if new_starts:
            row.recovered = time.monotonic() - injected
            row.repeated = max(0, last_step - new_starts[-1])
        return f"{row.fault} ({row.target}) {row.moment}"

    def _inject(self, job: Job, fault: Fault) -> str:
        """Inject a fault as soon as possible; return its target, or "" if the job has ended. Restart a failed launcher."""
        target = ""

        def done() -> bool:
            nonlocal target
            finished = job.restart_if_failed()
            target = fault.inject(job, self._generator)
            return bool(target) or finished

        self._wait(job, done, f"a process or file for {fault.name}")
        return target

    def _await_moment(self, job: Job, step: int) -> str:
        """Wait until the job has taken ``step`` steps, or for a random time; then call :meth:`_leave_step`.

        The wait for the step or the time ends early if the launcher ends. Return the moment in words.
        """
        if self._generator.random() < _BY_TIME:
            seconds = self._generator.uniform(0.1, 3.0)
            deadline = time.monotonic() + seconds
            self._wait(job, lambda: time.monotonic() > deadline or job.status() is not None, "a random time")
            moment = f"{seconds:.1f} s after the last {'recovery' if self.report.rows else 'start'}"
        else:
            self._wait(job, lambda: job.position()[1] >= step or job.status() is not None, f"step {step}")
            moment = ""
        self._leave_step(job)
        return moment or f"after step {self._steps[-1]}"

    def _leave_step(self, job: Job) -> None:
        """Wait for the next step if the current step had ``_REPEATS`` faults: after one more, the run would not restart.

        Then append the step to ``_steps``, because a fault follows.
        """
        last = self._steps[-_REPEATS:]
        if len(last) == _REPEATS and set(last) == {job.position()[1]}:
            self._wait(job, lambda: job.position()[1] != last[0] or job.restart_if_failed(), "another step")
        self._steps.append(job.position()[1])

    def _wait(self, job: Job, condition: Callable[[], bool], what: str) -> None:
        """Wait for ``condition``. Raises TimeoutError if the job takes no step for ``limit`` seconds."""
        last, deadline = job.position(), time.monotonic() + self._limit
        while not condition():
            now = job.position()
            if now != last:
                last, deadline = now, time.monotonic() + self._limit
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step within {self._limit:g} s while waiting for {what}: {job.last_error()}")
            time.sleep(_POLL_SECONDS)

    def _compare(self, job: Job) -> None:
        """Read the result with faults. Report each difference from ``undisturbed``, and a missing result.

        Also report if no fault was carried out.
        """
        if not self.report.rows:
            self.report.problems.append("no fault was carried out: the job ended too early; give it more steps")
        summary = job.folder / "summary.json"
        if not summary.exists():
            self.report.problems.append(f"the run with faults did not finish its training: {job.last_error()}")
            return
        self.report.disturbed = read_json(summary)
        one, other = self.report.undisturbed, self.report.disturbed
        for name in _COMPARED:
            if json.dumps(one.get(name)) != json.dumps(other.get(name)):
                self.report.problems.append(f"{name} is {one.get(name)} without faults, and {other.get(name)} with them")
