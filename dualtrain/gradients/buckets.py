"""Where each gradient lies: flat buffers, a few megabytes each, that travel whole.

The layout is a pure function of the parameters: reverse registration order (backward finishes the last layers first),
one dtype and device to a bucket, about 25 MB each and the first one smaller so that sending starts early. The same
layout, sent in the same order, is what makes two backends sum to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dualtrain.backends import Backend
from dualtrain.backends.base import Work
from dualtrain.backends.wire import wire_dtype
from dualtrain.gradients.parameters import gradient_dtype

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
LARGE_BYTES = 64 << 10  # a gradient that is worth a copy of its own


@dataclass(frozen=True)
class Transfer:
    """How gradients travel, the same on every rank.

    Attributes:
        before: a factor on each rank's gradients before they are summed.
        after: a factor on the sum; ``None`` for 1/size, the average.
        dtype: what wider floating-point gradients travel as, such as ``torch.float16``; ``None`` for their own dtype.
        bucket_bytes: the most that travels at once; 0 for one gradient at a time, ``None`` for about 25 MB.
        groups: parameters that travel together, whatever their size.
        sparse_as_dense: whether sparse gradients travel as dense ones, and are made sparse again.
    """

    before: float = 1.0
    after: float | None = None
    dtype: torch.dtype | None = None
    bucket_bytes: int | None = None
    groups: Sequence[Sequence[torch.Tensor]] = ()
    sparse_as_dense: bool = False


AVERAGE = Transfer()


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one parameter's gradient in its bucket."""

    name: str
    param: torch.nn.Parameter
    #: The part of the bucket that holds the gradient, in the parameter's own strides (channels_last included).
    view: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    bucket: Bucket | None = None
    #: What ``param.grad`` becomes. Never ``view`` itself: the user may assign the ``.data`` of a gradient.
    alias: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    #: Of ``view``. A gradient that has all four is in the bucket, whatever object it is.
    address: int = 0
    strides: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    #: The reducer's round in which its gradient has last come.
    ticked: int = 0
    #: Backward passes that have reached it; for who wants to count them.
    passes: int = 0
    #: Whether it is brought into the bucket by itself, before the others.
    large: bool = False

    def move_in(self) -> None:
        """Brings the gradient into its bucket as soon as it is there.

        It is still in the processor's cache then, and the memory that it was in is free for the next one.
        """
        p = self.param
        grad = p.grad
        if grad is None or grad.is_sparse or grad.shape != self.shape:
            return
        address = grad.data_ptr()
        if address == self.address or (self.bucket is not None and self.bucket.covers(address)):
            return  # there already, or in the memory of another gradient
        # Who comes after, another reducer or the user, must find this rank's own gradient, and not one under way.
        if len(p._post_accumulate_grad_hooks) == 1:
            self.view.copy_(grad.detach())
            self.hand_out()

    def place(self, bucket: Bucket, view: torch.Tensor) -> None:
        """Gives the gradient its place in ``bucket``."""
        self.bucket, self.view, self.alias = bucket, view, view.detach()
        self.address, self.strides, self.shape, self.dtype = view.data_ptr(), view.stride(), view.shape, view.dtype

    def hand_out(self) -> None:
        """Makes ``param.grad`` a tensor that shares the memory of ``view``."""
        alias = self.alias
        if alias.data_ptr() != self.address or alias.stride() != self.strides:  # the user has assigned its ``.data``
            self.alias = alias = self.view.detach()
        try:
            self.param.grad = alias
        except RuntimeError:  # it has another shape or dtype
            self.alias = self.param.grad = self.view.detach()

    def describe(self) -> str:
        """What must be the same on every rank."""
        p = self.param
        dtype = str(p.dtype).removeprefix("torch.")
        if gradient_dtype(p) != p.dtype:
            dtype += f" with gradients of {str(gradient_dtype(p)).removeprefix('torch.')}"
        return f"{self.name} ({dtype}, {tuple(p.shape)}, strides {_dense_strides(p)})"


class Bucket:
    """One flat buffer of gradients, and behind them ``extra`` numbers that travel for free.

    Gradients of 16 bits are summed in a second buffer of 32, and others in one of 16 bits if the transfer says so
    (``wire``); otherwise ``wire`` is the buffer itself. Collective to make: ``backend`` says where it lies.
    """

    def __init__(
        self,
        name: str,
        slots: Sequence[Slot],
        like: torch.Tensor,
        extra: int,
        backend: Backend,
        transfer: Transfer = AVERAGE,
    ) -> None:
        self.name = name
        self.slots = list(slots)
        numel = sum(slot.param.numel() for slot in slots) * (2 if like.is_complex() else 1)
        real = like.dtype.to_real()
        narrow = transfer.dtype if transfer.dtype is not None and real.itemsize > transfer.dtype.itemsize else None
        self.wire = backend.new_buffer(numel + extra, narrow or wire_dtype(real), like.device)
        self.extra = self.wire[numel:]
        #: The gradients as real numbers: the front of the wire itself, or a buffer of their own.
        self.values = self.wire[:numel] if real == self.wire.dtype else self.wire.new_zeros(numel, dtype=real)
        self._staged = real != self.wire.dtype
        self._before, self._after = transfer.before, after(transfer, backend.size)
        #: Whether the wire's dtype is the shorter one: the sum is scaled in the other.
        self._narrow = self.wire.dtype.itemsize < real.itemsize
        if self._narrow and self._after < 1:
            # Divide before the sum: the sum of a few large gradients does not fit into float16, their average does.
            self._before, self._after = self._before * self._after, 1.0
        flat = torch.view_as_complex(self.values.view(-1, 2)) if like.is_complex() else self.values
        self.work: Work[None] | None = None
        self.pending = len(self.slots)
        offset = int(flat.storage_offset())  # which as_strided counts from
        for slot in self.slots:
            p = slot.param
            slot.place(self, flat.as_strided(p.shape, _dense_strides(p), offset))
            # A GPU's copies are fewer and faster all at once.
            slot.large = p.is_cpu and slot.view.nbytes >= LARGE_BYTES
            offset += p.numel()
        start = self.values.data_ptr()
        #: Where the gradients of this bucket, and of the others of its layout, lie in memory.
        self.ranges = [(start, start + self.values.nbytes)]
        #: Which gradients ``fill`` copied, and which were there.
        self._moved: list[Slot] = []
        self._kept: list[Slot] = []
        #: The first gradient that lies in the memory of another one, found by ``fill``.
        self.misplaced: Slot | None = None
        #: The first gradient that has another shape than its place, found by ``fill``; zeros are sent instead.
        self.reshaped: Slot | None = None

    def covers(self, address: int) -> bool:
        """Whether ``address`` is in the memory of a bucket of this layout."""
        return any(low <= address < high for low, high in self.ranges)

    def fill(self) -> None:
        """Brings every gradient into the buffer; a missing one counts as zero. Those that live there already stay."""
        views, grads = [], []
        self._moved, self._kept = [], []
        low, high = self.ranges[0][0], self.ranges[-1][1]
        for slot in self.slots:
            p = slot.param
            grad = p.grad
            if grad is None:
                slot.view.zero_()
                # Frozen since the buckets were laid out, a parameter takes part as zeros and gets nothing.
                if p.requires_grad:
                    self._moved.append(slot)
                continue
            try:
                address = grad.data_ptr()
            except RuntimeError:  # a sparse one
                address, grad = -1, grad.to_dense()
            if address == slot.address:
                if grad.stride() == slot.strides and grad.shape == slot.shape and grad.dtype is slot.dtype:
                    self._kept.append(slot)
                    continue
                grad = grad.clone()  # this part of the buffer, transposed
            if grad.shape != slot.shape:
                self.reshaped = self.reshaped or slot
                slot.view.zero_()
                continue
            if address != slot.address and low <= address < high and self.covers(address):
                self.misplaced = self.misplaced or slot
            self._moved.append(slot)
            views.append(slot.view)
            grads.append(grad)
        if views:
            with torch.no_grad():  # after a backward with create_graph, gradients have a history
                torch._foreach_copy_(views, grads)
        if self._before != 1:
            self.values.mul_(self._before)
        if self._staged:
            self.wire[: self.values.numel()].copy_(self.values)

    def start(self, backend: Backend) -> None:
        """Sends it: the sum over ranks, extra numbers excepted turned into the average, or what the transfer asks for."""
        factor = 1.0 if self._narrow else self._after
        self.work = backend.start_sum(self.wire, self.name, factor, self.extra.numel())

    def finish(self) -> None:
        """Blocks until every gradient is there. Raises BackendError."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        self.pending = len(self.slots)
        if self._staged:
            self.values.copy_(self.wire[: self.values.numel()])
            if self._narrow and self._after != 1:
                self.values.mul_(self._after)

    def hand_out(self) -> None:
        """Makes every gradient the part of the buffer that is its own."""
        for slot in self._moved:
            slot.hand_out()
        for slot in self._kept:
            grad = slot.param.grad
            # Another reducer of the same parameter may have put its own there since.
            if grad is None or grad.data_ptr() != slot.address:
                slot.hand_out()


def after(transfer: Transfer, size: int) -> float:
    """The factor on a sum over ``size`` ranks."""
    return 1.0 / size if transfer.after is None else transfer.after


def lay_out(
    slots: Sequence[Slot], extra: int, backend: Backend, name: str = "gradients", transfer: Transfer = AVERAGE
) -> list[Bucket]:
    """The buckets ``name.0``, … for ``slots`` (in registration order); the last one carries ``extra`` numbers more.

    Collective; blocks.
    """
    groups = _partition(slots, transfer)
    likes = [torch.empty(0, dtype=gradient_dtype(p), device=p.device) for p in (group[0].param for group in groups)]
    likes = likes or [torch.empty(0)] * bool(extra)
    last = len(likes) - 1
    parts = groups or [[]] * len(likes)
    buckets = [
        Bucket(f"{name}.{i}", part, like, extra if i == last else 0, backend, transfer)
        for i, (part, like) in enumerate(zip(parts, likes, strict=True))
    ]
    ranges = sorted(part for bucket in buckets for part in bucket.ranges)
    for bucket in buckets:
        bucket.ranges = ranges
    return buckets


def _partition(slots: Sequence[Slot], transfer: Transfer) -> list[list[Slot]]:
    chosen = {p: number for number, group in enumerate(transfer.groups) for p in group}
    groups: list[list[Slot]] = []
    open_groups: dict[tuple[torch.dtype, torch.device, int | None], tuple[list[Slot], int]] = {}
    for slot in reversed(slots):
        number = chosen.get(slot.param)
        dtype = gradient_dtype(slot.param)
        key = dtype, slot.param.device, number
        size = slot.param.numel() * dtype.itemsize
        group, filled = open_groups.get(key, ([], 0))
        limit = BUCKET_BYTES if transfer.bucket_bytes is None else transfer.bucket_bytes
        if groups and group is groups[0]:
            limit = min(limit, FIRST_BUCKET_BYTES)
        if not group or (number is None and filled + size > limit):
            group, filled = [], 0
            groups.append(group)
        group.append(slot)
        open_groups[key] = (group, filled + size)
    return groups


def _dense_strides(p: torch.Tensor) -> tuple[int, ...]:
    """The strides of ``p`` itself where it fills its memory without gaps, else those of a tensor like it that does."""
    return tuple(torch.empty_like(p, device="meta").stride())
