"""Reader of the records that ``recorder.py`` writes: for each run, a file of JSON lines per rank."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dualtrain.errors import UserError
from dualtrain.files import parse_json, read_text
from dualtrain.horovodize.recorder import FORMAT

_NAME = re.compile(r"rank-(\d+)\.jsonl")
_WARM_UP = 5  # the first 1/5 of the steps is not timed
T = TypeVar("T")


class Summary(NamedTuple):
    """A tensor's values in a record: hash, norm and samples."""

    sha256: str
    norm: float
    values: list[float]


class StateTensor(NamedTuple):
    """A tensor at the end of the script; ``group`` is "weights" (of an optimizer), "buffers" or "integers"."""

    group: str
    name: str
    numel: int
    summary: Summary


@dataclass
class Weights:
    """The weights of an optimizer after a step, and the options of its parameter groups."""

    tensors: list[Summary]
    options: list[dict[str, Any]]


@dataclass
class OptimizerRecord:
    """One optimizer on one rank.

    Attributes:
        type: the name of its class.
        names: names of the parameters, in the order of the parameter groups.
        numels: number of elements of each parameter.
        sums: for each step, a checksum of each parameter after the step.
        weights: summaries of the weights by step; 0 is before the first step.
        order: positions of this optimizer's steps among the steps of all optimizers on this rank. Entry n is for the state
            after its step n, and entry 0 for the state before its first step. Position 2i is before the step with index i
            in ``RankRecord.seconds``, and position 2i + 1 is after that step.
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
        first_defect: the step after which a reproduced defect was first found; 0 if none was.
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
        start: facts at the start: script and its hash, arguments, steps, seed, Python, processor.
        world: rank, size, library, torch, threads and GPU; empty before the first step.
        optimizers: the optimizers, in order of creation.
        seconds: for each step of any optimizer: the optimizer's index, and the step's duration.
        first_step: the time at which the first step ended, in seconds since 1970; ``None`` if there was none.
        state: the weights at the end, and the other tensors that the script has broadcast; empty after an error, and in
            older records.
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
        launched: the time at which the launcher was started, in seconds since 1970.
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
        """Name and version of the library: "horovod 0.28.1"."""
        return str(self.ranks[0].world.get("library", ""))

    @property
    def steps_per_second(self) -> float | None:
        """Steps per second of the optimizer that takes the first step after the warm-up; ``None`` if steps are too few."""
        return self.speed_of_first(len(self.ranks[0].seconds))

    def speed_of_first(self, count: int) -> float | None:
        """Return ``steps_per_second`` as if the run had ended after ``count`` steps, counted over all optimizers."""
        seconds = self.ranks[0].seconds[:count]
        timed = seconds[max(1, len(seconds) // _WARM_UP) :]
        number = next((each for each, _ in timed), 0)
        total = sum(each for _, each in timed)
        return sum(each == number for each, _ in timed) / total if total > 0 else None

    @property
    def start_up(self) -> float | None:
        """Seconds from the start of the launcher to the end of the first step."""
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


def read_record(folder: Path, launched: float | None = None) -> RunRecord:
    """Read the record in ``folder``. ``launched`` is the start of the run; by default, the start of rank 0.

    Raises:
        UserError: there is no record, a rank's file is missing, or a file is not a record.
    """
    shown = repr(str(folder))
    try:
        paths = {int(found[1]): path for path in folder.iterdir() if (found := _NAME.fullmatch(path.name))}
    except OSError as error:
        raise UserError(f"cannot read the record {shown} ({error.strerror}): name the folder that --record wrote") from None
    if not paths:
        raise UserError(f"{shown} contains no record (no rank-0.jsonl): name the folder that --record wrote")
    ranks = {rank: _checked(path, partial(_read_rank, path)) for rank, path in sorted(paths.items())}
    size = max([max(ranks) + 1, *(rank.world.get("size", 0) for rank in ranks.values())])
    missing = [rank for rank in range(size) if rank not in ranks]
    foreign = [n for n, rank in ranks.items() if rank.world and (rank.world["rank"], rank.world["size"]) != (n, size)]
    if foreign:
        world = ranks[foreign[0]].world
        raise UserError(
            f"{shown} mixes several runs: rank-{foreign[0]}.jsonl was written by rank {world['rank']} of "
            f"{world['size']}, instead of rank {foreign[0]} of {size}: record the script again, in a new folder"
        )
    if missing:
        raise UserError(
            f"{shown} lacks the record of rank {missing[0]}: copy rank-{missing[0]}.jsonl from that rank's host into it"
        )
    first = ranks[0].start["time"] if launched is None else launched
    return RunRecord([ranks[rank] for rank in range(size)], first)


def failure_at_end(path: Path) -> str:
    """Return the error or exit status with which the script has failed, if a rank's file ends with a failure, else ""."""
    lines = _complete_lines(path)
    end = parse_json(lines[-1]) if lines else {}
    failed = end.get("kind") == "end" and (end["reason"] == "error" or end["status"])
    return str(end.get("error") or f"exit status {end['status']}") if failed else ""


def _checked(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r} ({error.strerror}): check its permissions") from None
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise UserError(f"{str(path)!r} is not a record of recorder.py: record the script again") from None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return map(parse_json, _complete_lines(path))


def _complete_lines(path: Path) -> list[str]:
    # Leave out the text after the last line end: a killed process may have written part of a line.
    return read_text(path).split("\n")[:-1]


def _read_rank(path: Path) -> RankRecord:
    lines = _lines(path)
    start = next(lines, None)
    if start is None:
        raise UserError(
            f"{str(path)!r} has no complete line: its disk is full, or the process was ended before it wrote a line; free "
            "space on that disk (without --record, TMPDIR sets the folder), and record the script again"
        )
    if start.get("format") != FORMAT:
        raise UserError(f"{str(path)!r} has a format that this version cannot read: record the script again")
    seed = None if start["seed"] is None else int(start["seed"])
    typed = {"steps": int(start["steps"]), "seed": seed, "time": float(start["time"]), "processor": str(start["processor"])}
    record = RankRecord({**start, **typed})
    for line in lines:
        _READERS[line["kind"]](record, line)
    return record


def _read_world(record: RankRecord, line: dict[str, Any]) -> None:
    record.world = {**line, "rank": int(line["rank"]), "size": int(line["size"])}


def _read_optimizer(record: RankRecord, line: dict[str, Any]) -> None:
    # Optimizers are numbered in order of creation, and an optimizer that never steps has no line.
    while len(record.optimizers) <= int(line["optimizer"]):
        record.optimizers.append(OptimizerRecord("", [], []))
    numels = [math.prod(int(extent) for extent in shape) for _, _, shape in line["tensors"]]
    names = [str(name) for name, _, _ in line["tensors"]]
    known = record.optimizers[line["optimizer"]]
    if known.sums:  # the script has added or removed parameters
        # Keep the names of parameters that the script has removed: earlier steps have their values.
        known.names = names + known.names[len(names) :]
        known.numels = numels + known.numels[len(numels) :]
        return
    order = [2 * len(record.seconds)]
    record.optimizers[line["optimizer"]] = OptimizerRecord(str(line["type"]), names, numels, order=order)


def _read_step(record: RankRecord, line: dict[str, Any]) -> None:
    record.optimizers[line["optimizer"]].sums.append([int(each) for each in line["sums"]])
    record.optimizers[line["optimizer"]].order.append(2 * len(record.seconds) + 1)
    record.seconds.append((line["optimizer"], float(line["seconds"])))
    if record.first_step is None:
        record.first_step = float(line["time"])


def _read_weights(record: RankRecord, line: dict[str, Any]) -> None:
    tensors = [Summary(str(a), float(b), [float(each) for each in c]) for a, b, c in line["tensors"]]
    options = [dict(group) for group in line["options"]]
    record.optimizers[line["optimizer"]].weights[int(line["step"])] = Weights(tensors, options)


def _read_state(record: RankRecord, line: dict[str, Any]) -> None:
    record.state = [
        StateTensor(str(group), str(name), int(numel), Summary(str(a), float(b), [float(each) for each in c]))
        for group, name, numel, (a, b, c) in line["tensors"]
    ]


def _read_end(record: RankRecord, line: dict[str, Any]) -> None:
    defects = [(str(what), str(file), int(number)) for what, file, number in line["defects"]]
    texts = str(line.get("error", "")), str(line.get("traceback", ""))
    memory, first_defect = (int(line["memory"]), int(line["gpu_memory"])), int(line.get("first_defect", 0))
    record.end = End(line["reason"], int(line["status"]), *texts, *memory, defects, first_defect)


_READERS: dict[str, Callable[[RankRecord, dict[str, Any]], None]] = {
    "world": _read_world,
    "optimizer": _read_optimizer,
    "step": _read_step,
    "weights": _read_weights,
    "state": _read_state,
    "end": _read_end,
    "note": lambda record, line: None,
}
