"""Backend contract: the primitives that a communication library must implement to become a backend.

The operations that users call (``collectives.py``) use only these primitives, so they are the same for all backends.
``torch.py`` and ``horovod.py`` implement the primitives over one library each, ``local.py`` for a single process.

All ranks of a backend start the primitives in the same order, with equal arguments except for the data and the lengths
in an all-to-all. The primitives do not check this; their callers do. The operations that users call begin by comparing
the ranks' calls (``agreement.py``). The code that sums gradients compares the ranks' layouts of the
gradients whenever it makes a layout.

Buckets of gradients are sent during backward, which may also make other collective calls. So the sums of gradients are
matched separately from all other operations, except with NCCL, since two NCCL groups may deadlock.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch

from dualtrain.backends.inference import ordinary
from dualtrain.backends.subnormals import keep_subnormals
from dualtrain.backends.waits import Waits
from dualtrain.errors import BackendError
from dualtrain.launchers import World

T_co = TypeVar("T_co", covariant=True)

#: Error of a call after ``close()``.
CLOSED = "this backend is closed: make its last call before close()"
#: What a rank waits for while it compares its call with those of the other ranks (``agreement.py``), for error messages.
COMPARING = "comparing calls with the other ranks"


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
            Exception: error in a call whose name ends in ``_async``, such as ValueError, if every rank's call has the same
                error, or if it occurred after the ranks had compared their calls.
        """

    @abstractmethod
    def done(self) -> bool:
        """Return whether :meth:`wait` would return or raise at once. Does not block."""


@dataclass
class Reduction:
    """Reduction of ``tensor`` (contiguous, as in :meth:`Primitives.start_allreduce`) over all ranks.

    Attributes:
        tensor: this rank's values; they are not changed.
        op: SUM, MIN, MAX or PRODUCT.
        result: the reduced values; ``None`` if they were not sent with the comparison of the call. The backend's
            next call overwrites them.
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
        result: the root's bytes (CPU); ``None`` if they were not sent with the comparison of the call. The backend's
            next call overwrites them.
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
        result: the bytes of all ranks (CPU); ``None`` if they were not sent with the comparison of the call. The backend's
            next call overwrites them.
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


class Primitives(Waits, ABC):
    """One rank of a world of processes, and the operations that a communication library implements.

    :class:`~dualtrain.backends.waits.Waits` has further attributes.

    Attributes:
        name: the backend's name on the command line.
        narrow: dtypes that ``start_allreduce`` reduces besides those of ``REDUCIBLE``.
        transport: name of the reductions' transport, for reports: ``"gloo"``, ``"nccl"``, ``"mpi"``, ``"none"``, or
            ``"shm"`` for memory that the ranks of a host share; with several hosts ``"shm+gloo"`` or ``"shm+mpi"``.
        versions: versions of the backend's libraries besides torch, by the library's name.
        device: the expected device of this rank's tensors.
        hosts: the index of each rank's host, in rank order; equal indices mean the same host.
        flag: one bit that this rank sends with the comparison of a call; see :meth:`Backend.with_flag`.
        any_flag: whether any rank had set its flag in the last comparison.
        compared: whether the running call has begun its comparison with the other ranks' calls.
        in_second_thread: whether the running call was made by a thread other than the one that made this backend.
        scales_sums: True if :meth:`Backend.start_sum` scales while it adds; False if it scales in a second pass over the
            sum.
    """

    name: str
    transport: str
    versions: Mapping[str, str] = MappingProxyType({})
    narrow: frozenset[torch.dtype] = frozenset({torch.float16, torch.bfloat16})
    flag = False
    any_flag = False
    compared = False
    in_second_thread = False
    scales_sums = False

    def __init__(self, world: World, device: torch.device, timeout: float) -> None:
        super().__init__(world, timeout)
        self.device = device
        self.hosts: tuple[int, ...] = (0,) * world.size

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
    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather every rank's ``numbers`` (a few 64-bit integers, equally many on every rank), in rank order. Blocks.

        Uses separate connections or a separate operation name, so that no library matches an exchange with another rank's
        sum of gradients.
        """

    @property
    def gradient_path(self) -> GradientPath:
        """The primitives for sums of gradients.

        If a library matches operations by their order, sums have a separate process group, except with NCCL (see
        :meth:`sums_among_calls`).
        """
        return self

    def sums_among_calls(self, device: str) -> int:
        """Return how many sums of gradients this rank has started in the process group of the user's calls.

        ``device`` is the device type of the calls. Return 0 if sums have a process group of their own. Before a call on
        ``device``, this number must be equal on all ranks.
        """
        return 0

    def exchange_call(self, numbers: Sequence[int], data: Short | None) -> list[list[int]]:
        """Gather two numbers from every rank as :meth:`exchange` does, to compare the ranks' calls. Blocks.

        A backend may send short ``data`` in the same messages as the numbers. It then sets ``data.result``, either on every
        rank or on no rank. It sets no result if the ranks' first numbers differ; a number and its bitwise complement count
        as equal.
        """
        return self.exchange(numbers)

    @abstractmethod
    def subset(self, ranks: Sequence[int], world: World | None) -> Primitives | None:
        """Return a backend over some ``ranks`` of this one; ``world`` has this process's rank in the new backend. Blocks.

        Collective over this backend. ``ranks`` is sorted; ranks outside of it pass ``world=None`` and get ``None``.
        """

    @abstractmethod
    def disconnect(self) -> None:
        """Leave the library's world and free its resources. Called once, after all operations have ended."""

    def __repr__(self) -> str:
        return f"<{self.name} backend over {self.transport}: rank {self.rank} of {self.size}>"

    def compare_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather every rank's ``numbers`` as :meth:`exchange` does. Calls :meth:`abandon` on failure. Blocks."""
        try:
            return self.exchange(numbers)
        except BackendError as error:
            self.abandon(error)
            raise


def refuse_other_devices(tensor: torch.Tensor) -> None:
    """Check that ``tensor``, which is not on the CPU, is on a CUDA GPU: the backends send no tensors of other devices.

    Raises:
        BackendError: ``tensor`` is on a device of another kind.
    """
    if not tensor.is_cuda:
        raise BackendError(
            f"a tensor on the device {str(tensor.device)!r} cannot be sent to other ranks: move it to the CPU or to a GPU "
            "(cuda)"
        )


class Closed:
    """Replacement for the library objects of a closed backend: each use raises BackendError.

    It is for calls that do not check whether the backend is open, such as the sums of gradients that backward starts.
    """

    def __getattr__(self, name: str) -> Any:
        raise BackendError(CLOSED)


class Done(Work[None]):
    """Handle of an operation that has already ended."""

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


class Scaled(Work[None]):
    """Handle of a reduction; the first ``wait`` multiplies the result by a factor.

    If this multiplication is interrupted, later calls of ``wait`` raise BackendError.
    """

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
