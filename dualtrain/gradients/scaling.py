"""Factors by which the gradients of a bucket are multiplied."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dualtrain.backends import Backend
from dualtrain.gradients.layout import Transfer
from dualtrain.gradients.wire_format import WireFormat


@dataclass(frozen=True)
class Scaling:
    """Factors of a bucket's gradients, in the order in which they are applied.

    Attributes:
        in_copy: factor that is applied when the gradients are copied to the bucket (a 0-dim tensor); ``None`` for 1.
        before: factor on the gradients in the bucket, before they are converted and summed.
        in_sum: factor that the backend applies to the sum.
        after: factor on the sum, after it was converted to the gradients' dtype.
    """

    in_copy: torch.Tensor | None
    before: float
    in_sum: float
    after: float

    @classmethod
    def of(
        cls, wire_format: WireFormat, transfer: Transfer, backend: Backend, shards: int, *, may_scale_copies: bool
    ) -> Scaling:
        """Return the factors for a sum of ``shards`` summands.

        Ranks may differ only in ``Transfer.before``, by which ``in_copy`` or ``before`` is multiplied.
        """
        before, after = transfer.before, transfer.factor_after(shards)
        if wire_format.dtype.itemsize < wire_format.real.itemsize:
            # Divide before the sum: the sum of a few large gradients may not fit into float16, but their average does.
            return cls(None, before * after, 1.0, 1.0) if after < 1 else cls(None, before, 1.0, after)
        if may_scale_copies and wire_format.is_cpu and not wire_format.converts and _averages_first(backend, transfer):
            return cls(torch.tensor(before * after, dtype=wire_format.real, device="cpu"), 1.0, 1.0, 1.0)
        return cls(None, before, after, 1.0)


def _averages_first(backend: Backend, transfer: Transfer) -> bool:
    """Return whether gradients may be multiplied by 1/size before the sum.

    The size must be a power of two, because the multiplication is then exact. There is no gain if the backend scales while
    it adds.
    """
    size = backend.size
    is_average = transfer.average_first and transfer.factor_after(size) == 1 / size
    return is_average and size > 1 and size.bit_count() == 1 and not backend.scales_sums
