"""Generated samples in MNIST's file format, so that nothing is downloaded: ten shapes, shifted, dimmed and with noise."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

_FILES = {"train": "train", "test": "t10k"}


def write_mnist(folder: Path, samples: int, tests: int) -> None:
    """Write the four idx files below ``folder``, at the paths where torchvision looks for them."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    shapes = np.kron(generator.random((10, 7, 7)) < 0.4, np.ones((4, 4)))
    for part, count in (("train", samples), ("test", tests)):
        labels = generator.integers(0, 10, count, dtype=np.uint8)
        shifts = generator.integers(-3, 4, (count, 2))
        noise = generator.random((count, 28, 28), dtype=np.float32)
        images = np.stack([np.roll(shapes[label], shift, (0, 1)) for label, shift in zip(labels, shifts, strict=True)])
        pixels = (255 * np.clip(0.6 * images * generator.random((count, 1, 1)) + 0.4 * noise, 0, 1)).astype(np.uint8)
        _write(raw / f"{_FILES[part]}-images-idx3-ubyte", pixels)
        _write(raw / f"{_FILES[part]}-labels-idx1-ubyte", labels)


def _write(path: Path, values: np.ndarray) -> None:
    """Write an idx file: 0, 0, 8 (the type uint8), the number of dimensions, their sizes, and the bytes."""
    head = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(head + values.tobytes())
