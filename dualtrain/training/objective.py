"""What is learned: a loss that is a mean over what counts, and the sums that exact metrics are made of.

Sums and not means: those of any batches on any ranks add up to the mean over all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

#: What is summed: the loss, what it is a mean over (samples, or tokens to predict), right answers, right among the first 5.
NAMES = ("loss", "weight", "correct", "top5")
IGNORED = -100  # the target of what does not count


#: A tensor, (4,), or as many floats, which are there sooner.
Sums = torch.Tensor | Sequence[float]


class Objective(Protocol):
    """A loss with its sums."""

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        """The mean loss, (), with its gradient; and the sums of ``NAMES``, four numbers."""


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cross entropy of each target, and the sums over all of them.

    Args:
        logits: (…, classes), of any floating dtype; computed in float32 at least.
        targets: class numbers, (…), int64; those of -100 do not count.
        label_smoothing: the probability that is taken from the true class for all.

    Returns:
        The losses, (n,), with their gradient, 0 where a target does not count; and the sums of ``NAMES``, float64, (4,), on
        the logits' device. Does not wait for the device.
    """
    logits, targets = _rows(logits, targets)
    losses = functional.cross_entropy(
        logits, targets, reduction="none", ignore_index=IGNORED, label_smoothing=label_smoothing
    )
    with torch.no_grad():
        # Of each sample in double precision, so that the sum hardly depends on how it is split.
        total = losses.sum(dtype=torch.float64)
        return losses, torch.stack([total, *_counted(_best(logits), targets, torch.count_nonzero)])


def _rows(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if logits.dim() != 2 or targets.dim() != 1:
        logits, targets = logits.flatten(0, -2), targets.flatten()
    if logits.dtype != torch.float32:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits, targets if targets.device == logits.device else targets.to(logits.device)


def _best(logits: torch.Tensor) -> torch.Tensor:
    """The classes of the first 5 places, (n, 5), or fewer."""
    return logits.topk(min(5, logits.shape[1]), 1).indices


def _counted(best: Any, targets: Any, count_nonzero: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """How many targets count, how many have the first place, and how many are among the first 5, of tensors or arrays."""
    hits = best == targets[:, None]  # no class has the number of what does not count
    return count_nonzero(targets != IGNORED), count_nonzero(hits[:, 0]), count_nonzero(hits)


class CrossEntropy:
    """Cross entropy of logits (…, classes) and class numbers (…), those of -100 left out."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        """See :class:`Objective`. In training in few operations: each takes longer than a tiny model leaves."""
        if not torch.is_grad_enabled():  # evaluations are compared between world sizes, to the last digits
            sums = cross_entropy(outputs, targets, self.label_smoothing)[1].cpu()
            return sums[0] / max(sums[1].item(), 1.0), sums.tolist()
        logits, targets = _rows(outputs, targets)
        loss = functional.cross_entropy(logits, targets, ignore_index=IGNORED, label_smoothing=self.label_smoothing)
        best = _best(logits.detach())
        if loss.is_cpu:  # NumPy takes a fraction of torch's time where there is little to do
            found = [loss.item(), *_counted(best.numpy(), targets.numpy(), np.count_nonzero)]
        else:
            counts = _counted(best, targets, torch.count_nonzero)
            found = torch.stack([loss.detach().double(), *counts]).tolist()  # one wait
        mean, counted, correct, top5 = map(float, found)
        if not counted:
            # Where a rank's few tokens all go unmasked: a mean of 0, not 0/0.
            loss, mean = logits.sum() * 0.0, 0.0
        return loss, [mean * counted, counted, correct, top5]


class MeanLoss:
    """A loss of the caller's own: ``loss(outputs, targets)``, a mean over the samples."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.loss = loss

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        """See :class:`Objective`; there are no right answers."""
        mean = self.loss(outputs, targets)
        return mean, [mean.item() * len(targets), float(len(targets)), 0.0, 0.0]


class OfTorch:
    """``nn.CrossEntropyLoss`` as torch means it: where it is that of plain class numbers, right answers are counted too."""

    def __init__(self, loss: nn.CrossEntropyLoss) -> None:
        plain = loss.weight is None and loss.reduction == "mean" and loss.ignore_index == IGNORED
        self._counting = CrossEntropy(loss.label_smoothing) if plain else None
        self._other = MeanLoss(loss)

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        """See :class:`Objective`. Other targets count as samples: of unequal weight, they are not exact over ranks."""
        if self._counting is not None and outputs.dim() == 2 and targets.dtype == torch.int64:
            return self._counting(outputs, targets)
        return self._other(outputs, targets)


def added(one: Iterable[float], other: Iterable[float]) -> list[float]:
    """Two parts' sums as those of both. Raises ValueError if they are not equally many."""
    return [a + b for a, b in zip(one, other, strict=True)]


def metrics(sums: Sums, prefix: str) -> dict[str, float]:
    """``sums`` of ``NAMES`` over all ranks as means, by the names that they are written under."""
    loss, weight, correct, top5 = map(float, sums)
    whole = weight or math.nan  # of nothing there is no mean
    return {f"{prefix}loss": loss / whole, f"{prefix}accuracy": correct / whole, f"{prefix}top5": top5 / whole}
