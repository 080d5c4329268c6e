"""Samples in MNIST's own file format, since MNIST would have to be fetched: ten shapes, shifted, dimmed, in noise."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

_FILES = {"train": "train", "test": "t10k"}


def write_mnist(folder: Path, samples: int, tests: int) -> None:
    """Writes the four idx files where torchvision looks for them below ``folder``."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    drawn = np.random.default_rng(0)
    shapes = np.kron(drawn.random((10, 7, 7)) < 0.4, np.ones((4, 4)))
    for part, count in (("train", samples), ("test", tests)):
        labels = drawn.integers(0, 10, count, dtype=np.uint8)
        shifts = drawn.integers(-3, 4, (count, 2))
        noise = drawn.random((count, 28, 28), dtype=np.float32)
        images = np.stack([np.roll(shapes[label], shift, (0, 1)) for label, shift in zip(labels, shifts, strict=True)])
        pixels = (255 * np.clip(0.6 * images * drawn.random((count, 1, 1)) + 0.4 * noise, 0, 1)).astype(np.uint8)
        _write(raw / f"{_FILES[part]}-images-idx3-ubyte", pixels)
        _write(raw / f"{_FILES[part]}-labels-idx1-ubyte", labels)


def _write(path: Path, values: np.ndarray) -> None:
    """The idx format: 0, 0, 8 for bytes, the number of dimensions, each of them, the bytes."""
    head = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(head + values.tobytes())
