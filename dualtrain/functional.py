"""Differentiable collectives. Their gradients are those of the sum of all ranks' losses.

The gradients of ``dualtrain.hvd`` differ, since they are Horovod's: the gradients of ``allgather`` and ``broadcast`` are
averages, and the gradient of ``reducescatter`` is multiplied by the number of ranks.

The backward pass is collective too: every rank must run it. All functions block. They return new tensors, and raise the
same errors as the backend's methods. In a step or an evaluation with virtual ranks (``trainer/virtual_ranks.py``), they
raise UserError if the number of ranks differs from the number of virtual ranks, because their results depend on the number
of ranks. They also raise UserError if the input has a tangent of forward-mode differentiation; if only some ranks' inputs
have one, every rank raises BackendError. If the input of any rank requires a gradient, the result requires one on every
rank where gradients are enabled, so that all ranks can run the backward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from dualtrain.backends import Backend, ReduceOp
from dualtrain.backends.compilation import not_compiled
from dualtrain.backends.wire import checked_dense
from dualtrain.errors import UserError

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "reducescatter"]

T = TypeVar("T")
Backward = Callable[[torch.Tensor], torch.Tensor]


@not_compiled
def allreduce(tensor: torch.Tensor, backend: Backend, op: ReduceOp | str = ReduceOp.AVERAGE) -> torch.Tensor:
    """Return the sum or average of every rank's ``tensor``. The gradient is the sum or average of all ranks' gradients.

    Raises:
        ValueError: ``op`` is neither sum nor average.
        BackendError: as :meth:`dualtrain.Backend.allreduce`. All functions of this module raise it.
    """
    op = _linear("allreduce", op, backend)
    result, any_requires_grad = _forward(
        "allreduce", tensor, backend, lambda: backend.allreduce(tensor, op, name="allreduce")
    )
    return _with_backward(tensor, result, any_requires_grad, lambda grad: allreduce(grad, backend, op))


@not_compiled
def allgather(tensor: torch.Tensor, backend: Backend) -> torch.Tensor:
    """Return every rank's rows, in rank order. The gradient of a row is the sum of all ranks' gradients of this row."""
    shape = _checked("allgather", tensor, backend).shape
    own_rows = torch.tensor([shape[0] if tensor.dim() else 1], device="cpu")
    rows = backend.allgather(own_rows, name="allgather.rows").tolist()
    result, any_requires_grad = _forward("allgather", tensor, backend, lambda: backend.allgather(tensor, name="allgather"))

    def backward(grad: torch.Tensor) -> torch.Tensor:
        summed = allreduce(grad, backend, ReduceOp.SUM)
        return summed.narrow(0, sum(rows[: backend.rank]), rows[backend.rank]).reshape(shape)

    return _with_backward(tensor, result, any_requires_grad, backward)


@not_compiled
def broadcast(tensor: torch.Tensor, backend: Backend, root: int = 0) -> torch.Tensor:
    """Return the root's ``tensor``. The root's gradient is the sum of all ranks' gradients; on other ranks, it is 0.

    Raises:
        ValueError: ``root`` is not a rank.
    """
    result, any_requires_grad = _forward(
        "broadcast", tensor, backend, lambda: backend.broadcast(tensor, root, name="broadcast")
    )

    def backward(grad: torch.Tensor) -> torch.Tensor:
        summed = allreduce(grad, backend, ReduceOp.SUM)
        # Zeros that depend on ``summed``: a second backward pass is collective too, so it must run on every rank.
        return summed if backend.rank == root else summed.masked_fill(summed.new_ones((), dtype=torch.bool), 0)

    return _with_backward(tensor, result, any_requires_grad, backward)


@not_compiled
def reducescatter(tensor: torch.Tensor, backend: Backend, op: ReduceOp | str = ReduceOp.AVERAGE) -> torch.Tensor:
    """Return this rank's rows of the sum or average.

    Backward gathers the gradients of all ranks' rows in rank order, and with AVERAGE divides them by the number of ranks.

    Raises:
        ValueError: ``op`` is neither sum nor average, or ``tensor`` has no dimension.
    """
    op = _linear("reducescatter", op, backend)
    result, any_requires_grad = _forward(
        "reducescatter", tensor, backend, lambda: backend.reducescatter(tensor, op, name="reducescatter")
    )
    divisor = backend.size if op is ReduceOp.AVERAGE else 1
    return _with_backward(tensor, result, any_requires_grad, lambda grad: allgather(grad / divisor, backend))


@not_compiled
def alltoall(tensor: torch.Tensor, backend: Backend, splits: Sequence[int] | torch.Tensor | None = None) -> torch.Tensor:
    """Return the rows that the ranks send to this rank. Backward sends each row's gradient to the rank that sent the row.

    Raises:
        ValueError: ``tensor`` has no dimension or cannot be split equally, or ``splits`` does not fit it.
    """
    # The asynchronous form returns the number of rows from each rank, even without splits.
    answer, any_requires_grad = _forward(
        "alltoall", tensor, backend, lambda: backend.alltoall_async(tensor, splits, name="alltoall").wait()
    )
    result, received = answer
    rows = tensor.shape[0]

    def backward(grad: torch.Tensor) -> torch.Tensor:
        back = alltoall(grad, backend, received)
        unsent = back.new_zeros(rows - len(back), *back.shape[1:])  # rows beyond the splits were not sent: gradient 0
        return torch.cat([back, unsent])

    return _with_backward(tensor, result, any_requires_grad, backward)


class _Thread(threading.local):
    refusal: str | None = None  # the reason of the innermost block of :func:`without_collectives`


_thread = _Thread()


@contextmanager
def without_collectives(reason: str) -> Iterator[None]:
    """Make the functions of this module raise UserError(``reason``) in the block, in this thread."""
    before, _thread.refusal = _thread.refusal, reason  # blocks can be nested: a step may evaluate another trainer
    try:
        yield
    finally:
        _thread.refusal = before


def _check_allowed(kind: str, tensor: torch.Tensor, backend: Backend) -> None:
    """Raise UserError if collectives are not allowed now. If ``tensor`` has a tangent, refuse the call on every rank.

    See :meth:`Backend.refuse`.
    """
    if _thread.refusal is not None:
        raise UserError(_thread.refusal)
    # ``unpack_dual`` fails for sparse tensors, which the call itself refuses.
    dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
    if dense and forward_ad.unpack_dual(tensor).tangent is not None:
        problem = UserError(  # without this check, the result would have this rank's tangent, not that of all ranks
            "the tensor has a tangent (torch.autograd.forward_ad), and collectives have no forward-mode derivative: get "
            "the derivative with backward(), or call the collective for the tangent too, since all of them are linear"
        )
        backend.refuse(kind, kind, problem)


def _linear(kind: str, op: ReduceOp | str, backend: Backend) -> ReduceOp:
    """Return ``op`` if it is sum or average. Otherwise refuse the call on every rank: see :meth:`Backend.refuse`."""
    try:
        chosen = ReduceOp.of(op)
        if chosen not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise ValueError(f"{chosen.value} has no gradient over ranks: use sum or average")
    except Exception as problem:  # the other ranks wait for this rank's call
        backend.refuse(kind, kind, problem)
    return chosen


def _checked(kind: str, tensor: torch.Tensor, backend: Backend) -> torch.Tensor:
    """Return ``tensor`` if its elements can be sent. Otherwise refuse the call on every rank: see :meth:`Backend.refuse`.

    Raises:
        UserError: collectives are not allowed now, or every rank's ``tensor`` has a tangent: see :func:`_check_allowed`.
    """
    _check_allowed(kind, tensor, backend)
    try:
        return checked_dense(tensor)
    except (TypeError, ValueError) as problem:  # the other ranks wait for this rank's call
        backend.refuse(kind, kind, problem)


def _forward(kind: str, tensor: torch.Tensor, backend: Backend, call: Callable[[], T]) -> tuple[T, bool]:
    """Return the result of ``call``, and whether ``tensor`` requires a gradient on any rank with enabled gradients."""
    _check_allowed(kind, tensor, backend)
    return backend.with_flag(call, getattr(tensor, "requires_grad", False) and torch.is_grad_enabled())


def _with_backward(tensor: torch.Tensor, result: torch.Tensor, any_requires_grad: bool, backward: Backward) -> torch.Tensor:
    """Return ``result``. If ``any_requires_grad``, ``backward`` converts the gradient of ``result`` to that of ``tensor``.

    ``any_requires_grad`` is about the ``tensor`` of every rank. If it is true, all ranks on which gradients are enabled run
    ``backward``, since it is collective, even if their own ``tensor`` requires no gradient.
    """
    if not any_requires_grad or not torch.is_grad_enabled():
        return result
    source = tensor if tensor.requires_grad else torch.empty(0, device="cpu", requires_grad=True)
    output: torch.Tensor = _Collective.apply(source, [result], backward, tensor.requires_grad)
    return output


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, source: torch.Tensor, result: list[torch.Tensor], backward: Backward, tensor_requires_grad: bool
    ) -> torch.Tensor:
        ctx.backward_of, ctx.tensor_requires_grad = backward, tensor_requires_grad
        return result[0]

    @staticmethod
    @not_compiled
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        gradient = ctx.backward_of(grad)  # on every rank: it is collective
        return gradient if ctx.tensor_requires_grad else None, None, None, None
