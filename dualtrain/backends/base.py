"""The contract: what a communication library must do to become a backend.

A backend is a place in a world and a few ways for tensors to travel. This file declares those ways, the primitives;
``collectives.py`` derives everything that users call from them, once; ``local.py``, ``torch.py`` and ``horovod.py``
implement them, each naming its library alone.

Every primitive is started by all ranks of the backend in the same order, with equal arguments but for the data. The
primitives trust that: the derived calls check it first (``agreement.py``), the gradient path checks its layout once.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from dualtrain.errors import BackendError
from dualtrain.launchers import World

if TYPE_CHECKING:
    from dualtrain.backends.watch import Watch

T_co = TypeVar("T_co", covariant=True)


_REPORT_SECONDS = 1.0  # of a wait before the other ranks learn of it


class ReduceOp(enum.Enum):
    """How the values of the ranks become one. ``AVERAGE`` is derived (a sum, then a scaling): no primitive knows it."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """The operation itself, or the one with this name in any case.

        Raises:
            ValueError: there is none.
        """
        if isinstance(op, cls):
            return op
        try:
            return cls(str(op).lower())
        except ValueError:
            names = ", ".join(member.value for member in cls)
            raise ValueError(f"no reduction is called {op!r}: choose one of {names}") from None


#: What ``start_allreduce`` carries natively on every backend; other dtypes travel as one of these (``wire.py``).
REDUCIBLE = frozenset({torch.int32, torch.int64, torch.float32, torch.float64})


class Work(ABC, Generic[T_co]):
    """An operation under way."""

    @abstractmethod
    def wait(self) -> T_co:
        """Blocks until the result can be used on the caller's current stream, and returns it.

        May be called again; the host does not wait for a GPU. Bounded by the backend's timeout.

        Raises:
            BackendError: the operation failed, a rank was lost, or the time ran out.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once. Does not block."""


class Primitives(ABC):
    """A place in a world and the few ways for tensors to travel that the others cannot express.

    Attributes:
        name: the backend's name on the command line.
        narrow: what ``start_allreduce`` carries besides the dtypes of ``REDUCIBLE``.
        transport: what carries reductions, for reports: ``"gloo"``, ``"nccl"``, ``"mpi"``, ``"none"``, or where the
            ranks of a host share memory, ``"shm"``; with several hosts ``"shm+gloo"`` or ``"shm+mpi"``.
        versions: of the libraries beside torch that it works with, by name.
        world: this process's place; for a group, the place inside the group.
        device: where this rank's tensors are expected to live.
        timeout: seconds that any wait lasts at most.
        watch: knows whether a rank was lost; ``None`` until :func:`dualtrain.connect` has started it.
        on_wait: called now and then while a wait lasts, with this backend, what is waited for, and the seconds so far.
        members: the ranks in the job's numbering; those of a group differ from its own.
    """

    name: str
    transport: str
    versions: Mapping[str, str] = MappingProxyType({})
    narrow: frozenset[torch.dtype] = frozenset({torch.float16, torch.bfloat16})

    def __init__(self, world: World, device: torch.device, timeout: float) -> None:
        self.world = world
        self.device = device
        self.timeout = timeout
        self.watch: Watch | None = None
        self.on_wait: Callable[[Any, str, float], None] | None = None
        self.members: tuple[int, ...] = tuple(range(world.size))

    @property
    def rank(self) -> int:
        """This process's number in the backend, from 0."""
        return self.world.rank

    @property
    def size(self) -> int:
        """The number of processes in the backend."""
        return self.world.size

    @property
    def local_rank(self) -> int:
        """This process's number among those on its host."""
        return self.world.local_rank

    @property
    def local_size(self) -> int:
        """The number of processes on this host."""
        return self.world.local_size

    @property
    def cross_rank(self) -> int:
        """This host's number among the hosts that have this local rank."""
        return self.world.cross_rank

    @property
    def cross_size(self) -> int:
        """The number of hosts that have this local rank."""
        return self.world.cross_size

    @abstractmethod
    def start_allreduce(self, tensor: torch.Tensor, op: ReduceOp, name: str) -> Work[None]:
        """Reduces ``tensor`` (contiguous, of ``REDUCIBLE`` or ``narrow``) over all ranks, in place. Does not block.

        ``op`` is SUM, MIN, MAX or PRODUCT. The tensor belongs to the operation until its work was waited for.
        """

    @abstractmethod
    def start_broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Work[None]:
        """Overwrites ``tensor`` (contiguous uint8) with that of rank ``root``, in place. Does not block."""

    @abstractmethod
    def start_allgather(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Work[None]:
        """Fills ``output`` (contiguous uint8, (size * n,)) with every rank's ``tensor`` (contiguous uint8, (n,)).

        In rank order; n is the same on every rank. Does not block.
        """

    @abstractmethod
    def start_alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], name: str
    ) -> Work[None]:
        """Sends slice r of ``tensor`` to rank r and fills ``output`` with what the ranks sent here, in rank order.

        Both are contiguous uint8, one-dimensional; ``sent`` and ``received`` are the slices' lengths. Does not block.
        """

    @abstractmethod
    def exchange(self, row: torch.Tensor) -> torch.Tensor:
        """Gathers one short ``row`` (CPU, int64, (n,), the same n everywhere) of each rank into (size, n). Blocks.

        Travels apart from the data, so that it never meets a gradient that another rank sends at that moment.
        """

    @abstractmethod
    def subset(self, ranks: Sequence[int], world: World | None) -> Primitives | None:
        """A backend over ``ranks`` (sorted, of this backend) in which this rank has the place ``world``.

        Called by every rank of this backend; those outside give and get ``None``. Blocks.
        """

    @abstractmethod
    def disconnect(self) -> None:
        """Leaves the library's world and frees its resources. Called once, after all work has ended."""

    def __repr__(self) -> str:
        return f"<{self.name} backend over {self.transport}: rank {self.rank} of {self.size}>"

    def await_bounded(self, what: str, finished: Callable[[float], bool]) -> None:
        """Calls ``finished(seconds)``, which blocks for about that long at most, until it returns True.

        Raises:
            BackendError: ``finished`` raised, a rank was lost meanwhile, or the backend's timeout has passed.
        """
        start = time.monotonic()
        reported = False
        try:
            while not finished(0.25):
                self.raise_if_lost(what)
                seconds = time.monotonic() - start
                if self.on_wait is not None:
                    self.on_wait(self, what, seconds)
                if self.watch is not None and not reported and seconds > min(_REPORT_SECONDS, self.timeout / 3):
                    reported = True
                    self.watch.report_wait(what)
                if seconds > self.timeout:
                    raise TimeoutError(self._overdue())
        except BackendError:
            raise
        except Exception as error:  # whatever the library throws: all of it means that the operation did not happen
            raise self.failure(what, error) from error
        # Not after a failure: the others' waits for the same rank run out in the same moment.
        if self.watch is not None and reported:
            self.watch.report_wait(what, ended=True)

    def _overdue(self) -> str:
        """Why a wait has run out: the ranks that do not wait themselves."""
        late = f"waited {self.timeout:g} s for"
        waiting = {} if self.watch is None else dict(self.watch.waiting)
        others = [rank for rank in self.members if rank != self.members[self.rank]]
        missing = [str(rank) for rank in others if not waiting.get(rank)]
        if self.watch is None or not others:
            return f"{late} the other ranks: one has not reached this operation, or hangs"
        if missing:
            several = len(missing) > 1
            return (
                f"{late} rank{'s' * several} {', '.join(missing)}, which {'have' if several else 'has'} not reached "
                f"this operation, or {'hang' if several else 'hangs'}"
            )
        elsewhere = "; ".join(f"rank {rank} in {waiting[rank][-1]}" for rank in others)
        return f"{late} the other ranks, which wait too: {elsewhere}; make the same calls in the same order on every rank"

    def failure(self, what: str, error: BaseException) -> BackendError:
        """The :class:`BackendError` for a third-party ``error`` in ``what``, naming the lost rank if there is one."""
        if self.watch is not None and not isinstance(error, TimeoutError):
            # A broken connection is noticed here before the watch has heard why: give the reason time to arrive.
            self.watch.settle(2.0)
            self.raise_if_lost(what, cause=error)
        reason = " ".join(str(error).split()) or type(error).__name__
        return BackendError(f"{what} failed on rank {self.rank} of {self.size}: {reason}")

    def raise_if_lost(self, what: str, cause: BaseException | None = None) -> None:
        """Raises BackendError if a rank of the job is known to be gone."""
        if self.watch is not None and self.watch.loss is not None:
            message = f"{what} cannot end on rank {self.rank} of {self.size}: {self.watch.loss.describe()}"
            raise BackendError(message) from cause


class Done(Work[None]):
    """Work that ended before it was handed out."""

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


class Scaled(Work[None]):
    """A reduction, and a multiplication of its result once it is there."""

    def __init__(self, work: Work[None], result: torch.Tensor, factor: float) -> None:
        self._work = work
        self._result = result
        # Torch makes a tensor of it anyway: better while the reduction is under way than after it.
        self._factor: torch.Tensor | None = torch.tensor(factor, dtype=torch.float64, device="cpu")

    def wait(self) -> None:
        self._work.wait()
        if self._factor is not None:
            with torch.no_grad():
                self._result.mul_(self._factor)
            self._factor = None

    def done(self) -> bool:
        return self._work.done()
