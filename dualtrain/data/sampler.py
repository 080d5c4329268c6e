"""Order of the samples and their division into batches.

The samples of a global batch are a pure function of (seed, epoch, batch index), the number of samples, and the size of
global batches. They do not depend on the world size, the backend, or restarts. Each rank gets a consecutive part of the
global batch; the sizes of the parts differ by at most 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from dualtrain.data.draws import derived


@dataclass(frozen=True)
class Sampler:
    """The order of ``samples`` samples, in global batches of ``global_batch``.

    The last batch of an epoch may be shorter; ``drop_last`` leaves a shorter one out.
    """

    samples: int
    global_batch: int
    seed: int
    drop_last: bool = False

    @property
    def batches(self) -> int:
        """Number of global batches in an epoch."""
        return self.samples // self.global_batch if self.drop_last else -(-self.samples // self.global_batch)

    @property
    def smallest(self) -> int:
        """Number of samples in the last batch of an epoch."""
        return self.global_batch if self.drop_last else (self.samples - 1) % self.global_batch + 1

    def batch(self, epoch: int, number: int) -> torch.Tensor:
        """Return the indices of a global batch's samples: int64, (global_batch,), fewer in the last batch."""
        order = _order(self.samples, self.seed, epoch)
        return order[number * self.global_batch : (number + 1) * self.global_batch]


@lru_cache(maxsize=2)
def _order(samples: int, seed: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(derived(f"order of samples, seed {seed}, epoch {epoch}"))
    return torch.randperm(samples, generator=generator)


def part_of_rank(batch: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the consecutive part of a global batch that ``rank`` processes. The parts' sizes differ by at most 1."""
    return batch.tensor_split(size)[rank]
