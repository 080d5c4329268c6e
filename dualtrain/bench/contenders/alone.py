"""No communication: every rank trains a model of its own. Nobody can be faster.

The ranks meet before a workload, so that all of them step at the same time: a rank that had the cores, their caches and
the memory to itself would be a ceiling that nobody could reach.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional

from dualtrain.bench.contenders import Contender
from dualtrain.bench.workloads import Task


class Alone(Contender):
    """One process among others that it only starts together with."""

    def __init__(self, device: torch.device) -> None:
        dist.init_process_group("gloo")
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device

    def train(self, task: Task) -> torch.nn.Module:
        """See the base class."""
        model = task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
        dist.barrier()
        for inputs, targets in task.batches(self.rank):
            optimizer.zero_grad()
            with task.autocast():
                loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        return model

    def close(self) -> None:
        """See the base class."""
        dist.destroy_process_group()


def start(option: str, device: torch.device) -> Contender:
    """See the package."""
    return Alone(device)
