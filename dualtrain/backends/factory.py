"""``connect``: picks a backend, joins its world, and makes sure that it is the world that was launched."""

from __future__ import annotations

import os
import struct
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from dualtrain.backends.collectives import Backend
from dualtrain.backends.comparison import refuse_unlike
from dualtrain.backends.heap import keep_freed_memory
from dualtrain.backends.hosts import identity, listening_address
from dualtrain.backends.memory import SharedMemory
from dualtrain.backends.segment import UnsharedError
from dualtrain.backends.watch import Watch
from dualtrain.console import say
from dualtrain.errors import BackendError, UserError
from dualtrain.launchers import World, detect_world
from dualtrain.version import __version__

NAMES = ("auto", "torch", "horovod", "local")
TRANSPORTS = ("auto", "shm", "native")


def choose(name: str, world: World) -> str:
    """The backend that ``name`` means in ``world``: ``"auto"`` is what the launcher implies.

    Raises:
        UserError: there is no backend of that name.
    """
    if name not in NAMES:
        raise UserError(f"no backend is called {name!r}: choose one of {', '.join(NAMES)}")
    if name != "auto":
        return name
    if world.launcher == "none":
        return "local"
    return "horovod" if world.launcher.startswith(("horovodrun", "mpi")) else "torch"


def choose_for_horovod_api(env: Mapping[str, str]) -> str:
    """What carries Horovod's API: ``"horovod"`` where its launcher or MPI started us and it is installed, else ``"torch"``.

    Raises:
        UserError: DUALTRAIN_BACKEND names neither.
    """
    wanted = env.get("DUALTRAIN_BACKEND") or "auto"
    if wanted not in ("auto", "torch", "horovod"):
        raise UserError(f"DUALTRAIN_BACKEND={wanted!r} is not known: set it to torch or horovod, or unset it")
    if wanted == "auto":
        from dualtrain.backends.horovod import installed

        implied = choose("auto", detect_world(env)) == "horovod"
        return "horovod" if implied and installed() else "torch"
    return wanted


def connect(
    name: str = "auto",
    *,
    world: World | None = None,
    device: str | torch.device = "auto",
    timeout: float = 300.0,
    groups: bool = True,
    transport: str = "auto",
    default_group: bool = False,
) -> Backend:
    """Joins the world that this process was launched in. Collective: every process calls it, and blocks for the others.

    torch.distributed's default process group stays as it is: a program may call ``init_process_group`` before or after.

    Args:
        name: ``"torch"``, ``"horovod"``, ``"local"``, or ``"auto"`` for what the launcher implies.
        world: this process's place, where no launcher's variables say it.
        device: where this rank's tensors will live; ``"auto"`` is the GPU of this local rank if there is one.
        timeout: seconds that any wait on the backend lasts at most.
        groups: whether ``group`` will be called. For that, Horovod compares notes in every cycle, under a lock that
            calls need: without, it is faster, and over MPI a lost rank does not hold the others up in that lock.
        transport: what carries reductions of CPU tensors: ``"native"``, the library; ``"shm"``, memory that the ranks
            of a host share (and the library between hosts), or, said in one line, the library where they cannot;
            ``"auto"``, memory for the torch backend with all ranks on one host, else the library.
        default_group: whether the torch backend also makes torch.distributed's default process group, over the same
            ranks, for other libraries that need one; ``close`` destroys it.

    On the CPU, this process's heap is not cut from here on (``heap.py``), unless variables of glibc's, such as
    MALLOC_TRIM_THRESHOLD_, say how it is to be kept.

    Returns:
        The backend; close it, or use it in a ``with`` statement.

    Raises:
        UserError: an unknown name, a transport that the device does not have, a library that is missing, a world that
            cannot be joined, or one of another size than the launcher started.
    """
    world = detect_world() if world is None else world
    if name == "auto" and world.launcher == "none":
        _refuse_to_train_alone()
    name = choose(name, world)
    place = _device(device)
    if transport not in TRANSPORTS:
        raise UserError(f"no transport is called {transport!r}: choose one of {', '.join(TRANSPORTS)}")
    if transport == "shm" and place.type != "cpu":
        raise UserError(
            "--transport shm is for tensors on the CPU, and this rank's are on a GPU: choose auto, or --device cpu"
        )
    if default_group and name != "torch":
        raise UserError(f"default_group=True is of the torch backend, and this is {name}: choose torch, or leave it out")
    if name == "local":
        from dualtrain.backends.local import LocalBackend

        backend: Backend = LocalBackend(World(launcher=world.launcher, evidence=world.evidence), place, timeout)
    elif name == "torch":
        from dualtrain.backends.torch import TorchBackend

        backend = TorchBackend(world, place, timeout)
    else:
        from dualtrain.backends.horovod import HorovodBackend

        backend = HorovodBackend(world, place, timeout, groups or (transport == "shm" and not world.single_host))
    _compare(backend, world)
    _locate(backend)
    _compare_choices(backend, transport)
    _take_device(backend)
    backend.watch = Watch(backend, listening_address(backend.world))
    backend.watch.guard()
    _share_memory(backend, transport)
    if default_group:
        backend.make_default_group()  # type: ignore[attr-defined]
    if backend.device.type == "cpu":
        keep_freed_memory(os.environ)
    return backend


def _refuse_to_train_alone() -> None:
    """Refuses a process that no launcher started, but whose program has joined a world by itself.

    Raises:
        UserError: torch.distributed's default process group has several ranks.
    """
    from dualtrain.backends.torch import default_group_place

    rank, size = default_group_place() or (0, 1)
    if size > 1:
        raise UserError(
            f"this process is rank {rank} of {size} in torch.distributed's default process group, but no launcher's "
            f"variables say so, and it would train alone: give connect() a world=World({rank}, {size}), "
            "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )


def _device(device: str | torch.device) -> torch.device:
    """The device that is meant; a GPU without a number where the rank's place on its host will choose."""
    wanted = str(device)
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(wanted)
    except RuntimeError:
        raise UserError(f"device {wanted!r} is unknown to torch: choose auto, cpu, cuda or cuda:N") from None
    if place.type == "cuda":
        count = torch.cuda.device_count()
        if count == 0 or (place.index or 0) >= count:
            raise UserError(f"device {wanted!r} is not there: torch sees {count} GPUs on this host; choose auto or cpu")
    elif place.type != "cpu":
        raise UserError(f"device {wanted!r} is not supported: choose auto, cpu, cuda or cuda:N")
    return place


def _compare(backend: Backend, world: World) -> None:
    """Refuses a library that found itself in another world: each process would train alone, without an error."""
    if (backend.size, backend.rank) == (world.size, world.rank):
        return
    found = f"the {backend.name} backend is rank {backend.rank} of {backend.size}"
    backend.disconnect()
    raise UserError(
        f"{found}, but {world.launcher} started this process as rank {world.rank} of {world.size}: "
        "the library did not see the launcher; use the backend that the launcher is for (--backend auto), "
        "or start one process"
    )


def _locate(backend: Backend) -> None:
    """Sets the local and cross ranks from what the hosts say of themselves: launchers disagree on them.

    Raises:
        UserError: the ranks run different versions of dualtrain.
    """
    rows = backend.exchange(torch.tensor([identity(), *_as_numbers(__version__)])).tolist()
    hosts = [row[0] for row in rows]
    first = list(dict.fromkeys(hosts))
    backend.hosts = tuple(first.index(host) for host in hosts)
    backend.world = backend.world.placed(backend.rank, backend.hosts)
    versions = {rank: _as_text(row[1:]) for rank, row in enumerate(rows)}
    others = [rank for rank, version in versions.items() if version != versions[0]]
    if others:
        backend.disconnect()
        raise UserError(
            f"rank 0 runs dualtrain {versions[0]}, and rank {', '.join(map(str, others))} dualtrain "
            f"{', '.join(dict.fromkeys(versions[rank] for rank in others))}: install the same version on all hosts"
        )


def _compare_choices(backend: Backend, transport: str) -> None:
    """Refuses ranks that would use different libraries or memory for the same reduction: they would wait for each other.

    Raises:
        UserError: on every rank, naming what each has.
    """
    devices = ("cpu", "cuda")
    mine = [devices.index(backend.device.type), TRANSPORTS.index(transport)]
    rows = backend.exchange(torch.tensor(mine)).tolist()
    compared = (
        ("device", [devices[row[0]] for row in rows], "let every rank see a GPU, or give --device cpu to all"),
        ("transport", [TRANSPORTS[row[1]] for row in rows], "give the same --transport to all"),
    )
    try:
        for what, found, cure in compared:
            refuse_unlike(what, found, cure)
    except UserError:
        backend.disconnect()
        raise


def _take_device(backend: Backend) -> None:
    """Gives each rank of a host a GPU of its own, among those that it sees; it becomes the current one.

    Raises:
        UserError: NCCL is to be used, and two ranks of a host have the same GPU.
    """
    own = [0, 0]
    if backend.device.type == "cuda":
        index = backend.device.index
        index = backend.world.local_rank % torch.cuda.device_count() if index is None else index
        backend.device = torch.device("cuda", index)
        torch.cuda.set_device(backend.device)
        # Not its number: where each rank sees one GPU only, all are number 0.
        identifier = int(uuid.UUID(str(torch.cuda.get_device_properties(index).uuid)))
        own = [identifier >> 65, identifier & (1 << 62) - 1]
    rows = backend.exchange(torch.tensor(own)).tolist()
    mine = [rank for rank, row in enumerate(rows) if row == own and backend.hosts[rank] == backend.hosts[backend.rank]]
    if backend.transport == "nccl" and len(mine) > 1:
        backend.disconnect()
        raise UserError(
            f"ranks {' and '.join(map(str, mine))} of this host have the same GPU, {backend.device}, and NCCL takes one "
            "rank for each: start as many ranks on a host as it has GPUs, let each see another one, or give --device cpu"
        )


def _share_memory(backend: Backend, transport: str) -> None:
    """Has reductions go through memory that the ranks of a host share, if that is wanted, and can be had."""
    several = len(set(backend.hosts)) > 1
    automatic = transport == "auto" and backend.name == "torch" and backend.device.type == "cpu" and not several
    if backend.name == "local" or not (automatic or transport == "shm"):
        return
    try:
        if len(set(Counter(backend.hosts).values())) > 1:
            raise UnsharedError("the hosts do not have equally many ranks")
        across = backend.between_hosts() if several else None
        backend.memory = SharedMemory(backend, across)
        backend.transport = f"shm+{backend.transport}" if several else "shm"
    except (UnsharedError, BackendError, ValueError) as reason:  # the latter two: of groups between the hosts
        if not isinstance(reason, UnsharedError) and backend.watch is not None and backend.watch.loss is not None:
            raise
        if backend.rank == 0:
            say(f"shared memory cannot be used ({reason}): the reductions go over {backend.transport}, as with native")


def _as_numbers(text: str) -> list[int]:
    data = text.encode()[:32].ljust(32, b"\0")
    return list(struct.unpack("<4q", data))


def _as_text(numbers: Sequence[int]) -> str:
    return struct.pack("<4q", *numbers).rstrip(b"\0").decode(errors="replace")
