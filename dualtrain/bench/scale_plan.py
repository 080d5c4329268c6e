"""Plan of ``bench --scale``: how costs grow with the number of ranks on one host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dualtrain.bench.plan import GLOO, OURS, Entry
from dualtrain.bench.statistics import Estimate, estimate
from dualtrain.errors import UserError

RANKS = (2, 4, 8, 16, 32)
MOST_RANKS = 1024
SHORT_BYTES = 4096
JOBS = ("scale", "layers20")
#: What is measured, by the worker's name of it.
MEASURES = {
    "start": "start to connected, without imports",
    "barrier": "barrier",
    "allreduce": "all-reduce of 4 KB",
    "layers20": "step of 20 small layers",
    "metric": "average of a named metric",
}
RAW, HOROVOD = "torch", "horovod"
CONTENDERS = {
    RAW: Entry("raw torch", "ddp", "plain"),
    "native": Entry("dualtrain, native", OURS, "torch/native"),
    "shm": Entry("dualtrain, shared memory", OURS, "torch/shm"),
    HOROVOD: Entry("raw Horovod", "raw_horovod", "", GLOO, needs="horovod"),
    "hvd": Entry("dualtrain.hvd", "dualtrain_hvd"),
}
#: Pairs of contenders: the time of the first is divided by the time of the second.
COMPARED = (("native", RAW), ("shm", RAW), ("hvd", HOROVOD), ("hvd", RAW), (HOROVOD, RAW))

MOST_ROUNDS = 7
_START_SECONDS, _RANK_SECONDS = 0.5, 0.7  # of any start; in addition, for each rank that shares a core
_ALIKE = 1.5  # width of an interval that contains 1 and still is a result

Times = dict[str, float]  # seconds by name of the measure


@dataclass
class Growth:
    """Results of all numbers of ranks.

    Attributes:
        ranks: the numbers of ranks, ascending.
        rounds: for each number of ranks and contender, its times by the round's number, of the rounds that it completed.
        failures: for each number of ranks and contender, the reason of its last failed start.
        missing: for each contender that was left out, the reason.
    """

    ranks: Sequence[int]
    rounds: dict[tuple[int, str], dict[int, Times]] = field(default_factory=dict)
    failures: dict[tuple[int, str], str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def seconds(self, measure: str, name: str, ranks: int) -> Estimate | None:
        """Return the seconds over the rounds; ``None`` if the contender completed no round."""
        found = [times[measure] for times in self.rounds.get((ranks, name), {}).values() if measure in times]
        return estimate(found) if found else None

    def ratio(self, measure: str, one: str, other: str, ranks: int) -> Estimate | None:
        """Return the time of ``one`` divided by that of ``other`` over the rounds that both completed, if there are any."""
        ours, theirs = self.rounds.get((ranks, one), {}), self.rounds.get((ranks, other), {})
        both = [number for number in ours if measure in ours[number] and theirs.get(number, {}).get(measure)]
        return estimate([ours[number][measure] / theirs[number][measure] for number in both]) if both else None


def is_shown(ratio: Estimate) -> bool:
    """Return whether a ratio shows which contender is faster, or that they differ by less than ``_ALIKE``."""
    return not ratio.low < 1 < ratio.high or ratio.high < _ALIKE * ratio.low


def ranks_of(text: str | None) -> tuple[int, ...]:
    """Return the numbers of ranks that ``--ranks`` lists, ascending; without ``text``, all of ``RANKS``.

    Raises:
        UserError: the text is no such list.
    """
    if text is None:
        return RANKS
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 2 or numbers[-1] > MOST_RANKS:
        raise UserError(
            f"--ranks must be numbers from 2 to {MOST_RANKS}, separated by commas, not {text!r}: give --ranks 2,4"
        )
    return tuple(numbers)


def rounds_with(ranks: int) -> int:
    """Return the default number of rounds: fewer with many ranks, whose starts and calls take longer."""
    return max(1, min(MOST_ROUNDS, 48 // ranks))


def expected_seconds(ranks: int, contenders: int, rounds: int, cores: int) -> float:
    """Return a rough estimate of the time of all starts with ``ranks`` ranks. Ranks that share a core take turns."""
    turns = max(1.0, ranks / cores)
    return rounds * contenders * (_START_SECONDS + _RANK_SECONDS * turns)


def repetitions(ranks: int) -> int:
    """Return how often each call is timed: fewer times with many ranks, whose calls are slower."""
    return max(5, 80 // ranks)


def step_fraction(ranks: int) -> float:
    """Return the fraction of the workload's steps that is run."""
    return min(1.0, 8 / ranks)


def timeout_of(ranks: int) -> float:
    """Return the seconds after which a contender is stopped. Ranks that share a core start one after another."""
    return 120.0 + 15.0 * ranks


def times_of(found: Sequence[Mapping[str, object]]) -> Times:
    """Merge the results of all ranks: the slowest rank's times."""
    times: Times = {}
    for one in found:
        measure, seconds = str(one["job"]), float(str(one["seconds"]))
        times[measure] = max(seconds, times.get(measure, seconds))
    return times
