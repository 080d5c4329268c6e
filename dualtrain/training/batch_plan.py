"""The samples that a rank reads: its parts of each global batch, and of the validation samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dualtrain.data import Batch
from dualtrain.data.draws import derived
from dualtrain.data.sampler import Sampler, part_of_rank

_VALIDATION_BATCH = 512


@dataclass(frozen=True)
class BatchPlan:
    """Division of the samples into this rank's batches.

    Attributes:
        sampler: the order of the training samples, and the global batches.
        parts: how many parts a global batch has.
        mine: the indices of this rank's parts.
        accumulate: the number of backward passes for each part; a part with fewer samples has one pass for each sample.
    """

    sampler: Sampler
    parts: int
    mine: Sequence[int]
    accumulate: int

    def rest_of_epoch(self, epoch: int, first: int) -> Iterator[Batch]:
        """Yield this rank's training batches of an epoch from global batch ``first`` on, one for each backward pass."""
        seed = derived(self.sampler.seed, "augmentation", epoch)
        for number in range(first, self.sampler.batches):
            for passes in self.passes(self.sampler.batch(epoch, number)):
                for numbers in passes:
                    yield Batch(numbers, seed)

    def passes(self, batch: torch.Tensor) -> list[Sequence[torch.Tensor]]:
        """Split each of this rank's parts of a global batch into one tensor per backward pass; () for an empty part."""
        parts = [part_of_rank(batch, number, self.parts) for number in self.mine]
        return [part.tensor_split(min(self.accumulate, len(part))) if len(part) else () for part in parts]

    def validation(self, samples: int) -> list[list[Batch]]:
        """For each part of this rank, return the batches of validation samples. No sample is evaluated twice."""
        return [self._validation(samples, part) for part in self.mine]

    def _validation(self, samples: int, part: int) -> list[Batch]:
        """Return the batches of one part: every ``parts``-th sample."""
        indices = torch.arange(samples)[part :: self.parts]
        size = min(_VALIDATION_BATCH, max(self.sampler.global_batch // self.parts, 64))
        return [Batch(numbers) for numbers in indices.split(size) if len(numbers)]
