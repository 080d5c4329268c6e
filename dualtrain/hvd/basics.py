"""The world of this process: ``init`` joins it, ``shutdown`` leaves it, and all other calls use it."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from dualtrain.backends import Backend, connect
from dualtrain.errors import UserError
from dualtrain.horovod_variables import Settings, mention_others
from dualtrain.hvd import compat
from dualtrain.hvd.channels import Reducers
from dualtrain.hvd.engine import Engine
from dualtrain.hvd.exceptions import HorovodInternalError
from dualtrain.hvd.process_sets import NOT_INITIALIZED, ProcessSet, attach, detach, ids_and_ranks
from dualtrain.hvd.rejoin import Rejoin
from dualtrain.launchers import World, detect_world
from dualtrain.processes import start_thread
from dualtrain.rendezvous.hosts import listening_address
from dualtrain.rendezvous.meeting_point import world_of

_ENDING_SECONDS = 5.0  # longest wait at exit until the store has the report that this process ends


@dataclass
class _Current:
    engine: Engine
    owns_backend: bool  # True if init() connected the backend, so that shutdown() must close it
    generation: int
    process: int  # id of the process that called init()


_current: _Current | None = None
#: The ranks of the latest world that init() connected: which of them join the next world?
_rejoin: Rejoin | None = None
#: The reducers of all hvd.DistributedOptimizers of this process.
reducers = Reducers()
_generations = 0


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the world that this process was launched in. Collective; blocks until all ranks have joined.

    A second call only adds process sets.

    Args:
        comm: ``None`` or an empty list for all processes; a list of ranks; an mpi4py communicator; or a connected
            :class:`dualtrain.Backend`, which nothing else may use until ``shutdown``.
        process_sets: sets to add, the same on every rank; or ``"dynamic"``, so that sets can be added later.

    Raises:
        ValueError: the world cannot be joined, a variable has an invalid value, ``process_sets`` is a text other than
            "dynamic", or a process set is not valid or appears twice. After an error in a process set, this process is
            still in the world. If a set appears twice, the other sets can be used.
        BackendError: another rank failed, or did not continue in time, after it had joined the world.
        HorovodInternalError: the ranks' process sets differ.
    """
    global _current, _generations, _rejoin
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'process_sets={process_sets!r} is not known: pass a list of process sets, or "dynamic"')
        process_sets = []
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # as Horovod does
    if _current is None:
        settings = Settings.read(os.environ)
        compat.enable(settings.compat)
        mention_others(os.environ)
        owns_backend = not isinstance(comm, Backend)
        if _rejoin is not None:
            _rejoin.announce()
        backend = _connect(comm, settings) if owns_backend else comm
        engine = _start_engine(backend, settings, owns_backend)
        _rejoin = Rejoin(backend) if owns_backend else None
        _generations += 1
        _current = _Current(engine, owns_backend, _generations, os.getpid())
        atexit.register(shutdown)
    attach(_current.engine, list(process_sets or []), comm if hasattr(comm, "Get_rank") else None)


def _connect(comm: Any, settings: Settings) -> Backend:
    """Join the world of ``comm``. Collective; blocks. For the exceptions, see :func:`init`."""
    world = detect_world()
    if hasattr(comm, "Get_rank"):
        world = world_of(comm, world)
    elif comm:
        world = _some_of(world, list(comm))
    # Wait longer than the coordinator: the coordinator's error names the missing ranks, so it must come first.
    timeout = min(max(settings.stall_shutdown, 300.0) + 60, 1e8)
    # transport="native": calls use Gloo or NCCL. Gradients use other channels, which may share memory (``channels.py``).
    # device="cpu": the script itself chooses a GPU, and a script for CPUs may have more ranks than there are GPUs.
    name = "torch" if world.size > 1 else "local"
    return connect(name, world=world, device="cpu", timeout=timeout, transport="native")


def _start_engine(backend: Backend, settings: Settings, owns_backend: bool) -> Engine:
    """Return an engine on ``backend``.

    If that fails and ``owns_backend`` is true, report why to the other ranks, and close the backend.
    """
    try:
        return Engine(backend, settings, listening_address(backend.world), reducers)
    except BaseException as error:
        if owns_backend:
            backend.abort(f"{type(error).__name__}: {error}")
            backend.close()
        raise


def _some_of(world: World, ranks: list[int]) -> World:
    """Return the world of ``ranks`` only. Raise UserError if the list is not valid, or lacks this process's rank."""
    if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(world.size)):
        raise UserError(
            f"hvd.init(comm={ranks}) lists a rank twice, or one that does not exist: list ranks from 0 to "
            f"{world.size - 1}, each at most once"
        )
    if world.rank not in ranks:
        raise UserError(f"hvd.init(comm={ranks}) was called on rank {world.rank}: call it on the listed ranks only")
    if ranks == list(range(world.size)):
        return world
    return replace(world, rank=ranks.index(world.rank), size=len(ranks), name="-".join(map(str, ranks)))


def shutdown() -> None:
    """Leave the world. Other ranks' calls fail from now on, as on Horovod, except calls that rank 0 has already matched.

    Blocks until this rank has finished the matched calls, for about 15 s at most. A second call does nothing.

    In a process that was forked from a rank, discard only this process's state: the rank stays in the world.
    """
    global _current
    if _current is None:
        return
    current, _current = _current, None
    atexit.unregister(shutdown)
    detach()
    if current.process != os.getpid():
        return  # a forked child shares the rank's connections, so it must not close them when it exits
    current.engine.close()
    if current.owns_backend:
        current.engine.backend.close()


def await_rejoin() -> None:
    """Block until all ranks of the world that this rank has left join the next one. Then call ``init``, on all ranks.

    Raises:
        HorovodInternalError: a rank's process has ended, or a rank did not continue in time.
    """
    if _rejoin is not None:
        _rejoin.announce()
        _rejoin.await_others()


@cache
def announce_end_at_exit() -> None:
    """Report to the other ranks when this process ends, so that :func:`await_rejoin` does not wait for it."""
    ending = threading.Event()
    # Start the thread now: Python 3.12 starts no threads at exit. Don't report in the main thread, which would wait
    # forever if the process that serves the store hangs.
    thread = start_thread(_announce_end, "dualtrain-hvd-end", (ending,))

    def end() -> None:
        ending.set()
        thread.join(_ENDING_SECONDS)

    atexit.register(end)


def _announce_end(ending: threading.Event) -> None:
    ending.wait()
    if _rejoin is not None:
        _rejoin.announce_end()


def is_initialized() -> bool:
    """Return whether this process is in a world: ``init`` was called, and ``shutdown`` was not called since then."""
    return _current is not None


def engine() -> Engine:
    """Return the engine that carries out collective calls. Raises HorovodInternalError outside of a world."""
    if _current is None:
        raise HorovodInternalError(NOT_INITIALIZED)
    return _current.engine


def generation() -> int:
    """Return the number of this process's current world: 1 for its first world, 2 for its second; 0 outside of a world."""
    return _current.generation if _current is not None else 0


def _backend() -> Backend:
    """Return the world's backend. Raises ValueError outside of a world."""
    if _current is None:
        raise ValueError(NOT_INITIALIZED)
    return _current.engine.backend


def rank() -> int:
    """Return this process's rank. Raises ValueError outside of a world, like all functions that return ranks or sizes."""
    return _backend().rank


def size() -> int:
    """Return the number of processes."""
    return _backend().size


def local_rank() -> int:
    """Return this process's rank among the processes on its host."""
    return _backend().local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return _backend().local_size


def cross_rank() -> int:
    """Return this host's index among the hosts that have a process with this local rank."""
    return _backend().world.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process with this local rank."""
    return _backend().world.cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of processes."""
    hosts = _backend().hosts
    return len({hosts.count(host) for host in hosts}) == 1


def _get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of each process set in use, by the set's id. Horovod's own tests call this function."""
    _backend()
    return ids_and_ranks()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin a Chrome trace at ``file_path``, written by rank 0. Raises ValueError outside of a world."""
    if _backend().rank == 0:
        engine().timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the trace. Raises ValueError outside of a world."""
    _backend()
    engine().timeline.stop()


def mpi_threads_supported() -> bool:
    """Raise ValueError, as Horovod does without MPI: here torch.distributed sends the tensors."""
    raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")


def mpi_enabled() -> bool:
    """Return False: torch.distributed sends the tensors."""
    return False


def mpi_built() -> bool:
    """Return False: torch.distributed sends the tensors."""
    return False


def gloo_enabled() -> bool:
    """Return whether this process is in a world, because Gloo sends the CPU tensors of a world."""
    return is_initialized()


def gloo_built() -> bool:
    """Return True: Gloo sends CPU tensors."""
    return True


def nccl_built() -> int:
    """Return the version of NCCL that torch was built with, such as 22703; 0 if torch was built without CUDA."""
    if torch.version.cuda is None:
        return 0
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return sum(number * 100 ** (2 - place) for place, number in enumerate(version[:3]))


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: Intel's oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Return whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built with ROCm."""
    return torch.version.hip is not None
