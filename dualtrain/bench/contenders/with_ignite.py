"""PyTorch-Ignite's distributed module."""

from __future__ import annotations

import ignite.distributed as idist
import torch
from torch.nn import functional

from dualtrain.bench.contenders import Contender, Steps
from dualtrain.bench.workloads import Task


class WithIgnite(Contender):
    """Training loop with ``auto_model`` and ``auto_optim``."""

    def __init__(self, device: torch.device) -> None:
        idist.initialize("nccl" if device.type == "cuda" else "gloo")
        self.rank, self.size, self.device = idist.get_rank(), idist.get_world_size(), device

    def train(self, task: Task) -> Steps:
        """See the base class."""
        inner = task.model()
        model = idist.auto_model(inner)
        optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=task.lr))
        for inputs, targets in task.batches(self.rank):
            optimizer.zero_grad()
            with task.autocast():
                loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            yield
        return inner

    def close(self) -> None:
        """See the base class."""
        idist.finalize()


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``."""
    return WithIgnite(device)
