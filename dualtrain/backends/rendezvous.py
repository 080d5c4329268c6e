"""Where torch's processes meet when their launcher names no address: told to each other through what it offers.

``mpirun`` and ``mpiexec`` offer MPI (by mpi4py), ``horovodrun --gloo`` its own key-value server. Rank 0 listens on a
free port that the others are told of.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from dualtrain.backends.hosts import address, identity, is_loopback
from dualtrain.backends.store import Store, StoreServer, dial, listen, serve
from dualtrain.errors import UserError
from dualtrain.launchers import World

#: Sockets that rank 0 listens on already, until the store takes them.
_RESERVED: dict[tuple[str, int], socket.socket] = {}
#: The stores of the jobs that this process has joined, by address, rank and world size.
_JOINED: dict[tuple[str, int, int, int], Store] = {}


def meeting_point(world: World, timeout: float) -> World:
    """``world`` with an address to meet at, if there is any way to agree on one. Collective where there is none yet.

    Raises:
        UserError: mpi4py is missing or does not see the launcher's world, or the launcher's server does not answer.
    """
    if world.rendezvous is not None or world.size == 1 or world.name:
        return world
    if world.launcher.startswith("mpi"):
        rendezvous, secret = _meet_by_mpi(world)
    elif world.launcher == "horovodrun --gloo":
        rendezvous, secret = _meet_by_server(world, timeout)
    else:
        return world
    return replace(world, rendezvous=rendezvous, secret=secret)


def join(world: World, timeout: float) -> Store:
    """The job's store at ``world``'s rendezvous, joined once by a process: its second world meets there too.

    Raises:
        UserError: it cannot be reached, or not be served.
    """
    assert world.rendezvous is not None
    host, port = world.rendezvous
    place = host, port, world.rank, world.size
    if place not in _JOINED:
        if world.rank == 0 and world.launcher != "spawn":
            _JOINED[place] = _serve(world, host, port)
        else:
            _JOINED[place] = dial(host, range(port, port + world.ports), world.rank, world.secret, timeout)
    return _JOINED[place]


def leave(world: World) -> None:
    """Ends what :func:`join` began, for a world that has not come about."""
    for place in [place for place in _JOINED if place[:2] == world.rendezvous]:
        _JOINED.pop(place).close()


def _serve(world: World, host: str, port: int) -> StoreServer:
    if (host, port) in _RESERVED:
        server = StoreServer(_RESERVED.pop((host, port)), world.size, world.secret)
        server.join(0, f"process {os.getpid()}")
        return server
    # Many a host knows itself by a loopback address, where nobody else would find it.
    own = address() if not world.single_host and is_loopback(host) else host
    try:
        return serve(own, range(port, port + world.ports), 0, world.size, world.secret)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} on {host} is in use by another program, or by another rank 0: set MASTER_PORT to a free one, "
                "and start each rank once"
            ) from error
        raise UserError(
            f"rank 0 cannot listen at {host}:{port} ({os.strerror(error.errno or 0)}): MASTER_ADDR must be an address of "
            "the host that rank 0 runs on"
        ) from error


def world_of(comm: Any, world: World) -> World:
    """The world of the processes of an mpi4py communicator. Collective over it."""
    place = replace(world, rank=comm.Get_rank(), size=comm.Get_size(), name=f"comm{comm.Get_size()}")
    if place.size == 1:
        return replace(place, name="")
    rendezvous, secret = _share(place, comm.bcast, comm.allgather)
    return replace(place, rendezvous=rendezvous, secret=secret)


def ranks_in_world(comm: Any) -> list[int]:
    """The ranks of a communicator's processes in MPI's world."""
    from mpi4py import MPI

    group = comm.Get_group()
    return sorted(MPI.Group.Translate_ranks(group, list(range(group.size)), MPI.COMM_WORLD.Get_group()))


#: A (host, port) and a secret.
Meeting = tuple[tuple[str, int], str]


@cache
def _meet_by_mpi(world: World) -> Meeting:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"{world.launcher} started {world.size} ranks, and without mpi4py ({error}) torch has no address to meet at: "
            "pip install mpi4py, or export MASTER_ADDR and MASTER_PORT for all of them"
        ) from error
    comm = MPI.COMM_WORLD
    if (comm.Get_rank(), comm.Get_size()) != (world.rank, world.size):
        raise UserError(
            f"mpi4py is rank {comm.Get_rank()} of {comm.Get_size()}, but {world.launcher} started rank {world.rank} of "
            f"{world.size}: mpi4py was built for another MPI; rebuild it (pip install --no-binary mpi4py mpi4py)"
        )
    return _share(world, comm.bcast, comm.allgather)


def _share(world: World, bcast: Callable[..., Any], allgather: Callable[..., Any]) -> Meeting:
    hosts = allgather(identity())
    place = _reserve(single_host=len(set(hosts)) == 1) if world.rank == 0 else None
    (host, port), secret = bcast(place, root=0)
    return (str(host), int(port)), str(secret)


def _reserve(single_host: bool) -> Meeting:
    host = "127.0.0.1" if single_host else address()
    listening = listen(host, [0], backlog=128)
    place = host, int(listening.getsockname()[1])
    _RESERVED[place] = listening
    return place, secrets.token_hex(32)


@cache
def _meet_by_server(world: World, timeout: float) -> Meeting:
    server = f"{os.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
    url = f"http://{server}/dualtrain/meeting-point"
    if world.rank == 0:
        (host, port), secret = _reserve(world.single_host)
        words = f"{host} {port} {secret}".encode()
        urllib.request.urlopen(urllib.request.Request(url, words, method="PUT"), timeout=30).close()
        return (host, port), secret
    deadline = time.monotonic() + timeout
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                host, port, secret = answer.read().decode().split()
                return (host, int(port)), secret
        except urllib.error.URLError as error:
            missing = isinstance(error, urllib.error.HTTPError) and error.code == 404
            if not missing or time.monotonic() > deadline:
                raise UserError(
                    f"rank 0 left no address at horovodrun's server {server} within {timeout:g} s ({error}): "
                    "check that all processes were started"
                ) from error
            time.sleep(0.02)
