"""Reference for other contenders: the ranks do not communicate gradients, but sum one number in each step.

In synchronous training, every rank waits for the slowest rank in each step. This loop shows the cost of this wait alone.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from dualtrain.bench.contenders import Contender, Steps
from dualtrain.bench.contenders.ours import connected
from dualtrain.bench.workloads import Task


class OneNumber(Contender):
    """Ranks that train their own models, and sum one number in each step; ``option`` is the transport of the sum."""

    def __init__(self, option: str, device: torch.device) -> None:
        self.backend = connected("torch", option, device)
        self.rank, self.size, self.device = self.backend.rank, self.backend.size, self.backend.device

    def train(self, task: Task) -> Steps:
        """See the base class."""
        model = task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
        number = self.backend.new_buffer(1, torch.float32, self.device)
        for inputs, targets in task.batches(self.rank):
            optimizer.zero_grad()
            with task.autocast():
                loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            self.backend.start_sum(number, "number").wait()
            optimizer.step()
            yield
        return model

    def close(self) -> None:
        """See the base class."""
        self.backend.close()


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``."""
    return OneNumber(option, device)
