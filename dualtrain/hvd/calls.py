"""The collective operations: for each, the checks of its arguments, its request, and its gradient.

The gradients are Horovod's, and some differ from the mathematical ones: the gradients of ``allgather`` and ``broadcast``
are averages instead of sums, and the gradients of ``reducescatter`` are multiplied by the number of ranks. The gradient of
``allreduce`` is the same reduction of the gradients, even for Min, Max, Product and Adasum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dualtrain.backends import wire
from dualtrain.backends.movement import rows_to_send
from dualtrain.hvd import compat
from dualtrain.hvd.arithmetic import BACKEND_OPS, NAMES, Adasum, Average, Sum, check_op
from dualtrain.hvd.basics import engine
from dualtrain.hvd.exceptions import HorovodInternalError
from dualtrain.hvd.forms import Operation, Options, call_options, differentiable, reduction_options
from dualtrain.hvd.pending import Pending
from dualtrain.hvd.process_sets import ProcessSet, check_is_set

Tensors = list[torch.Tensor]
Gradients = Sequence[torch.Tensor]


def usable_set(process_set: ProcessSet) -> int:
    """Return the id of ``process_set``. Raises ValueError if it is no ProcessSet in use, or this rank is not in it.

    Raises HorovodInternalError outside of a world.
    """
    check_is_set(process_set)
    world_rank = engine().backend.rank
    set_id = process_set.usable_id()
    if not process_set.included():
        raise ValueError(f"rank {world_rank} is not in {process_set}: call this on its ranks only")
    return set_id


def usable_root(root_rank: int, process_set: ProcessSet) -> int:
    """Return ``root_rank``. Raises ValueError if it is not a rank of ``process_set``."""
    if root_rank not in (process_set.ranks or []):
        raise ValueError(
            f"root_rank {root_rank!r} is not in {process_set}: pass one of its ranks, in the world's numbering"
        )
    return int(root_rank)


def _resolve_op(op: int | None, average: bool | None) -> int:
    """Return ``op``, or else what ``average`` selects. Raise ValueError if both are given, or if ``op`` is unknown."""
    if op is not None and average is not None:
        raise ValueError("both op and average are given: pass op alone (average is deprecated)")
    if op is None:
        return Average if average is None or average else Sum
    check_op(op)
    return int(op)  # it may be an integer of numpy


def _scales(options: Options) -> Options:
    return {"pre": float(options["prescale_factor"]), "post": float(options["postscale_factor"])}


def _average(grads: Gradients, process_set: ProcessSet) -> Gradients:
    """Return the averages of ``grads`` over the ranks. Collective; blocks; differentiable."""
    return differentiable(ALLREDUCE, grads, reduction_options(None, Average, 1.0, 1.0, process_set), grouped=True)


def _check_reducible(tensors: Tensors, op: int) -> None:
    for tensor in tensors:
        wire.wire_dtype(tensor.dtype.to_real())
        wire.wire_op(tensor.dtype, BACKEND_OPS[Sum if op == Adasum else op])


def _check_rows(kind: str, tensors: Tensors) -> None:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(f"{kind} of a tensor without dimensions, which has no rows: reshape it to (1,)")


# -- allreduce ----------------------------------------------------------------------------------------------------------


def _allreduce(kind: str, tensors: Tensors, outputs: Tensors | None, options: Options) -> Pending:
    op = _resolve_op(options["op"], options["average"])
    set_id = usable_set(options["process_set"])
    _check_reducible(tensors, op)
    if compat.enabled() and any(tensor.dtype == torch.float16 for tensor in tensors):
        compat.note(compat.HALF)
    # Calls for an optimizer's gradients have three more options.
    optimizer_options = {name: options[name] for name in ("frozen", "position", "added") if name in options}
    return engine().submit(kind, options["name"], set_id, tensors, outputs, op=op, **_scales(options), **optimizer_options)


def _allreduce_gradient(grads: Gradients, call: Pending, options: Options) -> Gradients:
    return differentiable(ALLREDUCE, grads, {**options, "name": None}, grouped=True) if grads else []


ALLREDUCE = Operation("allreduce", _allreduce, _allreduce_gradient)


# -- allgather ----------------------------------------------------------------------------------------------------------


def _allgather(kind: str, tensors: Tensors, outputs: Tensors | None, options: Options) -> Pending:
    # Calls for sparse tensors have two more options.
    sparse_options = {name: options[name] for name in ("op", "shape") if name in options}
    return engine().submit(kind, options["name"], usable_set(options["process_set"]), tensors, **sparse_options)


def _allgather_gradient(grads: Gradients, call: Pending, options: Options) -> Gradients:
    averaged = _average(grads, options["process_set"])
    set_rank, rows = options["process_set"].rank(), call.facts["rows"]
    starts = [sum(of_rank[i] for of_rank in rows[:set_rank]) for i in range(len(averaged))]
    mine = [grad.narrow(0, starts[i], rows[set_rank][i]) for i, grad in enumerate(averaged)]
    return [part.reshape(shape) for part, (_, shape, _) in zip(mine, call.message["tensors"], strict=True)]


ALLGATHER = Operation("allgather", _allgather, _allgather_gradient)


# -- broadcast ----------------------------------------------------------------------------------------------------------


def _broadcast(kind: str, tensors: Tensors, outputs: Tensors | None, options: Options) -> Pending:
    set_id = usable_set(options["process_set"])
    root = usable_root(options["root_rank"], options["process_set"])
    return engine().submit(kind, options["name"], set_id, tensors, outputs, root=root)


def _broadcast_gradient(grads: Gradients, call: Pending, options: Options) -> Gradients:
    averaged = _average(grads, options["process_set"])
    if engine().backend.rank == options["root_rank"]:
        return averaged
    # Zeros that depend on ``averaged``: double backward is collective too, so it must run on every rank.
    return [grad.masked_fill(grad.new_ones((), dtype=torch.bool), 0) for grad in averaged]


BROADCAST = Operation("broadcast", _broadcast, _broadcast_gradient)


# -- alltoall -----------------------------------------------------------------------------------------------------------


def _alltoall(kind: str, tensors: Tensors, outputs: Tensors | None, options: Options) -> Pending:
    process_set, [tensor] = options["process_set"], tensors
    set_id = usable_set(process_set)
    _check_rows("alltoall", tensors)
    splits = options["splits"]
    if isinstance(splits, torch.Tensor) and splits.dtype != torch.int32:
        raise ValueError(f"splits have dtype {splits.dtype}: pass a list, or an int32 tensor")
    if splits is not None and len(splits) == 0:
        splits = None  # as on Horovod, empty splits mean equal numbers of rows
    rows = rows_to_send(tensor, splits, len(process_set.ranks))
    return engine().submit(kind, options["name"], set_id, tensors, splits=rows)


def _alltoall_gradient(grads: Gradients, call: Pending, options: Options) -> Gradients:
    set_rank, splits = options["process_set"].rank(), call.facts["splits"]
    received = [of_rank[set_rank] for of_rank in splits]
    back = call_options(None, options["process_set"], splits=received)
    rows, _ = differentiable(ALLTOALL, grads[:1], back)
    unsent = call.message["tensors"][0][1][0] - len(rows)  # rows that the splits left out
    return [torch.cat([rows, rows.new_zeros(unsent, *rows.shape[1:])]) if unsent else rows]


ALLTOALL = Operation("alltoall", _alltoall, _alltoall_gradient)


# -- reducescatter ------------------------------------------------------------------------------------------------------


def _reducescatter(kind: str, tensors: Tensors, outputs: Tensors | None, options: Options) -> Pending:
    op, set_id = options["op"], usable_set(options["process_set"])
    _check_rows("reducescatter", tensors)
    if op not in (Sum, Average):
        raise HorovodInternalError(f"reducescatter with {NAMES.get(op, op)} is not supported: use hvd.Average or hvd.Sum")
    _check_reducible(tensors, op)
    return engine().submit(kind, options["name"], set_id, tensors, op=op, **_scales(options))


def _reducescatter_gradient(grads: Gradients, call: Pending, options: Options) -> Gradients:
    factor = options["prescale_factor"] * options["postscale_factor"]
    if options["op"] == Sum:
        factor *= options["process_set"].size()
    unnamed = call_options(None, options["process_set"])
    return differentiable(ALLGATHER, [grad * factor for grad in grads], unnamed, grouped=True)


REDUCESCATTER = Operation("reducescatter", _reducescatter, _reducescatter_gradient)
