"""What a run leaves for others: the weights, what they are for, and the summary."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dualtrain.data import Task
from dualtrain.state import averaged_buffers, weights_sha256
from dualtrain.training.run_dir import write_json, write_weights
from dualtrain.training.together import on_root
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
    """Writes the model and the summary; gives the summary on every rank. Collective."""
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

    def write() -> None:
        write_weights(run.folder / "model.safetensors", weights)
        write_json(run.folder / "summary.json", summary)

    on_root(backend, "summary", write)
    run.records.say(
        f"done: val accuracy {summary['val_accuracy']:.4f}, {summary['samples_per_second']:.0f} samples/s, "
        f"weights {summary['weights_sha256'][:16]}, in {run.folder}"
    )
    return summary
