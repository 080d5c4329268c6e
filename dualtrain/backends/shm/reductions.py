"""Reductions of CPU tensors through memory that the ranks of a host share.

Every rank's buffer is in memory that all ranks of its host map. When all ranks have posted "ready", each rank reduces its
shard (one part of the elements per rank) of all buffers, in rank order, and writes the result into all of them. When all
ranks have posted "done", every buffer holds the whole result. On one host no data is sent, and the fixed order gives the
same bits in every run.

On one host, a short tensor is copied to a slot in shared memory instead, and every rank computes the whole reduction from
the slots of all ranks (``short.py``). This needs one signal instead of two; a signal takes longer than the reduction of a
short tensor.

With several hosts, the ranks that have the same shard (one per host) all-reduce it through the communication library. Then
each of them writes the result into the buffers of its host.

The caller's thread does the work, when it waits for an operation. It also does what is possible without blocking when it
starts the next operation or calls ``done()``. If the ranks compute on all cores, an additional thread would not make
this faster.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

import torch

from dualtrain.backends.base import CLOSED, COMPARING, GradientPath, Primitives, ReduceOp, Work
from dualtrain.backends.host_cores import cores_of_host
from dualtrain.backends.shm.buffers import Buffers, in_pages
from dualtrain.backends.shm.operation import STAGE_BYTES, TAG_BYTES, Condition, Reduction
from dualtrain.backends.shm.segment import map_on_host
from dualtrain.backends.shm.semaphores import Semaphores
from dualtrain.backends.shm.shards import Plan, Region, Tree
from dualtrain.backends.shm.short import SHORT_BYTES, ShortTensors, reduce_into, reduced
from dualtrain.backends.sum_order import SumOrder
from dualtrain.backends.waits import SLICE_SECONDS
from dualtrain.errors import BackendError, PeerFailedError, first_line

_VECTOR_BYTES = 1 << 10  # smallest size of a slot for exchanged vectors; a rank's two slots are enlarged to whole pages
_TAGS = 128  # length of a ring buffer of tags; limits how many operations a rank may post ahead of the others
_INTERRUPTED_AT = _TAGS * TAG_BYTES  # index of the byte that is 1 if an operation of this rank was interrupted
_READY, _DONE, _VECTOR = range(3)
_KINDS = 3


class SharedMemory:
    """This rank's access to memory that the ranks of its host share.

    Construction is collective over ``library`` and blocks.

    Args:
        library: backend over all ranks; every host has the same number of ranks.
        between_hosts: if there are several hosts, operations over the ranks that have this rank's local rank (one on each
            host).
        progressing_memories: function that returns the ``SharedMemory`` objects whose operations continue while an
            operation of this object waits. It may return this object, too.

    Attributes:
        buffers: this rank's buffers that are reduced in place.

    Raises:
        UnsharedError: on every rank, if the ranks of one host cannot share memory.
    """

    def __init__(
        self,
        library: Primitives,
        between_hosts: GradientPath | None,
        progressing_memories: Callable[[], Iterable[SharedMemory]],
    ) -> None:
        self._library = library
        self._between_hosts = between_hosts
        self._progressing_memories = progressing_memories
        self._host = library.hosts[library.rank]
        self.size, self.rank = library.local_size, library.local_rank
        self._exchange = library.exchange  # replaced below, when this memory is ready
        memory = self._map(Semaphores.bytes_for(_KINDS, self.size), Semaphores.initialise)
        # Don't spin when ranks outnumber cores: the peer needs this core to post.
        spin = cores_of_host(library.exchange, library.hosts, library.rank) >= self.size
        self._semaphores = Semaphores(memory, _KINDS, self.size, self.rank, spin=spin)
        #: For each kind of signal, one function per other rank, which returns true once for each post of that rank.
        self._posts = [
            [partial(self._consume_post, kind, other) for other in self._semaphores.others] for kind in range(_KINDS)
        ]
        self.buffers = Buffers(self._new_region, self.rank)
        #: Buffers through which tensors outside shared memory are copied.
        self.stage = self._new_region(STAGE_BYTES)
        pairs = [slot.view(torch.int64).view(2, -1).numpy() for slot in self._new_region(2 * _VECTOR_BYTES).slots]
        self._vectors = [[memoryview(vector) for vector in pair] for pair in pairs]  # each begins with its length
        self._next_vector = 0  # index into the double buffer
        #: Slots for short tensors: one set for the operations of :meth:`start`, and one for :meth:`reduce_while_comparing`.
        halves = zip(*(slot.view(2, -1) for slot in self._new_region(4 * SHORT_BYTES).slots), strict=True)
        self._short, self._short_compared = (ShortTensors(slots, self.rank) for slots in halves)
        self._next_short = 0  # index into the double buffer of the reductions
        #: For each rank, a ring buffer with the tags of its last operations. At each position, all ranks' tags must be
        #: equal.
        rings: list[Any] = [slot.numpy() for slot in self._new_region(_TAGS * TAG_BYTES + 1).slots]
        self._tags = [memoryview(ring) for ring in rings]
        self._others_tags = [self._tags[other] for other in self._semaphores.others]
        self._posted_ready = 0  # number of "ready" signals that this rank has posted
        self._seen_ready = 0  # number of "ready" signals that it has consumed from each other rank
        self._pending: deque[Reduction] = deque()
        self._lock = threading.RLock()
        self._sleeping = False  # whether an operation waits for another rank's post: an interrupt is then harmless
        #: The operation that an exception such as KeyboardInterrupt has stopped in the middle, and the exception's type.
        #: Code that sets this must not call a function first: another KeyboardInterrupt may be raised at the call.
        self._interrupted: tuple[str, type[BaseException]] | None = None
        self._failure: BackendError | None = None
        self._advancing = False  # whether :meth:`advance` runs: a wait in it may call :meth:`progress`
        self._exchange = self.exchange

    def replace_buffer(self, buffer: torch.Tensor, use: Callable[[torch.Tensor], None]) -> bool:
        """See :meth:`Buffers.replace`. No operation progresses meanwhile."""
        with self._lock:
            return self.buffers.replace(buffer, use)

    def start(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        name: str,
        factor: float = 1.0,
        tail: int = 0,
        *,
        in_place: bool = True,
        tree: Tree | None = None,
    ) -> Work[None]:
        """Reduce ``tensor`` (contiguous, on the CPU) over all ranks, into itself. Collective; does not block.

        All elements but the last ``tail`` are then multiplied by ``factor``. A buffer of :attr:`buffers` is reduced
        without copies, unless it is short (:meth:`is_short`). If ``tensor`` is such a buffer on one rank, it must be one on
        every rank. With ``in_place=False``, such a buffer is copied like any other tensor. With ``tree``, which requires
        such a buffer, partial sums are added along the tree instead of in rank order.

        Raises:
            BackendError: this operation or an earlier one failed.
        """
        with self._lock:
            flat = tensor if tensor.dim() == 1 else tensor.view(-1)  # view() takes longer than copying a short tensor
            region = self.buffers.region_of(flat) if in_place else None
            work = Reduction(self, flat, region, op, name, factor, tail, tree)
            what = work.what
            self._raise_failure(what)
            try:
                if self._may_post(work):
                    self.post_ready(work)
                self._pending.append(work)
            except BaseException as error:
                self._interrupted = what, error.__class__
                self._tags[self.rank][_INTERRUPTED_AT] = 1
                raise
            self.advance()
        return work

    def _may_post(self, work: Reduction) -> bool:
        """Return whether ``work``, which starts now, may post "ready" now."""
        if work.short:
            # A rank ends all earlier operations before it posts a short one. So a peer that has posted short operation
            # n+1 has finished reading n, and the slots of n can be reused for n+2.
            return not self._pending
        # "ready" posts must be in the order of the operations: don't post before all earlier operations have posted it.
        return work.region is not None and len(self._pending) < _TAGS - 1 and all(map(_has_posted, self._pending))

    def is_short(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is so short that every rank computes its whole reduction. False with several hosts.

        The result is the same on every rank.
        """
        return self._between_hosts is None and self._short.fits(tensor)

    def reduce_while_comparing(
        self, tensor: torch.Tensor, op: ReduceOp, compare: Callable[[], object], *, in_place: bool
    ) -> torch.Tensor:
        """Reduce a short ``tensor`` (contiguous, on the CPU) over all ranks. Collective; blocks.

        Return the result: a new tensor, or ``tensor`` itself with ``in_place``.

        ``compare`` calls :meth:`exchange` on every rank, and raises if the ranks are in different calls. The values
        are written before this exchange, and read after it: no other signal is needed.
        """
        with self._lock:
            self._raise_failure(COMPARING)
            values = self._short_compared.write(tensor, self._next_vector)
            compare()
            if not in_place:
                return reduced(values, op)
            reduce_into(tensor, values, op)
            return tensor

    def tree(self, order: SumOrder, tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> Tree | None:
        """Return the tree of ``order`` over partial sums in ``others`` and ``tensor``.

        Return ``None`` if there are several hosts, or if any of these tensors is not a buffer of :attr:`buffers`.
        """
        regions = [self.buffers.region_of(buffer) for buffer in (*others, tensor)]
        found = [region for region in regions if region is not None]
        # With several hosts, the tree may need each partial sum of a host, but a host sends only the sum of all of them.
        return Tree(order, found[:-1]) if self._between_hosts is None and len(found) == len(regions) else None

    def advance(self, work: Reduction | None = None) -> None:
        """Advance operations without blocking; with ``work``, block until it and all earlier ones have ended.

        Raises:
            BackendError: an operation failed or was interrupted; all later ones fail too.
        """
        with self._lock:
            if self._interrupted is not None:
                self._raise_failure(self._interrupted[0])
            while self._pending and not (work is not None and work.ended):
                what = self._pending[0].what
                self._sleeping = False
                self._advancing = True
                try:
                    if not self._pending[0].progress(block=work is not None):
                        return
                    self._pending.popleft()
                except Exception as error:
                    self._fail_by(what, error)
                except BaseException as error:
                    if not self._sleeping:
                        self._interrupted = what, error.__class__
                        self._tags[self.rank][_INTERRUPTED_AT] = 1
                    raise
                finally:
                    self._advancing = False
            if work is not None and not work.ended:
                self._raise_failure(work.what)

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather every rank's ``numbers``, through memory if all ranks are on this host and there are few numbers. Blocks.

        Raises:
            BackendError: the wait for another rank failed, an earlier operation failed, or the ranks' ``numbers`` differ in
                length, since they then make different calls. If all ranks are on this host, every rank raises the error for
                different lengths.
        """
        gathered = self._exchange_here(numbers) if self._between_hosts is None else None
        if gathered is None:
            gathered = self._library.exchange(numbers)
        return gathered

    def _exchange_here(self, numbers: Sequence[int]) -> list[list[int]] | None:
        """Do the same as :meth:`exchange` on one host; return ``None``, on every rank, for too many numbers. Blocks."""
        with self._lock:
            self._raise_failure(COMPARING)
            try:
                # Double buffer: a peer that has posted exchange n+1 has finished reading n, so the slots of n can be reused
                # for n+2.
                vectors = [each[self._next_vector] for each in self._vectors]
                self._next_vector = 1 - self._next_vector
                length, mine = len(numbers), vectors[self.rank]
                short = length < len(mine)
                mine[0] = length
                if short:
                    mine[1 : 1 + length] = memoryview(array("l", numbers))
                self._semaphores.post(_VECTOR)
                for condition in self._posts[_VECTOR]:
                    condition(True)
            except Exception as error:
                self._fail_by(COMPARING, error)
            except BaseException as error:
                self._interrupted = COMPARING, error.__class__
                self._tags[self.rank][_INTERRUPTED_AT] = 1
                raise
            lengths = [vector[0] for vector in vectors]
            if len(set(lengths)) > 1:
                raise BackendError(
                    "the ranks do not agree on a collective call: the counts of values that they compare differ "
                    f"({lengths}, in rank order); make the same calls in the same order on every rank"
                )
            return [vector[1 : 1 + length].tolist() for vector in vectors] if short else None

    def close(self) -> None:
        """Advance operations without blocking, then drop them and the references to the memory. Later operations fail."""
        with self._lock:
            if self._failure is None:
                with suppress(BackendError):
                    self.advance()
                self._failure = BackendError(CLOSED)
            self._pending.clear()
            self.buffers.close()
            self._vectors.clear()
            self._tags.clear()
            self._others_tags.clear()
            self._short.close()
            self._short_compared.close()
            self.stage.close()

    @property
    def failed(self) -> bool:
        """Return whether later operations fail: an earlier one failed or was interrupted, or this memory is closed."""
        return self._failure is not None or self._interrupted is not None

    # -- steps of an operation -------------------------------------------------------------------------------------

    def post_ready(self, work: Reduction) -> None:
        """Post that this rank's values for ``work`` are in its buffer. Write the values of a short tensor first."""
        work.posted = work.region is not None or work.short
        if work.short:
            work.values = self._short.write(work.tensor, self._next_short)
            self._next_short = 1 - self._next_short
        offset = self._posted_ready % _TAGS * TAG_BYTES
        self._tags[self.rank][offset : offset + TAG_BYTES] = work.tag
        self._posted_ready += 1
        self._semaphores.post(_READY)

    def reduce_shard(self, plan: Plan, work: Reduction) -> Iterator[Condition]:
        """Reduce this rank's shard, from "ready" to "done"; yield the conditions to wait for."""
        yield from self._posts[_READY]
        self._check_tags(work)
        if self._between_hosts is None:
            plan.reduce(work.op, work.factor)
        else:
            plan.reduce_on_host(work.op)
            yield partial(_ended, self._between_hosts.start_allreduce(plan.shard, work.op, work.name))
            plan.copy_to_all(work.factor)
        self._semaphores.post(_DONE)
        yield from self._posts[_DONE]

    def reduce_short(self, work: Reduction) -> Iterator[Condition]:
        """Reduce a short tensor, from "ready" on; yield the conditions to wait for."""
        yield from self._posts[_READY]
        self._check_tags(work)
        reduce_into(work.tensor, work.values, work.op, work.factor, work.scaled)

    def _check_tags(self, work: Reduction) -> None:
        """Check that all ranks have posted this "ready" for the same operation. Raises BackendError if not."""
        offset = self._seen_ready % _TAGS * TAG_BYTES
        self._seen_ready += 1
        for tags in self._others_tags:
            if tags[offset : offset + TAG_BYTES] != work.tag:
                self._raise_mismatch(offset)

    def _raise_mismatch(self, offset: int) -> NoReturn:
        """Raise BackendError, on every rank of this host, since the tags at ``offset`` are of different operations."""
        ranks = self._ranks_here()
        names = [bytes(tags[offset + 8 : offset + TAG_BYTES]).rstrip(b"\0").decode(errors="replace") for tags in self._tags]
        listed = "; ".join(f"rank {rank}: {name}" for rank, name in zip(ranks, names, strict=True))
        raise BackendError(
            f"the ranks are in different operations ({listed}): operations on a backend are matched by order; make the "
            "same calls in the same order on every rank"
        )

    def _ranks_here(self) -> list[int]:
        return [rank for rank, host in enumerate(self._library.hosts) if host == self._host]

    def _consume_post(self, kind: int, other: int, block: bool) -> bool:
        """Consume a post of rank ``other`` and return True, or return False; with ``block``, wait for the post."""
        if self._semaphores.try_wait(kind, other, spin=block):
            return True
        if block:
            what = COMPARING if kind == _VECTOR else self._pending[0].what
            what = f"{what} (waiting for rank {self._ranks_here()[other]})"
            self._sleeping = True
            self._library.await_bounded(what, partial(self._wait_and_progress, kind, other), skip_meanwhile=True)
            self._sleeping = False
            return self._semaphores.try_wait(kind, other, spin=False)  # ``timed_wait`` leaves the post to ``try_wait``
        return False

    def _wait_and_progress(self, kind: int, other: int, seconds: float) -> bool:
        """Wait for a post; return whether there is one. First advance operations for which the other rank may wait.

        Raises BackendError if the other rank was interrupted.
        """
        unfinished = sum(memory.progress() for memory in self._progressing_memories() if memory is not self) > 0
        if kind == _VECTOR:
            self.advance()
            unfinished = unfinished or bool(self._pending)
        if self._semaphores.timed_wait(kind, other, SLICE_SECONDS if unfinished else seconds):
            return True
        # Read the interrupted byte before the semaphore: the other rank sets this byte after its last post.
        interrupted = self._tags[other][_INTERRUPTED_AT]
        if self._semaphores.timed_wait(kind, other, 0.0):
            return True
        if interrupted:
            raise BackendError(f"rank {self._ranks_here()[other]} was interrupted in an operation and cannot complete it")
        return False

    def progress(self) -> int:
        """Advance operations without blocking. Return how many are left unfinished.

        Do nothing and return 0 if this thread or another one is advancing them already.
        """
        acquired: list[bool] = []
        try:
            # ``extend`` acquires the lock and records this in one step of the interpreter. Signal handlers run between two
            # steps, so ``finally`` releases the lock in any case.
            acquired.extend(map(self._lock.acquire, (False,)))
            if True in acquired and not self._advancing:
                with suppress(BackendError):  # raised again by the wait for the operation that failed
                    self.advance()
                return len(self._pending)
            return 0
        finally:
            if True in acquired:
                self._lock.release()

    def _new_region(self, nbytes: int) -> Region:
        with torch.inference_mode(False):
            return Region(self._map(self.size * in_pages(nbytes)).view(self.size, -1).unbind(), self.rank)

    def _map(self, nbytes: int, prepare: Callable[[torch.Tensor], None] = lambda memory: None) -> torch.Tensor:
        return map_on_host(self._exchange, self._library.hosts, self._library.rank, nbytes, prepare)

    def _fail_by(self, what: str, error: Exception) -> NoReturn:
        """Raise the BackendError for ``error`` in the operation ``what``, and fail all pending and later operations."""
        if isinstance(error, PeerFailedError) or (isinstance(error, BackendError) and error.__cause__ is not None):
            self._fail(error)
            raise error
        # Give the error a cause: ``Waits.abandon`` treats an error without a cause as one that all ranks raise.
        failure = BackendError(str(error) if isinstance(error, BackendError) else f"{what} failed: {first_line(error)}")
        self._fail(failure)  # set this first: an interrupt may stop the wait in ``self._library.failure``
        if not isinstance(error, BackendError):
            try:
                failure = self._library.failure(what, error)
            except PeerFailedError as peer_failed:
                failure = peer_failed
            self._fail(failure)
        raise failure from error

    def _fail(self, failure: BackendError) -> None:
        """Fail all pending and later operations, since the ranks' semaphore counts are now out of step."""
        self._failure = failure
        self._pending.clear()

    def _raise_failure(self, what: str) -> None:
        """Raise BackendError if an earlier operation has failed or was interrupted."""
        if self._failure is None and self._interrupted is not None:
            stopped, kind = self._interrupted
            self._fail(BackendError(f"{stopped} was interrupted by {kind.__name__} and cannot continue"))
        if self._failure is None:
            return
        closed = str(self._failure) == CLOSED
        message = f"{what} cannot be done{'' if closed else ' after an earlier failure'}: {self._failure}"
        if isinstance(self._failure, PeerFailedError):
            raise PeerFailedError(message, self._failure.failure) from self._failure
        raise BackendError(message) from self._failure


_has_posted = attrgetter("posted")


def _ended(work: Work[None], block: bool) -> bool:
    """Return whether ``work`` has ended; with ``block``, wait for it. Raises its error."""
    if block or work.done():
        work.wait()
        return True
    return False
