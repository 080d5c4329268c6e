"""The collective operations, with Horovod's names and arguments.

This module defines ``allreduce``; ``gather_ops.py`` defines the others. ``calls.py`` checks arguments and computes
gradients; ``operations.py`` executes a call after rank 0 has matched the ranks' requests.
"""

from __future__ import annotations

import torch

from dualtrain.hvd import basics as _basics  # noqa: F401 (Horovod's tests use it)
from dualtrain.hvd.arithmetic import Adasum, Average, Max, Min, Product, Sum
from dualtrain.hvd.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from dualtrain.hvd.calls import ALLREDUCE
from dualtrain.hvd.compression import AnyCompressor, Compression
from dualtrain.hvd.exceptions import HorovodInternalError
from dualtrain.hvd.forms import differentiable, first, poll, reduction_options, start, synchronize
from dualtrain.hvd.gather_ops import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from dualtrain.hvd.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

Tensors = list[torch.Tensor]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the reduction of every rank's ``tensor``. Collective, matched by name; blocks; differentiable.

    An average of integers is computed exactly, then truncated toward zero. Backward applies the same reduction to the
    gradients of the result.

    Args:
        tensor: every rank must pass the same dtype, shape and kind of device. Averages of bool, reductions of
            uint64, and Min, Max and Product of complex tensors are refused.
        average: the deprecated form of ``op``.
        name: matches the calls of the ranks; calls without a name match by order.
        compression: compresses what is sent; see :class:`Compression`.
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: each rank's tensor is multiplied by this factor before the reduction.
        postscale_factor: the result is multiplied by this factor.
        process_set: the ranks that take part.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing was sent.
        HorovodInternalError: the ranks' calls do not match, a rank failed, or Horovod was shut down or is not initialized.
    """
    options = reduction_options(name, op, prescale_factor, postscale_factor, process_set, average=average)
    return differentiable(ALLREDUCE, [tensor], options, compression=compression)[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As :func:`allreduce`, but asynchronous and not differentiable; return a handle for ``poll`` and ``synchronize``."""
    options = reduction_options(name, op, prescale_factor, postscale_factor, process_set, average=average)
    return start(ALLREDUCE, [tensor], options, finish=first)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As :func:`allreduce`, but in place and not differentiable. Blocks."""
    options = reduction_options(name, op, prescale_factor, postscale_factor, process_set, average=average)
    result: torch.Tensor = synchronize(start(ALLREDUCE, [tensor], options, in_place=True, finish=first))
    return result


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As :func:`allreduce_`, but asynchronous; return a handle."""
    options = reduction_options(name, op, prescale_factor, postscale_factor, process_set, average=average)
    return start(ALLREDUCE, [tensor], options, in_place=True, finish=first)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As :func:`allreduce`, for several tensors in one call."""
    options = reduction_options(name, op, prescale_factor, postscale_factor, process_set, average=average)
    return differentiable(ALLREDUCE, tensors, options, grouped=True, compression=compression)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As :func:`grouped_allreduce`, but asynchronous and not differentiable; return a handle."""
    options = reduction_options(name, op, prescale_factor, postscale_factor, process_set, average=average)
    return start(ALLREDUCE, tensors, options, grouped=True)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """As :func:`grouped_allreduce`, but in place and not differentiable. Blocks."""
    options = reduction_options(name, op, prescale_factor, postscale_factor, process_set, average=average)
    result: tuple[torch.Tensor, ...] = synchronize(start(ALLREDUCE, tensors, options, grouped=True, in_place=True))
    return result


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As :func:`grouped_allreduce_`, but asynchronous; return a handle."""
    options = reduction_options(name, op, prescale_factor, postscale_factor, process_set, average=average)
    return start(ALLREDUCE, tensors, options, grouped=True, in_place=True)


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
