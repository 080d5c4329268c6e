"""The channels of a rank: one backend for the calls of each process set, and one for the gradients of each optimizer.

If a channel has two ranks, both on one host, gradients on the CPU are summed through shared memory, unless the user
requests Gloo or the ranks cannot map the same memory. The sums have the same bits as Gloo's, because a + b = b + a. With
more ranks the bits may differ, so shared memory is used only if the user requests it.

Gloo has threads that do the work of an operation. In shared memory, the ranks' own threads do this work. So while a rank
waits for one operation, it advances the operations of all its channels: other ranks may be waiting for any of them.

A joined rank is a rank that has called ``join``, because it has no more data.
"""

from __future__ import annotations

import gc
import itertools
import queue
import weakref
from collections import Counter
from typing import Generic, Protocol, TypeVar

from dualtrain.backends import Backend
from dualtrain.backends.shm import SharedMemory, SharedMemoryBackend, UnsharedError
from dualtrain.horovod_variables import log

_MANY_CHANNELS = 16


class Reducer(Protocol):
    """A reducer of any kind. The engine informs it of joins."""

    base_name: str
    channel_name: str
    #: Number among the reducers of this kind and base name in this world, in the order in which this process made them.
    number: int
    closed: bool

    def use_channel(self, channel_name: str) -> None:
        """Use this channel in the current world."""

    def begin_world(self) -> None:
        """Prepare for a new world. All ranks must have added and unfrozen the same parameters before ``init``."""


class Caller(Reducer, Protocol):
    """A reducer that combines gradients by a grouped allreduce."""

    def abandon_call(self) -> None:
        """Discard the result of the call, if any, that this rank has made before it joined."""


class Exchanger(Reducer, Protocol):
    """A reducer that exchanges gradients without a request to rank 0 for each exchange."""

    exchanges: int
    announced: set[int]

    @property
    def exchanging(self) -> bool:
        """Return whether an exchange is in progress."""

    @property
    def needs_zeros(self) -> bool:
        """Return whether the ranks that have joined must take part in an exchange now."""

    @property
    def set_id(self) -> int:
        """The id of the reducer's process set."""

    @property
    def added(self) -> list[str]:
        """Return the names of the parameters that were added after the reducer got its channel name."""

    def adopt(self, added: list[str]) -> None:
        """Add the parameters that were added on other ranks. Raises HorovodInternalError if this rank lacks one of them."""

    def take_part(self, divide_by: str) -> None:
        """Send zeros for the next exchange, because this rank has joined; do not wait for the sums.

        If a backward pass on this rank has already begun the exchange, send its gradients instead, unless a rank discards
        the exchange.
        """

    @property
    def can_finish(self) -> bool:
        """Return whether :meth:`finish_exchange` would not wait for sums."""

    def finish_exchange(self) -> None:
        """End the exchange in which this rank takes part after ``join``, and discard its result. Blocks."""


R = TypeVar("R", bound=Reducer)


class Registry(Generic[R]):
    """The reducers of one kind. Only weak references are kept.

    An optimizer may outlive its world: ``shutdown`` and ``init`` may be called while the script keeps it.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[R]] = []  # in the order of their registration
        #: Base name → how many reducers were made in this world, or existed at its start.
        self._counts: Counter[str] = Counter()

    def register(self, reducer: R) -> int:
        """Register ``reducer``: the engine will inform it when ranks join. Return its ``number``."""
        self._references = [reference for reference in self._references if reference() is not None]
        self._references.append(weakref.ref(reducer))
        return self._next_number(reducer)

    def _next_number(self, reducer: R) -> int:
        self._counts[reducer.base_name] += 1
        return self._counts[reducer.base_name]

    def position(self, reducer: R) -> list[int]:
        """Return the reducer's ``number``, and the :meth:`count` of its base name."""
        return [reducer.number, self.count(reducer.base_name)]

    def count(self, base_name: str) -> int:
        """Return how many reducers of this base name were made in this world, or existed at its start."""
        return self._counts[base_name]

    def alive(self) -> list[R]:
        """Return the registered reducers that still exist, in the order of their registration."""
        return [one for reference in self._references if (one := reference()) is not None]

    def enter_world(self) -> None:
        """Number the reducers that still exist anew, in the order of their registration."""
        self._counts.clear()
        for one in self.alive():
            one.number = self._next_number(one)


class Reducers:
    """The reducers of this process's optimizers, and their channels and exchanges in this world."""

    def __init__(self) -> None:
        self.callers: Registry[Caller] = Registry()
        self.exchangers: Registry[Exchanger] = Registry()
        self._claimed: set[str] = set()  # names of the channels that reducers have, or had, in this world
        #: Channel name → names of the parameters that the other ranks have added, as of the last :meth:`skip`.
        self.added: dict[str, list[str]] = {}
        #: Channel name → number of the last exchange in which this rank took part. Kept when the reducer is freed.
        self.done: dict[str, int] = {}
        #: Exchanges whose results at least one rank discards, as pairs of a channel name and a number.
        self.discarded: set[tuple[str, int]] = set()
        #: Exchanges whose results this rank does not use, although it takes part in them.
        self.unused: set[tuple[str, int]] = set()

    def claim(self, base_name: str) -> str:
        """Claim a new channel for a reducer, and return its name: ``base_name`` and the lowest free number."""
        names = (f"{base_name}.{number}" for number in itertools.count(1))
        name = next(name for name in names if name not in self._claimed)
        self._claimed.add(name)
        return name

    def find(self, registry: Registry[R], channel_name: str, position: list[int]) -> R | None:
        """Return the reducer of a channel that other ranks use. Called while this rank has joined.

        If no reducer has the channel, give it to an open reducer that has the channel's base name, and no channel yet. Of
        several such reducers, choose the one that was made at the same point as on the rank that uses the channel. Return
        ``None`` if no reducer can be found, for example because the ranks have made different numbers of them.

        Args:
            registry: the reducers of the channel's kind.
            channel_name: the name of the channel.
            position: :meth:`Registry.position` of the reducer on the rank that uses the channel.
        """
        base, alive = channel_name.rpartition(".")[0], registry.alive()
        known = [one for one in alive if one.channel_name == channel_name]
        candidates = self._without_channel(registry, base)
        if len(candidates) > 1:
            candidates = [one for one in candidates if registry.position(one) == position]
        found = next(iter(known + candidates), None)
        # Don't claim the name if this rank has not made the reducer yet: that reducer will claim it itself.
        if found is not None or position[0] <= registry.count(base):
            self._claimed.add(channel_name)
        if found is not None and not known:
            found.use_channel(channel_name)
        return found

    def _without_channel(self, registry: Registry[R], base: str) -> list[R]:
        return [one for one in registry.alive() if not one.channel_name and one.base_name == base and not one.closed]

    def skip(self, channel_name: str, position: list[int], added: list[str]) -> bool:
        """Count a grouped call of the other ranks. Called while this rank has joined.

        The engine has contributed identity elements to the call. Return False if it is unknown which of this rank's
        reducers the call belongs to. For ``position``, see :meth:`find`. ``added`` is the new value for this channel in
        :attr:`added`.
        """
        reducer = self.find(self.callers, channel_name, position)
        if reducer is not None:
            reducer.abandon_call()
        self.added[channel_name] = added
        self.done[channel_name] = self.done.get(channel_name, 0) + 1
        self.unused.add((channel_name, self.done[channel_name]))
        return reducer is not None or not self._without_channel(self.callers, channel_name.rpartition(".")[0])

    def enter_world(self) -> None:
        """Forget the channels and the exchanges of the previous world, and prepare the reducers for the new one."""
        if self.callers.alive() or self.exchangers.alive():
            gc.collect()  # otherwise find() could return the reducer of an optimizer that the script has dropped
        for each in (self._claimed, self.done, self.discarded, self.unused, self.added):
            each.clear()
        self.callers.enter_world()
        self.exchangers.enter_world()
        for one in self.exchangers.alive():
            one.exchanges = 0
            one.announced.clear()
        for reducer in (*self.callers.alive(), *self.exchangers.alive()):
            reducer.channel_name = ""
            reducer.begin_world()


class Channels:
    """The open channels of a world.

    Attributes:
        sets: process set id → backend; 0 is the world.
        gradients: name of the request that opened a channel (the channel name, "/", and the number of its gradients) → pair
            of the backend and the gradients that are sparse on any rank.
    """

    def __init__(self, world: Backend) -> None:
        self.sets: dict[int, Backend] = {0: world}
        self.gradients: dict[str, tuple[Backend, list[list[int]]]] = {}
        self._memories: list[SharedMemory] = []  # each channel of gradients that uses shared memory adds its own
        self._released: queue.SimpleQueue[str] = queue.SimpleQueue()

    def with_shared_memory(self, channel: Backend, transport: str, buffers: list[int]) -> Backend:
        """Return ``channel`` with sums through shared memory, if ``transport``, the backend and the ranks' hosts allow it.

        Otherwise, return ``channel`` itself.

        Collective over the channel, with equal arguments; blocks.

        Args:
            channel: the backend for an optimizer's gradients.
            transport: ``"native"`` (no shared memory), ``"shm"`` (shared memory), or ``"auto"`` (shared memory if there are
                two ranks).
            buffers: sizes in bytes of the buffers that the optimizer will make. Without sizes, no memory is shared.
        """
        allowed = (transport == "shm" and channel.size > 1) or (transport == "auto" and channel.size == 2)
        if not (allowed and buffers and channel.name == "torch" and len(set(channel.hosts)) == 1):
            return channel
        try:
            return SharedMemoryBackend(channel, self._memories, buffers)
        except UnsharedError as reason:
            if channel.rank == 0:
                log.warning("shared memory cannot be used (%s): gradients use %s", reason, channel.transport)
            return channel

    @property
    def share_memory(self) -> bool:
        """Return whether any channel sums through shared memory."""
        return bool(self._memories)

    def progress(self) -> int:
        """Advance operations in shared memory, without blocking. Return how many are left unfinished."""
        return sum(memory.progress() for memory in tuple(self._memories))

    def release_with(self, owner: object, name: str) -> None:
        """Let :meth:`close_released` close the channel that the request ``name`` opens, once ``owner`` is freed."""
        # Do not close the channel here: garbage collection may run in any thread, at any moment.
        weakref.finalize(owner, self._released.put, name)

    def close_released(self) -> None:
        """Close the channels of freed optimizers, because each channel has sockets and threads."""
        if len(self.gradients) % _MANY_CHANNELS == _MANY_CHANNELS - 1:
            gc.collect()  # an optimizer and its hooks form a reference cycle, which only the collector frees
        while not self._released.empty():
            channel, _ = self.gradients.pop(self._released.get(), (None, None))
            if channel is not None:
                channel.close()

    def close(self) -> None:
        """Close all channels except the world's."""
        for set_id, channel in self.sets.items():
            if set_id:
                channel.close()
        for channel, _ in self.gradients.values():
            channel.close()
