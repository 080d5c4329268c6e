"""Sampler that continues an epoch after the world has changed, and leaves out the samples that were processed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sized
from itertools import cycle, islice
from typing import Any

import torch

from dualtrain.hvd.mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Splits the unprocessed samples of an epoch among the ranks, in Horovod's order.

    Call ``record_batch`` after each batch, and ``set_epoch`` with the next epoch's number at the **end** of each epoch.
    In a :class:`TorchState`, the sampler splits the rest of the epoch again whenever this process joins a new world.

    All ranks get the same number of samples. If the samples cannot be divided evenly, some are repeated.

    Args:
        dataset: any object with a constant length.
        shuffle: whether to shuffle the samples differently in each epoch; otherwise they keep the dataset's order.
        seed: the seed of the shuffle, the same on every rank.

    Raises:
        ValueError: this process is not in a world.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        #: How many samples all ranks together have processed in this epoch.
        self.processed_num = 0
        #: Always empty, as in Horovod 0.28.1: ``processed_num`` counts the processed samples.
        self.processed_indices: set[int] = set()
        #: This rank's samples, from the latest call of ``iter(sampler)``.
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch ``epoch``, with no sample processed. Must be called at the end of the previous epoch.

        A call at the beginning of an epoch would discard the progress that was restored after a restart.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count ``batch_size`` samples on every rank as processed; the next :meth:`reset` leaves them out.

        ``batch_idx`` is ignored; accepted because Horovod accepts it.
        """
        # As in Horovod: after a short last batch, or with repeated samples, the count may exceed the size of the dataset.
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, in a world of any size."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Split the unprocessed samples among the current ranks."""
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
