"""Backend contract: the primitives that a communication library must implement to become a backend.

The operations that users call (``collectives.py``) use only these primitives, so they are the same for all backends.
``torch.py`` and ``horovod.py`` implement the primitives over one library each, ``local.py`` for a single process.

All ranks of a backend start the primitives in the same order, with equal arguments except for the data. The primitives
do not check this; their callers do. The operations that users call first compare the ranks' calls (``agreement.py``).
The code that sums gradients (the gradient path) compares the ranks' layouts of the gradients whenever it makes a layout.

Buckets of gradients are sent while backward may make other collective calls. So, except with NCCL, libraries match the sums
of gradients separately from all other operations.
"""

from __future__ import annotations

import enum
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch

from dualtrain.backends.inference import ordinary
from dualtrain.backends.subnormals import keep_subnormals
from dualtrain.backends.watch import Watch
from dualtrain.errors import BackendError, PeerFailedError, PeerFailure, one_line
from dualtrain.launchers import World

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


_ONE_THREAD = "their calls have no common order on all ranks, so make a channel() for the second thread"
_REPORT_SECONDS = 1.0  # a wait that lasts longer is reported to the other ranks
_LEFT_SECONDS = 1.0  # how long a wait goes on after a rank has left: data that the rank sent before may still arrive
_REASON_SECONDS = 2.0  # when a connection breaks, wait this long for the failed rank's own report


class ReduceOp(enum.Enum):
    """Reduction over ranks. The primitives have no ``AVERAGE``: it is computed as a sum that is then scaled."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """Return ``op`` itself, or the operation of this name (in upper or lower case).

        Raises:
            ValueError: there is no operation of this name.
        """
        if isinstance(op, cls):
            return op
        try:
            return cls(str(op).lower())
        except ValueError:
            names = ", ".join(member.value for member in cls)
            raise ValueError(f"no reduction is called {op!r}: choose one of {names}") from None


#: For each operation of the primitives, the function that reduces two tensors elementwise.
FOLD: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}

#: Dtypes that ``start_allreduce`` reduces on every backend; other dtypes are converted to one of these (``wire.py``).
REDUCIBLE = frozenset({torch.int32, torch.int64, torch.float32, torch.float64})


class Work(ABC, Generic[T_co]):
    """Handle of an asynchronous operation."""

    @abstractmethod
    def wait(self) -> T_co:
        """Block until the result can be used on the caller's current stream, and return it.

        May be called again. Bounded by the backend's timeout. With a tensor on a GPU, this may return before the GPU has
        finished.

        Raises:
            BackendError: the operation failed or timed out; :class:`~dualtrain.errors.PeerFailedError` if a rank failed.
        """

    @abstractmethod
    def done(self) -> bool:
        """Return whether :meth:`wait` would return at once. Does not block."""


@dataclass
class Reduction:
    """Reduction of ``tensor`` (contiguous, as in :meth:`Primitives.start_allreduce`) over all ranks.

    Attributes:
        tensor: this rank's values; they are not changed.
        op: SUM, MIN, MAX or PRODUCT.
        result: the reduced values; ``None`` until they are known. The backend's next call overwrites them.
    """

    tensor: torch.Tensor
    op: ReduceOp
    result: torch.Tensor | None = None


@dataclass
class Broadcast:
    """Broadcast of a rank's bytes to all ranks.

    Attributes:
        root: the rank that sends.
        data: the root's bytes (contiguous uint8); ``None`` on other ranks.
        result: the root's bytes (CPU); ``None`` until they are known. The backend's next call overwrites them.
    """

    root: int
    data: torch.Tensor | None
    result: torch.Tensor | None = None


@dataclass
class Gather:
    """Gathering of every rank's bytes, in rank order.

    Attributes:
        data: this rank's bytes (contiguous uint8).
        unit: bytes per row of the gathered tensor, or 1. The ranks exchange how many of these units each of them sends.
        result: the bytes of all ranks (CPU); ``None`` until they are known. The backend's next call overwrites them.
    """

    data: torch.Tensor
    unit: int
    result: torch.Tensor | None = None


#: Short data that may be sent in the same messages as the comparison of its call (``agreement.py``).
Short: TypeAlias = Reduction | Broadcast | Gather


class GradientPath(Protocol):
    """The primitives with which gradients are summed. See :class:`Primitives`."""

    @property
    def rank(self) -> int:
        """Index of this process in the backend, from 0."""

    @property
    def size(self) -> int:
        """Number of processes in the backend."""

    def start_allreduce(self, tensor: torch.Tensor, op: ReduceOp, name: str) -> Work[None]:
        """See :meth:`Primitives.start_allreduce`."""

    def start_allgather(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Work[None]:
        """See :meth:`Primitives.start_allgather`."""

    def start_alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], name: str
    ) -> Work[None]:
        """See :meth:`Primitives.start_alltoall`."""


class Primitives(ABC):
    """A rank's place in a world of processes, and the operations that a communication library implements.

    Attributes:
        name: the backend's name on the command line.
        narrow: dtypes that ``start_allreduce`` reduces besides those of ``REDUCIBLE``.
        transport: name of the reductions' transport, for reports: ``"gloo"``, ``"nccl"``, ``"mpi"``, ``"none"``, or
            ``"shm"`` for memory that the ranks of a host share; with several hosts ``"shm+gloo"`` or ``"shm+mpi"``.
        versions: versions of the backend's libraries besides torch, by the library's name.
        world: this process's place in the job; for a group, the process's place in the group.
        device: the expected device of this rank's tensors.
        hosts: the index of each rank's host, in rank order; equal indices mean the same host.
        timeout: the longest time in seconds that any wait lasts.
        watch: detects failed ranks; ``None`` until :func:`dualtrain.connect` has started it.
        on_wait: called about four times a second during a wait, with this backend, the operation and the seconds waited.
        members: for each rank of this backend, its rank in the job. The two differ in a group, whose own ranks begin at 0.
        flag: one bit that this rank sends with the comparison of a call; see :meth:`Backend.with_flag`.
        any_flag: whether any rank had set its flag in the last comparison.
        compared: whether the running call has begun to compare itself with the other ranks' calls.
        in_second_thread: whether the running call was made by a thread other than the one that made this backend.
        interrupted: the type of the exception, such as KeyboardInterrupt, that has stopped a call; ``None`` if none has.
            See :meth:`whole_call`. It is also set if a comparison of calls or a sum has failed on this rank alone.
        scales_sums: whether :meth:`Backend.start_sum` scales while it adds, and not in a second pass over the sum.
    """

    name: str
    transport: str
    versions: Mapping[str, str] = MappingProxyType({})
    narrow: frozenset[torch.dtype] = frozenset({torch.float16, torch.bfloat16})
    watch: Watch | None = None
    flag = False
    any_flag = False
    compared = False
    in_second_thread = False
    interrupted: type[BaseException] | None = None
    scales_sums = False
    on_wait: Callable[[Any, str, float], None] | None = None

    def __init__(self, world: World, device: torch.device, timeout: float) -> None:
        self.world = world
        self.device = device
        self.timeout = timeout
        self.hosts: tuple[int, ...] = (0,) * world.size
        self.members: tuple[int, ...] = tuple(range(world.size))
        self._turn = threading.RLock()  # held during a call

    @property
    def rank(self) -> int:
        """Index of this process in the backend, from 0."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of processes in the backend."""
        return self.world.size

    @property
    def local_rank(self) -> int:
        """Index of this process among those on its host."""
        return self.world.local_rank

    @property
    def local_size(self) -> int:
        """Number of processes on this host."""
        return self.world.local_size

    @property
    def cross_rank(self) -> int:
        """Index of this host among the hosts that have a process with this local rank."""
        return self.world.cross_rank

    @property
    def cross_size(self) -> int:
        """Number of hosts that have a process with this local rank."""
        return self.world.cross_size

    @abstractmethod
    def start_allreduce(self, tensor: torch.Tensor, op: ReduceOp, name: str) -> Work[None]:
        """Reduce ``tensor`` (contiguous, dtype in ``REDUCIBLE`` or ``narrow``) over all ranks, in place. Does not block.

        ``op`` is SUM, MIN, MAX or PRODUCT. Do not use the tensor before :meth:`Work.wait` has returned.
        """

    @abstractmethod
    def start_broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Work[None]:
        """Overwrite ``tensor`` (contiguous uint8) with rank ``root``'s tensor. Does not block."""

    @abstractmethod
    def start_allgather(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Work[None]:
        """Gather every rank's ``tensor`` (contiguous uint8, (n,)) into ``output`` (contiguous uint8, (size * n,)).

        The parts of ``output`` are in rank order; n is the same on every rank. Does not block.
        """

    @abstractmethod
    def start_alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], name: str
    ) -> Work[None]:
        """Send slice r of ``tensor`` to rank r; receive into ``output`` the slices sent to this rank, in rank order.

        Both tensors are contiguous uint8, one-dimensional; ``sent`` and ``received`` are the lengths of the slices. Does
        not block.
        """

    @abstractmethod
    def exchange(self, vector: torch.Tensor) -> torch.Tensor:
        """Gather each rank's short ``vector`` (CPU, int64, (n,), the same n on every rank) into (size, n). Blocks.

        Uses connections or a name of its own, so that no library matches it with another rank's sum of gradients.
        """

    @property
    def gradient_path(self) -> GradientPath:
        """The primitives for sums of gradients.

        If a library matches operations by their order, sums have a separate process group, except with NCCL (see
        :meth:`sums_beside`).
        """
        return self

    def sums_beside(self, device: str) -> int:
        """Return how many sums of gradients this rank has started in the process group of the user's calls.

        ``device`` is the device type of the calls. Return 0 if sums have a process group of their own. Before a call on
        ``device``, this number must be equal on all ranks.
        """
        return 0

    def exchange_short(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather every rank's ``numbers`` (64-bit integers, equally many on every rank), in rank order. Blocks."""
        gathered: list[list[int]] = self.exchange(torch.tensor(numbers, dtype=torch.int64, device="cpu")).tolist()
        return gathered

    def exchange_call(self, numbers: Sequence[int], data: Short | None = None) -> list[list[int]]:
        """Gather two numbers from every rank as :meth:`exchange_short` does, to compare the ranks' calls. Blocks.

        A backend may send short ``data`` in the same messages as the numbers. It then sets ``data.result``, either on every
        rank or on no rank. It sets no result if the ranks' first numbers differ; a number and its bitwise complement count
        as equal.
        """
        return self.exchange_short(numbers)

    @abstractmethod
    def subset(self, ranks: Sequence[int], world: World | None) -> Primitives | None:
        """Return a backend over some ``ranks`` of this one, in which this rank has the place ``world``. Blocks.

        Collective over this backend. ``ranks`` is sorted; ranks outside of it pass ``world=None`` and get ``None``.
        """

    @abstractmethod
    def disconnect(self) -> None:
        """Leave the library's world and free its resources. Called once, after all operations have ended."""

    def __repr__(self) -> str:
        return f"<{self.name} backend over {self.transport}: rank {self.rank} of {self.size}>"

    def whole_call(self, call: Callable[[], T]) -> T:
        """Return the result of ``call``, which makes collective calls.

        If an exception such as KeyboardInterrupt stops ``call``, the other ranks may already have their results, or may
        still wait for this rank. Later calls of this rank would not match theirs. So each later call raises BackendError,
        and the first one also reports the interruption to the other ranks.

        Raises:
            BackendError: an earlier call was stopped, or another thread is in a call.
        """
        if self.interrupted is not None and self.size > 1:
            raise BackendError(self._report_interruption(self.interrupted))
        acquired: list[bool] = []
        try:
            # This is one call, so no signal handler can run after the lock is acquired and before ``acquired`` shows it.
            # So ``finally`` releases the lock in any case.
            acquired.extend(map(self._turn.acquire, (False,)))
            if True not in acquired:
                raise BackendError(f"two threads call this backend at once on rank {self.rank}: {_ONE_THREAD}")
            return call()
        except Exception:
            raise
        except BaseException as error:
            self.interrupted = error.__class__  # not type(error): a second Ctrl-C may raise at this call
            raise
        finally:
            if True in acquired:
                self._turn.release()

    def send_data(self, step: Callable[[], T]) -> T:
        """Return the result of ``step``, the step of a call in which this rank sends data that the other ranks wait for.

        If ``step`` raises, for example because there is too little memory, report the error to the other ranks in place of
        the data. Later calls of this rank then fail, as after an interruption. Otherwise, a library that matches operations
        by their order would give the other ranks the data of this rank's next operation. A BackendError needs no report.
        """
        try:
            return step()
        except BackendError:
            raise
        except Exception as error:
            if self.size > 1:
                self.interrupted = type(error)
                self._report_interruption(self.interrupted)
            raise

    def compare_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather every rank's ``numbers`` as :meth:`exchange_short` does, as a step of a call. Blocks."""
        try:
            return self.exchange_short(numbers)
        except BackendError as error:
            self.abandon(error)
            raise

    def abandon(self, error: BackendError) -> None:
        """Make later calls of this rank fail if ``error`` has ended a comparison or a sum on this rank alone.

        The other ranks may still complete the comparison or the sum, and then wait for this rank's data. A library that
        matches operations by their order would give them the data of this rank's next call.
        """
        own = error.__cause__ is not None  # otherwise, all ranks raise it
        # After the failure of a peer, later calls raise this error again.
        if own and not isinstance(error, PeerFailedError):
            self.interrupted = type(error)

    def _report_interruption(self, by: type[BaseException]) -> str:
        """Report to the other ranks that an exception of the type ``by`` has stopped a call of this rank; return why."""
        number = self.members[self.rank]
        how = "failed or timed out" if issubclass(by, BackendError) else f"was interrupted by {by.__name__}"
        reason = (
            f"a collective call on rank {number} {how}, so that the calls of rank {number} no longer match those of the "
            "other ranks: restart the ranks"
        )
        if self.watch is not None:
            self.watch.announce(reason)
        return reason

    def await_bounded(self, what: str, finished: Callable[[float], bool]) -> None:
        """Call ``finished(seconds)`` until it returns True. Each call blocks for about ``seconds`` at most.

        Raises:
            PeerFailedError: a rank failed during the wait.
            BackendError: ``finished`` raised, or the backend's timeout has passed.
        """
        start = time.monotonic()
        reported = False
        left_at: float | None = None  # seconds after ``start`` at which a rank was found to have left normally
        try:
            while not finished(0.25):
                seconds = time.monotonic() - start
                failure = self._peer_failure()
                if failure is not None and failure.quiet:
                    left_at = seconds if left_at is None else left_at
                    failure = failure if seconds - left_at >= _LEFT_SECONDS else None
                if failure is not None:
                    raise self._peer_failed(what, failure)
                if self.on_wait is not None:
                    self.on_wait(self, what, seconds)
                if self.watch is not None and not reported and seconds > min(_REPORT_SECONDS, self.timeout / 3):
                    reported = True
                    self.watch.report_wait(what)
                if seconds > self.timeout:
                    raise TimeoutError(self._overdue())
        except BackendError:
            raise
        except Exception as error:  # libraries raise many types, and each means that the operation failed
            raise self.failure(what, error, waited=True) from error
        # Not in a ``finally``: after a timeout, this rank stays reported as waiting. The other ranks time out at about the
        # same moment, and must not name this rank as missing.
        if self.watch is not None and reported:
            self.watch.report_wait(what, ended=True)

    def _overdue(self) -> str:
        """Return the message of a timeout, which names the ranks that have not reached the operation."""
        late = f"waited {self.timeout:g} s for"
        others = self._others()
        if self.watch is None or not others:
            return f"{late} the other ranks, one of which has not reached this operation, or hangs"
        waiting = dict(self.watch.waiting)
        missing = self._missing(waiting)
        if missing:
            return f"{late} {_not_here(missing)}"
        elsewhere = "; ".join(f"rank {rank} in {waiting[rank][-1]}" for rank in others)
        return f"{late} the other ranks, which wait too ({elsewhere}); make the same calls in the same order on every rank"

    def _others(self) -> list[int]:
        """Return the other members of this backend, by their ranks in the job."""
        return [rank for rank in self.members if rank != self.members[self.rank]]

    def _missing(self, waiting: Mapping[int, list[str]]) -> list[int]:
        """Return the other ranks that have not reported a wait. Call this only after this rank has reported its own."""
        own, others = self.members[self.rank], self._others()
        if own != 0 and 0 in others and not waiting.get(own):
            return [0]  # rank 0 has not sent this rank's report back, so it forwards no reports of other ranks either
        return [rank for rank in others if not waiting.get(rank)]

    def failure(self, what: str, error: BaseException, *, waited: bool = False) -> BackendError:
        """Return the :class:`BackendError` for a third-party ``error`` in the operation ``what``.

        Pass ``waited=True`` if the library has stopped waiting for other ranks. The message then names the ranks that have
        reported no wait.

        Raises:
            PeerFailedError: a rank is known to have failed.
        """
        reason = one_line(error) or type(error).__name__
        if self.watch is not None and not isinstance(error, TimeoutError):
            if waited:
                self.watch.report_wait(what)
            # A broken connection is often noticed before the failed rank's report arrives.
            self.watch.wait_for_report(_REASON_SECONDS)
            failure = self._peer_failure()
            if failure is not None:
                raise self._peer_failed(what, failure) from error
            missing = self._missing(dict(self.watch.waiting)) if waited else []
            if missing:
                reason = f"waited for {_not_here(missing)} ({reason})"
        return BackendError(f"{what} failed on rank {self.rank} of {self.size}: {reason}")

    def _peer_failure(self) -> PeerFailure | None:
        """Return the first known failure of any rank of the job.

        If there is none, return the report of a member of this backend that has left normally, or ``None``.
        """
        watch = self.watch
        if watch is None or watch.peer_failed:
            return watch.failure if watch is not None else None
        left = dict(watch.left)  # a copy, since the watch's thread may change it
        return next((left[rank] for rank in self._others() if rank in left), None)

    def _peer_failed(self, what: str, failure: PeerFailure) -> PeerFailedError:
        return PeerFailedError(f"{what} cannot end on rank {self.rank} of {self.size}: {failure.describe()}", failure)


def _not_here(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    if len(ranks) > 1:
        return f"ranks {numbers}, which have not reached this operation, or hang"
    return f"rank {numbers}, which has not reached this operation, or hangs"


def refuse_other_devices(tensor: torch.Tensor) -> None:
    """Check that ``tensor``, which is not on the CPU, is on an NVIDIA GPU. The libraries send no other tensors.

    Raises:
        BackendError: it is on another device.
    """
    if not tensor.is_cuda:
        raise BackendError(
            f"a tensor on the device {str(tensor.device)!r} cannot be sent to other ranks: move it to the CPU or to a GPU "
            "(cuda)"
        )


class Done(Work[None]):
    """Handle of an operation that has already ended."""

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


class Scaled(Work[None]):
    """Handle of a reduction; ``wait`` multiplies the result by a factor."""

    def __init__(self, work: Work[None], result: torch.Tensor, factor: float) -> None:
        self._work = work
        self._result = ordinary(result)
        self._scaling = False
        # ``mul_`` converts a number to a tensor: convert the factor now, while the reduction runs.
        self._factor: torch.Tensor | None = torch.tensor(factor, dtype=torch.float64, device="cpu")

    def wait(self) -> None:
        self._work.wait()
        if self._factor is not None:
            if self._scaling:
                raise BackendError("a sum was interrupted while it was scaled, and cannot continue: restart the ranks")
            self._scaling = True
            _scale(self._result, self._factor)
            self._factor = None

    def done(self) -> bool:
        return self._work.done()


@keep_subnormals
@torch.no_grad()
def _scale(result: torch.Tensor, factor: torch.Tensor) -> None:
    result.mul_(factor)
