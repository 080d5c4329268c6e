"""Collective operations that users call, built from the primitives, once for all backends.

The backends implement only the primitives. This module adds averages, further dtypes, tensors with any strides, unequal
sizes, objects, barriers, groups and the asynchronous forms. Each call first checks that all ranks make the same call.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import index
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, overload

import torch

from dualtrain.backends import objects, wire
from dualtrain.backends.agreement import Call, agree, exchange_text, refuse
from dualtrain.backends.base import FOLD, Broadcast, Gather, Primitives, ReduceOp, Reduction, Scaled, Work
from dualtrain.backends.compilation import not_compiled
from dualtrain.backends.inference import ordinary
from dualtrain.backends.serial import SerialQueue
from dualtrain.backends.sum_order import SumOrder
from dualtrain.backends.tree_sum import TreeSum
from dualtrain.differences import ranks_in_words
from dualtrain.errors import BackendError, UserError
from dualtrain.launchers import World

T = TypeVar("T")

_REASON_BYTES = 1024  # the reason why an object cannot be sent is cut to this length before it is sent to other ranks


def split_sizes(rows: int, size: int) -> list[int]:
    """Split ``rows`` over ``size`` ranks as evenly as possible; the first ``rows % size`` ranks get one row more."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


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


class Backend(Primitives):
    """A rank's place in a world of processes, and the collective operations over this world.

    Collective: every rank makes the same calls in the same order. A call that does not match (another operation,
    shape, dtype, root or name) raises :class:`~dualtrain.errors.BackendError` on every rank. The error names each rank's
    call, and the backend stays usable. A call with wrong arguments also raises on every rank: the ValueError or TypeError
    itself if all ranks' calls have this error, otherwise BackendError, which names the rank and its error. The rank sends
    its refusal in place of its call when the ranks compare their calls, so correct calls need no further message. An error
    on one rank after the comparison, such as too little memory for the result, is reported to the other ranks, whose calls
    raise PeerFailedError; the backend cannot be used any more.

    Tensors may have any dtype (for reductions, see :meth:`allreduce`), any strides, and any number of dimensions, zero
    included. Sparse tensors are not supported. Results are new, contiguous tensors on the same device, without autograd
    history (:mod:`dualtrain.functional` has collectives with gradients). Calls work inside and outside of
    ``torch.inference_mode()``, on tensors made inside or outside of it. Calls without ``_async`` block until the result can
    be used on the current stream. Calls with ``_async`` return a :class:`~dualtrain.backends.base.Work`, whose ``wait()``
    returns the result; do not change the tensor before ``wait()`` has returned. A name is shown in errors and reports.

    Make all calls in one thread, since calls of several threads would have no common order on all ranks. Give each further
    thread its own backend, which :meth:`channel` returns. A call raises BackendError if it is made during a call of a
    different thread, or if some ranks make it in the thread that made this backend and others in a different thread.
    Backward passes may run at the same time as calls.

    Attributes:
        is_group: whether this backend was made by :meth:`group` or :meth:`channel`.
    """

    def __init__(self, world: World, device: torch.device, timeout: float) -> None:
        super().__init__(world, device, timeout)
        self.is_group = False
        self._groups_made: list[Backend] = []
        self._queue = SerialQueue()
        self._of_thread = threading.local()  # not the thread's ID, which a later thread may reuse
        self._of_thread.made_this = True
        self._open = True

    # -- reductions ---------------------------------------------------------------------------------------------

    def allreduce(
        self, tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.AVERAGE, name: str | None = None
    ) -> torch.Tensor:
        """Reduce every rank's ``tensor`` (the same shape and dtype on all) into a new tensor on every rank.

        Args:
            tensor: any shape; floating point, integer (not uint64), bool (SUM is "any", PRODUCT "all"), or complex (only
                SUM and AVERAGE).
            op: AVERAGE, SUM, MIN, MAX or PRODUCT, or its name. The average of integers is truncated toward zero.
            name: shown in errors and reports.

        Raises:
            ValueError: the operation is unknown, or has no meaning for the dtype; or ``tensor`` is sparse.
            TypeError: ``tensor`` is no tensor.
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

    # -- data movement ------------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int = 0, name: str | None = None) -> torch.Tensor:
        """Copy rank ``root``'s ``tensor`` (the same shape and dtype on all) into a new tensor on every rank.

        Raises:
            ValueError: ``root`` is no rank of this backend.
            BackendError: as :meth:`allreduce`.
        """
        return self._now("broadcast", name, partial(self._broadcast, tensor, root, name))

    def broadcast_(self, tensor: torch.Tensor, root: int = 0, name: str | None = None) -> torch.Tensor:
        """:meth:`broadcast` in place. Return ``tensor``."""
        return self._now("broadcast", name, partial(self._broadcast_, tensor, root, name))

    def broadcast_async(self, tensor: torch.Tensor, root: int = 0, name: str | None = None) -> Work[torch.Tensor]:
        """:meth:`broadcast` without blocking."""
        try:
            call: Callable[[], torch.Tensor] = partial(self._broadcast_, _fresh(tensor), root, name)
        except Exception as problem:  # raised by ``wait``, on every rank
            call = partial(_raise, problem)
        return self._later("broadcast", name, call)

    def broadcast_async_(self, tensor: torch.Tensor, root: int = 0, name: str | None = None) -> Work[torch.Tensor]:
        """:meth:`broadcast_` without blocking."""
        return self._later("broadcast", name, partial(self._broadcast_, tensor, root, name))

    def allgather(self, tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
        """Concatenate every rank's ``tensor`` in rank order, on every rank.

        The first dimension may differ between ranks, and may be 0; the other dimensions must be equal. Tensors without
        a dimension are gathered into a tensor of shape (size,).

        Raises:
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
        """Send rows to every rank, and receive the rows that every rank sends to this one, in rank order.

        Args:
            tensor: the rows to send: the first ``splits[0]`` to rank 0, the next ``splits[1]`` to rank 1, …
            splits: ``size`` whole numbers that add up to at most the number of rows; rows beyond their sum are not sent.
                Without ``splits``, every rank gets the same number of rows.
            name: shown in errors and reports.

        Returns:
            The received rows; with ``splits`` also how many came from each rank (int32, (size,), on the CPU).

        Raises:
            ValueError: ``tensor`` has no dimension or cannot be split equally, or ``splits`` does not fit it.
            BackendError: as :meth:`allreduce`.
        """
        rows, received = self._now("alltoall", name, partial(self._alltoall, tensor, splits, name))
        return rows if splits is None else (rows, received)

    def alltoall_async(
        self, tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None = None, name: str | None = None
    ) -> Work[tuple[torch.Tensor, torch.Tensor]]:
        """:meth:`alltoall` without blocking; the result always includes how many rows came from each rank."""
        return self._later("alltoall", name, partial(self._alltoall, tensor, splits, name))

    @not_compiled
    def with_flag(self, call: Callable[[], T], flag: bool) -> tuple[T, bool]:
        """Return the result of ``call``, and whether any rank's ``flag`` is true.

        ``call`` must call exactly one method of this backend. The flags are sent in the messages in which the ranks compare
        this call, so they need no exchange of their own.
        """
        self._queue.drain()  # an earlier asynchronous call must not send the flag
        self.flag = flag
        try:
            return call(), self.any_flag
        finally:
            self.flag = False

    # -- objects, barriers, groups --------------------------------------------------------------------------------

    def broadcast_object(self, obj: Any = None, root: int = 0, name: str | None = None) -> Any:
        """Copy rank ``root``'s ``obj`` (plain Python values and tensors, never code) to every rank. Blocks.

        Raises:
            TypeError: on the root, if the object holds anything else; the other ranks raise BackendError.
            BackendError: as :meth:`allreduce`.
        """
        return self._now("broadcast_object", name, partial(self._broadcast_object, obj, root, name))

    def allgather_object(self, obj: Any, name: str | None = None) -> list[Any]:
        """Gather every rank's ``obj`` (plain values and tensors, never code) in rank order, on every rank. Blocks.

        Raises:
            TypeError: on a rank whose object holds anything else; the other ranks raise BackendError.
            BackendError: as :meth:`allreduce`.
        """
        return self._now("allgather_object", name, partial(self._allgather_object, obj, name))

    def barrier(self, name: str | None = None) -> None:
        """Block until every rank has called this method.

        Raises:
            BackendError: as :meth:`allreduce`.
        """
        self._now("barrier", name, partial(self._barrier, name))

    def group(self, ranks: Sequence[int]) -> Backend | None:
        """Return a backend over some of this backend's ranks; ``None`` on ranks that are not in ``ranks``.

        The new backend numbers its ranks from 0, in ascending order of ``ranks``. Every rank of this backend must make the
        call, with the same ``ranks``. Blocks. The group is closed with this backend.

        Raises:
            ValueError: ``ranks`` is empty, repeats a rank or has a rank that does not exist; or this backend is a group.
            BackendError: as :meth:`allreduce`.
        """
        return self._now("group", None, partial(self._checked_group, ranks))

    def channel(self) -> Backend:
        """Return a channel: a second backend over the same ranks. Collective; blocks.

        The operations of a channel and those of this backend may be interleaved in a different order on each rank. The
        channel is closed with this backend.
        """
        channel = self._now("channel", None, partial(self._group, list(range(self.size))))
        assert channel is not None
        return channel

    def make_default_group(self) -> None:
        """Make torch.distributed's default process group over the same ranks. Collective; blocks.

        :meth:`close` destroys it, unless the program has done so.

        Raises:
            UserError: the process has a default group already, or this is not the torch backend.
        """
        raise UserError(
            f"default_group=True needs the torch backend, and this is {self.name}: choose torch, or leave default_group out"
        )

    def between_hosts(self) -> Backend:
        """Return the group of the ranks that have this rank's local rank, one per host. Collective; blocks.

        Every host must have equally many ranks.
        """
        mine = None
        for number in range(self.local_size):
            places = Counter[int]()
            ranks = []
            for rank, host in enumerate(self.hosts):
                if places[host] == number:
                    ranks.append(rank)
                places[host] += 1
            group = self._now("group", None, partial(self._group, ranks))
            mine = group if group is not None else mine
        assert mine is not None
        return mine

    # -- the gradient path ----------------------------------------------------------------------------------------

    def new_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of zeros, (numel,), that :meth:`start_sum` reduces with the fewest copies. Collective; blocks."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def start_sum(self, tensor: torch.Tensor, name: str, factor: float = 1.0, tail: int = 0) -> Work[None]:
        """Sum ``tensor`` over all ranks in place, then multiply all but the last ``tail`` elements by ``factor``.

        Otherwise as :meth:`start_allreduce`. Does not block. Except with NCCL, sums are matched only with sums: a rank
        may start a sum before a call of a different method, and another rank may start it after that call. If
        ``tensor`` comes from :meth:`new_buffer` on one rank, it must do so on every rank.
        """
        work = self.gradient_path.start_allreduce(tensor, ReduceOp.SUM, name)
        if factor == 1:
            return work
        flat = tensor.view(-1)
        return Scaled(work, flat[:-tail] if tail else flat, factor)

    def start_tree_sum(
        self,
        tensor: torch.Tensor,
        others: Sequence[torch.Tensor],
        order: SumOrder,
        name: str,
        factor: float = 1.0,
        tail: int = 0,
    ) -> Work[None]:
        """Sum the ranks' partial sums along the tree of ``order`` into ``tensor``, then scale it as :meth:`start_sum` does.

        The bits of the sum depend on the tree alone, not on the number of ranks, the library or the transport. Does not
        block. Every rank must wait for its tree sums in the order in which it started them.

        Args:
            tensor: contiguous, of the same size on every rank; holds this rank's last partial sum, if the rank has any.
            others: a list of tensors like ``tensor``; ``order.buffers`` is the length of the list. This rank's earlier
                partial sums are in the first tensors of the list. The list's tensors have undefined content afterwards.
            order: an order for as many ranks as this backend has.
            name: shown in errors and reports.
            factor: factor on the sum.
            tail: how many elements at the end are not scaled.
        """
        if order.is_plain_sum or not tensor.numel():
            return self.start_sum(tensor, name, factor, tail)
        return TreeSum(self.gradient_path, tensor, others, order, name, factor, tail)

    # -- lifetime -------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Block until the asynchronous calls made so far have ended, so that the next primitive starts after them."""
        self._queue.drain()

    def settle(self) -> None:
        """Deprecated name of :meth:`drain`."""
        warnings.warn(
            "Backend.settle is now called Backend.drain; the old name will be removed in version 0.3.0",
            DeprecationWarning,
            stacklevel=2,
        )
        self.drain()

    def close(self) -> None:
        """Wait for outstanding calls, then leave the world. May be called again. Other ranks need not call it."""
        if not self._open:
            return
        self._open = False
        for group in reversed(self._groups_made):
            group.close()
        self._queue.close()
        self.release()
        peer_failed = self.watch is not None and self.watch.peer_failed
        if self.watch is not None and not self.is_group:
            self.watch.leave()
        # After a failure, skip the library's shutdown, which would wait for the failed rank. The resources are
        # freed when the process exits.
        if not peer_failed:
            self.disconnect()

    def release(self) -> None:
        """Free the resources that this rank can free alone. :meth:`close` calls it once, before :meth:`disconnect`."""

    def abort(self, reason: str) -> None:
        """Report to every other rank that this rank stops for ``reason``: a message, or a formatted traceback."""
        if self.watch is not None:
            self.watch.announce(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        ended_normally = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is not None and not ended_normally:
            self.abort("".join(traceback.format_exception(error)).strip())
        self.close()

    # -- implementation -------------------------------------------------------------------------------------------

    def refuse(self, kind: str, name: str | None, problem: Exception) -> NoReturn:
        """Raise an error on every rank, because this rank found ``problem`` before its call ``kind``. Collective; blocks.

        Call this in place of the first collective call of an operation that consists of several steps.

        Raises:
            Exception: ``problem``, on every rank, if all of them refuse this call for this reason.
            BackendError: on every rank, if their calls or problems differ; the message names each rank's.
        """
        self._now(kind, name, partial(_raise, problem))
        raise AssertionError("a call that raises has returned")

    @not_compiled
    def _now(self, kind: str, name: str | None, call: Callable[[], T]) -> T:
        self._check_open()
        self._queue.drain()
        return self.whole_call(partial(self._in_thread, kind, name, call, self._is_second_thread()))

    @not_compiled
    def _later(self, kind: str, name: str | None, call: Callable[[], T]) -> Work[T]:
        self._check_open()
        call = partial(self._in_thread, kind, name, call, self._is_second_thread())
        return self._queue.submit(partial(self.whole_call, call))

    def _is_second_thread(self) -> bool:
        """Return whether this backend was made by a different thread than the calling one."""
        return not hasattr(self._of_thread, "made_this")

    def _in_thread(self, kind: str, name: str | None, call: Callable[[], T], second: bool) -> T:
        """Return the result of ``call``; ``second`` says whether a second thread makes it.

        If ``call`` raises before the ranks have compared their calls, raise on every rank, so that the other ranks do not
        wait for a rank that was called with wrong arguments. Their error names this rank's call by ``kind`` and ``name``.
        """
        before = self.in_second_thread, self.compared
        self.in_second_thread, self.compared = second, False
        try:
            return call()
        except BackendError:
            raise
        except Exception as problem:  # of any type: the arguments may run the user's code
            if self.compared:
                raise
            refuse(self, Call(kind, name if isinstance(name, str) else None), problem)
        finally:
            self.in_second_thread, self.compared = before

    def _check_open(self) -> None:
        if not self._open:
            raise BackendError("this backend is closed: make its last call before close()")

    def _checked_root(self, root: int) -> int:
        root = index(root)  # convert any integer type to int: the ranks compare the text of the call
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is no rank of this backend: choose one from 0 to {self.size - 1}")
        return root

    def _reduce_wire(self, tensor: torch.Tensor, op: ReduceOp, name: str | None, *, in_place: bool) -> torch.Tensor:
        """Reduce ``tensor`` in its wire dtype (``wire.py``); return the result.

        The result is a new tensor. With ``in_place``, it is ``tensor`` itself if no conversion is needed.
        """
        call = Call.on(op.value, tensor, name)
        primitive = wire.wire_op(tensor.dtype, op)
        packed = wire.pack(tensor)
        converted = packed.data_ptr() != tensor.data_ptr()  # then nothing else uses the memory of ``packed``
        reduced = self.reduce_checked(call, packed, primitive, name or op.value, in_place=in_place or converted)
        return wire.average_(reduced, self.size) if op is ReduceOp.AVERAGE else reduced

    def reduce_checked(self, call: Call, tensor: torch.Tensor, op: ReduceOp, name: str, *, in_place: bool) -> torch.Tensor:
        """Check that all ranks make the same ``call``, and only then reduce ``tensor``. Collective; blocks.

        ``tensor`` and ``op`` are as in :meth:`start_allreduce`. Return the result: a new tensor, or ``tensor`` itself with
        ``in_place``.

        Raises:
            BackendError: on every rank, if the calls differ; otherwise as :meth:`allreduce`.
        """
        reduction = Reduction(tensor, op)
        agree(self, call, data=reduction)
        if reduction.result is not None:
            return tensor.copy_(reduction.result) if in_place else reduction.result.clone()
        try:
            output = tensor if in_place else tensor.clone(memory_format=torch.contiguous_format)
            self.start_allreduce(output, op, name).wait()
        except Exception as error:
            self.report_unsent(error)
            raise
        return output

    def start_matched(self, tensor: torch.Tensor, op: ReduceOp, name: str) -> Work[None]:
        """Do the same as :meth:`start_allreduce`, for a call that the caller has matched between the ranks.

        May block if ``tensor`` is short.
        """
        return self.start_allreduce(tensor, op, name)

    def _barrier(self, name: str | None) -> None:
        agree(self, Call("barrier", name))

    def _allreduce(self, tensor: torch.Tensor, op: ReduceOp | str, name: str | None) -> torch.Tensor:
        tensor = wire.dense(tensor)
        detached = tensor.detach() if tensor.requires_grad else tensor
        return wire.unpack(self._reduce_wire(detached, ReduceOp.of(op), name, in_place=False), detached)

    def _allreduce_(self, tensor: torch.Tensor, op: ReduceOp | str, name: str | None) -> torch.Tensor:
        detached = ordinary(wire.writable(tensor).detach())
        reduced = self._reduce_wire(detached, ReduceOp.of(op), name, in_place=True)
        if reduced is detached:
            return tensor
        reduced = wire.unpack(reduced, detached)
        if reduced.data_ptr() != tensor.data_ptr():
            detached.copy_(reduced)
        return tensor

    @torch.no_grad()
    def _reducescatter(self, tensor: torch.Tensor, op: ReduceOp | str, name: str | None) -> torch.Tensor:
        # An all-to-all and a local reduction in rank order work for any operation and dtype, need no padding, and give
        # equal bits on every backend.
        op = ReduceOp.of(op)
        if wire.dense(tensor).dim() == 0:
            raise ValueError("a tensor without a dimension has no rows to scatter: reshape it to (1,)")
        primitive = wire.wire_op(tensor.dtype, op)
        agree(self, Call.on(f"reducescatter ({op.value})", tensor, name))
        total, like = self.reduce_rows(tensor, primitive, name or "reducescatter")
        return wire.unpack(wire.average_(total, self.size) if op is ReduceOp.AVERAGE else total, like)

    def reduce_rows(self, tensor: torch.Tensor, primitive: ReduceOp, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's rows of the reduction, in the wire dtype, and a tensor of their shape and original dtype."""
        rows = split_sizes(tensor.shape[0], self.size)
        mine = rows[self.rank]
        received = self.alltoall_rows(tensor, rows, [mine] * self.size, name)
        parts = (wire.pack(part) for part in received.split(mine)) if mine else iter([wire.pack(received)])
        return reduce(FOLD[primitive], parts).clone(), received[:mine]

    def _broadcast(self, tensor: torch.Tensor, root: int, name: str | None) -> torch.Tensor:
        return self._broadcast_(_fresh(tensor), root, name)

    @torch.no_grad()
    def _broadcast_(self, tensor: torch.Tensor, root: int, name: str | None) -> torch.Tensor:
        tensor = wire.writable(tensor)
        root = self._checked_root(root)
        data = wire.as_bytes(tensor)
        short = Broadcast(root, data if self.rank == root else None)
        agree(self, Call.on("broadcast", tensor, name, root=root), data=short)
        if short.result is not None:
            ordinary(data).copy_(short.result)
        elif data.numel():
            self.start_broadcast(data, root, name or "broadcast").wait()
        if data.data_ptr() != tensor.data_ptr():
            ordinary(tensor).copy_(wire.from_bytes(data, tensor.dtype, tuple(tensor.shape)))
        return tensor

    @torch.no_grad()
    def _allgather(self, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        tensor = wire.dense(tensor).detach()
        tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
        short = Gather(wire.as_bytes(tensor), tensor.shape[1:].numel() * tensor.element_size())
        rows = agree(self, Call.on("allgather", tensor, name, free=True), tensor.shape[0], short)
        if short.result is not None:
            return wire.from_bytes(short.result.clone(), tensor.dtype, (sum(rows), *tensor.shape[1:]))
        return self.gather_rows(tensor, rows, name or "allgather")

    def gather_rows(self, tensor: torch.Tensor, rows: list[int], name: str) -> torch.Tensor:
        """Concatenate every rank's rows in rank order. ``rows`` is each rank's number of rows, which all ranks know."""
        row_bytes = tensor.shape[1:].numel() * tensor.element_size()
        parts = self.gather(wire.as_bytes(tensor), [n * row_bytes for n in rows], name)
        return wire.from_bytes(torch.cat(parts), tensor.dtype, (sum(rows), *tensor.shape[1:]))

    def gather(self, data: torch.Tensor, lengths: list[int], name: str) -> list[torch.Tensor]:
        """Gather every rank's bytes in rank order; all ranks know the ``lengths``.

        The bytes are padded to the greatest length, since ``start_allgather`` gathers only tensors of equal length.
        """
        width = max(lengths)
        try:
            output = data.new_empty(self.size * width)
            if width:
                self.start_allgather(output, torch.nn.functional.pad(data, (0, width - len(data))), name).wait()
        except Exception as error:
            self.report_unsent(error)
            raise
        return [part[:n] for part, n in zip(output.view(self.size, width), lengths, strict=True)]

    @torch.no_grad()
    def _alltoall(
        self, tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None, name: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sent = rows_to_send(wire.dense(tensor), splits, self.size)
        agree(self, Call.on("alltoall", tensor, name, free=True))
        received = [theirs[self.rank] for theirs in self.compare_numbers(sent)]
        rows = self.alltoall_rows(tensor.detach(), sent, received, name or "alltoall")
        return rows, torch.tensor(received, dtype=torch.int32, device="cpu")

    def alltoall_rows(self, tensor: torch.Tensor, sent: list[int], received: list[int], name: str) -> torch.Tensor:
        """Send ``sent[r]`` rows to rank r, and return the received rows, ``received[r]`` from rank r."""
        row_bytes = tensor.shape[1:].numel() * tensor.element_size()
        try:
            data = wire.as_bytes(tensor)[: sum(sent) * row_bytes]
            output = data.new_empty(sum(received) * row_bytes)
            if row_bytes:
                counts = [n * row_bytes for n in received], [n * row_bytes for n in sent]
                self.start_alltoall(output, data, *counts, name).wait()
        except Exception as error:
            self.report_unsent(error)
            raise
        return wire.from_bytes(output, tensor.dtype, (sum(received), *tensor.shape[1:]))

    def _broadcast_object(self, obj: Any, root: int, name: str | None) -> Any:
        root = self._checked_root(root)
        data, problem = _encoded(obj) if self.rank == root else (None, None)
        length = -1 if problem else 0 if data is None else len(data)
        short = Broadcast(root, data)
        length = agree(self, Call("broadcast_object", name, root=root), length, short)[root]
        self._refuse_if_unsent({root: length}, problem)
        if (buffer := short.result) is None:
            try:
                buffer = torch.empty(length, dtype=torch.uint8, device="cpu") if data is None else data
                self.start_broadcast(buffer, root, name or "broadcast_object").wait()
            except Exception as error:
                self.report_unsent(error)
                raise
        return obj if data is not None else objects.decode(buffer)

    def _allgather_object(self, obj: Any, name: str | None) -> list[Any]:
        data, problem = _encoded(obj)
        short = None if data is None else Gather(data, unit=1)
        lengths = agree(self, Call("allgather_object", name), -1 if data is None else len(data), short)
        self._refuse_if_unsent(dict(enumerate(lengths)), problem)
        assert data is not None
        if short is not None and short.result is not None:
            return [objects.decode(part) for part in short.result.split(lengths)]
        return [objects.decode(part) for part in self.gather(data, lengths, name or "allgather_object")]

    def _refuse_if_unsent(self, lengths: dict[int, int], problem: TypeError | None) -> None:
        """Raise on every rank, with the reason, if a rank's object cannot be sent (its length is then negative)."""
        refused = [rank for rank, length in lengths.items() if length < 0]
        if not refused:
            return
        reasons = exchange_text(self.compare_numbers, "" if problem is None else str(problem), _REASON_BYTES)
        if problem is not None:
            raise problem
        raise BackendError(f"{ranks_in_words(refused)} could not send an object: {reasons[refused[0]]}")

    def _checked_group(self, ranks: Sequence[int]) -> Backend | None:
        if self.is_group:
            raise ValueError("a group cannot be divided into groups: make them from the backend that connect() returned")
        members = sorted(map(index, ranks))
        if not members or len(set(members)) < len(members) or members[0] < 0 or members[-1] >= self.size:
            raise ValueError(f"a group needs one or more different ranks from 0 to {self.size - 1}, not {list(ranks)}")
        return self._group(members)

    def _group(self, members: list[int]) -> Backend | None:
        agree(self, Call("group", shape=tuple(members)))
        hosts = [self.hosts[rank] for rank in members]
        world = self.world.placed(members.index(self.rank), hosts) if self.rank in members else None
        group = self.subset(members, world)
        if group is None:
            return None
        assert isinstance(group, Backend)
        group.hosts, group.watch, group.on_wait = tuple(hosts), self.watch, self.on_wait
        group.members, group.is_group = tuple(self.members[rank] for rank in members), True
        group = self.adapt_group(group)
        self.close_with(group)
        return group

    def adapt_group(self, group: Backend) -> Backend:
        """Return the result of :meth:`group`: the new ``group``, which a subclass may wrap."""
        return group

    def close_with(self, group: Backend) -> None:
        """Close ``group`` when this backend is closed."""
        self._groups_made = [one for one in self._groups_made if one._open] + [group]


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return wire.dense(tensor).detach().clone(memory_format=torch.contiguous_format)


def _raise(problem: Exception) -> NoReturn:
    raise problem


def _encoded(obj: Any) -> tuple[torch.Tensor | None, TypeError | None]:
    try:
        return objects.encode(obj), None
    except TypeError as problem:
        return None, problem
