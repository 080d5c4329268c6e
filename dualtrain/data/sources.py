"""Interface between data and trainer: numbered samples, delivered in the batches that the trainer requests.

A source is for training (augmented) or for evaluation (not augmented). It never chooses the order; the sampler does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

Kind = Literal["classes", "tokens"]
Tensors = tuple[torch.Tensor, torch.Tensor]
#: The target of a position that has no loss.
IGNORED = -100


def wrong_targets(targets: torch.Tensor, classes: int) -> torch.Tensor:
    """Return a bool tensor, true where ``targets`` has neither a class index (int64, below ``classes``) nor ``IGNORED``."""
    if targets.dtype != torch.int64:
        return torch.ones_like(targets, dtype=torch.bool)
    return (targets != IGNORED) & ((targets < 0) | (targets >= classes))


@dataclass(frozen=True)
class Batch:
    """Samples of one split: ``numbers`` are their indices, int64, (n,); n may be 0.

    ``seed`` determines the augmentation. The augmentation of sample i depends on (seed, i) only, not on the world size, the
    other samples of the batch, the worker processes or restarts.
    """

    numbers: torch.Tensor
    seed: int = 0


class Source(ABC):
    """One split of a dataset."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def stream(self, batches: Iterable[Batch], device: torch.device) -> Iterator[Tensors]:
        """Yield inputs (n, …) and targets of each batch, in order, on ``device``. Only one stream may be open at a time.

        To prefetch, a source may take more ``batches`` than it has yielded. An empty batch gives tensors with n = 0.

        Raises:
            UserError: a sample cannot be read.
        """

    #: The longest wait for a worker process, in seconds.
    timeout: float = 300.0
    #: True if ``contents`` yields samples as they are stored: then their bits are the same on every kind of processor.
    stored: bool = False

    def contents(self, numbers: Sequence[int]) -> Iterator[Any]:
        """Yield the samples ``numbers``, so that ranks can compare them: tensors, bytes, plain values, or tuples of these.

        An override should not augment the samples. This default implementation reads a stream with seed 0. The stream may
        augment the samples, but the augmentation is the same on every rank.
        """
        return self.stream((Batch(torch.tensor([number])) for number in numbers), torch.device("cpu"))

    def close(self) -> None:  # noqa: B027 -- most sources have nothing to stop
        """Stop the worker processes, if there are any. The source can be used again."""


def contents_of(source: Source, numbers: Sequence[int]) -> Iterator[Any]:
    """Return the samples ``numbers`` as :meth:`Source.contents` does, even if ``source`` does not have that method."""
    read = getattr(source, "contents", None) or partial(Source.contents, source)
    found: Iterator[Any] = read(numbers)
    return found


@dataclass(frozen=True)
class Task:
    """A dataset and the kind of its targets.

    ``kind`` is "classes" for cross entropy of logits (n, classes) and targets int64 (n,), or "tokens" for cross entropy of
    logits (n, t, classes) and targets int64 (n, t), in which ``IGNORED`` marks positions without a loss.
    """

    train: Source
    val: Source
    shape: tuple[int, ...]  # of one input
    classes: int
    kind: Kind = "classes"
    names: tuple[str, ...] | None = None  # names of the classes, if they have any
    #: Checksums of some samples, from the comparison between the ranks. Each key names a split and the number of a sample.
    checksums: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def limit_waits(self, seconds: float) -> None:
        """Set the longest wait for a worker process, in both splits."""
        for source in (self.train, self.val):
            if isinstance(source, Source):  # a user's own source may be of an unrelated class
                with suppress(AttributeError):  # or its ``timeout`` may be read-only
                    source.timeout = seconds

    def close(self) -> None:
        """Stop the worker processes of both splits, of the second one even if the first one raises an error."""
        with ExitStack() as stack:
            for source in (self.val, self.train):  # called in reverse order
                # A user's own source may be of an unrelated class, without close().
                stack.callback(getattr(source, "close", lambda: None))
