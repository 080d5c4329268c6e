"""The channels of a rank: one backend for the calls of each process set, and one for the gradients of each optimizer.

If a channel has two ranks, both on one host, gradients on the CPU are summed through shared memory. The sums have the same
bits as Gloo's, because a + b = b + a. With more ranks the bits may differ, so shared memory is used only if the user
requests it.

Gloo has threads that do the work of an operation. In shared memory, the ranks' own threads do this work. So while a rank
waits for one operation, it advances the operations of all its channels: other ranks may be waiting for any of them.
"""

from __future__ import annotations

import gc
import queue
import weakref
from collections import Counter
from typing import Protocol

from dualtrain.backends import Backend
from dualtrain.backends.shm import SharedMemory, SharedMemoryBackend, UnsharedError
from dualtrain.horovod_variables import log

_MANY_CHANNELS = 16


class Exchanger(Protocol):
    """A reducer that exchanges gradients without a request to rank 0 for each exchange. The engine informs it of joins."""

    base_name: str
    channel_name: str
    #: Number among the reducers of this base name in this world, in the order in which this process made them.
    made: int
    closed: bool
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

        If a backward pass on this rank has already begun the exchange, send its gradients instead.
        """

    @property
    def can_finish(self) -> bool:
        """Return whether :meth:`finish_exchange` would not wait for sums."""

    def finish_exchange(self) -> None:
        """End the exchange in which this rank takes part after ``join``, and discard its result. Blocks."""


class Reducer(Protocol):
    """A reducer of any kind."""

    channel_name: str

    def abandon_call(self) -> None:
        """Discard the result of a call (a grouped allreduce of gradients) that this rank has made before it joined."""

    def begin_world(self) -> None:
        """Prepare for a new world. Before its ``init``, all ranks must have added and unfrozen the same parameters."""


class Exchangers:
    """The reducers of this process's optimizers. Only weak references are kept.

    An optimizer may outlive its world: ``shutdown`` and ``init`` may be called while the script keeps it.
    """

    def __init__(self) -> None:
        #: Channel name → names of the parameters that the other ranks have added, as of the last :meth:`skip`.
        self.added: dict[str, list[str]] = {}
        self._references: list[weakref.ref[Exchanger]] = []  # made in this world, in the order of their registration
        self._earlier: list[weakref.ref[Exchanger]] = []  # made in earlier worlds
        #: Base name → number of reducers that were made, or that existed at the start of this world.
        self.made: Counter[str] = Counter()
        #: All reducers, including those that send gradients through requests to rank 0.
        self.reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()
        #: Channel name → number of the last exchange in which this rank took part. Kept when the reducer is freed.
        self.done: dict[str, int] = {}
        #: Exchanges whose results at least one rank discards, as pairs of a channel name and a number.
        self.dropped: set[tuple[str, int]] = set()
        #: Exchanges whose results this rank has not used, although it has taken part in them.
        self.unused: set[tuple[str, int]] = set()

    def register(self, exchanger: Exchanger) -> int:
        """Register ``exchanger``: the engine will inform it when ranks join. Return the value of its ``made``."""
        self._references = [reference for reference in self._references if reference() is not None]
        self._references.append(weakref.ref(exchanger))
        return self._number(exchanger.base_name)

    def _number(self, base_name: str) -> int:
        self.made[base_name] += 1
        return self.made[base_name]

    def alive(self) -> list[Exchanger]:
        """Return the registered reducers that still exist: first those made in this world."""
        return [one for reference in (*self._references, *self._earlier) if (one := reference()) is not None]

    def find(self, channel_name: str, made: list[int]) -> Exchanger | None:
        """Return the reducer of the channel.

        If there is none, return an open reducer that has the channel's base name, and no channel yet. If there are several,
        return the one that was made at the same point as on the rank that uses the channel. Return None if it is unknown,
        because the ranks have made different numbers of such reducers.

        Args:
            made: on the rank that uses the channel, the reducer's number and the number of all reducers of this base name.
        """
        base, alive = channel_name.rpartition(".")[0], self.alive()
        known = [one for one in alive if one.channel_name == channel_name]
        unused = [one for one in alive if not one.channel_name and one.base_name == base and not one.closed]
        if len(unused) > 1:
            unused = [one for one in unused if [one.made, self.made[base]] == made]
        return next(iter(known + unused), None)

    def skip(self, channel_name: str, added: list[str]) -> None:
        """Count an exchange for which the engine has sent zeros, because this rank has joined.

        ``added`` is the new value for this channel in :attr:`added`.
        """
        for reducer in tuple(self.reducers):
            if reducer.channel_name == channel_name:
                reducer.abandon_call()
        self.added[channel_name] = added
        self.done[channel_name] = self.done.get(channel_name, 0) + 1
        self.unused.add((channel_name, self.done[channel_name]))

    def enter_world(self) -> None:
        """Forget the channels and the exchanges of the previous world."""
        if self.alive():
            gc.collect()  # otherwise find() could return the reducer of an optimizer that the script has dropped
        for each in (self.done, self.dropped, self.unused, self.added, self.made):
            each.clear()
        self._earlier, self._references = [weakref.ref(one) for one in self.alive()], []
        for one in self.alive():
            one.exchanges, one.made = 0, self._number(one.base_name)
            one.announced.clear()
        for reducer in tuple(self.reducers):
            reducer.channel_name = ""
            reducer.begin_world()


class Channels:
    """The open channels of a world.

    Attributes:
        sets: process set id → backend; 0 is the world.
        gradients: channel name → pair of the backend and the gradients that are sparse on any rank.
    """

    def __init__(self, world: Backend) -> None:
        self.sets: dict[int, Backend] = {0: world}
        self.gradients: dict[str, tuple[Backend, list[list[int]]]] = {}
        self._memories: list[SharedMemory] = []  # each channel of gradients that uses shared memory adds its own
        self._released: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._claims: Counter[str] = Counter()

    def claim(self, base_name: str) -> int:
        """Return a new optimizer's number among the optimizers with this base name in the world: 1, 2, …"""
        self._claims[base_name] += 1
        return self._claims[base_name]

    def with_shared_memory(self, channel: Backend, transport: str, buffers: list[int]) -> Backend:
        """Return ``channel`` with sums through shared memory, if ``transport`` and the ranks' hosts allow it.

        Otherwise, return ``channel`` itself.

        Collective over the channel, with equal arguments; blocks.

        Args:
            channel: the backend for an optimizer's gradients.
            transport: ``"native"`` (no shared memory), ``"shm"`` (shared memory), or ``"auto"`` (shared memory if there are
                two ranks).
            buffers: sizes in bytes of the buffers that the optimizer will make.
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
        """Release the channel ``name`` when ``owner`` is freed."""
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
        for number, channel in self.sets.items():
            if number:
                channel.close()
        for channel, _ in self.gradients.values():
            channel.close()
