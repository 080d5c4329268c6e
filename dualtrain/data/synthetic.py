"""Random inputs and classes for benchmarks without a data set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from dualtrain.data import draws
from dualtrain.data.options import Options
from dualtrain.data.sources import Batch, Source, Task, Tensors

WINDOWS = 1 << 16  # number of windows in the vector of random numbers
#: Distance between the windows of samples i and i + 1, modulo WINDOWS. It is odd, so that WINDOWS consecutive samples get
#: different windows.
STRIDE = 40503
SHAPE = (3, 224, 224)
CLASSES = 1000
VAL_DIVISOR = 5  # one validation sample for this many training samples


class SyntheticSource(Source):
    """``samples`` inputs of ``shape``, float32, uniform with mean 0 and variance 1, with random classes.

    Each input is a window of one long vector of random numbers. Generating new numbers would take most of the time of a
    short step.
    """

    def __init__(self, samples: int, shape: tuple[int, ...], classes: int, seed: int) -> None:
        self._samples = samples
        self._shape = shape
        self._classes = classes
        self._seed = seed
        self._vector = torch.empty(0)

    def __len__(self) -> int:
        return self._samples

    def stream(self, batches: Iterable[Batch], device: torch.device) -> Iterator[Tensors]:
        """Yield the batches. A sample is the same in every epoch and on every device."""
        size = math.prod(self._shape)
        if not len(self._vector) or self._vector.device != device:
            random_bits = draws.bits(self._seed, torch.zeros(1, dtype=torch.int64, device=device), size + WINDOWS - 1)[0]
            self._vector = ((draws.uniform(random_bits) - 0.5) * math.sqrt(12)).float()
        windows = self._vector.unfold(0, size, 1)
        for batch in batches:
            numbers = batch.numbers.to(device)
            inputs = windows[numbers * STRIDE % WINDOWS].reshape(len(numbers), *self._shape)
            yield inputs, draws.below(draws.bits(self._seed + 1, numbers, 1)[:, 0], self._classes)


def load_synthetic(options: Options) -> Task:
    """Make synthetic training and evaluation data with the shape, classes and number of samples in ``options``.

    Raises:
        UserError: the shape is invalid or too large.
    """
    shape, classes = options.input_shape(SHAPE), options.classes or CLASSES
    train = SyntheticSource(options.samples, shape, classes, seed=0)
    val = SyntheticSource(max(1, options.samples // VAL_DIVISOR), shape, classes, seed=2)
    return Task(train, val, shape, classes)
