"""Cases of training with virtual ranks, and hashes of their results. The hashes must be the same in every world."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional

from dualtrain import Trainer
from tests.models_for_tests import CLASSES, seeded, small_buckets


class ConvNet(nn.Module):
    """Model for images (n, 3, 6, 6), with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(64, 8),
            nn.BatchNorm1d(8, momentum=None),  # momentum=None: updates depend on num_batches_tracked
            nn.Linear(8, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # BatchNorm refuses a shard of one sample, which has no variance: add a row for each sample.
        return self.layers(torch.cat([x, x.flip(3)]))[: len(x)]


class Statistics(nn.Module):
    """Model for inputs (n, …), with BatchNorm and dropout."""

    def __init__(self, inputs: int = 4, outputs: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(self.linear(x.flatten(1)), self.dropout, self.training)
        # BatchNorm refuses a shard of one sample, which has no variance: add a row for each sample.
        return self.norm(torch.cat([hidden, hidden.square()]))[: len(x)]


class Transformer(nn.Module):
    """Model for tokens (n, length). Its embedding and output layer share their weights."""

    def __init__(self, length: int = 5, tokens: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, tokens, bias=False)
        self.head.weight = self.embedding.weight
        # Averaging three equal copies of this buffer changes its values by rounding, so a test fails if a constant buffer
        # is averaged.
        self.register_buffer("position", torch.linspace(0.1, 1.7, length * 8).view(length, 8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(x) + self.position))


def text(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a small language model, for ``--model tests.training.virtual:text``."""
    return Transformer(shape[0], classes)


def dropout_net(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a classifier with dropout and BatchNorm, for ``--model tests.training.virtual:dropout_net``."""
    return Statistics(torch.Size(shape).numel(), classes, 0.3)


class Relative(nn.Linear):
    """A layer whose outputs depend on the other samples of a batch, in evaluation too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x.flatten(1))
        return hidden - hidden.mean(0)


def relative(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a classifier whose outputs depend on the whole batch, for ``--model tests.training.virtual:relative``."""
    return Relative(torch.Size(shape).numel(), classes)


class Branches(nn.Module):
    """Model for vectors (n, 4), with a running mean of its inputs; one layer is frozen, one rarely used, one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, CLASSES)
        self.frozen, self.rare, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.lerp_(x.mean(0), 0.1)
        hidden = self.frozen(self.first(x))
        return self.last(self.rare(hidden) if x[0, 0] > 0.5 else hidden)


class Drawing(nn.Module):
    """Model whose forward, in training, draws random numbers from torch, numpy and Python, and stores them in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, CLASSES)
        self.register_buffer("drawn", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.drawn = torch.tensor([torch.rand(()).item(), numpy.random.random(), random.random()])
        return self.linear(x) * self.drawn.sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """One training: its model, its batches, and the trainer's options.

    Attributes:
        shards: the number of virtual ranks.
        model: builds the model.
        shape: the shape of one sample's inputs; empty for sequences of tokens.
        accumulate: the number of backward passes per shard.
        optimizer: makes the optimizer for a model.
        options: further arguments of the trainer.
        dtype: the dtype of the model, and of inputs that are not tokens.
    """

    shards: int
    model: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4,)
    accumulate: int = 1
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


#: Sample counts of the batches. With 4 or more shards, some shards of the third batch are empty.
SIZES = 13, 8, 3
CASES = {
    "convnet": Case(4, ConvNet, (3, 6, 6), options={"ema": 0.9, "clip_norm": 0.5}),
    "transformer": Case(3, Transformer, (), 2, adamw, {"clip_norm": 1.0}),
    "branches": Case(6, Branches),
    "bf16": Case(7, ConvNet, (3, 6, 6), 3, options={"amp": "bf16"}),
    "fp16": Case(4, ConvNet, (3, 6, 6), optimizer=adamw, options={"amp": "fp16"}),
    "narrow": Case(4, Branches, (4,), 3, options={"ema": 0.5}, dtype=torch.bfloat16),
    "drawing": Case(3, Drawing),
    "double": Case(2, Statistics, accumulate=2, dtype=torch.float64),
}


def batch(case: Case, key: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a global batch, the same on every rank."""
    generator = torch.Generator().manual_seed(3000 + key)
    if not case.shape:
        return tuple(torch.randint(11, (2, samples, 5), generator=generator))  # type: ignore[return-value]
    inputs = torch.randn(samples, *case.shape, generator=generator).to(case.dtype)
    return inputs, torch.randint(3, (samples,), generator=generator)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())


def passes(shard: Any, accumulate: int) -> Any:
    """Split a shard into ``accumulate`` batches, one per backward pass, or fewer if the shard has fewer samples.

    Return ``None`` if the shard is ``None``, because it is empty.
    """
    if shard is None:
        return None
    count = min(accumulate, len(shard[1]))
    return list(zip(*(part.tensor_split(count) for part in shard), strict=True))


def trainer_of(backend: Any, case: Case, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = seeded(case.model()).to(case.dtype)
    options = {**case.options, **options}
    return Trainer(model, case.optimizer(model), loss, backend=backend, virtual_ranks=case.shards, seed=5, **options)


def step(trainer: Trainer, case: Case, number: int) -> list[float]:
    """Take step ``number`` with the batch of that number; return ``Step.totals``."""
    samples = SIZES[number % len(SIZES)]
    parts = [passes(shard, case.accumulate) for shard in trainer.split(batch(case, number, samples))]
    return trainer.step(parts, float(samples)).totals


def evaluate(trainer: Trainer, case: Case) -> dict[str, float]:
    inputs, targets = batch(case, -1, 2 * case.shards + 1)
    numbers = torch.arange(len(targets))
    parts = [numbers[shard :: case.shards] for shard in trainer.shards]
    return trainer.evaluate([[(inputs[part], targets[part])] for part in parts])


def hash_of(*values: Any) -> str:
    """Hash nested values, with every bit of the tensors in them."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add((str(key), value[key]))
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        else:
            found.update(repr(value).encode())

    add(values)
    return found.hexdigest()


def digest(trainer: Trainer, *values: Any) -> str:
    """Hash the parameters and buffers of a trainer, the states of its optimizer, GradScaler and EMA, and ``values``."""
    state = trainer.state_dict()
    kept = {name: state[name] for name in ("optimizer", "scaler", "ema")}
    return hash_of(dict(trainer.model.named_parameters()), dict(trainer.model.named_buffers()), kept, values)


def trained(backend: Any, names: tuple[str, ...]) -> dict[str, str]:
    """Train each of the cases ``names``; return, by name, a hash of the final state and all metrics."""
    results = {}
    for name in names:
        case = CASES[name]
        with small_buckets((1 << 8, 1 << 9)):
            trainer = trainer_of(backend, case)
            totals = [step(trainer, case, number) for number in range(len(SIZES))]
            results[name] = digest(trainer, totals, evaluate(trainer, case))
        trainer.close()
    return results
