"""The results of a run: the weights, the description of the task, and the summary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dualtrain.config import OutputSection
from dualtrain.data import Task
from dualtrain.errors import NotSavedError
from dualtrain.files import cure_of, names_in, without_nan, write_json
from dualtrain.on_ranks import on_rank_zero
from dualtrain.run_folder import checkpoint
from dualtrain.run_folder.folder_lock import FolderLock
from dualtrain.run_folder.run_dir import write_weights
from dualtrain.state import weights_sha256
from dualtrain.trainer.trainer import Trainer
from dualtrain.training.cursor import Cursor

#: Settings that decide when a run ends. A resumed run may change them, so the summary records their values.
PLANNED = ("epochs", "max_steps", "early_stop", "best")


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copy the evaluated model's weights to the CPU, with running statistics averaged over the ranks. Collective."""
    model = trainer.evaluated
    with trainer.common_buffers():
        # Copies, since safetensors refuses tensors that share memory (tied weights).
        tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def write_task(folder: Path, task: Task, lock: FolderLock) -> None:
    """Write ``task.json``: the shape of an input, the classes, and the kind of task. Raises OSError, or SupersededError."""
    names = list(task.names) if task.names is not None else None
    values = {"shape": list(task.shape), "classes": task.classes, "kind": task.kind, "class_names": names}
    write_json(folder / "task.json", values, lock.check)


def summarize(
    trainer: Trainer,
    cursor: Cursor,
    weights: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    origin: Mapping[str, Any],
    **entries: Any,
) -> dict[str, Any]:
    """Return the summary of a run that has ended, as ``summary.json`` holds it.

    Args:
        trainer: the run's trainer.
        cursor: the position at the end.
        weights: the model's weights.
        settings: all settings of the run by name.
        origin: backend, ranks, command and other facts about the run's origin, by name.
        entries: further entries.
    """
    return {
        **origin,
        "virtual_ranks": trainer.virtual_ranks,
        "amp": settings["amp"],
        "threads": torch.get_num_threads(),
        "epochs": cursor.epoch,
        "steps": cursor.step,
        "planned": {name: settings[name] for name in PLANNED},
        "settings": dict(settings),
        **without_nan(cursor.last),
        "best": {**cursor.best, "epoch": cursor.best["epoch"] + 1} if cursor.best else {},
        "samples_per_second": cursor.speed,
        "seconds": cursor.seconds,
        **entries,
        "weights_sha256": weights_sha256(weights),
    }


def done_line(summary: Mapping[str, Any], folder: Path) -> str:
    """Format the last line of a run's output."""
    return (
        f"done: val accuracy {summary['val_accuracy']:.4f}, {summary['samples_per_second']:.0f} samples/s, "
        f"weights {summary['weights_sha256'][:16]}, in {folder}"
    )


def write_results(
    trainer: Trainer,
    folder: Path,
    weights: dict[str, torch.Tensor],
    summary: dict[str, Any],
    unwritten: Callable[[], dict[str, OSError]],
    lock: FolderLock,
    output: OutputSection,
) -> None:
    """Write the model and the summary, on rank 0. Collective.

    Args:
        trainer: the run's trainer.
        folder: the run's folder.
        weights: the model's weights.
        summary: the run's summary.
        unwritten: returns what the last write of a checkpoint could not write, and why; called on rank 0.
        lock: the folder's lock.
        output: the run's output section.

    Raises:
        UserError: on every rank, if another process uses the folder now; nothing more is written.
        NotSavedError: on every rank, if the model, the summary, the last checkpoint or the best evaluation's files could
            not be written.
    """

    def write() -> tuple[list[str], str]:
        problems = _write(folder, weights, summary, unwritten(), lock)
        said = [f"{name} ({error.strerror or error})" for name, error in problems.items()]
        return said, way_to_continue(output, folder, problems.values()) if problems else ""

    problems, cure = on_rank_zero(trainer.backend, "summary", write)
    if problems:
        raise NotSavedError(
            f"the training ended after step {summary['steps']}, and {', '.join(problems)} could not be written in "
            f"{folder}: {cure}"
        )


def way_to_continue(output: OutputSection, folder: Path, errors: Iterable[OSError]) -> str:
    """Describe how to continue the run in ``folder`` after the ``errors`` of writes into it."""
    resume = f"continue from the last saved checkpoint with {output.again(folder)}"
    saved = True
    with suppress(OSError):  # if the folder cannot be read now, it may contain checkpoints
        if not names_in(folder):  # it contains at least the file of this process's generation
            return f"the folder was moved or removed: move it back, then {resume}; if it was removed, start anew"
        saved = bool(checkpoint.with_best(folder / "checkpoints"))
    cures = ", ".join(dict.fromkeys(map(cure_of, errors)))
    return f"{cures}, then {resume if saved else 'start again with the same command, since no checkpoint was saved'}"


def _write(
    folder: Path,
    weights: dict[str, torch.Tensor],
    summary: dict[str, Any],
    unwritten: Mapping[str, OSError],
    lock: FolderLock,
) -> dict[str, OSError]:
    """Write the files; return what could not be written, and why.

    The summary marks the run as ended, so it is written last, and only if nothing has failed.
    """
    problems = dict(unwritten)
    writes: dict[str, Callable[[Path], None]] = {
        "model.safetensors": lambda path: write_weights(path, weights, summary["steps"], lock),
        "summary.json": lambda path: write_json(path, summary, lock.check),
    }
    for name, write in writes.items():
        if name == "summary.json" and problems:
            break
        try:
            write(folder / name)
        except OSError as error:
            problems[name] = error
    return problems
