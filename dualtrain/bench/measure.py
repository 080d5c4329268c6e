"""Measurement in rounds. Each round starts every contender once, in fresh processes, and records its results."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dualtrain.bench.pace import Pace
from dualtrain.bench.plan import ENTRIES, EPOCH_BATCH, EPOCH_LR, IMPORT, LENGTHS, MAIN, SIDE_STEPS, Entry, jobs_of
from dualtrain.bench.start_contender import LaunchError, LaunchSpec, run_entry, run_program
from dualtrain.cores import share_of, usable_cores

_IMPORT = """
import time, torch
began = time.perf_counter()
import dualtrain
dualtrain.connect, dualtrain.DistributedOptimizer, dualtrain.broadcast_parameters
print(time.perf_counter() - began)
"""


@dataclass(frozen=True)
class Sample:
    """Result of one start of a contender.

    Attributes:
        seconds: seconds of one step by workload, and of other measurements by name, such as an import or an epoch.
        sha256: hashes of the final weights by workload.
        accuracy: accuracy after an epoch.
        ranks: number of ranks.
        parts: for contenders that ran side by side in this start, the result of each, by name. Then ``seconds`` and
            ``sha256`` are empty, and ``accuracy`` is ``None``.
    """

    seconds: dict[str, float]
    sha256: dict[str, str] = field(default_factory=dict)
    accuracy: float | None = None
    ranks: int = 1
    parts: dict[str, Sample] = field(default_factory=dict)

    def step_seconds(self) -> dict[str, float]:
        """Return, for each workload, the seconds per planned step (``plan.LENGTHS``).

        Contenders side by side run ``SIDE_STEPS`` steps each per planned step; the result is the sum of these steps' times.
        """
        total: dict[str, float] = {}
        for sample in self.parts.values() or [self]:
            for job in sample.seconds.keys() & LENGTHS.keys():
                total[job] = total.get(job, 0.0) + sample.seconds[job] * (SIDE_STEPS if self.parts else 1)
        return total


@dataclass
class Results:
    """All samples and failures.

    Attributes:
        samples: for each contender, one sample per round, up to the last round in which it was started; ``None`` for a
            round in which it failed or was not started.
        missing: for each contender that was left out, the reason.
        failures: for each contender, the messages of its failed starts, even if the second start in the round succeeded.
        step_fractions: for each round, the fraction of each workload's steps that it ran.
        interrupted: the exception that ended the measurement early: KeyboardInterrupt, or SystemExit after SIGTERM.
    """

    samples: dict[str, list[Sample | None]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)
    step_fractions: list[float] = field(default_factory=list)
    interrupted: BaseException | None = None

    @property
    def rounds(self) -> int:
        """Number of rounds that were begun. The last one may be incomplete."""
        return len(self.step_fractions)

    @property
    def is_empty(self) -> bool:
        """Return whether no contender has run in any round."""
        return not any(map(self.count, self.samples))

    def count(self, name: str) -> int:
        """Return the number of rounds in which a contender ran."""
        return sum(sample is not None for sample in self.samples.get(name, ()))

    def column(self, name: str, shared_entry: str = "") -> list[Sample | None]:
        """Return a contender's samples by round.

        ``shared_entry`` is the entry in whose processes the contender ran side by side with others; empty if it had its own
        processes.
        """
        if not shared_entry:
            return self.samples.get(name, [])
        return [None if sample is None else sample.parts.get(name) for sample in self.samples.get(shared_entry, ())]

    def pairs(self, one: str, other: str, shared_entry: str = "") -> list[tuple[Sample, Sample]]:
        """Return the samples of two contenders from the rounds in which both ran.

        For ``shared_entry`` see :meth:`column`.
        """
        both = zip(self.column(one, shared_entry), self.column(other, shared_entry), strict=False)
        return [(a, b) for a, b in both if a is not None and b is not None]


@dataclass(frozen=True)
class Plan:
    """Contenders and jobs to measure.

    Attributes:
        entries: names of the contenders.
        jobs: names of the jobs.
        rounds: number of rounds, if time permits.
        largest_fraction: each round runs at most this fraction of each workload's timed steps (``plan.LENGTHS``).
        seconds: time limit for all rounds. After the first round, only contenders that would end in time are started.
        fallbacks: for each contender that may be unable to run, the contender that replaces it.
    """

    entries: Sequence[str]
    jobs: tuple[str, ...]
    rounds: int
    largest_fraction: float
    seconds: float
    fallbacks: Mapping[str, str] = field(default_factory=dict)


def measure(plan: Plan, spec: LaunchSpec, log: Callable[[str], None]) -> Results:
    """Run the rounds; ``log`` gets a line per start, and one if time runs out.

    A contender that fails twice in a round is left out after that, and its fallback, if it has one, runs in its place.

    After Ctrl-C or SIGTERM, return the results so far, with the exception as ``interrupted``.
    """
    rounds = _Rounds(plan, spec, log)
    try:
        rounds.run()
    except (KeyboardInterrupt, SystemExit) as error:
        rounds.results.interrupted = error
    return rounds.results


class _Rounds:
    def __init__(self, plan: Plan, spec: LaunchSpec, log: Callable[[str], None]) -> None:
        self._plan, self._spec, self._log = plan, spec, log
        self._entries = list(plan.entries)
        self.results = Results()
        self._pace = Pace(plan.rounds, plan.seconds, plan.largest_fraction)

    def run(self) -> None:
        for number in range(self._plan.rounds):
            if number and not self._pace.fits(self._available()):
                limit = f"within {self._plan.seconds / 60:g} minutes"
                self._log(f"{number} of {self._plan.rounds} rounds were run: another round would not end {limit}")
                break
            self.results.step_fractions.append(self._pace.step_fraction)
            if not self._round(number):
                break
            self._pace.end_round(self._available())

    def _available(self) -> list[str]:
        return [name for name in self._entries if name not in self.results.missing]

    def _round(self, number: int) -> bool:
        """Run one round. Return whether there was time for all its contenders."""
        order = self._entries[:] if number % 2 == 0 else self._entries[::-1]
        for name in order:
            if name in self.results.missing:
                continue
            if number and not self._pace.fits([name]):
                self._log(f"round {number + 1} of {self._plan.rounds} ends: no time is left for {ENTRIES[name].title!r}")
                return False
            self._run_one(name, number)
            fallback = self._plan.fallbacks.get(name, name)
            if name in self.results.missing and fallback not in self._entries:
                # Compared contenders run shortly after each other: insert the fallback here, in this round too.
                for names in (self._entries, order):
                    names.insert(names.index(name) + 1, fallback)
        return True

    def _run_one(self, name: str, number: int) -> None:
        entry, results, step_fraction = ENTRIES[name], self.results, self._pace.step_fraction
        column = results.samples.setdefault(name, [])
        column += [None] * (number + 1 - len(column))
        for last in (False, True):
            began = time.monotonic()
            try:
                sample = column[number] = _sample(entry, self._plan.jobs, self._bounded(number), step_fraction)
            except (LaunchError, OSError) as error:  # OSError: a full disk, for example
                late = number > 0 and not self._pace.fits([name])
                then = "left out" if last else "no time is left for another start" if late else "started again"
                self._log(f"{entry.title}: failed, {then}: {error}")
                results.failures.setdefault(name, []).append(str(error))
                if last:
                    results.missing[name] = str(error)
                elif late:
                    return
            else:
                seconds = time.monotonic() - began
                self._pace.note(name, seconds, sample.step_seconds())
                which = f"round {number + 1} of {self._plan.rounds}, {step_fraction:.0%} of the steps"
                self._log(f"{which}: {entry.title}, {seconds:.1f} s")
                return

    def _bounded(self, number: int) -> LaunchSpec:
        """Return the launch specification. After the first round, limit its timeout to the time that is left."""
        spec = self._spec
        return replace(spec, timeout=min(spec.timeout, max(1.0, self._pace.seconds_left))) if number else spec


def _sample(entry: Entry, jobs: Collection[str], spec: LaunchSpec, step_fraction: float) -> Sample:
    if entry.module == IMPORT:
        return Sample({"import": _import_seconds(spec.timeout)})
    if not entry.workloads and not spec.prefix:
        # The tutorial script is compared with dualtrain.main: give it as many threads per rank as dualtrain.main uses. With
        # --launch, this number is not known here.
        spec = replace(spec, threads=share_of(usable_cores(), spec.ranks))
    if entry.module == MAIN:
        return _main(entry, spec)
    rank_results = run_entry(entry, jobs_of(entry, jobs), spec, step_fraction)
    if not rank_results:
        raise LaunchError("its ranks printed no results")
    return sample_of(rank_results)


def sample_of(rank_results: Sequence[dict[str, Any]]) -> Sample:
    """Merge the results of all ranks.

    Job times are the slowest rank's. The time from launch to first step, the weights and the accuracy are rank 0's.
    """
    names = dict.fromkeys(one.get("part", "") for one in rank_results)
    if "" not in names:
        parts = {name: _merged([one for one in rank_results if one["part"] == name]) for name in names}
        return Sample({}, ranks=rank_results[0]["size"], parts=parts)
    return _merged(rank_results)


def _merged(rank_results: Sequence[dict[str, Any]]) -> Sample:
    seconds: dict[str, float] = {}
    for one in rank_results:
        key, value = _keyed(one)
        seconds[key] = max(value, seconds.get(key, value))
    first = [one for one in rank_results if one["rank"] == 0]
    starts = [one["first"] for one in first if "first" in one]
    if starts:
        seconds["start"] = starts[0]
    accuracies = [one["accuracy"] for one in first if "accuracy" in one]
    return Sample(
        seconds,
        {one["job"]: one["sha256"] for one in first if one.get("sha256")},
        accuracies[0] if accuracies else None,
        rank_results[0]["size"],
    )


def _keyed(one: dict[str, Any]) -> tuple[str, float]:
    if one["job"] == "sweep":
        return f"sweep/{one['bytes']}" + ("" if one["way"] == "buffer" else "/tensor"), one["seconds"]
    if one["job"] == "trainer":
        return "trainer", one["trainer"] - one["by hand"]
    return one["job"], one["seconds"]


def _import_seconds(timeout: float) -> float:
    command = [sys.executable, "-c", _IMPORT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"it did not end within {timeout:.0f} s") from None
    if done.returncode:
        raise LaunchError(done.stderr.strip().rpartition("\n")[2])
    try:
        return float(done.stdout.splitlines()[-1])  # a module that is imported may print lines of its own
    except (IndexError, ValueError):
        raise LaunchError(f"it printed {done.stdout[-100:]!r} in place of a time") from None


def _main(entry: Entry, spec: LaunchSpec) -> Sample:
    """Run ``dualtrain.main`` as a user would. The epoch's time is in the run's summary."""
    run = spec.folder / f"run-{time.monotonic_ns()}"
    flags = ["--recipe=mnist-convnet", f"--data-dir={spec.folder}", f"--run-dir={run}", "--epochs=1", "--backend=torch"]
    flags += [f"--batch-size={EPOCH_BATCH}", f"--lr={EPOCH_LR}", f"--device={spec.device}", *entry.option.split()]
    run_program([sys.executable, "-m", "dualtrain.main", *flags], entry.starter, spec)
    summary = json.loads((run / "summary.json").read_text())
    return Sample({"epoch": summary["seconds"]}, {}, summary["val_accuracy"], summary["world_size"])
