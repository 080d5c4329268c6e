"""Reduction of all ranks' values by one process, in the order in which Gloo's ring all-reduce combines them.

Gloo cuts a buffer into 2 * size segments of equal length (the last ones may be shorter or empty). Two consecutive segments
form the chunk of one rank. The reduction of chunk c starts at rank c - 1, and passes through the ranks c - 2, c - 3, … to
rank c (modulo size). Each rank combines its own values with the values that it received. Floating-point sums depend on this
order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from dualtrain.backends.base import FOLD, ReduceOp
from dualtrain.backends.subnormals import keep_subnormals

#: As in C++, ``min(own, received)`` returns ``own`` if either value is NaN. torch's functions would return NaN.
_FOLD: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **FOLD,
    ReduceOp.MIN: lambda own, received: torch.where(received < own, received, own),
    ReduceOp.MAX: lambda own, received: torch.where(own < received, received, own),
}
_COMMUTATIVE = (ReduceOp.SUM, ReduceOp.PRODUCT)  # operations that give the same bits if two values are swapped
_SLICED_ELEMENTS = 2048  # chunks of at least this length are reduced one by one


@keep_subnormals
def reduce_in_ring_order(rows: torch.Tensor, op: ReduceOp, result: torch.Tensor) -> None:
    """Reduce ``rows`` (size, n), one row per rank, into ``result`` (n,), with the bits of Gloo's all-reduce.

    Only the sign and the payload of a NaN may differ. ``op`` is SUM, MIN, MAX or PRODUCT. Valid for rows of at most 1 MB:
    Gloo cuts a row into more than 2 * size segments only if a segment would be longer than 1 MB.
    """
    size, numel = rows.shape
    if size == 2 and op in _COMMUTATIVE:
        FOLD[op](rows[0], rows[1], out=result)
    elif numel < _SLICED_ELEMENTS * size:
        received, *others = rows.gather(0, _senders(size, numel)).unbind()
        for own in others:
            received = _FOLD[op](own, received)
        result.copy_(received)
    else:
        # ``gather`` copies all rows. For long rows, that takes longer than the many calls of this loop.
        length = _chunk_length(size, numel)
        for chunk, (values, target) in enumerate(zip(rows.split(length, dim=1), result.split(length), strict=True)):
            received = values[chunk - 1]
            for step in range(2, size + 1):
                received = _FOLD[op](values[(chunk - step) % size], received)
            target.copy_(received)


def _chunk_length(size: int, numel: int) -> int:
    return 2 * -(-numel // (2 * size))


@lru_cache(maxsize=64)
def _senders(size: int, numel: int) -> torch.Tensor:
    """Return, for each element, the ranks in the order in which their values are combined: int64, (size, numel)."""
    chunks = torch.arange(numel, device="cpu") // max(1, _chunk_length(size, numel))
    return (chunks - 1 - torch.arange(size, device="cpu")[:, None]) % size
