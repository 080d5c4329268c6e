"""Reductions through memory that the ranks of a host share, for tensors on the CPU.

Every rank's buffer lies where all ranks of its host can reach it. When all have said "ready", each reduces its shard of
the buffers, in rank order, and writes the result into all of them; when all have said "done", every buffer holds
all of it. Nothing is sent, nothing is copied twice, and the fixed order makes the bits the same at every run.

Between several hosts, the ranks that have the same shard of their hosts' sums exchange it in between, over the library.

The caller's own thread does the work, when it waits, and as far as the others have come, when it starts the next one:
ranks that compute on all cores gain nothing from a thread beside them.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache, partial, reduce
from operator import attrgetter, or_
from typing import TYPE_CHECKING, NoReturn

import torch

from dualtrain.backends.base import ReduceOp, Work
from dualtrain.backends.segment import map_together
from dualtrain.backends.semaphores import Semaphores
from dualtrain.backends.shards import PAGE, Plan, Region
from dualtrain.errors import BackendError

if TYPE_CHECKING:
    from dualtrain.backends.collectives import Backend

_STAGE_BYTES = 1 << 20  # of the buffer through which tensors of other memory go, piece by piece
_SLICE_SECONDS = 5e-4  # of a wait in which other operations go on
_ROW_BYTES = 1 << 10  # the longest row that is exchanged here
_TAG_BYTES = 64  # of what a rank is about to reduce
_TAGS = 128  # of operations that this rank has started and others have not
_READY, _DONE, _ROW = range(3)
_KINDS = 3
_COMPARING = "comparing calls with the other ranks"
_CPU_WORDS = 64  # of 62 bits, for the numbers of cores

#: Something to wait for: called with whether to block, it tells whether it has come.
Need = Callable[[bool], bool]


class SharedMemory:
    """What the ranks of this host share, as seen by one of them.

    Collective over ``backend`` to make; blocks.

    Args:
        backend: all ranks; each host has equally many.
        across: the ranks with this rank's local rank on all hosts, if there are several.
        beside: another one, whose operations go on while this one waits.

    Raises:
        UnsharedError: on every rank, if one of them cannot have it.
    """

    def __init__(self, backend: Backend, across: Backend | None = None, beside: SharedMemory | None = None) -> None:
        self._backend = backend
        self._across = across
        self._beside = beside
        #: What carries all that does not go through memory.
        self.library_transport = backend.transport
        self._host = backend.hosts[backend.rank]
        self.size, self.rank = backend.local_size, backend.local_rank
        words = map_together(backend, Semaphores.bytes_for(_KINDS, self.size), Semaphores.initialise)
        # Nobody gains by looking for a word where another rank needs the core to say it.
        spin = _cores(backend) >= self.size
        self._semaphores = Semaphores(words, _KINDS, self.size, self.rank, spin=spin)
        #: Of each kind, those of all other ranks.
        self._words = [[partial(self._heard, kind, other) for other in self._semaphores.others] for kind in range(_KINDS)]
        #: The buffers that tensors of other memory go through.
        self.stage = self._new_region(_STAGE_BYTES)
        places = [slot.view(torch.int64).view(2, -1).numpy() for slot in self._new_region(2 * _ROW_BYTES).slots]
        self._rows = [[memoryview(place) for place in two] for two in places]  # each with its length in front
        self._turn = 0  # which of the two is next
        #: Of each rank, what its last operations are, one place after another: those of equal number must be equal.
        self._tags = [memoryview(slot.numpy()) for slot in self._new_region(_TAGS * _TAG_BYTES).slots]
        self._others_tags = [self._tags[other] for other in self._semaphores.others]
        self._ready_told, self._ready_heard = 0, 0
        self._regions: dict[int, Region] = {}  # by the address of this rank's buffer
        self._pending: deque[_Reduction] = deque()
        self._lock = threading.RLock()
        self._failure: BackendError | None = None

    def new_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros, (numel,), that :meth:`start` reduces where they lie. Collective; blocks. Raises UnsharedError."""
        if numel == 0:
            return torch.zeros(0, dtype=dtype)
        region = self._new_region(numel * dtype.itemsize)
        with torch.inference_mode(False):
            buffer: torch.Tensor = region.slots[self.rank][: numel * dtype.itemsize].view(dtype)
        self._regions[buffer.data_ptr()] = region
        weakref.finalize(buffer, self._regions.pop, buffer.data_ptr(), None)
        return buffer

    def start(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        name: str,
        factor: float = 1.0,
        tail: int = 0,
        *,
        where_it_lies: bool = True,
    ) -> Work[None]:
        """Reduces ``tensor`` (contiguous, on the CPU) over all ranks, in place; does not block. Collective.

        All elements but the last ``tail`` are then multiplied by ``factor``. With ``where_it_lies``, a buffer of
        :meth:`new_buffer` must be one on every rank; without, it is copied as any other tensor.
        """
        with self._lock:
            flat = tensor.view(-1)
            region = self._regions.get(flat.data_ptr()) if where_it_lies else None
            work = _Reduction(self, flat, region, op, name, factor, tail)
            if self._failure is not None:
                self._raise_failure(work.what)
            # Words are told in the order of the operations: not yet behind one that has more of its own to tell.
            if region is not None and len(self._pending) < _TAGS - 1 and all(map(_has_told, self._pending)):
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
                except Exception as error:
                    raise self._fail(self._pending[0].what, error) from error
                self._pending.popleft()
            if until is not None and not until.ended:
                self._raise_failure(until.what)

    def finish(self) -> None:
        """Blocks until all that was started has ended: who waits for something else does nothing for the others here."""
        with self._lock:
            if self._pending:
                self.advance(self._pending[-1])

    def exchange(self, row: Sequence[int]) -> list[list[int]] | None:
        """As the backend's ``exchange_short``, where all ranks are on this host and the row is short; else None. Blocks.

        Raises:
            BackendError: on all ranks, if their rows differ in length: they are not in the same call.
        """
        if self._across is not None:
            return None
        what = _COMPARING
        with self._lock:
            self._raise_failure(what)
            # The one after the next has this place again. Who tells of the next one is through with this.
            places = [each[self._turn] for each in self._rows]
            self._turn = 1 - self._turn
            length, mine = len(row), places[self.rank]
            short = length < len(mine)
            mine[0] = length
            if short:
                mine[1 : 1 + length] = memoryview(array("l", row))
            self._semaphores.tell(_ROW)
            try:
                for need in self._words[_ROW]:
                    need(True)
            except Exception as error:
                raise self._fail(what, error) from error
            lengths = [place[0] for place in places]
            if len(set(lengths)) > 1:
                raise BackendError(
                    f"the ranks do not agree on a collective call: the rows that they compare have {lengths} numbers, in "
                    "rank order; make the same calls in the same order on every rank"
                )
            return [place[1 : 1 + length].tolist() for place in places] if short else None

    def close(self) -> None:
        """Does what can be done at once; nothing can be started any more, and the memory is given back."""
        with self._lock:
            if self._failure is None:
                with suppress(BackendError):
                    self.advance()
                self._failure = BackendError("this backend is closed: make its last call before close()")
            self._pending.clear()
            self._regions.clear()
            self._rows.clear()
            self._tags.clear()
            self._others_tags.clear()
            self.stage.slots.clear()

    @property
    def failed(self) -> bool:
        """Whether an operation could not end, so that none will."""
        return self._failure is not None

    # -- what an operation is made of -----------------------------------------------------------------------------

    def tell_ready(self, work: _Reduction) -> None:
        """Tells the others that this rank's part of ``work`` is in its buffer."""
        work.told = work.region is not None
        at = self._ready_told % _TAGS * _TAG_BYTES
        self._tags[self.rank][at : at + _TAG_BYTES] = work.tag
        self._ready_told += 1
        self._semaphores.tell(_READY)

    def carry_out(self, plan: Plan, work: _Reduction) -> Iterator[Need]:
        """This rank's share of a reduction, from "ready" to "done"."""
        yield from self._words[_READY]
        at = self._ready_heard % _TAGS * _TAG_BYTES
        self._ready_heard += 1
        for tags in self._others_tags:
            if tags[at : at + _TAG_BYTES] != work.tag:
                self._refuse_others(at)
        if self._across is None:
            plan.reduce(work.op, work.factor)
        else:
            plan.gather(work.op)
            yield partial(_ended, self._across.start_allreduce(plan.shard, work.op, work.name))
            plan.hand_out(work.factor)
        self._semaphores.tell(_DONE)
        yield from self._words[_DONE]

    def _refuse_others(self, at: int) -> NoReturn:
        """Raises BackendError, as on every rank of this host: what they are about to add up does not belong together."""
        ranks = [rank for rank, host in enumerate(self._backend.hosts) if host == self._host]
        names = [bytes(tags[at + 8 : at + _TAG_BYTES]).rstrip(b"\0").decode(errors="replace") for tags in self._tags]
        listed = "; ".join(f"rank {rank}: {name}" for rank, name in zip(ranks, names, strict=True))
        raise BackendError(
            f"the ranks are in different operations ({listed}): operations on a backend are matched by order; make the "
            "same calls in the same order on every rank"
        )

    def _heard(self, kind: int, other: int, block: bool) -> bool:
        if self._semaphores.taken(kind, other, patient=block):
            return True
        if block:
            missing = [rank for rank, host in enumerate(self._backend.hosts) if host == self._host][other]
            what = _COMPARING if kind == _ROW else self._pending[0].what
            what = f"{what} (waiting for rank {missing})"
            self._backend.await_bounded(what, partial(self._taken_meanwhile, kind, other))
        return block

    def _taken_meanwhile(self, kind: int, other: int, seconds: float) -> bool:
        """Takes a word, and does this rank's part in operations that the other rank may wait for before it tells it."""
        going = self._beside is not None and self._beside.go_on()
        if kind == _ROW:
            self.advance()
            going = going or bool(self._pending)
        return self._semaphores.taken_within(kind, other, _SLICE_SECONDS if going else seconds)

    def go_on(self) -> bool:
        """Does what can be done without blocking, unless another thread does; whether anything is left to do."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            with suppress(BackendError):  # whoever waits for that operation is told
                self.advance()
            return bool(self._pending)
        finally:
            self._lock.release()

    def _new_region(self, nbytes: int) -> Region:
        nbytes = -(-nbytes // PAGE) * PAGE
        with torch.inference_mode(False):
            return Region(map_together(self._backend, self.size * nbytes), self.size, self.rank)

    def _fail(self, what: str, error: Exception) -> BackendError:
        """Ends all that is under way: the words of the ranks fit no more."""
        self._failure = error if isinstance(error, BackendError) else self._backend.failure(what, error)
        self._pending.clear()
        return self._failure

    def _raise_failure(self, what: str) -> None:
        if self._failure is not None:
            raise BackendError(f"{what} cannot be done after an earlier failure: {self._failure}") from self._failure


def _cores(backend: Backend) -> int:
    """How many cores this host's ranks may use, each its own or all of them. Collective."""
    mine = sum(1 << cpu for cpu in os.sched_getaffinity(0))
    rows = backend.exchange_short([mine >> 62 * n & (1 << 62) - 1 for n in range(_CPU_WORDS)])
    there = [row for row, host in zip(rows, backend.hosts, strict=True) if host == backend.hosts[backend.rank]]
    return sum(reduce(or_, words).bit_count() for words in zip(*there, strict=True))


class _Reduction(Work[None]):
    """One reduction over all ranks."""

    def __init__(
        self,
        memory: SharedMemory,
        tensor: torch.Tensor,
        region: Region | None,
        op: ReduceOp,
        name: str,
        factor: float,
        tail: int,
    ) -> None:
        self._memory = memory
        self._tensor = tensor
        self.region = region
        self.told = False  # all that this rank has to tell of its readiness
        self.op, self.name = op, name
        self.factor = factor
        self._scaled = tensor.numel() - tail
        self.tag = _tag(op, name, tensor.dtype, tensor.numel(), region is None)
        self.ended = False
        self._steps: Iterator[Need] = self._run()
        self._need: Need | None = None

    @property
    def what(self) -> str:
        """For messages."""
        return f"{self.op.value} of {self.name!r}"

    def wait(self) -> None:
        if not self.ended:
            self._memory.advance(self)

    def done(self) -> bool:
        if not self.ended:
            self._memory.advance()
        return self.ended or self._memory.failed

    def go_on(self, block: bool) -> bool:
        """Does what is left, until something is not there yet that it would have to wait for; whether it has ended."""
        while self._need is None or self._need(block):
            self._need = next(self._steps, None)
            if self._need is None:
                self.ended = True
                return True
        return False

    def _run(self) -> Iterator[Need]:
        memory, tensor, dtype = self._memory, self._tensor, self._tensor.dtype
        if self.region is not None:
            if not self.told:
                memory.tell_ready(self)
            yield from memory.carry_out(self.region.plan(dtype, tensor.numel(), self._scaled), self)
            return
        room = _STAGE_BYTES // dtype.itemsize
        for first in range(0, tensor.numel(), room):
            piece = tensor[first : first + room]
            count = piece.numel()
            plan = memory.stage.plan(dtype, count, min(max(self._scaled - first, 0), count))
            plan.own.copy_(piece)
            memory.tell_ready(self)
            yield from memory.carry_out(plan, self)
            # Such a tensor cannot be written otherwise; to enter that mode takes longer than a short copy.
            with torch.inference_mode() if piece.is_inference() else nullcontext():
                piece.copy_(plan.own)


@lru_cache(maxsize=4096)
def _tag(op: ReduceOp, name: str, dtype: torch.dtype, numel: int, staged: bool) -> bytes:
    """What must be the same on every rank: a hash, and the beginning of what people read."""
    text = f"{op.value} of {name!r} ({str(dtype).removeprefix('torch.')}, {numel})"
    digest = hashlib.blake2b(f"{text} {staged}".encode(), digest_size=8).digest()
    return (digest + text.encode())[:_TAG_BYTES].ljust(_TAG_BYTES, b"\0")


_has_told = attrgetter("told")


def _ended(work: Work[None], block: bool) -> bool:
    if block or work.done():
        work.wait()
        return True
    return False
