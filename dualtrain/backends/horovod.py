"""Horovod as a backend, over its MPI, Gloo or NCCL operations.

Apart from the bench, only this module imports Horovod. Horovod matches tensors by name. Before it sends a tensor, the ranks
negotiate; for a name that was used before, Horovod uses the cached negotiation. So no name contains a step number.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import torch

from dualtrain.backends.base import COMPARING, Closed, ReduceOp, Work, refuse_other_devices
from dualtrain.backends.collectives import Backend
from dualtrain.backends.horovod_start import Meet, http_store, initialise
from dualtrain.backends.inference import ordinary
from dualtrain.differences import fingerprint
from dualtrain.errors import BackendError, UserError
from dualtrain.launchers import World, detect_world
from dualtrain.rendezvous.hosts import listening_address

_YIELDING_SECONDS = 0.01  # a wait yields the core between polls for this long, then sleeps between polls
_SHUT_DOWN = "Horovod has been shut down"  # error of an operation that is started after Horovod's thread has failed
_worlds = count()  # counts the worlds that this process has joined without the job's store
INSTALL = (
    "`bash launch/setup.sh` in dualtrain's source tree builds and installs it, and `horovodrun -np N` then starts the ranks"
)


def _library() -> Any:
    """Import Horovod and return it. Raises UserError if the import fails."""
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise UserError(
            f"Horovod is not installed in this environment ({error}): {INSTALL}; without it, --backend torch under "
            "torchrun trains the same model"
        ) from error
    return hvd


def installed() -> bool:
    """Return whether Horovod is installed in this environment."""
    return importlib.util.find_spec("horovod") is not None


def build_facts() -> dict[str, Any]:
    """Return the parts that `horovodrun --check-build` lists as built, and the version of ``torch`` they were built for.

    The version is ``None`` if this release of Horovod has not recorded it.

    Raises:
        UserError: Horovod is not installed, or cannot be loaded.
    """
    library = _library()
    extensions = {"tensorflow": "TensorFlow", "torch": "PyTorch", "mxnet": "MXNet"}
    folder = Path(library.__file__).parents[1]
    built = {name: bool(getattr(library, f"{name.lower()}_built")()) for name in ("NCCL", "DDL", "CCL", "MPI", "Gloo")}
    try:
        built_for = json.loads((folder / "metadata.json").read_text()).get("pytorch")
    except (OSError, ValueError):
        built_for = None
    return {
        "frameworks": [shown for name, shown in extensions.items() if any((folder / name).glob("mpi_lib*.so"))],
        "controllers": [name for name in ("MPI", "Gloo") if built[name]],
        "operations": [name for name, is_built in built.items() if is_built],
        "torch": built_for,
    }


def replace_package(package: str, meet: Meet) -> None:
    """Replace ``package`` and its modules by Horovod's own modules of the same names.

    If neither Horovod's launcher nor MPI has started this process, also replace Horovod's ``init``: see :func:`_wrap_init`.

    Args:
        package: name of the package.
        meet: makes the job's store, if ``init`` needs it.

    Raises:
        UserError: Horovod is not installed; or as :func:`~dualtrain.launchers.detect_world`.
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
        _wrap_init(library, world, meet)


def _wrap_init(library: Any, world: World, meet: Meet) -> None:
    """Make Horovod's ``init`` join a world that neither MPI nor horovodrun started.

    Without this, each process would be a world of size 1.
    """
    original_init, references = library.init, []

    def init(*args: Any, **kwargs: Any) -> None:
        if not library.is_initialized():
            references.append(initialise(partial(original_init, *args, **kwargs), world, 300.0, False, True, meet))

    for module in (library, library.mpi_ops, library.elastic):
        module.init = init


class _HorovodWork(Work[None]):
    """Handle of a Horovod operation.

    The handle keeps a view of each input until the operation has ended, to prevent a deadlock. After a peer has failed,
    Horovod's thread releases the inputs while it holds Horovod's lock. In torch 2.13, a thread takes the GIL when it
    releases the last C++ reference to a tensor that a Python object still refers to. Another thread, which starts an
    operation, may hold the GIL and wait for Horovod's lock. The view holds one more C++ reference to its input, so
    Horovod's thread does not release the last one.
    """

    def __init__(
        self, backend: HorovodBackend, handle: int, what: str, output: torch.Tensor | None, inputs: list[torch.Tensor]
    ) -> None:
        self._backend = backend
        self._inputs = inputs
        self._handle = handle
        self._what = what
        self._output = output  # receives the result of operations that make a new tensor
        self._synchronizing = self._ended = False
        self._yields_until, self._pause = 0.0, 1e-5  # kept between calls of ``_poll``, each of which may last only 0.5 ms

    def wait(self) -> None:
        if not self._ended:
            self._backend.await_bounded(self._what, self._poll)

    def _poll(self, seconds: float) -> bool:
        # Horovod's synchronize spins without a bound. Yield for a moment instead, then poll less often. A thread that
        # sleeps immediately would miss Horovod's next cycle, and would lose the core on a busy host.
        if self._synchronizing:
            raise BackendError(f"{self._what} has failed, or was interrupted: restart the ranks")
        poll = self._backend.library.poll
        began = time.monotonic()
        self._yields_until = self._yields_until or began + _YIELDING_SECONDS
        while not poll(self._handle):
            now = time.monotonic()
            if now - began > seconds:
                return False
            if now < self._yields_until:
                os.sched_yield()
                continue
            time.sleep(self._pause)
            self._pause = min(self._pause + 1e-5, 5e-4)
        self._synchronizing = True
        try:
            result = self._backend.library.synchronize(self._handle)
        except Exception as error:
            self._backend.failed = error
            self._backend.failed_works.append(self)
            raise
        self._inputs.clear()
        if self._output is not None:
            self._output.copy_(result[0] if isinstance(result, tuple) else result)
        self._ended = True
        return True

    def done(self) -> bool:
        # ``synchronize`` releases the handle even if it fails, and ``poll`` raises an error for a released handle.
        return self._synchronizing or bool(self._backend.library.poll(self._handle))


class HorovodBackend(Backend):
    """Horovod's world, or one of its process sets.

    Construction is collective and blocks. It starts Horovod, unless the program has done so.

    Args:
        world: this process's rank, and the number of ranks.
        device: where this rank's tensors will be.
        timeout: the longest time in seconds that any wait lasts.
        groups: whether process sets can be made later.
        meet: makes the job's store, if the start of Horovod needs it.

    Attributes:
        failed: the error of an operation that failed; all later operations fail too.
        failed_works: handles of failed operations. They keep the operations' tensors alive, which Horovod may still use.

    Raises:
        UserError: Horovod is not installed or cannot start.
    """

    name = "horovod"
    transports: ClassVar = ("nccl", "mpi", "gloo")
    narrow = frozenset({torch.float16})
    failed: Exception | None = None

    def __init__(self, world: World, device: torch.device, timeout: float, groups: bool, meet: Meet) -> None:
        super().__init__(world, device, timeout)
        self.failed_works: list[_HorovodWork] = []
        self.library = _library()
        self.versions = {"Horovod": getattr(sys.modules["horovod"], "__version__", "unknown")}
        self._owns_world = not self.library.is_initialized()
        self._launched = world.launcher.startswith(("horovodrun", "mpi"))
        if self._owns_world:
            # Keep a reference: rank 0 serves the store only while a reference exists, and other ranks may still need it.
            self._store, address = initialise(self.library.init, world, timeout, self._launched, groups, meet)
        self._set = self.library.global_process_set
        self._scope = _scope(address) if self._owns_world else ""
        self._sets: dict[tuple[int, ...], Any] = {tuple(range(self.library.size())): self._set}
        self._groups = 0
        self._ops = {
            ReduceOp.SUM: self.library.Sum,
            ReduceOp.MIN: self.library.Min,
            ReduceOp.MAX: self.library.Max,
            ReduceOp.PRODUCT: self.library.Product,
        }
        self.transport = self._library_transport()
        self.world = World(**{**vars(world), "rank": self.library.rank(), "size": self.library.size()})

    def _library_transport(self) -> str:
        nccl, mpi, gloo = self.transports
        if self.device.type == "cuda" and self.library.nccl_built():
            return nccl
        return mpi if self.library.mpi_enabled() else gloo

    def start_allreduce(self, tensor: torch.Tensor, op: ReduceOp, name: str) -> Work[None]:
        issue = partial(self.library.allreduce_async_, name=self._scope + name, op=self._ops[op], process_set=self._set)
        return self._start(f"{op.value} of {name!r}", issue, tensor)

    def start_broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Work[None]:
        # Horovod expects the root's rank in its whole world, even for process sets.
        global_root = self._set.ranks[root] if self._set.ranks else root
        issue = partial(
            self.library.broadcast_async_, root_rank=global_root, name=self._scope + name, process_set=self._set
        )
        return self._start(f"broadcast of {name!r} from rank {self.members[root]}", issue, tensor)

    def start_allgather(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Work[None]:
        issue = partial(self.library.allgather_async, name=self._scope + name, process_set=self._set)
        return self._start(f"allgather of {name!r}", issue, tensor, output=output)

    def start_alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], name: str
    ) -> Work[None]:
        splits = torch.tensor(sent, dtype=torch.int32, device="cpu")
        issue = partial(self.library.alltoall_async, name=self._scope + name, process_set=self._set)
        return self._start(f"alltoall of {name!r}", issue, tensor, splits, output=output)

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        vector = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        output = vector.new_empty(self.size, len(vector))
        # Horovod caches negotiations by name: vectors of two lengths under one name would evict each other.
        name = f"{self._scope}agreement.{len(vector)}"
        issue = partial(self.library.allgather_async, name=name, process_set=self._set)
        self._start(COMPARING, issue, vector[None], output=output).wait()
        gathered: list[list[int]] = output.tolist()
        return gathered

    def _start(
        self, what: str, issue: Callable[..., int], *inputs: torch.Tensor, output: torch.Tensor | None = None
    ) -> Work[None]:
        """Start the operation ``what``, by calling ``issue(*inputs)``."""
        if self.failed is not None:
            # The ranks compare calls before they start them, so no mismatch caused the earlier failure: Horovod's world
            # itself has failed, and will not recover.
            raise self.failure(what, self.failed) from self.failed
        # Start no operation after a rank has failed: while Horovod's thread ends, it holds a lock and waits for the GIL
        # (0.28.1), and the operation would hold the GIL and wait for this lock.
        self.check_peers(what)
        if not inputs[0].is_cpu:
            refuse_other_devices(inputs[0])
        # Horovod's thread, which is not in inference mode, resizes and writes the tensors: pass it ordinary tensors.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            # If an input were a view, a view of it would refer to the input's base instead: pass Horovod no views.
            inputs = tuple(ordinary(each).detach() for each in inputs)
            views = [tensor.view_as(tensor) for tensor in inputs]
            return self._issue(what, partial(issue, *inputs), output if output is None else ordinary(output), views)

    def _issue(
        self, what: str, issue: Callable[[], int], output: torch.Tensor | None, views: list[torch.Tensor]
    ) -> Work[None]:
        try:
            return _HorovodWork(self, issue(), what, output, views)
        except (RuntimeError, ValueError) as error:
            raise self.failure(what, error, waited=_SHUT_DOWN in str(error)) from error

    def subset(self, ranks: Sequence[int], world: World | None) -> HorovodBackend | None:
        self._groups += 1
        members = self._sets.get(tuple(ranks))  # Horovod refuses a second set of the same ranks
        if members is None:
            members = self._sets[tuple(ranks)] = self._new_set(list(ranks))
        if world is None:
            return None
        group = object.__new__(HorovodBackend)
        Backend.__init__(group, world, self.device, self.timeout)
        group.failed_works = self.failed_works
        group.library, group.transport, group._ops = self.library, self.transport, self._ops
        group._owns_world, group._launched, group._set = False, self._launched, members
        # Groups that share a set must not share names: both may have an unfinished call of the same name.
        group._scope, group._groups = f"{self._scope}group.{self._groups}.", 0
        # In a group of all ranks, the ranks have the same numbers as here.
        group._sets = self._sets if len(ranks) == self.size else {tuple(range(len(ranks))): members}
        return group

    def _new_set(self, ranks: list[int]) -> Any:
        if self._launched or self.library.mpi_enabled():
            return self.library.add_process_set(ranks)
        where = listening_address(self.world), self.rank == 0
        share = partial(self._broadcast_object, root=0, name=None)  # not the public methods: this runs inside of one
        with http_store(*where, share=share, wait_for_all=partial(self._barrier, None)):
            return self.library.add_process_set(ranks)

    def disconnect(self) -> None:
        # Process sets stay until the world ends: removing one needs every rank of the world.
        if self._owns_world:
            self.library.shutdown()
            self.library, self._store = Closed(), None


def _scope(address: str | None) -> str:
    """Return the prefix of all operation names in a world. Each world of a process has a different prefix.

    Horovod 0.28.1 may keep an operation that was started while Horovod shut down (``EnqueueTensorAllgather`` checks for
    the shutdown first, and then waits for the lock of the table of process sets). The old operation then takes part in
    the process's next world, where a new operation of the same name would get the old operation's data. If the world
    has a store, the prefix is a hash of its random ``address``. Otherwise the prefix is the number of earlier worlds
    without a store. This number is the same on all ranks: if a world without a store has several ranks, horovodrun or
    MPI has started them together, and they have joined equally many worlds.
    """
    return f"{next(_worlds)}." if address is None else f"{fingerprint(address):x}."
