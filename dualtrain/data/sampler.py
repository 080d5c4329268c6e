"""Which samples make up which batch.

A pure function of (seed, epoch, batch number): not of the world size, the backend, or where a run was interrupted.
Ranks take consecutive parts of a global batch, as equal as can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from dualtrain.data.draws import derived


@dataclass(frozen=True)
class Sampler:
    """The order of ``samples`` samples, in global batches of ``global_batch``.

    The last of an epoch may be shorter, or is left out with ``drop_last``.
    """

    samples: int
    global_batch: int
    seed: int
    drop_last: bool = False

    @property
    def batches(self) -> int:
        """Global batches in an epoch."""
        return self.samples // self.global_batch if self.drop_last else -(-self.samples // self.global_batch)

    @property
    def smallest(self) -> int:
        """Samples in the last batch of an epoch."""
        return self.global_batch if self.drop_last else (self.samples - 1) % self.global_batch + 1

    def batch(self, epoch: int, number: int) -> torch.Tensor:
        """The sample numbers of a global batch. int64, (global_batch,) or fewer in the last batch."""
        order = _order(self.samples, self.seed, epoch)
        return order[number * self.global_batch : (number + 1) * self.global_batch]


@lru_cache(maxsize=2)
def _order(samples: int, seed: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(derived(f"order of samples, seed {seed}, epoch {epoch}"))
    return torch.randperm(samples, generator=generator)


def share(batch: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Rank ``rank``'s part of a global batch: consecutive, at most one sample more than another rank's."""
    return batch.tensor_split(size)[rank]
