"""Buckets: flat buffers in which gradients are sent."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch

from dualtrain.backends import Backend
from dualtrain.backends.base import Work
from dualtrain.backends.sum_order import SumOrder
from dualtrain.backends.wire import wire_dtype
from dualtrain.errors import BackendError
from dualtrain.gradients.exposed import ExposedTensors
from dualtrain.gradients.layout import AVERAGE, BucketLayout, Transfer, lay_out
from dualtrain.gradients.packed import PackedGradients
from dualtrain.gradients.shard_sums import BucketSum, RankSum, ShardSums, copy_all
from dualtrain.gradients.slots import LARGE_BYTES, REFERENCES, Slot, kept_among, may_be_kept
from dualtrain.gradients.sparse import has_values

log = logging.getLogger(__name__)

_GRAD, _SHAPE = attrgetter("grad"), attrgetter("shape")


class Bucket:
    """Flat buffer of gradients, with ``extra`` scalars behind them.

    The bucket sends the buffer ``wire``. 16-bit gradients are sent in 32 bits. Gradients that are wider than the dtype of
    ``transfer`` are sent in that dtype. Both kinds are copied to ``wire``; all other gradients lie in ``wire`` itself.
    Construction is collective, since the backend allocates the memory.

    Args:
        name: name of the collective call that sums the bucket.
        layout: where the gradients lie.
        slots: the slots of the layout's places, in the same order.
        extra: how many scalars are sent behind the gradients.
        backend: the ranks whose gradients are summed.
        transfer: how gradients are sent.
        order: the tree along which gradients are summed; ``None`` for the backend's own order.
    """

    def __init__(
        self,
        name: str,
        layout: BucketLayout,
        slots: Sequence[Slot],
        extra: int,
        backend: Backend,
        transfer: Transfer = AVERAGE,
        order: SumOrder | None = None,
    ) -> None:
        self.name = name
        self.slots = list(slots)
        is_complex, real = layout.dtype.is_complex, layout.dtype.to_real()
        numel, sent_as = _wire_form(layout, transfer)
        self._backend, self._layout, self._numel = backend, layout, numel
        self.wire = backend.new_buffer(numel + extra, sent_as, layout.device)
        self._staged = real != self.wire.dtype
        self.sum: BucketSum = (
            RankSum(backend, self.wire) if order is None else ShardSums(backend, self.wire, order, self._split)
        )
        self._before, self._after = transfer.before, transfer.factor_after(self.sum.shards)
        #: Whether the wire dtype has fewer bits than the gradients' dtype. If so, ``finish`` converts the sum to the
        #: gradients' dtype before it scales the sum.
        self._narrow = self.wire.dtype.itemsize < real.itemsize
        if self._narrow and self._after < 1:
            # Divide before the sum: the sum of a few large gradients may not fit into float16, but their average does.
            self._before, self._after = self._before * self._after, 1.0
        #: Tensor without dimensions: the factor by which gradients are multiplied while they are copied to the bucket.
        self.factor: torch.Tensor | None = None
        in_place = self.wire.is_cpu and not self._staged and not is_complex and order is None
        if in_place and _averages_first(backend, transfer):
            self.factor = torch.tensor(self._before * self._after, dtype=real, device="cpu")
            self._before = self._after = 1.0
        #: Whether gradients are converted or scaled. If so, ``add_shard`` adds a copy of ``wire``, which holds the results.
        #: If not, it adds the gradients themselves, without a copy.
        self._adds_wire = self._staged or self._before != 1
        self.work: Work[None] | None = None
        self.pending = len(self.slots)
        self._parts_of: dict[int, list[torch.Tensor]] = {}  # the results of ``_split``, by the buffer's address
        #: Whether the program has kept a view of an earlier gradient. If so, gradients get memory outside of the bucket.
        self.keeps_views = False
        self._may_write = True  # whether ``leave_views`` has returned in this round
        #: Function that is called with ``extra`` when that tensor is replaced.
        self.on_new_extra: Callable[[torch.Tensor], None] = lambda extra: None
        #: Where this bucket's gradients lie in memory: (first address, address past the last).
        self._range = 0, 0
        #: The buckets that were made together with this one, and their sorted ranges. ``make_buckets`` replaces both lists.
        self.group, self.ranges = [self], [self._range]
        self._use(self.wire, self.wire.new_zeros(numel, dtype=real) if self._staged else self.wire[:numel])
        self._params = [slot.param for slot in self.slots]
        self._shapes = [slot.shape for slot in self.slots]
        self._all_small = all(view.nbytes < LARGE_BYTES for view in self._slot_views)
        #: Slots whose gradients were copied to the bucket, or will be created there by ``unpack``.
        self._copied: list[Slot] = []
        #: Slots whose gradients lay in the bucket already.
        self._kept: list[Slot] = []
        #: Slots whose gradients stay outside of the bucket, each with its gradient. Results are copied to these gradients.
        self.outside: list[tuple[Slot, torch.Tensor]] = []
        self._packed = PackedGradients(self.slots)
        #: Slots whose gradients count as zeros.
        self._missing: list[Slot] = []
        #: The missing slots whose parameters are frozen in this round.
        self._frozen: list[Slot] = []
        #: The value of ``_frozen`` at the last check.
        self._checked: list[Slot] = []
        self._checks = 0  # how many rounds had the same frozen slots as the round before
        #: The first slot that is frozen on this rank and has a gradient on other ranks, found by ``unpack``.
        self.trained_elsewhere: Slot | None = None
        #: The first slot whose gradient lies in the memory of another gradient, found by ``pack``.
        self.misplaced: Slot | None = None
        #: The first slot whose gradient is sparse although only dense ones can be summed, found by ``pack``.
        self.sparse: Slot | None = None
        self._dense_only = order is not None and not transfer.sparse_as_dense
        #: The first slot whose gradient or parameter has a new shape, found by ``pack``, which sends zeros for it.
        self.reshaped: Slot | None = None

    def _use(self, wire: torch.Tensor, values: torch.Tensor) -> None:
        """Make ``wire`` the buffer that is sent, and ``values`` the place of the gradients."""
        self._placed = False
        #: The gradients as real numbers: ``values`` is the first part of ``wire``, or a separate buffer.
        self.wire, self.values = wire, values
        self.extra = wire[self._numel :]
        self.sum.use(wire)
        self._parts_of.clear()
        # The slots' attributes as lists, so that loops over all gradients run in C.
        self._slot_views = _views(values, self._layout)
        found = values.data_ptr(), values.data_ptr() + values.nbytes
        self.ranges[self.ranges.index(self._range)] = self._range = found
        self.ranges.sort()
        self._place_slots()
        self.on_new_extra(self.extra)
        self._placed = True

    def _place_slots(self) -> None:
        self.exposed = ExposedTensors(_as_gradients(self.values, self._layout))
        exposed = _views(self.exposed.whole, self._layout)
        for slot, view, tensor in zip(self.slots, self._slot_views, exposed, strict=True):
            slot.place(self, view, tensor)
        self.exposed.watch(self.slots)

    def leave_views(self) -> None:
        """If the program keeps views of earlier gradients, leave the bucket's memory to them, and use new memory.

        The program then sees the earlier values, as in torch. Call this before the first write of a round.
        """
        if self._may_write:
            return
        if not self._placed:  # an interrupt such as Ctrl-C has stopped ``_use``
            self._use(self.wire, self.values)
        # If a gradient lies in another gradient's memory, do not replace the memory: ``pack`` finds such a gradient by its
        # address, and refuses it.
        elif self.exposed.have_views() and not self._holds_others():
            self._leave_memory()
        self._may_write = True

    def _holds_others(self) -> bool:
        """Return whether a gradient lies in this bucket, but not in the place of its slot."""
        low, high = self._range
        slots = [slot for bucket in self.group for slot in bucket.slots_inside()]
        addresses = [(slot, slot.param.grad.data_ptr()) for slot in slots if slot.param.grad is not None]
        return any(low <= address < high and address != slot.address for slot, address in addresses)

    def _leave_memory(self) -> None:
        self.keeps_views = True
        with torch.inference_mode(False), torch.no_grad():
            try:
                if self._staged:
                    self._backend.replace_buffer(self.values, lambda values: self._use(self.wire, values))
                else:
                    self._backend.replace_buffer(self.wire, lambda wire: self._use(wire, wire[: self._numel]))
            except OSError as error:
                log.warning(
                    "this step overwrites views of earlier gradients, since there is no memory for a new buffer: %s", error
                )
                self.keeps_views = False
                self._place_slots()

    def follow_memory(self) -> None:
        """If ``share_memory_()`` has moved the gradients to other memory, leave that memory to the program."""
        if self.exposed.have_moved():
            self.keeps_views = True
            self._place_slots()

    def replace_exposed(self, slot: Slot) -> None:
        """Record that ``slot`` has a new tensor ``exposed``."""
        self.exposed.tensors[slot] = slot.exposed

    def covers(self, address: int) -> bool:
        """Return whether ``address`` is in the memory of any bucket that was made together with this one."""
        return any(low <= address < high for low, high in self.ranges)

    def slots_inside(self) -> list[Slot]:
        """Return the slots whose gradients lie in a bucket now. A sum would replace these gradients."""
        grads = [(slot, slot.param.grad) for slot in self.slots]
        return [
            slot
            for slot, grad in grads
            if grad is not None and grad.layout is torch.strided and self.covers(grad.data_ptr())
        ]

    def clear(self) -> None:
        """Copy gradients that lie in a bucket to new memory, then fill the buffer with zeros."""
        has_views = self.exposed.have_views()
        for slot in self.slots_inside():
            assert slot.param.grad is not None
            slot.param.grad.data = slot.param.grad.detach().clone()
        if has_views:
            self._leave_memory()
        for slot in self.slots:
            slot.move_kept()
        self.wire.zero_()
        self.sum.clear()

    def pack(self) -> None:
        """Copy every gradient to the buffer, unless it lies there already. Missing gradients count as zeros."""
        self.leave_views()
        slots, grads = self._sort()
        self.outside = []
        if may_be_kept(grads):
            self._leave_outside(slots, grads)
        for slot in (*self._missing, *slots):
            if sys.getrefcount(slot.alias) > REFERENCES:  # ``move_kept`` checks this too; avoid a call for every gradient
                slot.move_kept()
        for slot in self._missing:
            slot.view.zero_()
        if self.factor is not None and not self._all_small:
            self._copy_scaled(slots, grads, self.factor)
        else:
            # ``copy_all`` records no autograd history, although gradients have one after a backward with create_graph.
            copy_all(self._slot_views if len(slots) == len(self.slots) else [slot.view for slot in slots], grads)
            if self.factor is not None:
                self.values.mul_(self.factor)
        if self._before != 1:
            self.values.mul_(self._before)
        if self._staged:
            self.wire[: self.values.numel()].copy_(self.values)
        self._packed.record(grads if slots is self.slots else None)

    def changed(self) -> list[Slot]:
        """Return the slots whose gradients may have changed since ``pack``. Call it before ``unpack``."""
        return self._packed.changed()

    def packed_outside(self) -> list[torch.Tensor]:
        """Return the packed gradients that do not lie in the bucket. Call it before ``unpack``."""
        return self._packed.outside()

    def forget_ready(self) -> None:
        """Begin a new round without ready gradients."""
        self.pending = len(self.slots)
        self._may_write = False

    def forget_gradients(self) -> None:
        """Drop the references to the gradients that were packed."""
        self._packed.forget()
        self.outside.clear()
        self._may_write = False

    def assigned_late(self) -> Slot | None:
        """Return a slot that had no gradient on any rank, if its parameter got a gradient with nonzero values afterwards.

        A slot that had a gradient on another rank is not returned: the program may have replaced the average, as
        out-of-place clipping does.
        """
        for slot in self._missing:
            grad = slot.param.grad
            if grad is not None and grad is not slot.alias and has_values(grad) and not has_values(slot.view):
                return slot
        return None

    def _leave_outside(self, slots: list[Slot], grads: list[torch.Tensor]) -> None:
        self.outside = kept_among(slots, grads)
        left = {slot for slot, _ in self.outside}
        self._copied = [slot for slot in self._copied if slot not in left]

    def _put_outside(self, slots: list[Slot]) -> None:
        """Replace every ``param.grad`` by a new tensor, into which ``write_back`` copies the result."""
        with torch.inference_mode(False):
            for slot in slots:
                slot.param.grad = grad = torch.empty_like(slot.view)
                self.outside.append((slot, grad))

    def _copy_scaled(self, slots: list[Slot], grads: list[torch.Tensor], factor: torch.Tensor) -> None:
        """Copy gradients to the bucket, and multiply all gradients of the bucket by ``factor``."""
        small: list[tuple[Slot, torch.Tensor]] = []
        large: list[tuple[Slot, torch.Tensor]] = []
        for slot, grad in zip(slots, grads, strict=True):
            # A gradient may have moved to a different device: copy it, since ``torch.mul`` would raise here, on this rank
            # alone. All ranks refuse the gradient later.
            in_one_step = slot.view.nbytes >= LARGE_BYTES and grad.dtype is slot.dtype and grad.is_cpu
            (large if in_one_step else small).append((slot, grad))
        copy_all([slot.view for slot, _ in small], [grad for _, grad in small])
        if not large:
            self.values.mul_(factor)
            return
        for slot, grad in large:
            torch.mul(grad.detach(), factor, out=slot.view)
        for slot in (*self._kept, *(slot for slot, _ in small)):
            slot.view.mul_(factor)

    def _sort(self) -> tuple[list[Slot], list[torch.Tensor]]:
        """Return the slots whose gradients must be copied, and these gradients; record the other slots."""
        slots, grads = [], []
        self._copied, self._kept, self._missing, self._frozen = [], [], [], []
        if (fresh := self._fresh_gradients()) is not None:
            self._copied = self.slots
            return self.slots, fresh
        low, high = self.ranges[0][0], self.ranges[-1][1]
        for slot in self.slots:
            p = slot.param
            grad = p.grad
            if grad is None:
                if p.requires_grad and p.shape != slot.shape:
                    self.reshaped = self.reshaped or slot
                self._missing.append(slot)
                # A parameter that was frozen after the layout was made contributes zeros and gets no gradient.
                (self._copied if p.requires_grad else self._frozen).append(slot)
                continue
            try:
                address = grad.data_ptr()
            except RuntimeError:  # a sparse gradient has no address
                address, grad = -1, grad.to_dense()
                self.sparse = self.sparse or (slot if self._dense_only else None)
            if address == slot.address:
                lazy = grad.is_conj() or grad.is_neg()
                if grad.stride() == slot.strides and grad.shape == slot.shape and grad.dtype is slot.dtype and not lazy:
                    self._kept.append(slot)
                    continue
                # The gradient lies in this part of the buffer, but its strides, shape, dtype, or conj or neg bit differ.
                grad = grad.resolve_conj().resolve_neg().clone()
            if grad.shape != slot.shape:
                self.reshaped = self.reshaped or slot
                self._missing.append(slot)
                continue
            if address != slot.address and low <= address < high and self.covers(address):
                self.misplaced = self.misplaced or slot
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
        low, high = self.ranges[0][0], self.ranges[-1][1]
        if any(low <= address < high for address in addresses) or list(map(_SHAPE, grads)) != self._shapes:
            return None
        return grads

    def add_shard(self) -> None:
        """Add the gradients and the extra scalars of a shard to the partial sums.

        Not for this rank's last shard: :meth:`pack` copies it to the buffer, and :meth:`start` adds it. The partial sums
        reuse the gradients' memory, so no two gradients may share memory.
        """
        if self._adds_wire:
            self.pack()
            self.sum.add_shard([self.wire.clone()])
            return
        slots, grads = self._sort()
        found = dict(zip(slots, grads, strict=True))
        found.update((slot, slot.view.clone()) for slot in self._kept)
        found.update((slot, torch.zeros_like(slot.view)) for slot in self._missing)
        parts = [found[slot].detach().to(slot.dtype) for slot in self.slots]
        self.sum.add_shard([*parts, self.extra.clone()])

    def _split(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Split a buffer of the size of ``wire``: a part for each slot, then the extras; one part if ``_adds_wire``."""
        if self._adds_wire:
            return [buffer]
        address = buffer.data_ptr()
        if address not in self._parts_of:
            self._parts_of[address] = [*_views(buffer[: self.values.numel()], self._layout), buffer[self.values.numel() :]]
        return self._parts_of[address]

    def start(self) -> None:
        """Start the all-reduce. Sums of gradients are scaled by the transfer's factor; sums of extra scalars are not."""
        factor = 1.0 if self._narrow else self._after
        self.work = self.sum.start(self.name, factor, self.extra.numel())

    def finish(self) -> None:
        """Block until the all-reduce has ended. Raises BackendError."""
        if self.work is None:
            raise BackendError("the exchange of gradients was interrupted, and cannot continue: restart the ranks")
        self.work.wait()
        self.work = None
        self.pending = len(self.slots)
        if self._staged:
            self.values.copy_(self.wire[: self.values.numel()])
            if self._narrow and self._after != 1:
                self.values.mul_(self._after)

    def unpack(self) -> None:
        """Make every ``param.grad`` a view of its part of the buffer, except for the gradients of ``outside``."""
        self._packed.forget()
        self._may_write = False
        if self.keeps_views:
            self._put_outside(self._copied)
        else:
            for slot in self._copied:
                slot.unpack()
        for slot in self._kept:
            grad = slot.param.grad
            # Another reducer of the same parameter may have replaced ``param.grad`` since ``pack`` ran.
            if grad is None or grad.data_ptr() != slot.address:
                slot.unpack()
        self._check_frozen()

    def _check_frozen(self) -> None:
        """Find a parameter that is frozen on this rank and has a gradient on another rank.

        A check reads a parameter's whole gradient. So check all frozen parameters only in the first round after their
        set has changed. In later rounds, check only one of them if gradients are on the CPU, and none if they are on a
        GPU, for which the CPU would wait.
        """
        chosen = self._frozen
        if self._frozen == self._checked and self._frozen:
            self._checks += 1
            chosen = [self._frozen[self._checks % len(self._frozen)]] if self.wire.is_cpu else []
        self._checked = self._frozen
        self.trained_elsewhere = next((slot for slot in chosen if slot.view.any()), None)


def _averages_first(backend: Backend, transfer: Transfer) -> bool:
    """Return whether gradients are multiplied by 1/size before the sum. Every rank returns the same value.

    The size must be a power of two, because the multiplication is then exact.
    """
    size = backend.size
    is_average = transfer.average_first and transfer.factor_after(size) == 1 / size
    return is_average and size > 1 and size.bit_count() == 1 and not backend.scales_sums


def _views(flat: torch.Tensor, layout: BucketLayout) -> list[torch.Tensor]:
    """Return the parts of a buffer for the places of ``layout``."""
    flat = _as_gradients(flat, layout)
    origin = int(flat.storage_offset())  # as_strided counts from the start of the storage
    return [flat.as_strided(place.shape, place.strides, origin + place.offset) for place in layout.places]


def _as_gradients(flat: torch.Tensor, layout: BucketLayout) -> torch.Tensor:
    return torch.view_as_complex(flat.view(-1, 2)) if layout.dtype.is_complex and not flat.is_complex() else flat


def _wire_form(layout: BucketLayout, transfer: Transfer) -> tuple[int, torch.dtype]:
    """Return how many real numbers a bucket sends for its gradients, and their dtype on the wire."""
    real = layout.dtype.to_real()
    narrow = transfer.dtype if transfer.dtype is not None and real.itemsize > transfer.dtype.itemsize else None
    return layout.numel * (2 if layout.dtype.is_complex else 1), narrow or wire_dtype(real)


def buffer_sizes(slots: Sequence[Slot], extra: int, transfer: Transfer) -> list[int]:
    """Return the sizes in bytes of the buffers on the CPU that :func:`make_buckets` allocates for ``slots``.

    Only the last bucket holds the ``extra`` scalars. Each size includes them, because sparse gradients get no bucket: if
    all gradients of the last bucket are sparse, an earlier bucket becomes the last one.
    """
    layouts = [layout for layout in lay_out([slot.param for slot in slots], transfer) if layout.device.type == "cpu"]
    forms = [_wire_form(layout, transfer) for layout in layouts]
    return [(numel + extra) * dtype.itemsize for numel, dtype in forms]


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
    ranges = sorted(part for bucket in buckets for part in bucket.ranges)
    for bucket in buckets:
        bucket.group, bucket.ranges = buckets, ranges
    return buckets
