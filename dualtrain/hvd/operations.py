"""Execution of the calls that rank 0 has matched between ranks. ``RUN`` has one function for each kind of call.

(``execution.py`` itself opens channels, and adds and removes process sets.) Each function gets rank 0's description of the
call, the channel of the process set, and this rank's tensors. The description includes the sizes on every rank, so the
ranks do not exchange sizes again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dualtrain.backends import Backend, ReduceOp, wire
from dualtrain.backends.inference import ordinary
from dualtrain.hvd import compat
from dualtrain.hvd.arithmetic import BACKEND_OPS, Adasum, adasum, finished, scaled


@dataclass
class Task:
    """A matched call on one rank.

    Attributes:
        facts: rank 0's description of the call: kind, name, op, pre and post (the prescale and postscale factors),
            divisor, root, members (the ranks of the process set), rows (the number of rows of every rank's tensors), and
            splits (the numbers of rows that every rank sends to each rank).
        channel: the backend of the process set's ranks, used only for calls on this set.
        tensors: this rank's inputs.
        outputs: for a call in place, the tensors that receive the results; else ``None``.
    """

    facts: dict[str, Any]
    channel: Backend
    tensors: list[torch.Tensor]
    outputs: list[torch.Tensor] | None = None

    @property
    def name(self) -> str:
        """The call's name in error messages."""
        return f"{self.facts['kind']}.{self.facts['name'] or 'noname'}"


def allreduce(task: Task) -> list[torch.Tensor]:
    """Reduce each tensor over the ranks, with the prescale and postscale factors, and return the results."""
    facts = task.facts
    inputs = [scaled(tensor, facts["pre"]) for tensor in task.tensors]
    if facts["op"] == Adasum:
        results = [scaled(_adasum(task, tensor), facts["post"]) for tensor in inputs]
    else:
        totals = [
            compat.rounded_sum(total, tensor.dtype) for total, tensor in zip(_reduced(task, inputs), inputs, strict=True)
        ]
        results = [_result(task, total, tensor) for total, tensor in zip(totals, inputs, strict=True)]
    return _delivered(task, results)


def _result(task: Task, total: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Scale the reduced value ``total``, which has the dtype that was sent; return it in the dtype of ``like``."""
    facts = task.facts
    if like.dtype == torch.bool:  # bool is sent as integers, which a factor below 1 would round to 0
        return scaled(wire.unpack(total, like), facts["post"])
    return wire.unpack(finished(total, facts["op"], facts["divisor"], facts["post"]), like)


def _reduced(task: Task, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the reduced values of ``inputs``, in the dtypes in which they were sent (``backends/wire.py``).

    Tensors that are sent in the same dtype, from the same device and with the same operation are sent together.
    """
    groups: dict[tuple[torch.dtype, torch.device, ReduceOp], list[int]] = {}
    packed = [wire.pack(tensor) for tensor in inputs]
    for i, (tensor, values) in enumerate(zip(inputs, packed, strict=True)):
        op = wire.wire_op(tensor.dtype, BACKEND_OPS[task.facts["op"]])
        groups.setdefault((values.dtype, values.device, op), []).append(i)
    flats = []
    for (_, _, op), members in groups.items():
        # Concatenate the tensors: one call sends all of them, and the caller's tensors are not overwritten.
        flat = torch.cat([packed[i].reshape(-1) for i in members])
        flats.append((flat, task.channel.start_matched(flat, op, task.name), members))
    for flat, work, members in flats:
        work.wait()
        for i, part in zip(members, flat.split([packed[i].numel() for i in members]), strict=True):
            packed[i] = part.view(packed[i].shape)
    return packed


def _adasum(task: Task, tensor: torch.Tensor) -> torch.Tensor:
    data = wire.as_bytes(tensor)
    parts = task.channel.gather(data, [len(data)] * task.channel.size, task.name)
    return adasum([wire.from_bytes(part.clone(), tensor.dtype, tuple(tensor.shape)) for part in parts])


def reducescatter(task: Task) -> list[torch.Tensor]:
    """Return this rank's rows of the reduction. Values are added in rank order."""
    return [_reducescatter(task, tensor) for tensor in task.tensors]


def _reducescatter(task: Task, tensor: torch.Tensor) -> torch.Tensor:
    facts, op = task.facts, wire.wire_op(tensor.dtype, BACKEND_OPS[task.facts["op"]])
    total, like = task.channel.reduce_rows(scaled(tensor, facts["pre"]), op, task.name)
    return _result(task, total, like)


def allgather(task: Task) -> list[torch.Tensor]:
    """Return every rank's rows, in rank order; a tensor without dimensions counts as one row."""
    results = []
    for i, tensor in enumerate(task.tensors):
        tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
        rows = [of_rank[i] for of_rank in task.facts["rows"]]
        results.append(task.channel.gather_rows(tensor, rows, task.name))
    return results


def broadcast(task: Task) -> list[torch.Tensor]:
    """Return the root's tensors. The root in ``task.facts`` is a rank of the world, not of the process set."""
    root = task.facts["members"].index(task.facts["root"])
    results = []
    for tensor in task.tensors:
        data = wire.as_bytes(tensor)
        data = data.clone() if task.outputs is None else data
        if data.numel():
            task.channel.start_broadcast(data, root, task.name).wait()
        results.append(wire.from_bytes(data, tensor.dtype, tuple(tensor.shape)))
    return _delivered(task, results)


def alltoall(task: Task) -> list[torch.Tensor]:
    """Return the rows received, and the number of rows from each rank."""
    me, splits, [tensor] = task.channel.rank, task.facts["splits"], task.tensors
    received = [of_rank[me] for of_rank in splits]
    rows = task.channel.alltoall_rows(tensor, splits[me], received, task.name)
    return [rows, torch.tensor(received, dtype=torch.int32, device="cpu")]


def objects(task: Task) -> list[torch.Tensor]:
    """Return every rank's bytes in rank order, or only the root's bytes if there is a root."""
    [data], lengths = task.tensors, [of_rank[0] for of_rank in task.facts["rows"]]
    if task.facts["root"] is None:
        return task.channel.gather(data, lengths, task.name)
    root = task.facts["members"].index(task.facts["root"])
    buffer = data.clone() if task.channel.rank == root else data.new_empty(lengths[root])
    task.channel.start_broadcast(buffer, root, task.name).wait()
    return [buffer]


def nothing(task: Task) -> list[torch.Tensor]:
    """Return no tensors: a barrier ends when all ranks' calls have matched."""
    return []


def _delivered(task: Task, results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``results``; for a call in place, copy them into the caller's tensors, and return the caller's tensors."""
    if task.outputs is None:
        return results
    for output, result in zip(task.outputs, results, strict=True):
        if output.data_ptr() != result.data_ptr():
            ordinary(output.detach()).copy_(result)
    return task.outputs


RUN: dict[str, Callable[[Task], list[torch.Tensor]]] = {
    "allreduce": allreduce,
    "reducescatter": reducescatter,
    "allgather": allgather,
    "broadcast": broadcast,
    "alltoall": alltoall,
    "objects": objects,
    "barrier": nothing,
}
RUN |= {f"grouped_{kind}": RUN[kind] for kind in ("allreduce", "reducescatter", "allgather", "broadcast")}
