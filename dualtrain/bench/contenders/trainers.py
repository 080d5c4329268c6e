"""dualtrain's ``Trainer`` with and without virtual ranks, to measure the cost of virtual ranks.

Virtual ranks are the shards of a global batch. A rank computes its shards one after another.
"""

from __future__ import annotations

import torch

import dualtrain
from dualtrain.bench.contenders import Contender, Steps
from dualtrain.bench.contenders.ours import Ours
from dualtrain.bench.workloads import Task


class WithTrainer(Ours):
    """Steps of the trainer, in which each rank computes one batch PARTS times.

    With virtual ranks, each of the rank's virtual ranks has this batch. Without, a step accumulates the PARTS gradients.

    Args:
        option: "BACKEND/TRANSPORT/virtual/PARTS" with virtual ranks, "BACKEND/TRANSPORT//PARTS" without. If PARTS is left
            out, as in "BACKEND/TRANSPORT/virtual" and "BACKEND/TRANSPORT", it is 1.
        device: the rank's device.
    """

    def __init__(self, option: str, device: torch.device) -> None:
        name, transport, virtual, parts, *_ = [*option.split("/"), "", ""]
        super().__init__(f"{name}/{transport}", device)
        self.parts = int(parts or 1)
        self.virtual_ranks = self.parts * self.size if virtual else None

    def train(self, task: Task) -> Steps:
        """See the base class."""
        model = task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
        trainer = dualtrain.Trainer(model, optimizer, backend=self.backend, virtual_ranks=self.virtual_ranks)
        for inputs, targets in task.batches(self.rank):
            trainer.step([(inputs, targets)] * self.parts, self.parts * self.size * len(targets))
            yield
        return model


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``."""
    return WithTrainer(option, device)
