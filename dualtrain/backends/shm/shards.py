"""Buffers of every rank in memory that the ranks of a host share, and the reduction of this rank's shard of them.

Each rank reduces its shard piece by piece: the values of all ranks into the first rank's buffer, then from there into
all others, while the piece is in the processor's cache.
"""

from __future__ import annotations

import torch

from dualtrain.backends.base import FOLD, ReduceOp
from dualtrain.backends.shm.semaphores import CACHE_LINE

PAGE = 4096
_PIECE_BYTES = 256 << 10
_PLANS = 64  # cached per region


class Region:
    """One buffer per rank, consecutive in ``memory`` (uint8); ``slots`` are their bytes, in rank order."""

    def __init__(self, memory: torch.Tensor, size: int, rank: int) -> None:
        self.slots = list(memory.view(size, -1))
        self._rank = rank
        self._plans: dict[tuple[torch.dtype, int, int], Plan] = {}

    def plan(self, dtype: torch.dtype, count: int, scaled: int) -> Plan:
        """Plan that reduces the first ``count`` elements, and scales the first ``scaled`` of them."""
        key = dtype, count, scaled
        if key not in self._plans:
            if len(self._plans) == _PLANS:
                self._plans.clear()
            with torch.inference_mode(False):  # cached for callers in any mode
                buffers = [slot[: count * dtype.itemsize].view(dtype) for slot in self.slots]
                self._plans[key] = Plan(buffers, self._rank, scaled)
        return self._plans[key]


class Plan:
    """Reduction of a rank's shard of equal buffers.

    Attributes:
        own: this rank's buffer.
        shard: this rank's shard of the first rank's buffer.
    """

    def __init__(self, buffers: list[torch.Tensor], rank: int, scaled: int) -> None:
        self.own = buffers[rank]
        begin, end = _shard(len(self.own), len(buffers), rank)
        mine = [buffer[begin:end] for buffer in buffers]
        self.shard = mine[0]
        step = _PIECE_BYTES // self.own.element_size()
        #: Of each piece: the first rank's values, the part of them that is scaled, and the other ranks' values.
        self._pieces: list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = []
        for start in range(0, end - begin, step):
            first, *others = (part[start : start + step] for part in mine)
            self._pieces.append((first, first[: max(0, scaled - begin - start)], others))

    def reduce(self, op: ReduceOp, factor: float) -> None:
        """Reduce the shard in rank order, scale it by ``factor``, and write it into all buffers."""
        fold = FOLD[op]
        for first, scaled, others in self._pieces:
            for other in others:
                fold(first, other, out=first)
            if factor != 1:
                scaled.mul_(factor)
            for other in others:
                other.copy_(first)

    def reduce_on_host(self, op: ReduceOp) -> None:
        """First half of :meth:`reduce`: the reduction is in ``shard``, not scaled."""
        fold = FOLD[op]
        for first, _, others in self._pieces:
            for other in others:
                fold(first, other, out=first)

    def copy_to_all(self, factor: float) -> None:
        """Second half of :meth:`reduce`: scale ``shard`` and write it into all buffers."""
        for first, scaled, others in self._pieces:
            if factor != 1:
                scaled.mul_(factor)
            for other in others:
                other.copy_(first)


def _shard(count: int, size: int, rank: int) -> tuple[int, int]:
    """Begin and end of a rank's elements: whole cache lines, so that no two ranks write to the same one."""
    lines = -(-count // CACHE_LINE)
    return min(count, lines * rank // size * CACHE_LINE), min(count, lines * (rank + 1) // size * CACHE_LINE)
