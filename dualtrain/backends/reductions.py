"""Collective calls that reduce tensors over ranks: allreduce, reducescatter."""

from __future__ import annotations

from functools import partial, reduce

import torch

from dualtrain.backends import wire
from dualtrain.backends.agreement import Call, agree
from dualtrain.backends.base import FOLD, ReduceOp, Reduction, Work
from dualtrain.backends.inference import ordinary
from dualtrain.backends.movement import Movement


def split_sizes(rows: int, size: int) -> list[int]:
    """Split ``rows`` over ``size`` ranks as evenly as possible; the first ``rows % size`` ranks get one row more."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


class Reductions(Movement):
    """The calls that reduce tensors, in the wire dtypes of ``wire.py``."""

    def allreduce(
        self, tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.AVERAGE, name: str | None = None
    ) -> torch.Tensor:
        """Reduce every rank's ``tensor`` (the same shape and dtype on all) into a new tensor on every rank.

        Args:
            tensor: any shape; floating point (not float4), integer (not uint64), bool (SUM is "any", PRODUCT "all"; no
                AVERAGE), or complex (only SUM and AVERAGE).
            op: AVERAGE, SUM, MIN, MAX or PRODUCT, or its name. The average of integers is truncated toward zero; it is
                wrong if the sum of int32 or int64 values overflows.
            name: shown in errors and reports.

        Raises:
            ValueError: the operation is unknown, or has no meaning for the dtype; or ``tensor`` is sparse, nested or
                quantized.
            TypeError: ``tensor`` is not a tensor.
            BackendError: the ranks' calls do not match, a rank failed, or the call timed out.
        """
        return self._now("allreduce", name, partial(self._allreduce, tensor, op, name))

    def allreduce_(
        self, tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.AVERAGE, name: str | None = None
    ) -> torch.Tensor:
        """:meth:`allreduce` in place. Return ``tensor``, whose content is undefined if the call raises.

        Raises:
            ValueError: elements of ``tensor`` share memory (``expand``); otherwise as :meth:`allreduce`.
        """
        return self._now("allreduce", name, partial(self._allreduce_, tensor, op, name))

    def allreduce_async(
        self, tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.AVERAGE, name: str | None = None
    ) -> Work[torch.Tensor]:
        """:meth:`allreduce` without blocking."""
        return self._later("allreduce", name, partial(self._allreduce, tensor, op, name))

    def allreduce_async_(
        self, tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.AVERAGE, name: str | None = None
    ) -> Work[torch.Tensor]:
        """:meth:`allreduce_` without blocking."""
        return self._later("allreduce", name, partial(self._allreduce_, tensor, op, name))

    def reducescatter(
        self, tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.AVERAGE, name: str | None = None
    ) -> torch.Tensor:
        """Reduce every rank's ``tensor`` (d rows, the same shape on all ranks); return this rank's rows of the result.

        The first ``d % size`` ranks get ``d // size + 1`` rows, the others ``d // size``. The values of the ranks
        are combined in rank order.

        Raises:
            ValueError: ``tensor`` has no dimension; otherwise as :meth:`allreduce`.
            BackendError: as :meth:`allreduce`.
        """
        return self._now("reducescatter", name, partial(self._reducescatter, tensor, op, name))

    def reducescatter_async(
        self, tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.AVERAGE, name: str | None = None
    ) -> Work[torch.Tensor]:
        """:meth:`reducescatter` without blocking."""
        return self._later("reducescatter", name, partial(self._reducescatter, tensor, op, name))

    # -- implementation -------------------------------------------------------------------------------------------

    def _allreduce(self, tensor: torch.Tensor, op: ReduceOp | str, name: str | None) -> torch.Tensor:
        tensor = wire.checked_dense(tensor)
        detached = tensor.detach() if tensor.requires_grad else tensor
        return wire.unpack(self._reduce_wire(detached, ReduceOp.of(op), name, in_place=False), detached)

    def _allreduce_(self, tensor: torch.Tensor, op: ReduceOp | str, name: str | None) -> torch.Tensor:
        detached = ordinary(wire.checked_writable(tensor).detach())
        reduced = self._reduce_wire(detached, ReduceOp.of(op), name, in_place=True)
        if reduced is detached:
            return tensor
        reduced = wire.unpack(reduced, detached)
        if reduced.data_ptr() != tensor.data_ptr():
            detached.copy_(reduced)
        return tensor

    def _reduce_wire(self, tensor: torch.Tensor, op: ReduceOp, name: str | None, *, in_place: bool) -> torch.Tensor:
        """Reduce ``tensor`` in its wire dtype (``wire.py``); return the result.

        The result is ``tensor`` itself, or a view of it, if ``in_place`` and no conversion is needed; else a new tensor.
        """
        call = Call.on(op.value, tensor, name)
        primitive = wire.wire_op(tensor.dtype, op)
        packed = wire.pack(tensor)
        converted = packed.data_ptr() != tensor.data_ptr()  # a converted copy may be reduced in place
        reduced = self.reduce_checked(call, packed, primitive, name or op.value, in_place=in_place or converted)
        return wire.average_(reduced, self.size) if op is ReduceOp.AVERAGE else reduced

    def reduce_checked(self, call: Call, tensor: torch.Tensor, op: ReduceOp, name: str, *, in_place: bool) -> torch.Tensor:
        """Check that all ranks make the same ``call``, and reduce ``tensor``. Collective; blocks.

        ``tensor`` and ``op`` are as in :meth:`start_allreduce`. Return the result: a new tensor, or ``tensor`` itself with
        ``in_place``.

        Raises:
            BackendError: on every rank, if the calls differ; otherwise as :meth:`allreduce`.
        """
        reduction = Reduction(tensor, op)
        agree(self, call, data=reduction)
        if reduction.result is not None:
            return tensor.copy_(reduction.result) if in_place else reduction.result.clone()
        return self.send_data(partial(self._reduce, tensor, op, name, in_place=in_place))

    def _reduce(self, tensor: torch.Tensor, op: ReduceOp, name: str, *, in_place: bool) -> torch.Tensor:
        output = tensor if in_place else tensor.clone(memory_format=torch.contiguous_format)
        self.start_allreduce(output, op, name).wait()
        return output

    def start_matched(self, tensor: torch.Tensor, op: ReduceOp, name: str) -> Work[None]:
        """Reduce ``tensor`` as :meth:`start_allreduce` does. The caller has checked that the ranks' calls match.

        An override may call :meth:`reduce_checked` for a short tensor, which compares the calls again; it then blocks.
        """
        return self.start_allreduce(tensor, op, name)

    @torch.no_grad()
    def _reducescatter(self, tensor: torch.Tensor, op: ReduceOp | str, name: str | None) -> torch.Tensor:
        # An all-to-all and a local reduction in rank order work for any operation and dtype, need no padding, and give
        # equal bits on every backend.
        op = ReduceOp.of(op)
        if wire.checked_dense(tensor).dim() == 0:
            raise ValueError("a tensor without a dimension has no rows to scatter: reshape it to (1,)")
        primitive = wire.wire_op(tensor.dtype, op)
        agree(self, Call.on(f"reducescatter ({op.value})", tensor, name))
        total, like = self.reduce_rows(tensor, primitive, name or "reducescatter")
        return wire.unpack(wire.average_(total, self.size) if op is ReduceOp.AVERAGE else total, like)

    def reduce_rows(self, tensor: torch.Tensor, primitive: ReduceOp, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's rows of the reduction, in the wire dtype, and a tensor of their shape and original dtype.

        The second tensor is for :func:`wire.unpack`, which does not use its values. Collective; blocks.
        """
        rows = split_sizes(tensor.shape[0], self.size)
        mine = rows[self.rank]
        received = self.alltoall_rows(tensor, rows, [mine] * self.size, name)
        parts = (wire.pack(part) for part in received.split(mine)) if mine else iter([wire.pack(received)])
        return reduce(FOLD[primitive], parts).clone(), received[:mine]
