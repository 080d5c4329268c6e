"""Reductions through memory that the ranks of a host share, for tensors on the CPU.

Every rank's buffer lies where all ranks of its host can reach it. When all have said "ready", each reduces its shard of
the buffers, in rank order, and writes the result into all of them; when all have said "done", every buffer holds
all of it. Nothing is sent, nothing is copied twice, and the fixed order makes the bits the same at every run.

Between several hosts, the ranks that have the same shard of their hosts' sums exchange it in between, over the library.

The caller's own thread does the work, when it waits, and as far as the others have come, when it starts the next one:
ranks that compute on all cores gain nothing from a thread beside them.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from dualtrain.backends.base import ReduceOp, Work
from dualtrain.backends.segment import map_together
from dualtrain.backends.semaphores import LINE, Semaphores

if TYPE_CHECKING:
    from dualtrain.backends.collectives import Backend

_PAGE = 4096
_STAGE_BYTES = 1 << 20  # of the buffer through which tensors of other memory go, piece by piece
_PIECE_BYTES = 256 << 10  # that are reduced at a time, so that they stay in the processor's cache
_ROW_BYTES = 1 << 10  # the longest row that is exchanged
_READY, _DONE, _ROW = range(3)
_KINDS = 3
_FOLD: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}

#: Something to wait for: called with whether to block, it tells whether it has come.
Need = Callable[[bool], bool]


class SharedMemory:
    """What the ranks of this host share, as seen by one of them.

    Collective over ``backend`` to make; blocks.

    Args:
        backend: all ranks; each host has equally many.
        across: the ranks with this rank's local rank on all hosts, if there are several.

    Raises:
        UnsharedError: on every rank, if one of them cannot have it.
    """

    def __init__(self, backend: Backend, across: Backend | None = None) -> None:
        self._backend = backend
        self._across = across
        self.size, self.rank = backend.local_size, backend.local_rank
        words = map_together(backend, Semaphores.bytes_for(_KINDS, self.size))
        self._semaphores = Semaphores(words, _KINDS, self.size, self.rank)
        if self.rank == 0:
            self._semaphores.initialise()  # the next step has the others wait for this
        self._stage = self._new_slots(_STAGE_BYTES)
        self._rows = [slot.view(2, -1) for slot in self._new_slots(2 * _ROW_BYTES)]
        self._turn = 0  # which of the two rows is next
        self._slots: dict[int, list[torch.Tensor]] = {}  # of all ranks, by the address of this one's buffer
        self._pending: deque[_Reduction] = deque()
        self._lock = threading.RLock()
        self._failure: BaseException | None = None

    def new_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros, (numel,), that :meth:`start` reduces where they lie. Collective; blocks. Raises UnsharedError."""
        if numel == 0:
            return torch.zeros(0, dtype=dtype)
        slots = self._new_slots(numel * dtype.itemsize)
        buffer: torch.Tensor = slots[self.rank][: numel * dtype.itemsize].view(dtype)
        self._slots[buffer.data_ptr()] = slots
        weakref.finalize(buffer, self._slots.pop, buffer.data_ptr(), None)
        return buffer

    def start(self, tensor: torch.Tensor, op: ReduceOp, name: str, factor: float = 1.0, tail: int = 0) -> Work[None]:
        """Reduces ``tensor`` (contiguous, on the CPU) over all ranks, in place; does not block. Collective.

        All elements but the last ``tail`` are then multiplied by ``factor``.
        """
        with self._lock:
            work = _Reduction(self, tensor.view(-1), op, name, factor, tail)
            self._raise_failure(work.what)
            # Words are told in the order of the operations: not yet behind one that has more of its own to tell.
            if work.slots is not None and all(earlier.told for earlier in self._pending):
                self.tell_ready(work)
            self._pending.append(work)
            self.advance()
        return work

    def advance(self, until: _Reduction | None = None) -> None:
        """Does what can be done without blocking; with ``until``, blocks for all up to and with that operation.

        Raises:
            BackendError: an operation cannot end; none that starts later will.
        """
        with self._lock:
            while self._pending and not (until is not None and until.ended):
                try:
                    if not self._pending[0].go_on(block=until is not None):
                        return
                except BaseException as error:
                    self._failure = error
                    self._pending.clear()
                    raise
                self._pending.popleft()
            if until is not None and not until.ended:
                self._raise_failure(until.what)

    def finish(self) -> None:
        """Blocks until all that was started has ended: who waits for something else does nothing for the others here."""
        with self._lock:
            if self._pending:
                self.advance(self._pending[-1])

    def exchange(self, row: torch.Tensor) -> torch.Tensor | None:
        """As the backend's, where all ranks are on this host and the row is short; else None. Blocks."""
        length = row.numel() * row.element_size()
        if self._across is not None or length > _ROW_BYTES:
            return None
        what = "comparing calls with the other ranks"
        with self._lock:
            self._raise_failure(what)
            # The one after the next has this place again. Who tells of the next one is through with this.
            places = [each[self._turn, :length] for each in self._rows]
            self._turn = 1 - self._turn
            places[self.rank].copy_(row.view(torch.uint8))
            self._semaphores.tell(_ROW)
            try:
                for need in self.others(_ROW, what):
                    need(True)
            except BaseException as error:
                self._failure = error
                raise
            return torch.stack(places).view(row.dtype)

    # -- what an operation is made of -----------------------------------------------------------------------------

    def in_place(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """All ranks' buffers, if this is one of :meth:`new_buffer`."""
        return self._slots.get(tensor.data_ptr())

    @property
    def stage(self) -> list[torch.Tensor]:
        """All ranks' buffers for tensors of other memory."""
        return self._stage

    def tell_ready(self, work: _Reduction) -> None:
        """Tells the others that this rank's part of ``work`` is in its buffer."""
        work.told = work.slots is not None
        self._semaphores.tell(_READY)

    def reduce(self, parts: list[torch.Tensor], work: _Reduction, scaled: int) -> Iterator[Need]:
        """Has every one of ``parts`` (the same elements of all ranks) be their reduction, the first ``scaled`` scaled."""
        begin, end = self._shard(len(parts[0]))
        mine = [part[begin:end] for part in parts]
        scaled = min(max(scaled - begin, 0), end - begin)
        yield from self.others(_READY, work.what)
        if self._across is None:
            for pieces in _pieces(mine):
                _fold(pieces, work.fold)
                scaled = _hand_out(pieces, scaled, work.factor)
        else:
            for pieces in _pieces(mine):
                _fold(pieces, work.fold)
            between = self._across.start_allreduce(mine[0], work.op, work.name)
            yield partial(_ended, between)
            for pieces in _pieces(mine):
                scaled = _hand_out(pieces, scaled, work.factor)
        self._semaphores.tell(_DONE)
        yield from self.others(_DONE, work.what)

    def others(self, kind: int, what: str) -> Iterator[Need]:
        """The word of every other rank of this host."""
        return (partial(self._heard, kind, other, what) for other in self._semaphores.others)

    def _heard(self, kind: int, other: int, what: str, block: bool) -> bool:
        if self._semaphores.taken(kind, other):
            return True
        if block:
            self._backend.await_bounded(what, partial(self._semaphores.taken_within, kind, other))
        return block

    def _shard(self, count: int) -> tuple[int, int]:
        """The elements that this rank reduces; whole lines, so that no two ranks write to one."""
        lines = -(-count // LINE)
        return min(count, lines * self.rank // self.size * LINE), min(count, lines * (self.rank + 1) // self.size * LINE)

    def _new_slots(self, nbytes: int) -> list[torch.Tensor]:
        stride = -(-nbytes // _PAGE) * _PAGE
        memory = map_together(self._backend, self.size * stride)
        return list(torch.frombuffer(memory, dtype=torch.uint8, count=self.size * stride).view(self.size, -1))

    def _raise_failure(self, what: str) -> None:
        if self._failure is not None:
            raise self._backend.failure(what, self._failure) from self._failure


class _Reduction(Work[None]):
    """One reduction over all ranks."""

    def __init__(
        self, memory: SharedMemory, tensor: torch.Tensor, op: ReduceOp, name: str, factor: float, tail: int
    ) -> None:
        self._memory = memory
        self._tensor = tensor
        self.slots = memory.in_place(tensor)
        self.told = False  # all that this rank has to tell of its readiness
        self.op, self.fold = op, _FOLD[op]
        self.name, self.what = name, f"{op.value} of {name!r}"
        self.factor = factor
        self._scaled = len(tensor) - tail
        self.ended = False
        self._steps: Iterator[Need] = self._run()
        self._need: Need | None = None

    def wait(self) -> None:
        if not self.ended:
            self._memory.advance(self)

    def done(self) -> bool:
        if not self.ended:
            self._memory.advance()
        return self.ended

    def go_on(self, block: bool) -> bool:
        """Does what is left, until something is not there yet that it would have to wait for; whether it has ended."""
        while self._need is None or self._need(block):
            self._need = next(self._steps, None)
            if self._need is None:
                self.ended = True
                return True
        return False

    def _run(self) -> Iterator[Need]:
        memory, tensor = self._memory, self._tensor
        if self.slots is not None:
            if not self.told:
                memory.tell_ready(self)
            yield from memory.reduce([slot.view(tensor.dtype)[: len(tensor)] for slot in self.slots], self, self._scaled)
            return
        room = _STAGE_BYTES // tensor.element_size()
        stage = [slot.view(tensor.dtype) for slot in memory.stage]
        for first in range(0, len(tensor), room):
            piece = tensor[first : first + room]
            parts = [slot[: len(piece)] for slot in stage]
            parts[memory.rank].copy_(piece)
            memory.tell_ready(self)
            yield from memory.reduce(parts, self, self._scaled - first)
            piece.copy_(parts[memory.rank])


def _ended(work: Work[None], block: bool) -> bool:
    if block or work.done():
        work.wait()
        return True
    return False


def _pieces(parts: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """All parts piece by piece, each small enough for the cache."""
    step = _PIECE_BYTES // parts[0].element_size()
    for start in range(0, len(parts[0]), step):
        yield [part[start : start + step] for part in parts]


def _fold(parts: list[torch.Tensor], fold: Callable[..., torch.Tensor]) -> None:
    """The reduction of ``parts``, in their order, into the first of them."""
    for part in parts[1:]:
        fold(parts[0], part, out=parts[0])


def _hand_out(parts: list[torch.Tensor], scaled: int, factor: float) -> int:
    """Scales the first elements of the first part, and copies it to the others; how many are left to scale behind it."""
    if factor != 1 and scaled > 0:
        parts[0][:scaled].mul_(factor)
    for part in parts[1:]:
        part.copy_(parts[0])
    return scaled - len(parts[0])
