"""Send the buckets of one reducer, and wait for them. The reducer decides when to send.

An exchange has the layout's buckets, the schedule and the sparse gradients. It also has the numbers that are sent behind
the gradients of the last bucket: the caller's scalars, then a flag by which a rank refuses to continue (``refusals.py``).
With ``unused="none"``, one number for each parameter follows: 1 if this rank used the parameter, else 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NoReturn

import torch

from dualtrain.backends import Backend
from dualtrain.backends.sum_order import SumOrder
from dualtrain.errors import BackendError, first_line
from dualtrain.gradients.buckets import Bucket, make_buckets
from dualtrain.gradients.hooks import ParameterHooks, reducers_of
from dualtrain.gradients.layout import AVERAGE, Transfer
from dualtrain.gradients.packed import with_shared_counters
from dualtrain.gradients.refusals import Refusals
from dualtrain.gradients.schedule import Schedule
from dualtrain.gradients.slots import Slot, separate_gradients, write_back
from dualtrain.gradients.sparse import SparseGradients, has_values

Unused = Literal["zero", "none"]


class Exchange:
    """Exchange of a reducer's gradients in rounds: in each round, every bucket is sent once.

    Args:
        hooks: the reducer's parameters. After parameters are added, :meth:`lay_out` must be called again.
        transfer: how gradients are sent.
        unused: see :class:`~dualtrain.gradients.GradientReducer`.
        scalars: how many extra scalars are sent in the last bucket, behind its gradients.
        order: the tree along which gradients are summed; its leaves are shards (parts of the global batch). ``None`` for
            the backend's own order.

    Attributes:
        extra: the extra scalars, shape (scalars,), as a part of the last bucket; after a round, their sums over the ranks.
        laid_out: whether the layout includes all slots.
        reduced: True if the gradients are the result of the last round. :meth:`is_reduced` also checks whether they were
            zeroed or set to ``None`` since.
    """

    def __init__(
        self,
        hooks: ParameterHooks,
        transfer: Transfer = AVERAGE,
        unused: Unused = "zero",
        scalars: int = 0,
        order: SumOrder | None = None,
    ) -> None:
        self.slots, self.transfer, self.unused = hooks.slots, transfer, unused
        self._order = order
        self.schedule = Schedule()
        self.refusals = Refusals(hooks)
        self.refusals.has_idle_ranks = order is not None and not all(order.ranges)
        self.sparse = SparseGradients()
        self.extra = torch.zeros(scalars, device="cpu")
        self.laid_out = False
        self.reduced = False
        self._hooks = hooks
        self._backend: Backend | None = None
        self._finished = (0, 0)  # a round, and how many of its buckets have finished
        #: The message of the first error of a failed exchange; the error itself would keep the caller's variables alive.
        self._failure = ""
        self._used = self.extra[:0]  # how many ranks used each parameter; sent behind the extra scalars and the flag
        self._results: list[tuple[torch.Tensor, int]] = []  # the gradients' buffers, and their versions after a round

    # -- the layout -----------------------------------------------------------------------------------------------

    def describe(self, size: int) -> list[str]:
        """Return the options that must be the same on each of ``size`` ranks: all except ``Transfer.before``.

        Without ``coalesce``, the ranks must also agree whether the result is a plain sum (``Transfer.sums``).
        """
        transfer, order = self.transfer, "backend's" if self._order is None else f"tree of {self._order.ranges}"
        factor = transfer.factor_after(size if self._order is None else self._order.shards)
        return [
            f"unused={self.unused}",
            f"{len(self.extra)} extra scalars",
            f"factor {factor} after the sum",
            f"dtype {transfer.dtype}",
            f"buckets of {transfer.bucket_bytes} bytes",
            f"sets of {[len(each) for each in transfer.groups]} parameters",
            f"sparse_as_dense={transfer.sparse_as_dense}",
            f"coalesce={transfer.coalesce}" + ("" if transfer.coalesce else f", plain sums={transfer.sums}"),
            f"average_first={transfer.average_first}",
            f"order of the sum: {order}",
        ]

    @torch.inference_mode(False)  # the buckets are also used outside of inference mode
    def lay_out(self, backend: Backend, name: str) -> None:
        """Make the buckets, after the ranks have agreed on all slots and the sparse gradients. Collective; blocks."""
        self._backend = backend
        self._hooks.check_devices()
        for slot in self.slots:
            slot.bucket = None
        dense = [slot for number, slot in enumerate(self.slots) if number not in self.sparse.dims]
        scalars = len(self.extra)
        count = scalars + len(self.slots) * (self.unused == "none")
        # Add one element for the flag by which a rank refuses to continue, unless there is nothing else to send.
        buckets = make_buckets(dense, count + bool(self.slots or count), backend, name, self.transfer, self._order)
        self.refusals.record_parameters([(slot.name, slot.param) for slot in self.slots])
        self._use_extras(buckets[-1].memory.extra if buckets else torch.zeros(scalars + 1, device="cpu"))
        if buckets:
            buckets[-1].on_new_extra = self._use_extras
        self.schedule.use(buckets)
        self._results = []
        self.laid_out = True

    def _use_extras(self, extras: torch.Tensor) -> None:
        scalars = len(self.extra)
        self.extra, self._used = extras[:scalars], extras[scalars + 1 :]
        self.refusals.flag = extras[scalars : scalars + 1]

    def expect_sparse(self, dims: Mapping[int, int]) -> None:
        """From now on, gather these sparse gradients (``dims``: slot index → number of sparse dimensions).

        With ``sparse_as_dense``, send them as dense ones instead. If the order of the sum is fixed, and
        ``sparse_as_dense`` is not set, do nothing: the exchange then refuses a sparse gradient.
        """
        if self._order is None or self.transfer.sparse_as_dense:
            self.sparse.add(dims, self.transfer)

    def leave_layout(self, *, cpu_waits: bool) -> None:
        """Send zeros in the buckets that are not sent yet, before the layout is replaced. Collective; blocks.

        Ranks that keep the layout wait for these buckets.

        Raises:
            BackendError: on every rank, see ``Refusals.leave_layout``; on this rank, if an earlier exchange failed or was
                interrupted. All gradients are dropped, unless an earlier wait failed, which has dropped them already.
        """
        if self._backend is None:
            return
        self._refuse_after_interrupt()
        self.refuse_after_failure()
        self._leave_moved_memory()
        try:
            self.refusals.leave_layout(self._backend, self.schedule.buckets, self.schedule.next, cpu_waits)
        except Exception:
            self._drop_gradients()
            raise

    def forget(self) -> None:
        """Discard the buckets, and with them a failed exchange. Called when a new backend replaces the current one."""
        self.sparse = SparseGradients()  # the ranks may know different sparse gradients, but must make the same layout
        self.schedule.use([])
        self.schedule.start_round()
        self.laid_out = self.reduced = False
        self._failure = ""
        for slot in self.slots:
            slot.bucket = None

    # -- one round ------------------------------------------------------------------------------------------------

    def send_next(self, scalars: torch.Tensor | None = None) -> Bucket:
        """Send the next bucket. ``scalars``, if given, are sent as extra scalars with the last bucket.

        Waits for the backend's earlier asynchronous calls, but not for the bucket's sum.

        Raises:
            BackendError: the bucket cannot be sent; or an earlier call was interrupted before it had sent its bucket, in
                which case all gradients are dropped.
        """
        assert self._backend is not None
        schedule = self.schedule
        if not schedule.next:
            self._leave_moved_memory()
        self._refuse_after_interrupt()
        bucket = schedule.take_next()
        try:
            bucket.pack()
            bucket.refuse_changed_parameters(schedule.round)
            if not schedule.has_unsent:
                self._load_extra(scalars)
                self.refusals.set_flag(schedule.buckets, cpu_waits=scalars is not None)
            self._backend.drain()
            bucket.start()
        except Exception as error:
            self._record_failure(error)
            raise
        return bucket

    def _record_failure(self, error: Exception) -> None:
        self._failure = self._failure or first_line(error)

    def _refuse_after_interrupt(self) -> None:
        """Raise BackendError if an exception such as KeyboardInterrupt has stopped the call that was to send a bucket.

        Then also drop all gradients. Without this check, a library that matches operations by their order would add this
        rank's next bucket to the bucket of the other ranks that this rank has not sent.
        """
        sent = self.schedule.next
        if sent and self.schedule.buckets[sent - 1].work is None:
            self.wait()  # raises BackendError

    def _leave_moved_memory(self) -> None:
        """If ``share_memory_()`` has moved gradients to memory outside of their buckets, leave that memory to the program.

        Call this before any bucket is packed: ``pack`` compares addresses of gradients with those of all buckets.
        """
        for bucket in self.schedule.buckets:
            bucket.memory.leave_moved()

    def _load_extra(self, scalars: torch.Tensor | None) -> None:
        if scalars is not None:
            self.extra.copy_(scalars)
        if self.unused == "none":
            self._used.copy_(torch.tensor([float(slot.param.grad is not None) for slot in self.slots], device="cpu"))

    def add_shard(self, scalars: torch.Tensor | None = None) -> None:
        """Add the gradients of one shard to the partial sums; this rank computes another shard next. Not collective.

        The partial sums reuse the gradients' memory: every ``param.grad`` is ``None`` afterwards.
        """
        self._load_extra(scalars)
        self.refusals.clear_flag()
        self._leave_moved_memory()
        separate_gradients(self.slots)
        for bucket in self.schedule.buckets:
            bucket.add_shard()
        for slot in self.slots:
            slot.param.grad = None

    def wait(self, *, cpu_waits: bool = False) -> bool:
        """Wait for the sums of the round, whose buckets must all have been sent. Return whether the ranks must refuse them.

        An error drops all gradients.

        Args:
            cpu_waits: whether the CPU waits anyway for results on a GPU.

        Raises:
            BackendError: a rank failed, or did not take part within the backend's timeout, or an interrupt such as Ctrl-C
                has stopped the call that was to send a bucket. With gradients on a GPU and without ``cpu_waits``, a
                refusal raises this error too: see ``Refusals.flagged``.
        """
        assert self._backend is not None
        try:
            # An interrupt such as Ctrl-C may stop this wait, and the caller may repeat it.
            finished = self._finished[1] if self._finished[0] == self.schedule.round else 0
            for number, bucket in enumerate(self.schedule.buckets[finished:], finished + 1):
                if bucket.work is None:
                    self.refuse_after_failure()
                bucket.finish()
                self._finished = self.schedule.round, number
        except Exception as error:
            self._record_failure(error)
            self._drop_gradients()
            if isinstance(error, BackendError):
                self._backend.abandon(error)  # other ranks may still complete these sums: refuse this rank's later calls
            raise
        try:
            return self.refusals.flagged(self._backend, self.schedule.buckets, cpu_waits)
        except BackendError:
            self._drop_gradients()
            raise

    def refuse(self) -> NoReturn:
        """Raise BackendError, on every rank, after a round that the ranks must refuse. Collective; blocks.

        All gradients are dropped. For the message, see ``Refusals.refuse``.
        """
        assert self._backend is not None
        try:
            self.refusals.refuse(self._backend, self.schedule.buckets)
        finally:
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        self.refusals.drop_gradients()
        self._results = []
        for bucket in self.schedule.buckets:
            bucket.forget_gradients()

    def unpack(self) -> None:
        """Make every ``param.grad`` the result of the round, and gather the sparse gradients. Collective; blocks.

        With ``unused="none"``, the result is ``None`` if no rank used the parameter.
        """
        assert self._backend is not None
        self._unpack_buckets()
        self.sparse.reduce(self.slots, self._backend, self.transfer, drop_empty=self.unused == "none")
        if self.sparse.trained_elsewhere is not None:  # this rank refuses the next round
            self.schedule.buckets[-1].refused.trained_elsewhere = self.sparse.trained_elsewhere

    def changed_late(self) -> Slot | None:
        """Return a slot whose gradient the program has changed after it was sent, or ``None``. Call it before ``unpack``.

        Ignore a parameter that several reducers share: each of them replaces ``param.grad``.
        """
        changed = [slot for bucket in self.schedule.buckets for slot in bucket.changed()]
        if not changed:
            return None
        outside = [grad for bucket in self.schedule.buckets for grad in bucket.packed_outside()]
        # Ignore gradients that share a version counter: it also counts changes of other gradients.
        shared = with_shared_counters(outside)
        return next((s for s in changed if id(s.param.grad) not in shared and len(reducers_of(s.param)) == 1), None)

    def check_assigned(self) -> None:
        """Raise BackendError, on this rank, if a gradient was assigned after the last round had averaged zeros for it."""
        assert self._backend is not None
        for bucket in self.schedule.buckets:
            slot = bucket.assigned_late()
            if slot is not None:
                raise BackendError(
                    f"rank {self._backend.job_rank}: the gradient of {slot.name!r} was assigned after backward, which "
                    "had averaged zeros for it: run backward in no_sync(), so that step() averages all gradients, or "
                    "change param.grad in place if every rank has the same values"
                )

    def end_round(self, *, reduced: bool) -> None:
        """Start the next round; ``reduced`` says whether the gradients are the result of the round that has ended."""
        self.reduced = reduced  # set first: after an interrupt in between, the gradients must not be averaged again
        self.schedule.start_round()

    def _unpack_buckets(self) -> None:
        buckets = self.schedule.buckets
        for bucket in buckets:
            bucket.unpack()
        outside = [pair for bucket in buckets for pair in bucket.outside]
        if outside:
            write_back(outside)
        if self.unused == "none" and buckets:
            for slot, ranks in zip(self.slots, self._used.tolist(), strict=True):
                if slot.bucket is not None and not ranks:
                    slot.param.grad = None
        self.sparse.restore(self.slots)
        any_grad = any(slot.param.grad is not None for slot in self.slots)
        # Private in torch 2.5 to 2.15: the version counter, which counts in-place changes, has no public name.
        # A detached tensor shares this counter, and refers to no autograd graph.
        exposed = [tensor for bucket in buckets for tensor in bucket.memory.exposed.tensors.values()]
        results = [*exposed, *(grad.detach() for _, grad in outside)]
        self._results = [(each, each._version) for each in results] if any_grad else []
        for bucket in buckets:
            bucket.outside.clear()  # drop the references to the gradients

    def is_reduced(self) -> bool:
        """Return whether the gradients are the result of the last round, and were not all zeroed or set to ``None`` since.

        Zeroed gradients are not detected on a GPU, or if ranks have several shards.
        """
        if not self.reduced or not self._results:
            return self.reduced
        if all(slot.param.grad is None for slot in self.slots):
            self.reduced = False
        elif any(buffer.is_cpu and buffer._version != version for buffer, version in self._results):
            # The gradients were clipped in place, or zeroed. Values on a GPU are not read: the CPU would wait for them.
            # If ranks have several shards, don't check for zeros: the gradients of earlier shards cannot be sent again.
            several = self._order is not None and self._order.shards > len(self._order.ranges)
            self.reduced = several or any(has_values(slot.param.grad) for slot in self.slots)
        return self.reduced

    @property
    def is_unfinished(self) -> bool:
        """Return whether buckets of this round were sent, and their exchange has neither ended nor failed."""
        return self.schedule.next > 0 and not self._failure

    @property
    def has_sums(self) -> bool:
        """Return whether all sums of this round have arrived, and the round has not ended."""
        return self.schedule.next > 0 and self._finished == (self.schedule.round, len(self.schedule.buckets))

    def refuse_change(self, slot: Slot) -> None:
        """Raise BackendError if the gradient of ``slot``, which is ready again in this round, was sent already."""
        if slot.bucket is not None and slot.bucket.work is not None:
            self.refuse_after_failure()
            raise BackendError(
                f"the gradient of {slot.name!r} changed after it was sent, in the same backward pass: this is what "
                "reentrant checkpointing does to a parameter used twice; pass use_reentrant=False to torch.utils.checkpoint"
            )

    def refuse_after_failure(self) -> None:
        """Raise BackendError if an earlier exchange failed. An interrupt of :meth:`wait` is no failure."""
        if self._failure:
            raise BackendError(f"an earlier exchange of gradients failed: {self._failure}")
