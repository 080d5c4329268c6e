"""Address and secret of the job's store (a key-value server, ``store.py``), and the processes' connections to it.

If the launcher gives no address, rank 0 listens on a free port and sends its address to the others: by MPI (mpi4py) under
``mpirun`` and ``mpiexec``, through horovodrun's key-value server under ``horovodrun --gloo``.
"""

from __future__ import annotations

import atexit
import errno
import os
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

from dualtrain.errors import UserError
from dualtrain.launchers import World
from dualtrain.processes import start_thread
from dualtrain.rendezvous.horovodrun_server import agree_on_prefix, get, put, server_address
from dualtrain.rendezvous.hosts import address, identity, is_loopback
from dualtrain.rendezvous.left_over import refuse_left_over
from dualtrain.rendezvous.store import Store, StoreServer, dial, listen, serve

#: Sockets that :func:`reserve` opened and on which no store is served yet, by (host, port).
_RESERVED: dict[tuple[str, int], socket.socket] = {}
#: The stores that this process has joined, by (host, port, name of the world, size of the world). The name is empty, and
#: the size 0, if the ranks' parent process serves the store.
_JOINED: dict[tuple[str, int, str, int], Store] = {}
#: The module mpi4py.MPI, if this module has initialized MPI.
_initialized: list[Any] = []


def meeting_point(world: World, timeout: float) -> World:
    """Return ``world`` with the address and secret of its store, if the launcher offers a way to exchange them.

    Return ``world`` unchanged if it has an address or a name, if it has one process, or if the launcher offers no such way.
    Otherwise collective and blocking.

    Raises:
        UserError: mpi4py is missing or was built for another MPI, a rank did not join in time, mpirun has ended or has not
            started this process, or horovodrun's server does not answer.
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
    """Join the job's store at ``world``'s rendezvous. A second call for the same store returns the first connection.

    Blocks while it connects: failed attempts are repeated for ``timeout`` seconds at most. If rank 0 serves the store, the
    call does not block on rank 0.

    Raises:
        UserError: the store cannot be reached or refuses this rank, or rank 0 cannot serve it.
    """
    assert world.rendezvous is not None
    host, port = world.rendezvous
    # If the ranks' parent process serves the store, all worlds of the job share it. Otherwise rank 0 of each world serves
    # a store of its own.
    key = host, port, *(("", 0) if world.served else (world.name, world.size))
    if key not in _JOINED:
        if world.rank == 0 and not world.served:
            _JOINED[key] = _serve(world, host, port)
        else:
            ports = range(port, port + world.ports)
            _JOINED[key] = dial(host, ports, world.rank, world.size, _secret(world), timeout, world.name)
    return _JOINED[key]


def _secret(world: World) -> str:
    """Return the secret of this world's store. If rank 0 serves the store, each world has a different secret."""
    return world.secret if world.served else f"{world.secret} {world.name}"


def leave(world: World) -> None:
    """Close the stores that :func:`join` returned for the rendezvous of ``world``: call this if it could not start."""
    for key in [key for key in _JOINED if key[:2] == world.rendezvous]:
        _JOINED.pop(key).close()


def _serve(world: World, host: str, port: int) -> StoreServer:
    """Serve the store of ``world``, on rank 0. Raises UserError if this process cannot listen at the address."""
    if (host, port) in _RESERVED:
        return serve(_RESERVED.pop((host, port)), world.size, _secret(world), world.name)
    # Many hosts resolve their own name to a loopback address, which other hosts cannot reach.
    unreachable = not world.single_host and host != "localhost" and not host.startswith("127.") and is_loopback(host)
    try:
        listening = listen(address() if unreachable else host, range(port, port + world.ports), world.size)
        return serve(listening, world.size, _secret(world), world.name)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} on {host} is in use by another program, or by another rank 0: set MASTER_PORT to a free one, "
                "and start each rank once"
            ) from error
        unknown_name = isinstance(error, socket.gaierror)  # its number is not an errno
        reason = error.strerror if unknown_name else os.strerror(error.errno or 0)
        if error.errno == errno.EACCES:
            raise UserError(
                f"rank 0 may not listen at port {port} ({reason}): set MASTER_PORT to a free one above 1023"
            ) from error
        raise UserError(
            f"rank 0 cannot listen at {host}:{port} ({reason}): MASTER_ADDR must be an address of the host that "
            "rank 0 runs on"
        ) from error


def world_of(comm: Any, world: World) -> World:
    """Return the world of an mpi4py communicator's processes. Collective over the communicator; blocks."""
    result = replace(world, rank=comm.Get_rank(), size=comm.Get_size(), name=f"comm{comm.Get_size()}")
    if result.size == 1:
        return replace(result, name="")
    rendezvous, secret = _share(result, comm.bcast, comm.allgather)
    return replace(result, rendezvous=rendezvous, secret=secret)


def parts_of(comm: Any, parent: Any = None) -> tuple[list[int], list[list[int]]]:
    """Return the processes of this process's ``comm``, and those of every ``comm`` in ``parent``, as ranks of ``parent``.

    The processes of ``parent`` may pass different communicators as ``comm``, for example the parts that ``Split()`` makes.
    The second result has one sorted list for each different set of processes. ``comm`` and ``parent`` are mpi4py
    communicators; ``parent`` is ``MPI.COMM_WORLD`` by default. Collective over ``parent``; blocks.

    Raises:
        ValueError: on every rank, if ``comm`` is no valid communicator on some ranks, such as ``MPI.COMM_NULL``.
    """
    if parent is None:
        from mpi4py import MPI

        parent = MPI.COMM_WORLD
    try:
        mine = sorted(comm.allgather(parent.Get_rank()))
    except Exception:  # mpi4py raises errors of several types
        mine = []
    of_ranks = parent.allgather(mine)
    if [] in of_ranks:
        raise ValueError(
            f"the communicator of a process set is not valid on rank {of_ranks.index([])}: give every rank a communicator, "
            "for example one of Split()"
        )
    parts: list[list[int]] = []
    for ranks in of_ranks:
        if ranks not in parts:
            parts.append(ranks)
    return mine, parts


#: horovodrun's servers (host:port) through which :func:`names_by_server` has already gathered names.
_COMPARED: set[str] = set()
#: The (host, port) of a store, and its secret.
Meeting = tuple[tuple[str, int], str]
Result = TypeVar("Result")
_REFUSAL_SECONDS = 3.0  # extra time in which all ranks can read why the job does not start


@cache
def _meet_by_mpi(world: World, timeout: float) -> Meeting:
    """Get the store's address from rank 0 by MPI. Collective; blocks. Raises UserError: see :func:`meeting_point`."""
    refuse_left_over(world, os.environ)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"{world.launcher} started {world.size} ranks, and without mpi4py ({error}) they cannot exchange an address: "
            "pip install mpi4py, or use --backend horovod"
        ) from error
    if not MPI.Is_initialized():  # the program set mpi4py.rc.initialize = False, because Horovod initializes MPI
        MPI.Init_thread()
        _initialized.append(MPI)
    comm = MPI.COMM_WORLD
    if (comm.Get_rank(), comm.Get_size()) != (world.rank, world.size):
        raise UserError(
            f"mpi4py is rank {comm.Get_rank()} of {comm.Get_size()}, but {world.launcher} started rank {world.rank} of "
            f"{world.size}: mpi4py was built for another MPI; rebuild it (pip install --no-binary mpi4py mpi4py)"
        )
    what = f"rank {world.rank} of {world.size} did not meet the others by MPI"
    return within(timeout, partial(_share, world, comm.bcast, comm.allgather), what)


@atexit.register  # at import: exit handlers that the program registers later run before this one, and may use MPI
def _finalize() -> None:
    """Finalize MPI if this module has initialized it, because mpirun otherwise reports a failure of this process."""
    for mpi in _initialized:
        if not mpi.Is_finalized():
            mpi.Finalize()


def within(timeout: float, call: Callable[[], Result], what: str) -> Result:
    """Return the result of ``call``, which waits for all ranks and has no timeout. Blocks for ``timeout`` seconds at most.

    Raises:
        UserError: the call took longer; it continues in a daemon thread.
        Exception: whatever ``call`` raises in this time.
    """
    ended: Future[Result] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)

    start_thread(run, "dualtrain-start")
    try:
        return ended.result(timeout)
    except TimeoutError:
        if ended.done():  # the call has raised this error, or has just ended
            return ended.result()
        raise UserError(
            f"{what} within {timeout:g} s: check that all processes were started, and give the same --backend to all"
        ) from None


def _share(world: World, bcast: Callable[..., Any], allgather: Callable[..., Any]) -> Meeting:
    """Reserve the store's address on rank 0; return it with the secret on every rank. Collective; blocks."""
    hosts = allgather(identity())
    meeting = reserve(single_host=len(set(hosts)) == 1) if world.rank == 0 else None
    (host, port), secret = bcast(meeting, root=0)
    return (str(host), int(port)), str(secret)


def reserve(single_host: bool) -> Meeting:
    """Listen on a free port, on which this process will serve its job's store; return the address and a new secret."""
    host = "127.0.0.1" if single_host else address()
    listening = listen(host, [0], backlog=128)
    where = host, int(listening.getsockname()[1])
    _RESERVED[where] = listening
    return where, secrets.token_hex(32)


def _meet_by_server(world: World, timeout: float) -> Meeting:
    """Get the store's address from rank 0 through horovodrun's server. Blocks; raises as :func:`meeting_point`."""
    deadline = time.monotonic() + timeout
    prefix = agree_on_prefix(world, deadline)
    if world.rank == 0:
        (host, port), secret = _reserved_for(world)
        put(world, f"{prefix}-meeting-point", f"{host} {port} {secret}")
        return (host, port), secret
    answer = None if prefix is None else get(world, f"{prefix}-meeting-point", deadline + _REFUSAL_SECONDS)
    if answer is None:
        raise UserError(
            f"rank 0 put no address on horovodrun's server within {timeout:g} s: check that all processes were started"
        )
    host, number, secret = answer.split()
    return (host, int(number)), secret


@cache
def _reserved_for(world: World) -> Meeting:
    return reserve(world.single_host)


def names_by_server(world: World, timeout: float, name: str) -> list[str]:
    """Gather the ``name`` of every rank's backend in rank order, through horovodrun's server. Collective; blocks.

    If the names differ, the ranks exit with an error, and horovodrun ends all processes when the first one exits. So this
    function then also waits, for some seconds at most, until all ranks have read the names.

    Return an empty list, without waiting, in any of these cases: the launcher is not ``horovodrun --gloo``, or is elastic;
    the world has one process, or only some of the job's processes; this process has already gathered names through this
    server.

    Raises:
        UserError: a rank did not join in time, or the server does not answer.
    """
    if world.launcher != "horovodrun --gloo" or world.name or world.size == 1 or os.environ.get("HOROVOD_ELASTIC") == "1":
        return []
    if server_address() in _COMPARED:
        return []
    names = _exchange_by_server(world, timeout, "backend", name)
    _COMPARED.add(server_address())
    if len(set(names)) > 1:
        with suppress(UserError):
            _exchange_by_server(world, _REFUSAL_SECONDS, "refused", "-")
    return names


def _exchange_by_server(world: World, timeout: float, key: str, value: str) -> list[str]:
    """Gather every rank's ``value`` (without spaces) in rank order. Collective; blocks.

    Raises:
        UserError: a rank did not join in time, or the server does not answer.
    """
    deadline = time.monotonic() + timeout
    prefix = agree_on_prefix(world, deadline)
    gathered = ["missing", "0"] if prefix is None else _gather_by_server(world, deadline, f"{prefix}-{key}", value)
    if gathered[0] == "missing":
        raise UserError(
            f"rank {gathered[1]} of {world.size} did not join within {timeout:g} s: check that all processes were started"
        )
    return gathered


def _gather_by_server(world: World, deadline: float, key: str, value: str) -> list[str]:
    """Return every rank's ``value``; or "missing" and the number of a rank that put no value by ``deadline``."""
    put(world, f"{key}-{world.rank}", value)
    if world.rank == 0:  # read all values, and put the list on the server
        values = [get(world, f"{key}-{rank}", deadline) for rank in range(world.size)]
        missing = [rank for rank, each in enumerate(values) if each is None]
        # The other ranks wait for ``key``, so set it even if a rank is missing: its value then names the missing rank.
        put(world, key, " ".join(each or "-" for each in values) if not missing else f"missing {missing[0]}")
    return (get(world, key, deadline + _REFUSAL_SECONDS) or "missing 0").split()
