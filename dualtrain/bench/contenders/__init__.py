"""The contenders: for each library, a training loop as users of the library would write it.

Each module has a function ``start(option, device)``, which joins the world (connects this process to the job's other
ranks) and returns a :class:`Contender`. ``option`` is the text in the contender's plan entry; its meaning depends on the
module.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

    from dualtrain.bench.workloads import Task

#: A training loop, which yields after each step and returns the trained model.
Steps: TypeAlias = "Generator[None, None, torch.nn.Module]"


class Contender:
    """A library under test: its rank and size, and its training loop.

    A subclass implements only the methods that its jobs in the plan need. The others raise NotImplementedError, or have a
    default.
    """

    rank: int
    size: int
    device: torch.device

    def side_by_side(self) -> Mapping[str, Contender]:
        """Return the contenders in these processes, whose steps run in turns, by their names in the plan.

        By default, return only this contender, with an empty name.
        """
        return {"": self}

    def train(self, task: Task) -> Steps:
        """Build the task's model and run its steps; yield after each step, and return the trained model."""
        raise NotImplementedError

    def allreduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the ranks in place. Blocks."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Block until every rank has called this method."""
        raise NotImplementedError

    def metric(self, value: torch.Tensor) -> torch.Tensor:
        """Return the average of ``value`` over the ranks in a new tensor, as scripts do for a loss. Blocks."""
        raise NotImplementedError

    def wait_for_gpu(self) -> None:
        """Block until the operations that were started on a GPU have ended."""
        if self.device.type == "cuda":
            import torch  # here, since the module must not import torch before a rank needs it

            torch.cuda.synchronize()

    def allreduce_buffer(self, tensor: torch.Tensor) -> None:
        """Sum a tensor from :meth:`buffer` over the ranks in place. Blocks."""
        self.allreduce(tensor)

    def buffer(self, numbers: int) -> torch.Tensor | None:
        """Allocate ``numbers`` float32 values in the library's own memory, which it reduces fastest.

        Returns ``None`` if the library has no such memory.
        """
        return None

    def feed(self, folder: str, batch: int) -> int:
        """Read this rank's part of MNIST once, as the training loop would, and return the number of samples."""
        raise NotImplementedError

    def stall(self, task: Task, folder: Path) -> float:
        """Return the seconds that a checkpoint adds to a few steps."""
        raise NotImplementedError

    def trainer(self, steps: int) -> dict[str, float]:
        """Measure ``steps`` steps of the workload ``empty``, a model of 2 weights; return the median seconds per step.

        The keys of the result are "by hand" (for a plain loop) and "trainer" (for the library's trainer).
        """
        raise NotImplementedError

    def close(self) -> None:
        """Leave the world."""


def started(module: str, option: str, device: torch.device) -> Contender:
    """Call ``start(option, device)`` of a ``module`` of this package: join the world and return the contender."""
    contender: Contender = import_module(f"{__name__}.{module}").start(option, device)
    return contender
