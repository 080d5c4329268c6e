"""How the gradients of one ``hvd.DistributedOptimizer`` are combined: in buckets on a channel, or call by call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dualtrain.buckets import Slot, Transfer
from dualtrain.errors import BackendError
from dualtrain.gradients import GradientReducer
from dualtrain.hvd import basics
from dualtrain.hvd.exceptions import HorovodInternalError
from dualtrain.hvd.mpi_ops import grouped_allreduce_async_, synchronize
from dualtrain.hvd.process_sets import ProcessSet

_NEWS_SECONDS = 0.5  # for rank 0's word that the world has ended, behind a connection that has
Named = Iterable[tuple[str, torch.nn.Parameter]]


def _failure(error: BackendError) -> HorovodInternalError:
    """``error`` as Horovod's; where the world has ended, with why: the ranks that knew first have closed their lines."""
    engine, deadline = basics.engine(), time.monotonic() + _NEWS_SECONDS
    while engine.down is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return HorovodInternalError(f"{engine.down} ({error})" if engine.down is not None else str(error))


class ChannelReducer(GradientReducer):
    """Sends gradients in buckets, in backward, on a channel that only this optimizer uses.

    Args:
        named: the parameters, the same on every rank of the set.
        channel_name: the same on every rank, and of no other optimizer.
        process_set: the ranks.
        passes: backward passes that are summed before.
        transfer: how gradients travel.
    """

    def __init__(self, named: Named, channel_name: str, process_set: ProcessSet, passes: int, transfer: Transfer) -> None:
        self.channel_name = channel_name
        self.process_set = process_set
        self.exchanges = 0  # so far; a rank that has joined counts those that it takes part in with zeros
        self.exchanging = False
        self.dirty = False  # whether there are gradients that were not synchronized
        self._generation = 0
        named = list(named)
        # One number travels along: how many ranks have joined and do not want to be counted in the average. Not on GPUs,
        # where to look at it would hold up the host in every step.
        carry = int(all(p.device.type == "cpu" for _, p in named))
        super().__init__(named, basics.engine().backend, passes=passes, carry=carry, transfer=transfer)
        self.name = f"gradients.{channel_name}"
        basics.engine().register(self)

    def rest(self) -> None:
        """The gradients are synchronized: as many passes as before may follow."""
        self.dirty = False
        for slot in self._slots:
            slot.passes = 0

    def reduce(self) -> None:
        """As the base class's; raises HorovodInternalError in place of BackendError."""
        if self._reduced:
            return
        try:
            self._begin_exchange()
            super().reduce()
        except HorovodInternalError:
            raise
        except BackendError as error:
            raise _failure(error) from error
        finally:
            self.exchanging = False
            timeline = basics.engine().timeline if basics.is_initialized() else None
            if timeline is not None and timeline.active:
                for bucket in self._buckets:
                    timeline.end(bucket.name, "ALLREDUCE")
        if self.cargo.any():
            self._count_active_only()

    def shadow(self, divide_by: str) -> None:
        """Takes part in one exchange with zeros, as a rank that has joined."""
        for slot in self._slots:
            slot.param.grad = None
        self.cargo.fill_(float(divide_by == "active"))
        self._reduced, self._used = False, True
        self.reduce()
        self.renew()
        for slot in self._slots:
            slot.param.grad = None

    def drop(self) -> None:
        """Forgets what a failed step left behind."""
        self.forget(self.backend)
        self.exchanging, self._generation = False, 0
        self.rest()

    def _hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        tick = super()._hook(slot)

        def gradient_is_there(p: torch.Tensor) -> None:
            self.dirty = True
            slot.passes += 1
            if slot.passes > self.passes:
                raise AssertionError(
                    "Gradients were computed more than backward_passes_per_step times before call to step(). "
                    "Increase backward_passes_per_step to accumulate gradients locally."
                )
            tick(p)

        return gradient_is_there

    def _begin_exchange(self) -> None:
        """Before anything is sent: a channel in this world, and word to those who have joined."""
        engine = basics.engine()
        if self._generation != basics.generation():
            channel = engine.channel(self.channel_name, self.process_set.process_set_id or 0)
            self.forget(channel)
            self._generation, self.exchanges, self.exchanging = basics.generation(), 0, False
            engine.register(self)
        if not self.exchanging:
            self.exchanging = True
            self.exchanges += 1
            engine.announce(self)

    def _send_next(self) -> None:
        try:
            self._begin_exchange()
            super()._send_next()
        except HorovodInternalError:
            raise
        except BackendError as error:
            raise _failure(error) from error
        timeline = basics.engine().timeline
        if timeline.active:
            timeline.begin(self._buckets[self._next - 1].name, "ALLREDUCE")

    @torch.no_grad()
    def _count_active_only(self) -> None:
        size, left_out = self.backend.size, float(self.cargo[0])
        self.cargo.zero_()
        if self.transfer.after == 1:
            return  # a sum
        for slot in self._slots:
            if slot.param.grad is not None:
                slot.param.grad.mul_(size / (size - left_out))


class CalledReducer(ChannelReducer):
    """Combines gradients by an ordinary call for all of them: for operations and compressors that buckets do not know."""

    def __init__(
        self, named: Named, channel_name: str, process_set: ProcessSet, passes: int, op: int, compression: Any
    ) -> None:
        self._op, self._compression = op, compression
        super().__init__(named, channel_name, process_set, passes, Transfer())

    def reduce(self) -> None:
        """Compresses, reduces and decompresses every gradient; one that is missing counts as zeros."""
        if self._reduced:
            return
        params = [slot.param for slot in self._slots]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in params]
        packed = [self._compression.compress(grad) for grad in grads]
        tensors = [tensor.contiguous() for tensor, _ in packed]
        if tensors:
            handle = grouped_allreduce_async_(tensors, name=self.name, op=self._op, process_set=self.process_set)
            for p, result, (_, ctx) in zip(params, synchronize(handle), packed, strict=True):
                p.grad = self._compression.decompress(result, ctx)
        self._seen, self._ending, self._reduced, self._used = 0, None, True, False
