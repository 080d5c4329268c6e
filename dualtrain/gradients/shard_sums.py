"""Sum the gradients in a bucket: over the ranks in the backend's order, or over shards along a tree.

A shard is a part of a step's batch. With a tree, a rank computes the gradients of several shards, one after another, and
keeps their partial sums. It adds up as many partial sums as the tree allows; only the remaining ones are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from dualtrain.backends import Backend
from dualtrain.backends.base import Work
from dualtrain.backends.subnormals import keep_subnormals
from dualtrain.backends.sum_order import SumOrder

#: Function that splits a buffer into parts: views that together cover the buffer. The parts of a shard are in this order.
Split = Callable[[torch.Tensor], list[torch.Tensor]]


class BucketSum(Protocol):
    """Interface of the classes that sum a bucket's buffer."""

    def use(self, wire: torch.Tensor) -> None:
        """Use the buffer ``wire`` in place of the previous one, which has the same size."""

    def begin(self) -> None:
        """Discard the shards of a step that was not completed."""

    def add_shard(self, parts: list[torch.Tensor]) -> None:
        """Add a shard, which is not the rank's last one, to the partial sums. Not collective.

        Args:
            parts: the shard's values, shaped like the parts of the buffer. They are kept, and other shards are added to
                them, so they must not share memory with each other or with tensors that are used later.
        """

    def clear(self) -> None:
        """Replace all shards of this rank, except for the last one, by zeros."""

    def start(self, name: str, factor: float, tail: int) -> Work[None]:
        """Start the sum of all shards; the buffer holds this rank's last shard. See ``Backend.start_sum``."""


class RankSum:
    """Sum over the ranks, which have one shard each, in the backend's own order."""

    def __init__(self, backend: Backend, wire: torch.Tensor) -> None:
        self._backend, self._wire = backend, wire

    def use(self, wire: torch.Tensor) -> None:
        """See :class:`BucketSum`."""
        self._wire = wire

    def begin(self) -> None:
        """See :class:`BucketSum`."""

    def add_shard(self, parts: list[torch.Tensor]) -> None:
        """Raise RuntimeError: each rank has a single shard, which is also its last one."""
        raise RuntimeError("without an order, a rank has one shard in a step: give the reducer an order to add more shards")

    def clear(self) -> None:
        """See :class:`BucketSum`."""

    def start(self, name: str, factor: float, tail: int) -> Work[None]:
        """See :class:`BucketSum`."""
        return self._backend.start_sum(self._wire, name, factor, tail)


class ShardSums:
    """Sum over all shards along the tree of ``order``.

    A rank's shards are not copied: the gradients themselves are kept until they are added to each other. Only the partial
    sums that other ranks need are copied, to buffers that can be sent.

    Args:
        backend: the backend that computes the sum. The constructor is collective, since it allocates buffers.
        wire: the bucket's buffer.
        order: the tree, and the shards that each rank has.
        split: see :data:`Split`.
    """

    def __init__(self, backend: Backend, wire: torch.Tensor, order: SumOrder, split: Split) -> None:
        self._backend, self._wire, self._order, self._split = backend, wire, order, split
        self._merges = order.merges[backend.rank]
        self._sent = [backend.new_buffer(wire.numel(), wire.dtype, wire.device) for _ in range(order.buffers)]
        self._kept: list[list[torch.Tensor]] = []  # the parts of each partial sum, in the order of their shards
        self._added = 0  # how many shards were added in this step

    def use(self, wire: torch.Tensor) -> None:
        """See :class:`BucketSum`."""
        self._wire = wire

    def begin(self) -> None:
        """See :class:`BucketSum`."""
        self._kept, self._added = [], 0

    @keep_subnormals  # as in the backends' sums: the bits must not depend on which rank adds two shards
    @torch.no_grad()
    def add_shard(self, parts: list[torch.Tensor]) -> None:
        """See :class:`BucketSum`."""
        if self._added >= len(self._merges) - 1:
            raise RuntimeError(
                f"this rank has {len(self._merges)} shards in a step, and add_shard is for all of them but the last: the "
                "next reduction adds the last one"
            )
        for _ in range(self._merges[self._added]):
            newest, parts = parts, self._kept.pop()
            # Private in torch 2.5 to 2.15, and the only way to add many tensors in one call.
            torch._foreach_add_(parts, newest)
        self._kept.append(parts)
        self._added += 1

    def clear(self) -> None:
        """See :class:`BucketSum`."""
        self.begin()
        for _ in self._merges[:-1]:
            self.add_shard([torch.zeros_like(part) for part in self._split(self._wire)])

    @torch.no_grad()
    def start(self, name: str, factor: float, tail: int) -> Work[None]:
        """See :class:`BucketSum`.

        Raises:
            RuntimeError: this rank has shards that were not added.
        """
        if self._added != max(0, len(self._merges) - 1):
            raise RuntimeError(f"this rank has {len(self._merges)} shards in a step, and was given {self._added + 1}")
        self._add_kept()
        for buffer, partial in zip(self._sent, self._kept, strict=False):  # other ranks may have more partial sums
            copy_all(self._split(buffer), partial)
        self.begin()
        return self._backend.start_tree_sum(self._wire, self._sent, self._order, name, factor, tail)

    @keep_subnormals
    def _add_kept(self) -> None:
        for _ in range(self._merges[-1] if self._merges else 0):
            # Private in torch 2.5 to 2.15, as in ``add_shard``.
            torch._foreach_add_(self._split(self._wire), self._kept.pop())


@torch.no_grad()
def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each of ``sources`` into the tensor of ``targets`` with the same index."""
    if not targets:
        return
    # Private in torch 2.5 to 2.15, and the only way to copy many tensors in one call.
    try:
        torch._foreach_copy_(targets, sources)
    except NotImplementedError:  # gradients of a backward inside of forward-mode AD have tangents, which are not sent
        torch._foreach_copy_(targets, [source.detach() for source in sources])
