"""Fronts: the tensors in the memory of a bucket that the program can see."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_, ne

import torch

from dualtrain.gradients.slots import Slot

_storage_uses = torch._C._storage_Use_Count  # private in torch 2.5 to 2.15, see ``slots.py``
_tensor_uses = torch.Tensor._use_count  # private in torch 2.5 to 2.15, which have no public count of references from C++
_GRAD, _ALIAS, _ADDRESS = attrgetter("grad"), attrgetter("alias"), torch.Tensor.data_ptr


class Fronts:
    """Tensors in the memory of a bucket's gradients. On the CPU, the references to them are counted.

    On the CPU, these tensors have a storage of their own. The number of its uses shows whether the program keeps views.

    Args:
        values: the memory; complex if the gradients are. ``view_as_complex`` makes hidden tensors, which would change the
            number of uses when they are freed.

    Attributes:
        whole: tensor with the memory of ``values``, of which the slots' tensors are views.
        tensors: tensors whose counters (``_version``) count the program's changes only. All slots use the tensor at the key
            ``None``, except for slots whose previous gradient the program still refers to.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._counts = values.is_cpu and values.numel() > 0
        self.whole = torch.from_dlpack(values) if self._counts else values.data
        self.tensors: dict[Slot | None, torch.Tensor] = {None: self.whole}
        self._address, self._storage = values.data_ptr(), self.whole.untyped_storage()

    def watch(self, slots: Sequence[Slot]) -> None:
        """Count the references while the program has none: call this right after the ``slots`` got their tensors."""
        self._slots, self._params = slots, [slot.param for slot in slots]
        self._addresses = [slot.address for slot in slots]
        self._uses = _storage_uses(self._storage._cdata)

    def have_views(self) -> bool:
        """Return whether the program keeps a view of a gradient on the CPU, or has a reference to one from C++."""
        if not self._counts:
            return False
        # This runs in every step, so its loops run in C.
        aliases = list(map(_ALIAS, self._slots))
        # An alias that is ``param.grad`` has one reference from C++. Any others are views by DLPack, or ``other.grad``.
        held = sum(map(_tensor_uses, aliases)) - len(aliases)
        if held and held > sum(map(is_, aliases, map(_GRAD, self._params))):
            return True
        addresses = list(map(_ADDRESS, aliases))
        # A gradient to whose ``.data`` the program has assigned does not use this storage any more.
        replaced = 0 if addresses == self._addresses else sum(map(ne, addresses, self._addresses))
        return _storage_uses(self._storage._cdata) > self._uses - replaced

    def have_moved(self) -> bool:
        """Return whether ``share_memory_()`` of the model or of a gradient has moved the storage to other memory."""
        return self._counts and self._storage.data_ptr() != self._address
