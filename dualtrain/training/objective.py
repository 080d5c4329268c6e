"""What is learned: a loss that is a mean over what counts, and the sums that exact metrics are made of.

Sums and not means: those of any batches on any ranks add up to the mean over all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional

#: What is summed: the loss, what it is a mean over (samples, or tokens to predict), right answers, right among the first 5.
NAMES = ("loss", "weight", "correct", "top5")
IGNORED = -100  # the target of what does not count


class Objective(Protocol):
    """A loss with its sums."""

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss, (), with its gradient; and the sums of ``NAMES``, float64, (4,), on the CPU."""


class CrossEntropy:
    """Cross entropy of logits (…, classes) and class numbers (…), those of -100 left out."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Objective`."""
        logits, targets = outputs.flatten(0, -2).float(), targets.flatten()
        counted = targets != IGNORED
        weight = int(counted.sum())
        losses = functional.cross_entropy(logits, targets, reduction="none", label_smoothing=self.label_smoothing)
        # Nothing counts where a rank's few tokens all go unmasked: a mean of 0, not 0/0.
        mean = losses.sum() / max(weight, 1)
        with torch.no_grad():
            best = logits.topk(min(5, logits.shape[1]), 1).indices
            right = (best == targets[:, None]) & counted[:, None]
            # Of each sample in double precision, so that the sum hardly depends on how ranks and batches split them.
            sums = torch.stack(
                [losses.double().sum(), counted.sum().double(), right[:, 0].sum().double(), right.sum().double()]
            )
        return mean, sums.cpu()


class MeanLoss:
    """A loss of the caller's own: ``loss(outputs, targets)``, a mean over the samples."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.loss = loss

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Objective`; there are no right answers."""
        mean = self.loss(outputs, targets)
        return mean, torch.tensor([mean.item() * len(targets), len(targets), 0, 0], dtype=torch.float64)


def metrics(sums: torch.Tensor, prefix: str) -> dict[str, float]:
    """``sums`` of ``NAMES`` over all ranks as means, by the names that they are written under."""
    loss, weight, correct, top5 = sums.tolist()
    whole = max(weight, 1.0)
    return {f"{prefix}loss": loss / whole, f"{prefix}accuracy": correct / whole, f"{prefix}top5": top5 / whole}
