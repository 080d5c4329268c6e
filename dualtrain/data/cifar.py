"""CIFAR-10 in its binary version.

The Python version, which torchvision's ``CIFAR10`` reads, consists of pickles, and unpickling a modified file can run any
code. The binary version holds the same images as bytes: a label and 3 × 32 × 32 values for each.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import torch

from dualtrain.data.downloads import missing, why_unreadable
from dualtrain.data.sources import Tensors
from dualtrain.errors import UserError, why_not_downloaded
from dualtrain.files import open_regular
from dualtrain.torchvision_shim import with_torchvision_shim

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
FOLDER = "cifar-10-batches-bin"
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
VAL = ("test_batch.bin",)
SHAPE = (3, 32, 32)
CLASSES = 10


def read_cifar10(folder: str | None, download: bool = False) -> tuple[Tensors, Tensors]:
    """Read the training and the test part: images uint8 (N, 3, 32, 32) and classes int64 (N,).

    Raises:
        UserError: ``folder`` is ``None``, its files are missing or damaged, or the download is refused or fails.
    """
    if folder is None:
        raise UserError("--dataset cifar10 needs the folder of its files: name it with --data-dir")
    where = Path(folder, FOLDER)
    if download and missing([where / name for name in TRAIN + VAL], [Path(folder, URL.rpartition("/")[2])]):
        _download(folder)
    return _read(where, TRAIN), _read(where, VAL)


def _read(where: Path, names: tuple[str, ...]) -> Tensors:
    size = 1 + SHAPE[0] * SHAPE[1] * SHAPE[2]
    try:
        parts = [_bytes(where / name) for name in names]
        content = numpy.concatenate(parts)
    except (OSError, MemoryError) as error:
        raise UserError(
            f"{str(where)!r} does not hold cifar10 ({why_unreadable(error)}): unpack {URL} into {str(where.parent)!r}"
        ) from error
    rows = torch.from_numpy(content[: len(content) // size * size].reshape(-1, size))
    labels = rows[:, 0].to(torch.int64)
    # Check each file separately: the files are concatenated, so a truncated file would shift the images of the next one.
    damaged = [name for name, part in zip(names, parts, strict=True) if len(part) % size or not len(part)]
    if damaged or labels.max() >= CLASSES:
        what = str(where / damaged[0]) if damaged else str(where)
        raise UserError(f"{what!r} is damaged: delete {str(where)!r} and unpack {URL} into {str(where.parent)!r} again")
    return rows[:, 1:].reshape(-1, *SHAPE).contiguous(), labels


def _bytes(path: Path) -> Any:
    with open_regular(path) as file:
        return numpy.fromfile(file, dtype=numpy.uint8)


def _download(folder: str) -> None:
    utils = with_torchvision_shim(lambda: import_module("torchvision.datasets.utils"))
    try:
        utils.download_and_extract_archive(URL, folder, md5=MD5)
    except Exception as error:  # besides OSError, those of http.client and others
        raise UserError(
            f"cifar10 could not be downloaded ({why_not_downloaded(error)}): unpack {URL} into {folder} on every host"
        ) from error
