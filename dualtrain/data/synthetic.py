"""Random inputs and classes, made as they are asked for: benchmarks without data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from dualtrain.data import draws
from dualtrain.data.options import Options
from dualtrain.data.sources import Batch, Source, Task, Tensors

PLACES = 1 << 16  # starts of the windows
STRIDE = 40503  # between neighbours; odd, so that no two of PLACES samples are alike
SHAPE = (3, 224, 224)
CLASSES = 1000
VAL_SHARE = 5


class SyntheticSource(Source):
    """``samples`` inputs of ``shape``, float32, uniform with mean 0 and variance 1, with classes that mean nothing.

    Each input is a window of one row of random numbers, since drawing them all would be most of a small step.
    """

    def __init__(self, samples: int, shape: tuple[int, ...], classes: int, seed: int) -> None:
        self._samples = samples
        self._shape = shape
        self._classes = classes
        self._seed = seed
        self._row = torch.empty(0)

    def __len__(self) -> int:
        return self._samples

    def stream(self, batches: Iterable[Batch], device: torch.device) -> Iterator[Tensors]:
        """The batches; a sample is the same in each epoch, on each device."""
        size = math.prod(self._shape)
        if not len(self._row) or self._row.device != device:
            row = draws.bits(self._seed, torch.zeros(1, dtype=torch.int64, device=device), size + PLACES - 1)[0]
            self._row = ((draws.uniform(row) - 0.5) * math.sqrt(12)).float()
        windows = self._row.unfold(0, size, 1)
        for batch in batches:
            numbers = batch.numbers.to(device)
            inputs = windows[numbers * STRIDE % PLACES].reshape(len(numbers), *self._shape)
            yield inputs, draws.below(draws.bits(self._seed + 1, numbers, 1)[:, 0], self._classes)


def load_synthetic(options: Options) -> Task:
    """Synthetic training and evaluation data of ``options``' shape, classes and samples."""
    shape, classes = options.input_shape(SHAPE), options.classes or CLASSES
    train = SyntheticSource(options.samples, shape, classes, seed=0)
    val = SyntheticSource(max(1, options.samples // VAL_SHARE), shape, classes, seed=2)
    return Task(train, val, shape, classes)
