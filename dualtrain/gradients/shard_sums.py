"""Sum the gradients in a bucket: over the ranks in the backend's order, or over shards along a tree.

With a tree, a rank computes several shards of a step, one after another, and keeps their partial sums in buffers. It adds
up as many partial sums as the tree allows; only the remaining ones are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from dualtrain.backends import Backend
from dualtrain.backends.base import Work
from dualtrain.backends.sum_order import SumOrder

#: Function that writes a shard's gradients to a buffer, or adds them to its content if the second argument is true.
Put = Callable[[torch.Tensor, bool], None]


class BucketSum(Protocol):
    """Method of summing the buffer of a bucket."""

    shards: int

    def begin(self) -> None:
        """Forget shards that were added in a step that was not completed."""

    def add_shard(self, put: Put) -> None:
        """Add a shard, which ``put`` writes, to the partial sums; not for a rank's last shard. Not collective."""

    def clear(self) -> None:
        """Replace all shards of this rank but the last one by zeros."""

    def start(self, name: str, factor: float, tail: int) -> Work[None]:
        """Start the sum of all shards; the buffer holds this rank's last shard. See ``Backend.start_sum``."""


class RankSum:
    """Sum over the ranks, which have one shard each, in the backend's own order."""

    def __init__(self, backend: Backend, wire: torch.Tensor) -> None:
        self.shards = backend.size
        self._backend, self._wire = backend, wire

    def begin(self) -> None:
        """See :class:`BucketSum`."""

    def add_shard(self, put: Put) -> None:
        """Raise RuntimeError: a rank has no shard before its last one."""
        raise RuntimeError("a rank has one shard in a step, unless the order of the sum is that of virtual ranks")

    def clear(self) -> None:
        """See :class:`BucketSum`."""

    def start(self, name: str, factor: float, tail: int) -> Work[None]:
        """See :class:`BucketSum`."""
        return self._backend.start_sum(self._wire, name, factor, tail)


class ShardSums:
    """Sum over all shards along the tree of ``order``.

    Args:
        backend: the ranks. Allocating the memory of the partial sums is collective.
        wire: the bucket's buffer.
        order: the tree, and the shards that each rank has.
    """

    def __init__(self, backend: Backend, wire: torch.Tensor, order: SumOrder) -> None:
        self.shards = order.shards
        self._backend, self._wire, self._order = backend, wire, order
        self._merges = order.merges[backend.rank]
        self._partial = [backend.new_buffer(wire.numel(), wire.dtype, wire.device) for _ in range(order.buffers)]
        self._kept, self._added = 0, 0  # how many partial sums are kept, and how many shards were added, in this step

    def begin(self) -> None:
        """See :class:`BucketSum`."""
        self._kept = self._added = 0

    @torch.no_grad()
    def add_shard(self, put: Put) -> None:
        """See :class:`BucketSum`."""
        if self._added >= len(self._merges) - 1:
            raise RuntimeError(f"this rank has {len(self._merges)} shards in a step, and was given more")
        merges = self._merges[self._added]
        if merges == 0:
            put(self._partial[self._kept], False)
            self._kept += 1
        else:
            put(self._partial[self._kept - 1], True)
            for _ in range(merges - 1):
                self._kept -= 1
                self._partial[self._kept - 1].add_(self._partial[self._kept])
        self._added += 1

    def clear(self) -> None:
        """See :class:`BucketSum`."""
        self._kept = self._added = 0
        for partial in self._partial:
            partial.zero_()
        for merges in self._merges[:-1]:
            self._kept += 1 - merges
            self._added += 1

    @torch.no_grad()
    def start(self, name: str, factor: float, tail: int) -> Work[None]:
        """See :class:`BucketSum`.

        Raises:
            RuntimeError: this rank has shards that were not added.
        """
        if self._added != max(0, len(self._merges) - 1):
            raise RuntimeError(f"this rank has {len(self._merges)} shards in a step, and was given {self._added + 1}")
        for _ in range(self._merges[-1] if self._merges else 0):
            self._kept -= 1
            torch.add(self._partial[self._kept], self._wire, out=self._wire)
        self._kept = self._added = 0
        return self._backend.start_tree_sum(self._wire, self._partial, self._order, name, factor, tail)
