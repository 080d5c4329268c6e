"""MNIST and Fashion-MNIST, from files in torchvision's layout (``FOLDER/MNIST/raw/train-images-idx3-ubyte``, …)."""

from __future__ import annotations

import torch

from dualtrain.data import Data, Split
from dualtrain.errors import UserError
from dualtrain.models.vision import torchvision


def load_mnist(name: str, folder: str | None) -> Data:
    """The 60,000 training and 10,000 test images of 28×28 pixels, scaled to [0, 1].

    Raises:
        UserError: no folder is given, or it does not hold the files.
    """
    datasets = torchvision().datasets
    kind = {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST}[name]
    if folder is None:
        raise UserError(f"--dataset {name} is not embedded: name the folder of its files with --data-dir")
    try:
        parts = [kind(folder, train=train, download=False) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"--data-dir {folder!r} does not hold {name}: put its four idx files into {folder}/{kind.__name__}/raw"
        ) from error
    train, val = (Split(part.data[:, None].to(torch.float32).div_(255), part.targets) for part in parts)
    return Data(train, val, classes=10)
