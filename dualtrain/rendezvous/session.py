"""Agree on a name for one attempt of a job, in a store that outlives attempts.

torchrun's agents keep their store when they restart the workers, with all keys of the attempt that failed. Restart counts
cannot identify an attempt, since each agent counts its own restarts. So the ranks agree on a random name, and prefix all of
their later keys with it:

1. Each rank but rank 0 writes a random number and its world size.
2. Rank 0 draws the name, and writes it as the answer to every number that was written with its own world size.
3. A rank that reads the answer to its own number confirms the name.
4. When all ranks have confirmed the name, rank 0 marks it as complete.

Rank 0 may also answer numbers that a failed attempt left in the store. Processes of that attempt normally do not run any
more. If one reads the answer, two processes join as the same rank, which is an error.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from dualtrain.errors import UserError
from dualtrain.rendezvous.key_value_store import KeyValueStore

_POLL_SECONDS = 0.01
_OLDER = (
    "a process of a failed attempt still runs, or two processes were started as this rank: end them, and start the job "
    "again"
)


def agree_on_session(store: KeyValueStore, rank: int, size: int, limit: tuple[float, float]) -> str:
    """Return a name that no other attempt has, the same on all ranks. Collective; blocks.

    Args:
        store: the same store on all ranks, with the same prefix.
        rank: this process's rank.
        size: the number of ranks. Rank 0 does not answer a process that gives a different size, since that process belongs
            to a different attempt.
        limit: the end of the wait for the other ranks, as two numbers: the seconds to show in messages, and the value of
            ``time.monotonic()`` at which the wait ends.

    Raises:
        UserError: a rank did not join in time, or another process has this rank.
    """
    if rank == 0:
        return _lead(store, size, limit)
    number = secrets.token_hex(16)
    session = ""

    def try_to_join() -> bool:
        nonlocal session
        if store.check([f"answer/{rank}/{number}"]):
            # The answer changes if a later process answers as rank 0. Only one of the names will be marked as complete.
            named = _read(store, f"answer/{rank}/{number}")
            if named != session:
                session = named
                if store.add(f"joined/{session}/{rank}", 1) > 1:
                    raise UserError(f"rank {rank} of {size} has joined already: {_OLDER}")
        elif not store.check([f"come/{rank}"]) or _read(store, f"come/{rank}") != f"{number} {size}":
            store.set(f"come/{rank}", f"{number} {size}")
        return bool(session) and store.check([f"complete/{session}"])

    def describe_missing() -> str:
        others = range(1, size) if session else ()  # without an answer of rank 0, the other ranks' progress is unknown
        late = next((other for other in others if not store.check([f"joined/{session}/{other}"])), None)
        return f"rank 0 of {size} did not answer rank {rank}" if late is None else f"rank {late} of {size} did not join"

    _await(try_to_join, limit, describe_missing)
    return session


def _lead(store: KeyValueStore, size: int, limit: tuple[float, float]) -> str:
    """Do rank 0's part of :func:`agree_on_session`."""
    session, turn = secrets.token_hex(16), store.add("rank 0", 1)
    missing, answered = list(range(1, size)), dict[int, str]()

    def try_to_complete() -> bool:
        if store.add("rank 0", 0) != turn:
            raise UserError(f"another process is rank 0 of {size} now: {_OLDER}")
        for rank in list(missing):
            if store.check([f"come/{rank}"]):
                number, its_size = _read(store, f"come/{rank}").split()
                if its_size == str(size) and answered.get(rank) != number:
                    answered[rank] = number
                    store.set(f"answer/{rank}/{number}", session)
            if store.check([f"joined/{session}/{rank}"]):
                missing.remove(rank)
        return not missing

    _await(try_to_complete, limit, lambda: f"rank {missing[0]} of {size} did not join")
    store.set(f"complete/{session}", "")
    return session


def _await(condition: Callable[[], bool], limit: tuple[float, float], what: Callable[[], str]) -> None:
    """Call ``condition`` until it is true. Raises UserError at the end of ``limit``."""
    seconds, deadline = limit
    while not condition():
        if time.monotonic() > deadline:
            raise UserError(f"{what()} within {seconds:g} s: check that all processes were started, each with its own rank")
        time.sleep(_POLL_SECONDS)


def _read(store: KeyValueStore, key: str) -> str:
    return store.get(key).decode()
