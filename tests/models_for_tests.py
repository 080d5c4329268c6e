"""Small models with reproducible weights and batches, and the expected averages of their gradients."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from dualtrain import DistributedOptimizer
from dualtrain.gradients import layout

DEFAULT_BUCKETS = layout.FIRST_BUCKET_BYTES, layout.BUCKET_BYTES
SMALL_BUCKETS = 1 << 8, 1 << 11
CLASSES = 5
EXACT = {"rtol": 0, "atol": 0}


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    """Initialize ``model`` from a new generator, because ranks that are threads share torch's global generator."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            values = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.2
            p.copy_(torch.complex(values, values.flip(0)) if p.is_complex() else values)
    return model


def conv_net(seed: int = 0) -> nn.Module:
    """Build a network that maps images (n, 3, 8, 8) to logits, with enough weights for several small buckets."""
    return seeded(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(12 * 4 * 4, 16),
            nn.ReLU(),
            nn.Linear(16, CLASSES),
        ),
        seed,
    )


def perceptron(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build a network that maps vectors (n, 4) to vectors (n, 3)."""
    return seeded(nn.Sequential(nn.Linear(4, 6, dtype=dtype), nn.Tanh(), nn.Linear(6, 3, dtype=dtype)), seed)


def images(key: int, n: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + key)
    return torch.randn(n, 3, 8, 8, generator=generator), torch.randint(CLASSES, (n,), generator=generator)


def vectors(key: int, n: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2000 + key)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return (torch.complex(x, x.flip(0)) if dtype.is_complex else x).to(dtype)


def image_loss(model: nn.Module, key: int) -> torch.Tensor:
    x, y = images(key)
    return nn.functional.cross_entropy(model(x), y)


def vector_loss(model: nn.Module, key: int) -> torch.Tensor:
    return model(vectors(key, dtype=next(model.parameters()).dtype)).abs().square().mean()


def wrap(optimizer: torch.optim.Optimizer, model: nn.Module, backend, **options) -> DistributedOptimizer:
    return DistributedOptimizer(optimizer, model.named_parameters(), backend=backend, **options)


def sgd_of(model: nn.Module, momentum: float = 0.9, weight_decay: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay)


def sgd(model: nn.Module, backend, momentum: float = 0.9, weight_decay: float = 0.0, **options) -> DistributedOptimizer:
    return wrap(sgd_of(model, momentum, weight_decay), model, backend, **options)


def of_every_rank(backend, loss):
    """Return one function for each rank: given a model, it computes ``loss(model, rank)``."""
    return [lambda model, rank=rank: loss(model, rank) for rank in range(backend.size)]


def mean_gradients(model: nn.Module, losses: list[Callable[[nn.Module], torch.Tensor] | None]) -> list[torch.Tensor]:
    """Return the average of all ranks' gradients as dense tensors, computed on copies of ``model``.

    A rank whose loss is ``None`` has no backward pass. Its gradients are zero, like those of unused parameters.
    """
    totals = [torch.zeros(p.shape, dtype=p.dtype) for p in model.parameters()]
    for loss in losses:
        if loss is None:
            continue
        replica = copy.deepcopy(model)
        replica.zero_grad()
        loss(replica).backward()
        for total, p in zip(totals, replica.parameters(), strict=True):
            if p.grad is not None:
                total += p.grad.to_dense() if p.grad.is_sparse else p.grad
    return [total / len(losses) for total in totals]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return dense copies of the gradients."""
    return [p.grad.to_dense().clone() for p in model.parameters()]


def same_on_all(backend, tensors: list[torch.Tensor]) -> bool:
    """Return whether all ranks have the same bits in these tensors."""
    mine = torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors])
    rows = backend.allgather(mine[None])
    return bool((rows == rows[0]).all())


@contextmanager
def small_buckets(sizes: tuple[int, int] = SMALL_BUCKETS) -> Iterator[None]:
    """Limit buckets to a few parameters each.

    Ranks that are threads may enter this context concurrently. No rank may leave it before all ranks have made their
    buckets, because the first rank that leaves it restores the defaults for all.
    """
    layout.FIRST_BUCKET_BYTES, layout.BUCKET_BYTES = sizes
    try:
        yield
    finally:
        layout.FIRST_BUCKET_BYTES, layout.BUCKET_BYTES = DEFAULT_BUCKETS


def count_live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def dropout_net(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a classifier with BatchNorm and dropout, for ``--model tests.models_for_tests:dropout_net``."""
    inputs = torch.Size(shape).numel()
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, classes)
    )


def enormous(shape, classes):
    """Build a layer with more weights than fit into memory."""
    return nn.Linear(2**31, 2**29)
