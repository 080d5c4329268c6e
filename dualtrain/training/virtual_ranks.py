"""Training as a job of V ranks would, on any number of ranks: the shards of a step, and the state that they start from.

A global batch is split into V shards. Each rank owns consecutive ones and computes them one after another. All that a shard
depends on is set before it: random numbers are seeded from (seed, step, shard), and running statistics have the values
that all shards of the step begin with. What the shards make of these is averaged over all of them, along the same tree
as the gradients. EasyScale (Li et al., SC 2023) and VirtualFlow (Or et al., MLSys 2022) are published relatives.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn

from dualtrain.backends import Backend
from dualtrain.backends.sum_order import sum_order
from dualtrain.data.draws import derived
from dualtrain.data.sampler import share
from dualtrain.errors import UserError
from dualtrain.training.common_buffers import CommonBuffers

log = logging.getLogger("dualtrain")

Tensors = tuple[torch.Tensor, torch.Tensor]
#: Of one shard: a batch, several batches (one backward pass each), or ``None`` for no samples.
ShardBatches = Tensors | Iterable[Tensors] | None


class VirtualRanks:
    """The shards of a trainer's steps that this rank owns, and what each begins with.

    Args:
        shards: their number, V.
        seed: of the random numbers.
        model: its buffers are the state that forward passes change.
        backend: the ranks.

    Attributes:
        order: which rank owns which shards, and the tree along which all sums are made.
        mine: the numbers of this rank's shards.
        steps: how many steps were begun: the next one's number.
        buffers: the running statistics.
    """

    def __init__(self, shards: int, seed: int, model: nn.Module, backend: Backend) -> None:
        self.order = sum_order(shards, backend.size)
        self.mine = self.order.ranges[backend.rank]
        self.steps = 0
        self.buffers = CommonBuffers(model)
        self._seed = seed
        self._device = backend.device
        if backend.size > shards and backend.rank == 0:
            log.warning(
                "ranks %d to %d have nothing to compute: there are %d virtual ranks; start fewer ranks, or give more "
                "virtual ones in a new run",
                shards,
                backend.size - 1,
                shards,
            )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Begin a step; where it fails, give the buffers the values that it began with."""
        self.buffers.keep()
        try:
            yield
        except BaseException:
            self.buffers.restore()
            raise
        self.steps += 1

    def begin_shard(self, shard: int) -> None:
        """Give buffers and generators the state that ``shard`` begins with in this step."""
        self.buffers.restore()
        self.seed(self.steps, shard)

    def seed(self, *parts: object) -> None:
        """Seed torch's generators (of the CPU and this rank's device), numpy's and Python's from the seed and ``parts``."""
        value = derived(self._seed, "shard", *parts)
        # Not torch.manual_seed, which takes long and seeds the other ranks' GPUs.
        torch.default_generator.manual_seed(value)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(value)
        numpy.random.seed(value % 2**32)
        random.seed(value)

    def flags(self, mine: Sequence[float], backend: Backend) -> Sequence[float]:
        """Return the numbers that this rank sends with its first shard, so that the sum is that of all ranks' ``mine``.

        Collective where some ranks own no shard, and so send nothing; not otherwise.
        """
        if backend.size <= self.order.shards:
            return mine
        total = backend.allreduce(torch.tensor(mine, dtype=torch.float64), "sum", name="control flags").tolist()
        return total if backend.rank == 0 else [0.0] * len(mine)

    def sum_of_shards(self, rows: torch.Tensor) -> torch.Tensor:
        """Add up ``rows``, one of each shard, along the tree; return the sum, of the shape of a row."""
        return sum_order(self.order.shards, 1).total(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return all state that no other object has: plain values and tensors, equal on every rank."""
        return {"shards": self.order.shards, "steps": self.steps, "seed": self._seed, "buffers": self.buffers.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.steps, self._seed = state["steps"], state["seed"]
        self.buffers.load_state_dict(state["buffers"])

    def split(self, batch: Tensors) -> list[Tensors | None]:
        """Return this rank's shards of a global batch, which every rank has; ``None`` for an empty one."""
        numbers = torch.arange(len(batch[1]))
        parts = [share(numbers, shard, self.order.shards) for shard in self.mine]
        return [(batch[0][part], batch[1][part]) if len(part) else None for part in parts]


def check_virtual_ranks(virtual: VirtualRanks | None, state: dict[str, Any]) -> None:
    """Raise UserError if ``state``, a trainer's, is of another number of virtual ranks, or of a trainer without them."""
    had = state["virtual_ranks"]["shards"] if "virtual_ranks" in state else None
    has = None if virtual is None else virtual.order.shards
    if had != has:
        raise UserError(
            f"the state is of a trainer with virtual_ranks={had}, and this one has {has}: give virtual_ranks={had}"
        )


def passes_of(batches: ShardBatches) -> Iterable[Tensors]:
    """Return the batches of one shard, one for each backward pass."""
    if batches is None:
        return ()
    if isinstance(batches, tuple) and len(batches) == 2 and isinstance(batches[0], torch.Tensor):
        return (batches,)
    return batches
