"""A world whose ranks are threads of one process: fast, easy to debug, and with the strictest checks of all backends.

Every primitive asserts that all ranks make the same call, with tensors of the same shape (except for an all-to-all), and
that tensors meet the contract of ``dualtrain.backends.base``. Results appear when the last rank has made the call, as with
an asynchronous library.

Threads share the process's state, so a function that runs on the ranks must use its own ``torch.Generator``, not
``torch.manual_seed``.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch

from dualtrain.backends.base import FOLD, REDUCIBLE, ReduceOp, Work
from dualtrain.backends.collectives import Backend
from dualtrain.backends.inference import ordinary
from dualtrain.backends.subnormals import keep_subnormals
from dualtrain.backends.watch import Message, Watch
from dualtrain.errors import BackendError
from dualtrain.launchers import World

TIMEOUT = 20.0


class _Meeting:
    """One call of a primitive, which each rank joins."""

    def __init__(self) -> None:
        self.arrived: dict[int, Any] = {}
        self.signature: tuple[Any, ...] | None = None
        self.ended = False


class Room:
    """State that the threads of one world share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.meetings: dict[tuple[str, int], _Meeting] = {}
        self.rooms: dict[tuple[Any, ...], Room] = {}
        self.watches: dict[int, Watch] = {}
        self.mismatch: str | None = None

    def arrive(
        self, rank: int, key: tuple[str, int], signature: tuple[Any, ...], values: Any, finish: Callable
    ) -> _Meeting:
        """Join the call ``key``; the last rank that joins it calls ``finish`` with all ranks' ``values``, in rank order.

        Raises:
            AssertionError: another rank has joined this call with a different ``signature``.
        """
        with self.changed:
            meeting = self.meetings.setdefault(key, _Meeting())
            if meeting.signature not in (None, signature):
                self.mismatch = f"rank {rank} starts {signature}, another rank {meeting.signature}"
                self.changed.notify_all()
                raise AssertionError(self.mismatch)
            meeting.signature = signature
            meeting.arrived[rank] = values
            if len(meeting.arrived) == self.size:
                finish([meeting.arrived[member] for member in range(self.size)])
                meeting.ended = True
                del self.meetings[key]
                self.changed.notify_all()
            return meeting


class _ThreadsWatch(Watch):
    """A watch without sockets: it passes its reports directly to the watches of the other threads.

    It also records its own reports of operations that its rank waits for.
    """

    def __init__(self, backend: Backend, room: Room) -> None:
        self.room = room
        self.start(backend.rank, [])
        room.watches[backend.rank] = self

    def send(self, message: Message) -> None:
        for rank, watch in list(self.room.watches.items()):
            if "waits" in message or rank != message["rank"]:
                watch.note(message)


class _ThreadsWork(Work[None]):
    def __init__(self, backend: ThreadsBackend, meeting: _Meeting, what: str) -> None:
        self._backend, self._meeting, self._what = backend, meeting, what

    def wait(self) -> None:
        room = self._backend.room

        def finished(seconds: float) -> bool:
            with room.changed:
                return room.changed.wait_for(lambda: self._meeting.ended or room.mismatch is not None, seconds)

        self._backend.await_bounded(self._what, finished)
        assert self._meeting.ended, room.mismatch

    def done(self) -> bool:
        return self._meeting.ended


class ThreadsBackend(Backend):
    """Backend of one rank, which is a thread of a :class:`Room`."""

    name = "threads"
    transport = "memory"

    def __init__(self, room: Room, world: World, timeout: float = TIMEOUT) -> None:
        super().__init__(world, torch.device("cpu"), timeout)
        self.room = room
        #: The number of calls of each kind so far. The n-th call of a kind is the same call on all ranks.
        self._calls = {"data": 0, "gradients": 0, "control": 0, "groups": 0}
        self._kind = "data"
        #: The backend that waits for the operations of this backend and of its copy, :attr:`gradient_path`. The copy does
        #: not wait itself, because it does not get later changes of attributes such as ``on_wait``.
        self._waiting = self

    def start_allreduce(self, tensor: torch.Tensor, op: ReduceOp, name: str) -> Work[None]:
        assert tensor.dtype in REDUCIBLE | self.narrow
        assert op in FOLD

        @keep_subnormals
        def finish(tensors: list[torch.Tensor]) -> None:
            total = reduce(FOLD[op], tensors).clone()
            for each in tensors:
                ordinary(each).copy_(total)

        return self._start("allreduce", (op, name, tensor.shape, tensor.dtype), tensor, finish)

    def start_broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Work[None]:
        assert tensor.dtype is torch.uint8

        def finish(tensors: list[torch.Tensor]) -> None:
            for each in tensors:
                ordinary(each).copy_(tensors[root])

        return self._start("broadcast", (root, name, tensor.shape), tensor, finish)

    def start_allgather(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Work[None]:
        assert tensor.dtype is output.dtype is torch.uint8
        assert output.shape == (self.size * len(tensor),)

        def finish(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
            whole = torch.cat([each for _, each in pairs])
            for target, _ in pairs:
                ordinary(target).copy_(whole)

        return self._start("allgather", (name, tensor.shape), (output, tensor), finish)

    def start_alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], name: str
    ) -> Work[None]:
        assert tensor.dtype is output.dtype is torch.uint8
        assert (len(tensor), len(output)) == (sum(sent), sum(received))

        def finish(calls: list[tuple[torch.Tensor, torch.Tensor, list[int], list[int]]]) -> None:
            for rank, (target, _, wanted, _) in enumerate(calls):
                parts = [source.split(lengths)[rank] for _, source, _, lengths in calls]
                assert [len(part) for part in parts] == wanted
                ordinary(target).copy_(torch.cat(parts))

        return self._start("alltoall", (name,), (output, tensor, list(received), list(sent)), finish)

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        work = self._start("exchange", (len(numbers),), list(numbers), lambda _: None, kind="control")
        work.wait()
        arrived = work._meeting.arrived  # the numbers of all ranks
        return [arrived[rank] for rank in range(self.size)]

    @property
    def gradient_path(self) -> ThreadsBackend:
        """A copy of this backend that counts its operations separately."""
        path = copy.copy(self)
        path._kind = "gradients"
        return path

    def subset(self, ranks: Sequence[int], world: World | None) -> ThreadsBackend | None:
        self._calls["groups"] += 1
        key = self._calls["groups"], *ranks
        if world is None:
            return None
        with self.room.changed:
            room = self.room.rooms.setdefault(key, Room(len(ranks)))
        return ThreadsBackend(room, world, self.timeout)

    def disconnect(self) -> None:
        """Do nothing, because nothing was opened."""

    def _start(
        self, primitive: str, form: tuple[Any, ...], values: Any, finish: Callable, kind: str | None = None
    ) -> _ThreadsWork:
        for value in values if isinstance(values, tuple) else (values,):
            assert not isinstance(value, torch.Tensor) or value.is_contiguous()
        kind = kind or self._kind
        self._calls[kind] += 1
        meeting = self.room.arrive(self.rank, (kind, self._calls[kind]), (primitive, *form), values, finish)
        return _ThreadsWork(self._waiting, meeting, f"{primitive} {form}")


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """Set the interpreter's switch interval. If it is short, threads that often wait for each other run faster."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def run_threads(size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``fn(backend, *args)`` in ``size`` threads, each with a copy of ``args``; return the results in rank order.

    If a rank fails, raise its exception, and not the BackendErrors that the failure causes on other ranks: the first
    exception in rank order that is not a BackendError, or else the first exception.
    """
    room = Room(size)
    backends = [ThreadsBackend(room, World(rank, size, rank, size, launcher="threads")) for rank in range(size)]
    for backend in backends:
        backend.watch = _ThreadsWatch(backend, room)

    def member(rank: int) -> Any:
        backend = backends[rank]
        try:
            return fn(backend, *copy.deepcopy(args))
        except BaseException as error:
            error.add_note(f"on rank {rank} of {size} threads")
            backend.abort(f"{type(error).__name__}: {error}")
            raise
        finally:
            backend.close()

    with switch_interval(1e-4), ThreadPoolExecutor(size, thread_name_prefix="rank") as threads:
        futures = [threads.submit(member, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, BackendError)), errors[0])
    return [future.result() for future in futures]
