"""MNIST and Fashion-MNIST, from files in torchvision's layout (``FOLDER/MNIST/raw/train-images-idx3-ubyte``, …)."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy
import torch

from dualtrain.data.downloads import missing, why_unreadable
from dualtrain.data.sources import Tensors
from dualtrain.errors import UserError
from dualtrain.files import open_regular
from dualtrain.torchvision_shim import torchvision

IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
UINT8 = 8  # the idx format's code for this type
CLASSES = 10


def read_mnist(name: str, folder: str | None, download: bool = False) -> tuple[Tensors, Tensors]:
    """Read the training and the test part: images uint8 (N, 1, 28, 28) and classes int64 (N,).

    Raises:
        UserError: ``folder`` is ``None``, its files are missing or damaged, or the download is refused or fails.
    """
    datasets = torchvision().datasets
    kind = {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST}[name]
    if folder is None:
        raise UserError(f"--dataset {name} needs the folder of its files: name it with --data-dir")
    raw = Path(folder, kind.__name__, "raw")
    files = [raw / f"{part}-{what}" for part in ("train", "t10k") for what in (IMAGES, LABELS)]
    if download and missing(files, [path.with_name(f"{path.name}.gz") for path in files]):
        _download(name, kind, folder)
    try:
        return _read_part(*files[:2]), _read_part(*files[2:])
    except (OSError, ValueError, MemoryError) as error:
        # Path.exists() would raise PermissionError if the folder cannot be searched.
        packed = any(os.path.exists(f"{path}.gz") for path in files if not os.path.exists(path))
        cure = f"unpack the .gz files in {str(raw)!r}" if packed else f"put its four idx files, unpacked, into {str(raw)!r}"
        raise UserError(f"--data-dir {folder!r} does not hold {name} ({why_unreadable(error)}): {cure}") from error


def _read_part(images: Path, labels: Path) -> Tensors:
    pixels, classes = _read_idx(images, (28, 28)), _read_idx(labels, ())
    if len(pixels) != len(classes):
        raise ValueError(f"{images.name} has {len(pixels)} images and {labels.name} has {len(classes)} labels")
    if not len(classes) or classes.max() >= CLASSES:
        raise ValueError(f"{labels.name} has no labels, or labels that are not from 0 to {CLASSES - 1}")
    return pixels[:, None], classes.to(torch.int64)


def _read_idx(path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    """Read the uint8 values, (n, *shape), of a file in the idx format.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not in the idx format, or its values have a different type or shape.
    """
    dimensions = 1 + len(shape)
    with open_regular(path) as file:
        head = file.read(4 * (1 + dimensions))
        if len(head) < 4 * (1 + dimensions) or head[:4] != bytes([0, 0, UINT8, dimensions]):
            raise ValueError(f"{path.name} is not an idx file of uint8 values in {dimensions} dimensions")
        count, *found = struct.unpack(f">{dimensions}I", head[4:])
        size = os.fstat(file.fileno()).st_size
        if tuple(found) != shape:
            raise ValueError(f"{path.name} has items of shape {tuple(found)}, and not {shape}")
        expected = len(head) + count * math.prod(shape)
        if size != expected:
            raise ValueError(
                f"{path.name} has {size} bytes, and not the {expected} bytes of {count} items of shape {shape}"
            )
        values = numpy.fromfile(file, dtype=numpy.uint8, count=count * math.prod(shape))
    return torch.from_numpy(values.reshape(count, *shape))


def _download(name: str, kind: Any, folder: str) -> None:
    fetched = kind.__new__(kind)  # without __init__, which would read the files
    fetched.root = folder
    try:
        fetched.download()  # training and test part; torchvision checks the hash of each file
    except Exception as error:  # OSError, or an error of http.client, for example
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines else type(error).__name__
        raise UserError(
            f"{name} could not be downloaded ({reason}): download its four idx files from {kind.mirrors[0]}, and put them, "
            f"unpacked, into {folder}/{kind.__name__}/raw on every host"
        ) from error
