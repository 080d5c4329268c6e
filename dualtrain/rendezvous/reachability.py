"""Check that the hosts of a job can reach each other, before Gloo or Horovod connects them.

Gloo and Horovod make their own connections between all hosts. If a firewall or a wrong interface separates two hosts, these
libraries block for minutes or end the process, and do not report which hosts could not connect.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

from dualtrain.errors import UserError
from dualtrain.launchers import World
from dualtrain.rendezvous.hosts import listening_address

_SECONDS = 10.0  # for one connection: a host that drops packets never answers


def check_all_reachable(
    world: World,
    hosts: Sequence[object],
    put: Callable[[str, str], object],
    get: Callable[[str], str],
    obstacle: str | None,
) -> None:
    """Connect one rank of each host to one rank of every other host. Collective; blocks. Does nothing if there is one host.

    Args:
        world: this process's rank and size.
        hosts: the host of each rank.
        put: stores a value under a key in the job's store.
        get: waits for a key and returns its value. Raises RuntimeError if the key is not set in time, and UserError if the
            process that serves the store has ended.
        obstacle: why this rank's backend cannot use this host together with others, or ``None``; the same for all ranks of
            a host. It counts as a failure of this host, but only if the job has several hosts.

    Raises:
        UserError: on every rank, if a host cannot reach another host or has an ``obstacle``. The message is the failure of
            the first such host. After rank 0 has exited, it is the failure that this rank itself found, or else the error
            of ``get``. Also raised if this host cannot listen at its address, or if a host did not report in time.
    """
    leaders = [list(hosts).index(host) for host in dict.fromkeys(hosts)]
    if len(leaders) == 1:
        return
    if world.rank not in leaders:
        _raise_first_failure(leaders, get)
        return
    with _listen(listening_address(world), len(leaders)) as server:
        put(f"reach/at/{world.rank}", f"{server.getsockname()[0]} {server.getsockname()[1]}")
        tries = (_try_to_reach(world.rank, other, get) for other in leaders if other != world.rank)
        own_failure = obstacle or next(filter(None, tries), "")  # stop at the first failure
        put(f"reach/result/{world.rank}", own_failure)
        _raise_first_failure(leaders, get, own_failure)  # the server stays open until all have tried


def _listen(host: str, backlog: int) -> socket.socket:
    try:
        return socket.create_server((host, 0), backlog=backlog)
    except OSError as error:
        raise UserError(f"{socket.gethostname()} cannot listen at its own address {host} ({error})") from error


def _try_to_reach(rank: int, other: int, get: Callable[[str], str]) -> str | None:
    """Return the reason why ``rank`` cannot connect to the host of rank ``other``; ``None`` if it can."""
    try:
        host, port = get(f"reach/at/{other}").split()
    except RuntimeError:
        return f"rank {other} did not send its host's address: see rank {other}'s message"
    try:
        socket.create_connection((host, int(port)), _SECONDS).close()
    except OSError as error:
        if host.startswith("127."):  # ``hosts.address`` found no other address
            return (
                f"rank {rank} on {socket.gethostname()} cannot reach the host of rank {other}, whose only IPv4 address is "
                f"{host}: give all hosts IPv4 addresses at which they reach each other; IPv6 is not enough"
            )
        reason = os.strerror(error.errno) if error.errno else f"no answer within {_SECONDS:g} s"
        return (
            f"rank {rank} on {socket.gethostname()} cannot reach the host of rank {other} at {host}:{port} ({reason}): "
            "each host of a job must be able to connect to any port of the others; open the firewall between them, or "
            "choose the interface that connects them (GLOO_SOCKET_IFNAME)"
        )
    return None


def _raise_first_failure(leaders: Sequence[int], get: Callable[[str], str], own_failure: str = "") -> None:
    """Wait for the results of all hosts. Raise UserError with the first failure, if a host has one or does not report."""
    try:
        results = [get(f"reach/result/{leader}") for leader in leaders]
    except UserError as error:  # the store is gone: rank 0, which serves it, has read all results and has exited
        if own_failure:
            raise UserError(own_failure) from error
        raise
    except RuntimeError as error:
        raise UserError(
            "not every host has reported in time whether it reaches the others: see the other ranks' messages"
        ) from error
    for result in results:
        if result:
            raise UserError(result)
