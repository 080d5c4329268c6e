"""Collectives with gradients for autograd, as if all ranks were one program whose loss is the sum of the ranks' losses.

(``dualtrain.hvd`` keeps Horovod's factors, which average the gradients of ``allgather`` and ``broadcast``, and multiply
those of a summing ``reducescatter`` by the number of ranks.) The backward pass is collective too: every rank must run it.
All functions return new tensors, block, and raise the errors of the backend's own calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dualtrain.backends import Backend, ReduceOp


def allreduce(tensor: torch.Tensor, backend: Backend, op: ReduceOp | str = ReduceOp.AVERAGE) -> torch.Tensor:
    """Return the sum or average of every rank's ``tensor``. The gradient is the sum or average of all ranks' gradients.

    Raises:
        ValueError: ``op`` is neither sum nor average.
        BackendError: as :meth:`dualtrain.Backend.allreduce`. All functions of this module raise it.
    """
    result: torch.Tensor = _AllReduce.apply(tensor, backend, _linear(op))
    return result


def allgather(tensor: torch.Tensor, backend: Backend) -> torch.Tensor:
    """Return every rank's rows, in rank order. The gradient of a row is the sum of all ranks' gradients of this row."""
    result: torch.Tensor = _AllGather.apply(tensor, backend)
    return result


def broadcast(tensor: torch.Tensor, backend: Backend, root: int = 0) -> torch.Tensor:
    """Return the root's ``tensor``. The gradient is the sum of all ranks' gradients at the root, zero elsewhere."""
    result: torch.Tensor = _Broadcast.apply(tensor, backend, root)
    return result


def reducescatter(tensor: torch.Tensor, backend: Backend, op: ReduceOp | str = ReduceOp.AVERAGE) -> torch.Tensor:
    """Return this rank's rows of the sum or average.

    Backward gathers the gradients of all ranks' rows in rank order, and with AVERAGE divides them by the number of ranks.

    Raises:
        ValueError: ``op`` is neither sum nor average, or ``tensor`` has no dimension.
    """
    result: torch.Tensor = _ReduceScatter.apply(tensor, backend, _linear(op))
    return result


def alltoall(tensor: torch.Tensor, backend: Backend, splits: Sequence[int] | torch.Tensor | None = None) -> torch.Tensor:
    """Return the rows that the ranks send to this rank. Backward sends each row's gradient to the rank that sent the row.

    Raises:
        ValueError: ``tensor`` cannot be split equally, or ``splits`` does not fit it.
    """
    result: torch.Tensor = _AllToAll.apply(tensor, backend, splits)
    return result


def _linear(op: ReduceOp | str) -> ReduceOp:
    chosen = ReduceOp.of(op)
    if chosen not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ValueError(f"{chosen.value} has no gradient over ranks: use sum or average")
    return chosen


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, backend: Backend, op: ReduceOp) -> torch.Tensor:
        ctx.backend, ctx.op = backend, op
        return backend.allreduce(tensor, op, name="allreduce")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return allreduce(grad, ctx.backend, ctx.op), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, backend: Backend) -> torch.Tensor:
        ctx.backend, ctx.shape = backend, tensor.shape
        rows = tensor.shape[0] if tensor.dim() else 1
        ctx.rows = backend.allgather(torch.tensor([rows], device="cpu"), name="allgather.rows").tolist()
        return backend.allgather(tensor, name="allgather")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        summed = allreduce(grad, ctx.backend, ReduceOp.SUM)
        here = ctx.backend.rank
        return summed.narrow(0, sum(ctx.rows[:here]), ctx.rows[here]).reshape(ctx.shape), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, backend: Backend, root: int) -> torch.Tensor:
        ctx.backend, ctx.root = backend, root
        return backend.broadcast(tensor, root, name="broadcast")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        summed = allreduce(grad, ctx.backend, ReduceOp.SUM)
        return summed if ctx.backend.rank == ctx.root else torch.zeros_like(summed), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, backend: Backend, op: ReduceOp) -> torch.Tensor:
        ctx.backend, ctx.op = backend, op
        return backend.reducescatter(tensor, op, name="reducescatter")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        share = ctx.backend.size if ctx.op is ReduceOp.AVERAGE else 1
        return allgather(grad / share, ctx.backend), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, backend: Backend, splits: Sequence[int] | torch.Tensor | None
    ) -> torch.Tensor:
        # The asynchronous form returns the count of rows from each rank even without splits.
        rows, ctx.received = backend.alltoall_async(tensor, splits, name="alltoall").wait()
        ctx.backend, ctx.rows = backend, tensor.shape[0]
        return rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        back = alltoall(grad, ctx.backend, ctx.received)
        unsent = back.new_zeros(ctx.rows - len(back), *back.shape[1:])  # the rows beyond the splits have no gradient
        return torch.cat([back, unsent]), None, None
