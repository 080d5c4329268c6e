"""What a run leaves for others: the weights, what they are for, and the summary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dualtrain.data import Task
from dualtrain.errors import NotSavedError
from dualtrain.files import write_json
from dualtrain.state import averaged_buffers, weights_sha256
from dualtrain.training.on_ranks import on_root
from dualtrain.training.run_dir import write_weights
from dualtrain.training.trainer import Trainer

if TYPE_CHECKING:
    from dualtrain.training.loop import Run


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies on the CPU of the model that is evaluated, running statistics averaged over the ranks. Collective."""
    model = trainer.evaluated
    with averaged_buffers(model, trainer.backend):
        # Copies, since safetensors refuses tensors that share memory (tied weights).
        tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def write_task(folder: Path, task: Task) -> None:
    """``task.json``: what the model's inputs and outputs are."""
    names = list(task.names) if task.names is not None else None
    values = {"shape": list(task.shape), "classes": task.classes, "kind": task.kind, "class_names": names}
    write_json(folder / "task.json", values)


def conclude(run: Run) -> dict[str, Any]:
    """Writes the model and the summary; gives the summary on every rank. Collective.

    Raises:
        NotSavedError: on every rank, if the model, the summary or the last checkpoint could not be written.
    """
    backend, cursor, trainer = run.backend, run.cursor, run.trainer
    weights = weights_of(trainer)
    summary: dict[str, Any] = {
        "backend": backend.name,
        "transport": backend.transport,
        "launcher": backend.world.launcher,
        "world_size": backend.size,
        "device": str(backend.device),
        "amp": run.config.amp,
        "threads": torch.get_num_threads(),
        "epochs": cursor.epoch,
        "steps": cursor.step,
        "learning_rate": run.arithmetic,
        **cursor.last,
        "best": cursor.best,
        "samples_per_second": cursor.speed,
        "seconds": cursor.seconds,
        "weights_sha256": weights_sha256(weights),
    }

    problems = on_root(backend, "summary", lambda: _write(run, weights, summary))
    if problems:
        raise NotSavedError(
            f"the training ended after step {cursor.step}, and {', '.join(problems)} could not be written in {run.folder}: "
            f"free that place; the same command with --run-dir {run.folder} --resume goes on from the last checkpoint that "
            "was saved"
        )
    run.records.say(
        f"done: val accuracy {summary['val_accuracy']:.4f}, {summary['samples_per_second']:.0f} samples/s, "
        f"weights {summary['weights_sha256'][:16]}, in {run.folder}"
    )
    return summary


def _write(run: Run, weights: dict[str, torch.Tensor], summary: dict[str, Any]) -> list[str]:
    """Writes what is left of a run, on rank 0; gives what could not be written, each with the reason."""
    problems: list[str] = []
    failed = run.writer.failed
    if failed is not None:
        problems.append(f"the last checkpoint ({failed.strerror or failed})")
    steps: dict[str, Callable[[Path], None]] = {
        "model.safetensors": lambda path: write_weights(path, weights, run.cursor.step),
        "summary.json": lambda path: write_json(path, summary),
    }
    for name, write in steps.items():
        try:
            write(run.folder / name)
        except OSError as error:
            problems.append(f"{name} ({error.strerror or error})")
            break  # a summary is there only with its model
    return problems
