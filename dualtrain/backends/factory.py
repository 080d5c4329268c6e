"""``connect``: choose a backend, join its world, and check that its rank and size are the launcher's."""

from __future__ import annotations

import logging
import struct
import threading
import uuid
from collections.abc import Mapping, Sequence
from numbers import Real

import torch

from dualtrain.backends.collectives import Backend, no_default_group
from dualtrain.backends.shm import SharedMemoryBackend, UnsharedError
from dualtrain.backends.watch import Watch
from dualtrain.differences import ranks_in_words, refuse_unlike
from dualtrain.errors import BackendError, UserError, one_line
from dualtrain.launchers import World, detect_world
from dualtrain.rendezvous.hosts import identity, listening_address
from dualtrain.version import __version__

log = logging.getLogger(__name__)

NAMES = ("auto", "torch", "horovod", "local")
TRANSPORTS = ("auto", "shm", "native")


def choose(name: str, world: World) -> str:
    """Return the name of the backend to use in ``world``: ``name``, or for ``"auto"`` the launcher's backend.

    Without a launcher, ``"auto"`` gives ``"local"``, or ``"torch"`` if ``world`` has several processes.

    Raises:
        UserError: there is no backend of this name.
    """
    if name not in NAMES:
        raise UserError(f"no backend is called {name!r}: choose one of {', '.join(NAMES)}")
    if name != "auto":
        return name
    if world.launcher == "none":
        return "local" if world.size == 1 else "torch"
    return "horovod" if world.launcher.startswith(("horovodrun", "mpi")) else "torch"


def choose_for_horovod_api(env: Mapping[str, str]) -> str:
    """Return the backend of Horovod's API: ``"horovod"`` under horovodrun or MPI if Horovod is installed, else ``"torch"``.

    DUALTRAIN_BACKEND overrides this choice.

    Raises:
        UserError: DUALTRAIN_BACKEND is not torch, horovod or auto; or as :func:`~dualtrain.launchers.detect_world`.
    """
    wanted = env.get("DUALTRAIN_BACKEND") or "auto"
    if wanted not in ("auto", "torch", "horovod"):
        raise UserError(f"DUALTRAIN_BACKEND={wanted!r} is not known: set it to auto, torch or horovod, or unset it")
    if wanted == "auto":
        from dualtrain.backends.horovod import installed

        implied = choose("auto", detect_world(env)) == "horovod"
        return "horovod" if implied and installed() else "torch"
    return wanted


def replace_by_horovod(package: str) -> None:
    """Replace ``package`` and its modules by Horovod's own modules of the same names.

    Raises:
        UserError: Horovod is not installed; or as :func:`~dualtrain.launchers.detect_world`.
    """
    from dualtrain.backends.horovod import replace_package
    from dualtrain.backends.torch import meet

    replace_package(package, meet)


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
    """Join the world that this process was launched in. Collective; blocks until all processes have called it.

    Without ``default_group``, torch.distributed's default process group stays as it is: a program may call
    ``init_process_group`` before or after this function. Two things change in this process. On a GPU, this rank's GPU
    becomes the current one. Until the backend is closed, ``sys.excepthook`` and an exit handler report to the other ranks
    how this rank ends; the program's own hook is called as well.

    Args:
        name: ``"torch"``, ``"horovod"``, ``"local"``, or ``"auto"`` for the launcher's backend.
        world: this process's rank and size, needed if no launcher's variables give them.
        device: where this rank's tensors will be; ``"auto"`` is the GPU of this local rank, or the CPU without GPUs.
        timeout: the longest time in seconds that any wait on the backend lasts.
        groups: whether ``Backend.group`` will be called; only the horovod backend uses this. If True, Horovod synchronizes
            its process sets in every cycle, and holds a lock that every call needs. Over MPI, a failed rank can then make
            the other ranks wait for that lock. If False, Horovod is faster, except with ``transport="shm"`` on several
            hosts, which needs process sets.
        transport: how CPU tensors are reduced. ``"native"`` uses the backend's library. ``"shm"`` uses memory that the
            ranks of a host share, and the library between hosts. If the ranks cannot share memory, rank 0 logs a warning,
            and the library is used. ``"auto"`` is ``"shm"`` for the torch backend on the CPU with all ranks on one
            host, else ``"native"``.
        default_group: whether the torch backend also makes torch.distributed's default process group, over the same
            ranks, for other libraries that need one; ``close`` destroys it.

    Returns:
        The backend; close it, or use it in a ``with`` statement.

    Raises:
        UserError: for one of these reasons:

            - An argument is wrong: a name is unknown, ``world`` is not a ``World``, or ``timeout`` is not a number of
              seconds above 0.
            - The device does not exist, or is a GPU although ``transport`` is ``"shm"``; or two ranks use the same GPU with
              NCCL.
            - A library is missing, or the backend does not support ``default_group``.
            - The ranks have different versions of dualtrain, kinds of device or transports.
            - The world cannot be joined, or the library's rank or size is not that of ``world``.

        BackendError: another rank failed, or did not continue in time, after it had joined the world.
    """
    if world is not None and not isinstance(world, World):
        raise UserError(
            f"world={world!r} is not a World: leave it out under a launcher, or give dualtrain.World(rank, size, …)"
        )
    world = detect_world() if world is None else world
    if name == "auto" and world.launcher == "none" and world.size == 1:
        _refuse_to_train_alone()
    name = choose(name, world)
    timeout = _checked_timeout(timeout)
    own_device = _device(device)
    if transport not in TRANSPORTS:
        raise UserError(f"no transport is called {transport!r}: choose one of {', '.join(TRANSPORTS)}")
    if transport == "shm" and own_device.type != "cpu":
        raise UserError(
            "--transport shm is for tensors on the CPU, and this rank's tensors are on a GPU: choose auto, or --device cpu"
        )
    if default_group and name != "torch":
        raise no_default_group(name)
    backend = _open(name, world, own_device, timeout, groups or (transport == "shm" and not world.single_host))
    try:
        _refuse_other_world(name, (backend.rank, backend.size), world)
        _locate(backend)
        _compare_choices(backend, transport)
        _take_device(backend)
        backend.watch = Watch(backend, listening_address(backend.world))
        backend.watch.report_at_exit()
        if default_group:
            backend.make_default_group()
        return _share_memory(backend, transport)
    except BaseException as error:
        if backend.watch is not None:
            backend.watch.announce(f"{type(error).__name__}: {one_line(error)}")
            backend.watch.leave()
        backend.disconnect()
        raise


def _open(name: str, world: World, device: torch.device, timeout: float, groups: bool) -> Backend:
    """Make the backend ``name``, which joins its world. Collective and blocks, unless it is ``"local"``."""
    if name == "local":
        from dualtrain.backends.local import LocalBackend

        same = ("launcher", "evidence", "rendezvous", "job", "job_key")
        return LocalBackend(World(**{name: getattr(world, name) for name in same}), device, timeout)
    from dualtrain.backends import torch as over_torch

    if name == "horovod":
        from dualtrain.backends.horovod import HorovodBackend

        return HorovodBackend(world, device, timeout, groups, over_torch.meet)
    rank_and_size = over_torch.rank_in_default_group()
    if rank_and_size is not None and not world.name:
        _refuse_other_world(name, rank_and_size, world)
    store, placed_world = over_torch.meet(world, timeout)
    return over_torch.TorchBackend(world, device, timeout, store, placed_world)


def _checked_timeout(timeout: object) -> float:
    largest = threading.TIMEOUT_MAX
    if not isinstance(timeout, Real) or timeout <= 0 or not timeout <= largest:  # the last condition is also true for NaN
        raise UserError(
            f"timeout={timeout!r} is not a time limit: pass a number of seconds above 0, and at most {largest:.0f}, "
            "such as 300.0"
        )
    return float(timeout)


def _refuse_to_train_alone() -> None:
    """Refuse to continue as a world of one process if the program has made a default process group of several ranks.

    Raises:
        UserError: torch.distributed's default process group has several ranks.
    """
    from dualtrain.backends.torch import rank_in_default_group

    rank, size = rank_in_default_group() or (0, 1)
    if size > 1:
        raise UserError(
            f"this process is rank {rank} of {size} in torch.distributed's default process group, but no launcher's "
            f"variables say so, and it would train alone: give connect() a world=World({rank}, {size}), "
            "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )


def _device(device: str | torch.device) -> torch.device:
    """Return ``device`` as a torch.device; a GPU without an index is chosen later, by the local rank.

    Raises UserError if there is no such device.
    """
    wanted = str(device)
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(wanted)
    except RuntimeError:
        raise UserError(f"device {wanted!r} is unknown to torch: choose auto, cpu, cuda or cuda:N") from None
    if found.type == "cuda":
        count = torch.cuda.device_count()
        if count == 0 or (found.index or 0) >= count:
            raise UserError(f"device {wanted!r} does not exist: torch sees {count} GPUs on this host; choose auto or cpu")
    elif found.type != "cpu":
        raise UserError(f"device {wanted!r} is not supported: choose auto, cpu, cuda or cuda:N")
    elif found.index:
        raise UserError(f"device {wanted!r} does not exist, since all cores are one device: choose cpu")
    return found if found.type == "cuda" else torch.device("cpu")  # cpu:0 is the same device, but compares as unequal


def _refuse_other_world(name: str, rank_and_size: tuple[int, int], world: World) -> None:
    """Check that the library's rank and size are those of ``world``; otherwise each process might train alone.

    Raises:
        UserError: the rank or the size differs.
    """
    if rank_and_size == (world.rank, world.size):
        return
    rank, size = rank_and_size
    if world.launcher == "none":
        raise UserError(
            f"the {name} backend is rank {rank} of {size}, but the program gave connect() a World of rank "
            f"{world.rank} of {world.size}: give the rank and the size of the {name} backend, or choose another backend"
        )
    raise UserError(
        f"the {name} backend is rank {rank} of {size}, but {world.launcher} started this process as rank "
        f"{world.rank} of {world.size}: the library did not use the launcher's variables; choose the launcher's backend "
        "(--backend auto), or start one process"
    )


def _locate(backend: Backend) -> None:
    """Set local and cross ranks from the hosts' exchanged identities, since launchers define these ranks differently.

    Collective. The ranks compare their versions of dualtrain in the same exchange.

    Raises:
        UserError: the ranks run different versions of dualtrain.
    """
    gathered = backend.exchange([identity(), *_as_numbers(__version__)])
    hosts = [host for host, *_ in gathered]
    first = list(dict.fromkeys(hosts))
    backend.hosts = tuple(first.index(host) for host in hosts)
    backend.world = backend.world.placed(backend.rank, backend.hosts)
    versions = {rank: _as_text(numbers) for rank, (_, *numbers) in enumerate(gathered)}
    others = [rank for rank, version in versions.items() if version != versions[0]]
    if others:
        raise UserError(
            f"rank 0 runs dualtrain {versions[0]}, but dualtrain "
            f"{', '.join(dict.fromkeys(versions[rank] for rank in others))} runs on {ranks_in_words(others)}: "
            "install the same version on all hosts"
        )


def _compare_choices(backend: Backend, transport: str) -> None:
    """Check that all ranks have the same kind of device and the same transport; otherwise reductions would not match.

    Collective.

    Raises:
        UserError: on every rank, with each rank's choice, if the choices differ.
    """
    devices = ("cpu", "cuda")
    mine = [devices.index(backend.device.type), TRANSPORTS.index(transport)]
    gathered = backend.exchange(mine)
    compared = (
        ("device", [devices[index] for index, _ in gathered], "let every rank see a GPU, or give --device cpu to all"),
        ("transport", [TRANSPORTS[index] for _, index in gathered], "give the same --transport to all"),
    )
    for what, choices, cure in compared:
        refuse_unlike(what, choices, cure)


def _take_device(backend: Backend) -> None:
    """Choose this rank's GPU by its local rank, unless the user chose one, and make it the current GPU. Collective.

    Raises:
        UserError: the transport is NCCL, and another rank of this host has the same GPU.
    """
    own = [0, 0]
    if backend.device.type == "cuda":
        index = backend.device.index
        index = backend.world.local_rank % torch.cuda.device_count() if index is None else index
        backend.device = torch.device("cuda", index)
        # Otherwise code that names no GPU, such as NCCL and Horovod, would use GPU 0 on every rank.
        torch.cuda.set_device(backend.device)
        # Compare UUIDs, not indices: where each rank sees only one GPU, every index is 0.
        identifier = int(uuid.UUID(str(torch.cuda.get_device_properties(index).uuid)))
        # The exchanged integers are signed and have 64 bits: send 125 of the UUID's 128 bits in two integers.
        own = [identifier >> 65, identifier & (1 << 62) - 1]
    gathered = backend.exchange(own)
    hosts = backend.hosts
    alike = [rank for rank, theirs in enumerate(gathered) if theirs == own and hosts[rank] == hosts[backend.rank]]
    if backend.transport == "nccl" and len(alike) > 1:
        raise UserError(
            f"ranks {' and '.join(map(str, alike))} of this host have the same GPU, {backend.device}, and NCCL allows "
            "one rank per GPU: start as many ranks on a host as it has GPUs, let each rank see a different GPU, or give "
            "--device cpu"
        )


def _share_memory(backend: Backend, transport: str) -> Backend:
    """Return ``backend`` with reductions through shared memory if that is chosen and possible, else ``backend`` itself.

    Collective. If it is chosen and not possible, rank 0 logs a warning.

    Raises:
        BackendError, ValueError: a rank has failed or has left the job.
    """
    several_hosts = len(set(backend.hosts)) > 1
    automatic = transport == "auto" and backend.name == "torch" and backend.device.type == "cpu" and not several_hosts
    if backend.name == "local" or not (automatic or transport == "shm"):
        return backend
    try:
        return SharedMemoryBackend(backend)
    except (UnsharedError, BackendError, ValueError) as reason:  # making a group between hosts may raise the last two
        if not isinstance(reason, UnsharedError) and backend.watch is not None and backend.watch.failure is not None:
            raise
        if backend.rank == 0:
            text = "shared memory cannot be used (%s): the reductions use %s, as with --transport native"
            log.warning(text, reason, backend.transport)
        return backend


def _as_numbers(text: str) -> list[int]:
    data = text.encode()[:32].ljust(32, b"\0")
    return list(struct.unpack("<4q", data))


def _as_text(numbers: Sequence[int]) -> str:
    return struct.pack("<4q", *numbers).rstrip(b"\0").decode(errors="replace")
