"""The scalars of one optimizer step: those that each rank sends beside its gradients, and the result over all ranks."""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from dualtrain.trainer.objective import NAMES, metrics

T = TypeVar("T")
CONTROL_FLAGS = 3  # how many numbers of the caller are summed over the ranks with each step


@dataclass(frozen=True)
class Step:
    """Result of one optimizer step, summed over ranks: metric totals and the caller's control flags.

    Attributes:
        totals: the sums of ``objective.NAMES``. The default loss computes the fourth, ``top5``, only in evaluations. With a
            loss of torch that averages over targets or elements, the sums are divided by ``Passes.targets_per_sample``.
        control_flags: the sums of the caller's numbers.
    """

    totals: list[float]
    control_flags: list[float]

    @property
    def sums(self) -> torch.Tensor:
        """The totals as a tensor, float64, (4,)."""
        return torch.tensor(self.totals, dtype=torch.float64, device="cpu")

    @property
    def loss(self) -> float:
        """The mean loss; NaN if the total weight is 0."""
        return metrics(self.totals, "")["loss"]

    @property
    def news(self) -> list[float]:
        """Deprecated name of ``control_flags``."""
        warnings.warn("Step.news is deprecated: use Step.control_flags", DeprecationWarning, stacklevel=2)
        return self.control_flags


class StepScalars:
    """The scalars of one part of a step: the sums of ``objective.NAMES``, a divergence flag, the control flags.

    A part is what a rank computes in the step or, with virtual ranks, one of its shards (``parts.py``).
    The scalars are Python floats: adding them is faster than adding tensors, and gives the same result.
    """

    COUNT = len(NAMES) + 1 + CONTROL_FLAGS
    #: The numbers as float64 in memory. ``struct`` copies a few numbers faster than torch and NumPy do.
    LAYOUT = struct.Struct(f"{COUNT}d")

    def __init__(self) -> None:
        self.values = [0.0] * self.COUNT

    def reset(self, control_flags: Sequence[float]) -> None:
        """Begin a part of a step."""
        self.values = [0.0, 0.0, 0.0, 0.0, 0.0, *control_flags]

    def add(self, sums: Sequence[float]) -> None:
        """Add one batch's sums; set the divergence flag if they are not finite."""
        values = self.values
        loss, weight, correct, top5 = sums
        values[0] += loss
        values[1] += weight
        values[2] += correct
        values[3] += top5
        if not math.isfinite(loss + weight + correct + top5):
            values[4] = 1.0

    @property
    def diverged(self) -> bool:
        """Return whether a sum of this part of the step was infinite or not a number."""
        return self.values[len(NAMES)] > 0

    @staticmethod
    def result(total: Sequence[float]) -> tuple[Step, bool]:
        """Convert the sums over all ranks to the step's result; also return whether any rank diverged."""
        step = Step(list(total[: len(NAMES)]), list(total[-CONTROL_FLAGS:]))
        return step, total[len(NAMES)] > 0


class Counted(Generic[T]):
    """Batches from an iterator, and their number. See :func:`known_length`."""

    def __init__(self, batches: Iterator[T], count: int) -> None:
        self._batches, self.count = batches, count

    def __iter__(self) -> Iterator[T]:
        return self._batches


def known_length(batches: Iterable[Any]) -> int:
    """Return how many batches there are, or 0 if that is unknown.

    No batch is read ahead to find the last one, because a generator may reuse the memory of the previous batch.
    """
    if isinstance(batches, tuple | list):
        return len(batches)
    return batches.count if isinstance(batches, Counted) else len(batches) if isinstance(batches, Sequence) else 0
