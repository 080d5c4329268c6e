"""Slots: one for each trained parameter, with the part of a bucket that holds its gradient."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, gt
from typing import Any, Protocol

import torch

from dualtrain.backends.base import Work
from dualtrain.gradients.layout import dense_strides
from dualtrain.gradients.parameters import gradient_dtype

LARGE_BYTES = 64 << 10  # a gradient of this size or more may be copied to its bucket as soon as it is ready


class SlotMemory(Protocol):
    """Interface of a bucket's memory for the slots."""

    def leave_views(self) -> None:
        """If the program keeps views of earlier gradients, leave the memory to these views, and use a copy of it.

        Call this before the first write of a round (see ``Schedule``).
        """

    def replace_exposed(self, slot: Slot) -> None:
        """Record that ``slot`` has a new tensor ``exposed``."""

    def covers(self, address: int) -> bool:
        """Return whether ``address`` is in the memory of this bucket, or of a bucket that was made together with it."""


class SlotBucket(Protocol):
    """Interface of a bucket for its slots, and for the code that uses the slots."""

    #: How many gradients are not ready yet in this round (see ``Schedule``).
    pending: int
    #: The sum that was started; ``None`` before its start and after its end.
    work: Work[None] | None

    @property
    def memory(self) -> SlotMemory:
        """The bucket's memory."""


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter, and the part of a bucket that holds its gradient."""

    name: str
    param: torch.nn.Parameter
    #: The part of the bucket that holds the gradient, in the parameter's own strides (channels_last included).
    view: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    #: The same memory as ``view``, with a separate version counter, which counts the program's in-place changes.
    exposed: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    #: ``None`` before the layout, and for a sparse gradient that is gathered.
    bucket: SlotBucket | None = None
    #: The tensor that becomes ``param.grad``: an alias, so that ``exposed`` does not change if the user assigns to
    #: ``param.grad.data``.
    alias: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    #: Address (``data_ptr()``), strides, shape and dtype of ``view``: a gradient that has the same ones lies in the bucket.
    address: int = 0
    strides: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    #: The last round (see ``Schedule``) in which the gradient was marked ready.
    ready_in_round: int = 0
    #: The parameter's version counter (``_version``) at that time.
    ready_version: int = 0
    #: Backward passes that have reached the parameter since the last exchange; counted by the reducers of ``hvd`` only.
    passes: int = 0
    #: The reducer's ``steps`` when autograd had accumulated the gradient. Set only if hooks of the program run before the
    #: reducer's own hook, since they may step; never set by the reducers of ``hvd``.
    steps: int | None = None
    #: Whether the gradient may be copied to the bucket as soon as it is ready, before the bucket is complete.
    copies_early: bool = False
    #: The hooks on the autograd node that accumulates the gradient.
    node_hooks: Mapping[int, Any] = field(default_factory=dict)

    def copy_to_bucket(self) -> None:
        """Copy the gradient, which has just become ready, to its bucket, and make ``param.grad`` this copy.

        At this time the gradient is still in the processor's cache. The old memory is then free for the next gradient.
        Do nothing if the program or another hook may use the gradient: ``Bucket.pack`` copies such a gradient later.
        """
        p = self.param
        grad = p.grad
        if grad is None or grad.is_sparse or grad.shape != self.shape or grad.dtype is not self.dtype:
            return
        address = grad.data_ptr()
        if address == self.address or (self.bucket is not None and self.bucket.memory.covers(address)):
            return  # the gradient is in its bucket already, or in the memory of another gradient (``pack`` reports this)
        # Don't copy if another reducer or the user has a hook that runs later: it must see this rank's own gradient, and
        # the bucket may hold a partial sum by then. torch (2.5 to 2.15) has no public way to count a parameter's hooks.
        grads, grad = [grad], None  # ``may_be_kept`` counts references
        if len(p._post_accumulate_grad_hooks) == 1 and not may_be_kept(grads):
            if self.bucket is not None:
                self.bucket.memory.leave_views()
            if self.copies_early:  # ``leave_views`` may have set it to False
                self.move_kept()
                self.view.copy_(grads[0].detach())
                self.unpack()

    def place(self, view: torch.Tensor, exposed: torch.Tensor, *, copies_early: bool) -> None:
        """Set ``view``, the gradient's part of a bucket, and ``exposed``, of which ``param.grad`` becomes an alias."""
        self.view, self.exposed, self.alias = view, exposed, exposed.detach()
        self.address, self.strides, self.shape, self.dtype = view.data_ptr(), view.stride(), view.shape, view.dtype
        self.copies_early = copies_early

    def move_kept(self) -> None:
        """If the program still holds the earlier gradient, move it to new memory, before ``view`` is overwritten.

        The program then sees the earlier values, as in torch. ``BucketMemory.leave_views`` handles views of the earlier
        gradient, and references that only C++ holds (``other.grad = p.grad``).
        """
        if sys.getrefcount(self.alias) > REFERENCES and self.alias.data_ptr() == self.address:
            self.alias.data = self.alias.detach().clone()
            # Start a new version counter: it must not count in-place changes of the earlier gradient.
            self.exposed = self.exposed.data
            if self.bucket is not None:
                self.bucket.memory.replace_exposed(self)
            self.alias = self.exposed.detach()

    def unpack(self) -> None:
        """Make ``param.grad`` a tensor that shares the memory of ``view``."""
        alias = self.alias
        # The user may have set attributes or ``requires_grad`` on an earlier gradient. A new gradient must not have them.
        marked = self.param.grad is not alias and (alias.requires_grad or vars(alias))
        # The user may also have assigned to ``alias.data``, for example its lazy conjugate.
        lazy = alias.is_conj() or alias.is_neg()
        if marked or lazy or alias.data_ptr() != self.address or alias.stride() != self.strides:
            if self.exposed.data_ptr() != self.address:  # ``share_memory_()`` has moved the memory of the gradients
                self.exposed = self.view.data
            self.alias = alias = self.exposed.detach()
        try:
            self.param.grad = alias
        except RuntimeError:  # the user has assigned data of a different shape or dtype to ``alias.data``
            self.alias = self.param.grad = self.exposed.detach()

    def describe(self) -> str:
        """Describe what must be the same on every rank: name, dtype, shape, strides and device type."""
        p = self.param
        dtype = str(p.dtype).removeprefix("torch.")
        if gradient_dtype(p) != p.dtype:
            dtype += f" with gradients of {str(gradient_dtype(p)).removeprefix('torch.')}"
        device = "" if p.is_cpu else f", {p.device.type}"
        return f"{self.name} ({dtype}, {tuple(p.shape)}, strides {dense_strides(p)}{device})"


_EXAMPLE = Slot("", torch.nn.Parameter(torch.empty(0)))
#: The reference count of a slot's alias while only the slot refers to it.
REFERENCES = sys.getrefcount(_EXAMPLE.alias)
_EXAMPLE.param.grad = torch.empty(0)
_CDATA, _REQUIRES_GRAD = attrgetter("_cdata"), attrgetter("requires_grad")
_ALIAS, _ADDRESS, _STRIDES = attrgetter("alias"), attrgetter("address"), attrgetter("strides")


def _count_references(grads: list[torch.Tensor]) -> list[int]:
    return list(map(sys.getrefcount, grads))


def count_references_from_c(tensors: list[torch.Tensor]) -> list[int]:
    """Return how many references each tensor has from C++. ``param.grad`` is such a reference."""
    # Private in torch 2.5 to 2.15: there is no public count of references from C++.
    return list(map(torch.Tensor._use_count, tensors))


def _count_storage_uses(grads: list[torch.Tensor]) -> list[int]:
    # Private in torch 2.5 to 2.15: there is no public way to find out whether another tensor has the same storage.
    storages = list(map(torch.Tensor.untyped_storage, grads))
    return list(map(torch._C._storage_Use_Count, map(_CDATA, storages)))


_COUNTS = _count_references, count_references_from_c, _count_storage_uses
#: The counts if only a list and ``param.grad`` refer to a gradient.
_FRESH = [max(count([_EXAMPLE.param.grad])) for count in _COUNTS]


def may_be_kept(grads: list[torch.Tensor]) -> bool:
    """Return whether the program may use one of these dense gradients later, in backward or after it.

    This is so if the program has a reference to the gradient, if the gradient is also that of another parameter
    (``other.grad = p.grad``), if another tensor shares its memory, or if the gradient has an autograd graph
    (``create_graph=True``). The caller's only references to the gradients must be in the list ``grads``.
    """
    # This runs for all gradients in every step, so its loops run in C.
    return bool(grads) and (
        max(_count_references(grads)) > _FRESH[0]
        or max(count_references_from_c(grads)) > _FRESH[1]
        or max(_count_storage_uses(grads)) > _FRESH[2]
        or any(map(_REQUIRES_GRAD, grads))
    )


def kept_among(slots: list[Slot], grads: list[torch.Tensor]) -> list[tuple[Slot, torch.Tensor]]:
    """Return (slot, gradient) for each gradient that must remain ``param.grad``, since the program may use it later.

    See :func:`may_be_kept`. Gradients made in inference mode, or with another dtype or device than the bucket, cannot hold
    the result, and are left out.
    """
    counts = zip(*(count(grads) for count in _COUNTS), strict=True)
    return [
        (slot, grad)
        for slot, grad, found in zip(slots, grads, counts, strict=True)
        if (any(map(gt, found, _FRESH)) or grad.requires_grad)
        and slot.param.grad is grad
        and grad.dtype is slot.dtype
        and grad.device == slot.view.device
        and not grad.is_inference()
    ]


def unpack_all(slots: Sequence[Slot]) -> None:
    """Make ``param.grad`` of each slot a tensor that shares the memory of its ``view``, as :meth:`Slot.unpack` does."""
    # This runs for all gradients in every step, so the checks of ``Slot.unpack`` run in C.
    aliases = list(map(_ALIAS, slots))
    if (
        not (slots and slots[0].view.is_complex())  # a bucket has one dtype; only complex gradients can be conjugated
        and list(map(torch.Tensor.data_ptr, aliases)) == list(map(_ADDRESS, slots))
        and list(map(torch.Tensor.stride, aliases)) == list(map(_STRIDES, slots))
        and not any(map(_REQUIRES_GRAD, aliases))
        and not any(map(vars, aliases))
    ):
        try:
            for slot, alias in zip(slots, aliases, strict=True):
                slot.param.grad = alias
            return
        except RuntimeError:  # as in ``Slot.unpack``
            pass
    for slot in slots:
        slot.unpack()


@torch.no_grad()
def write_back(pairs: list[tuple[Slot, torch.Tensor]]) -> None:
    """Copy each slot's result into its existing ``param.grad``, so that the program's references to it stay valid.

    If such gradients share memory, only the first one can hold its result. For the others, ``param.grad`` becomes a view of
    the bucket. The same applies if a gradient's own elements share memory, or if it is no longer ``param.grad``.
    """
    end = 0
    for slot, grad in sorted(pairs, key=lambda pair: pair[1].data_ptr()):
        start, strides = grad.data_ptr(), zip(grad.shape, grad.stride(), strict=True)
        span = 1 + sum((n - 1) * stride for n, stride in strides) if grad.numel() else 0
        if start < end or span < grad.numel() or slot.param.grad is not grad:
            slot.unpack()
        else:
            grad.detach().copy_(slot.view)
        end = max(end, start + span * grad.element_size())


@torch.no_grad()
def separate_gradients(slots: Sequence[Slot]) -> None:
    """Replace dense gradients by copies if they share memory, are parts of larger tensors, or may be used later.

    Autograd makes gradients that share memory, for example for the parameters ``p`` and ``q`` in
    ``p.view(-1) + q.view(-1)``.
    """
    seen = set()
    for slot in slots:
        grads = [each for each in (slot.param.grad,) if each is not None and each.layout is torch.strided]
        if not grads:
            continue
        if may_be_kept(grads):
            grads = [grads[0].detach().clone()]
            slot.param.grad = grads[0]
        grad = grads[0]
        storage = grad.untyped_storage()
        address = storage.data_ptr()
        if address in seen or storage.nbytes() != grad.numel() * grad.element_size():
            slot.param.grad = grad.clone()
        seen.add(address)
