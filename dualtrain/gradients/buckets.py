"""Buckets: flat buffers in which gradients are sent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch

from dualtrain.backends import Backend
from dualtrain.backends.base import Work
from dualtrain.backends.sum_order import SumOrder
from dualtrain.backends.wire import as_real
from dualtrain.errors import BackendError
from dualtrain.gradients.bucket_memory import BucketMemory, link
from dualtrain.gradients.frozen import FrozenCheck
from dualtrain.gradients.layout import AVERAGE, BucketLayout, Transfer, lay_out
from dualtrain.gradients.packed import PackedGradients
from dualtrain.gradients.parameters import is_sharded
from dualtrain.gradients.refused_slots import RefusedSlots
from dualtrain.gradients.scaling import Scaling
from dualtrain.gradients.shard_sums import BucketSum, RankSum, ShardSums, copy_all
from dualtrain.gradients.slots import LARGE_BYTES, REFERENCES, Slot, kept_among, may_be_kept, unpack_all
from dualtrain.gradients.sparse import has_values
from dualtrain.gradients.wire_format import WireFormat

_GRAD, _SHAPE = attrgetter("grad"), attrgetter("shape")


class Bucket:
    """Flat buffer of gradients, with ``extra`` scalars behind them.

    Construction is collective, since the backend allocates the memory.

    Args:
        name: name of the collective call that sums the bucket.
        layout: where the gradients lie.
        slots: the slots of the layout's places, in the same order.
        extra: how many scalars are sent behind the gradients.
        backend: the backend that sums the gradients over its ranks.
        transfer: how gradients are sent.
        order: the tree along which gradients are summed; its leaves are shards (parts of the global batch). ``None`` for
            the backend's own order.
    """

    def __init__(
        self,
        name: str,
        layout: BucketLayout,
        slots: Sequence[Slot],
        extra: int,
        backend: Backend,
        transfer: Transfer,
        order: SumOrder | None,
    ) -> None:
        self.name = name
        self.slots = list(slots)
        wire_format, shards = WireFormat.of(layout, transfer), backend.size if order is None else order.shards
        may_scale_copies = order is None and not layout.dtype.is_complex
        self._scaling = Scaling.of(wire_format, transfer, backend, shards, may_scale_copies=may_scale_copies)
        copies_early = self._scaling.in_copy is None
        self.memory = BucketMemory(slots, layout, extra, backend, wire_format, copies_early=copies_early)
        self.memory.on_replaced = self._use_memory
        #: Function that is called after the memory, and with it the tensor of the extra scalars, was replaced.
        self.on_new_extra: Callable[[torch.Tensor], None] = lambda extra: None
        wire = self.memory.wire
        self.sum: BucketSum = RankSum(backend, wire) if order is None else ShardSums(backend, wire, order, self._split)
        #: Whether gradients are converted or scaled before they are sent. If so, ``add_shard`` adds a copy of the buffer,
        #: with the converted and scaled gradients. If not, it adds the gradients themselves, and copies only those that lie
        #: in the bucket or have a different dtype.
        self._adds_wire = self.memory.converts or self._scaling.before != 1
        self.work: Work[None] | None = None
        self.pending = len(self.slots)
        self._parts_of: dict[int, list[torch.Tensor]] = {}  # the results of ``_split``, by the buffer's address
        for slot in self.slots:
            slot.bucket = self
        self._params = [slot.param for slot in self.slots]
        self._shapes = [slot.shape for slot in self.slots]
        self._all_small = all(view.nbytes < LARGE_BYTES for view in self.memory.views)
        #: Slots whose gradients were copied to the bucket, or will be created by ``unpack``.
        self._copied: list[Slot] = []
        #: Slots whose gradients lay in their place in the bucket already.
        self._in_place: list[Slot] = []
        #: Slots whose gradients stay outside of the bucket, each with its gradient. Results are copied to these gradients.
        self.outside: list[tuple[Slot, torch.Tensor]] = []
        #: The gradients that ``unpack`` has made outside of the bucket for missing slots.
        self._made: dict[Slot, torch.Tensor] = {}
        self._packed = PackedGradients(self.slots)
        #: Slots whose gradients count as zeros.
        self._missing: list[Slot] = []
        #: The missing slots whose parameters are frozen in this round.
        self._frozen: list[Slot] = []
        self._frozen_check = FrozenCheck()
        #: Slots that make this rank refuse the exchange.
        self.refused = RefusedSlots()
        self._dense_only = order is not None and not transfer.sparse_as_dense

    def _use_memory(self) -> None:
        self.sum.use(self.memory.wire)
        self._parts_of.clear()
        self.on_new_extra(self.memory.extra)

    def clear(self) -> None:
        """Move gradients out of the bucket, so that the program keeps their values; then set this rank's shards to 0."""
        # Before the copies: if the program keeps views, the gradients stay in the memory that they share with the views.
        self.memory.leave_views_before_zeros()
        for slot in self.memory.slots_inside():
            assert slot.param.grad is not None
            slot.param.grad.data = slot.param.grad.detach().clone()
        for slot in self.slots:
            slot.move_kept()
        self.memory.wire.zero_()
        self.sum.clear()

    def pack(self) -> None:
        """Copy every gradient to the buffer, unless it lies there already; then scale and convert the gradients.

        Missing gradients count as zeros.
        """
        memory, scaling = self.memory, self._scaling
        memory.leave_views()
        slots, grads = self._sort()
        self.outside = []
        if may_be_kept(grads):
            self._leave_outside(slots, grads)
        for slot in (*self._missing, *slots):
            if sys.getrefcount(slot.alias) > REFERENCES:  # ``move_kept`` checks this too; avoid a call for every gradient
                slot.move_kept()
        for slot in self._missing:
            slot.view.zero_()
        if scaling.in_copy is not None and not self._all_small:
            self._copy_scaled(slots, grads, scaling.in_copy)
        else:
            # ``copy_all`` records no autograd history, although gradients have one after a backward with create_graph.
            copy_all(memory.views if len(slots) == len(self.slots) else [slot.view for slot in slots], grads)
            if scaling.in_copy is not None:
                memory.values.mul_(scaling.in_copy)
        if scaling.before != 1:
            memory.values.mul_(scaling.before)
        if memory.converts:
            memory.wire[: memory.values.numel()].copy_(memory.values)
        self._packed.record(grads if slots is self.slots else None)

    def refuse_changed_parameters(self, number: int) -> None:
        """Refuse round ``number`` if the program has changed a parameter, and dropped its gradient, during backward.

        Optimizers that step in hooks do so: each rank has then changed the parameter by its own gradient. Also refuse it if
        ``fully_shard`` has replaced a parameter. Call this after ``pack``. Rounds are numbered by ``Schedule``.
        """
        for slot in self._missing:
            if slot.param.requires_grad and is_sharded(slot.param):
                self.refused.sharded = self.refused.sharded or slot
            # Private in torch 2.5 to 2.15: the version counter, which counts a tensor's in-place changes.
            if slot.ready_in_round == number and slot.param._version != slot.ready_version:
                self.refused.stepped = self.refused.stepped or slot

    def changed(self) -> list[Slot]:
        """Return the slots whose gradients may have changed since ``pack``. Call it before ``unpack``."""
        return self._packed.changed()

    def packed_outside(self) -> list[torch.Tensor]:
        """Return packed gradients outside of the bucket: see ``PackedGradients.outside``. Call it before ``unpack``."""
        return self._packed.outside()

    def forget_ready(self) -> None:
        """Begin a new round without ready gradients."""
        self.pending = len(self.slots)
        self.memory.end_round()

    def forget_gradients(self) -> None:
        """Drop the references to the gradients that were packed."""
        self._packed.forget()
        self.outside.clear()
        self._made.clear()
        self.memory.end_round()

    def assigned_late(self) -> Slot | None:
        """Return a slot for which the ranks averaged only zeros, if the program has since assigned nonzero values.

        Only gradients that were missing on this rank count. If the average is not zero, the slot is not returned: the
        program may have replaced the average, as out-of-place clipping does.
        """
        for slot in self._missing:
            grad = slot.param.grad
            assigned = grad is not slot.alias and grad is not self._made.get(slot)
            if grad is not None and assigned and has_values(grad) and not has_values(slot.view):
                return slot
        return None

    def _leave_outside(self, slots: list[Slot], grads: list[torch.Tensor]) -> None:
        self.outside = kept_among(slots, grads)
        left = {slot for slot, _ in self.outside}
        self._copied = [slot for slot in self._copied if slot not in left]

    def _put_outside(self, slots: list[Slot]) -> None:
        """Replace the gradients of ``slots`` by new tensors, into which ``write_back`` copies the results."""
        with torch.inference_mode(False):
            for slot in slots:
                slot.param.grad = grad = torch.empty_like(slot.view)
                self.outside.append((slot, grad))
        self._made = {slot: slot.param.grad for slot in self._missing if slot.param.grad is not None}

    def _copy_scaled(self, slots: list[Slot], grads: list[torch.Tensor], factor: torch.Tensor) -> None:
        """Copy gradients to the bucket, and multiply all gradients of the bucket by ``factor``."""
        small: list[tuple[Slot, torch.Tensor]] = []
        large: list[tuple[Slot, torch.Tensor]] = []
        for slot, grad in zip(slots, grads, strict=True):
            # A gradient may have moved to a different device: copy it, since ``torch.mul`` would raise here, on this rank
            # only. All ranks refuse the gradient later.
            in_one_step = slot.view.nbytes >= LARGE_BYTES and grad.dtype is slot.dtype and grad.is_cpu
            (large if in_one_step else small).append((slot, grad))
        copy_all([slot.view for slot, _ in small], [grad for _, grad in small])
        if not large:
            self.memory.values.mul_(factor)
            return
        for slot, grad in large:
            torch.mul(grad.detach(), factor, out=slot.view)
        for slot in (*self._in_place, *(slot for slot, _ in small)):
            slot.view.mul_(factor)

    def _sort(self) -> tuple[list[Slot], list[torch.Tensor]]:
        """Return the slots whose gradients must be copied, and these gradients; record the other and refused slots."""
        slots, grads = [], []
        self._copied, self._in_place, self._missing, self._frozen = [], [], [], []
        if (fresh := self._fresh_gradients()) is not None:
            self._copied = self.slots
            return self.slots, fresh
        memory, refused = self.memory, self.refused
        low, high = memory.ranges[0][0], memory.ranges[-1][1]
        for slot in self.slots:
            p = slot.param
            grad = p.grad
            if grad is None:
                if p.requires_grad and p.shape != slot.shape:
                    refused.reshaped = refused.reshaped or slot
                self._missing.append(slot)
                # A parameter that was frozen after the layout was made contributes zeros and gets no gradient.
                (self._copied if p.requires_grad else self._frozen).append(slot)
                continue
            try:
                address = grad.data_ptr()
            except RuntimeError:  # a sparse gradient has no address
                address, grad = -1, grad.to_dense()
                refused.sparse = refused.sparse or (slot if self._dense_only else None)
            if address == slot.address:
                lazy = grad.is_conj() or grad.is_neg()
                if grad.stride() == slot.strides and grad.shape == slot.shape and grad.dtype is slot.dtype and not lazy:
                    self._in_place.append(slot)
                    continue
                # The gradient lies in this part of the buffer, but its strides, shape, dtype, or conj or neg bit differ.
                # Move it out, and keep the tensor: the program may have a reference to it.
                moved = grad.detach().resolve_conj().resolve_neg().clone()
                if grad.is_inference():
                    grad = moved
                else:
                    grad.data = moved
            if grad.shape != slot.shape:
                refused.reshaped = refused.reshaped or slot
                self._missing.append(slot)
                continue
            if address != slot.address and low <= address < high and memory.covers(address):
                refused.misplaced = refused.misplaced or slot
            self._copied.append(slot)
            slots.append(slot)
            grads.append(grad)
        return slots, grads

    def _fresh_gradients(self) -> list[torch.Tensor] | None:
        """Return all gradients if each one is dense, has its slot's shape and is in no bucket; else ``None``.

        This is the usual case: autograd makes new gradients after ``zero_grad()``.
        """
        grads = list(map(_GRAD, self._params))
        try:
            addresses = list(map(torch.Tensor.data_ptr, grads))
        except (TypeError, RuntimeError):  # a gradient is missing, or is sparse and has no address
            return None
        low, high = self.memory.ranges[0][0], self.memory.ranges[-1][1]
        if any(low <= address < high for address in addresses) or list(map(_SHAPE, grads)) != self._shapes:
            return None
        return grads

    def add_shard(self) -> None:
        """Add the gradients and the extra scalars of a shard to the partial sums.

        Not for this rank's last shard: :meth:`pack` copies it to the buffer, and :meth:`start` adds it. The partial sums
        reuse the gradients' memory, so the caller must first copy gradients that share memory (``separate_gradients``).
        """
        if self._adds_wire:
            self.pack()
            self.sum.add_shard([self.memory.wire.clone()])
            return
        slots, grads = self._sort()
        grad_of = dict(zip(slots, grads, strict=True))
        grad_of.update((slot, slot.view.clone()) for slot in self._in_place)
        grad_of.update((slot, torch.zeros_like(slot.view)) for slot in self._missing)
        # Add complex numbers by part: ``torch._foreach_add_`` multiplies them by 1 + 0i, which makes NaN of infinity.
        parts = [as_real(grad_of[slot].detach().to(slot.dtype)) for slot in self.slots]
        self.sum.add_shard([*parts, self.memory.extra.clone()])

    def _split(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Split a buffer, as large as ``memory.wire``, into a part for each slot and a last part for the extra scalars.

        If ``_adds_wire`` is set, return the buffer as a single part.
        """
        if self._adds_wire:
            return [buffer]
        address, numel = buffer.data_ptr(), self.memory.values.numel()
        if address not in self._parts_of:
            self._parts_of[address] = [*map(as_real, self.memory.split(buffer[:numel])), buffer[numel:]]
        return self._parts_of[address]

    def start(self) -> None:
        """Start the all-reduce. Sums of gradients are scaled by ``Scaling.in_sum``; sums of extra scalars are not."""
        self.work = self.sum.start(self.name, self._scaling.in_sum, self.memory.extra.numel())

    def finish(self) -> None:
        """Wait for the all-reduce (see ``Work.wait``). If gradients are converted, convert the sums back and scale them.

        Raises:
            BackendError: the all-reduce failed, or an exception such as KeyboardInterrupt has stopped the exchange.
        """
        if self.work is None:
            raise BackendError("the exchange of gradients was interrupted, and cannot continue: restart the ranks")
        self.work.wait()
        self.work = None
        self.pending = len(self.slots)
        if self.memory.converts:
            values = self.memory.values
            values.copy_(self.memory.wire[: values.numel()])
            if self._scaling.after != 1:
                values.mul_(self._scaling.after)

    def unpack(self) -> None:
        """Make every ``param.grad`` a view of its part of the buffer, except for the gradients of ``outside``.

        A parameter that is frozen in this round gets no gradient; ``refused`` records it if another rank trains it.
        """
        self._packed.forget()
        self.memory.end_round()
        if self.memory.keeps_views:
            self._put_outside(self._copied)
        else:
            unpack_all(self._copied)
        for slot in self._in_place:
            grad = slot.param.grad
            # Another reducer of the same parameter may have replaced ``param.grad`` since ``pack`` ran.
            if grad is None or grad.data_ptr() != slot.address:
                slot.unpack()
        self.refused.trained_elsewhere = self._frozen_check.trained_elsewhere(self._frozen)


def buffer_sizes(slots: Sequence[Slot], extra: int, transfer: Transfer) -> list[int]:
    """Return the sizes in bytes of the buffers on the CPU that :func:`make_buckets` allocates for ``slots``.

    Only the last bucket holds the ``extra`` scalars. Each size includes them, because sparse gradients get no bucket: if
    all gradients of the last bucket are sparse, an earlier bucket becomes the last one.
    """
    formats = [WireFormat.of(layout, transfer) for layout in lay_out([slot.param for slot in slots], transfer)]
    return [(each.numel + extra) * each.dtype.itemsize for each in formats if each.is_cpu]


def make_buckets(
    slots: Sequence[Slot],
    extra: int,
    backend: Backend,
    name: str = "gradients",
    transfer: Transfer = AVERAGE,
    order: SumOrder | None = None,
) -> list[Bucket]:
    """Make the buckets ``name.0``, … for ``slots`` (in registration order). Collective; blocks.

    The last bucket has ``extra`` scalars. Without slots, the only bucket holds the scalars, if there are any.
    """
    layouts = lay_out([slot.param for slot in slots], transfer)
    if not layouts and extra:
        like = torch.empty(0, device="cpu")
        layouts = [BucketLayout(like.dtype, like.device)]
    last = len(layouts) - 1
    buckets = [
        Bucket(
            f"{name}.{i}",
            each,
            [slots[p.number] for p in each.places],
            extra if i == last else 0,
            backend,
            transfer,
            order,
        )
        for i, each in enumerate(layouts)
    ]
    link([bucket.memory for bucket in buckets])
    return buckets
