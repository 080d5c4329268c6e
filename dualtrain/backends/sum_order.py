"""Order in which the gradients of V shards of a batch are added, the same for any number of ranks: a fixed binary tree.

The tree over one shard is that shard. The tree over n > 1 shards is the sum of two trees: over the first k shards and over
the other n - k, where k is the largest power of two below n (RFC 6962, section 2.1). A rank owns consecutive shards, which
form a few complete subtrees. The rank adds up each subtree separately, so the additions are the same for any number of
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from dualtrain.backends.subnormals import keep_subnormals


class Node(NamedTuple):
    """The subtree over ``length`` shards from ``first`` on."""

    first: int
    length: int

    def children(self) -> tuple[Node, Node]:
        """Return the two children of this subtree. The subtree must have two or more shards.

        The sum of this subtree is the sum of its left child plus that of its right child.
        """
        left = 1 << (self.length - 1).bit_length() - 1
        return Node(self.first, left), Node(self.first + left, self.length - left)


class Addition(NamedTuple):
    """Addition of the partial sum ``source`` to the partial sum ``target``, as indices into :attr:`SumOrder.nodes`."""

    target: int
    source: int


class SumOrder:
    """The tree over ``shards`` shards, and the shards that each of ``size`` ranks owns. Equal arguments give equal orders.

    The first ``shards % size`` ranks own one shard more than the others. If there are fewer shards than ranks, the
    last ranks own none.

    Attributes:
        shards: the number of shards, V.
        ranges: for each rank, the indices of its shards.
        owned: for each rank, the subtrees that its shards form, from left to right.
        nodes: the subtrees of all ranks, from left to right; their partial sums are exchanged.
        additions: additions of partial sums; made in this order, they leave the sum of all shards in the first partial sum.
        merges: for each rank and each of its shards, how often the rank merges its two newest partial sums after it has
            computed that shard.
        buffers: how many buffers each rank needs to send its partial sums: the largest number of partial sums that any rank
            sends, minus 1, since the last one is sent from the bucket.

    Raises:
        ValueError: ``shards`` is below 1.
    """

    def __init__(self, shards: int, size: int) -> None:
        if shards < 1:
            raise ValueError(f"the number of shards must be 1 or more, not {shards}")
        self.shards = shards
        bounds = [rank * (shards // size) + min(rank, shards % size) for rank in range(size + 1)]
        self.ranges = [range(begin, end) for begin, end in pairwise(bounds)]
        root = Node(0, shards)
        self.owned = [_cover(root, indices) for indices in self.ranges]
        self.nodes = [node for nodes in self.owned for node in nodes]
        self.additions: list[Addition] = []
        self._add_up(root, {node: number for number, node in enumerate(self.nodes)})
        parents = _parents(root)
        self.merges = [_merges(parents, indices) for indices in self.ranges]
        self.buffers = max(0, *(len(nodes) - 1 for nodes in self.owned))

    @property
    def is_plain_sum(self) -> bool:
        """Return whether an ordinary sum over the ranks has the same bits: at most two ranks, with one partial sum each."""
        return len(self.owned) <= 2 and all(len(nodes) == 1 for nodes in self.owned)

    @keep_subnormals
    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add up ``parts``, one for each of ``nodes``, in place; return the first part, which then holds the sum."""
        for target, source in self.additions:
            parts[target].add_(parts[source])
        return parts[0]

    @keep_subnormals
    def total(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``rows``, (V, …), one row for each shard, added along the tree. Does not change ``rows``."""
        parts = list(rows)
        return self._fold(Node(0, self.shards), parts)

    def _fold(self, node: Node, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if node.length == 1:
            return parts[node.first]
        left, right = (self._fold(child, parts) for child in node.children())
        return left + right

    def _add_up(self, node: Node, numbers: dict[Node, int]) -> int:
        """Append the additions that compute the sum of ``node``; return the index of the partial sum that then holds it."""
        if node in numbers:
            return numbers[node]
        target, source = (self._add_up(child, numbers) for child in node.children())
        self.additions.append(Addition(target, source))
        return target


@lru_cache(maxsize=64)
def sum_order(shards: int, size: int) -> SumOrder:
    """Return the order of ``shards`` shards on ``size`` ranks."""
    return SumOrder(shards, size)


def _cover(node: Node, indices: range) -> list[Node]:
    """Return the largest subtrees of ``node`` whose shards are all in ``indices``, from left to right."""
    begin, end = max(node.first, indices.start), min(node.first + node.length, indices.stop)
    if begin >= end:
        return []
    if end - begin == node.length:
        return [node]
    return [part for child in node.children() for part in _cover(child, indices)]


def _merges(parents: dict[tuple[Node, Node], Node], indices: range) -> list[int]:
    """Return, for each shard of a rank, how often the rank merges its two newest partial sums after that shard."""
    kept: list[Node] = []
    merges = []
    for shard in indices:
        newest, count = Node(shard, 1), 0
        while kept and (kept[-1], newest) in parents:
            newest, count = parents[kept.pop(), newest], count + 1
        kept.append(newest)
        merges.append(count)
    return merges


def _parents(node: Node) -> dict[tuple[Node, Node], Node]:
    """Return the parent of each pair of children in the subtree ``node``."""
    if node.length == 1:
        return {}
    left, right = node.children()
    return {(left, right): node, **_parents(left), **_parents(right)}
