"""No communication: every rank trains a model of its own. Nobody can be faster."""

from __future__ import annotations

import os

import torch
from torch.nn import functional

from dualtrain.bench.contenders import Contender
from dualtrain.bench.workloads import Task


class Alone(Contender):
    """One process among others that it knows nothing of."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self.device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device

    def train(self, task: Task) -> torch.nn.Module:
        """See the base class."""
        model = task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
        for inputs, targets in task.batches(self.rank):
            optimizer.zero_grad()
            with task.autocast():
                loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        return model


def start(option: str, device: torch.device) -> Contender:
    """See the package."""
    return Alone(device)
