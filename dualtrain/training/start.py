"""Find where a run starts: at step 0 or from a checkpoint.

With ``--resume auto``, one command line is enough for the first start of a run and for every restart. Each rank reports
what it sees in the run's folder. The newest good checkpoint of any rank is used, and that rank sends it, so that hosts
need no common disk. A run that has ended is not trained again. ``--resume auto`` is not needed in a restart of the job that
made the run or that was the last to resume it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dualtrain.backends import Backend, job_of
from dualtrain.config import AUTO, OutputSection, StepSection
from dualtrain.console import show_progress
from dualtrain.errors import UserError
from dualtrain.files import absolute, or_nothing, read_json
from dualtrain.launchers import World
from dualtrain.on_ranks import on_all_ranks, on_rank_zero
from dualtrain.run_folder import checkpoint
from dualtrain.run_folder.folder_lock import FolderLock
from dualtrain.run_folder.restarts import check_restart, settings_hash
from dualtrain.run_folder.run_dir import enter, has_weights
from dualtrain.training.results import PLANNED, done_line
from dualtrain.training.resume import (
    adopted,
    compare_with_checkpoint,
    differences,
    in_words,
    read_checkpoint,
    with_its_weights,
)

log = logging.getLogger("dualtrain")
#: How many runs this process has started, by job: the number is added to the job name of each run after the first. A
#: restarted process counts from 0 again, so that its runs get the same names.
_runs: Counter[str] = Counter()


@dataclass(frozen=True)
class Start:
    """Start of a run: at step 0, unless there is a checkpoint or a summary.

    Attributes:
        output: the output section, with ``run_dir`` and ``resume`` as rank 0 has found them, and absolute paths.
        saved: the checkpoint from which the run resumes; ``None`` for a start at step 0, and for a run that has ended.
        copies: checkpoints to be copied into rank 0's folder, by file name.
        summary: the summary of a run that has ended; ``None`` for all other runs.
        runs: the folder that contains the folders of runs without ``--run-dir``.
        settings_hash: a hash of the settings of this start, as its command line gives them.
    """

    output: OutputSection
    saved: dict[str, Any] | None = None
    copies: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    runs: Path = field(default_factory=lambda: absolute("runs"))
    settings_hash: str = ""


@dataclass(frozen=True)
class _File:
    """A checkpoint that ``rank`` sees. Ranks that see the same file have equal values of ``identity``.

    ``generation`` is the generation that wrote the file (see ``run_folder/generation.py``); 0 if it is unknown. ``digest``
    is equal for files of equal content; empty for a file that cannot be read.
    """

    step: int
    rank: int
    name: str
    generation: int
    digest: str
    identity: Sequence[int]


def start_of(output: OutputSection, name: str, settings: Mapping[str, Any], backend: Backend, lock: FolderLock) -> Start:
    """Lock the folder of an existing run, and find where the run starts. Collective; blocks.

    With ``--resume auto``, a missing folder is made and locked too.

    Args:
        output: names the run's folder, and what to resume from.
        name: the run's name. The name of a new folder begins with it.
        settings: all settings of this run by name.
        backend: communicates with the other ranks.
        lock: rank 0's lock of the folder.

    Raises:
        UserError: on every rank; the folder or the checkpoint cannot be used, or is of a run with other settings; or
            the run would end like the last time.
    """
    world, output = backend.world, output.located()
    folder, resume = on_rank_zero(backend, "run folder", lambda: _enter(output, name, settings, world, lock))
    opened = replace(output, run_dir=output.run_dir or folder, resume=resume)
    if resume is None:
        start = Start(opened)
    elif resume == AUTO:
        trigger = f"--resume {AUTO}" if output.resume == AUTO else f"restart of job {lock.job}"
        start = _find_start(opened, settings, backend, trigger, from_file=output.resume not in (None, AUTO))
    else:
        start = Start(opened, on_rank_zero(backend, "checkpoint", lambda: read_checkpoint(opened, settings)))
    return replace(start, settings_hash=settings_hash(settings))


def _enter(
    output: OutputSection, name: str, settings: Mapping[str, Any], world: World, lock: FolderLock
) -> tuple[str | None, str | None]:
    """Set ``lock.job``, call :func:`enter`, and refuse a run that would end like the last time. On rank 0 only."""
    job = job_of(world, settings["timeout"])
    if job:
        _runs[job] += 1
        lock.job = job if _runs[job] == 1 else f"{job}.{_runs[job]}"
    folder, resume = enter(output, name, lock, settings["timeout"])
    check_restart(replace(output, run_dir=folder, resume=resume), settings, lock)
    return folder, resume


def _find_start(
    output: OutputSection, settings: Mapping[str, Any], backend: Backend, trigger: str, *, from_file: bool
) -> Start:
    """Find the summary of an ended run, or the newest good checkpoint that any rank sees; print what was found. Collective.

    Args:
        output: names the run's folder.
        settings: all settings of this run by name.
        backend: communicates with the other ranks.
        trigger: the flag or the restart that causes the search; the printed line begins with it.
        from_file: whether the command line has ``--resume FILE``. This is then a restart of a run that began from that
            file, so it must not begin at step 0.

    Raises:
        UserError: on every rank, if a rank's folder cannot be read now, or holds a run with other settings, or a run that
            cannot begin at step 0 and has no good checkpoint.
    """
    assert output.run_dir is not None
    folder = Path(output.run_dir)
    mine = on_all_ranks(backend, "run folder", lambda: _look(folder, settings, backend.size))
    seen = backend.allgather_object(mine, name="run folder")
    _warn_of_missing_folders(folder, [one["exists"] for one in seen], backend.rank)
    for rank, one in enumerate(seen):
        if one["other"]:
            raise UserError(f"--run-dir {str(folder)!r} on rank {rank} of {backend.size}: {one['other']}", shared=True)
    rank, summary = next(((rank, one["summary"]) for rank, one in enumerate(seen) if one["summary"] is not None), (0, None))
    if summary is not None:
        seen_by = f" (rank {rank} of {backend.size} has the summary)" if rank else ""
        _print_start(
            backend,
            trigger,
            f"the run in {folder} has ended after step {summary['steps']}{seen_by}: nothing is left to train",
        )
        if backend.rank == 0:
            show_progress(done_line(summary, folder))
        return Start(output, summary=summary)
    files = [_File(step, rank, *more) for rank, one in enumerate(seen) for step, *more in one["files"]]
    obstacle = "a run that did not begin at step 0" if from_file else ""
    if any(one["result"] for one in seen):
        obstacle = "the summary of a run"
    return Start(output, *_newest(folder, files, settings, backend, trigger, obstacle))


def _look(folder: Path, settings: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return what this rank sees of a run in ``folder``, as plain values. Raises OSError if it cannot be read."""
    files = []
    for path, step in checkpoint.with_best(folder / "checkpoints").items():
        with suppress(OSError):  # the file was removed after it had been listed
            status = path.stat()
            identity = [status.st_ino, status.st_size, status.st_mtime_ns]
            files.append((step, path.name, *checkpoint.generation_in(path), identity))
    written, summary = (or_nothing(partial(read_json, folder / name)) for name in ("config.json", "summary.json"))
    if written and written.get("lr_batch") is None:
        # Versions before 0.3.0 did not write a default ``lr_batch``. Don't compare it here: ``compare_with_checkpoint``
        # computes it from the checkpoint, and compares it.
        written = {**written, "lr_batch": settings["lr_batch"]}
    settings = adopted(settings, written)
    unlike = differences(written, settings) if written and (files or summary) else {}
    had, has = in_words(unlike), in_words({name: settings[name] for name in unlike})
    cure = f"give {had}, or another --run-dir{with_its_weights(folder, unlike)}"
    return {
        "exists": bool(written),
        "result": (folder / "summary.json").exists(),
        "files": files,
        "other": f"it holds a run with {had}, and this run has {has}: {cure}" if unlike else "",
        "summary": summary if written and _has_ended(folder, summary, settings, size) else None,
    }


def _has_ended(folder: Path, summary: Mapping[str, Any], settings: Mapping[str, Any], size: int) -> bool:
    """Return whether the run has completed what these settings request, and its model is there.

    ``False`` for summaries of older versions.
    """
    step = StepSection(batch_size=settings["batch_size"], global_batch_size=settings["global_batch_size"])
    return (
        summary.get("planned") == {name: settings[name] for name in PLANNED}
        and summary.get("global_batch") == step.global_batch(settings["virtual_ranks"] or size)
        and {"steps", "val_accuracy", "samples_per_second", "weights_sha256"} <= summary.keys()
        and has_weights(folder / "model.safetensors", summary["steps"], summary["weights_sha256"])
    )


def _warn_of_missing_folders(folder: Path, exists: Sequence[bool], rank: int) -> None:
    if rank == 0 and any(exists) and not all(exists):
        ranks = ", ".join(str(number) for number, there in enumerate(exists) if there)
        log.warning(
            "--run-dir %r contains the run only on rank %s of %d: the other ranks receive the checkpoint; use a disk that "
            "all hosts share, so that the run survives a failed host",
            str(folder),
            ranks,
            len(exists),
        )


def _newest(
    folder: Path, files: Sequence[_File], settings: Mapping[str, Any], backend: Backend, trigger: str, obstacle: str
) -> tuple[dict[str, Any] | None, dict[str, dict[str, Any]]]:
    """Return the newest good checkpoint, and the checkpoints to be copied into rank 0's folder. Collective.

    For a start at step 0, return ``None`` and no checkpoints. Print where the run starts.

    ``obstacle`` says what in the folder forbids a start at step 0; it is empty if such a start is allowed.

    Raises:
        UserError: on every rank, if there is no good checkpoint and ``obstacle`` is not empty, if the newest good one has
            other settings, or if a checkpoint cannot be read now.
    """
    problems: list[str] = []
    tried: list[Sequence[int]] = []
    for file in sorted(files, key=lambda file: (-file.step, -file.generation, file.rank)):
        if file.identity in tried:
            continue  # on a shared disk, every rank sees the same file
        tried.append(file.identity)
        saved, problem = _send(folder, file.name, file.rank, backend)
        if saved is None:
            problems.append(problem)
            continue
        path = folder / "checkpoints" / file.name
        problem = checkpoint.problem_of_name(path, saved, file.step)
        if problem:
            problems.append(problem)
            continue
        try:
            compare_with_checkpoint(saved, settings, folder)
        except UserError as error:
            raise UserError(str(error), shared=True) from error
        _warn_of_different_checkpoints(file, files, backend)
        sent = all(other.rank or other.identity != file.identity for other in files)
        sender = f", sent by rank {file.rank} of {backend.size}" if sent else ""
        what = f"resuming from step {file.step}, since {path} is the newest good checkpoint{sender}"
        _print_start(backend, trigger, what, problems)
        return saved, _copies(folder, file, saved, backend) if sent else {}
    if obstacle:
        raise UserError(
            f"--run-dir {str(folder)!r} holds {obstacle}, but no good checkpoint to resume from: choose another folder",
            shared=True,
        )
    found = "no good checkpoint" if problems else "no checkpoint"
    _print_start(backend, trigger, f"beginning at step 0, since {folder} holds {found}", problems)
    return None, {}


def _warn_of_different_checkpoints(file: _File, files: Sequence[_File], backend: Backend) -> None:
    """Warn if two ranks hold different checkpoints of one step: hosts without a common disk may hold two runs."""
    same = (other for other in files if (other.step, other.generation) == (file.step, file.generation) and other.digest)
    second = next((other for other in same if other.digest != file.digest), None)
    if second is not None and backend.rank == 0:
        log.warning(
            "rank %d and rank %d hold different checkpoints of step %d in their folders: the one of rank %d is used",
            *(file.rank, second.rank, file.step, file.rank),
        )


def _send(folder: Path, name: str, owner: int, backend: Backend) -> tuple[dict[str, Any] | None, str]:
    """Read a checkpoint on rank ``owner``; return it, or what is wrong with it, on every rank. Collective.

    Raises:
        UserError: on every rank, if the checkpoint cannot be read now, but may be good.
    """
    answer: tuple[dict[str, Any] | None, str, bool] = (None, "", False)
    if backend.rank == owner:
        try:
            answer = (checkpoint.load(folder / "checkpoints" / name), "", False)
        except UserError as error:
            answer = (None, str(error), not isinstance(error, checkpoint.DamagedError))
    saved, problem, may_be_good = backend.broadcast_object(answer, root=owner, name="checkpoint")
    if may_be_good:
        raise UserError(problem, shared=True, transient=True)
    return saved, problem


def _copies(folder: Path, file: _File, saved: dict[str, Any], backend: Backend) -> dict[str, dict[str, Any]]:
    """Return the checkpoints that rank 0 must write: ``saved``, and the best checkpoint before it. Collective."""
    copies = {file.name: saved}
    best = saved["cursor"].get("best")
    if isinstance(best, dict) and best.get("step", file.step) != file.step:
        found, _ = _send(folder, checkpoint.BEST, file.rank, backend)
        if found is not None:
            copies[checkpoint.BEST] = found
    return copies


def _print_start(backend: Backend, trigger: str, what: str, problems: Sequence[str] = ()) -> None:
    """Print where the run starts, and a warning for each checkpoint that was skipped. On rank 0 alone."""
    if backend.rank == 0:
        show_progress(f"{trigger}: {what}")
        for problem in problems:
            log.warning("skipped: %s", problem)
