"""Records of runs, and the measurements in them. ``recorder.py`` writes records, and ``reader.py`` reads them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_WARM_UP_DIVISOR = 5  # the speed leaves out the first 1/5 of the steps, and always the first step


class Summary(NamedTuple):
    """A tensor's values in a record: hash, norm and samples."""

    sha256: str
    norm: float
    values: list[float]


class StateTensor(NamedTuple):
    """A tensor at the end of the script.

    ``group`` is "weights" for a parameter of a recorded optimizer. For another tensor that the script has broadcast, it is
    "buffers" if the dtype is a floating-point or complex one, and "integers" otherwise.
    """

    group: str
    name: str
    numel: int
    summary: Summary


@dataclass
class Weights:
    """The weights of an optimizer after a step, or before the first one, and the options of its parameter groups."""

    tensors: list[Summary]
    options: list[dict[str, Any]]


@dataclass
class OptimizerRecord:
    """One optimizer on one rank.

    Attributes:
        type: the name of its class; empty if it began no step.
        names: names of the parameters, in the order of the parameter groups.
        numels: number of elements of each parameter.
        sums: for each step, a checksum of each parameter after the step.
        weights: summaries of the weights by step; 0 is before the first step.
        order: order[n] is the position just after this optimizer's step n, and order[0] the one just before its first step.
            Positions count the steps of all optimizers on this rank: 2i is just before the step with index i in
            ``RankRecord.seconds``, and 2i + 1 just after it.
    """

    type: str
    names: list[str]
    numels: list[int]
    sums: list[list[int]] = field(default_factory=list)
    weights: dict[int, Weights] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """The number of steps that were recorded."""
        return len(self.sums)


class End(NamedTuple):
    """End of the script on one rank.

    Attributes:
        reason: "steps" (the recorder ended it), "return", "exit" (SystemExit) or "error" (another exception).
        status: the exit status.
        error: the exception's type and message, or SystemExit's message; may be empty.
        traceback: the exception's traceback; may be empty.
        memory: the process's peak memory in bytes.
        gpu_memory: the peak memory on the process's GPU, as torch counts it.
        defects: the defects of Horovod that were reproduced: (defect, file, line).
        first_defect: the step after which a reproduced defect was first found; 0 if none was found after a step.
            ``defects`` may then still have defects that were reproduced after the last step.
    """

    reason: str
    status: int
    error: str
    traceback: str
    memory: int
    gpu_memory: int
    defects: list[tuple[str, str, int]]
    first_defect: int = 0


@dataclass
class RankRecord:
    """The record of one rank.

    Attributes:
        start: facts at the start: script and its hash, arguments, steps, seed, time, Python, processor.
        world: rank, size, library, torch, threads and GPU; empty if no step was begun.
        optimizers: the optimizers, in order of creation.
        seconds: for each step of any optimizer: the optimizer's index, and the step's duration.
        first_step: the time at which the first step ended, in seconds since 1970; ``None`` if there was none.
        state: the weights at the end, and the other tensors that the script has broadcast; empty after an error, a kill
            or ``os._exit``, without steps, and in older records.
        end: the end of the script; ``None`` if the process was killed or called ``os._exit``.
    """

    start: dict[str, Any]
    world: dict[str, Any] = field(default_factory=dict)
    optimizers: list[OptimizerRecord] = field(default_factory=list)
    seconds: list[tuple[int, float]] = field(default_factory=list)
    first_step: float | None = None
    state: list[StateTensor] = field(default_factory=list)
    end: End | None = None

    @property
    def steps(self) -> int:
        """The number of steps of the optimizer that took the most steps."""
        return max((each.steps for each in self.optimizers), default=0)


@dataclass
class RunRecord:
    """The record of one run.

    Attributes:
        ranks: in rank order.
        launched: the time at which the launcher was started, in seconds since 1970; for --against's record, the time at
            which rank 0 started the script.
    """

    ranks: list[RankRecord]
    launched: float

    @property
    def steps(self) -> int:
        """The number of steps that all ranks have taken."""
        return min(rank.steps for rank in self.ranks)

    @property
    def planned(self) -> int:
        """The number of steps after which the run was to end; a script may take fewer."""
        return int(self.ranks[0].start["steps"])

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def platform(self) -> dict[str, Any]:
        """Facts about rank 0 that may affect the bits of a result: processor, torch, device and threads."""
        first = self.ranks[0]
        names = ("torch", "device", "threads")
        return {"processor": first.start["processor"], **{name: first.world.get(name) for name in names}}

    @property
    def library(self) -> str:
        """Name and version of the library: "horovod 0.28.1"; empty if rank 0 began no step."""
        return str(self.ranks[0].world.get("library", ""))

    @property
    def steps_per_second(self) -> float | None:
        """Steps per second on rank 0, of the optimizer that takes the first step after the warm-up.

        ``None`` if no step was taken after the warm-up.
        """
        return self.speed_of_first(len(self.ranks[0].seconds))

    def speed_of_first(self, count: int) -> float | None:
        """Return ``steps_per_second`` as if the run had ended after ``count`` steps, counted over all optimizers."""
        seconds = self.ranks[0].seconds[:count]
        timed = seconds[max(1, len(seconds) // _WARM_UP_DIVISOR) :]
        number = next((each for each, _ in timed), 0)
        total = sum(each for _, each in timed)
        return sum(each == number for each, _ in timed) / total if total > 0 else None

    @property
    def start_up(self) -> float | None:
        """Seconds from ``launched`` to the end of rank 0's first step; ``None`` if there was no step."""
        ended = self.ranks[0].first_step
        return None if ended is None else ended - self.launched

    @property
    def memory(self) -> int:
        """The largest peak memory of a rank, in bytes."""
        return max((rank.end.memory for rank in self.ranks if rank.end), default=0)

    @property
    def gpu_memory(self) -> int:
        """The largest peak GPU memory of a rank, in bytes."""
        return max((rank.end.gpu_memory for rank in self.ranks if rank.end), default=0)

    @property
    def defects(self) -> list[tuple[str, str, int]]:
        """Horovod's defects that were reproduced on any rank: (defect, file, line)."""
        return list(dict.fromkeys(each for rank in self.ranks if rank.end for each in rank.end.defects))

    @property
    def first_defect(self) -> int:
        """The first step of any rank after which a reproduced defect was found; 0 if there is none.

        For a rank that reproduced defects only after its last step, this last step counts.
        """
        return min((rank.end.first_defect or rank.steps for rank in self.ranks if rank.end and rank.end.defects), default=0)


def median_of(runs: Sequence[RunRecord], value: Callable[[RunRecord], float | None]) -> tuple[float, float, float] | None:
    """Return the median, minimum and maximum of ``value`` over ``runs``; ``None`` if no run has a value."""
    found = [each for run in runs if (each := value(run)) is not None]
    return (statistics.median(found), min(found), max(found)) if found else None
