"""Datasets: names, the sources of samples that they lead to, and the order in which samples are taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dualtrain.data.catalog import load_data, usable_folder
from dualtrain.data.sources import Batch, Source, Task
from dualtrain.errors import UserError

__all__ = ["Batch", "Data", "Source", "Split", "Task", "load", "load_data"]


@dataclass(frozen=True)
class Split:
    """Samples: ``inputs`` (N, channels, height, width), float32, and ``targets`` (N,), int64."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device) -> Split:
        """The same samples on ``device``."""
        return Split(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True)
class Data:
    """A dataset with its fixed split."""

    train: Split
    val: Split
    classes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one input."""
        _, channels, height, width = self.train.inputs.shape
        return channels, height, width


def load(name: str, folder: str | None) -> Data:
    """The dataset ``name``, from ``folder`` where it is not embedded.

    Raises:
        UserError: an unknown name, or files that are missing or cannot be read.
    """
    if name not in _LOADERS:
        raise UserError(f"--dataset {name!r} is not known: choose one of {', '.join(sorted(_LOADERS))}")
    return _LOADERS[name](usable_folder(folder, create=False))


def _digits(folder: str | None) -> Data:
    from dualtrain.data.digits import load_digits

    return load_digits()


def _mnist(name: str) -> Callable[[str | None], Data]:
    def load_it(folder: str | None) -> Data:
        from dualtrain.data.mnist import load_mnist

        return load_mnist(name, folder)

    return load_it


_LOADERS: dict[str, Callable[[str | None], Data]] = {
    "digits": _digits,
    "mnist": _mnist("mnist"),
    "fashion-mnist": _mnist("fashion-mnist"),
}
