"""The backend that users call: collective operations, groups, sums of gradients. Written once for all libraries.

The libraries' backends (``torch.py``, ``horovod.py``) implement only the primitives (``base.py``). The calls of ``Backend``
use these primitives, and add averages, further dtypes, tensors with any strides, unequal sizes, objects, barriers, groups
and the asynchronous forms. Each call first checks that all ranks make the same call. ``movement.py``, ``reductions.py`` and
``object_calls.py`` have the calls that send data.
"""

from __future__ import annotations

import errno
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from types import TracebackType
from typing import Self

import torch

from dualtrain.backends.agreement import Call, agree
from dualtrain.backends.base import ReduceOp, Scaled, Work
from dualtrain.backends.object_calls import ObjectCalls
from dualtrain.backends.reductions import Reductions
from dualtrain.backends.sum_order import SumOrder
from dualtrain.backends.tree_sum import TreeSum
from dualtrain.errors import UserError, one_line
from dualtrain.launchers import World
from dualtrain.rendezvous.key_value_store import KeyValueStore


class Backend(Reductions, ObjectCalls):
    """One rank of a world of processes, and the collective operations over this world.

    Collective: every rank makes the same calls in the same order. A call that does not match (another operation,
    shape, dtype, root or name) raises :class:`~dualtrain.errors.BackendError` on every rank. The error names each rank's
    call, and the backend stays usable. A call with wrong arguments also raises on every rank. If all ranks' calls have the
    same error, such as a ValueError, this error is raised. Otherwise BackendError is raised, which names the rank and its
    error. A rank with wrong arguments sends its error in the comparison of calls, so correct calls need no additional
    message. If an error occurs on one rank after the comparison, such as too little memory for the result, the calls of
    the other ranks raise PeerFailedError. The backend can then no longer be used.

    Tensors may have any dtype (for reductions, see :meth:`allreduce`), any strides, and any number of dimensions, zero
    included. Sparse, nested and quantized tensors are refused. Results, except of calls in place, are new, contiguous
    tensors on the same device, without autograd history (:mod:`dualtrain.functional` has collectives with gradients). Calls
    work inside and outside of ``torch.inference_mode()``, on tensors made inside or outside of it. Calls without ``_async``
    block until the result can be used on the current stream. Calls with ``_async`` return a
    :class:`~dualtrain.backends.base.Work`, whose ``wait()`` returns the result; do not change the tensor before ``wait()``
    has returned. A name is shown in errors and reports.

    Make all calls in one thread, since calls of several threads would have no common order on all ranks. Give each further
    thread its own backend, which :meth:`channel` returns. A call raises BackendError if a blocking call of a different
    thread is running, or if a signal handler or finalizer makes it during a call of the same thread. If some ranks make a
    call in the thread that made this backend, and others make it in a different thread, the call raises BackendError on
    every rank. Backward passes may run at the same time as calls. If the world has several ranks, calls raise BackendError
    in a process that was forked from a rank, such as a data worker.

    Attributes:
        device: where this rank's tensors are, as chosen by ``connect``.
        timeout: the longest time in seconds that a call waits.
        is_group: whether this backend was made from another one, as by :meth:`group` and :meth:`channel`.
        store: a part of the job's store for this world alone, or ``None``. It can be used after :meth:`close`.
    """

    store: KeyValueStore | None = None

    def __init__(self, world: World, device: torch.device, timeout: float) -> None:
        super().__init__(world, device, timeout)
        self.is_group = False
        self._groups_made: list[Backend] = []

    # -- barriers, groups -----------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Block until every rank has called this method.

        Raises:
            BackendError: as :meth:`allreduce`.
        """
        self._now("barrier", name, partial(self._barrier, name))

    def group(self, ranks: Sequence[int]) -> Backend | None:
        """Return a backend over some of this backend's ranks; ``None`` on ranks that are not in ``ranks``.

        The new backend numbers its ranks from 0, in ascending order of ``ranks``. Every rank of this backend must make the
        call, with the same ``ranks``. Blocks. The group is closed with this backend. Its calls use the
        communication library, even if this backend uses shared memory.

        Raises:
            ValueError: ``ranks`` is empty, repeats a rank or has a rank that does not exist; or this backend is itself a
                group or a channel, or is Horovod's and was connected with ``groups=False``.
            TypeError: a rank is not an integer.
            UserError: the processes of the group cannot connect to each other.
            BackendError: as :meth:`allreduce`.
        """
        return self._now("group", None, partial(self._checked_group, ranks))

    def channel(self) -> Backend:
        """Return a channel: a second backend over the same ranks. Collective; blocks.

        The operations of a channel and those of this backend may be interleaved in a different order on each rank, except
        for operations on GPUs: with two NCCL communicators, they may deadlock. The channel is closed with this backend.

        Raises:
            UserError: the processes cannot connect to each other.
            BackendError: as :meth:`allreduce`.
        """
        channel = self._now("channel", None, partial(self._group, list(range(self.size)), "channel"))
        assert channel is not None
        return channel

    def make_default_group(self) -> None:
        """Make torch.distributed's default process group over the same ranks. Collective; blocks.

        :meth:`close` destroys it, unless the program has done so.

        Raises:
            UserError: the process has a default group already, the group could not be made, or this is not the torch
                backend.
            BackendError: as :meth:`allreduce`; also if only some ranks have a default group already.
        """
        raise no_default_group(self.name)

    def between_hosts(self) -> Backend:
        """Return the group of the ranks that have this rank's local rank, one per host. Collective; blocks.

        Every host must have equally many ranks.
        """
        mine = None
        for number in range(self.local_size):
            seen = Counter[int]()  # how many of its ranks each host has had so far
            ranks = []
            for rank, host in enumerate(self.hosts):
                if seen[host] == number:
                    ranks.append(rank)
                seen[host] += 1
            group = self._now("group", None, partial(self._group, ranks))
            mine = group if group is not None else mine
        assert mine is not None
        return mine

    # -- the gradient path ----------------------------------------------------------------------------------------

    def new_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of zeros, (numel,), that :meth:`start_sum` reduces with the fewest copies. Collective; blocks."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def replace_buffer(self, buffer: torch.Tensor, use: Callable[[torch.Tensor], None]) -> None:
        """Make a copy of ``buffer``, and call ``use`` with the copy. Not collective.

        If ``buffer`` is a result of :meth:`new_buffer`, pass the copy instead of ``buffer`` to :meth:`start_sum` from then
        on. After this call, other ranks no longer read or write the memory of ``buffer``. If an interrupt such as Ctrl-C
        has stopped this call, repeat it with the same ``buffer``.

        Raises:
            OSError: there is not enough memory.
        """
        try:
            copy = buffer.clone()
        except RuntimeError as error:
            raise OSError(errno.ENOMEM, one_line(error)) from error
        use(copy)

    def start_sum(self, tensor: torch.Tensor, name: str, factor: float = 1.0, tail: int = 0) -> Work[None]:
        """Sum ``tensor`` over all ranks in place, then multiply all but the last ``tail`` elements by ``factor``.

        Otherwise as :meth:`start_allreduce`. Does not block. Sums are matched only with sums: a rank may start a sum before
        a call of a different method, and another rank may start it after that call. (With NCCL, the order must be the same
        on all ranks. With Horovod, no unfinished operation may have the same ``name``.) If ``tensor`` comes from
        :meth:`new_buffer` on one rank, it must do so on every rank.
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

    def close(self) -> None:
        """Wait for outstanding calls, then leave the world. May be called again. Other ranks need not call it.

        With Horovod, this shuts Horovod down on all ranks. If some ranks still use a group, call ``barrier`` first.
        In a process that was forked from the rank, this only makes later calls in that process fail.
        """
        if not self._open:
            return
        self._open = False
        if not self.is_own_process:
            return  # connections and memory are the rank's, and locks of the rank's threads may never be released here
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

    def _barrier(self, name: str | None) -> None:
        agree(self, Call("barrier", name))

    def _checked_group(self, ranks: Sequence[int]) -> Backend | None:
        if self.is_group:
            raise ValueError("a group cannot be divided into groups: make them from the backend that connect() returned")
        members = sorted(map(index, ranks))
        if not members or len(set(members)) < len(members) or members[0] < 0 or members[-1] >= self.size:
            raise ValueError(f"a group needs one or more different ranks from 0 to {self.size - 1}, not {list(ranks)}")
        return self._group(members)

    def _group(self, members: list[int], kind: str = "group") -> Backend | None:
        agree(self, Call(kind, shape=tuple(members)))
        hosts = [self.hosts[rank] for rank in members]
        world = self.world.placed(members.index(self.rank), hosts) if self.rank in members else None
        group = self.subset(members, world)
        if group is None:
            return None
        assert isinstance(group, Backend)
        group.hosts, group.watch = tuple(hosts), self.watch
        group.on_wait, group.meanwhile = self.on_wait, self.meanwhile
        group.members, group.is_group = tuple(self.members[rank] for rank in members), True
        self.close_with(group)
        return group

    def close_with(self, group: Backend) -> None:
        """Close ``group`` when this backend is closed."""
        self._groups_made = [one for one in self._groups_made if one._open] + [group]


def no_default_group(name: str) -> UserError:
    """Return the error for a backend that is not torch, and so cannot make torch.distributed's default process group."""
    return UserError(
        f"default_group=True needs the torch backend, and this is {name}: choose torch, or leave default_group out"
    )


def check_backend(backend: object) -> None:
    """Raise TypeError if ``backend`` is not a :class:`Backend`, for example if it is the name of one."""
    if not isinstance(backend, Backend):
        raise TypeError(f"backend is a {type(backend).__name__}: give what connect() returns")
