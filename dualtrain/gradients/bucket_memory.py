"""Memory of a bucket: the buffer that is sent, and the place of each gradient in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from dualtrain.backends import Backend
from dualtrain.gradients.exposed import ExposedTensors
from dualtrain.gradients.layout import BucketLayout
from dualtrain.gradients.slots import LARGE_BYTES, Slot
from dualtrain.gradients.wire_format import WireFormat

log = logging.getLogger(__name__)


class BucketMemory:
    """The buffer that a bucket sends, and the places of the gradients and of the extra scalars in it.

    Gradients that are converted before they are sent have a separate buffer. Construction is collective, since the backend
    allocates the memory.

    Args:
        slots: the slots of the layout's places, in the same order.
        layout: where the gradients lie.
        extra: how many scalars are sent behind the gradients.
        backend: the backend that sums the buffer.
        wire_format: the format in which the gradients are sent.
        copies_early: whether a large gradient on the CPU may be copied to its place as soon as it is ready.

    Attributes:
        wire: the buffer that is sent, one-dimensional.
        values: the gradients as real numbers: the first part of ``wire``, or a separate buffer.
        converts: whether ``values`` is a separate buffer, because the gradients are converted before they are sent.
        extra: the scalars, the last part of ``wire``.
        views: the gradients' places in ``values``, in the order of the slots.
        exposed: the tensors by which the program sees the gradients.
        keeps_views: True if the program has kept a view of an earlier gradient, or ``share_memory_()`` has moved gradients.
            Sums are then copied to new tensors outside of the bucket, which become ``param.grad`` (``Bucket.unpack``).
        group: this memory and those of the buckets that were made together with it. ``link`` sets this list.
        ranges: where the gradients of ``group`` lie, sorted: (first address, address past the last).
        on_replaced: function that is called after ``wire`` or ``values`` was replaced.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        layout: BucketLayout,
        extra: int,
        backend: Backend,
        wire_format: WireFormat,
        *,
        copies_early: bool,
    ) -> None:
        self.slots, self._layout, self._backend, self._numel = slots, layout, backend, wire_format.numel
        self.converts = wire_format.converts
        # On a GPU, it is faster to copy all gradients of a bucket in one call.
        self._copies_early = copies_early and wire_format.is_cpu
        self.keeps_views = False
        self._may_write = True  # false from ``end_round`` until ``leave_views`` has returned
        #: The buffer that ``_leave`` replaces; not ``None`` if an interrupt such as Ctrl-C has stopped ``_leave``.
        self._left: torch.Tensor | None = None
        self._range = 0, 0
        self.group, self.ranges = [self], [self._range]
        self.on_replaced: Callable[[], None] = lambda: None
        wire = backend.new_buffer(self._numel + extra, wire_format.dtype, layout.device)
        values = wire.new_zeros(self._numel, dtype=wire_format.real) if self.converts else wire[: self._numel]
        self._use(wire, values)

    def _use(self, wire: torch.Tensor, values: torch.Tensor) -> None:
        """Make ``wire`` the buffer that is sent, and ``values`` the place of the gradients."""
        self.wire, self.values, self.extra = wire, values, wire[self._numel :]
        self.views = self.split(values)
        new_range = values.data_ptr(), values.data_ptr() + values.nbytes
        self.ranges[self.ranges.index(self._range)] = self._range = new_range
        self.ranges.sort()
        self._place_slots()
        self.on_replaced()

    def _place_slots(self) -> None:
        self.exposed = ExposedTensors(_as_gradients(self.values, self._layout))
        exposed = self.split(self.exposed.whole)
        for slot, view, tensor in zip(self.slots, self.views, exposed, strict=True):
            early = self._copies_early and not self.keeps_views and view.nbytes >= LARGE_BYTES
            slot.place(view, tensor, copies_early=early)
        self.exposed.watch(self.slots)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of ``flat``, a buffer of the size of ``values``, for the gradients."""
        flat = _as_gradients(flat, self._layout)
        origin = int(flat.storage_offset())  # as_strided counts from the start of the storage
        return [flat.as_strided(place.shape, place.strides, origin + place.offset) for place in self._layout.places]

    # -- views that the program keeps -------------------------------------------------------------------------------

    def end_round(self) -> None:
        """Record that the program gets the gradients now, and can keep views of them."""
        self._may_write = False

    def leave_views(self) -> None:
        """If the program keeps views of earlier gradients, leave the memory to these views, and use a copy of the memory.

        The program then sees the earlier values, as in torch. If there is no memory for a copy, log a warning: the
        gradients then overwrite the views. Call this before the first write of a round (one exchange of all gradients).
        """
        if self._may_write:
            return
        # If a gradient lies in another gradient's memory, do not replace the memory: ``Bucket.pack`` finds such a gradient
        # by its address, and refuses it.
        if self._left is not None or (self.exposed.have_views() and not self._holds_others()):
            self._leave()
        self._may_write = True

    def leave_views_before_zeros(self) -> None:
        """Do the same as :meth:`leave_views` at any time of a round, even if a gradient lies in another one's place.

        Call this when the layout is replaced, before the bucket sends zeros.
        """
        if self._left is not None or self.exposed.have_views():
            self._leave()

    def _leave(self) -> None:
        """Leave the memory to the program, and use a copy of it. If there is no memory for a copy, log a warning."""
        self.keeps_views = True
        if self._left is None:
            self._left = self.values if self.converts else self.wire
        with torch.inference_mode(False), torch.no_grad():
            try:
                if self.converts:
                    self._backend.replace_buffer(self._left, lambda values: self._use(self.wire, values))
                else:
                    self._backend.replace_buffer(self._left, lambda wire: self._use(wire, wire[: self._numel]))
            except OSError as error:
                log.warning(
                    "this step overwrites views of earlier gradients, since there is no memory for a new buffer: %s", error
                )
                self.keeps_views = False
                self._place_slots()
        self._left = None

    def leave_moved(self) -> None:
        """If ``share_memory_()`` has moved the gradients to other memory, leave that memory to the program."""
        if self.exposed.have_moved():
            self.keeps_views = True
            with torch.inference_mode(False):
                self._place_slots()

    def replace_exposed(self, slot: Slot) -> None:
        """Record ``slot.exposed``, which has been replaced by a new tensor."""
        self.exposed.tensors[slot] = slot.exposed

    # -- which gradients lie here -----------------------------------------------------------------------------------

    def covers(self, address: int) -> bool:
        """Return whether ``address`` is in the memory of any bucket that was made together with this one."""
        return any(low <= address < high for low, high in self.ranges)

    def slots_inside(self) -> list[Slot]:
        """Return this bucket's slots whose gradients lie in a bucket of ``group``. A sum would overwrite them."""
        grads = [(slot, slot.param.grad) for slot in self.slots]
        return [
            slot
            for slot, grad in grads
            if grad is not None and grad.layout is torch.strided and self.covers(grad.data_ptr())
        ]

    def _holds_others(self) -> bool:
        """Return whether a gradient lies in this bucket, but not in the place of its slot."""
        low, high = self._range
        slots = [slot for memory in self.group for slot in memory.slots_inside()]
        addresses = [(slot, slot.param.grad.data_ptr()) for slot in slots if slot.param.grad is not None]
        return any(low <= address < high and address != slot.address for slot, address in addresses)


def link(memories: list[BucketMemory]) -> None:
    """Set ``group`` and ``ranges`` of each of ``memories``, which were made together."""
    ranges = sorted(part for memory in memories for part in memory.ranges)
    for memory in memories:
        memory.group, memory.ranges = memories, ranges


def _as_gradients(flat: torch.Tensor, layout: BucketLayout) -> torch.Tensor:
    return torch.view_as_complex(flat.view(-1, 2)) if layout.dtype.is_complex and not flat.is_complex() else flat
