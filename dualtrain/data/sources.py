"""What the trainer sees of data: numbered samples that come in the batches it asks for.

A source is for training (augmented) or for evaluation (not). It never decides an order: that is the sampler's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["classes", "tokens"]
Tensors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """The samples ``numbers``, int64, (n,), of a split; n may be 0.

    ``seed`` decides their augmentation: what happens to sample i is a function of (seed, i) alone, whatever the world
    size, the batch's other samples, the worker processes, or where a run was interrupted.
    """

    numbers: torch.Tensor
    seed: int = 0


class Source(ABC):
    """One split of a dataset."""

    @abstractmethod
    def __len__(self) -> int:
        """How many samples there are."""

    @abstractmethod
    def stream(self, batches: Iterable[Batch], device: torch.device) -> Iterator[Tensors]:
        """Inputs (n, …) and targets of each batch, in order, on ``device``. One stream at a time.

        ``batches`` is read ahead of what has been given out. An empty batch gives tensors of no samples.

        Raises:
            UserError: a sample cannot be read.
        """

    #: Whether ``contents`` gives samples as they are stored: the same bits on every processor.
    stored: bool = False

    def contents(self, numbers: Sequence[int]) -> Iterator[Any]:
        """Each of the samples ``numbers`` before augmentation, as tensors, bytes or plain values: ranks compare them.

        Here: what a stream gives for the seed 0, with which augmentation is the same on every rank.
        """
        return self.stream((Batch(torch.tensor([number])) for number in numbers), torch.device("cpu"))

    def close(self) -> None:  # noqa: B027 -- most sources have nothing to end
        """Ends worker processes, if there are any. The source can be used again."""


@dataclass(frozen=True)
class Task:
    """A dataset and what is to be learned from it.

    ``kind`` is "classes" for cross entropy of logits (n, classes) against int64 (n,), or "tokens" for logits
    (n, t, classes) against int64 (n, t), -100 where nothing is to be predicted.
    """

    train: Source
    val: Source
    shape: tuple[int, ...]  # of one input
    classes: int
    kind: Kind = "classes"
    names: tuple[str, ...] | None = None  # of the classes, where they have any

    def close(self) -> None:
        """Ends the worker processes of both splits."""
        self.train.close()
        self.val.close()
