"""Start Horovod: the environment variables that it reads, and the stores in which its ranks meet.

This module does not import Horovod. :func:`initialise` gets Horovod's ``init`` as an argument.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dualtrain.differences import refuse_unlike
from dualtrain.errors import UserError
from dualtrain.launchers import World
from dualtrain.rendezvous.hosts import address, is_loopback, listening_address, listening_interface, variables
from dualtrain.rendezvous.http_store import HttpStore
from dualtrain.rendezvous.key_value_store import KeyValueStore
from dualtrain.rendezvous.left_over import refuse_left_over
from dualtrain.rendezvous.meeting_point import names_by_server, within
from dualtrain.rendezvous.placement import SAME_BACKEND

#: Function that makes the job's store and finds out where each rank runs. Its arguments are the world, the timeout, the
#: backend's name, and the reason why this host cannot be used together with other hosts (``None`` if it can).
Meet = Callable[[World, float, str, str | None], tuple[KeyValueStore, World]]
#: Gloo's timeout in Horovod is this much longer than the backend's timeout, so that the backend raises first: unlike Gloo's
#: error, its error names a rank.
_GLOO_EXTRA_SECONDS = 3
_ADDRESS_KEY = "horovod"  # key in the job's store; its value is the address of the store that Horovod itself uses


def initialise(
    start: Callable[[], None], world: World, timeout: float, launched: bool, groups: bool, meet: Meet
) -> tuple[KeyValueStore | None, str | None]:
    """Start Horovod.

    The ranks meet through Horovod's own launcher or MPI, if one of them has started this process. Otherwise they meet
    through the job's store. A single rank needs neither.

    Args:
        start: Horovod's ``init``.
        world: this process's rank, and the number of ranks.
        timeout: seconds to wait for the other ranks.
        launched: whether Horovod's own launcher or MPI has started this process.
        groups: whether process sets can be made later.
        meet: makes the job's store.

    Returns:
        The job's store, which must be kept as long as the world is used, and the address of Horovod's store. Both are
        ``None`` if the ranks did not meet through the job's store.

    Raises:
        UserError: Horovod cannot use this host, or the ranks cannot meet, or they chose different backends.
    """
    if not world.launcher.startswith("mpi"):
        _check_name()
    limits = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, round(timeout)) + _GLOO_EXTRA_SECONDS)}
    defaults = _defaults(world, groups) | (limits if launched else {})
    with variables({name: os.environ.get(name, value) for name, value in defaults.items()}):
        if launched:
            _initialise_launched(start, world, timeout)
            return None, None
        if world.size == 1:
            with variables(description(world)):
                start()
            return None, None
        with variables(limits):
            return _initialise_by_store(start, world, timeout, meet)


def _defaults(world: World, groups: bool) -> dict[str, str]:
    """Return environment variables to set in place of Horovod's defaults, unless the user has set them."""
    # Disable Horovod's fusion: our buckets fuse gradients in a layout that is the same on every backend.
    defaults = {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_DYNAMIC_PROCESS_SETS": str(int(groups))}
    if 2 * world.local_size > (os.cpu_count() or 1):
        # Each rank has two busy threads, which spin while Open MPI waits. With fewer cores than threads they must yield:
        # with 4 ranks on 2 cores, this gave 3.6 times as many steps per second.
        defaults["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return defaults


def _initialise_launched(start: Callable[[], None], world: World, timeout: float) -> None:
    """Start Horovod in a process that Horovod's own launcher or MPI has started.

    Raises UserError if the ranks chose different backends or do not meet in time, and for the reasons of
    :func:`refuse_left_over` and :func:`_check_hosts`.
    """
    if not world.launcher.startswith("mpi"):
        _check_hosts()
    refuse_unlike("backend", names_by_server(world, timeout, "horovod"), SAME_BACKEND)
    if world.launcher.startswith("mpi"):
        refuse_left_over(world, os.environ)
        # MPI has no timeout of its own.
        within(timeout, start, f"Horovod did not start on rank {world.rank} of {world.size}")
    else:
        start()


def _initialise_by_store(start: Callable[[], None], world: World, timeout: float, meet: Meet) -> tuple[KeyValueStore, str]:
    """Start Horovod's Gloo controller with our own HTTP store, whose address the ranks get through the job's store.

    Returns:
        The job's store, and the address of the HTTP store.
    """
    # ``meet`` computes local ranks from the hosts' identities: Horovod aborts the process if local ranks are inconsistent.
    store, world = meet(world, timeout, "horovod", _obstacle())

    def share(server_address: str | None) -> str:
        if server_address is not None:
            store.set(_ADDRESS_KEY, server_address)
        try:
            return str(store.get(_ADDRESS_KEY).decode())
        except RuntimeError as error:
            raise UserError(
                f"rank 0 did not send the address of Horovod's store within {timeout:g} s: see rank 0's own message"
            ) from error

    def wait_for_all() -> None:
        if int(store.add("joined", 1)) == world.size:
            store.set("all joined", "1")
        try:
            store.get("all joined")
        except RuntimeError as error:
            raise UserError(
                f"Horovod started on rank {world.rank}, but not on all {world.size} ranks within {timeout:g} s"
            ) from error

    with (
        variables(description(world)),
        http_store(listening_address(world), world.rank == 0, share, wait_for_all) as server_address,
    ):
        start()
    return store, server_address


def _check_name() -> None:
    """Check that this host's own name has an address: Horovod 0.28.1 over Gloo crashes without one.

    Raises:
        UserError: the name has no address.
    """
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as error:
        raise UserError(
            f"this host's name {socket.gethostname()!r} has no address ({error}), and Horovod would crash: put it into "
            "/etc/hosts, give the container a network, or use --backend torch"
        ) from error


def _check_hosts() -> None:
    """Check that horovodrun's cross rank is below its cross size: Horovod 0.28.1 over Gloo aborts the process otherwise.

    Raises:
        UserError: it is not, because horovodrun has counted a host twice.
    """
    rank, size = (os.environ.get(f"HOROVOD_CROSS_{name}", "") for name in ("RANK", "SIZE"))
    if rank.isdecimal() and size.isdecimal() and int(rank) >= int(size) > 0:
        raise UserError(
            f"horovodrun gave HOROVOD_CROSS_RANK={rank} and HOROVOD_CROSS_SIZE={size}, with which Horovod would crash: its "
            "list of hosts has a host twice; write each host once, with its ranks (host:2), or use --backend torch"
        )


def _obstacle() -> str | None:
    """Return the reason why Horovod cannot use this host together with others, or ``None``.

    Horovod 0.28.1 makes Gloo advertise the address that the host's name resolves to, whatever interface is chosen.
    """
    name = socket.gethostname()
    if not is_loopback(name):
        return None
    return (
        f"host {name} resolves its own name to a loopback address, which Horovod would send to the other hosts: give "
        f"{name} the address {address()} in its /etc/hosts (Debian's installer writes 127.0.1.1 there), or use --backend "
        "torch"
    )


@contextmanager
def http_store(
    host: str, serving: bool, share: Callable[[str | None], str], wait_for_all: Callable[[], None]
) -> Iterator[str]:
    """Serve Horovod's key-value store if ``serving``. On all ranks, set Horovod's variables to its address, and yield it.

    ``share`` sends the server's address from the serving rank to the others; ``wait_for_all`` blocks until all ranks have
    used the server. Each start of Horovod and each new process set needs a new server: a used server still has earlier
    keys.
    """
    server = HttpStore(host) if serving else None
    try:
        server_address = share(f"{server.url_prefix} {server.port}" if server else None)
        prefix, port = server_address.split()
        with variables({"HOROVOD_GLOO_RENDEZVOUS_ADDR": prefix, "HOROVOD_GLOO_RENDEZVOUS_PORT": port}):
            yield server_address
        wait_for_all()
    finally:
        if server is not None:
            server.close()


def description(world: World) -> dict[str, str]:
    """Return the variables with this process's ranks and sizes, as Horovod's own launcher would have set them."""
    values = {
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
        values["GLOO_IFACE"] = name
    return {f"HOROVOD_{key}": str(value) for key, value in values.items()}
