"""A training script as in Horovod's documentation, for Horovod and for its replacement ``dualtrain.hvd``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from dualtrain.bench.contenders import Contender, Steps
from dualtrain.bench.workloads import Task


class HorovodScript(Contender):
    """Training loop with ``hvd.DistributedOptimizer``; ``hvd`` is the module ``horovod.torch`` or ``dualtrain.hvd``."""

    def __init__(self, hvd: Any, device: torch.device) -> None:
        hvd.init()
        self.hvd = hvd
        self.rank, self.size, self.device = hvd.rank(), hvd.size(), device

    def train(self, task: Task) -> Steps:
        """See the base class."""
        hvd, model = self.hvd, task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        for inputs, targets in task.batches(self.rank):
            optimizer.zero_grad()
            with task.autocast():
                loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            yield
        return model

    def allreduce(self, tensor: torch.Tensor) -> None:
        """See the base class."""
        self.hvd.allreduce_(tensor, op=self.hvd.Sum, name="sweep")

    def barrier(self) -> None:
        """See the base class."""
        self.hvd.barrier()

    def metric(self, value: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        mean: torch.Tensor = self.hvd.allreduce(value, name="loss")
        return mean

    def close(self) -> None:
        """See the base class."""
        self.hvd.shutdown()
