"""Reader of the records that ``recorder.py`` writes: for each run, a file of JSON lines per rank."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dualtrain.errors import UserError
from dualtrain.files import parse_json, read_text
from dualtrain.horovodize.prove.records import End, OptimizerRecord, RankRecord, RunRecord, StateTensor, Summary, Weights
from dualtrain.horovodize.recorder import FORMAT

_NAME = re.compile(r"rank-(\d+)\.jsonl")
T = TypeVar("T")


def read_record(folder: Path, launched: float | None = None) -> RunRecord:
    """Read the record in ``folder``.

    ``launched`` is the time at which the launcher was started, in seconds since 1970; by default, the start of rank 0.

    Raises:
        UserError: there is no record, it cannot be read, it mixes several runs, a rank's file is missing, or a file has no
            complete line, has another format, or is not a record.
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
            f"{shown} mixes several runs (rank-{foreign[0]}.jsonl was written by rank {world['rank']} of {world['size']}, "
            f"instead of rank {foreign[0]} of {size}): record the script again, in a new folder"
        )
    if missing:
        raise UserError(
            f"{shown} lacks the record of rank {missing[0]}: copy rank-{missing[0]}.jsonl from that rank's host into it"
        )
    start = ranks[0].start["time"] if launched is None else launched
    return RunRecord([ranks[rank] for rank in range(size)], start)


def failure_in(end: dict[str, Any]) -> str:
    """Return the error or exit status in ``end``, a result of :func:`end_of`; "" if the script has not failed."""
    failed = end and (end["reason"] == "error" or end["status"])
    return str(end.get("error") or f"exit status {end['status']}") if failed else ""


def end_of(path: Path) -> dict[str, Any]:
    """Return the last complete line of a rank's file if it records the end of the script, else an empty dict."""
    lines = _complete_lines(path)
    last: dict[str, Any] = parse_json(lines[-1]) if lines else {}
    return last if last.get("kind") == "end" else {}


def _checked(path: Path, read: Callable[[], T]) -> T:
    """Return ``read()``, which reads ``path``; raise UserError if it fails."""
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
    """Read a rank's file. Raise UserError if it has no complete line, or another format."""
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
    # An optimizer that never steps has no line: add an empty record for it.
    while len(record.optimizers) <= int(line["optimizer"]):
        record.optimizers.append(OptimizerRecord("", [], []))
    numels = [math.prod(int(extent) for extent in shape) for _, _, shape in line["tensors"]]
    names = [str(name) for name, _, _ in line["tensors"]]
    known = record.optimizers[line["optimizer"]]
    if known.sums:  # the script has added or removed parameters
        # If there are fewer parameters now, keep the old names at the last positions: earlier steps have sums there.
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
    found = [
        StateTensor(str(group), str(name), int(numel), Summary(str(a), float(b), [float(each) for each in c]))
        for group, name, numel, (a, b, c) in line["tensors"]
    ]
    # A script may broadcast tensors in an order that differs between processes, such as that of a set.
    record.state = sorted(found, key=lambda each: each[:3])


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
