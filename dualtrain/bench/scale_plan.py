"""Plan of ``bench --scale``: how costs grow with the number of ranks, on one host and on virtual nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dualtrain.bench.plan import GLOO, OURS, Entry
from dualtrain.bench.statistics import Estimate, estimate
from dualtrain.errors import UserError


@dataclass(frozen=True, order=True)
class Layout:
    """Number of virtual nodes (1 means this host itself) and ranks per node. ``str()`` is its form in ``--ranks``."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def title(self) -> str:
        """Words for tables and messages: "8 ranks", or "2 × 4 ranks" for two nodes of four ranks."""
        return f"{self.nodes} × {self.ranks_per_node} ranks" if self.nodes > 1 else f"{self.ranks} ranks"

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}" if self.nodes > 1 else str(self.ranks)


LAYOUTS = (*(Layout(1, ranks) for ranks in (2, 4, 8, 16, 32)), Layout(2, 4), Layout(4, 4))
MOST_RANKS = 1024
MOST_NODES = 64
SHORT_BYTES = 4096
#: Jobs of ``worker.py``. The job ``scale`` gives one result for each measure except ``layers20``. Such a result has the
#: measure's name as its ``job``.
JOBS = ("scale", "layers20")
#: Description of each measure, by the name that ``worker.py`` uses.
MEASURES = {
    "start": "time to connect, without imports",
    "barrier": "barrier",
    "allreduce": "all-reduce of 4 KB",
    "layers20": "step of 20 small layers",
    "metric": "average of a metric over the ranks",
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
_START_SECONDS, _RANK_SECONDS = 0.5, 0.7  # estimated time of a start: a constant, and a time per rank on the same core
_NARROW = 1.5  # a ratio whose interval contains 1 is shown only if upper end / lower end is less than this

Times = dict[str, float]  # seconds by name of the measure


@dataclass
class ScaleResults:
    """Results of all layouts.

    Attributes:
        layouts: the layouts in ascending order, those on one host first.
        rounds: for each layout and contender, the times of each round that the contender completed, by the round's number.
        failures: for each layout and contender, the reason of its last failed start.
        missing: for each contender that was left out, the reason.
        unavailable: for each layout whose virtual nodes could not be made, the reason.
    """

    layouts: Sequence[Layout]
    rounds: dict[tuple[Layout, str], dict[int, Times]] = field(default_factory=dict)
    failures: dict[tuple[Layout, str], str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    unavailable: dict[Layout, str] = field(default_factory=dict)

    def seconds(self, measure: str, name: str, layout: Layout) -> Estimate | None:
        """Return the median seconds over the rounds; ``None`` if the contender completed no round."""
        found = [times[measure] for times in self.rounds.get((layout, name), {}).values() if measure in times]
        return estimate(found) if found else None

    def ratio(self, measure: str, one: str, other: str, layout: Layout) -> Estimate | None:
        """Return the median ratio of the times of ``one`` and ``other``; ``None`` if they completed no common round."""
        first, second = self.rounds.get((layout, one), {}), self.rounds.get((layout, other), {})
        both = [number for number in first if measure in first[number] and second.get(number, {}).get(measure)]
        return estimate([first[number][measure] / second[number][measure] for number in both]) if both else None


def is_shown(ratio: Estimate) -> bool:
    """Return whether a ratio is shown: its interval does not contain 1, or is narrower than ``_NARROW``."""
    return not ratio.low < 1 < ratio.high or ratio.high < _NARROW * ratio.low


def layouts_of(text: str | None) -> tuple[Layout, ...]:
    """Return the layouts that ``--ranks`` lists, in ascending order; without ``text``, all of ``LAYOUTS``.

    Raises:
        UserError: the text is not a list of layouts, or one of them is too small or too large.
    """
    if text is None:
        return LAYOUTS
    found = [re.fullmatch(r"(?:([0-9]{1,4})x)?([0-9]{1,4})", word.strip()) for word in text.split(",")]
    layouts = sorted({Layout(int(one[1] or 1), int(one[2])) for one in found if one})
    if None in found or not all(one.nodes in range(1, MOST_NODES + 1) and 2 <= one.ranks <= MOST_RANKS for one in layouts):
        raise UserError(
            f"--ranks must be numbers of ranks from 2 to {MOST_RANKS}, or NxM for N virtual nodes (at most {MOST_NODES}) "
            f"of M ranks, separated by commas, not {text!r}: give --ranks 2,4,2x4"
        )
    return tuple(layouts)


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


def times_of(rank_results: Sequence[Mapping[str, object]]) -> Times:
    """Merge the results of all ranks: the slowest rank's times."""
    times: Times = {}
    for one in rank_results:
        measure, seconds = str(one["job"]), float(str(one["seconds"]))
        times[measure] = max(seconds, times.get(measure, seconds))
    return times
