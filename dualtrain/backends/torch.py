"""torch.distributed as a backend: Gloo for CPU tensors, NCCL for those of NVIDIA GPUs.

The only file that names torch.distributed. Two process groups: one for data, and a Gloo group for the short rows
of ``exchange``, so that a rank that checks a call never meets a rank that sends a gradient.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from dualtrain.backends.base import ReduceOp, Work
from dualtrain.backends.collectives import Backend
from dualtrain.backends.hosts import identity, listening_address, listening_interface
from dualtrain.backends.reach import reach_all
from dualtrain.backends.rendezvous import join, leave, meeting_point
from dualtrain.backends.store import Store, listen
from dualtrain.errors import UserError
from dualtrain.launchers import World

#: How many worlds met at an address so far: the same on all of their ranks.
_WORLDS: Counter[tuple[str, int, str]] = Counter()

#: The interfaces that were chosen here, and by nobody else.
_CHOSEN: set[str] = set()


def _asynchronous(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, True
    return options


_OPTIONS = {
    ReduceOp.SUM: _asynchronous(dist.ReduceOp.SUM),
    ReduceOp.MIN: _asynchronous(dist.ReduceOp.MIN),
    ReduceOp.MAX: _asynchronous(dist.ReduceOp.MAX),
    ReduceOp.PRODUCT: _asynchronous(dist.ReduceOp.PRODUCT),
}


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
    """torch.distributed's default process group, made here or found, and a control group beside it."""

    name = "torch"

    def __init__(self, world: World, device: torch.device, timeout: float) -> None:
        super().__init__(world, device, timeout)
        self.transport = "nccl" if device.type == "cuda" else "gloo"
        self._owns_world = not dist.is_initialized()
        if self._owns_world:
            _initialise(world, device, timeout)
            self._data = _get_default_group()
        else:
            # Someone else's world: a group of our own keeps our order of operations apart from theirs.
            self._data = dist.new_group(timeout=_patience(timeout))
        self._control = dist.new_group(backend="gloo", timeout=_patience(timeout))
        self.world = World(**{**vars(world), "rank": dist.get_rank(), "size": dist.get_world_size()})

    def start_allreduce(self, tensor: torch.Tensor, op: ReduceOp, name: str) -> Work[None]:
        # As dist.all_reduce does, whose own checks take as long as a small one.
        issue = partial(self._data.allreduce, [tensor], _OPTIONS[op])
        return self._start(f"{op.value} of {name!r}", issue, tensor)

    def start_broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Work[None]:
        issue = partial(dist.broadcast, tensor, group=self._data, async_op=True, group_src=root)
        return self._start(f"broadcast of {name!r} from rank {root}", issue, tensor)

    def start_allgather(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Work[None]:
        issue = partial(dist.all_gather_single, output, tensor, self._data, async_op=True)
        return self._start(f"allgather of {name!r}", issue, output, tensor)

    def start_alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], name: str
    ) -> Work[None]:
        issue = partial(dist.all_to_all_single, output, tensor, list(received), list(sent), self._data, async_op=True)
        return self._start(f"alltoall of {name!r}", issue, output, tensor)

    def exchange(self, row: torch.Tensor) -> torch.Tensor:
        output = row.new_empty(self.size, row.numel())
        issue = partial(dist.all_gather_single, output, row[None], self._control, async_op=True)
        self._start("comparing calls with the other ranks", issue, output, row).wait()
        return output

    def _start(self, what: str, issue: Callable[[], dist.Work], *tensors: torch.Tensor) -> Work[None]:
        try:
            return _TorchWork(self, issue(), what, *tensors)
        except RuntimeError as error:
            raise self.failure(what, error) from error

    def subset(self, ranks: Sequence[int], world: World | None) -> TorchBackend | None:
        wait = _patience(self.timeout)
        globally = [dist.get_global_rank(self._data, rank) for rank in ranks]
        data = dist.new_group(globally, timeout=wait)
        control = dist.new_group(globally, backend="gloo", timeout=wait)
        if world is None:
            return None
        group = object.__new__(TorchBackend)
        Backend.__init__(group, world, self.device, self.timeout)
        group.transport, group._owns_world, group._data, group._control = self.transport, False, data, control
        return group

    def disconnect(self) -> None:
        if not dist.is_initialized():
            return  # whoever made the world has ended it already
        if self._owns_world:
            dist.destroy_process_group()
        else:
            dist.destroy_process_group(self._control)
            dist.destroy_process_group(self._data)
        # The groups end here, with their last reference. Left to the garbage collector they would end in whatever
        # thread it runs in, perhaps while that holds up another world's start. One that still has an operation under way
        # (a peer has failed) waits for it in a thread of its own: nobody else needs to.
        groups = [self._data, self._control]
        del self._data, self._control
        ending = threading.Thread(target=groups.clear, name="dualtrain-group-end", daemon=True)
        ending.start()
        ending.join(1.0)


def build_facts() -> dict[str, bool]:
    """The data planes that this build of torch has, by name."""
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}


def _patience(timeout: float) -> timedelta:
    """The groups' own limit: behind ours, whose message names what was waited for."""
    return timedelta(seconds=timeout + 10)


def _initialise(world: World, device: torch.device, timeout: float) -> None:
    """Joins the world of ``world``'s rendezvous, or a world of one without any.

    Raises:
        UserError: there is no rendezvous to join, or its port is taken.
    """
    store, world = meet(world, timeout)
    backend = "gloo"
    if device.type == "cuda":
        backend, store = "cpu:gloo,cuda:nccl", _for_nccl(store, world, timeout)
    # Gloo listens on one interface: the loopback alone where that is enough, and never what a host's own name leads to,
    # which may be a loopback address. Groups made later read this too.
    name = listening_interface(world)
    if name is not None and os.environ.get("GLOO_SOCKET_IFNAME") in (None, *_CHOSEN):
        os.environ["GLOO_SOCKET_IFNAME"] = name
        _CHOSEN.add(name)
    try:
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=_patience(timeout))
    except RuntimeError as error:
        reason = _first_line(error)
        raise UserError(f"the {world.size} processes could not connect to each other: {reason}") from error


def meet(world: World, timeout: float, obstacle: str | None = None) -> tuple[dist.Store, World]:
    """The job's store, once all processes are known to be there, and the world with the places that their hosts give.

    Raises:
        UserError: as :func:`open_store`, a process did not come in time, or two hosts cannot reach each other,
            or one of several has an ``obstacle``.
    """
    deadline = time.monotonic() + timeout
    world = meeting_point(world, timeout)
    store = open_store(world, timeout)
    try:
        return store, _gathered(store, world, timeout, deadline, obstacle)
    except BaseException:
        leave(world)
        raise


def _gathered(store: dist.Store, world: World, timeout: float, deadline: float, obstacle: str | None) -> World:
    store.set(f"host/{world.rank}", str(identity()))
    hosts = []
    for rank in range(world.size):
        try:
            store.wait([f"host/{rank}"], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            hosts.append(store.get(f"host/{rank}"))
        except dist.DistError as error:
            raise UserError(
                f"rank {rank} of {world.size} did not come within {timeout:g} s: check that all processes were started, "
                "each with its own rank"
            ) from error
    world = world.placed(world.rank, hosts)
    reach_all(world, hosts, store.set, lambda key: bytes(store.get(key)).decode(), obstacle)
    return world


def open_store(world: World, timeout: float) -> dist.Store:
    """The key-value store at ``world``'s meeting point: its launcher's, its parent's, or one that rank 0 serves.

    Raises:
        UserError: the launcher names no address, it cannot be reached, or its port is taken.
    """
    if world.size == 1:
        return dist.HashStore()
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
    # A store outlives a world: the next one must not find the keys of the last.
    _WORLDS[host, port, world.name] += 1
    return dist.PrefixStore(f"dualtrain/{world.name}/{_WORLDS[host, port, world.name]}", store)


def _for_nccl(store: dist.Store, world: World, timeout: float) -> dist.Store:
    """A store of torch's own, for NCCL's threads: they outlive the interpreter, and must not call into Python.

    It is told of through the job's store, together with the beginning of its keys.
    """
    if world.size == 1:
        return store
    wait = timedelta(seconds=timeout)
    if world.rank == 0:
        host = listening_address(world)
        listening = listen(host, [0], world.size)
        port, beginning = int(listening.getsockname()[1]), secrets.token_hex(32)
        native = dist.TCPStore(host, port, None, True, wait, wait_for_workers=False, master_listen_fd=listening.detach())
        store.set("nccl", f"{host} {port} {beginning}")
    else:
        host, number, beginning = store.get("nccl").decode().split()
        native = dist.TCPStore(host, int(number), None, False, wait, wait_for_workers=False)
    return dist.PrefixStore(beginning, native)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
