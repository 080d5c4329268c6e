"""How the gradients of one ``hvd.DistributedOptimizer`` are combined: in buckets on a channel, or call by call."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dualtrain.backends import Backend
from dualtrain.errors import BackendError
from dualtrain.gradients import GradientReducer
from dualtrain.gradients.buckets import Bucket, Slot, Transfer
from dualtrain.hvd import basics
from dualtrain.hvd.engine import Pending
from dualtrain.hvd.exceptions import HorovodInternalError
from dualtrain.hvd.forms import new_handle
from dualtrain.hvd.mpi_ops import grouped_allreduce_async_, synchronize
from dualtrain.hvd.process_sets import ProcessSet

_NEWS_SECONDS = 0.5  # for rank 0's word that the world has ended, behind a connection that has
Named = Iterable[tuple[str, torch.nn.Parameter]]


@contextmanager
def _horovods_errors() -> Iterator[None]:
    """HorovodInternalError in place of BackendError."""
    try:
        yield
    except HorovodInternalError:
        raise
    except BackendError as error:
        raise _failure(error) from error


def _failure(error: BackendError) -> HorovodInternalError:
    """``error`` as Horovod's; where the world has ended, with why: the ranks that knew first have closed their lines."""
    engine, deadline = basics.engine(), time.monotonic() + _NEWS_SECONDS
    while engine.down is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if engine.down is None or engine.down in str(error):
        return HorovodInternalError(str(error))
    return HorovodInternalError(f"{engine.down} ({error})")


def _are_on_cpu(named: Named) -> bool:
    return all(p.device.type == "cpu" for _, p in named)


class ChannelReducer(GradientReducer):
    """Sends gradients in buckets, in backward, on a channel that only this optimizer uses; ``reduce`` waits for them.

    As Horovod does, and unlike the base class: backward never waits for another rank, so that ranks may run their
    backwards in any order and number, and every step has one exchange. The first one asks rank 0 for the channel; with
    that all ranks learn that their layouts agree, and which gradients are sparse.

    Args:
        named: the parameters, the same on every rank of the set.
        base_name: what is optimized, the same on every rank.
        process_set: the ranks.
        passes: backward passes that are summed before.
        transfer: how gradients travel.
    """

    def __init__(self, named: Named, base_name: str, process_set: ProcessSet, passes: int, transfer: Transfer) -> None:
        self.base_name = base_name
        self.channel_name = ""  # with the first exchange in a world
        self.process_set = process_set
        self.exchanges = 0  # so far; a rank that has joined counts those that it takes part in with zeros
        self.exchanging = False
        self.announced: set[int] = set()  # exchanges in which this rank knew of one that had joined
        self.dirty = False  # whether there are gradients that were not synchronized
        self._generation = 0
        self._ready = 0  # parameters with all their passes
        self._opening: Pending | None = None
        self._agreed = False  # whether that has ended: until then the engine's thread may be sending
        named = list(named)
        self._on_cpu = _are_on_cpu(named)
        #: What travels along, in the last bucket: how many ranks have joined and are not to be counted in the average.
        self._left_out = torch.zeros(1)
        self._is_left_out = False  # whether this rank is one of them
        super().__init__(named, basics.engine().backend, passes=passes, transfer=transfer)
        basics.engine().register(self)

    def rest(self) -> None:
        """The gradients are synchronized: as many passes as before may follow."""
        if not self.dirty:
            return  # no backward since the last time
        self.dirty, self._ready = False, 0
        for slot in self.slots:
            slot.passes = 0

    def reduce(self) -> None:
        """As the base class's; raises HorovodInternalError in place of BackendError."""
        if self.is_reduced():
            return
        try:
            with _horovods_errors():
                super().reduce()
        finally:
            self.exchanging = False
            timeline = basics.engine().timeline if basics.is_initialized() else None
            if timeline is not None and timeline.active:
                for bucket in self._buckets:
                    timeline.end(bucket.name, "ALLREDUCE")
        # On a GPU the host would wait to look at it: only where it may be more than 0.
        if self._on_cpu or self.exchanges in self.announced:
            self._count_active_only()

    def shadow(self, divide_by: str) -> None:
        """Takes part in one exchange with zeros, as a rank that has joined."""
        for slot in self.slots:
            slot.param.grad = None
        self._is_left_out = divide_by == "active"
        self._reduced = False
        try:
            self.reduce()
        finally:
            self._is_left_out = False
            self._left_out.zero_()
        self.renew()
        self.rest()
        for slot in self.slots:
            slot.param.grad = None

    def drop(self) -> None:
        """Forgets what a failed step left behind: with an exchange under way, the channel too."""
        if self.exchanging:
            self._generation = -1
        self._reduced = self.exchanging = False
        for bucket in self._buckets:
            bucket.pending = len(bucket.slots)
        self.rest()

    # -- during backward --------------------------------------------------------------------------------------------

    def gradient_is_there(self, slot: Slot) -> None:
        """Autograd has finished the gradient of this slot's parameter, in one of its passes."""
        self._reduced, self.dirty = False, True
        slot.passes += 1
        if slot.passes > self.passes:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        if slot.passes == self.passes:
            self._arrived(slot)

    def _arrived(self, slot: Slot) -> None:
        self._ready += 1
        self._enter_world()
        if not self._agreed:
            if self._ready == len(self.slots):
                self._open(start=self._on_cpu)
            return
        if slot.bucket is None:
            return  # sparse: it travels at the end
        self._tick_off(slot, slot.bucket)

    def _send_next(self) -> None:
        with _horovods_errors():
            self._begin_exchange()
            super()._send_next()
        timeline = basics.engine().timeline
        if timeline.active:
            timeline.begin(self._buckets[self._next - 1].name, "ALLREDUCE")

    def _prepare(self) -> None:
        self._look_for_thawed()
        self._enter_world()
        if not self._agreed:
            self._lay_out()
        self._begin_exchange()

    def _begin_exchange(self) -> None:
        if not self.exchanging:
            self.exchanges += 1
            self.exchanging = True  # the engine's thread announces it too, if it learns of one that joined from now on
            basics.engine().announce(self)

    def _enter(self, backend: Backend) -> None:
        return None  # it has a channel of its own

    # -- the channel ------------------------------------------------------------------------------------------------

    def _enter_world(self) -> None:
        """After ``init``, and after ``init`` anew: nothing of another world is of use."""
        if self._generation != basics.generation():
            engine = basics.engine()
            self.forget(engine.backend)
            self._generation, self._opening, self._agreed = basics.generation(), None, False
            self.exchanges, self.exchanging = 0, False
            self.announced.clear()
            self.channel_name = f"{self.base_name}.{engine.claim(self.base_name)}"
            self.name = f"gradients.{self.channel_name}"

    def add(self, named_parameters: Named) -> None:
        """As the base class's; the ranks agree on the layout anew."""
        super().add(named_parameters)
        self._opening, self._agreed = None, False

    def _open(self, *, start: bool) -> Pending:
        """Asks for the channel, once; does not block. With ``start`` all gradients are there, and are sent when it is."""
        if self._opening is None:
            grads = [slot.param.grad for slot in self.slots]
            sparse = [[i, grad.sparse_dim()] for i, grad in enumerate(grads) if grad is not None and grad.is_sparse]
            name = f"{self.channel_name}/{len(self.slots)}"
            basics.engine().release_with(self, name)
            self._opening = basics.engine().open_channel(
                name,
                self.process_set.process_set_id or 0,
                layout=[*(slot.describe() for slot in self.slots), self._describe_transfer()],
                sparse=sparse,
                then=self._start if start else None,
            )
        return self._opening

    def _describe_transfer(self) -> str:
        """What the buckets depend on beside the parameters: HOROVOD_FUSION_THRESHOLD may differ between hosts."""
        t = self.transfer
        groups = [len(group) for group in t.groups]
        return f"at most {t.bucket_bytes} bytes at once, groups {groups}, as {t.dtype}, times {t.before}"

    def _start(self, channel: Backend, sparse: list[list[int]]) -> None:
        """In the engine's thread, while this rank may already wait for another optimizer: lays out, and sends."""
        self._adopt(channel, sparse)
        while self._next < len(self._buckets):
            self._send_next()

    def _lay_out(self) -> None:
        channel, sparse = self._open(start=False).wait()
        if not self._laid_out:  # not started by the engine's thread
            self._adopt(channel, sparse)
        self._agreed = True

    def _adopt(self, channel: Backend, sparse: list[list[int]]) -> None:
        self.backend = channel
        target = self._sparse_again if self.transfer.sparse_as_dense else self._sparse
        target.update((number, dims) for number, dims in sparse)
        self._make_buckets()

    def _make_buckets(self) -> None:
        self.cargo = torch.zeros(1, dtype=torch.float64)
        super()._make_buckets()  # with a place for one number
        # Written and read in its place, when there is a reason to, and not copied from and to the host in every step.
        self._left_out, self.cargo = self._carried, self.cargo[:0]
        self._carried = self.cargo

    def _load(self, bucket: Bucket) -> None:
        super()._load(bucket)
        if self._is_left_out:
            self._left_out.fill_(1)

    @torch.no_grad()
    def _count_active_only(self) -> None:
        self.announced.clear()
        size, left_out = self.backend.size, float(self._left_out)
        if not left_out:
            return
        self._left_out.zero_()
        if self.transfer.after == 1:
            return  # a sum
        for slot in self.slots:
            if slot.param.grad is not None:
                slot.param.grad.mul_(size / (size - left_out))


class CalledReducer(ChannelReducer):
    """Combines gradients by an ordinary call for all of them: for operations and compressors that buckets do not know."""

    def __init__(
        self, named: Named, base_name: str, process_set: ProcessSet, passes: int, op: int, compression: Any
    ) -> None:
        self._op, self._compression = op, compression
        self._call: tuple[int, list[Any]] | None = None
        super().__init__(named, base_name, process_set, passes, Transfer())

    def reduce(self) -> None:
        """Compresses, reduces and decompresses every gradient; one that is missing counts as zeros."""
        if self.is_reduced():
            return
        self._enter_world()
        handle, contexts = self._submit()
        self._call = None
        for slot, result, ctx in zip(self.slots, synchronize(handle) or (), contexts, strict=True):
            # As in buckets, one that was frozen takes part as zeros and gets nothing.
            if slot.param.requires_grad or slot.param.grad is not None:
                slot.param.grad = self._compression.decompress(result, ctx)
        self._reduced = True

    def drop(self) -> None:
        """Forgets what a failed step left behind."""
        super().drop()
        self._call = None

    def _arrived(self, slot: Slot) -> None:
        self._ready += 1
        self._enter_world()
        if self._ready == len(self.slots):
            self._look_for_thawed()  # the gradients of those may still come
        if self._ready == len(self.slots):
            self._submit()

    def _submit(self) -> tuple[int, list[Any]]:
        if self._call is None:
            self._look_for_thawed()
            self._call = self._refuse() or self._start_call()
        return self._call

    def _refuse(self) -> tuple[int, list[Any]] | None:
        """In place of the call, one that fails on every rank with what changed here; ``None`` if nothing did."""
        if not self._laid_out:
            self._refusals.lay_out([(slot.name, slot.param) for slot in self.slots], torch.zeros(1))
            self._laid_out = True
        reason = self._refusals.reason(())
        if reason is None:
            return None
        number = self.process_set.process_set_id or 0
        refused = basics.engine().submit("grouped_allreduce", self.name, number, op=self._op, refused=reason)
        return new_handle(refused, tuple), []

    def _start_call(self) -> tuple[int, list[Any]]:
        params = [slot.param for slot in self.slots]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in params]
        packed = [self._compression.compress(grad) for grad in grads]
        tensors = [tensor.contiguous() for tensor, _ in packed]
        options = {"name": self.name, "op": self._op, "process_set": self.process_set}
        handle = grouped_allreduce_async_(tensors, **options) if tensors else -1
        return handle, [ctx for _, ctx in packed]
