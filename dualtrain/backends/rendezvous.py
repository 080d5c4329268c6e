"""Where torch's processes meet when their launcher names no address: told to each other through what it offers.

``mpirun`` and ``mpiexec`` offer MPI (by mpi4py), ``horovodrun --gloo`` its own key-value server. Rank 0 listens on a
free port that the others are told of.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

from dualtrain.backends.hosts import address, identity, is_loopback
from dualtrain.backends.store import Store, StoreServer, dial, listen, serve
from dualtrain.errors import UserError
from dualtrain.launchers import World

#: Sockets that rank 0 listens on already, until the store takes them.
_RESERVED: dict[tuple[str, int], socket.socket] = {}
#: The stores that this process has joined, by address, and name and size of the world that they are for.
_JOINED: dict[tuple[str, int, str, int], Store] = {}


def meeting_point(world: World, timeout: float) -> World:
    """``world`` with an address to meet at, if there is any way to agree on one. Collective where there is none yet.

    Raises:
        UserError: mpi4py is missing or does not see the launcher's world, or the launcher's server does not answer.
    """
    if world.rendezvous is not None or world.size == 1 or world.name:
        return world
    if world.launcher.startswith("mpi"):
        rendezvous, secret = _meet_by_mpi(world, timeout)
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
    # The parent of spawned ranks serves all of their worlds; else each world of a few ranks has its own server.
    spawned = world.launcher == "spawn"
    place = host, port, *(("", 0) if spawned else (world.name, world.size))
    if place not in _JOINED:
        if world.rank == 0 and not spawned:
            _JOINED[place] = _serve(world, host, port)
        else:
            ports = range(port, port + world.ports)
            _JOINED[place] = dial(host, ports, world.rank, _secret(world), timeout, world.name)
    return _JOINED[place]


def _secret(world: World) -> str:
    """What the ranks of this world know, and those of the job's other worlds do not use."""
    return world.secret if world.launcher == "spawn" else f"{world.secret} {world.name}"


def leave(world: World) -> None:
    """Ends what :func:`join` began, for a world that has not come about."""
    for place in [place for place in _JOINED if place[:2] == world.rendezvous]:
        _JOINED.pop(place).close()


def _serve(world: World, host: str, port: int) -> StoreServer:
    if (host, port) in _RESERVED:
        return serve(_RESERVED.pop((host, port)), world.size, _secret(world), world.name)
    # Many a host knows its own name by a loopback address, where nobody else would find it.
    misled = not world.single_host and host != "localhost" and not host.startswith("127.") and is_loopback(host)
    try:
        listening = listen(address() if misled else host, range(port, port + world.ports), world.size)
        return serve(listening, world.size, _secret(world), world.name)
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


#: The servers by which this process has compared names.
_COMPARED: set[str] = set()
#: A (host, port) and a secret.
Meeting = tuple[tuple[str, int], str]
Result = TypeVar("Result")
_REFUSAL_SECONDS = 3.0  # that a rank waits for the others to have read what refuses them


@cache
def _meet_by_mpi(world: World, timeout: float) -> Meeting:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"{world.launcher} started {world.size} ranks, and without mpi4py ({error}) torch has no address to meet at: "
            "pip install mpi4py, or use --backend horovod"
        ) from error
    comm = MPI.COMM_WORLD
    if (comm.Get_rank(), comm.Get_size()) != (world.rank, world.size):
        raise UserError(
            f"mpi4py is rank {comm.Get_rank()} of {comm.Get_size()}, but {world.launcher} started rank {world.rank} of "
            f"{world.size}: mpi4py was built for another MPI; rebuild it (pip install --no-binary mpi4py mpi4py)"
        )
    what = f"rank {world.rank} of {world.size} did not meet the others by MPI"
    return within(timeout, partial(_share, world, comm.bcast, comm.allgather), what)


def within(timeout: float, call: Callable[[], Result], what: str) -> Result:
    """The result of ``call``, which waits for all ranks without a limit of its own. Blocks for ``timeout`` seconds at most.

    Raises:
        UserError: it took longer; the call goes on in a thread that does not keep the process from ending.
    """
    ended: Future[Result] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name="dualtrain-start", daemon=True).start()
    try:
        return ended.result(timeout)
    except TimeoutError:
        if ended.done():
            raise  # the call's own
        raise UserError(
            f"{what} within {timeout:g} s: check that all processes were started, and give the same --backend to all"
        ) from None


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


#: A proxy for the world outside would be asked for the job's own server, and told its secret.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


@cache
def _meet_by_server(world: World, timeout: float) -> Meeting:
    if world.rank == 0:
        (host, port), secret = _reserve(world.single_host)
        _tell_server(world, "meeting-point", f"{host} {port} {secret}")
        return (host, port), secret
    deadline = time.monotonic() + timeout
    words = _ask_server(world, "meeting-point", deadline)
    if words is None:
        raise UserError(
            f"rank 0 left no address at horovodrun's server within {timeout:g} s: check that all processes were started"
        )
    host, number, secret = words.split()
    return (host, int(number)), secret


def names_by_server(world: World, timeout: float, name: str) -> list[str]:
    """Every rank's ``name``, in rank order, by horovodrun's server. Collective; blocks.

    If the names are not all the same, some seconds longer: horovodrun ends all processes when the first one ends. An
    empty list without such a server, where ranks may change, and for all calls of a process but the first.

    Raises:
        UserError: a rank did not come in time, or the server does not answer.
    """
    if world.launcher != "horovodrun --gloo" or world.name or world.size == 1 or os.environ.get("HOROVOD_ELASTIC") == "1":
        return []
    if _server() in _COMPARED:
        return []
    names = _exchange_by_server(world, timeout, "backend", name)
    _COMPARED.add(_server())
    if len(set(names)) > 1:
        with suppress(UserError):
            _exchange_by_server(world, _REFUSAL_SECONDS, "refused", "-")
    return names


def _exchange_by_server(world: World, timeout: float, key: str, value: str) -> list[str]:
    """Every rank's ``value``, a word: rank 0 reads all of them, and leaves the list to the others."""
    deadline = time.monotonic() + timeout
    _tell_server(world, f"{key}-{world.rank}", value)
    if world.rank == 0:
        values = [_ask_server(world, f"{key}-{rank}", deadline) for rank in range(world.size)]
        missing = [rank for rank, each in enumerate(values) if each is None]
        # The others wait for the list: whoever is missing is named in it.
        _tell_server(world, key, " ".join(each or "-" for each in values) if not missing else f"missing {missing[0]}")
    words = (_ask_server(world, key, deadline + _REFUSAL_SECONDS) or "missing 0").split()
    if words[0] == "missing":
        raise UserError(
            f"rank {words[1]} of {world.size} did not come within {timeout:g} s: check that all processes were started"
        )
    return words


def _server() -> str:
    return f"{os.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}"


def _tell_server(world: World, key: str, value: str) -> None:
    request = urllib.request.Request(f"http://{_server()}/dualtrain/{key}", value.encode(), method="PUT")
    try:
        _open(request, timeout=30).close()
    except OSError as error:
        raise _no_answer(world, error) from error


def _ask_server(world: World, key: str, deadline: float) -> str | None:
    """The value of ``key``, or None if nobody has set it by ``deadline``."""
    while True:
        try:
            with _open(f"http://{_server()}/dualtrain/{key}", timeout=30) as answer:
                return str(answer.read().decode())
        except OSError as error:
            if not isinstance(error, urllib.error.HTTPError) or error.code != 404:
                raise _no_answer(world, error) from error
        if time.monotonic() > deadline:
            return None
        time.sleep(0.02)


def _no_answer(world: World, error: OSError) -> UserError:
    return UserError(f"horovodrun's server {_server()} does not answer rank {world.rank} ({error}): is it still there?")
