"""Horovod, used as in its documentation. The launcher chooses Gloo or MPI."""

from __future__ import annotations

import horovod.torch as hvd
import torch
from torch.nn import functional

from dualtrain.bench.contenders import Contender
from dualtrain.bench.workloads import Task


class RawHorovod(Contender):
    """Training loop with Horovod's own optimizer."""

    def __init__(self, device: torch.device) -> None:
        hvd.init()
        self.rank, self.size, self.device = hvd.rank(), hvd.size(), device

    def train(self, task: Task) -> torch.nn.Module:
        """See the base class."""
        model = task.model()
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
        return model

    def allreduce(self, tensor: torch.Tensor) -> None:
        """See the base class."""
        hvd.allreduce_(tensor, op=hvd.Sum, name="sweep")

    def close(self) -> None:
        """See the base class."""
        hvd.shutdown()


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``."""
    return RawHorovod(device)
