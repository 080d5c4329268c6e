"""torch.distributed as a backend: Gloo for tensors on the CPU, NCCL for tensors on NVIDIA GPUs.

Apart from the bench, only this module imports torch.distributed. The process groups are dualtrain's own. This module makes
torch.distributed's default group only on request (``default_group``). Without this request, libraries that check
``is_initialized()`` behave as they would without dualtrain. There are two Gloo groups, and an NCCL group from the first GPU
tensor on. The ranks compare their calls on separate connections (``call_channel.py``).

Operations of a group are matched by their order. During backward, all ranks send buckets of gradients in the same order.
But another call may come before a bucket on one rank, and after it on a different rank. So one Gloo group is for sums of
gradients, and the other one is for all other calls, which the ranks compare before they start them. All NCCL operations
share one group, since two groups may deadlock on a GPU. Before a call on a GPU tensor, the ranks therefore also compare how
many sums they have started.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import json
import os
import secrets
import threading
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

# Private API of torch, the same in torch 2.5 to 2.15: options for the methods of process groups. The public functions
# accept registered groups only, and take longer for a small tensor. tests/backends/test_private_torch.py fails when this
# API is gone.
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from dualtrain.backends.agreement import Call, agree, exchange_text
from dualtrain.backends.base import (
    COMPARING,
    Closed,
    Done,
    GradientPath,
    ReduceOp,
    Reduction,
    Short,
    Work,
    refuse_other_devices,
)
from dualtrain.backends.call_channel import CallChannel
from dualtrain.backends.collectives import Backend
from dualtrain.backends.host_cores import cores_of_host
from dualtrain.backends.inference import ordinary
from dualtrain.backends.short_calls import CallBuffers, is_sent_with_call, longest
from dualtrain.differences import refuse_unlike
from dualtrain.errors import BackendError, UserError, first_line
from dualtrain.launchers import World, new_job
from dualtrain.processes import LIMIT_CURE, start_thread
from dualtrain.rendezvous.connection import open_control_channel
from dualtrain.rendezvous.hosts import gloo_interface, listening_address, variables
from dualtrain.rendezvous.meeting_point import join, leave, meeting_point, names_by_server
from dualtrain.rendezvous.placement import SAME_BACKEND, place_ranks
from dualtrain.rendezvous.session import agree_on_session
from dualtrain.rendezvous.store import Store, listen
from dualtrain.torch_versions import asynchronous, shut_down

#: For each address and name of a world, the number of worlds so far. All ranks of a world have the same number.
_WORLDS: Counter[tuple[str, int, str]] = Counter()

_START = "the start of NCCL"
_ADDRESS_BYTES = 128  # longest text of an address, a port and a key prefix

#: The groups in use, each with the id of the process that made it. This list keeps the groups alive: after a peer has
#: failed, dropping the last reference to a group blocks the thread until the group's last operation ends. A forked child
#: must never drop its parent's groups, since it does not have their threads: it would wait for them, or crash.
_IN_USE: list[tuple[int, Any]] = []
_BACKENDS: weakref.WeakSet[TorchBackend] = weakref.WeakSet()
_ENDING: list[threading.Thread] = []  # threads that are still ending groups of backends without a failed peer
_EXIT_SECONDS = 30.0  # longest wait for these threads at exit


def _end(groups: list[Any], *, peer_failed: bool) -> None:
    """End groups by dropping their last references, which are in ``groups``. Usually blocks for a second at most.

    The groups end in a thread. If a peer has failed, this thread may wait for an unfinished operation, so the exit of the
    process does not wait for the thread. Without a failed peer, a thread that needs more than a second, as on a busy
    machine, is joined at exit, for up to ``_EXIT_SECONDS``.
    """
    try:
        thread = start_thread(groups.clear, "dualtrain-group-end")
    except UserError:  # the limit of threads is reached: wait here
        groups.clear()
        return
    thread.join(1.0)
    _ENDING[:] = [each for each in _ENDING if each.is_alive()]
    if not peer_failed and thread.is_alive():
        _ENDING.append(thread)


@atexit.register
def _end_all() -> None:
    """End the groups of a program that does not close its backend, and wait for groups that are still ending.

    After the failure of a peer, this function waits for a second at most.

    Gloo's threads, and threads that end a group, take the GIL to release a tensor. They abort the process if the
    interpreter has ended.
    """
    groups = [group for process, group in _IN_USE if process == os.getpid()]
    _IN_USE[:] = [(process, group) for process, group in _IN_USE if process != os.getpid()]
    for _, group in _IN_USE:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # otherwise the interpreter would drop the group at exit
    peer_failed = False
    for backend in _BACKENDS:
        peer_failed |= backend.watch is not None and backend.watch.peer_failed
        backend.forget_groups()
    if groups:
        _end(groups, peer_failed=peer_failed)
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in _ENDING:
        thread.join(max(deadline - time.monotonic(), 0.0))


def _async_options(kind: type, **values: Any) -> Any:
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return asynchronous(options)


_OPTIONS = {
    ReduceOp.SUM: _async_options(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.SUM),
    ReduceOp.MIN: _async_options(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.MIN),
    ReduceOp.MAX: _async_options(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.MAX),
    ReduceOp.PRODUCT: _async_options(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.PRODUCT),
}
_GATHER = _async_options(c10d.AllgatherOptions)
_ALL_TO_ALL = _async_options(c10d.AllToAllOptions)


class _TorchWork(Work[None]):
    def __init__(self, backend: TorchBackend, work: dist.Work, what: str, *tensors: torch.Tensor) -> None:
        self._backend = backend
        self._work = work
        self._what = what
        self._tensors = tensors  # kept alive until the work has ended
        self._on_gpu = tensors[0].is_cuda

    def wait(self) -> None:
        if self._on_gpu:
            self._work.wait()  # makes the current stream wait; with a timeout it would block the CPU
        else:
            self._backend.await_bounded(self._what, self._wait_for)
        self._tensors = ()

    def _wait_for(self, seconds: float) -> bool:
        try:
            # Torch rounds the timeout down to whole milliseconds, and 0 means no timeout.
            self._work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:
            # A wait that merely timed out leaves the operation unchanged, and may be repeated.
            if not self._work.is_completed():
                return False
            self._work.wait()  # it may have completed just after the timeout: raise its error, if any
        return True

    def done(self) -> bool:
        return bool(self._work.is_completed())


class _JobStore(dist.Store):
    """Adapter that gives the job's store the interface of torch.distributed's stores."""

    def __init__(self, store: Store, seconds: float) -> None:
        super().__init__()
        self._store = store
        self._seconds = seconds

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, _text(value))

    def get(self, key: str) -> bytes:
        value = self._ask("get", key, wait=self._seconds)
        if value is None:
            raise dist.DistStoreError(f"no process has set {key!r} within {self._seconds:g} s")
        return str(value).encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return str(self._ask("swap", key, [_text(expected), _text(desired)])).encode("latin-1")

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("has", value=keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        if not self._ask("has", value=keys, wait=seconds):
            raise dist.DistStoreError(f"no process has set {' and '.join(map(repr, keys))} within {seconds:g} s")

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("drop", key))

    def num_keys(self) -> int:
        return int(self._ask("count"))

    def _ask(self, what: str, key: str = "", value: object = None, wait: float = 0.0) -> Any:
        try:
            return self._store.call(what, key, value, wait)
        except OSError as error:
            raise UserError(f"the process that serves the job's store has ended ({error}): see its own message") from error


@cache
def _adapted(store: Store, seconds: float) -> _JobStore:
    """Return the adapter of ``store``. The cache keeps the adapter alive: torch would keep only its C++ part."""
    return _JobStore(store, seconds)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else bytes(value).decode("latin-1")


class TorchBackend(Backend):
    """Process groups of Gloo and NCCL that belong to this backend alone.

    Construction is collective and blocks.

    Args:
        world: this process's rank, and the number of ranks.
        device: where this rank's tensors will be.
        timeout: the longest time in seconds that any wait lasts.
        store: the job's store, without keys of earlier worlds.
        placed_world: ``world`` with local and cross ranks that follow from the hosts of all ranks.

    Raises:
        UserError: the processes cannot connect to each other.
        BackendError: rank 0 cannot be reached or cannot listen, or a rank did not connect to it in time or failed later.
    """

    name = "torch"
    store: dist.Store
    transports: ClassVar = {"cpu": "gloo", "cuda": "nccl"}
    _subsets = 0  # how many groups and default groups were made from this backend
    _default_group: Any = None  # the default group that this backend has made
    _native: dist.Store | None = None  # see ``_native_store``
    _nccl: Any = None  # the process group for tensors on GPUs; ``None`` before the first one
    _nccl_sums = 0  # how many operations of the gradient path were started in that group
    #: Buffers for the next comparison of calls; ``None`` before the first comparison, and while the last has not ended.
    _buffers: CallBuffers | None = None

    def __init__(self, world: World, device: torch.device, timeout: float, store: dist.Store, placed_world: World) -> None:
        super().__init__(world, device, timeout)
        self.transport = self.transports[device.type]
        self._interface, self._address = gloo_interface(placed_world), listening_address(placed_world)
        self._one_host = placed_world.single_host
        self._open_groups(store)
        try:
            self._set_longest(few_cores=self._one_host and self._cores() <= self.size)
        except BaseException:
            self.disconnect()
            raise

    def _open_groups(self, store: dist.Store) -> None:
        """Make the Gloo groups and the control channel, with ``store`` for the rendezvous. Collective; blocks.

        Raises:
            UserError: the processes cannot connect to each other.
            BackendError: a rank did not connect to rank 0 in time, or rank 0 cannot be reached or cannot listen.
        """
        self.store = store
        self._groups: list[Any] = []
        self._channel: Any = Closed()
        try:
            self._connect_processes(store)
        except BaseException:
            self.disconnect()
            raise

    def _connect_processes(self, store: dist.Store) -> None:
        try:
            for name in ("sums", "calls"):
                self._hold(_gloo_group(dist.PrefixStore(name, store), self.world, self._interface, self.timeout))
        except RuntimeError as error:
            reason = first_line(error)
            if os.strerror(errno.EAGAIN) in reason:  # Gloo could not start a thread
                reason = f"{reason}; {LIMIT_CURE}"
            raise UserError(f"the {self.size} processes could not connect to each other: {reason}") from error
        self._sums, self._calls = self._groups
        try:
            connections = open_control_channel(_RanksOfStore(self, store), self._address, "comparing calls")
        except dist.DistStoreError as error:
            raise UserError(f"the {self.size} processes could not connect to each other: {first_line(error)}") from error
        self._channel = CallChannel(self.rank, self.size, connections, self._await_exchange)

    def _cores(self) -> int:
        """Return how many cores the ranks may use together, if all of them are on one host. Collective; blocks."""
        return cores_of_host(self.exchange, [0] * self.size, self.rank)

    def _set_longest(self, *, few_cores: bool) -> None:
        """Set ``_longest``, the largest number of bytes of data that is sent in the messages that compare a call.

        Groups of this backend's ranks get the same ``few_cores``.
        """
        self._few_cores = few_cores
        self._longest = longest(self.size, one_host=self._one_host, few_cores=few_cores)

    def _hold(self, *groups: Any) -> None:
        self._groups += groups
        _BACKENDS.add(self)
        _IN_USE.extend((os.getpid(), group) for group in groups)

    def start_allreduce(self, tensor: torch.Tensor, op: ReduceOp, name: str) -> Work[None]:
        return _Operations(self, self._group_of).start_allreduce(tensor, op, name)

    def start_broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Work[None]:
        options = _async_options(c10d.BroadcastOptions, rootRank=root, rootTensor=0)
        issue = partial(self._group_of(tensor).broadcast, [tensor], options)
        return self.start(f"broadcast of {name!r} from rank {self.members[root]}", issue, tensor)

    def start_allgather(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Work[None]:
        return _Operations(self, self._group_of).start_allgather(output, tensor, name)

    def start_alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], name: str
    ) -> Work[None]:
        return _Operations(self, self._group_of).start_alltoall(output, tensor, received, sent, name)

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        return [array("q", data).tolist() for data in self._channel.allgather(array("q", numbers).tobytes())]

    def exchange_call(self, numbers: Sequence[int], data: Short | None) -> list[list[int]]:
        # An exchange that has timed out still uses its buffers: reuse only the buffers of an exchange that has ended.
        buffers, self._buffers = self._buffers or CallBuffers(self.rank, self.size, self._longest), None
        short = data if is_sent_with_call(data, self.size, self._longest) else None
        message = buffers.message(numbers, short)
        self._channel.exchange(message, buffers.rows, buffers.reply, partial(buffers.answer, short))
        self._buffers = buffers
        return buffers.read(short)

    def start_matched(self, tensor: torch.Tensor, op: ReduceOp, name: str) -> Work[None]:
        if not is_sent_with_call(Reduction(tensor, op), self.size, self._longest):
            return self.start_allreduce(tensor, op, name)
        self.reduce_checked(Call.on(op.value, tensor, name), tensor, op, name, in_place=True)
        return Done()

    def _await_exchange(self, steps: Iterator[None]) -> None:
        ended = object()

        def finished(seconds: float) -> bool:
            self._channel.limit(seconds)
            return next(steps, ended) is ended

        self.await_bounded(COMPARING, finished)

    @property
    def gradient_path(self) -> GradientPath:
        """See the base class."""
        return _Operations(self, self._group_of_sums)

    def sums_among_calls(self, device: str) -> int:
        return self._nccl_sums if device == "cuda" else 0

    def start(self, what: str, issue: Callable[[], dist.Work], *tensors: torch.Tensor) -> Work[None]:
        """Start the operation ``what``, by calling ``issue``.

        Raises:
            BackendError: ``issue`` raised RuntimeError. See also :meth:`failure`.
        """
        try:
            return _TorchWork(self, issue(), what, *tensors)
        except RuntimeError as error:
            raise self.failure(what, error) from error

    def _group_of(self, tensor: torch.Tensor) -> Any:
        """Return the process group for checked calls on ``tensor``. Collective, and blocks, for the first GPU tensor.

        Raises:
            UserError, BackendError: there can be no group for this tensor.
        """
        if tensor.is_cpu:
            return self._calls
        refuse_other_devices(tensor)
        if self._nccl is None:
            self._nccl = _nccl_group(self._native_store(), self.world, self.timeout)
            self._hold(self._nccl)
        return self._nccl

    def _group_of_sums(self, tensor: torch.Tensor) -> Any:
        """Return the process group for an operation of the gradient path, and count the operation if it is on a GPU.

        Collective, blocks and raises as :meth:`_group_of`.
        """
        if tensor.is_cpu:
            return self._sums
        group = self._group_of(tensor)
        self._nccl_sums += 1
        return group

    def _native_store(self) -> dist.Store:
        """Return torch's C++ store for NCCL's threads, which outlive the interpreter and must not call into Python.

        Rank 0 serves the store, and sends its address and key prefix to the others. The first call is collective and
        blocks.

        Raises:
            BackendError: on every rank, if rank 0 cannot serve the store; or on a rank that cannot reach rank 0.
        """
        if self._native is not None:
            return self._native
        if self.size == 1:
            self._native = dist.HashStore()
            return self._native
        wait, host = timedelta(seconds=self.timeout), listening_address(self.world)
        address, failure = "", None
        if self.rank == 0:
            try:
                native, address = _serve_native(host, self.size, wait)
            except (OSError, RuntimeError) as error:  # raised below: the other ranks wait for the address
                failure = error
        [address, *_] = exchange_text(self.exchange, address, _ADDRESS_BYTES)
        if not address:
            if failure is None:
                raise BackendError(f"{_START} failed on rank 0: see its own message")
            raise self.failure(_START, failure) from failure
        host, number, prefix = address.split()
        if self.rank != 0:
            try:
                native = dist.TCPStore(host, int(number), None, False, wait, wait_for_workers=False)
            except RuntimeError as error:
                raise self.failure(_START, error) from error
        self._native = dist.PrefixStore(prefix, native)
        return self._native

    def subset(self, ranks: Sequence[int], world: World | None) -> TorchBackend | None:
        self._subsets += 1
        if world is None:
            return None
        group = object.__new__(TorchBackend)
        Backend.__init__(group, world, self.device, self.timeout)
        group.transport = self.transport
        prefix = f"group/{self._subsets}"
        if self._native is not None:
            group._native = dist.PrefixStore(prefix, self._native)
        group._interface, group._address, group._one_host = self._interface, self._address, self._one_host
        group._open_groups(dist.PrefixStore(prefix, self.store))
        group._set_longest(few_cores=self._few_cores)
        return group

    def make_default_group(self) -> None:
        """See the base class."""
        self._now("make_default_group", None, self._make_default_group)

    def _make_default_group(self) -> None:
        if dist.is_initialized():
            raise UserError("torch.distributed has a default process group already: leave default_group=True out")
        agree(self, Call("make_default_group"))
        self._subsets += 1
        gpus = self.device.type == "cuda"
        store = self._native_store() if gpus else self.store
        with variables({} if self._interface is None else {"GLOO_SOCKET_IFNAME": self._interface}):
            try:
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if gpus else "gloo",
                    store=dist.PrefixStore(f"default/{self._subsets}", store),
                    rank=self.rank,
                    world_size=self.size,
                    timeout=_group_timeout(self.timeout),
                )
            except RuntimeError as error:
                reason = first_line(error)
                raise UserError(f"torch.distributed's default process group could not be made: {reason}") from error
        self._default_group = dist.group.WORLD

    def disconnect(self) -> None:
        if not isinstance(self._channel, Closed):  # it is ``Closed`` if the ranks could not connect
            self._channel.close()
        self._channel = Closed()
        # The program may have destroyed this backend's default group, and made another one.
        if self._default_group is not None and self._default_group is dist.group.WORLD:
            dist.destroy_process_group()
        self._default_group = None
        if not isinstance(self._nccl, Closed | None):  # it is ``Closed`` after ``_end_all``, at exit
            shut_down(self._nccl)
        # Don't leave the groups to the garbage collector, which would end them in any thread and at any time.
        groups = list(self._groups)
        self.forget_groups()
        _IN_USE[:] = [(process, group) for process, group in _IN_USE if group not in groups]
        _end(groups, peer_failed=self.watch is not None and self.watch.peer_failed)

    def forget_groups(self) -> None:
        """Drop this backend's references to its groups."""
        self._groups.clear()
        self._sums = self._calls = self._nccl = Closed()


class _RanksOfStore:
    """The ranks of ``backend``, with a broadcast of objects through a store, for use before the backend is connected."""

    def __init__(self, backend: TorchBackend, store: dist.Store) -> None:
        self.rank, self.size, self.timeout = backend.rank, backend.size, backend.timeout
        self._store = store

    def broadcast_object(self, obj: Any = None, root: int = 0, name: str | None = None) -> Any:
        """Return rank ``root``'s ``obj``, which consists of JSON's types. Called once per name. Blocks on the other ranks.

        Raises:
            DistStoreError: rank ``root`` has not set the object within the store's timeout.
        """
        if self.rank == root:
            self._store.set(f"object/{name}", json.dumps(obj))
            return obj
        return json.loads(bytes(self._store.get(f"object/{name}")))


class _Operations:
    """The primitives of ``backend`` that the gradient path needs, in the process groups that ``group_of`` chooses."""

    def __init__(self, backend: TorchBackend, group_of: Callable[[torch.Tensor], Any]) -> None:
        self.rank, self.size = backend.rank, backend.size
        self._backend = backend
        self._group_of = group_of

    def start_allreduce(self, tensor: torch.Tensor, op: ReduceOp, name: str) -> Work[None]:
        """Start an all-reduce."""
        issue = partial(self._group_of(tensor).allreduce, [tensor], _OPTIONS[op])
        return self._backend.start(f"{op.value} of {name!r}", issue, tensor)

    def start_allgather(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Work[None]:
        """Start an allgather."""
        # In torch 2.5, Gloo's thread, which is not in inference mode, cannot write a tensor that was made in this mode.
        output = ordinary(output)
        issue = partial(self._group_of(tensor)._allgather_base, output, tensor, _GATHER)
        return self._backend.start(f"allgather of {name!r}", issue, output, tensor)

    def start_alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], name: str
    ) -> Work[None]:
        """Start an all-to-all."""
        issue = partial(self._group_of(tensor).alltoall_base, output, tensor, list(received), list(sent), _ALL_TO_ALL)
        return self._backend.start(f"alltoall of {name!r}", issue, output, tensor)


def build_facts() -> dict[str, bool]:
    """Return, for each communication library, whether this build of torch has it."""
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}


def rank_in_default_group() -> tuple[int, int] | None:
    """Return this process's rank in torch.distributed's default group, and the group's size; ``None`` without a group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def _group_timeout(timeout: float) -> timedelta:
    """Return the timeout of process groups.

    It is longer than the backend's timeout, so that the backend raises first: its error names the operation.
    """
    return timedelta(seconds=timeout + 10)


# The next two functions use private API of torch, the same in torch 2.5 to 2.15. There is no public way to make a group
# that is not a subset of the default group, or to choose Gloo's interface for one group.
# tests/backends/test_private_torch.py fails when this API is gone.


def _gloo_group(store: dist.Store, world: World, interface: str | None, timeout: float) -> Any:
    """Make a Gloo group. Collective; blocks. Raises RuntimeError if the processes cannot connect."""
    kind: Any = dist.ProcessGroupGloo
    if interface is None:
        return kind(store, world.rank, world.size, _group_timeout(timeout))
    options = kind._Options()
    options._devices = [kind.create_device(interface=interface)]
    options._timeout, options._threads = _group_timeout(timeout), 2
    return kind(store, world.rank, world.size, options)


def _nccl_group(store: dist.Store, world: World, timeout: float) -> Any:
    """Make an NCCL group. Does not block, and uses no GPU before the group's first operation.

    Raises:
        UserError: this build of torch has no NCCL.
    """
    if not dist.is_nccl_available():
        raise UserError("this build of torch has no NCCL, which tensors on GPUs need: install a CUDA build of torch")
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = _group_timeout(timeout)
    return kind(store, world.rank, world.size, options)


def meet(world: World, timeout: float, backend: str = "torch", obstacle: str | None = None) -> tuple[dist.Store, World]:
    """Open the job's store and wait for all processes. Collective; blocks.

    ``obstacle`` is the reason why the backend cannot use this host together with other hosts, or ``None``.

    Returns:
        The store, and the world with local and cross ranks that follow from the hosts of all ranks.

    Raises:
        UserError: as :func:`~dualtrain.rendezvous.meeting_point.names_by_server`,
            :func:`~dualtrain.rendezvous.meeting_point.meeting_point`, :func:`open_store` and
            :func:`~dualtrain.rendezvous.placement.place_ranks`; or the ranks have different backends.
    """
    deadline = time.monotonic() + timeout
    refuse_unlike("backend", names_by_server(world, timeout, backend), SAME_BACKEND)
    world = meeting_point(world, timeout)
    store = open_store(world, timeout)
    try:
        return store, place_ranks(store, world, (timeout, deadline), backend, obstacle)
    except BaseException:
        leave(world)
        raise


def open_store(world: World, timeout: float) -> dist.Store:
    """Return the key-value store of ``world``. Blocks until the store answers; under torchrun, also collective.

    It is the store of torch's default group, or is served by the launcher, the parent process or rank 0. A world of one
    process has a store of its own.

    Raises:
        UserError: the launcher names no address, the address cannot be reached, or its port is in use.
    """
    if world.size == 1:
        return dist.HashStore()
    if (default_store := _store_of_default_group(world)) is not None:
        return _numbered(default_store, world, ("", 0))
    if world.rendezvous is None:
        others = "the other process" if world.size == 2 else f"the other {world.size - 1} processes"
        if world.launcher == "none":
            raise UserError(
                f"the torch backend has no address to meet {others} at: give the World a rendezvous=(host, port) of rank 0"
            )
        raise UserError(
            f"the torch backend has no address to meet {others} at: {world.launcher} sets no "
            "MASTER_ADDR and MASTER_PORT; start with torchrun, or export both with one free port for all processes"
        )
    host, port = world.rendezvous
    wait = timedelta(seconds=timeout)
    try:
        if world.launcher == "torchrun":
            return _of_this_attempt(
                next(dist.rendezvous("env://", world.rank, world.size, timeout=wait))[0], world, timeout
            )
        store = _adapted(join(world, timeout), timeout)
    except RuntimeError as error:
        raise UserError(
            f"rank {world.rank} could not meet the others at {host}:{port} within {timeout:g} s ({first_line(error)}): "
            "check that the address is rank 0's, that the port is open, and that all processes were started"
        ) from error
    return _numbered(store, world, (host, port))


def _numbered(store: dist.Store, world: World, address: tuple[str, int]) -> dist.Store:
    """Return a part of ``store`` for this world alone: a store outlives its worlds, and keeps their keys."""
    key = *address, world.name
    _WORLDS[key] += 1
    return dist.PrefixStore(f"dualtrain/{world.name}/{_WORLDS[key]}", store)


def _of_this_attempt(store: dist.Store, world: World, timeout: float) -> dist.Store:
    """Return a part of torchrun's store that no earlier attempt has used. Collective; blocks.

    torchrun's agents serve the store, and keep it when they restart the workers.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store  # torch's prefix contains this host's restart count, which may differ between hosts
    numbered = _numbered(store, world, world.rendezvous or ("", 0))
    session = agree_on_session(numbered, world.rank, world.size, (timeout, time.monotonic() + timeout))
    return dist.PrefixStore(session, numbered)


def job_in_store(world: World, timeout: float) -> str:
    """Return the job's name in the store of torchrun's agents. The first call sets the name; restarts keep it.

    Raises:
        UserError: the store cannot be reached.
    """
    assert world.rendezvous is not None
    host, port = world.rendezvous
    try:
        store = dist.TCPStore(host, port, None, False, timedelta(seconds=timeout), wait_for_workers=False)
        return bytes(store.compare_set(world.job_key, "", new_job())).decode()
    except RuntimeError as error:
        raise UserError(
            f"the store of torchrun's agents at {host}:{port} does not answer ({first_line(error)}): start the job again"
        ) from error


def _store_of_default_group(world: World) -> dist.Store | None:
    """Return the store of the program's default group if the group contains this world; otherwise ``None``.

    A world without a name must have the group's rank and size. A world with a name is a part of the job, and must be
    smaller than the group. dualtrain uses this store because rank 0 of the default group already listens on MASTER_PORT.
    Under torchrun, this store is not needed: the agent's store serves any number of worlds.
    """
    rank_and_size = rank_in_default_group()
    if rank_and_size is None or world.launcher == "torchrun":
        return None
    contains = rank_and_size[1] > world.size if world.name else rank_and_size == (world.rank, world.size)
    # Private API of torch, the same in torch 2.5 to 2.15: there is no public way to get a default group's store.
    return distributed_c10d._get_default_store() if contains else None


def _serve_native(host: str, size: int, wait: timedelta) -> tuple[dist.Store, str]:
    """Serve torch's C++ store to ``size`` ranks; return it, and its address and key prefix.

    Raises:
        OSError, RuntimeError: the store cannot be served.
    """
    listening = listen(host, [0], size)
    port, prefix = int(listening.getsockname()[1]), secrets.token_hex(32)
    native = dist.TCPStore(host, port, None, True, wait, wait_for_workers=False, master_listen_fd=listening.detach())
    return native, f"{host} {port} {prefix}"
