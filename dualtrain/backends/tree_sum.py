"""Addition of all ranks' partial sums along a fixed tree: the bits depend on the tree alone, not on the library that sends.

An all-reduce adds in an order that depends on that library and on the number of ranks. Here each rank receives its slice of
every partial sum (all-to-all) and adds the slices along the tree; then the sums are gathered on all ranks. Small
partial sums are gathered whole instead, in one operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dualtrain.backends.base import GradientPath, Work
from dualtrain.backends.inference import ordinary
from dualtrain.backends.subnormals import keep_subnormals
from dualtrain.backends.sum_order import SumOrder
from dualtrain.backends.wire import as_bytes
from dualtrain.errors import BackendError

GATHERED_BYTES = 16 << 10  # up to this size, partial sums are gathered whole


class TreeSum(Work[None]):
    """Handle of the sum of all ranks' partial sums. Construction starts the first exchange.

    ``others`` and ``tensor`` hold this rank's partial sums, if it has any; ``tensor`` gets the result. See
    :meth:`dualtrain.backends.collectives.Backend.start_tree_sum`.
    """

    def __init__(
        self,
        backend: GradientPath,
        tensor: torch.Tensor,
        others: Sequence[torch.Tensor],
        order: SumOrder,
        name: str,
        factor: float,
        tail: int,
    ) -> None:
        self._backend, self._order, self._name, self._factor = backend, order, name, factor
        self._tensor = ordinary(tensor).view(-1)
        self._scaled = tensor.numel() - tail
        self._counts = [len(nodes) for nodes in order.owned]
        count = self._counts[backend.rank]
        own_sums = [other.view(-1) for other in others[: count - 1]] + [self._tensor] if count else []
        self._adding = self._ended = False
        whole = tensor.nbytes <= GATHERED_BYTES
        #: Number of elements in each rank's slice (the last slices may be shorter, or empty), or in the whole tensor if it
        #: is gathered whole.
        self._width = tensor.numel() if whole else -(-tensor.numel() // backend.size)
        self._work, self._received = self._gather(own_sums) if whole else self._scatter(own_sums)
        self._whole = whole

    def _gather(self, own_sums: Sequence[torch.Tensor]) -> tuple[Work[None], torch.Tensor]:
        """Start sending all partial sums to all ranks; return the operation and its output.

        Ranks that have fewer partial sums than others pad with zeros.
        """
        most = max(self._counts)
        sent = self._tensor.new_zeros(most, self._width)
        for row, part in zip(sent, own_sums, strict=False):
            row.copy_(part)
        received = sent.new_empty(self._backend.size, most, self._width)
        return self._backend.start_allgather(as_bytes(received), as_bytes(sent), self._name), received

    def _scatter(self, own_sums: Sequence[torch.Tensor]) -> tuple[Work[None], torch.Tensor]:
        """Start sending slice r of every partial sum to rank r; return the operation and its output."""
        tensor, size, itemsize = self._tensor, self._backend.size, self._tensor.element_size()
        slices = [self._slice(rank) for rank in range(size)]
        lengths = [end - begin for begin, end in slices]
        if len(own_sums) == 1:
            sent = own_sums[0]  # the slices of a single partial sum are in order already
        else:
            sent = torch.cat([part[begin:end] for begin, end in slices for part in own_sums] or [tensor[:0]])
        width = lengths[self._backend.rank]
        received = tensor.new_empty(sum(self._counts) * width)
        counts = [count * width * itemsize for count in self._counts]
        sizes = [len(own_sums) * length * itemsize for length in lengths]
        return self._backend.start_alltoall(as_bytes(received), as_bytes(sent), counts, sizes, self._name), received

    def _slice(self, rank: int) -> tuple[int, int]:
        numel = self._tensor.numel()
        return min(numel, rank * self._width), min(numel, (rank + 1) * self._width)

    @torch.no_grad()
    def wait(self) -> None:
        if self._ended:
            return
        self._work.wait()
        if self._adding:
            raise BackendError(f"sum of {self._name!r} has failed, or was interrupted: restart the ranks")
        self._adding = True
        if self._whole:
            rows = [row for count, rows in zip(self._counts, self._received, strict=True) for row in rows[:count]]
            self._tensor.copy_(self._sum(rows, 0))
        else:
            self._gather_slices()
        self._ended = True

    def _gather_slices(self) -> None:
        begin, end = self._slice(self._backend.rank)
        padded = self._tensor.new_zeros(self._width)
        if begin < end:
            padded[: end - begin] = self._sum(self._received.split(end - begin), begin)
        output = padded.new_empty(self._backend.size * self._width)
        self._backend.start_allgather(as_bytes(output), as_bytes(padded), f"{self._name}.gather").wait()
        self._tensor.copy_(output[: self._tensor.numel()])

    @keep_subnormals
    def _sum(self, parts: Sequence[torch.Tensor], begin: int) -> torch.Tensor:
        """Add up ``parts``, which begin at element ``begin`` of the tensor, and scale the sum.

        The last ``tail`` elements of the tensor are not scaled.
        """
        total = self._order.sum(parts)
        if self._factor != 1:
            total[: max(0, self._scaled - begin)].mul_(self._factor)
        return total

    def done(self) -> bool:
        """Return whether :meth:`wait` would return at once.

        If the partial sums are not gathered whole, this is False until ``wait`` has returned, because ``wait`` starts a
        second exchange, which gathers the slices. The ranks must start all exchanges in the same order, so polling must not
        start one.
        """
        return self._ended or (self._whole and self._work.done())
