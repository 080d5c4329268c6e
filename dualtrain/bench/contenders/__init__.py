"""The contenders, each written as its users would write it, and nothing else: the bench measures other people's loops.

A module has one function, ``start(option, device)``, which joins the world and gives a :class:`Contender`. These files
alone, beside one backend each, name torch.distributed and Horovod.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from dualtrain.bench.workloads import Task


class Contender:
    """A library that trains: a place in its world, and its loop."""

    rank: int
    size: int
    device: torch.device

    def train(self, task: Task) -> torch.nn.Module:
        """Takes the task's steps; gives the model as it is then."""
        raise NotImplementedError

    def allreduce(self, tensor: torch.Tensor) -> None:
        """The sum over the ranks, in place; blocks."""
        raise NotImplementedError

    def allreduce_buffer(self, tensor: torch.Tensor) -> None:
        """The same of a :meth:`buffer`."""
        self.allreduce(tensor)

    def buffer(self, numbers: int) -> torch.Tensor | None:
        """Float32 numbers where the library likes them best, if it has such a place."""
        return None

    def feed(self, folder: str, batch: int) -> int:
        """Reads this rank's share of MNIST once, as its loop would, and gives how many samples those were."""
        raise NotImplementedError

    def stall(self, task: Task, folder: Path) -> float:
        """The seconds that a run with a checkpoint takes longer than one without."""
        raise NotImplementedError

    def trainer(self, steps: int) -> dict[str, float]:
        """The seconds of a step by hand, and by the library's own trainer, on the empty model."""
        raise NotImplementedError

    def close(self) -> None:
        """Leaves the world."""
