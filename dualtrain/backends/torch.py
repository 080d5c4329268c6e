"""torch.distributed as a backend: Gloo for CPU tensors, NCCL for those of NVIDIA GPUs.

The only file that names torch.distributed. Two process groups: one for data, and a Gloo group for the short rows
of ``exchange``, so that a rank that checks a call never meets a rank that sends a gradient.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from dualtrain.backends.base import ReduceOp, Work
from dualtrain.backends.collectives import Backend
from dualtrain.backends.hosts import identity, loopback
from dualtrain.backends.rendezvous import RESERVED, meeting_point
from dualtrain.errors import UserError
from dualtrain.launchers import World

#: How many worlds met at an address so far: the same on all of their ranks.
_WORLDS: Counter[tuple[str, int, str]] = Counter()

_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
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
        issue = partial(dist.all_reduce, tensor, _OPS[op], self._data, async_op=True)
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
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if world.single_host:
        # Gloo listens on the loopback interface alone, unless one was chosen. Groups made later read this too.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    try:
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=_patience(timeout))
    except dist.DistError as error:
        reason = _first_line(error)
        raise UserError(f"the {world.size} processes could not connect to each other: {reason}") from error


def meet(world: World, timeout: float) -> tuple[dist.Store, World]:
    """The job's store, once all processes are known to be there, and the world with the places that their hosts give.

    Raises:
        UserError: as :func:`open_store`, or a process did not come in time.
    """
    store = open_store(world, timeout)
    store.set(f"host/{world.rank}", str(identity()))
    hosts = []
    for rank in range(world.size):
        try:
            hosts.append(store.get(f"host/{rank}"))
        except dist.DistError as error:
            raise UserError(
                f"rank {rank} of {world.size} did not come within {timeout:g} s: check that all processes were started, "
                "each with its own rank"
            ) from error
    return store, world.placed(world.rank, hosts)


def open_store(world: World, timeout: float) -> dist.Store:
    """The key-value store in which the job's processes find each other: their parent's, or one that rank 0 serves.

    Raises:
        UserError: the launcher names no address, it cannot be reached, or its port is taken.
    """
    if world.size == 1:
        return dist.HashStore()
    world = meeting_point(world, timeout)
    if world.rendezvous is None:
        raise UserError(
            f"the torch backend has no address to meet the other {world.size - 1} processes at: {world.launcher} sets no "
            "MASTER_ADDR and MASTER_PORT; start with torchrun, or export both with one free port for all processes"
        )
    host, port = world.rendezvous
    wait = timedelta(seconds=timeout)
    try:
        if world.launcher == "torchrun":
            store: dist.Store = next(dist.rendezvous("env://", world.rank, world.size, timeout=wait))[0]
        else:
            store = _store_at(host, port, world.rank == 0 and world.launcher != "spawn", wait)
        # A store outlives a world: the next one must not find the keys of the last.
        _WORLDS[host, port, world.name] += 1
        return dist.PrefixStore(f"dualtrain/{world.name}/{_WORLDS[host, port, world.name]}", store)
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} on {host} is in use by another program: set MASTER_PORT to a free one") from error
        raise UserError(
            f"rank {world.rank} could not meet the others at {host}:{port} within {timeout:g} s ({_first_line(error)}): "
            "check that the address is rank 0's, that the port is open, and that all processes were started"
        ) from error


@cache
def _store_at(host: str, port: int, serves: bool, wait: timedelta) -> dist.TCPStore:
    """The store at an address that the launcher chose, opened once: a second world of this process meets there too."""
    if not serves:
        return dist.TCPStore(host, port, None, False, wait, wait_for_workers=False)
    # Our own listening socket: on this one address, where TCPStore would listen on all.
    listening = RESERVED.pop((host, port), None) or socket.create_server((host, port), backlog=128)
    return dist.TCPStore(host, port, None, True, wait, wait_for_workers=False, master_listen_fd=listening.detach())


def serve_store() -> tuple[object, tuple[str, int]]:
    """A store for ranks that this process starts on this host, and the free port that it has taken for it.

    Returns:
        What must live as long as the ranks do, and the (host, port) of their rendezvous.
    """
    # The port is ours from here on: between a free one's number and its use, another program could take it.
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    host, port = listening.getsockname()
    store = dist.TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, (host, port)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
