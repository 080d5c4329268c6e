"""From settings to things: the data, the model and what computes it."""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dualtrain.backends import Backend
from dualtrain.batchnorm import SyncBatchNorm
from dualtrain.config import Config
from dualtrain.data import Batch, Task, load_data
from dualtrain.data.draws import derived
from dualtrain.data.options import LIMIT, NAMES
from dualtrain.errors import UserError
from dualtrain.models import build, fetch
from dualtrain.training.randomness import seed_all
from dualtrain.training.same_run import compare_task
from dualtrain.training.together import together

Forward = Callable[[torch.Tensor], torch.Tensor]


def load_task(config: Config, backend: Backend) -> Task:
    """The data. Where they must be downloaded, one rank of each host does, and the others wait for it. Collective."""
    options = {name: value for name, value in dataclasses.asdict(config).items() if name in NAMES}

    def load(download: bool) -> Task:
        return load_data(config.dataset, config.data_dir, **{**options, "download": download})

    fetched = None
    if config.download:
        first = backend.local_rank == 0
        fetched = together(backend, "download of the data", lambda: load(True) if first else None)
    task = together(backend, "data", lambda: _filled(fetched or load(False), config.dataset))
    compare_task(task, backend)
    return task


def _filled(task: Task, name: str) -> Task:
    for title, source in (("train on", task.train), ("evaluate on", task.val)):
        if not len(source):
            raise UserError(f"--dataset {name!r} has no samples to {title}: give some")
        if len(source) >= LIMIT:
            raise UserError(f"--dataset {name!r} has {len(source)} samples to {title}: give less than {LIMIT}")
    return task


@torch.no_grad()
def try_out(config: Config, task: Task, model: nn.Module) -> None:
    """Computes one sample, so that a model and data that do not fit are told before the run begins.

    Raises:
        UserError: they do not.
    """
    device = next(model.parameters()).device
    inputs, targets = next(task.val.stream([Batch(torch.zeros(1, dtype=torch.int64))], device))
    what = f"--model {config.model} and --dataset {config.dataset} do not fit"
    model.eval()
    try:
        outputs = model(inputs)
    except UserError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}, in {Path(frame.filename).name}:{frame.lineno}"
        raise UserError(f"{what}: a sample of shape {tuple(inputs.shape[1:])} raises {reason}; choose others") from error
    finally:
        model.train()
    if not isinstance(outputs, torch.Tensor) or outputs.shape[:-1] != targets.shape:
        shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        raise UserError(
            f"{what}: the model gives {shape} for targets of shape {tuple(targets.shape)}; it must give "
            "one row of logits each"
        )
    if targets.dtype != torch.int64 or bool(((targets != -100) & ((targets < 0) | (targets >= outputs.shape[-1]))).any()):
        raise UserError(
            f"{what}: targets must be class numbers, int64, from 0 to below the model's {outputs.shape[-1]}, and there is "
            f"{targets.flatten()[0].item()} ({str(targets.dtype).removeprefix('torch.')})"
        )


def make_model(config: Config, task: Task, backend: Backend) -> nn.Module:
    """The model, on this rank's device, the same on every rank if it draws its weights from torch. Collective."""
    if config.pretrained:
        first = backend.local_rank == 0
        together(backend, "download of the weights", lambda: str(fetch(config.model)) if first else None)
    seed_all(config.seed)
    model = together(
        backend,
        "model",
        lambda: build(
            config.model,
            task.shape,
            task.classes,
            pretrained=config.pretrained,
            freeze_backbone=config.freeze_backbone,
            weights=config.weights,
        ),
    )
    # From here on each rank draws numbers of its own, for dropout and the like.
    seed_all(derived(config.seed, "rank", backend.rank))
    if config.sync_batchnorm:
        synchronize_norms(model, backend)
    layout = torch.channels_last if config.channels_last else torch.preserve_format
    return model.to(device=backend.device, memory_format=layout)  # type: ignore[call-overload,no-any-return]


class RankNorm(SyncBatchNorm):
    """BatchNorm over the samples of all ranks of ``backend``, which a subclass names: copies of a layer share it.

    A channel of its own: a rank that has no gradients for some layers sends buckets at other times than the others.
    """

    backend: Backend
    title: str

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return self.backend.allgather(row[None], name=f"{self.title}.statistics")

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return self.backend.allreduce(values, "sum", name=f"{self.title}.gradient")


def synchronize_norms(model: nn.Module, backend: Backend) -> None:
    """Replaces the BatchNorm layers of ``model`` that train, in place; frozen ones (of another class) stay.

    Collective; blocks.
    """
    layers = [
        (title, layer)
        for title, layer in model.named_modules()
        if type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    ]
    if layers:
        kind: Any = type("RankNorm", (RankNorm,), {"backend": backend.channel()})
        for title, layer in layers:
            made = kind.convert_sync_batchnorm(layer)
            made.title = title
            parent, _, name = title.rpartition(".")
            setattr(model.get_submodule(parent), name, made)


def compiled(model: nn.Module) -> Forward:
    """``model`` through torch.compile, which works at the first call. Raises UserError there if it cannot."""
    fast = torch.compile(model)

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        try:
            outputs: torch.Tensor = fast(inputs)
        except torch._dynamo.exc.TorchDynamoException as error:  # the base of Inductor's errors too
            lines = str(error).strip().splitlines() or [""]  # "backend='inductor' raised:", and the reason below it
            reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
            raise UserError(f"--compile does not work with this model here ({reason}): leave it out") from error
        return outputs

    return forward


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Only operations whose results repeat bit for bit, for a while; torch raises where it has none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def threads(backend: Backend) -> int:
    """This host's cores, shared by its ranks. Not OMP_NUM_THREADS, which torchrun sets and horovodrun does not."""
    return max(1, len(os.sched_getaffinity(0)) // backend.local_size)
