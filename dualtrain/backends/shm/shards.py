"""One buffer per rank, in memory that the ranks of a host share, and the reduction of one shard of all these buffers.

The elements are divided into one shard per rank. Each rank reduces its shard piece by piece. It reduces all ranks' values
of a piece into one buffer: the first rank's buffer or, with a tree, the first partial sum. Then it copies the result into
the other buffers; on one host, it does this at once, while the piece is in the CPU cache.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dualtrain.backends.base import FOLD, ReduceOp
from dualtrain.backends.shm.semaphores import CACHE_LINE
from dualtrain.backends.subnormals import keep_subnormals
from dualtrain.backends.sum_order import Addition, SumOrder

PAGE = mmap.PAGESIZE
_PIECE_BYTES = 256 << 10
_PLANS = 64  # largest number of plans that a region caches


class Region:
    """One buffer per rank.

    Args:
        slots: the buffers in rank order, as bytes, of equal size.
        rank: this process's rank.
    """

    def __init__(self, slots: Sequence[torch.Tensor], rank: int) -> None:
        self.slots = list(slots)
        self._rank = rank
        self._plans: dict[tuple[torch.dtype, int, int, SumOrder | None], Plan] = {}

    def part(self, begin: int, end: int) -> Region:
        """Return bytes ``begin`` to ``end`` of every buffer as a new region."""
        return Region([slot[begin:end] for slot in self.slots], self._rank)

    def replace(self, rank: int, slot: torch.Tensor) -> None:
        """Replace the buffer of ``rank`` by a different mapping of the same memory."""
        self.slots[rank] = slot
        self._plans.clear()

    def close(self) -> None:
        """Drop all references to the memory."""
        self.slots.clear()
        self._plans.clear()

    def plan(self, dtype: torch.dtype, count: int, scaled: int, tree: Tree | None = None) -> Plan:
        """Return a plan that reduces the first ``count`` elements, and scales the first ``scaled`` of them.

        Without ``tree``, it reduces in rank order.
        """
        key = dtype, count, scaled, tree.order if tree is not None else None
        if key not in self._plans:
            if len(self._plans) == _PLANS:
                self._plans.clear()
            with torch.inference_mode(False):  # callers in any mode use the cached plan
                self._plans[key] = self._new_plan(dtype, count, scaled, tree)
        return self._plans[key]

    def _new_plan(self, dtype: torch.dtype, count: int, scaled: int, tree: Tree | None) -> Plan:
        def buffers(region: Region) -> list[torch.Tensor]:
            return [slot[: count * dtype.itemsize].view(dtype) for slot in region.slots]

        results = buffers(self)
        if tree is None:
            in_rank_order = [Addition(0, source) for source in range(1, len(results))]
            return Plan(results, results, in_rank_order, self._rank, scaled)
        others = [buffers(region) for region in tree.others]
        parts = [
            one[rank]
            for rank, nodes in enumerate(tree.order.owned)
            for one in (*others[: max(0, len(nodes) - 1)], *([results] if nodes else []))
        ]
        return Plan(parts, results, tree.order.additions, self._rank, scaled)


class Tree(NamedTuple):
    """A sum along the tree of ``order``.

    The region on which :meth:`Region.plan` is called holds each rank's newest partial sum. The regions in ``others`` hold
    the earlier ones.
    """

    order: SumOrder
    others: list[Region]


class Plan:
    """Reduction of one rank's shard of several buffers of equal size.

    Args:
        parts: the buffers to reduce.
        results: for each rank, the buffer that gets the result.
        additions: pairs of indices into ``parts``, to reduce in this order; afterwards the first part has the result.
        rank: this process's rank.
        scaled: how many elements, from the first on, are scaled.

    Attributes:
        own: this rank's buffer.
        shard: this rank's shard of the first part.
    """

    def __init__(
        self,
        parts: list[torch.Tensor],
        results: list[torch.Tensor],
        additions: Sequence[Addition],
        rank: int,
        scaled: int,
    ) -> None:
        self.own = results[rank]
        self._additions = additions
        begin, end = _shard(len(self.own), len(results), rank)
        mine = [part[begin:end] for part in parts]
        targets = [result[begin:end] for result in results if result is not parts[0]]
        self.shard = mine[0]
        step = _PIECE_BYTES // self.own.element_size()
        self._pieces = []
        for start in range(0, end - begin, step):
            values = [part[start : start + step] for part in mine]
            copies = [target[start : start + step] for target in targets]
            self._pieces.append(_Piece(values, values[0][: max(0, scaled - begin - start)], copies))

    @keep_subnormals
    def reduce(self, op: ReduceOp, factor: float) -> None:
        """Reduce the shard, scale it by ``factor``, and write it into all results.

        Elements after the first ``scaled`` ones of the buffer are not scaled.
        """
        for piece in self._pieces:
            piece.reduce(op, self._additions)
            piece.copy_to_all(factor)

    @keep_subnormals
    def reduce_on_host(self, op: ReduceOp) -> None:
        """Do the first half of :meth:`reduce`: reduce into ``shard``, without scaling."""
        for piece in self._pieces:
            piece.reduce(op, self._additions)

    @keep_subnormals
    def copy_to_all(self, factor: float) -> None:
        """Do the second half of :meth:`reduce`: scale ``shard`` and write it into all results."""
        for piece in self._pieces:
            piece.copy_to_all(factor)


class _Piece(NamedTuple):
    """A piece of a shard: its values in all parts, its elements to scale, and the other buffers that get the result."""

    values: list[torch.Tensor]
    to_scale: torch.Tensor
    copies: list[torch.Tensor]

    def reduce(self, op: ReduceOp, additions: Sequence[Addition]) -> None:
        """Reduce the values into the first one."""
        fold, values = FOLD[op], self.values
        for target, source in additions:
            fold(values[target], values[source], out=values[target])

    def copy_to_all(self, factor: float) -> None:
        """Scale the result, and copy it into the other buffers."""
        if factor != 1:
            self.to_scale.mul_(factor)
        for copy in self.copies:
            copy.copy_(self.values[0])


def _shard(count: int, size: int, rank: int) -> tuple[int, int]:
    """Return begin and end of a rank's elements.

    Each shard that is not empty begins at a multiple of ``CACHE_LINE`` elements. An element has at least one byte, so two
    ranks never write to the same cache line.
    """
    lines = -(-count // CACHE_LINE)
    return min(count, lines * rank // size * CACHE_LINE), min(count, lines * (rank + 1) // size * CACHE_LINE)
