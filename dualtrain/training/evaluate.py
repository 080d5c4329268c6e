"""Evaluation: every sample once, over all ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from dualtrain.backends import Backend
from dualtrain.data import Split

BATCH = 512


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, backend: Backend) -> tuple[float, float]:
    """The mean loss and the accuracy (0 to 1) of ``model`` over ``split``. Collective; blocks.

    Each rank takes every ``size``-th sample, none twice; sums, not averages, are exchanged.
    """
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64)
    mine = torch.arange(backend.rank, len(split), backend.size)
    for numbers in mine.split(BATCH):
        logits = model(split.inputs[numbers])
        targets = split.targets[numbers]
        losses = functional.cross_entropy(logits, targets, reduction="none")
        totals += torch.stack([losses.double().sum(), (logits.argmax(1) == targets).sum().double()]).cpu()
    model.train()
    loss, correct = backend.allreduce(totals, "sum", name="evaluation").tolist()
    return loss / len(split), correct / len(split)
