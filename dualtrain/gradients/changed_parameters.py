"""Find parameters that the program's hooks have changed in backward, so that they differ between the ranks.

A hook gets the rank's own gradient. If it updates the parameter with that gradient by hand, the ranks' weights differ. A
hook may also make the same change on every rank: clamp the parameter, for example. So after a change on some rank, the
ranks compare their parameters, and refuse one that was equal on all ranks before, and differs now.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from dualtrain.backends import Backend
from dualtrain.gradients.slots import Slot

_SAMPLES = 1024
_FIRST, _EVERY = 20, 97  # 97 is a prime number


class ChangedParameters:
    """Checksums of parameters from before the program's hooks, since the last exchange or step.

    A checksum is of about 1000 elements, and is computed in the first exchanges and in every 97th one: so a hook that
    changes its parameter in every backward, or in every n-th, is found soon, and programs with other hooks are not slower.
    Hooks that run before the gradient is accumulated (``Tensor.register_hook``) are not found.
    """

    def __init__(self) -> None:
        self._before: dict[Slot, int | None] = {}
        #: The reason to refuse the last exchange, for an error message; the same on every rank.
        self.reason: str | None = None

    def watch(self, slot: Slot, number: int) -> None:
        """Compute the checksum of a parameter whose hooks run next, in round ``number``, unless there is one already."""
        if (number <= _FIRST or number % _EVERY == 0) and slot not in self._before:
            self._before[slot] = checksum(slot.param)

    def clear(self) -> None:
        """Drop the checksums. Called when the averages were computed, and when an optimizer step has changed parameters."""
        self._before.clear()

    def has_changes(self) -> bool:
        """Return whether a parameter has changed since :meth:`watch`."""
        return any(checksum(slot.param) != before for slot, before in self._before.items())

    def compare(self, backend: Backend, slots: Sequence[Slot]) -> None:
        """Set :attr:`reason` if hooks have made a parameter different on the ranks. Collective; blocks."""
        now = {slot: checksum(slot.param) for slot in slots}
        mine = {slot.name: (self._before.get(slot, value), value) for slot, value in now.items()}
        states = backend.allgather_object(mine, name="parameters that changed in backward")
        for slot in slots:
            before, after = zip(*(each.get(slot.name, (None, None)) for each in states), strict=True)
            if len(set(before)) == 1 and len({*after} - {None}) > 1:
                self.reason = (
                    f"parameter {slot.name!r} was changed in backward, and now differs between the ranks (a hook that "
                    "updates it gets this rank's own gradient): update it after backward, by step() of the optimizer"
                )
                return


def checksum(p: torch.Tensor) -> int | None:
    """Return a checksum of :func:`sample`, or ``None`` if there is no sample."""
    elements = sample(p)
    return None if elements is None else checksum_of(elements)


def checksum_of(elements: torch.Tensor) -> int:
    """Return a checksum of a sample."""
    return zlib.crc32(elements.view(torch.uint8).numpy().data)


def sample(p: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of some elements of ``p``, at an odd distance: so they are not all in one column.

    Return ``None`` if ``p`` is on a GPU (the CPU would wait for it), of a subclass that may have no memory of its own, or
    without memory because the program has freed it.
    """
    if not p.is_cpu or type(p) not in (torch.Tensor, torch.nn.Parameter) or not p.untyped_storage().size():
        return None
    return p.detach().reshape(-1)[:: p.numel() // _SAMPLES | 1].resolve_conj().resolve_neg().clone()
