"""Runs the rounds: every contender in turn, each time in fresh processes, and keeps what each of them found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dualtrain.bench.pace import Pace
from dualtrain.bench.plan import ENTRIES, EPOCH_BATCH, EPOCH_LR, IMPORT, LENGTHS, MAIN, Entry, jobs_of
from dualtrain.bench.start_contender import LaunchError, Place, run_entry, run_program

_IMPORT = """
import time, torch
began = time.perf_counter()
import dualtrain
dualtrain.connect, dualtrain.DistributedOptimizer, dualtrain.broadcast_parameters
print(time.perf_counter() - began)
"""


@dataclass(frozen=True)
class Sample:
    """What one start of a contender found: seconds by job, hashes of the weights by workload, an accuracy."""

    seconds: dict[str, float]
    sha256: dict[str, str] = field(default_factory=dict)
    accuracy: float | None = None
    ranks: int = 1


@dataclass
class Results:
    """All samples, by contender and round (``None``: it failed, or no time was left), and why contenders are missing."""

    samples: dict[str, list[Sample | None]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)  # those that another start made up for, too
    efforts: list[float] = field(default_factory=list)  # of each round: the share of a workload's steps that it took

    @property
    def rounds(self) -> int:
        """How many were run."""
        return len(self.efforts)

    def count(self, name: str) -> int:
        """The rounds in which a contender ran."""
        return sum(sample is not None for sample in self.samples.get(name, ()))

    def pairs(self, one: str, other: str) -> list[tuple[Sample, Sample]]:
        """The samples of two contenders from rounds in which both ran."""
        both = zip(self.samples.get(one, ()), self.samples.get(other, ()), strict=False)
        return [(a, b) for a, b in both if a is not None and b is not None]


@dataclass(frozen=True)
class Asked:
    """What to measure: contenders, jobs, rounds; after the first, nothing is begun that would not end within ``seconds``.

    A round takes up to ``most`` of the steps of ``plan.LENGTHS``. A contender that cannot run has its spare take its
    place, if it has one.
    """

    entries: Sequence[str]
    jobs: tuple[str, ...]
    rounds: int
    most: float
    seconds: float
    spares: Mapping[str, str] = field(default_factory=dict)


def measure(asked: Asked, place: Place, say: Callable[[str], None]) -> Results:
    """Runs the rounds; for how long is ``asked``. Contenders that fail twice in a round are left out from then on."""
    return _Rounds(asked, place, say).run()


class _Rounds:
    def __init__(self, asked: Asked, place: Place, say: Callable[[str], None]) -> None:
        self._asked, self._place, self._say = asked, place, say
        self._entries = list(asked.entries)
        self._results = Results()
        self._pace = Pace(asked.rounds, asked.seconds, asked.most)

    def run(self) -> Results:
        for number in range(self._asked.rounds):
            if number and not self._pace.fits(self._there()):
                limit = f"within {self._asked.seconds / 60:g} minutes"
                self._say(f"{number} of {self._asked.rounds} rounds: another would not end {limit}")
                break
            self._results.efforts.append(self._pace.effort)
            if not self._round(number):
                break
            self._pace.end_round(self._there())
        return self._results

    def _there(self) -> list[str]:
        return [name for name in self._entries if name not in self._results.missing]

    def _round(self, number: int) -> bool:
        """Whether it came to its end."""
        for name in self._entries if number % 2 == 0 else reversed(self._entries):
            if name in self._results.missing:
                continue
            if number and not self._pace.fits([name]):
                self._say(f"round {number + 1} of {self._asked.rounds} ends before {ENTRIES[name].title}: no time is left")
                return False
            self._run_one(name, number)
            spare = self._asked.spares.get(name, name)
            if name in self._results.missing and spare not in self._entries:
                self._entries.append(spare)
        return True

    def _run_one(self, name: str, number: int) -> None:
        entry, results, effort = ENTRIES[name], self._results, self._pace.effort
        column = results.samples.setdefault(name, [])
        column += [None] * (number + 1 - len(column))
        for last in (False, True):
            began = time.monotonic()
            try:
                sample = column[number] = _sample(entry, self._asked.jobs, self._bounded(number), effort)
            except LaunchError as error:
                late = number > 0 and not self._pace.fits([name])
                then = "left out" if last else "no time is left for another start" if late else "started again"
                self._say(f"{entry.title}: failed, {then}: {error}")
                results.failures.setdefault(name, []).append(str(error))
                if last:
                    results.missing[name] = str(error)
                elif late:
                    return
            else:
                seconds = time.monotonic() - began
                self._pace.note(name, seconds, {job: one for job, one in sample.seconds.items() if job in LENGTHS})
                which = f"round {number + 1} of {self._asked.rounds}, {effort:.0%} of the steps"
                self._say(f"{which}: {entry.title}, {seconds:.1f} s")
                return

    def _bounded(self, number: int) -> Place:
        """The place, with as much patience as there is time; the first round shows how much is needed."""
        place = self._place
        return replace(place, patience=min(place.patience, max(1.0, self._pace.seconds_left))) if number else place


def _sample(entry: Entry, jobs: Collection[str], place: Place, effort: float) -> Sample:
    if entry.module == IMPORT:
        return Sample({"import": _import_seconds()})
    if not entry.steps and not place.prefix:
        # The command line shares the cores out among the ranks: the script that it is compared with gets as many.
        place = replace(place, threads=max(1, len(os.sched_getaffinity(0)) // place.ranks))
    if entry.module == MAIN:
        return _main(entry, place)
    found = run_entry(entry, jobs_of(entry, jobs), place, effort)
    if not found:
        raise LaunchError("its ranks said nothing")
    return sample_of(found)


def sample_of(found: Sequence[dict[str, Any]]) -> Sample:
    """The lines of all ranks as one: what the slowest took, and rank 0's weights."""
    seconds: dict[str, float] = {}
    for one in found:
        key, taken = _keyed(one)
        seconds[key] = max(taken, seconds.get(key, taken))
    first = [one for one in found if one["rank"] == 0]
    starts = [one["first"] for one in first if "first" in one]
    if starts:
        seconds["start"] = starts[0]
    accuracies = [one["accuracy"] for one in first if "accuracy" in one]
    return Sample(
        seconds,
        {one["job"]: one["sha256"] for one in first if one.get("sha256")},
        accuracies[0] if accuracies else None,
        found[0]["size"],
    )


def _keyed(one: dict[str, Any]) -> tuple[str, float]:
    if one["job"] == "sweep":
        return f"sweep/{one['bytes']}" + ("" if one["way"] == "buffer" else "/tensor"), one["seconds"]
    if one["job"] == "trainer":
        return "trainer", one["trainer"] - one["by hand"]
    return one["job"], one["seconds"]


def _import_seconds() -> float:
    done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(done.stderr.strip().rpartition("\n")[2])
    return float(done.stdout)


def _main(entry: Entry, place: Place) -> Sample:
    """A whole run of the command line, as a user starts it. Its epoch's seconds are the summary's."""
    run = place.folder / f"run-{time.monotonic_ns()}"
    flags = ["--recipe=mnist-convnet", f"--data-dir={place.folder}", f"--run-dir={run}", "--epochs=1", "--backend=torch"]
    flags += [f"--batch-size={EPOCH_BATCH}", f"--lr={EPOCH_LR}", f"--device={place.device}", *entry.option.split()]
    run_program([sys.executable, "-m", "dualtrain.main", *flags], entry.starter, place)
    summary = json.loads((run / "summary.json").read_text())
    return Sample({"epoch": summary["seconds"]}, {}, summary["val_accuracy"], summary["world_size"])
