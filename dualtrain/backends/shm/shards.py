"""A buffer of every rank in memory that a host's ranks share, and the part of the work on them that is this rank's.

Each rank reduces its shard, piece by piece: all ranks' values of a piece into the first rank's, then from there into all
others', while they are in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dualtrain.backends.base import ReduceOp
from dualtrain.backends.semaphores import LINE

PAGE = 4096
_PIECE_BYTES = 256 << 10
_PLANS = 64  # that a region remembers

#: Each leaves the result in the first of the two.
_FOLD: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.MIN: lambda a, b: torch.minimum(a, b, out=a),
    ReduceOp.MAX: lambda a, b: torch.maximum(a, b, out=a),
    ReduceOp.PRODUCT: torch.Tensor.mul_,
}


class Region:
    """A buffer of every rank, one after another in ``memory`` (uint8); ``slots`` are their bytes, in rank order."""

    def __init__(self, memory: torch.Tensor, size: int, rank: int) -> None:
        self.slots = list(memory.view(size, -1))
        self._rank = rank
        self._plans: dict[tuple[torch.dtype, int, int], Plan] = {}

    def plan(self, dtype: torch.dtype, count: int, scaled: int) -> Plan:
        """How the first ``count`` elements are reduced, and the first ``scaled`` of them scaled."""
        key = dtype, count, scaled
        if key not in self._plans:
            if len(self._plans) == _PLANS:
                self._plans.clear()
            with torch.inference_mode(False):  # they are used again, in any mode
                buffers = [slot[: count * dtype.itemsize].view(dtype) for slot in self.slots]
                self._plans[key] = Plan(buffers, self._rank, scaled)
        return self._plans[key]


class Plan:
    """What a rank does to its shard of equal buffers.

    Attributes:
        own: this rank's buffer.
        shard: the first rank's buffer, as far as it is of this rank's shard.
    """

    def __init__(self, buffers: list[torch.Tensor], rank: int, scaled: int) -> None:
        self.own = buffers[rank]
        begin, end = _shard(len(self.own), len(buffers), rank)
        mine = [buffer[begin:end] for buffer in buffers]
        self.shard = mine[0]
        step = _PIECE_BYTES // self.own.element_size()
        #: Of each piece: the first rank's values, those of them that are scaled, and the other ranks'.
        self._pieces: list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = []
        for start in range(0, end - begin, step):
            first, *others = (part[start : start + step] for part in mine)
            self._pieces.append((first, first[: max(0, scaled - begin - start)], others))

    def reduce(self, op: ReduceOp, factor: float) -> None:
        """All buffers' values become their reduction, in rank order, times ``factor`` as far as they are to be scaled."""
        fold = _FOLD[op]
        for first, scaled, others in self._pieces:
            for other in others:
                fold(first, other)
            if factor != 1:
                scaled.mul_(factor)
            for other in others:
                other.copy_(first)

    def gather(self, op: ReduceOp) -> None:
        """The first half of :meth:`reduce`: the reduction stands in ``shard``, not scaled."""
        fold = _FOLD[op]
        for first, _, others in self._pieces:
            for other in others:
                fold(first, other)

    def hand_out(self, factor: float) -> None:
        """The second half: what stands in ``shard`` is scaled, and goes into all buffers."""
        for first, scaled, others in self._pieces:
            if factor != 1:
                scaled.mul_(factor)
            for other in others:
                other.copy_(first)


def _shard(count: int, size: int, rank: int) -> tuple[int, int]:
    """The elements of a rank; whole lines of the cache, so that no two ranks write to one."""
    lines = -(-count // LINE)
    return min(count, lines * rank // size * LINE), min(count, lines * (rank + 1) // size * LINE)
