"""Format in which the gradients of a bucket are sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dualtrain.backends.wire import wire_dtype
from dualtrain.gradients.layout import BucketLayout, Transfer


@dataclass(frozen=True)
class WireFormat:
    """Format in which a bucket's gradients are sent.

    16-bit gradients are sent in 32 bits. Gradients that are wider than the dtype of the transfer are sent in that dtype.

    Attributes:
        numel: how many real numbers are sent for the gradients; a complex number counts as two.
        dtype: the dtype in which these numbers are sent.
        real: the dtype of these numbers in the gradients.
        is_cpu: whether the gradients are on the CPU.
    """

    numel: int
    dtype: torch.dtype
    real: torch.dtype
    is_cpu: bool

    @classmethod
    def of(cls, layout: BucketLayout, transfer: Transfer) -> WireFormat:
        """Return the format in which gradients with this layout are sent."""
        real = layout.dtype.to_real()
        narrow = transfer.dtype if transfer.dtype is not None and real.itemsize > transfer.dtype.itemsize else None
        numel = layout.numel * (2 if layout.dtype.is_complex else 1)
        return cls(numel, narrow or wire_dtype(real), real, layout.device.type == "cpu")

    @property
    def converts(self) -> bool:
        """Return whether the gradients are converted. If not, they lie in the buffer that is sent."""
        return self.dtype != self.real
