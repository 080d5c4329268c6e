"""Where each rank runs: the ranks exchange the identities of their hosts through the job's store."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Protocol

from dualtrain.errors import UserError
from dualtrain.launchers import World
from dualtrain.rendezvous.hosts import identity
from dualtrain.rendezvous.reachability import check_all_reachable


class KeyValueStore(Protocol):
    """The methods used here of torch.distributed's stores. Waits that time out raise RuntimeError."""

    def set(self, key: str, value: str) -> Any:
        """Set ``key``."""
        ...

    def get(self, key: str) -> bytes:
        """Value of ``key``; blocks until it is set."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to the number ``key``, from 0, and return the sum."""
        ...

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Block until all ``keys`` are set."""
        ...


def place_ranks(store: KeyValueStore, world: World, timeout: float, deadline: float, obstacle: str | None = None) -> World:
    """``world`` with local and cross ranks that follow from the hosts of all ranks. Collective; blocks.

    Args:
        store: the job's store, new for this world.
        world: this process's place.
        timeout: seconds that the wait for the others lasts in all, for messages.
        deadline: end of that wait, as ``time.monotonic()`` gives it.
        obstacle: see :func:`dualtrain.rendezvous.reachability.check_all_reachable`.

    Raises:
        UserError: a process did not come in time, two hosts cannot reach each other, or a host has an ``obstacle``.
    """
    store.set(f"host/{world.rank}", str(identity()))
    hosts = []
    for rank in range(world.size):
        try:
            store.wait([f"host/{rank}"], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            hosts.append(store.get(f"host/{rank}"))
        except RuntimeError as error:
            raise UserError(
                f"rank {rank} of {world.size} did not come within {timeout:g} s: check that all processes were started, "
                "each with its own rank"
            ) from error
    world = world.placed(world.rank, hosts)
    check_all_reachable(world, hosts, store.set, lambda key: bytes(store.get(key)).decode(), obstacle)
    return world
