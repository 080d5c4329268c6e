"""Plan of ``bench --scale``: how costs grow with the number of ranks on one host."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dualtrain.bench.plan import GLOO, OURS, Entry
from dualtrain.errors import UserError

RANKS = (2, 4, 8, 16, 32)
MOST_RANKS = 1024
SHORT_BYTES = 4096
JOBS = ("scale", "layers20")
#: What is measured, by the worker's name of it.
MEASURES = {
    "start": "launch to connected",
    "connect": "connecting",
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

Times = dict[str, float]  # seconds by name of the measure


@dataclass
class Growth:
    """Results of all numbers of ranks.

    Attributes:
        ranks: the numbers of ranks, ascending.
        rounds: for each number of ranks and contender, its times in each round that it completed.
        failures: for each number of ranks and contender, the reason of its last failed start.
        missing: for each contender that was left out, the reason.
    """

    ranks: Sequence[int]
    rounds: dict[tuple[int, str], list[Times]] = field(default_factory=dict)
    failures: dict[tuple[int, str], str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def seconds(self, measure: str, name: str, ranks: int) -> float | None:
        """Return the median seconds over the rounds; ``None`` if the contender completed no round."""
        found = [times[measure] for times in self.rounds.get((ranks, name), ()) if measure in times]
        return statistics.median(found) if found else None

    def ratio(self, measure: str, one: str, other: str, ranks: int) -> float | None:
        """Return the time of ``one`` divided by that of ``other``; ``None`` if one of them was not measured."""
        times = self.seconds(measure, one, ranks), self.seconds(measure, other, ranks)
        return None if times[0] is None or not times[1] else times[0] / times[1]


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
    """Merge the results of all ranks: the slowest rank's times, but the shortest time to connect.

    The rank that is started last connects in the shortest time: it waits for no rank that is still starting.
    """
    values: dict[str, list[float]] = {}
    for one in found:
        values.setdefault(str(one["job"]), []).append(float(str(one["seconds"])))
    return {measure: min(times) if measure == "connect" else max(times) for measure, times in values.items()}
