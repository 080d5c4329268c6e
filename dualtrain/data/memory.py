"""Source of datasets that fit on the device: ``index_select`` takes each batch, and the transform follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from dualtrain.data.sources import Batch, Source, Tensors
from dualtrain.data.transforms import Transform


class TensorSource(Source):
    """Source of samples in two tensors: ``inputs`` (N, …), uint8 or float32, and ``targets`` (N,), int64.

    ``transform`` converts a batch of ``inputs`` to the model's inputs; without ``transform``, they are unchanged.
    """

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, transform: Transform | None = None) -> None:
        self._inputs = inputs
        self._targets = targets
        self._transform = transform

    stored = True

    def __len__(self) -> int:
        return len(self._targets)

    def contents(self, numbers: Sequence[int]) -> Iterator[Tensors]:
        """See the base class."""
        return ((self._inputs[number], self._targets[number]) for number in numbers)

    def stream(self, batches: Iterable[Batch], device: torch.device) -> Iterator[Tensors]:
        """Yield each batch's inputs and targets. The first call moves the whole split to ``device``, where it stays."""
        self._inputs, self._targets = self._inputs.to(device), self._targets.to(device)
        for batch in batches:
            numbers = batch.numbers.to(device)
            rows = self._inputs.index_select(0, numbers)  # copies whole rows, and so is faster than indexing
            inputs = rows if self._transform is None else self._transform(rows, numbers, batch.seed)
            yield inputs, self._targets.index_select(0, numbers)
