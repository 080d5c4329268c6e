"""Layout of the gradients in buckets: a pure function of parameters and options, the same on all ranks and backends.

Buckets are filled in reverse registration order, since backward finishes the last layers first. Each bucket has one dtype,
one device and about 25 MB; the first bucket is smaller, so that sending starts early. Two backends can give the same bits
only if their buckets are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dualtrain.gradients.parameters import gradient_dtype

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class Transfer:
    """Options for sending gradients, the same on every rank except for ``before``.

    Attributes:
        before: factor on this rank's gradients before they are summed, such as its share of the samples.
        after: factor on the sum; ``None`` for 1/size, which gives the average. With any other factor, zero the gradients
            after each exchange: otherwise the next exchange sums the previous result over the ranks once more.
        dtype: dtype in which wider floating-point gradients are sent, such as ``torch.float16``; ``None`` for their own.
            For an average, each gradient is divided by the number of ranks before it is converted. In float16, values
            above 65504 become infinite, before and after the sum: use a loss that is a mean, or use bfloat16.
        bucket_bytes: largest size of a bucket with several gradients (at most 1 MB for the first bucket); ``None`` for
            25 MB, 0 for one bucket per gradient.
        groups: sets of parameters; parameters of the same set, dtype and device share a bucket, whatever its size.
        sparse_as_dense: whether sparse gradients are sent as dense ones, and made sparse again.
        coalesce: whether a sparse gradient's entries that have equal indices are added. If not, the result has the entries
            of all ranks in rank order. As in Horovod, these entries are not scaled if both factors are 1. With any other
            factors, they are divided by the number of ranks.
        average_first: whether gradients on the CPU may be multiplied by 1/size before the sum, while they are copied to
            their bucket, as in DDP. Horovod multiplies after the sum. Affects only averages over 2, 4, 8, … ranks. The bits
            are equal, with two exceptions: an average is finite even if the sum would overflow, and subnormal numbers are
            rounded before the sum.
    """

    before: float = 1.0
    after: float | None = None
    dtype: torch.dtype | None = None
    bucket_bytes: int | None = None
    groups: Sequence[Sequence[torch.Tensor]] = ()
    sparse_as_dense: bool = False
    coalesce: bool = True
    average_first: bool = True

    def __post_init__(self) -> None:
        # A generator, such as ``layer.parameters()``, can be read only once.
        groups = tuple(self.groups)
        if any(isinstance(group, torch.Tensor) for group in groups):
            raise ValueError(
                "groups is a list of parameters, and must be a list of lists of parameters: put the parameters that share "
                "a bucket into a list of their own"
            )
        object.__setattr__(self, "groups", tuple(map(tuple, groups)))

    @property
    def sums(self) -> bool:
        """Return whether the result is a plain sum: both factors are 1."""
        return self.before == self.after == 1

    def factor_after(self, size: int) -> float:
        """Return the factor on a sum over ``size`` ranks."""
        return 1.0 / size if self.after is None else self.after


AVERAGE = Transfer()


@dataclass(frozen=True, slots=True)
class Place:
    """Place of one gradient in its bucket.

    Attributes:
        number: the parameter's index in registration order.
        offset: where the gradient starts, in elements of its dtype.
        shape: the gradient's shape.
        strides: the gradient's strides, in elements. The gradient has no gaps, but may be channels_last.
    """

    number: int
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The gradients of one bucket, back to back.

    Attributes:
        dtype: dtype of the gradients.
        device: device of the gradients.
        places: the gradients' places, in the order of their offsets.
        numel: how many elements the gradients have together.
    """

    dtype: torch.dtype
    device: torch.device
    places: tuple[Place, ...] = ()
    numel: int = 0


def lay_out(params: Sequence[torch.Tensor], transfer: Transfer = AVERAGE) -> list[BucketLayout]:
    """Return the layouts of the buckets, in the order in which they are sent. ``params`` are in registration order."""
    layouts = []
    for numbers in _partition(params, transfer):
        places, offset = [], 0
        for number in numbers:
            p = params[number]
            places.append(Place(number, offset, p.shape, dense_strides(p)))
            offset += p.numel()
        first = params[numbers[0]]
        layouts.append(BucketLayout(gradient_dtype(first), first.device, tuple(places), offset))
    return layouts


def _partition(params: Sequence[torch.Tensor], transfer: Transfer) -> list[list[int]]:
    """Return the indices of the parameters in each bucket."""
    group_of = {p: number for number, group in enumerate(transfer.groups) for p in group}
    buckets: list[list[int]] = []
    unfinished: dict[tuple[torch.dtype, torch.device, int | None], tuple[list[int], int]] = {}
    for number in reversed(range(len(params))):
        p = params[number]
        group, dtype = group_of.get(p), gradient_dtype(p)
        key = dtype, p.device, group
        size = p.numel() * dtype.itemsize
        bucket, filled = unfinished.get(key, ([], 0))
        limit = BUCKET_BYTES if transfer.bucket_bytes is None else transfer.bucket_bytes
        if buckets and bucket is buckets[0]:
            limit = min(limit, FIRST_BUCKET_BYTES)
        if not bucket or (group is None and filled + size > limit):
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(number)
        unfinished[key] = (bucket, filled + size)
    return buckets


def dense_strides(p: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of ``p`` if it fills its memory without gaps, else the strides of a dense tensor like it."""
    return tuple(torch.empty_like(p, device="meta").stride())


def with_strides(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a copy of ``tensor`` with ``strides``, on the same device."""
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
