"""Training without communication, as a reference: every rank trains its own model.

A barrier before each workload makes all ranks run at the same time. If only one rank ran at a time, it would have all
caches and the whole memory bandwidth, and would reach a speed that no distributed run can reach.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional

from dualtrain.bench.contenders import Contender, Steps
from dualtrain.bench.workloads import Task


class Alone(Contender):
    """Ranks that train without communication."""

    def __init__(self, device: torch.device) -> None:
        dist.init_process_group("gloo")
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device

    def train(self, task: Task) -> Steps:
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
            yield
        return model

    def close(self) -> None:
        """See the base class."""
        dist.destroy_process_group()


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``."""
    return Alone(device)
