"""The collective operations, under Horovod's names and with Horovod's arguments.

Each is written once here (what it checks before anything is sent, and its gradient); ``forms.py`` makes the functions.

The gradients are Horovod's, which are not the mathematical ones everywhere: ``allgather`` and ``broadcast`` average
where they would sum, ``reducescatter`` with Sum multiplies by the size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dualtrain.backends import wire
from dualtrain.backends.collectives import rows_to_send
from dualtrain.hvd import basics as _basics  # noqa: F401 (Horovod's tests look at it)
from dualtrain.hvd.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    engine,
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
from dualtrain.hvd.compression import Compression
from dualtrain.hvd.engine import Pending
from dualtrain.hvd.exceptions import HorovodInternalError
from dualtrain.hvd.forms import Operation, Options, forms, poll, synchronize
from dualtrain.hvd.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from dualtrain.hvd.reductions import NAMES, PLAIN, Adasum, Average, Max, Min, Product, Sum

Tensors = list[torch.Tensor]
Gradients = Sequence[torch.Tensor]


def _set_id(process_set: ProcessSet) -> int:
    """The number of a set that this rank may use."""
    here = engine().backend.rank
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not in use: pass it to hvd.init or hvd.add_process_set first")
    if not process_set.included():
        raise ValueError(f"rank {here} is not in {process_set}: call this on its ranks only")
    return process_set.process_set_id


def _reduction(op: int | None, average: bool | None) -> int:
    if op is not None and average is not None:
        raise ValueError("both op and average are given: pass op alone (average is deprecated)")
    if op is None:
        return Average if average is None or average else Sum
    if op not in NAMES:
        raise ValueError(f"no reduction is called {op!r}: pass hvd.Average, Sum, Adasum, Min, Max or Product")
    return op


def _check_reducible(tensors: Tensors, op: int) -> None:
    for tensor in tensors:
        wire.wire_dtype(tensor.dtype.to_real())
        wire.wire_op(tensor.dtype, PLAIN[Sum if op == Adasum else op])


def _check_rows(kind: str, tensors: Tensors) -> None:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(f"{kind} of a tensor without a dimension, which has no rows: reshape it to (1,)")


# -- allreduce ----------------------------------------------------------------------------------------------------------


def _allreduce(kind: str, tensors: Tensors, outputs: Tensors | None, options: Options) -> Pending:
    op = _reduction(options["op"], options["average"])
    set_id = _set_id(options["process_set"])
    _check_reducible(tensors, op)
    scales: Options = {"pre": float(options["prescale_factor"]), "post": float(options["postscale_factor"])}
    return engine().submit(kind, options["name"], set_id, tensors, outputs, op=op, **scales)


def _allreduce_gradient(grads: Gradients, call: Pending, options: Options) -> Gradients:
    return grouped_allreduce(list(grads), **{**options, "name": None}) if grads else []


_SCALES = ("prescale_factor", "postscale_factor")
ALLREDUCE = Operation(
    name="allreduce",
    does="The reduction of every rank's tensor over ``process_set``: ``op``, Average without one, of ``prescale_factor`` "
    "times it, times ``postscale_factor``. Integers are averaged exactly and truncated toward zero. "
    "The gradient is the same reduction of the gradients.",
    options=("average", "name", "op", *_SCALES, "process_set"),
    blocking_options=("average", "name", "compression", "op", *_SCALES, "process_set"),
    start=_allreduce,
    gradient=_allreduce_gradient,
)


# -- allgather ----------------------------------------------------------------------------------------------------------


def _allgather(kind: str, tensors: Tensors, outputs: Tensors | None, options: Options) -> Pending:
    return engine().submit(kind, options["name"], _set_id(options["process_set"]), tensors)


def _allgather_gradient(grads: Gradients, call: Pending, options: Options) -> Gradients:
    averaged = grouped_allreduce(list(grads), op=Average, process_set=options["process_set"])
    here, rows = options["process_set"].rank(), call.facts["rows"]
    mine = [grad.narrow(0, sum(of_rank[i] for of_rank in rows[:here]), rows[here][i]) for i, grad in enumerate(averaged)]
    return [part.reshape(shape) for part, (_, shape, _) in zip(mine, call.message["tensors"], strict=True)]


ALLGATHER = Operation(
    name="allgather",
    does="Every rank's tensor behind one another along the first dimension, in which they may differ; tensors without a "
    "dimension become one of shape (size,). The gradient is the average over ranks of this rank's part.",
    options=("name", "process_set"),
    blocking_options=("name", "process_set"),
    start=_allgather,
    gradient=_allgather_gradient,
)


# -- broadcast ----------------------------------------------------------------------------------------------------------


def _broadcast(kind: str, tensors: Tensors, outputs: Tensors | None, options: Options) -> Pending:
    process_set, root = options["process_set"], int(options["root_rank"])
    set_id = _set_id(process_set)
    if root not in process_set.ranks:
        raise ValueError(f"root_rank {root} is not in {process_set}: pass one of its ranks, in the world's numbering")
    return engine().submit(kind, options["name"], set_id, tensors, outputs, root=root)


def _broadcast_gradient(grads: Gradients, call: Pending, options: Options) -> Gradients:
    averaged = grouped_allreduce(list(grads), op=Average, process_set=options["process_set"])
    return averaged if rank() == options["root_rank"] else [torch.zeros_like(grad) for grad in averaged]


BROADCAST = Operation(
    name="broadcast",
    does="The tensor of ``root_rank`` (in the world's numbering, in a process set too) on every rank. The gradient is the "
    "average over ranks at the root, zero elsewhere.",
    options=("root_rank", "name", "process_set"),
    blocking_options=("root_rank", "name", "process_set"),
    start=_broadcast,
    gradient=_broadcast_gradient,
)


# -- alltoall -----------------------------------------------------------------------------------------------------------


def _alltoall(kind: str, tensors: Tensors, outputs: Tensors | None, options: Options) -> Pending:
    process_set, [tensor] = options["process_set"], tensors
    set_id = _set_id(process_set)
    _check_rows("alltoall", tensors)
    splits = options["splits"]
    if isinstance(splits, torch.Tensor) and splits.dtype != torch.int32:
        raise ValueError(f"splits have dtype {splits.dtype}: pass a list, or an int32 tensor")
    rows = rows_to_send(tensor, splits, len(process_set.ranks))
    return engine().submit(kind, options["name"], set_id, tensors, splits=rows)


def _alltoall_gradient(grads: Gradients, call: Pending, options: Options) -> Gradients:
    here, splits = options["process_set"].rank(), call.facts["splits"]
    received = [of_rank[here] for of_rank in splits]
    rows, _ = alltoall(grads[0], received, process_set=options["process_set"])
    unsent = call.message["tensors"][0][1][0] - len(rows)  # rows that the splits left out
    return [torch.cat([rows, rows.new_zeros(unsent, *rows.shape[1:])]) if unsent else rows]


ALLTOALL = Operation(
    name="alltoall",
    does="The rows that every rank has for this one, in rank order: the first ``splits[0]`` rows of a tensor go to rank 0, "
    "the next ``splits[1]`` to rank 1, …; without splits they are dealt equally. With splits, and in the form that does "
    "not block, the result is (rows, how many came from each rank as int32). The gradients go back the way they came.",
    options=("splits", "name", "process_set"),
    blocking_options=("splits", "name", "process_set"),
    start=_alltoall,
    gradient=_alltoall_gradient,
    returns=lambda results, options: results[0] if options["splits"] is None else tuple(results),
)


# -- reducescatter ------------------------------------------------------------------------------------------------------


def _reducescatter(kind: str, tensors: Tensors, outputs: Tensors | None, options: Options) -> Pending:
    op, set_id = options["op"], _set_id(options["process_set"])
    _check_rows("reducescatter", tensors)
    if op not in (Sum, Average):
        raise HorovodInternalError(f"reducescatter with {NAMES.get(op, op)} is not supported: use hvd.Average or hvd.Sum")
    _check_reducible(tensors, op)
    scales: Options = {"pre": float(options["prescale_factor"]), "post": float(options["postscale_factor"])}
    return engine().submit(kind, options["name"], set_id, tensors, op=op, **scales)


def _reducescatter_gradient(grads: Gradients, call: Pending, options: Options) -> Gradients:
    factor = options["prescale_factor"] * options["postscale_factor"]
    if options["op"] == Sum:
        factor *= options["process_set"].size()
    gathered: Gradients = grouped_allgather([grad * factor for grad in grads], process_set=options["process_set"])
    return gathered


REDUCESCATTER = Operation(
    name="reducescatter",
    does="This rank's rows of the reduction of every rank's tensor: the first ``d % size`` ranks get ``d // size + 1`` of "
    "d rows, the others ``d // size``. Average or Sum. The gradients are gathered, with Sum times the size.",
    options=("name", "op", "process_set", *_SCALES),
    blocking_options=("name", "compression", "op", "process_set", *_SCALES),
    start=_reducescatter,
    gradient=_reducescatter_gradient,
    defaults=(("op", Average),),
)

allreduce, allreduce_async, allreduce_, allreduce_async_ = forms(ALLREDUCE, in_place=True)
grouped_allreduce, grouped_allreduce_async, grouped_allreduce_, grouped_allreduce_async_ = forms(
    ALLREDUCE, grouped=True, in_place=True
)
allgather, allgather_async = forms(ALLGATHER)
grouped_allgather, grouped_allgather_async = forms(ALLGATHER, grouped=True)
broadcast, broadcast_async, broadcast_, broadcast_async_ = forms(BROADCAST, in_place=True)
alltoall, alltoall_async = forms(ALLTOALL)
reducescatter, reducescatter_async = forms(REDUCESCATTER)
grouped_reducescatter, grouped_reducescatter_async = forms(REDUCESCATTER, grouped=True)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """The sum (or with ``Average`` the average) of sparse tensors, by gathering their indices and values.

    Does not block: returns a function that does, and returns the new sparse tensor. Its indices may repeat.
    """
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def result() -> torch.Tensor:
        summed, where = synchronize(values), synchronize(indices)
        averaged = summed / len(process_set.ranks or []) if op == Average else summed
        return torch.sparse_coo_tensor(where.t(), averaged, tensor.shape, check_invariants=False)

    return result


def join(device: int = -1, divide_by: str = "initial") -> int:
    """Says that this rank has no more data, and blocks until all ranks have said so; the rank that said it last.

    Meanwhile the others go on: this rank contributes to reductions what changes nothing (zeros to a sum; Horovod does
    so to a minimum too), and to the gradients of ``DistributedOptimizer``. Other calls fail on those who make them.

    Args:
        device: accepted for Horovod's scripts; nothing is placed there.
        divide_by: what averages are divided by meanwhile: ``"initial"``, all ranks, as Horovod does; or ``"active"``,
            those that have not joined with this argument.

    Raises:
        ValueError: ``divide_by`` is neither.
        HorovodInternalError: a rank was lost, or Horovod was shut down.
    """
    if divide_by not in ("initial", "active"):
        raise ValueError(f'divide_by={divide_by!r} is not known: pass "initial" or "active"')
    return engine().join(divide_by)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Blocks until every rank of the set has called it. Raises HorovodInternalError as all calls do."""
    engine().submit("barrier", None, _set_id(process_set)).wait()


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
