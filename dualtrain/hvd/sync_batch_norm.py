"""``hvd.SyncBatchNorm``: batch normalization over all ranks' samples, on CPUs too (Horovod's layer needs GPUs)."""

from __future__ import annotations

import torch

from dualtrain import batchnorm
from dualtrain.hvd.mpi_ops import Sum, allgather, allreduce


class SyncBatchNorm(batchnorm.SyncBatchNorm):
    """BatchNorm layer that uses all ranks' statistics in training. ``convert_sync_batchnorm(model)`` converts models."""

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``row`` (n,), as (size, n)."""
        gathered: torch.Tensor = allgather(row.unsqueeze(0))
        return gathered

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's ``values``."""
        summed: torch.Tensor = allreduce(values, op=Sum)
        return summed
