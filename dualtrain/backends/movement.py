"""Collective calls that move tensors between ranks: broadcast, allgather, alltoall."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import overload

import torch

from dualtrain.backends import wire
from dualtrain.backends.agreement import Call, agree
from dualtrain.backends.base import Broadcast, Gather, Work
from dualtrain.backends.calls import Calls, raise_problem
from dualtrain.backends.inference import ordinary


def rows_to_send(tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None, size: int) -> list[int]:
    """Return the number of rows of ``tensor`` to send to each of ``size`` ranks; without ``splits``, equal numbers.

    Raises:
        ValueError: ``tensor`` cannot be split in this way.
    """
    if tensor.dim() == 0:
        raise ValueError("a tensor without a dimension has no rows to split: reshape it to (1,)")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(f"{rows} rows cannot be split equally over {size} ranks: pass splits")
        return [rows // size] * size
    if any(int(n) != n for n in splits):
        raise ValueError(f"splits must be whole numbers, not {[float(n) for n in splits]}")
    numbers = [int(n) for n in splits]
    if len(numbers) != size or min(numbers) < 0 or sum(numbers) > rows:
        raise ValueError(f"splits must be {size} numbers, none negative, that add up to at most {rows} rows, not {numbers}")
    return numbers


class Movement(Calls):
    """The calls that move tensors. They send every dtype as bytes."""

    def broadcast(self, tensor: torch.Tensor, root: int = 0, name: str | None = None) -> torch.Tensor:
        """Copy rank ``root``'s ``tensor`` (the same shape and dtype on all) into a new tensor on every rank.

        Raises:
            ValueError: ``root`` is not a rank of this backend, or ``tensor`` is sparse, nested or quantized.
            TypeError: ``tensor`` is not a tensor, or ``root`` is not an integer.
            BackendError: as :meth:`allreduce`.
        """
        return self._now("broadcast", name, partial(self._broadcast, tensor, root, name))

    def broadcast_(self, tensor: torch.Tensor, root: int = 0, name: str | None = None) -> torch.Tensor:
        """:meth:`broadcast` in place. Return ``tensor``.

        Raises:
            ValueError: elements of ``tensor`` share memory (``expand``); otherwise as :meth:`broadcast`.
        """
        return self._now("broadcast", name, partial(self._broadcast_, tensor, root, name))

    def broadcast_async(self, tensor: torch.Tensor, root: int = 0, name: str | None = None) -> Work[torch.Tensor]:
        """:meth:`broadcast` without blocking."""
        try:
            call: Callable[[], torch.Tensor] = partial(self._broadcast_, _contiguous_copy(tensor), root, name)
        except Exception as problem:  # raised by ``wait``, on every rank
            call = partial(raise_problem, problem)
        return self._later("broadcast", name, call)

    def broadcast_async_(self, tensor: torch.Tensor, root: int = 0, name: str | None = None) -> Work[torch.Tensor]:
        """:meth:`broadcast_` without blocking."""
        return self._later("broadcast", name, partial(self._broadcast_, tensor, root, name))

    def allgather(self, tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
        """Concatenate every rank's ``tensor`` in rank order, on every rank.

        The first dimension may differ between ranks, and may be 0; the other dimensions must be equal. Tensors without
        a dimension are gathered into a tensor of shape (size,).

        Raises:
            ValueError: ``tensor`` is sparse, nested or quantized.
            TypeError: ``tensor`` is not a tensor.
            BackendError: as :meth:`allreduce`.
        """
        return self._now("allgather", name, partial(self._allgather, tensor, name))

    def allgather_async(self, tensor: torch.Tensor, name: str | None = None) -> Work[torch.Tensor]:
        """:meth:`allgather` without blocking."""
        return self._later("allgather", name, partial(self._allgather, tensor, name))

    @overload
    def alltoall(self, tensor: torch.Tensor, splits: None = None, name: str | None = None) -> torch.Tensor: ...
    @overload
    def alltoall(
        self, tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor, name: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def alltoall(
        self, tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None = None, name: str | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Send rows to every rank, and receive the rows that every rank sends to this rank, in rank order.

        Args:
            tensor: the rows to send: the first ``splits[0]`` to rank 0, the next ``splits[1]`` to rank 1, …
            splits: ``size`` whole numbers that add up to at most the number of rows; rows beyond their sum are not sent.
                Without ``splits``, every rank gets the same number of rows.
            name: shown in errors and reports.

        Returns:
            The received rows; with ``splits`` also how many came from each rank (int32, (size,), on the CPU).

        Raises:
            ValueError: ``tensor`` has no dimension, is sparse, nested or quantized, or cannot be split equally; or
                ``splits`` does not fit it.
            TypeError: ``tensor`` is not a tensor.
            BackendError: as :meth:`allreduce`.
        """
        rows, received = self._now("alltoall", name, partial(self._alltoall, tensor, splits, name))
        return rows if splits is None else (rows, received)

    def alltoall_async(
        self, tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None = None, name: str | None = None
    ) -> Work[tuple[torch.Tensor, torch.Tensor]]:
        """:meth:`alltoall` without blocking; the result always includes how many rows came from each rank."""
        return self._later("alltoall", name, partial(self._alltoall, tensor, splits, name))

    # -- implementation -------------------------------------------------------------------------------------------

    def _broadcast(self, tensor: torch.Tensor, root: int, name: str | None) -> torch.Tensor:
        return self._broadcast_(_contiguous_copy(tensor), root, name)

    @torch.no_grad()
    def _broadcast_(self, tensor: torch.Tensor, root: int, name: str | None) -> torch.Tensor:
        tensor = wire.checked_writable(tensor)
        root = self._checked_root(root)
        data = wire.as_bytes(tensor)
        broadcast = Broadcast(root, data if self.rank == root else None)
        # ``agree`` sends short data together with the comparison of the calls, and sets ``result``.
        agree(self, Call.on("broadcast", tensor, name, root=root), data=broadcast)
        if broadcast.result is not None:
            ordinary(data).copy_(broadcast.result)
        elif data.numel():
            self.start_broadcast(data, root, name or "broadcast").wait()
        if data.data_ptr() != tensor.data_ptr():
            ordinary(tensor).copy_(wire.from_bytes(data, tensor.dtype, tuple(tensor.shape)))
        return tensor

    @torch.no_grad()
    def _allgather(self, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        tensor = wire.checked_dense(tensor).detach()
        tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
        gather = Gather(wire.as_bytes(tensor), tensor.shape[1:].numel() * tensor.element_size())
        rows = agree(self, Call.on("allgather", tensor, name, rows_may_differ=True), tensor.shape[0], gather)
        if gather.result is not None:
            return wire.from_bytes(gather.result.clone(), tensor.dtype, (sum(rows), *tensor.shape[1:]))
        return self.gather_rows(tensor, rows, name or "allgather")

    def gather_rows(self, tensor: torch.Tensor, rows: list[int], name: str) -> torch.Tensor:
        """Concatenate every rank's rows in rank order. Collective; blocks.

        ``rows`` is each rank's number of rows, which all ranks know.
        """
        row_bytes = tensor.shape[1:].numel() * tensor.element_size()
        parts = self.gather(wire.as_bytes(tensor), [n * row_bytes for n in rows], name)
        return wire.from_bytes(torch.cat(parts), tensor.dtype, (sum(rows), *tensor.shape[1:]))

    def gather(self, data: torch.Tensor, lengths: list[int], name: str) -> list[torch.Tensor]:
        """Gather every rank's bytes in rank order; all ranks know the ``lengths``. Collective; blocks.

        The bytes are padded to the greatest length, since ``start_allgather`` gathers only tensors of equal length.
        """
        parts = self.send_data(partial(self._gather_padded, data, max(lengths), name))
        return [part[:n] for part, n in zip(parts, lengths, strict=True)]

    def _gather_padded(self, data: torch.Tensor, width: int, name: str) -> torch.Tensor:
        """Return every rank's bytes, each padded to ``width``: uint8, (size, width)."""
        output = data.new_empty(self.size * width)
        if width:
            self.start_allgather(output, torch.nn.functional.pad(data, (0, width - len(data))), name).wait()
        return output.view(self.size, width)

    @torch.no_grad()
    def _alltoall(
        self, tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None, name: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sent = rows_to_send(wire.checked_dense(tensor), splits, self.size)
        agree(self, Call.on("alltoall", tensor, name, rows_may_differ=True))
        received = [theirs[self.rank] for theirs in self.compare_numbers(sent)]
        rows = self.alltoall_rows(tensor.detach(), sent, received, name or "alltoall")
        return rows, torch.tensor(received, dtype=torch.int32, device="cpu")

    def alltoall_rows(self, tensor: torch.Tensor, sent: list[int], received: list[int], name: str) -> torch.Tensor:
        """Send ``sent[r]`` rows to rank r; return the received rows, ``received[r]`` from rank r. Collective; blocks."""
        return self.send_data(partial(self._exchange_rows, tensor, sent, received, name))

    def _exchange_rows(self, tensor: torch.Tensor, sent: list[int], received: list[int], name: str) -> torch.Tensor:
        row_bytes = tensor.shape[1:].numel() * tensor.element_size()
        data = wire.as_bytes(tensor)[: sum(sent) * row_bytes]
        output = data.new_empty(sum(received) * row_bytes)
        if row_bytes:
            counts = [n * row_bytes for n in received], [n * row_bytes for n in sent]
            self.start_alltoall(output, data, *counts, name).wait()
        return wire.from_bytes(output, tensor.dtype, (sum(received), *tensor.shape[1:]))


def _contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    return wire.checked_dense(tensor).detach().clone(memory_format=torch.contiguous_format)
