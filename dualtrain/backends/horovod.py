"""Horovod as a backend, over its MPI, Gloo or NCCL operations.

The only file that names horovod. Horovod matches tensors by name and negotiates before it moves them; names that
stay the same from step to step are negotiated once and then cached, so none here carries a counter.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dualtrain.backends.base import ReduceOp, Work
from dualtrain.backends.collectives import Backend
from dualtrain.backends.comparison import refuse_unlike
from dualtrain.backends.hosts import address, is_loopback, listening_address, listening_interface, variables
from dualtrain.backends.http_store import HttpStore
from dualtrain.backends.rendezvous import names_by_server, within
from dualtrain.errors import UserError
from dualtrain.launchers import World, detect_world

_YIELDING_SECONDS = 0.01  # that a wait keeps the core, if nobody else wants it
INSTALL = "`bash launch/setup.sh` in dualtrain's source tree builds and installs it, `horovodrun -np N` starts it"


def _library() -> Any:
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise UserError(
            f"Horovod is not installed in this environment ({error}): {INSTALL}; without it, --backend torch under "
            "torchrun trains the same model"
        ) from error
    return hvd


def installed() -> bool:
    """Whether Horovod is in this environment."""
    return importlib.util.find_spec("horovod") is not None


def build_facts() -> dict[str, Any]:
    """What `horovodrun --check-build` prints, as names of what is there, and the ``torch`` that it was built against.

    Raises:
        UserError: Horovod is not installed, or cannot be loaded.
    """
    library = _library()
    extensions = {"tensorflow": "TensorFlow", "torch": "PyTorch", "mxnet": "MXNet"}
    folder = Path(library.__file__).parents[1]
    built = {name: bool(getattr(library, f"{name.lower()}_built")()) for name in ("NCCL", "DDL", "CCL", "MPI", "Gloo")}
    try:
        torch_then = json.loads((folder / "metadata.json").read_text()).get("pytorch")
    except (OSError, ValueError):
        torch_then = None  # releases differ in whether they say it
    return {
        "frameworks": [shown for name, shown in extensions.items() if any((folder / name).glob("mpi_lib*.so"))],
        "controllers": [name for name in ("MPI", "Gloo") if built[name]],
        "operations": [name for name, there in built.items() if there],
        "torch": torch_then,
    }


def stand_in_for(package: str) -> None:
    """Has ``package`` and its modules be Horovod's own, under the names that they share.

    Raises:
        UserError: Horovod is not installed.
    """
    library = _library()
    parts = "mpi_ops functions optimizer compression sync_batch_norm elastic elastic.state elastic.sampler"
    for part in parts.split():
        sys.modules[f"{package}.{part}"] = importlib.import_module(f"horovod.torch.{part}")
    for part in ("exceptions", "process_sets", "util"):
        sys.modules[f"{package}.{part}"] = importlib.import_module(f"horovod.common.{part}")
    sys.modules[package] = library
    world = detect_world()
    if not world.launcher.startswith(("horovodrun", "mpi")):
        _teach_to_start(library, world)


def _teach_to_start(library: Any, world: World) -> None:
    """Has Horovod's ``init`` find a world that neither MPI nor horovodrun has made; by itself it would start alone."""
    plain, kept = library.init, []

    def init(*args: Any, **kwargs: Any) -> None:
        if not library.is_initialized():
            kept.append(_initialise(partial(plain, *args, **kwargs), world, 300.0, launched=False, groups=True))

    for module in (library, library.mpi_ops, library.elastic):
        module.init = init


class _HorovodWork(Work[None]):
    """An operation of Horovod's, known by its handle.

    ``inputs`` are held by a view each until the work has ended. When a peer is lost, Horovod's thread drops its tensors
    while it holds a lock, and in torch 2.13 dropping the last reference but Python's takes the interpreter's lock; a
    thread of ours that starts an operation at that moment holds the one and waits for the other, for ever. The view
    is one more reference.
    """

    def __init__(
        self, backend: HorovodBackend, handle: int, what: str, output: torch.Tensor | None, inputs: list[torch.Tensor]
    ) -> None:
        self._backend = backend
        self._inputs = inputs
        self._handle = handle
        self._what = what
        self._output = output  # where the result goes, for operations that make a new tensor
        self._ended = False

    def wait(self) -> None:
        if not self._ended:
            self._backend.await_bounded(self._what, self._poll)

    def _poll(self, seconds: float) -> bool:
        # Horovod's synchronize spins on a core without a bound; this does so for a moment, and then looks less often. Who
        # sleeps at once misses Horovod's next cycle, and on a shared host the processor is gone meanwhile.
        poll, pause = self._backend.library.poll, 1e-5
        began = time.monotonic()
        while not poll(self._handle):
            waited = time.monotonic() - began
            if waited > seconds:
                return False
            if waited < _YIELDING_SECONDS:
                os.sched_yield()
                continue
            time.sleep(pause)
            pause = min(pause + 1e-5, 5e-4)
        self._ended = True
        try:
            result = self._backend.library.synchronize(self._handle)
        except Exception as error:
            self._backend.failed = error
            self._backend.graves.append(self)
            raise
        self._inputs.clear()
        if self._output is not None:
            self._output.copy_(result[0] if isinstance(result, tuple) else result)
        return True

    def done(self) -> bool:
        return self._ended or bool(self._backend.library.poll(self._handle))


class HorovodBackend(Backend):
    """Horovod's world, made here or found, or one of its process sets."""

    name = "horovod"
    narrow = frozenset({torch.float16})
    failed: Exception | None = None

    def __init__(self, world: World, device: torch.device, timeout: float, groups: bool) -> None:
        super().__init__(world, device, timeout)
        self.graves: list[_HorovodWork] = []
        self.library = _library()
        self.versions = {"Horovod": getattr(sys.modules["horovod"], "__version__", "unknown")}
        self._owns_world = not self.library.is_initialized()
        self._launched = world.launcher.startswith(("horovodrun", "mpi"))
        if self._owns_world:
            # Kept: the store ends with rank 0's reference to it, when others may still be asking it.
            self._store = _initialise(self.library.init, world, timeout, self._launched, groups)
        self._set = self.library.global_process_set
        self._scope = ""
        self._sets: dict[tuple[int, ...], Any] = {tuple(range(self.library.size())): self._set}
        self._groups = 0
        self._ops = {
            ReduceOp.SUM: self.library.Sum,
            ReduceOp.MIN: self.library.Min,
            ReduceOp.MAX: self.library.Max,
            ReduceOp.PRODUCT: self.library.Product,
        }
        self.transport = self._data_plane()
        self.world = World(**{**vars(world), "rank": self.library.rank(), "size": self.library.size()})

    def _data_plane(self) -> str:
        if self.device.type == "cuda" and self.library.nccl_built():
            return "nccl"
        return "mpi" if self.library.mpi_enabled() else "gloo"

    def start_allreduce(self, tensor: torch.Tensor, op: ReduceOp, name: str) -> Work[None]:
        issue = partial(
            self.library.allreduce_async_, tensor, name=self._scope + name, op=self._ops[op], process_set=self._set
        )
        return self._start(f"{op.value} of {name!r}", issue, tensor)

    def start_broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Work[None]:
        # Horovod's root is a rank of its whole world, inside a process set too.
        everywhere = self._set.ranks[root] if self._set.ranks else root
        issue = partial(self.library.broadcast_async_, tensor, everywhere, name=self._scope + name, process_set=self._set)
        return self._start(f"broadcast of {name!r} from rank {root}", issue, tensor)

    def start_allgather(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Work[None]:
        issue = partial(self.library.allgather_async, tensor, name=self._scope + name, process_set=self._set)
        return self._start(f"allgather of {name!r}", issue, tensor, output=output)

    def start_alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], name: str
    ) -> Work[None]:
        splits = torch.tensor(sent, dtype=torch.int32)
        issue = partial(self.library.alltoall_async, tensor, splits, name=self._scope + name, process_set=self._set)
        return self._start(f"alltoall of {name!r}", issue, tensor, splits, output=output)

    def exchange(self, row: torch.Tensor) -> torch.Tensor:
        output = row.new_empty(self.size, row.numel())
        # The length is part of the name: Horovod's cache is keyed by it, and two lengths would take turns in it.
        name = f"{self._scope}agreement.{len(row)}"
        row = row[None]
        issue = partial(self.library.allgather_async, row, name=name, process_set=self._set)
        self._start("comparing calls with the other ranks", issue, row, output=output).wait()
        return output

    def _start(
        self, what: str, issue: Callable[[], int], *inputs: torch.Tensor, output: torch.Tensor | None = None
    ) -> Work[None]:
        if self.failed is not None:
            # Calls are compared before they come here, so what failed was Horovod's world; it does not come back.
            raise self.failure(what, self.failed) from self.failed
        held = [tensor.view_as(tensor) for tensor in inputs]
        try:
            return _HorovodWork(self, issue(), what, output, held)
        except (RuntimeError, ValueError) as error:
            raise self.failure(what, error) from error

    def subset(self, ranks: Sequence[int], world: World | None) -> HorovodBackend | None:
        self._groups += 1
        members = self._sets.get(tuple(ranks))  # Horovod refuses a second set of the same ranks
        if members is None:
            members = self._sets[tuple(ranks)] = self._new_set(list(ranks))
        if world is None:
            return None
        group = object.__new__(HorovodBackend)
        Backend.__init__(group, world, self.device, self.timeout)
        group.graves = self.graves
        group.library, group.transport, group._ops = self.library, self.transport, self._ops
        group._owns_world, group._launched, group._set = False, self._launched, members
        # Groups that share a set must not share names: both may have a call of the same name under way.
        group._scope, group._groups = f"{self._scope}group.{self._groups}.", 0
        group._sets = {tuple(range(len(ranks))): members}
        return group

    def _new_set(self, ranks: list[int]) -> Any:
        if self._launched or self.library.mpi_enabled():
            return self.library.add_process_set(ranks)
        where = listening_address(self.world), self.rank == 0
        with _meeting_place(*where, share=self.broadcast_object, joined=self.barrier):
            return self.library.add_process_set(ranks)

    def disconnect(self) -> None:
        # A process set is left to the world's end: removing it needs every rank of the world.
        if self._owns_world:
            self.library.shutdown()
            self._store = None


def _initialise(start: Callable[[], None], world: World, timeout: float, launched: bool, groups: bool) -> object:
    """Starts Horovod in the world that its own launcher made, or in one that the others are told of here.

    Args:
        start: Horovod's ``init``.
        world: the place of this process.
        timeout: seconds to wait for the others.
        launched: whether Horovod's own launcher or MPI has started this process.
        groups: whether process sets can be made later.

    Returns:
        What must live as long as the world does.
    """
    if not world.launcher.startswith("mpi"):
        _check_name()
    with variables({name: os.environ.get(name, value) for name, value in _defaults(world, groups).items()}):
        if launched:
            _initialise_launched(start, world, timeout)
            return None
        if world.size == 1:
            with variables(description(world)):
                start()
            return None
        return _initialise_by_store(start, world, timeout)


def _defaults(world: World, groups: bool) -> dict[str, str]:
    """Settings that differ from Horovod's own."""
    # Our buckets are the fusion, in a layout that every backend shares (and sums in the same order).
    defaults = {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_DYNAMIC_PROCESS_SETS": str(int(groups))}
    if 2 * world.local_size > (os.cpu_count() or 1):
        # Each rank has two busy threads, and Open MPI's spin while they wait: with fewer cores they must give way
        # (4 ranks on 2 cores: 3.6 times the steps a second).
        defaults["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return defaults


def _initialise_launched(start: Callable[[], None], world: World, timeout: float) -> None:
    """Starts Horovod in the world of its own launcher, or of MPI."""
    from dualtrain.backends.torch import SAME_BACKEND

    refuse_unlike("backend", names_by_server(world, timeout, "horovod"), SAME_BACKEND)
    if world.launcher.startswith("mpi"):
        # MPI has no time-out of its own.
        within(timeout, start, f"Horovod did not start on rank {world.rank} of {world.size}")
    else:
        start()


def _initialise_by_store(start: Callable[[], None], world: World, timeout: float) -> object:
    """Starts Horovod's Gloo controller with a rendezvous of our own, found through torch's store."""
    from dualtrain.backends.torch import meet

    # The host identities come first: Horovod aborts the process when its local ranks do not add up.
    store, world = meet(world, timeout, "horovod", _obstacle())

    def share(place: str | None) -> str:
        if place is not None:
            store.set("horovod", place)
        try:
            return str(store.get("horovod").decode())
        except RuntimeError as error:
            raise UserError(f"rank 0 did not say within {timeout:g} s where Horovod meets: see its own message") from error

    def joined() -> None:
        if int(store.add("joined", 1)) == world.size:
            store.set("all joined", "1")
        try:
            store.get("all joined")
        except RuntimeError as error:
            raise UserError(
                f"Horovod started on rank {world.rank}, but not on all {world.size} within {timeout:g} s"
            ) from error

    limits = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, round(timeout)))}
    with (
        variables(limits | description(world)),
        _meeting_place(listening_address(world), world.rank == 0, share, joined),
    ):
        start()
    return store


def _check_name() -> None:
    """Horovod 0.28.1 over Gloo looks up the host's own name, and crashes where that has no address."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as error:
        raise UserError(
            f"this host's name {socket.gethostname()!r} has no address ({error}), and Horovod would crash: put it into "
            "/etc/hosts, give the container a network, or use --backend torch"
        ) from error


def _obstacle() -> str | None:
    """Horovod 0.28.1 has Gloo advertise what the host's name stands for, whatever interface is chosen."""
    name = socket.gethostname()
    if not is_loopback(name):
        return None
    return (
        f"host {name} knows itself by a loopback address, and Horovod would tell it to the other hosts: give {name} the "
        f"address {address()} in its /etc/hosts (Debian's installer writes 127.0.1.1 there), or use --backend torch"
    )


@contextmanager
def _meeting_place(
    host: str, serving: bool, share: Callable[[str | None], str], joined: Callable[[], None]
) -> Iterator[None]:
    """Points Horovod to a key-value server that one rank runs until all have ``joined``.

    ``share`` hands the server's address from that rank to the others. Each start gets a fresh server: on a used one,
    the keys of the last start would still lie around.
    """
    server = HttpStore(host) if serving else None
    try:
        place, port = share(f"{server.place} {server.port}" if server else None).split()
        with variables({"HOROVOD_GLOO_RENDEZVOUS_ADDR": place, "HOROVOD_GLOO_RENDEZVOUS_PORT": port}):
            yield
        joined()
    finally:
        if server is not None:
            server.close()


def description(world: World) -> dict[str, str]:
    """Horovod's place, in the variables that its own launcher would have set."""
    place = {
        "RANK": world.rank,
        "SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_SIZE": world.local_size,
        "CROSS_RANK": world.cross_rank,
        "CROSS_SIZE": world.cross_size,
        "HOSTNAME": socket.gethostname(),
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
    }
    name = listening_interface(world)
    if name is not None and "HOROVOD_GLOO_IFACE" not in os.environ:
        place["GLOO_IFACE"] = name
    return {f"HOROVOD_{key}": str(value) for key, value in place.items()}
