"""horovodrun's key-value server, through which ranks exchange values before they are connected.

The server keeps its values until horovodrun ends. If horovodrun starts a shell, each rank may run several programs, one
after another, at the same address. So the ranks of one program agree on a random name, and prefix their later keys with it:

1. Each rank but rank 0 writes a random number.
2. Rank 0 writes the name as the answer to every number that it reads, even if an earlier program has written the number.
3. A rank that reads the answer to its own number confirms the name. Rank 0 waits for all ranks' confirmations.
"""

from __future__ import annotations

import os
import secrets
import time
import urllib.error
import urllib.request
from functools import cache

from dualtrain.errors import UserError
from dualtrain.launchers import World

_PAUSE_SECONDS = 0.02  # between two requests for a value that is not set
#: Opens a URL without a proxy: a proxy cannot reach the job's own server, and must not see its secret.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
#: On rank 0: for each world, the ranks that have not confirmed the name, each with its last number that was answered.
_unconfirmed: dict[World, dict[int, str | None]] = {}
#: On another rank: for each world, the name that this rank has confirmed.
_confirmed: dict[World, str] = {}


def server_address() -> str:
    """Return the address of horovodrun's server: host:port."""
    return f"{os.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}"


def agree_on_prefix(world: World, deadline: float) -> str | None:
    """Return a prefix for keys; only this program's ranks know it. Collective; blocks until ``deadline`` at most.

    At the deadline, rank 0 returns the prefix even if some ranks have not confirmed it, and another rank that has not got
    the prefix returns ``None``. A later call for the same world continues, and gives the same prefix.

    Raises:
        UserError: the server does not answer.
    """
    own = _number(world)
    if world.rank != 0:
        if world not in _confirmed:
            put(world, f"come-{world.rank}", own)
            name = get(world, f"answer-{own}", deadline)
            if name is None:
                return None
            put(world, f"{name}-joined-{world.rank}", "-")
            # Don't read the answer again: rank 0 overwrites it if it makes a name for another world.
            _confirmed[world] = name
        return _confirmed[world]
    waiting = _unconfirmed.setdefault(world, dict.fromkeys(range(1, world.size)))
    while True:
        for rank in list(waiting):
            number = get(world, f"come-{rank}")
            if number is not None and number != waiting[rank]:
                put(world, f"answer-{number}", own)
                waiting[rank] = number
            if get(world, f"{own}-joined-{rank}") is not None:
                del waiting[rank]
        if not waiting or time.monotonic() > deadline:
            return own
        time.sleep(_PAUSE_SECONDS)


@cache
def _number(world: World) -> str:
    """Return this process's random number for ``world``. The number of rank 0 is the name."""
    return secrets.token_hex(16)


def put(world: World, key: str, value: str) -> None:
    """Set ``key``. Raises UserError if the server does not answer."""
    request = urllib.request.Request(f"http://{server_address()}/dualtrain/{key}", value.encode(), method="PUT")
    try:
        _open(request, timeout=30).close()
    except OSError as error:
        raise _no_answer(world, error) from error


def get(world: World, key: str, deadline: float = 0.0) -> str | None:
    """Return the value of ``key``, or ``None`` if it is not set by ``deadline``. Raises UserError as :func:`put`.

    ``deadline`` is a value of ``time.monotonic()``. Without it, the function does not wait for the key.
    """
    while True:
        try:
            with _open(f"http://{server_address()}/dualtrain/{key}", timeout=30) as answer:
                return str(answer.read().decode())
        except OSError as error:
            if not isinstance(error, urllib.error.HTTPError) or error.code != 404:
                raise _no_answer(world, error) from error
        if time.monotonic() > deadline:
            return None
        time.sleep(_PAUSE_SECONDS)


def _no_answer(world: World, error: OSError) -> UserError:
    address = server_address()
    return UserError(f"horovodrun's server {address} does not answer rank {world.rank} ({error}): check that it runs")
