"""Reference for other contenders: the ranks do not communicate gradients, but sum one number in each step.

In synchronous training, every rank waits for the slowest rank in each step. This loop also waits, but
does not communicate gradients: compared with the contender ``alone``, it takes longer by the wait and one short all-reduce.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from dualtrain.bench.contenders import Contender, Steps
from dualtrain.bench.contenders.ours import Ours
from dualtrain.bench.workloads import Task


class OneNumber(Ours):
    """Ranks that train their own models, and sum one number in each step."""

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


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``."""
    return OneNumber(option, device)
