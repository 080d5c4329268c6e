"""torch.distributed as a backend: Gloo for CPU tensors, NCCL for those of NVIDIA GPUs.

The only file that names torch.distributed. The process groups are dualtrain's own: torch.distributed's default group
stays as it is, there or not, so that libraries which look at ``is_initialized()`` behave as they would without dualtrain.
A Gloo group for data, a second one for the short rows of ``exchange``, so that a rank that checks a call never meets a
rank that sends a gradient, and an NCCL group from the first tensor of a GPU on.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from dualtrain.backends.agreement import exchange_text
from dualtrain.backends.base import ReduceOp, Work
from dualtrain.backends.collectives import Backend
from dualtrain.backends.comparison import refuse_unlike
from dualtrain.backends.hosts import identity, listening_address, listening_interface, variables
from dualtrain.backends.reach import reach_all
from dualtrain.backends.rendezvous import join, leave, meeting_point, names_by_server
from dualtrain.backends.store import Store, listen
from dualtrain.errors import UserError
from dualtrain.launchers import World
from dualtrain.torch_versions import asynchronous, shut_down

#: How many worlds met at an address so far: the same on all of their ranks.
_WORLDS: Counter[tuple[str, int, str]] = Counter()

SAME_BACKEND = "give the same --backend to all"
_REFUSAL_SECONDS = 3.0  # that the process which serves the store waits for the others to have read what refuses them

_PLACE_BYTES = 128  # of an address, a port and a key

#: The groups in use. Without this reference, a group that is dropped while a peer has failed would wait for its last
#: operation in whatever thread drops it.
_IN_USE: list[tuple[int, Any]] = []  # each with the process that has its threads, which a fork does not
_BACKENDS: weakref.WeakSet[TorchBackend] = weakref.WeakSet()


def _end(groups: list[Any]) -> None:
    """Ends groups with their last references, which only ``groups`` has. Blocks for a second at most.

    One that still has an operation under way (a peer has failed) waits for it in a thread of its own: nobody else needs to.
    """
    ending = threading.Thread(target=groups.clear, name="dualtrain-group-end", daemon=True)
    ending.start()
    ending.join(1.0)


@atexit.register
def _end_all() -> None:
    """Ends the groups of a program that does not close its backend.

    Gloo's threads take the interpreter's lock to drop a tensor, and abort the process when the interpreter is gone.
    """
    groups = [group for process, group in _IN_USE if process == os.getpid()]
    if not groups:
        return
    _IN_USE.clear()
    for backend in _BACKENDS:
        backend.forget_groups()
    _end(groups)


def _asynchronous(kind: type, **values: Any) -> Any:
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return asynchronous(options)


_OPTIONS = {
    ReduceOp.SUM: _asynchronous(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.SUM),
    ReduceOp.MIN: _asynchronous(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.MIN),
    ReduceOp.MAX: _asynchronous(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.MAX),
    ReduceOp.PRODUCT: _asynchronous(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.PRODUCT),
}
_GATHER = _asynchronous(c10d.AllgatherOptions)
_ALL_TO_ALL = _asynchronous(c10d.AllToAllOptions)


class _TorchWork(Work[None]):
    def __init__(self, backend: TorchBackend, work: dist.Work, what: str, *tensors: torch.Tensor) -> None:
        self._backend = backend
        self._work = work
        self._what = what
        self._tensors = tensors  # kept alive until the work has ended

    def wait(self) -> None:
        if self._tensors and self._tensors[0].is_cuda:
            self._work.wait()  # orders the current stream behind the work; with a time-out it would block the host
        else:
            self._backend.await_bounded(self._what, self._wait_for)
        self._tensors = ()

    def _wait_for(self, seconds: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            # A wait that merely ran out leaves the work as it is, and may be repeated.
            if not self._work.is_completed():
                return False
            self._work.wait()  # It may have ended just after the wait ran out: this says how it ended.
        return True

    def done(self) -> bool:
        return bool(self._work.is_completed())


class _JobStore(dist.Store):
    """The job's store, as torch knows stores."""

    def __init__(self, store: Store, seconds: float) -> None:
        super().__init__()
        self._store = store
        self._seconds = seconds

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, _text(value))

    def get(self, key: str) -> bytes:
        value = self._ask("get", key, wait=self._seconds)
        if value is None:
            raise dist.DistStoreError(f"nobody has set {key!r} within {self._seconds:g} s")
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
            raise dist.DistStoreError(f"nobody has set {' and '.join(map(repr, keys))} within {seconds:g} s")

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("drop", key))

    def num_keys(self) -> int:
        return int(self._ask("count"))

    def _ask(self, what: str, key: str = "", value: object = None, wait: float = 0.0) -> Any:
        try:
            return self._store.call(what, key, value, wait)
        except OSError as error:
            raise UserError(f"the process that serves the job's store has gone ({error}): see its own message") from error


@cache
def _adapted(store: Store, seconds: float) -> _JobStore:
    """Kept: torch holds a store of Python's by its C++ half, and loses these methods with the last reference to ours."""
    return _JobStore(store, seconds)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else bytes(value).decode("latin-1")


class TorchBackend(Backend):
    """Process groups of Gloo and NCCL that belong to this backend alone."""

    name = "torch"

    def __init__(self, world: World, device: torch.device, timeout: float) -> None:
        super().__init__(world, device, timeout)
        self.transport = "nccl" if device.type == "cuda" else "gloo"
        self._groups: list[Any] = []
        self._subsets = 0
        self._owns_default_group = False
        self._native: dist.Store | None = None
        self._nccl: Any = None
        found = default_group_place()
        if found is not None and not world.name and found != (world.rank, world.size):
            self.world = replace(world, rank=found[0], size=found[1])  # connect() refuses it
            return
        store, placed = meet(world, timeout)
        self._open_groups(store, _chosen_interface(placed))

    def _open_groups(self, store: dist.Store, interface: str | None) -> None:
        """Connects the ranks of ``store``. Collective; blocks. Raises UserError."""
        self._store, self._interface = store, interface
        try:
            self._data, self._control = (
                _gloo_group(dist.PrefixStore(name, store), self.world, interface, self.timeout)
                for name in ("data", "control")
            )
        except RuntimeError as error:
            raise UserError(f"the {self.size} processes could not connect to each other: {_first_line(error)}") from error
        self._hold(self._data, self._control)

    def _hold(self, *groups: Any) -> None:
        self._groups += groups
        _BACKENDS.add(self)
        _IN_USE.extend((os.getpid(), group) for group in groups)

    def start_allreduce(self, tensor: torch.Tensor, op: ReduceOp, name: str) -> Work[None]:
        issue = partial(self._group_of(tensor).allreduce, [tensor], _OPTIONS[op])
        return self._start(f"{op.value} of {name!r}", issue, tensor)

    def start_broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Work[None]:
        options = _asynchronous(c10d.BroadcastOptions, rootRank=root, rootTensor=0)
        issue = partial(self._group_of(tensor).broadcast, [tensor], options)
        return self._start(f"broadcast of {name!r} from rank {root}", issue, tensor)

    def start_allgather(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Work[None]:
        issue = partial(self._group_of(tensor)._allgather_base, output, tensor, _GATHER)
        return self._start(f"allgather of {name!r}", issue, output, tensor)

    def start_alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], name: str
    ) -> Work[None]:
        issue = partial(self._group_of(tensor).alltoall_base, output, tensor, list(received), list(sent), _ALL_TO_ALL)
        return self._start(f"alltoall of {name!r}", issue, output, tensor)

    def exchange(self, row: torch.Tensor) -> torch.Tensor:
        output = row.new_empty(self.size, row.numel())
        issue = partial(self._control._allgather_base, output, row[None], _GATHER)
        self._start("comparing calls with the other ranks", issue, output, row).wait()
        return output

    def _start(self, what: str, issue: Callable[[], dist.Work], *tensors: torch.Tensor) -> Work[None]:
        try:
            return _TorchWork(self, issue(), what, *tensors)
        except RuntimeError as error:
            raise self.failure(what, error) from error

    def _group_of(self, tensor: torch.Tensor) -> Any:
        """The group that carries ``tensor``; for the first one of a GPU collective."""
        if not tensor.is_cuda:
            return self._data
        if self._nccl is None:
            self._nccl = _nccl_group(self._native_store(), self.world, self.timeout)
            self._hold(self._nccl)
        return self._nccl

    def _native_store(self) -> dist.Store:
        """A store of torch's own, for NCCL's threads: they outlive the interpreter, and must not call into Python.

        Collective; blocks; made once. Rank 0 serves it, and says where and what its keys begin with.
        """
        if self._native is not None:
            return self._native
        if self.size == 1:
            self._native = dist.HashStore()
            return self._native
        wait, host = timedelta(seconds=self.timeout), listening_address(self.world)
        there = ""
        if self.rank == 0:
            listening = listen(host, [0], self.size)
            port, beginning = int(listening.getsockname()[1]), secrets.token_hex(32)
            native = dist.TCPStore(
                host, port, None, True, wait, wait_for_workers=False, master_listen_fd=listening.detach()
            )
            there = f"{host} {port} {beginning}"
        [there, *_] = exchange_text(self, there, _PLACE_BYTES)
        host, number, beginning = there.split()
        if self.rank != 0:
            try:
                native = dist.TCPStore(host, int(number), None, False, wait, wait_for_workers=False)
            except RuntimeError as error:
                raise self.failure("the start of NCCL", error) from error
        self._native = dist.PrefixStore(beginning, native)
        return self._native

    def subset(self, ranks: Sequence[int], world: World | None) -> TorchBackend | None:
        self._subsets += 1
        if world is None:
            return None
        group = object.__new__(TorchBackend)
        Backend.__init__(group, world, self.device, self.timeout)
        group.transport, group._groups, group._subsets, group._owns_default_group = self.transport, [], 0, False
        prefix = f"group/{self._subsets}"
        group._native, group._nccl = None if self._native is None else dist.PrefixStore(prefix, self._native), None
        group._open_groups(dist.PrefixStore(prefix, self._store), self._interface)
        return group

    def make_default_group(self) -> None:
        """Makes torch.distributed's default process group over the same ranks. Collective; blocks.

        :meth:`disconnect` destroys it, if the program has not done so.

        Raises:
            UserError: there is one already.
        """
        if dist.is_initialized():
            raise UserError("torch.distributed has a default process group already: leave default_group=True out")
        self._subsets += 1
        gpus = self.device.type == "cuda"
        store = self._native_store() if gpus else self._store
        with variables({} if self._interface is None else {"GLOO_SOCKET_IFNAME": self._interface}):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if gpus else "gloo",
                store=dist.PrefixStore(f"default/{self._subsets}", store),
                rank=self.rank,
                world_size=self.size,
                timeout=_limit(self.timeout),
            )
        self._owns_default_group = True

    def disconnect(self) -> None:
        if self._owns_default_group and dist.is_initialized():
            dist.destroy_process_group()
        if self._nccl is not None:
            shut_down(self._nccl)
        # Left to the garbage collector, the groups would end in whatever thread it runs in, perhaps while that holds up
        # another world's start.
        groups = list(self._groups)
        self.forget_groups()
        _IN_USE[:] = [(process, group) for process, group in _IN_USE if group not in groups]
        _end(groups)

    def forget_groups(self) -> None:
        """Drops this backend's references to its groups."""
        self._groups.clear()
        self._data = self._control = self._nccl = None


def build_facts() -> dict[str, bool]:
    """The data planes that this build of torch has, by name."""
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}


def default_group_place() -> tuple[int, int] | None:
    """This process's rank in torch.distributed's default group and the group's size, if the program has made one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def _limit(timeout: float) -> timedelta:
    """The groups' own limit: behind ours, whose message names what was waited for."""
    return timedelta(seconds=timeout + 10)


def _chosen_interface(world: World) -> str | None:
    """The interface that Gloo listens on: the loopback alone where that is enough, and never what a host's own name
    leads to, which may be a loopback address. None where the user has chosen, which torch reads by itself."""
    return None if os.environ.get("GLOO_SOCKET_IFNAME") else listening_interface(world)


# What follows is torch's private interface, the same in torch 2.5 to 2.15: as torch's own tests make groups.


def _gloo_group(store: dist.Store, world: World, interface: str | None, timeout: float) -> Any:
    """A group of its own. Collective; blocks. Raises RuntimeError."""
    kind: Any = dist.ProcessGroupGloo
    if interface is None:
        return kind(store, world.rank, world.size, _limit(timeout))
    options = kind._Options()
    options._devices = [kind.create_device(interface=interface)]
    options._timeout, options._threads = _limit(timeout), 2
    return kind(store, world.rank, world.size, options)


def _nccl_group(store: dist.Store, world: World, timeout: float) -> Any:
    """A group of its own; does not block, and takes no GPU before its first operation."""
    if not dist.is_nccl_available():
        raise UserError("this build of torch has no NCCL, which carries the tensors of GPUs: install a CUDA build of torch")
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = _limit(timeout)
    return kind(store, world.rank, world.size, options)


def meet(world: World, timeout: float, backend: str = "torch", obstacle: str | None = None) -> tuple[dist.Store, World]:
    """The job's store, once all processes are known to be there, and the world with the places that their hosts give.

    Raises:
        UserError: as :func:`open_store`, a process did not come in time, or has another ``backend``, or two hosts cannot
            reach each other, or one of several has an ``obstacle``.
    """
    deadline = time.monotonic() + timeout
    refuse_unlike("backend", names_by_server(world, timeout, backend), SAME_BACKEND)
    world = meeting_point(world, timeout)
    store = open_store(world, timeout)
    try:
        return store, _gathered(store, world, (timeout, deadline), backend, obstacle)
    except BaseException:
        leave(world)
        raise


def _gathered(store: dist.Store, world: World, limit: tuple[float, float], backend: str, obstacle: str | None) -> World:
    timeout, deadline = limit
    store.set(f"host/{world.rank}", f"{identity()} {backend}")
    hosts, backends = [], []
    for rank in range(world.size):
        try:
            store.wait([f"host/{rank}"], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            host, its_backend = store.get(f"host/{rank}").decode().split()
        except dist.DistError as error:
            raise UserError(
                f"rank {rank} of {world.size} did not come within {timeout:g} s: check that all processes were started, "
                "each with its own rank"
            ) from error
        hosts.append(host)
        backends.append(its_backend)
    _refuse_other_backends(store, world, backends)
    world = world.placed(world.rank, hosts)
    reach_all(world, hosts, store.set, lambda key: bytes(store.get(key)).decode(), obstacle)
    return world


def _refuse_other_backends(store: dist.Store, world: World, backends: Sequence[str]) -> None:
    """Refuses ranks of several backends, for some seconds: the store may end with the process that serves it."""
    try:
        refuse_unlike("backend", backends, SAME_BACKEND)
    except UserError:
        with suppress(RuntimeError, UserError):
            store.set(f"refused/{world.rank}", "")
            store.wait([f"refused/{rank}" for rank in range(world.size)], timedelta(seconds=_REFUSAL_SECONDS))
        raise


def open_store(world: World, timeout: float) -> dist.Store:
    """The key-value store at ``world``'s meeting point: its launcher's, its parent's, or one that rank 0 serves.

    Raises:
        UserError: the launcher names no address, it cannot be reached, or its port is taken.
    """
    if world.size == 1:
        return dist.HashStore()
    if (found := _store_of_default_group(world)) is not None:
        return _numbered(found, world, ("", 0))
    if world.rendezvous is None:
        raise UserError(
            f"the torch backend has no address to meet the other {world.size - 1} processes at: {world.launcher} sets no "
            "MASTER_ADDR and MASTER_PORT; start with torchrun, or export both with one free port for all processes"
        )
    host, port = world.rendezvous
    wait = timedelta(seconds=timeout)
    try:
        if world.launcher == "torchrun":
            # Its own store, which its agent serves.
            store: dist.Store = next(dist.rendezvous("env://", world.rank, world.size, timeout=wait))[0]
        else:
            store = _adapted(join(world, timeout), timeout)
    except RuntimeError as error:
        raise UserError(
            f"rank {world.rank} could not meet the others at {host}:{port} within {timeout:g} s ({_first_line(error)}): "
            "check that the address is rank 0's, that the port is open, and that all processes were started"
        ) from error
    return _numbered(store, world, (host, port))


def _numbered(store: dist.Store, world: World, place: tuple[str, int]) -> dist.Store:
    """The part of a store that is this world's: a store outlives a world, and keeps the keys of the last one."""
    key = *place, world.name
    _WORLDS[key] += 1
    return dist.PrefixStore(f"dualtrain/{world.name}/{_WORLDS[key]}", store)


def _store_of_default_group(world: World) -> dist.Store | None:
    """Where the program's own processes have met already, if that is where these meet.

    Its rank 0 listens on MASTER_PORT. torchrun's agent has its store for any number of callers.
    """
    found = default_group_place()
    if found is None or world.launcher == "torchrun":
        return None
    there = found[1] > world.size if world.name else found == (world.rank, world.size)
    return distributed_c10d._get_default_store() if there else None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
