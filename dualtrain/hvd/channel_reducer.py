"""Reduction of an ``hvd.DistributedOptimizer``'s gradients in buckets, on a channel: a backend for this optimizer only."""

from __future__ import annotations

import torch

from dualtrain.backends import Backend
from dualtrain.gradients import Transfer
from dualtrain.gradients.buckets import buffer_sizes
from dualtrain.gradients.exchange import Exchange
from dualtrain.gradients.hooks import has_later_hook
from dualtrain.gradients.refusals import Refusals
from dualtrain.gradients.slots import Slot
from dualtrain.gradients.sparse import sparse_dims
from dualtrain.hvd import basics
from dualtrain.hvd.base_reducer import HorovodReducer, Named, as_horovod_errors
from dualtrain.hvd.exceptions import HorovodInternalError
from dualtrain.hvd.pending import Pending
from dualtrain.hvd.process_sets import ProcessSet

_SCALARS = 1  # number of scalars that an exchange sums in addition to the gradients


def _are_on_cpu(named: Named) -> bool:
    return all(p.device.type == "cpu" for _, p in named)


class ChannelReducer(HorovodReducer):
    """Sends gradients in buckets during backward, on a separate channel; ``reduce`` waits for the sums.

    As on Horovod, and unlike with :class:`~dualtrain.gradients.GradientReducer`, backward never waits for another rank.
    So the number and the order of backward passes may differ between ranks. Every step has one exchange (the communication
    that combines the gradients over the ranks), or two if parameters were added since the last step. Before the first
    exchange, and again after parameters were added, each rank requests the channel from rank 0. The request describes the
    rank's parameters and options, and lists its sparse gradients. Rank 0 compares the parameters and options. Unless
    ``sparse_as_dense`` is set, all ranks send a gradient as a sparse gradient if it is sparse on any rank.

    Args:
        named: the parameters, the same on every rank of ``process_set``.
        base_name: name of this list of parameters, the same on every rank.
        process_set: the ranks whose gradients are combined.
        passes: number of backward passes whose gradients are summed before they are sent.
        transfer: how gradients are sent.

    Attributes:
        exchanges: number of exchanges that this rank has begun in this world, including those in which it contributed zeros
            after ``join``.
        announced: indices (from 1) of the exchanges during which this rank knew that a rank had called ``join``; emptied
            after the sums of such an exchange have arrived, and in a new world.

    Raises:
        ValueError: the backend cannot send the transfer's dtype, or a parameter's gradient cannot be averaged.
        HorovodInternalError: ``init`` was not called.
    """

    def __init__(self, named: Named, base_name: str, process_set: ProcessSet, passes: int, transfer: Transfer) -> None:
        super().__init__(base_name, process_set, passes)
        self.backend = basics.engine().backend
        if transfer.dtype is not None and transfer.dtype not in self.backend.narrow:
            raise ValueError(f"the {self.backend.name} backend cannot send {transfer.dtype}: compress to float16")
        self.exchanges = 0
        self.announced: set[int] = set()
        self._opening: Pending | None = None
        self._agreed = False  # whether _agree() has returned; until then, only the engine's thread may send
        named = list(named)
        self._on_cpu = _are_on_cpu(named)
        #: Has one extra scalar: the number of joined ranks that the averages leave out. With gradients on a GPU, the
        #: scalar is read and written only if a rank may have joined, because each access is a copy between GPU and CPU.
        self._exchange = Exchange(self.hooks, transfer, scalars=_SCALARS)
        self._is_left_out = False  # whether averages leave out this rank, which has joined
        self._traced = False  # whether the timeline records this exchange
        self._waits = False  # whether the main thread waits for the exchange
        self._refused = False  # whether the ranks have refused the last exchange
        self.add(named)
        self.number = basics.reducers.exchangers.register(self)

    @property
    def refusals(self) -> Refusals:
        """Checks that can refuse an exchange."""
        return self._exchange.refusals

    @property
    def exchanging(self) -> bool:
        """Return whether this rank has begun to send gradients, and the exchange has not ended."""
        return self.exchanges == self.current[1]

    @property
    def needs_zeros(self) -> bool:
        """Return whether the ranks that have joined must take part in an exchange now.

        A joined rank blocks while it exchanges sparse gradients. It then cannot take part in an exchange of a different
        optimizer. So if there are sparse gradients, this rank requests zeros from joined ranks only while its own main
        thread waits for the exchange.
        """
        usable = self.process_set.process_set_id is not None
        return self.exchanging and usable and (self._waits or not self._exchange.sparse.dims)

    def is_reduced(self) -> bool:
        """Return whether the gradients are the result of the last exchange, and were not all set to None or zero after it.

        Zeros on a GPU are not detected.
        """
        return self._exchange.is_reduced()

    def renew(self) -> None:
        """Make the next ``reduce`` read ``param.grad`` again."""
        self._exchange.reduced = False

    def reduce_once(self) -> None:
        """Combine the gradients of the parameters in ``hooks`` over the ranks. Collective; blocks."""
        self._waits = True
        try:
            with as_horovod_errors():
                self._run_exchange()
        except Exception:
            if self.exchanging:
                self.end_exchange()
            raise
        finally:
            self._waits = False
            self._end_activities()
        self.end_exchange()  # not after an interrupt such as Ctrl-C: the next call of ``reduce`` continues the exchange
        # Reading the extra scalar from a GPU blocks, so read it only if it may be greater than 0.
        if self._on_cpu or self.exchanges in self.announced:
            self._count_active_only()

    def _run_exchange(self) -> None:
        """Send all unsent buckets, wait for the sums and unpack them; raise BackendError if the ranks refuse. Blocks."""
        self._send_all()
        exchange = self._exchange
        self._refused = exchange.wait()
        if self._refused:
            exchange.end_round(reduced=False)
            exchange.extra.zero_()  # the next exchange must not count the joined ranks of this one
            exchange.refuse()
        exchange.unpack()
        exchange.end_round(reduced=True)

    def _send_all(self) -> None:
        """Send all unsent buckets. Blocks until the ranks have agreed on the layout."""
        self.hooks.restore()
        self.fill_frozen()
        if not self._agreed:
            self._agree()
        self._begin_exchange()
        if self._exchange.sparse.dims:
            self._announce()
        while self._exchange.schedule.has_unsent:
            self._send_next()

    def exchange_zeros(self) -> None:
        """Complete the current exchange, with zeros for unsent gradients, and discard its result. Collective; blocks."""
        super().exchange_zeros()
        self._ignore_frozen()

    def _ignore_frozen(self) -> None:
        """Ignore frozen parameters that other ranks have trained, because this rank takes no step."""
        for bucket in self._exchange.schedule.buckets:
            bucket.refused.trained_elsewhere = None

    def take_part(self, divide_by: str) -> None:
        """Send zeros for one exchange, because this rank has joined; do not wait for the sums.

        Blocks until the ranks have agreed on the layout.

        If a backward pass has begun the exchange, send this rank's gradients instead, unless a rank discards the exchange.
        """
        self.enter_world()
        if self.exchange_is_discarded() or not self.exchanging:
            self._forget_gradients()
        self._is_left_out = divide_by == "active" and not self.exchanging
        # An exchange of zeros is allowed even if the last exchange was refused, or its gradients were discarded.
        self.refusals.dropped = self.discarded = False
        basics.reducers.unused.add(self.current)
        try:
            with as_horovod_errors():
                self._send_all()
        finally:
            self._is_left_out = False

    @property
    def can_finish(self) -> bool:
        """Return whether every sum that this rank has started in the exchange has completed."""
        return all(bucket.work is None or bucket.work.done() for bucket in self._exchange.schedule.buckets)

    def finish_exchange(self) -> None:
        """End the exchange in which this rank takes part after ``join``, and discard its result. Blocks.

        If the ranks refuse the exchange, only ranks that have not joined raise the error. This rank stays joined.
        """
        self._refused = False
        try:
            self.reduce_once()
        except HorovodInternalError:
            if not self._refused:
                raise
            self.refusals.dropped = False
        finally:
            self._exchange.extra.zero_()
        self._ignore_frozen()
        self.renew()
        self.reset_passes()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for slot in self.hooks.slots:
            slot.param.grad = None

    def discard_step(self) -> None:
        """Discard the gradients of the step that backward has begun. Does not block."""
        super().discard_step()
        if not self.exchanging:
            self._exchange.schedule.forget_ready()

    # -- during backward --------------------------------------------------------------------------------------------

    def slot_ready(self, slot: Slot) -> None:
        """Send complete buckets, in order, unless a later hook may still change the gradient of ``slot``.

        Until the ranks have agreed on the layout, send nothing, and request the channel once all gradients are ready.
        """
        timeline = basics.engine().timeline
        if timeline.active:  # NEGOTIATE lasts until the bucket is sent, although only the first exchange negotiates
            self._traced = True
            timeline.begin(f"allreduce.{slot.name}", "NEGOTIATE_ALLREDUCE")
        if not self._agreed:
            if self.ready == len(self.hooks.slots):
                self._open(start=self._on_cpu and not has_later_hook(self, slot))
            return
        bucket = slot.bucket
        if bucket is None:
            return  # a sparse gradient is sent after the buckets
        if slot.copies_early:
            slot.copy_to_bucket()
        schedule = self._exchange.schedule
        if schedule.mark_ready(bucket) and not has_later_hook(self, slot):
            while schedule.next_is_complete:
                self._send_next()

    def _send_next(self) -> None:
        """Send the next bucket; do not wait for its sum."""
        with as_horovod_errors():
            self._begin_exchange()
            bucket = self._exchange.send_next(torch.ones(1, device="cpu") if self._is_left_out else None)
        if self._traced:
            timeline = basics.engine().timeline
            for slot in bucket.slots:
                timeline.end(f"allreduce.{slot.name}", "NEGOTIATE_ALLREDUCE")
                timeline.begin(f"allreduce.{slot.name}", "ALLREDUCE")

    def _end_activities(self) -> None:
        """End the exchange's activities on the timeline."""
        if self._traced and basics.is_initialized():
            for slot in self.hooks.slots:
                for activity in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE"):
                    basics.engine().timeline.end(f"allreduce.{slot.name}", activity)
        self._traced = False

    def _begin_exchange(self) -> None:
        if not self.exchanging:
            self.exchanges += 1
            self._announce()

    def _announce(self) -> None:
        """Request zeros from the ranks that have joined, if this exchange needs them now."""
        if self.needs_zeros:
            basics.engine().announce(self)

    # -- the channel ------------------------------------------------------------------------------------------------

    def world_changed(self) -> None:
        """Discard the channel and the buckets of the previous world."""
        self.backend = basics.engine().backend
        self._exchange.forget()
        self._opening, self._agreed = None, False
        self.exchanges = 0
        self.announced.clear()

    def layout_changed(self) -> None:
        """Make the ranks agree on the parameters again before the next exchange."""
        self._exchange.laid_out = False
        self._opening, self._agreed = None, False

    def _open(self, *, start: bool) -> Pending:
        """Request the channel, unless it was requested before; do not block.

        With ``start``, send all gradients as soon as the channel is open.
        """
        if self._opening is None:
            slots = self.hooks.slots
            name = f"{self.channel_name}/{len(slots)}"
            basics.engine().channels.release_with(self, name)
            self._opening = basics.engine().open_channel(
                name,
                self.set_id,
                layout=[*self._describe_transfer(), *(slot.describe() for slot in slots)],
                sparse=[[number, dims] for number, dims in sparse_dims(slots).items()],
                buffers=buffer_sizes(slots, _SCALARS + 1, self._exchange.transfer),  # 1 for the flag of a refusal
                on_open=self._start if start else None,
            )
        return self._opening

    def _describe_transfer(self) -> list[str]:
        """Describe the options that must be the same on every rank, such as HOROVOD_FUSION_THRESHOLD."""
        t = self._exchange.transfer
        return [
            f"buckets of at most {t.bucket_bytes} bytes",
            f"groups {[len(group) for group in t.groups]}",
            f"dtype {t.dtype}",
            f"factors {t.before} before and {t.after} after the sum",
            f"sparse_as_dense={t.sparse_as_dense}",
        ]

    def _start(self, channel: Backend, sparse_gradients: list[list[int]]) -> None:
        """Make and send all buckets, until a rank discards the exchange. Called in the engine's thread.

        (The main thread cannot do this: it may be waiting for another optimizer's gradients.)
        """
        self._use(channel, sparse_gradients)
        while self._exchange.schedule.has_unsent and not self.exchange_is_discarded():
            self._send_next()

    def _agree(self) -> None:
        """Wait until the ranks have agreed on the layout, then use the channel. Collective; blocks."""
        channel, sparse_gradients = self._open(start=False).wait()
        if not self._exchange.laid_out:  # the engine's thread has not called _start
            self._use(channel, sparse_gradients)
        self._agreed = True

    def _use(self, channel: Backend, sparse_gradients: list[list[int]]) -> None:
        self.backend = channel
        self._exchange.sparse.add(((number, dims) for number, dims in sparse_gradients), self._exchange.transfer)
        self._exchange.lay_out(channel, self.name)

    @torch.no_grad()
    def _count_active_only(self) -> None:
        """Correct the averages: leave ranks that have joined with ``divide_by="active"`` out of the divisor."""
        self.announced.clear()
        size, left_out = self.backend.size, float(self._exchange.extra)
        if not left_out:
            return
        self._exchange.extra.zero_()
        if self._exchange.transfer.sums:
            return
        for slot in self.hooks.slots:
            if slot.param.grad is not None:
                slot.param.grad.mul_(size / (size - left_out))
