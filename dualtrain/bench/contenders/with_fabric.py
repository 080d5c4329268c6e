"""Lightning Fabric, with its DDP strategy."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch.nn import functional

from dualtrain.bench.contenders import Contender, Steps
from dualtrain.bench.workloads import Task


class WithFabric(Contender):
    """Training loop with ``setup`` and ``fabric.backward``."""

    def __init__(self, device: torch.device) -> None:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        hosts = int(os.environ["WORLD_SIZE"]) // local
        self.fabric = Fabric(accelerator=device.type, strategy="ddp", devices=local, num_nodes=hosts)
        self.fabric.launch()
        self.rank, self.size, self.device = self.fabric.global_rank, self.fabric.world_size, self.fabric.device

    def train(self, task: Task) -> Steps:
        """See the base class."""
        model = task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
        wrapped, optimizer = self.fabric.setup(model, optimizer)
        for inputs, targets in task.batches(self.rank):
            optimizer.zero_grad()
            with task.autocast():
                loss = functional.cross_entropy(wrapped(inputs), targets)
            self.fabric.backward(loss)
            optimizer.step()
            yield
        return model

    def close(self) -> None:
        """See the base class."""
        dist.destroy_process_group()


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``."""
    return WithFabric(device)
