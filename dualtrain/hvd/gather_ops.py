"""Collective operations except ``allreduce``, with Horovod's names and arguments; ``mpi_ops`` exports them.

Calls without a ``name`` are matched by their order, for each kind of call and each process set. For a wrong argument, the
functions raise ValueError or TypeError before they send anything. But for a wrong ``op``, ``reducescatter`` raises
HorovodInternalError. All functions raise HorovodInternalError if the ranks' calls do not match, a rank failed, or Horovod
was shut down or is not initialized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dualtrain.hvd.arithmetic import NAMES, Average, Sum
from dualtrain.hvd.basics import engine
from dualtrain.hvd.calls import ALLGATHER, ALLTOALL, BROADCAST, REDUCESCATTER, usable_set
from dualtrain.hvd.compression import AnyCompressor, Compression
from dualtrain.hvd.forms import call_options, differentiable, first, reduction_options, start, synchronize
from dualtrain.hvd.process_sets import ProcessSet, global_process_set

Tensors = list[torch.Tensor]
Splits = Sequence[int] | torch.Tensor | None


# -- allgather ----------------------------------------------------------------------------------------------------------


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Return every rank's rows, in rank order. Collective, matched by name; blocks; differentiable.

    Ranks may have different numbers of rows. Tensors without dimensions are gathered into a tensor of shape (size,). The
    gradient of a rank's rows is the average of all ranks' gradients of these rows.
    """
    return differentiable(ALLGATHER, [tensor], call_options(name, process_set))[0]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """As :func:`allgather`, but asynchronous and not differentiable; return a handle for ``poll`` and ``synchronize``."""
    return start(ALLGATHER, [tensor], call_options(name, process_set), finish=first)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """As :func:`allgather`, for several tensors in one call. The result is a tuple, as on Horovod."""
    return tuple(differentiable(ALLGATHER, tensors, call_options(name, process_set), grouped=True))


def grouped_allgather_async(tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """As :func:`grouped_allgather`, but asynchronous and not differentiable; return a handle."""
    return start(ALLGATHER, tensors, call_options(name, process_set), grouped=True)


# -- broadcast ----------------------------------------------------------------------------------------------------------


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensor of ``root_rank`` on every rank. Collective, matched by name; blocks; differentiable.

    ``root_rank`` is a rank of the world, even in a call on a process set. The root's gradient is the average of all ranks'
    gradients; on other ranks it is zero.
    """
    return differentiable(BROADCAST, [tensor], call_options(name, process_set, root_rank=root_rank))[0]


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As :func:`broadcast`, but asynchronous and not differentiable; return a handle."""
    return start(BROADCAST, [tensor], call_options(name, process_set, root_rank=root_rank), finish=first)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As :func:`broadcast`, but in place and not differentiable. Blocks."""
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As :func:`broadcast_`, but asynchronous; return a handle."""
    options = call_options(name, process_set, root_rank=root_rank)
    return start(BROADCAST, [tensor], options, in_place=True, finish=first)


# -- alltoall -----------------------------------------------------------------------------------------------------------


def alltoall(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Send rows to each rank; return the rows received, in rank order. Collective, matched by name; blocks; differentiable.

    The first ``splits[0]`` rows of a tensor go to the set's first rank, the next ``splits[1]`` to its second rank, … With
    None or empty splits, all ranks get the same number of rows. If ``splits`` is None, the result is the rows. Otherwise it
    is a pair: the rows, and an int32 tensor with the number of rows from each rank. Gradients are sent back to the ranks
    that sent the rows.
    """
    results = differentiable(ALLTOALL, [tensor], call_options(name, process_set, splits=splits))
    return results[0] if splits is None else tuple(results)


def alltoall_async(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As :func:`alltoall`, but asynchronous and not differentiable; return a handle. The result is always a pair."""
    return start(ALLTOALL, [tensor], call_options(name, process_set, splits=splits))


# -- reducescatter ------------------------------------------------------------------------------------------------------


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduction over ranks. Collective, matched by name; blocks; differentiable.

    If there are d rows, the first ``d % size`` ranks get ``d // size + 1`` rows, and the other ranks ``d // size``. ``op``
    is Average or Sum; any other value raises HorovodInternalError. Backward gathers the gradients of all ranks' rows,
    and multiplies them by both factors, and by the number of ranks if ``op`` is Sum.
    """
    options = reduction_options(name, op, prescale_factor, postscale_factor, process_set)
    return differentiable(REDUCESCATTER, [tensor], options, compression=compression)[0]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As :func:`reducescatter`, but asynchronous and not differentiable; return a handle."""
    options = reduction_options(name, op, prescale_factor, postscale_factor, process_set)
    return start(REDUCESCATTER, [tensor], options, finish=first)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensors:
    """As :func:`reducescatter`, for several tensors in one call."""
    options = reduction_options(name, op, prescale_factor, postscale_factor, process_set)
    return differentiable(REDUCESCATTER, tensors, options, grouped=True, compression=compression)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As :func:`grouped_reducescatter`, but asynchronous and not differentiable; return a handle."""
    options = reduction_options(name, op, prescale_factor, postscale_factor, process_set)
    return start(REDUCESCATTER, tensors, options, grouped=True)


# -- other operations ---------------------------------------------------------------------------------------------------


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start the sum or average (``op``) of sparse COO tensors of one shape, by gathering their indices and values.

    Return a function that blocks and returns the new sparse tensor, in which indices may repeat. Call it only once.
    """
    if op not in (Average, Sum):
        raise ValueError(f"op={NAMES.get(op, op)} of sparse tensors cannot be computed: pass hvd.Average or hvd.Sum")
    if getattr(tensor, "layout", None) is not torch.sparse_coo:
        raise ValueError("a sparse COO tensor is needed: convert the tensor with to_sparse(), or call allreduce_async")
    # _indices() and _values() are private in torch 2.5 to 2.15. The public indices() and values() refuse uncoalesced
    # tensors, such as gradients.
    options = call_options(f"{name}.indices", process_set, op=op, shape=list(tensor.shape))
    indices_handle = start(ALLGATHER, [tensor._indices().t().contiguous()], options, finish=first)
    values_handle = allgather_async(tensor._values(), f"{name}.values", process_set)

    def result() -> torch.Tensor:
        values, indices = synchronize(values_handle), synchronize(indices_handle)
        scaled = values / len(process_set.ranks or []) if op == Average else values
        return torch.sparse_coo_tensor(indices.t(), scaled, tensor.shape, check_invariants=False)

    return result


def join(device: int = -1, divide_by: str = "initial") -> int:
    """Report that this rank has no more data; block until all ranks have joined, and return the rank that joined last.

    Until then this rank contributes the identity element to the other ranks' allreduces (zero for a sum; the largest
    value for a minimum, where Horovod uses zero), and zeros to the gradients of ``DistributedOptimizer``. A barrier does
    not wait for this rank. All other operations, such as ``reducescatter``, fail on the ranks that call them, except on
    process sets without this rank.

    Args:
        device: ignored; accepted because Horovod accepts it.
        divide_by: the divisor of averages until all ranks have joined. ``"initial"`` counts this rank, as in Horovod;
            ``"active"`` does not.

    Raises:
        ValueError: ``divide_by`` is neither of these values.
        HorovodInternalError: a rank failed, this rank lacks an optimizer or a parameter that other ranks use, or Horovod
            was shut down or is not initialized.
    """
    if divide_by not in ("initial", "active"):
        raise ValueError(f'divide_by={divide_by!r} is not known: pass "initial" or "active"')
    return engine().join(divide_by)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank of the set has called this function or :func:`join`."""
    engine().submit("barrier", None, usable_set(process_set)).wait()
