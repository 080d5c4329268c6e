"""Sampler that goes on within an epoch after the world has changed: no sample is processed again."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sized
from itertools import cycle, islice
from typing import Any

import torch

from dualtrain.hvd.mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Splits the samples of an epoch that no rank has processed yet among the ranks, in Horovod's order.

    After each batch: ``record_batch``. At the **end** of each epoch: ``set_epoch`` with the next one's number. Kept in
    a :class:`TorchState`, it splits the rest of the epoch again whenever the world is joined anew.

    Every rank gets equally many: where the samples do not suffice, the first of them are used twice.

    Args:
        dataset: anything with a constant length.
        shuffle: another order in each epoch; else the dataset's.
        seed: of the order; the same on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        #: How many samples all ranks together have processed in this epoch.
        self.processed_num = 0
        #: Always empty, as in Horovod 0.28.1, which counts in ``processed_num``.
        self.processed_indices: set[int] = set()
        #: This rank's samples in the last iteration.
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch ``epoch``: nothing of it is processed. Belongs at the end of the epoch before.

        At the beginning of an epoch it would forget what was processed of it before a restart.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed ``batch_size`` samples, which the next :meth:`reset` leaves out."""
        # As in Horovod: after a short last batch, or with samples used twice, this exceeds the number of samples.
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and how much of it is processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there, in a world of any size."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Split what is not processed yet among the ranks that there are now."""
        self.num_replicas = size()
        self.rank = rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        mine = islice(cycle(self.remaining_indices), self.rank, self.total_size, self.num_replicas)
        self.indices = list(mine)
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
