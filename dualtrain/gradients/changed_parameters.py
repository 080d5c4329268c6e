"""Find parameters that the program's hooks have changed in backward, so that they differ between the ranks.

A hook gets the rank's own gradient. If it updates the parameter with that gradient by hand, the ranks' weights differ. A
hook may also make the same change on every rank: clamp the parameter, for example. So after a change on some rank, the
ranks compare the parameter.
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
    """Samples of parameters from before the program's hooks, since the last exchange or step.

    A sample is about 1000 elements, and is taken in the first exchanges and in every 97th one: so a hook that changes its
    parameter in every backward, or in every n-th, is found soon, and programs with other hooks are not slower. There are no
    samples of parameters on a GPU: the CPU would wait for them.
    """

    def __init__(self) -> None:
        self._before: dict[Slot, torch.Tensor] = {}
        #: The reason to refuse the last exchange, for an error message; the same on every rank.
        self.reason: str | None = None

    def watch(self, slot: Slot, number: int) -> None:
        """Take a sample of a parameter whose hooks run next, in round ``number``, unless there is one already."""
        if (number <= _FIRST or number % _EVERY == 0) and slot.param.is_cpu and slot not in self._before:
            self._before[slot] = _sample(slot.param)

    def clear(self) -> None:
        """Drop the samples. Called when the averages were computed, and when an optimizer step has changed parameters."""
        self._before.clear()

    def names(self) -> set[str]:
        """Return the names of the parameters that have changed since :meth:`watch`."""
        pairs = [(slot, before) for slot, before in self._before.items() if slot.param.is_cpu]
        return {slot.name for slot, before in pairs if not torch.equal(_sample(slot.param), before)}

    def compare(self, backend: Backend, slots: Sequence[Slot]) -> None:
        """Set :attr:`reason` if a parameter that changed on some rank now differs between ranks. Collective; blocks."""
        sums = {slot.name: zlib.crc32(_sample(slot.param).numpy().data) for slot in slots if slot.param.is_cpu}
        states = backend.allgather_object((self.names(), sums), name="parameters that changed in backward")
        changed = set().union(*(names for names, _ in states))
        for slot in slots:
            if slot.name in changed and len({each.get(slot.name) for _, each in states}) > 1:
                self.reason = (
                    f"parameter {slot.name!r} was changed in backward, and now differs between the ranks (a hook that "
                    "updates it gets this rank's own gradient): update it after backward, by step() of the optimizer"
                )
                return


def _sample(p: torch.Tensor) -> torch.Tensor:
    """Return some elements of ``p``, as bytes. The distance between them is odd, so they are not all in one column."""
    elements = p.detach().reshape(-1)[:: p.numel() // _SAMPLES | 1]
    return elements.resolve_conj().resolve_neg().clone().view(torch.uint8)
