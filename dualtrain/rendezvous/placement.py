"""Find out on which host each rank runs: the ranks exchange the identities of their hosts through the job's store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from dualtrain.differences import refuse_unlike
from dualtrain.errors import UserError
from dualtrain.launchers import World
from dualtrain.rendezvous.hosts import identity
from dualtrain.rendezvous.key_value_store import KeyValueStore
from dualtrain.rendezvous.reachability import check_all_reachable

SAME_BACKEND = "give the same --backend to all"
_REFUSAL_SECONDS = 3.0  # time for the other ranks to read all backends before the store's server exits


def place_ranks(
    store: KeyValueStore, world: World, limit: tuple[float, float], backend: str, obstacle: str | None
) -> World:
    """Return ``world`` with local and cross ranks that follow from the hosts of all ranks. Collective; blocks.

    Also checks that all ranks use the same backend, and that their hosts can reach each other.

    Args:
        store: the job's store, without keys of earlier worlds.
        world: this process's rank and size.
        limit: the end of the wait for the other ranks to join, as two numbers: the seconds to show in messages, and the
            value of ``time.monotonic()`` at which the wait ends.
        backend: name of the backend that this rank will use.
        obstacle: see :func:`dualtrain.rendezvous.reachability.check_all_reachable`.

    Raises:
        UserError: a process did not join in time or has a different ``backend``; or as :func:`check_all_reachable`, for
            example because two hosts cannot reach each other.
    """
    timeout, deadline = limit
    store.set(f"host/{world.rank}", f"{identity()} {backend}")
    hosts, backends = [], []
    for rank in range(world.size):
        try:
            store.wait([f"host/{rank}"], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            host, its_backend = store.get(f"host/{rank}").decode().split()
        except RuntimeError as error:
            raise UserError(
                f"rank {rank} of {world.size} did not join within {timeout:g} s: check that all processes were started, "
                "each with its own rank"
            ) from error
        hosts.append(host)
        backends.append(its_backend)
    _refuse_other_backends(store, world, backends)
    world = world.placed(world.rank, hosts)
    check_all_reachable(world, hosts, store.set, lambda key: bytes(store.get(key)).decode(), obstacle)
    return world


def _refuse_other_backends(store: KeyValueStore, world: World, backends: Sequence[str]) -> None:
    """Check that all ranks have the same backend.

    Raises:
        UserError: the backends differ. This rank first waits, for 3 s at most, until all ranks have read the backends,
            because the store ends with the process that serves it.
    """
    try:
        refuse_unlike("backend", backends, SAME_BACKEND)
    except UserError:
        with suppress(RuntimeError, UserError):
            store.set(f"refused/{world.rank}", "")
            store.wait([f"refused/{rank}" for rank in range(world.size)], timedelta(seconds=_REFUSAL_SECONDS))
        raise
