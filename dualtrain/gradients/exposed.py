"""The tensors by which a bucket's memory is exposed to the program, and whether the program keeps views of them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_, ne

import torch

from dualtrain.gradients.slots import Slot, count_references_from_c

_storage_uses = torch._C._storage_Use_Count  # private in torch 2.5 to 2.15, see ``slots.py``
_GRAD, _ALIAS, _ADDRESS = attrgetter("grad"), attrgetter("alias"), torch.Tensor.data_ptr


class ExposedTensors:
    """Tensors by which the program sees the gradients in a bucket. On the CPU, the references to them are counted.

    On the CPU, these tensors have one storage object, which the bucket's other tensors do not use. The number of uses of
    this object shows whether the program keeps views.

    Args:
        values: the memory, as a complex tensor if the gradients are complex. (A later call of ``view_as_complex`` would
            make hidden tensors, which would use the storage object until they are freed.)

    Attributes:
        whole: tensor with the memory of ``values``; the slots' tensors are views of it.
        tensors: one tensor for each version counter; the counters count only the program's in-place changes. A slot that
            is a key has a counter of its own. All other slots share the counter of ``whole``, whose key is ``None``. See
            ``Slot.move_kept``.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._counts = values.is_cpu and values.numel() > 0
        self.whole = torch.from_dlpack(values) if self._counts else values.data
        self.tensors: dict[Slot | None, torch.Tensor] = {None: self.whole}
        self._address, self._storage = values.data_ptr(), self.whole.untyped_storage()

    def watch(self, slots: Sequence[Slot]) -> None:
        """Record how many uses the storage has while the program keeps no views, for :meth:`have_views`.

        Call this right after the ``slots`` got their tensors.
        """
        self._slots, self._params = slots, [slot.param for slot in slots]
        self._addresses = [slot.address for slot in slots]
        self._uses = _storage_uses(self._storage._cdata)

    def have_views(self) -> bool:
        """Return whether the program keeps a view of a gradient, or a reference from C++ other than ``param.grad``.

        Always false on a GPU.
        """
        if not self._counts:
            return False
        # This runs in every step, so its loops run in C.
        aliases = list(map(_ALIAS, self._slots))
        # An alias has one reference from C++ by its Python object (subtracted here), and one if it is ``param.grad``
        # (compared below). Further references are from DLPack, or from ``other.grad``.
        held = sum(count_references_from_c(aliases)) - len(aliases)
        if held and held > sum(map(is_, aliases, map(_GRAD, self._params))):
            return True
        addresses = list(map(_ADDRESS, aliases))
        # If the program has assigned to ``grad.data``, this gradient does not use the storage any more.
        replaced = 0 if addresses == self._addresses else sum(map(ne, addresses, self._addresses))
        return _storage_uses(self._storage._cdata) > self._uses - replaced

    def have_moved(self) -> bool:
        """Return whether ``share_memory_()`` of the model or of a gradient has moved the storage to other memory."""
        return self._counts and self._storage.data_ptr() != self._address
