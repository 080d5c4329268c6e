"""Where torch's processes meet when their launcher names no address: told to each other through what it offers.

``mpirun`` and ``mpiexec`` offer MPI (by mpi4py), ``horovodrun --gloo`` its own key-value server. Rank 0 listens on a
free port that the others are told of.
"""

from __future__ import annotations

import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from dualtrain.backends.hosts import identity
from dualtrain.errors import UserError
from dualtrain.launchers import World

#: Sockets that rank 0 listens on already, until the store takes them.
RESERVED: dict[tuple[str, int], socket.socket] = {}


def meeting_point(world: World, timeout: float) -> World:
    """``world`` with an address to meet at, if there is any way to agree on one. Collective where there is none yet.

    Raises:
        UserError: mpi4py is missing or does not see the launcher's world, or the launcher's server does not answer.
    """
    if world.rendezvous is not None or world.size == 1 or world.name:
        return world
    if world.launcher.startswith("mpi"):
        return replace(world, rendezvous=_meet_by_mpi(world))
    if world.launcher == "horovodrun --gloo":
        return replace(world, rendezvous=_meet_by_server(world, timeout))
    return world


def world_of(comm: Any, world: World) -> World:
    """The world of the processes of an mpi4py communicator. Collective over it."""
    place = replace(world, rank=comm.Get_rank(), size=comm.Get_size(), name=f"comm{comm.Get_size()}")
    return (
        replace(place, rendezvous=_share(place, comm.bcast, comm.allgather)) if place.size > 1 else replace(place, name="")
    )


def ranks_in_world(comm: Any) -> list[int]:
    """The ranks of a communicator's processes in MPI's world."""
    from mpi4py import MPI

    group = comm.Get_group()
    return sorted(MPI.Group.Translate_ranks(group, list(range(group.size)), MPI.COMM_WORLD.Get_group()))


@cache
def _meet_by_mpi(world: World) -> tuple[str, int]:
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


def _share(world: World, bcast: Callable[..., Any], allgather: Callable[..., Any]) -> tuple[str, int]:
    hosts = allgather(identity())
    place = _reserve(single_host=len(set(hosts)) == 1) if world.rank == 0 else None
    host, port = bcast(place, root=0)
    return str(host), int(port)


def _reserve(single_host: bool) -> tuple[str, int]:
    host = "127.0.0.1" if single_host else socket.gethostbyname(socket.gethostname())
    listening = socket.create_server((host, 0), backlog=128)
    place = host, int(listening.getsockname()[1])
    RESERVED[place] = listening
    return place


@cache
def _meet_by_server(world: World, timeout: float) -> tuple[str, int]:
    server = f"{os.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
    url = f"http://{server}/dualtrain/meeting-point"
    if world.rank == 0:
        host, port = _reserve(world.single_host)
        urllib.request.urlopen(urllib.request.Request(url, f"{host} {port}".encode(), method="PUT"), timeout=30).close()
        return host, port
    deadline = time.monotonic() + timeout
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                host, port = answer.read().decode().split()
                return host, int(port)
        except urllib.error.URLError as error:
            missing = isinstance(error, urllib.error.HTTPError) and error.code == 404
            if not missing or time.monotonic() > deadline:
                raise UserError(
                    f"rank 0 left no address at horovodrun's server {server} within {timeout:g} s ({error}): "
                    "check that all processes were started"
                ) from error
            time.sleep(0.02)
