"""Where each gradient lies: flat buffers, a few megabytes each, that travel whole.

The layout is a pure function of the parameters: reverse registration order (backward finishes the last layers first),
one dtype and device to a bucket, about 25 MB each and the first one smaller so that sending starts early. The same
layout, sent in the same order, is what makes two backends sum to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dualtrain.backends.base import Work
from dualtrain.backends.wire import average_, wire_dtype

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass
class Slot:
    """The place of one parameter's gradient in its bucket."""

    name: str
    param: torch.nn.Parameter
    #: The part of the bucket that holds the gradient, in the parameter's own strides (channels_last included).
    view: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    bucket: Bucket | None = None
    fired: bool = False

    def describe(self) -> str:
        """What must be the same on every rank."""
        p = self.param
        return f"{self.name} ({str(p.dtype).removeprefix('torch.')}, {tuple(p.shape)}, strides {_dense_strides(p)})"


class Bucket:
    """One flat buffer of gradients, and behind them ``extra`` numbers that travel for free.

    Gradients of 16 bits are summed in a second buffer of 32 (``wire``); otherwise ``wire`` is the buffer itself.
    """

    def __init__(self, name: str, slots: Sequence[Slot], like: torch.Tensor, extra: int) -> None:
        self.name = name
        self.slots = list(slots)
        numel = sum(slot.param.numel() for slot in slots) * (2 if like.is_complex() else 1)
        real = like.dtype.to_real()
        self.wire = torch.zeros(numel + extra, dtype=wire_dtype(real), device=like.device)
        self.extra = self.wire[numel:]
        #: The gradients as real numbers: the front of the wire itself, or a narrower buffer of their own.
        self._values = self.wire[:numel] if real == self.wire.dtype else self.wire.new_zeros(numel, dtype=real)
        self._staged = real != self.wire.dtype
        flat = torch.view_as_complex(self._values.view(-1, 2)) if like.is_complex() else self._values
        self.work: Work[None] | None = None
        self.pending = len(self.slots)
        offset = 0
        for slot in self.slots:
            p = slot.param
            slot.bucket = self
            slot.view = flat.as_strided(p.shape, _dense_strides(p), offset)
            offset += p.numel()

    @torch.no_grad()
    def fill(self) -> None:
        """Brings every gradient into the buffer; a missing one counts as zero. Those that live there already stay."""
        views, grads = [], []
        for slot in self.slots:
            grad = slot.param.grad
            if grad is None:
                slot.view.zero_()
            elif grad.is_sparse or grad.data_ptr() != slot.view.data_ptr():
                views.append(slot.view)
                grads.append(grad.to_dense() if grad.is_sparse else grad)
        if views:
            torch._foreach_copy_(views, grads)
        if self._staged:
            self.wire[: self._values.numel()].copy_(self._values)

    @torch.no_grad()
    def scale(self, size: int) -> None:
        """Turns the sum over ``size`` ranks, extra numbers excepted, into the average."""
        total = average_(self.wire[: self._values.numel()], size)
        if self._staged:
            self._values.copy_(total)


def lay_out(slots: Sequence[Slot], extra: int, name: str = "gradients") -> list[Bucket]:
    """The buckets ``name.0``, … for ``slots`` (in registration order); the last one carries ``extra`` numbers more."""
    groups: list[list[Slot]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[Slot], int]] = {}
    for slot in reversed(slots):
        key, size = (slot.param.dtype, slot.param.device), slot.param.numel() * slot.param.element_size()
        group, filled = open_groups.get(key, ([], 0))
        limit = FIRST_BUCKET_BYTES if groups and group is groups[0] else BUCKET_BYTES
        if not group or filled + size > limit:
            group, filled = [], 0
            groups.append(group)
        group.append(slot)
        open_groups[key] = (group, filled + size)
    likes: list[torch.Tensor] = [group[0].param for group in groups] or [torch.empty(0)] * bool(extra)
    last = len(likes) - 1
    parts = groups or [[]] * len(likes)
    return [
        Bucket(f"{name}.{i}", part, like, extra if i == last else 0)
        for i, (part, like) in enumerate(zip(parts, likes, strict=True))
    ]


def _dense_strides(p: torch.Tensor) -> tuple[int, ...]:
    """The strides of ``p`` itself where it fills its memory without gaps, else those of a tensor like it that does."""
    return tuple(torch.empty_like(p, device="meta").stride())
