"""The training loop. It knows a ``Backend`` and a ``DistributedOptimizer``, and never which backend it is on."""

from __future__ import annotations

import math
import os
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

from dualtrain.backends import Backend
from dualtrain.config import Config
from dualtrain.data import Data, load
from dualtrain.data.sampler import Sampler, share
from dualtrain.errors import DivergedError, UserError
from dualtrain.models import build
from dualtrain.optimizer import DistributedOptimizer
from dualtrain.state import average_buffers, broadcast_parameters, weights_sha256
from dualtrain.training import checkpoint
from dualtrain.training.evaluate import evaluate
from dualtrain.training.report import Progress
from dualtrain.training.run_dir import MetricsFile, claim, write_json, write_whole
from dualtrain.training.together import on_root, together


@dataclass
class Cursor:
    """How far a run has come: plain numbers, kept in checkpoints."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # global batches of this epoch that are done
    seconds: float = 0.0
    samples: int = 0
    loss_sum: float = 0.0  # over the samples of this epoch so far
    correct: float = 0.0
    seen: float = 0.0
    last: dict[str, float] = field(default_factory=dict)  # what the last full epoch came to


def train(config: Config, backend: Backend) -> dict[str, Any]:
    """Trains as ``config`` says and gives the summary, on every rank. Collective.

    Raises:
        UserError: something in the configuration cannot be done here.
        DivergedError: the loss became infinite or not a number.
        BackendError: the ranks lost each other.
    """
    torch.set_num_threads(_threads(backend))
    data = together(backend, "data", lambda: load(config.dataset, config.data_dir))
    torch.manual_seed(config.seed)
    model = together(backend, "model", lambda: build(config.model, data.shape, data.classes)).to(backend.device)
    saved = on_root(backend, "checkpoint", lambda: checkpoint.to_resume(config)) if config.resume is not None else None
    folder = Path(on_root(backend, "run folder", lambda: claim(config)))
    run = Run(config, backend, data, model, folder)
    if saved is not None:
        run.resume(saved)
    return run.train()


class Run:
    """One run, from its start or its last checkpoint to its summary."""

    def __init__(self, config: Config, backend: Backend, data: Data, model: nn.Module, folder: Path) -> None:
        self.config = config
        self.backend = backend
        self.train_split, self.val_split = data.train.to(backend.device), data.val.to(backend.device)
        self.model = model
        self.folder = folder
        self.is_root = backend.rank == 0
        self.sampler = Sampler(len(data.train), config.global_batch(backend.size), config.seed)
        self.cursor = Cursor()
        broadcast_parameters(model, backend)
        # Four numbers travel with the gradients: loss, correct answers, samples, ranks whose loss is not finite.
        self.optimizer = DistributedOptimizer(
            _make_optimizer(config, model), model.named_parameters(), backend=backend, carry=4
        )
        steps = config.epochs * self.sampler.batches
        self.total_steps = min(steps, config.max_steps) if config.max_steps else steps

    def train(self) -> dict[str, Any]:
        """The steps that are left, then the model and the summary."""
        cursor = self.cursor
        metrics = MetricsFile(self.folder, cursor.step) if self.is_root else nullcontext()
        with metrics as self.metrics, self._progress() as self.progress:
            self.progress.say(self._opening_line())
            while cursor.step < self.total_steps:
                started = time.perf_counter()
                loss = self._step()
                cursor.seconds += time.perf_counter() - started
                self.progress.step(loss)
                if cursor.step % self.config.log_every == 0:
                    self._write(kind="step", loss=loss, lr=self.optimizer.param_groups[0]["lr"])
                if cursor.batch == self.sampler.batches or cursor.step == self.total_steps:
                    self._end_epoch()
                    self._save()
                elif self.config.checkpoint_every and cursor.step % self.config.checkpoint_every == 0:
                    average_buffers(self.model, self.backend)
                    self._save()
        return self._finish()

    def _step(self) -> float:
        """One optimizer step on one global batch; gives its mean loss."""
        cursor, optimizer = self.cursor, self.optimizer
        batch = self.sampler.batch(cursor.epoch, cursor.batch)
        mine = share(batch, self.backend.rank, self.backend.size)
        optimizer.zero_grad()
        optimizer.cargo.zero_()
        if len(mine):
            logits = self.model(self.train_split.inputs[mine])
            targets = self.train_split.targets[mine]
            loss = functional.cross_entropy(logits, targets)
            value, correct = loss.item(), float((logits.detach().argmax(1) == targets).sum())
            optimizer.cargo.copy_(torch.tensor([value * len(mine), correct, len(mine), not math.isfinite(value)]))
            # The ranks' gradients are averaged; the mean over the batch weighs each rank by its samples.
            (loss * (len(mine) * self.backend.size / len(batch))).backward()
        optimizer.synchronize()
        loss_sum, correct, seen, broken = optimizer.cargo.tolist()
        if broken:
            self._diverge("the loss became", here=bool(len(mine)) and not math.isfinite(value))
        optimizer.step()
        cursor.step, cursor.batch, cursor.samples = cursor.step + 1, cursor.batch + 1, cursor.samples + len(batch)
        cursor.loss_sum, cursor.correct = cursor.loss_sum + loss_sum, cursor.correct + correct
        cursor.seen += seen
        return float(loss_sum / seen)

    def _diverge(self, what: str, *, here: bool = False, everywhere: bool = False) -> NoReturn:
        """Ends the run on all ranks, naming those at fault."""
        step = self.cursor.step + (not everywhere)
        bad = self.backend.allgather_object(here or everywhere, name="divergence")
        ranks = [str(rank) for rank, at_fault in enumerate(bad) if at_fault]
        where = (
            "on all ranks" if len(ranks) == self.backend.size > 1 else f"on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        )
        saved = checkpoint.found(self.folder / "checkpoints") if self.is_root else []
        last = f"the last good checkpoint is {saved[0]}" if saved else "there is no checkpoint yet"
        raise DivergedError(
            f"{what} infinite or not a number in step {step} {where}; {last}; try a lower --lr (now {self.config.lr:g})"
        )

    def _end_epoch(self) -> None:
        cursor = self.cursor
        average_buffers(self.model, self.backend)
        val_loss, val_accuracy = evaluate(self.model, self.val_split, self.backend)
        if not math.isfinite(val_loss):
            self._diverge("the validation loss became", everywhere=True)
        cursor.last = {
            "train_loss": cursor.loss_sum / cursor.seen,
            "train_accuracy": cursor.correct / cursor.seen,
            "val_loss": val_loss,
            "val_accuracy": val_accuracy,
        }
        cursor.epoch, cursor.batch = (
            cursor.epoch + (cursor.batch == self.sampler.batches),
            cursor.batch % self.sampler.batches,
        )
        cursor.loss_sum = cursor.correct = cursor.seen = 0.0
        self._write(kind="epoch", **cursor.last, samples_per_second=self._speed())
        self.progress.say(
            f"epoch {cursor.epoch}/{self.config.epochs}  step {cursor.step}  "
            f"train loss {cursor.last['train_loss']:.4f}  val loss {val_loss:.4f}  "
            f"val accuracy {val_accuracy:.4f}  {self._speed():.0f} samples/s"
        )

    def _progress(self) -> Progress:
        launcher = self.backend.world.launcher
        return Progress(self.total_steps, self.cursor.step, shown=self.is_root, launcher=launcher)

    def _write(self, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(step=self.cursor.step, epoch=self.cursor.epoch, **values)

    def _speed(self) -> float:
        return self.cursor.samples / max(self.cursor.seconds, 1e-9)

    def _save(self) -> None:
        """Writes a checkpoint; the buffers have been averaged."""
        if not all(tensor.isfinite().all() for tensor in self.model.state_dict().values()):
            self._diverge("the weights became", everywhere=True)

        def write() -> None:
            tree = {
                "model": dict(self.model.state_dict()),
                "optimizer": self.optimizer.state_dict(),
                "cursor": asdict(self.cursor),
                "config": asdict(self.config),
                "global_batch": self.sampler.global_batch,
            }
            checkpoint.save(self.folder / "checkpoints", self.cursor.step, tree)

        on_root(self.backend, f"the checkpoint of step {self.cursor.step}", write)

    def resume(self, saved: dict[str, Any]) -> None:
        """Goes on from a checkpoint. Collective."""
        if saved["global_batch"] != self.sampler.global_batch:
            raise UserError(
                f"the checkpoint was trained with {saved['global_batch']} samples a step and this run has "
                f"{self.sampler.global_batch}: give --global-batch-size {saved['global_batch']}",
                shared=True,
            )
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.cursor = Cursor(**saved["cursor"])
        # Later checkpoints of this folder belong to a course that is not taken: kept, but not gone on from.
        on_root(self.backend, "checkpoints", lambda: checkpoint.set_aside(self.folder / "checkpoints", self.cursor.step))

    def _finish(self) -> dict[str, Any]:
        cursor, backend = self.cursor, self.backend
        summary: dict[str, Any] = {
            "backend": backend.name,
            "transport": backend.transport,
            "launcher": backend.world.launcher,
            "world_size": backend.size,
            "device": str(backend.device),
            "threads": torch.get_num_threads(),
            "epochs": cursor.epoch,
            "steps": cursor.step,
            **cursor.last,
            "samples_per_second": self._speed(),
            "seconds": cursor.seconds,
            "weights_sha256": weights_sha256(self.model),
        }

        def write() -> None:
            # Copies, since safetensors refuses tensors that share memory (tied weights).
            weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in self.model.state_dict().items()}
            write_whole(self.folder / "model.safetensors", safetensors.torch.save(weights))
            write_json(self.folder / "summary.json", summary)

        on_root(backend, "summary", write)
        if self.is_root:
            print(
                f"done: val accuracy {summary['val_accuracy']:.4f}, {summary['samples_per_second']:.0f} samples/s, "
                f"weights {summary['weights_sha256'][:16]}, in {self.folder}",
                flush=True,
            )
        return summary

    def _opening_line(self) -> str:
        backend, parameters = self.backend, sum(p.numel() for p in self.model.parameters())
        return (
            f"{self.config.recipe} on {backend.size} × {backend.device.type}, {backend.name} backend over "
            f"{backend.transport}, started by {backend.world.launcher}: {parameters} parameters, "
            f"{len(self.train_split)} samples in batches of {self.sampler.global_batch}, {self.total_steps} steps, "
            f"into {self.folder}"
        )


def _make_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    parameters = model.parameters()
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=config.lr, weight_decay=config.weight_decay)


def _threads(backend: Backend) -> int:
    """This host's cores, shared by its ranks. Not OMP_NUM_THREADS, which torchrun sets and horovodrun does not."""
    return max(1, len(os.sched_getaffinity(0)) // backend.local_size)
