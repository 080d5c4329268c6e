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
        if grad is None or grad is self.view or grad.is_sparse:
            return
        # Who comes after, another reducer or the user, must find this rank's own gradient, and not one under way.
        if len(p._post_accumulate_grad_hooks) == 1:
            self.view.copy_(grad.detach())
            p.grad = self.view

    def describe(self) -> str:
        """What must be the same on every rank."""
        p = self.param
        return f"{self.name} ({str(p.dtype).removeprefix('torch.')}, {tuple(p.shape)}, strides {_dense_strides(p)})"


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
        self._transfer = transfer
        numel = sum(slot.param.numel() for slot in slots) * (2 if like.is_complex() else 1)
        real = like.dtype.to_real()
        narrow = transfer.dtype if transfer.dtype is not None and real.itemsize > transfer.dtype.itemsize else None
        self.wire = backend.new_buffer(numel + extra, narrow or wire_dtype(real), like.device)
        self.extra = self.wire[numel:]
        #: The gradients as real numbers: the front of the wire itself, or a buffer of their own.
        self._values = self.wire[:numel] if real == self.wire.dtype else self.wire.new_zeros(numel, dtype=real)
        self._staged = real != self.wire.dtype
        self._factor = after(transfer, backend.size)
        #: Whether the wire's dtype is the shorter one: the sum is scaled in the other.
        self._narrow = self.wire.dtype.itemsize < real.itemsize
        flat = torch.view_as_complex(self._values.view(-1, 2)) if like.is_complex() else self._values
        self.work: Work[None] | None = None
        self.pending = len(self.slots)
        offset = int(flat.storage_offset())  # which as_strided counts from
        for slot in self.slots:
            p = slot.param
            slot.bucket = self
            slot.view = flat.as_strided(p.shape, _dense_strides(p), offset)
            # A GPU's copies are fewer and faster all at once.
            slot.large = p.is_cpu and slot.view.nbytes >= LARGE_BYTES
            offset += p.numel()

    def fill(self) -> None:
        """Brings every gradient into the buffer; a missing one counts as zero. Those that live there already stay."""
        views, grads = [], []
        for slot in self.slots:
            grad = slot.param.grad
            if grad is slot.view:
                continue
            if grad is None:
                slot.view.zero_()
                continue
            views.append(slot.view)
            grads.append(grad.to_dense() if grad.is_sparse else grad)
        if views:
            with torch.no_grad():  # after a backward with create_graph, gradients have a history
                torch._foreach_copy_(views, grads)
        if self._transfer.before != 1:
            self._values.mul_(self._transfer.before)
        if self._staged:
            self.wire[: self._values.numel()].copy_(self._values)

    def start(self, backend: Backend) -> None:
        """Sends it: the sum over ranks, extra numbers excepted turned into the average, or what the transfer asks for."""
        factor = 1.0 if self._narrow else self._factor
        self.work = backend.start_sum(self.wire, self.name, factor, self.extra.numel())

    def finish(self) -> None:
        """Blocks until every gradient is there. Raises BackendError."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        self.pending = len(self.slots)
        if self._staged:
            self._values.copy_(self.wire[: self._values.numel()])
            if self._narrow and self._factor != 1:
                self._values.mul_(self._factor)

    def hand_out(self) -> None:
        """Makes every gradient the part of the buffer that is its own."""
        for slot in self.slots:
            p, view = slot.param, slot.view
            grad = p.grad
            # Frozen since the buckets were laid out, a parameter takes part as zeros and gets nothing.
            if grad is not view and (grad is not None or p.requires_grad):
                p.grad = view


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
    likes: list[torch.Tensor] = [group[0].param for group in groups] or [torch.empty(0)] * bool(extra)
    last = len(likes) - 1
    parts = groups or [[]] * len(likes)
    return [
        Bucket(f"{name}.{i}", part, like, extra if i == last else 0, backend, transfer)
        for i, (part, like) in enumerate(zip(parts, likes, strict=True))
    ]


def _partition(slots: Sequence[Slot], transfer: Transfer) -> list[list[Slot]]:
    chosen = {p: number for number, group in enumerate(transfer.groups) for p in group}
    groups: list[list[Slot]] = []
    open_groups: dict[tuple[torch.dtype, torch.device, int | None], tuple[list[Slot], int]] = {}
    for slot in reversed(slots):
        number = chosen.get(slot.param)
        key = slot.param.dtype, slot.param.device, number
        size = slot.param.numel() * slot.param.element_size()
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
