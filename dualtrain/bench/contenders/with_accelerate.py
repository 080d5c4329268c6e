"""Hugging Face's Accelerate."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.nn import functional

from dualtrain.bench.contenders import Contender, Steps
from dualtrain.bench.workloads import Task


class WithAccelerate(Contender):
    """Training loop with ``prepare`` and ``accelerator.backward``; Accelerate detects the ranks and a rank's GPU itself."""

    def __init__(self, device: torch.device) -> None:
        self.accelerator = Accelerator(cpu=device.type == "cpu")
        self.rank, self.size = self.accelerator.process_index, self.accelerator.num_processes
        self.device = self.accelerator.device

    def train(self, task: Task) -> Steps:
        """See the base class."""
        model = task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
        model, optimizer = self.accelerator.prepare(model, optimizer)
        for inputs, targets in task.batches(self.rank):
            optimizer.zero_grad()
            with task.autocast():
                loss = functional.cross_entropy(model(inputs), targets)
            self.accelerator.backward(loss)
            optimizer.step()
            yield
        return self.accelerator.unwrap_model(model)  # type: ignore[no-any-return]

    def close(self) -> None:
        """See the base class."""
        self.accelerator.end_training()


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``."""
    return WithAccelerate(device)
