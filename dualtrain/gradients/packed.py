"""The gradients that a bucket has packed, and whether the program has changed them since."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_

import torch
from torch.autograd.graph import increment_version

from dualtrain.gradients.slots import Slot

# Private in torch 2.5 to 2.15: the version counter, which counts a tensor's in-place changes, has no public name.
_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")


class PackedGradients:
    """The gradients of ``slots`` at the time when they were packed."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._params = [slot.param for slot in slots]
        self._grads: list[torch.Tensor | None] = []
        self._versions: list[int] = []

    def record(self, grads: list[torch.Tensor] | None) -> None:
        """Record the current gradients: ``grads``, a list of all of them; or with ``None``, those of the parameters."""
        self._grads, self._versions = self._current(grads)

    def forget(self) -> None:
        """Drop the references to the gradients."""
        self._grads, self._versions = [], []

    def changed(self) -> list[Slot]:
        """Return the slots whose gradients were replaced or changed in place since they were recorded.

        Most gradients in the bucket share one version counter. If one of these was changed, all of these are returned.
        """
        if not self._grads:
            return []  # an interrupt such as Ctrl-C has stopped ``Bucket.unpack`` after it called ``forget``
        grads, versions = self._current(None)
        if versions == self._versions and all(map(is_, grads, self._grads)):
            return []
        pairs = zip(self._slots, grads, self._grads, versions, self._versions, strict=True)
        return [slot for slot, grad, was, version, before in pairs if grad is not was or version != before]

    def outside(self) -> list[torch.Tensor]:
        """Return the recorded dense gradients that do not lie in the bucket, except those made in inference mode."""
        dense = [
            (slot, grad)
            for slot, grad in zip(self._slots, self._grads, strict=False)  # no gradients after ``forget``
            if grad is not None and grad.layout is torch.strided and not grad.is_inference()
        ]
        return [grad for slot, grad in dense if grad.data_ptr() != slot.address]

    def _current(self, known_grads: Sequence[torch.Tensor] | None) -> tuple[list[torch.Tensor | None], list[int]]:
        """Return all gradients and their versions; the version is 0 if a gradient is missing or made in inference mode."""
        # This runs twice in every step, so it uses map(), whose loop runs in C.
        grads: list[torch.Tensor | None] = list(map(_GRAD, self._params) if known_grads is None else known_grads)
        try:
            return grads, list(map(_VERSION, grads))
        except (AttributeError, RuntimeError):  # a gradient is missing, or was made in inference mode
            return grads, [0 if grad is None or grad.is_inference() else grad._version for grad in grads]


def with_shared_counters(grads: Sequence[torch.Tensor]) -> set[int]:
    """Return the ids of the gradients whose version counters also count changes of other tensors.

    These are views, and tensors that ``detach()`` has made from the same tensor. Backward changes such a counter when it
    adds to the gradient of a different parameter. This function changes the counters, too.
    """
    before = list(map(_VERSION, grads))
    for grad in grads:
        increment_version(grad)
    # ``_base``, the tensor of a view, is private in torch 2.5 to 2.15, and no public attribute replaces it.
    return {id(g) for g, was in zip(grads, before, strict=True) if g._base is not None or g._version > was + 1}
