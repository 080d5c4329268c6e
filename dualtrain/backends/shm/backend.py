"""A backend that reduces CPU tensors and exchanges integers through shared memory, and otherwise uses another backend."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dualtrain.backends.agreement import Call, agree
from dualtrain.backends.base import GradientPath, ReduceOp, Work
from dualtrain.backends.collectives import Backend
from dualtrain.backends.shm.reductions import SharedMemory
from dualtrain.backends.shm.segment import UnsharedError
from dualtrain.backends.sum_order import SumOrder
from dualtrain.backends.watch import Watch
from dualtrain.launchers import World

log = logging.getLogger(__name__)


class DelegatingBackend(Backend):
    """Backend that uses another backend, ``inner``, for most primitives.

    A subclass must implement ``start_allreduce`` and ``exchange``, and may override other primitives.
    ``close`` closes ``inner`` too, unless a peer has failed.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        super().__init__(inner.world, inner.device, inner.timeout)
        self.name, self.transport, self.versions, self.narrow = inner.name, inner.transport, inner.versions, inner.narrow
        self.hosts, self.members, self.is_group = inner.hosts, inner.members, inner.is_group

    # Keep the next four attributes in the inner backend, whose waits use them.

    @property
    def timeout(self) -> float:
        """See :class:`~dualtrain.backends.waits.Waits`."""
        return self.inner.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.inner.timeout = seconds

    @property
    def watch(self) -> Watch | None:
        """See :class:`~dualtrain.backends.waits.Waits`."""
        return self.inner.watch

    @watch.setter
    def watch(self, watch: Watch | None) -> None:
        self.inner.watch = watch

    @property
    def meanwhile(self) -> Callable[[], int] | None:
        """See :class:`~dualtrain.backends.waits.Waits`."""
        return self.inner.meanwhile

    @meanwhile.setter
    def meanwhile(self, function: Callable[[], int] | None) -> None:
        self.inner.meanwhile = function

    @property
    def on_wait(self) -> Callable[[Any, str, float], None] | None:
        """See :class:`~dualtrain.backends.waits.Waits`."""
        return self.inner.on_wait

    @on_wait.setter
    def on_wait(self, function: Callable[[Any, str, float], None] | None) -> None:
        self.inner.on_wait = function

    def start_broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Work[None]:
        return self.inner.start_broadcast(tensor, root, name)

    def start_allgather(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Work[None]:
        return self.inner.start_allgather(output, tensor, name)

    def start_alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], name: str
    ) -> Work[None]:
        return self.inner.start_alltoall(output, tensor, received, sent, name)

    @property
    def gradient_path(self) -> GradientPath:
        """See :class:`~dualtrain.backends.base.Primitives`."""
        return self.inner.gradient_path

    def sums_among_calls(self, device: str) -> int:
        return self.inner.sums_among_calls(device)

    def subset(self, ranks: Sequence[int], world: World | None) -> Backend | None:
        group = self.inner.subset(ranks, world)
        assert group is None or isinstance(group, Backend)
        return group

    def make_default_group(self) -> None:
        """See the base class."""
        self.inner.make_default_group()

    def disconnect(self) -> None:
        self.inner.close()


class SharedMemoryBackend(DelegatingBackend):
    """``inner`` with reductions of CPU tensors through memory that the ranks of a host share.

    Construction is collective over ``inner`` and blocks. With several hosts, the ranks with the same local rank
    all-reduce their shards of the buffers between the hosts, over ``inner``'s library.

    Args:
        inner: a connected backend that can send CPU tensors.
        sum_memories: the memories in which other backends of this process sum gradients. These sums progress while this
            backend waits. This backend adds the memory of its own gradient sums, and removes it in :meth:`close`.
        reserved: sizes in bytes of all buffers that :meth:`new_buffer` will make. If sizes are given, that method does not
            block, and the ranks may call it at different times. If not, it is collective and maps memory at each call.

    Raises:
        UnsharedError: on every rank, if the ranks of a host cannot share memory, or the hosts have unequal rank counts.
        BackendError: a rank or the connections between the hosts failed.
        ValueError: there are several hosts, and the groups of ranks between them cannot be made.
    """

    transport = "shm"
    scales_sums = True

    def __init__(
        self, inner: Backend, sum_memories: list[SharedMemory] | None = None, reserved: Sequence[int] = ()
    ) -> None:
        super().__init__(inner)
        several_hosts = len(set(inner.hosts)) > 1
        if len(set(Counter(inner.hosts).values())) > 1:
            raise UnsharedError("the hosts do not have equally many ranks")
        self.transport = f"{type(self).transport}+{inner.transport}" if several_hosts else type(self).transport
        between_hosts = inner.between_hosts() if several_hosts else None
        # Operations in one memory are matched by their order. The order of gradient sums relative to other calls may differ
        # between ranks, so each kind has its own memory.
        self._sum_memories = [] if sum_memories is None else sum_memories
        self.sums = SharedMemory(inner, None if between_hosts is None else between_hosts.gradient_path, self._memories)
        self.calls = SharedMemory(inner, between_hosts, self._memories)
        if reserved:
            self.sums.buffers.reserve(reserved)
        # While this rank waits for another rank, that rank may wait for this rank's operations in shared memory.
        self.meanwhile = self._progress
        if between_hosts is not None:
            between_hosts.meanwhile = self._progress
        self._copies = False  # whether a gradient buffer could not be put into shared memory
        self._sum_memories.append(self.sums)

    def start_allreduce(self, tensor: torch.Tensor, op: ReduceOp, name: str) -> Work[None]:
        if tensor.device.type != "cpu":
            return self.inner.start_allreduce(tensor, op, name)
        # Not in place: the tensor may lie in a shared buffer on this rank, but not on another rank.
        return self.calls.start(tensor, op, name, in_place=False)

    def reduce_checked(self, call: Call, tensor: torch.Tensor, op: ReduceOp, name: str, *, in_place: bool) -> torch.Tensor:
        if not tensor.is_cpu or not self.calls.is_short(tensor):
            return super().reduce_checked(call, tensor, op, name, in_place=in_place)
        return self.calls.reduce_while_comparing(tensor, op, partial(agree, self, call), in_place=in_place)

    def start_sum(self, tensor: torch.Tensor, name: str, factor: float = 1.0, tail: int = 0) -> Work[None]:
        if tensor.device.type != "cpu":
            return self.inner.start_sum(tensor, name, factor, tail)
        return self.sums.start(tensor, ReduceOp.SUM, name, factor, tail)

    def start_tree_sum(
        self,
        tensor: torch.Tensor,
        others: Sequence[torch.Tensor],
        order: SumOrder,
        name: str,
        factor: float = 1.0,
        tail: int = 0,
    ) -> Work[None]:
        tree = self.sums.tree(order, tensor, others)
        if tree is None:
            return self.inner.start_tree_sum(tensor, others, order, name, factor, tail)
        return self.sums.start(tensor, ReduceOp.SUM, name, factor, tail, tree=tree)

    def new_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            try:
                return self.sums.buffers.new(numel, dtype)
            except UnsharedError as reason:
                if self.rank == 0 and not self._copies:
                    log.warning("gradients are copied for each reduction: no more memory can be shared (%s)", reason)
                self._copies = True
        return self.inner.new_buffer(numel, dtype, device)

    def replace_buffer(self, buffer: torch.Tensor, use: Callable[[torch.Tensor], None]) -> None:
        if not self.sums.replace_buffer(buffer, use):
            self.inner.replace_buffer(buffer, use)

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        return self.calls.exchange(numbers)

    def channel(self) -> Backend:
        library = super().channel()
        try:
            shared = SharedMemoryBackend(library, self._sum_memories)
        except UnsharedError:
            return library
        self.close_with(shared)
        return shared

    def _memories(self) -> tuple[SharedMemory, ...]:
        """Return the memories whose operations progress while this rank waits."""
        return (self.calls, *self._sum_memories)

    def _progress(self) -> int:
        return sum(memory.progress() for memory in self._memories())

    def release(self) -> None:
        self._sum_memories.remove(self.sums)  # in one step: another thread may add a memory
        self.sums.close()
        self.calls.close()
