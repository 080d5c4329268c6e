"""How a run starts: at its beginning, or from a checkpoint; with ``--resume auto`` whichever its folder allows.

With ``--resume auto`` one command line is enough for the first start of a run and for every restart. Each rank reports
what it sees in the run's folder. The newest good checkpoint of any rank is taken, and sent by that rank, so that hosts
need no common disk. A run that has ended is not trained again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dualtrain.backends import Backend
from dualtrain.config import AUTO, OutputSection, StepSection
from dualtrain.console import show
from dualtrain.errors import UserError
from dualtrain.files import or_nothing, read_json
from dualtrain.training import checkpoint
from dualtrain.training.on_ranks import on_rank_zero
from dualtrain.training.results import PLANNED, done_line
from dualtrain.training.resume import adopted, compare_with_checkpoint, differences, in_words, read_checkpoint
from dualtrain.training.run_dir import step_of

log = logging.getLogger("dualtrain")


@dataclass(frozen=True)
class Start:
    """Where a run starts: at its beginning, unless there is a checkpoint or a summary.

    Attributes:
        saved: the checkpoint that it goes on from.
        copies: checkpoints that rank 0's folder lacks, by file name.
        summary: of the run, which has ended.
    """

    saved: dict[str, Any] | None = None
    copies: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    summary: dict[str, Any] | None = None


@dataclass(frozen=True)
class _File:
    """A checkpoint that ``rank`` sees; ``identity`` is equal for one file that several ranks see."""

    step: int
    rank: int
    name: str
    identity: Sequence[int]


def start_of(output: OutputSection, settings: Mapping[str, Any], backend: Backend) -> Start:
    """Find where the run starts, as ``--resume`` asks for. Collective; blocks.

    Args:
        output: names the run's folder, and what to go on from.
        settings: all settings of this run by name.
        backend: the ranks.

    Raises:
        UserError: on every rank; the checkpoint cannot be used, or is of a run with other settings.
    """
    if output.resume is None:
        return Start()
    if output.resume == AUTO:
        assert output.run_dir is not None
        return _find_start(Path(output.run_dir), settings, backend)
    return Start(on_rank_zero(backend, "checkpoint", lambda: read_checkpoint(output, settings)))


def _find_start(folder: Path, settings: Mapping[str, Any], backend: Backend) -> Start:
    """Find the newest good checkpoint of the run in ``folder`` that any rank sees; print what was found. Collective.

    Raises:
        UserError: on every rank, if a rank's folder holds a run with other settings.
    """
    seen = backend.allgather_object(_look(folder, settings, backend.size), name="run folder")
    _say_who_sees(folder, [one["exists"] for one in seen], backend.rank)
    for rank, one in enumerate(seen):
        if one["other"]:
            raise UserError(f"--run-dir {str(folder)!r} on rank {rank} of {backend.size}: {one['other']}", shared=True)
    summary = next((one["summary"] for one in seen if one["summary"] is not None), None)
    if summary is not None:
        _say(backend, f"the run in {folder} has ended after step {summary['steps']}: nothing is left to train")
        if backend.rank == 0:
            show(done_line(summary, folder))
        return Start(summary=summary)
    files = [_File(step, rank, name, identity) for rank, one in enumerate(seen) for step, name, identity in one["files"]]
    has_result = any(one["result"] for one in seen)
    return _go_on(folder, files, settings, backend, has_result=has_result)


def _look(folder: Path, settings: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return what this rank sees of a run in ``folder``, as plain values."""
    files, steps = [], {path: checkpoint.step_of_name(path) for path in checkpoint.found(folder / "checkpoints")}
    best = folder / "checkpoints" / checkpoint.BEST
    of = checkpoint.step_in(best)
    if of is not None:
        steps[best] = of  # it may be the only one that is good
    for path, step in steps.items():
        with suppress(OSError):  # it was removed in between
            status = path.stat()
            files.append((step, path.name, [status.st_ino, status.st_size, status.st_mtime_ns]))
    written, summary = (or_nothing(partial(read_json, folder / name)) for name in ("config.json", "summary.json"))
    settings = adopted(settings, written)
    unlike = differences(written, settings) if written and (files or summary) else {}
    had, has = in_words(unlike), in_words({name: settings[name] for name in unlike})
    cure = f"give {had}, or another --run-dir"
    return {
        "exists": bool(written),
        "result": (folder / "summary.json").exists(),
        "files": files,
        "other": f"it holds a run with {had}, and this run has {has}: {cure}" if unlike else "",
        "summary": summary if written and _has_ended(folder, summary, settings, size) else None,
    }


def _has_ended(folder: Path, summary: Mapping[str, Any], settings: Mapping[str, Any], size: int) -> bool:
    """Return whether a run was completed as these settings ask; ``False`` for summaries of older versions."""
    step = StepSection(batch_size=settings["batch_size"], global_batch_size=settings["global_batch_size"])
    return (
        summary.get("planned") == {name: settings[name] for name in PLANNED}
        and summary.get("global_batch") == step.global_batch(settings["virtual_ranks"] or size)
        and {"steps", "val_accuracy", "samples_per_second", "weights_sha256"} <= summary.keys()
        and step_of(folder / "model.safetensors") == summary["steps"]
    )


def _say_who_sees(folder: Path, exists: Sequence[bool], rank: int) -> None:
    if rank == 0 and any(exists) and not all(exists):
        ranks = ", ".join(str(number) for number, there in enumerate(exists) if there)
        log.warning(
            "--run-dir %r holds the run only for rank %s of %d: the others are sent the checkpoint; a disk that all hosts "
            "share keeps it when that host is lost",
            str(folder),
            ranks,
            len(exists),
        )


def _go_on(
    folder: Path, files: Sequence[_File], settings: Mapping[str, Any], backend: Backend, *, has_result: bool
) -> Start:
    """Take the newest checkpoint that is good; without one, begin, unless there is a result. Collective."""
    problems: list[str] = []
    tried: list[Sequence[int]] = []
    for file in sorted(files, key=lambda file: (-file.step, file.rank)):
        if file.identity in tried:
            continue  # on a shared disk every rank sees it
        tried.append(file.identity)
        saved, problem = _send(folder, file.name, file.rank, backend)
        if saved is None:
            problems.append(problem)
            continue
        try:
            compare_with_checkpoint(saved, settings)
        except UserError as error:
            raise UserError(str(error), shared=True) from error
        sent = all(other.rank or other.identity != file.identity for other in files)
        by = f", sent by rank {file.rank} of {backend.size}" if sent else ""
        path = folder / "checkpoints" / file.name
        _say(backend, f"going on from step {file.step}, since {path} is the newest good checkpoint{by}", problems)
        return Start(saved, _copies(folder, file, saved, backend) if sent else {})
    if has_result:
        raise UserError(
            f"--run-dir {str(folder)!r} holds the summary of a run and no good checkpoint to go on from: choose another "
            "folder",
            shared=True,
        )
    found = "no good checkpoint" if problems else "no checkpoint"
    _say(backend, f"beginning at step 0, since {folder} holds {found}", problems)
    return Start()


def _send(folder: Path, name: str, owner: int, backend: Backend) -> tuple[dict[str, Any] | None, str]:
    """Read a checkpoint on rank ``owner``; return it on every rank, or in what way it is damaged. Collective.

    Raises:
        UserError: on every rank; it cannot be read at the moment, and may be good.
    """
    answer: tuple[dict[str, Any] | None, str, bool] = (None, "", True)
    if backend.rank == owner:
        try:
            answer = (checkpoint.load(folder / "checkpoints" / name), "", True)
        except UserError as error:
            answer = (None, str(error), isinstance(error, checkpoint.DamagedError))
    saved, problem, damaged = backend.broadcast_object(answer, root=owner, name="checkpoint")
    if not damaged:
        raise UserError(problem, shared=True)
    return saved, problem


def _copies(folder: Path, file: _File, saved: dict[str, Any], backend: Backend) -> dict[str, dict[str, Any]]:
    """Return the checkpoints that rank 0 needs files of: ``saved``, and the best before it. Collective."""
    copies = {file.name: saved}
    best = saved["cursor"].get("best")
    if isinstance(best, dict) and best.get("step", file.step) != file.step:
        found, _ = _send(folder, checkpoint.BEST, file.rank, backend)
        if found is not None:
            copies[checkpoint.BEST] = found
    return copies


def _say(backend: Backend, what: str, problems: Sequence[str] = ()) -> None:
    """Print one line, and those of checkpoints that were passed over. On rank 0 alone."""
    if backend.rank == 0:
        for line in (f"--resume {AUTO}: {what}", *(f"passed over: {problem}" for problem in problems)):
            show(line)
