"""The loop of an elastic job: sync the state and train; after a failure, restore the state and join the world again."""

from __future__ import annotations

import copy
import functools
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from enum import IntFlag
from typing import Any, TypeVar

from dualtrain.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt

R = TypeVar("R")


class HostUpdateResult(IntFlag):
    """Change of the hosts of the job."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class WorkerNotificationManager:
    """Informs the training states when hosts are added to the job or removed from it.

    No service detects changes of hosts, because torchrun restarts all workers at each change. A program that detects
    changes itself calls :meth:`handle_hosts_updated`, from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: set[State] = set()

    def init(self) -> None:
        """Do nothing: there is no service to start. :func:`run_fn` calls this method, as in Horovod."""

    def register_listener(self, listener: State) -> None:
        """Call ``listener.on_hosts_updated`` at each change from now on."""
        with self._lock:
            self._listeners.add(listener)

    def remove_listener(self, listener: State) -> None:
        """Remove ``listener``."""
        with self._lock:
            self._listeners.discard(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Inform all listeners that the hosts changed at ``timestamp``, which must increase with each change."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()


class State:
    """Base class of training states. Subclasses save, restore and broadcast the state.

    Args:
        bcast_object: returns the root's object on every rank.
        get_rank: returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Run ``callbacks``, in order, after each :meth:`reset`: for example, to adapt learning rates to the new size."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Discard messages about the old world, then run ``reset`` and the reset callbacks. Called in the new world."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Record a change of the hosts. May be called from any thread.

        If this rank is the root, the next :meth:`check_host_updates` raises on every rank.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state in memory, and check for changes of hosts. Collective.

        Everything is copied, so a commit at every step may be slow.

        Raises:
            HostsUpdatedInterrupt: see :meth:`check_host_updates`.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise on every rank if the root was informed of a change of hosts. Collective.

        Raises:
            HostsUpdatedInterrupt: the hosts have changed.
        """
        known = latest = self._last_updated_timestamp
        update = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                update |= change
        # int(update), because only plain values can be sent.
        known, self._last_updated_timestamp, update = self._bcast_object((known, latest, int(update)))
        if self._last_updated_timestamp > known:
            raise HostsUpdatedInterrupt(skip_sync=update == HostUpdateResult.removed)

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the last saved copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Send every rank the root's state. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the new world, before the state is synced."""


class ObjectState(State):
    """State of plain objects.

    Example: after ``state = ObjectState(bcast, rank, epoch=0)``, the epoch is ``state.epoch``.

    ``save`` keeps a deep copy of the objects; ``restore`` sets the attributes to copies of the saved objects. ``sync``
    sends every rank the root's current objects and saves them, so that all ranks restore the same state if a failure comes
    before the next commit. (Horovod sends the objects of the last commit. They may be older than the model's weights,
    because Horovod's ``TorchState`` sends the current weights.)

    Args:
        bcast_object: returns the root's object on every rank.
        get_rank: returns this process's rank.
        kwargs: the objects, by name; the same names on every rank.

    Raises:
        TypeError: an object cannot be copied.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        self._saved_state = _copies(kwargs)
        self._set_attrs(kwargs)

    def save(self) -> None:
        """Keep a deep copy of the objects. Raises TypeError if an object cannot be copied."""
        self._saved_state = _copies(self._objects())

    def restore(self) -> None:
        """Set the attributes to copies of the saved objects."""
        self._set_attrs(_copies(self._saved_state))

    def sync(self) -> None:
        """Send every rank the root's objects, and save them. Collective."""
        if self._saved_state:
            self._set_attrs(self._bcast_object(self._objects()))
        self.save()

    def _objects(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _set_attrs(self, objects: Mapping[str, Any]) -> None:
        for name, value in objects.items():
            setattr(self, name, value)


def _copies(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return deep copies of ``objects``. Raises TypeError if an object cannot be copied."""
    memo: dict[int, Any] = {}  # one memo for all attributes, so that an object in two attributes is copied once
    copies = {}
    for name, value in objects.items():
        try:
            copies[name] = copy.deepcopy(value, memo)
        except Exception as error:
            raise TypeError(
                f"the state's {name!r} cannot be committed, because copying it fails ({error}): "
                "keep plain values, containers and detached tensors in the state"
            ) from error
    return copies


def run_fn(func: Callable[..., R], reset: Callable[[], object]) -> Callable[..., R]:
    """Wrap ``func(state, ...)`` so that it runs again after failed collectives and changes of hosts.

    Args:
        func: the training function, with the :class:`State` as its first argument. Call no collective before the
            wrapped function: a process that joins the job later would call it while the other ranks call ``state.sync()``.
        reset: leaves the world and joins the new one.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        notification_manager.init()
        notification_manager.register_listener(state)
        skip_sync = False
        try:
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError:
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                reset()
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return wrapper
