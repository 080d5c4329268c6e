"""MNIST and Fashion-MNIST, from files in torchvision's layout (``FOLDER/MNIST/raw/train-images-idx3-ubyte``, …)."""

from __future__ import annotations

from typing import Any
from urllib.error import URLError

import torch

from dualtrain.data import Data, Split
from dualtrain.errors import UserError
from dualtrain.models.vision import torchvision

Part = tuple[torch.Tensor, torch.Tensor]


def read_mnist(name: str, folder: str | None, download: bool = False) -> tuple[Part, Part]:
    """The 60,000 training and 10,000 test images, uint8 (N, 1, 28, 28), and their classes, int64 (N,).

    Raises:
        UserError: no folder is given, it does not hold the files, or the download fails.
    """
    datasets = torchvision().datasets
    kind = {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST}[name]
    if folder is None:
        raise UserError(f"--dataset {name} is not embedded: name the folder of its files with --data-dir")
    if download:
        _download(name, kind, folder)
    try:
        train, val = (kind(folder, train=train, download=False) for train in (True, False))
    except (RuntimeError, OSError, ValueError, AssertionError, IndexError, KeyError) as error:
        raise UserError(
            f"--data-dir {folder!r} does not hold {name}: put its four idx files into {folder}/{kind.__name__}/raw"
        ) from error
    return (train.data[:, None], train.targets), (val.data[:, None], val.targets)


def load_mnist(name: str, folder: str | None) -> Data:
    """The same, scaled to [0, 1]."""
    (train, train_targets), (val, val_targets) = read_mnist(name, folder)
    return Data(
        Split(train.to(torch.float32).div_(255), train_targets),
        Split(val.to(torch.float32).div_(255), val_targets),
        classes=10,
    )


def _download(name: str, kind: Any, folder: str) -> None:
    try:
        kind(folder, train=True, download=True)  # both parts at once, each file checked by its hash
    except (URLError, OSError, RuntimeError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines else type(error).__name__
        raise UserError(
            f"{name} could not be downloaded ({reason}): put its four idx files into {folder}/{kind.__name__}/raw of every "
            f"host, from {kind.mirrors[0]}"
        ) from error
