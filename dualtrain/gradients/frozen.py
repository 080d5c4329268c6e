"""Check that a parameter that is frozen on this rank is not trained on another rank."""

from __future__ import annotations

from dualtrain.gradients.slots import Slot


class FrozenCheck:
    """Check of the frozen parameters of one bucket after each round (one exchange of all gradients).

    A check reads a parameter's whole gradient, which takes time. So all frozen parameters are checked only in the first
    round, and after a parameter was frozen or unfrozen. In the other rounds, one of them is checked if gradients are on
    the CPU, and none if they are on a GPU, because the CPU would have to wait for the GPU.
    """

    def __init__(self) -> None:
        self._frozen_before: list[Slot] = []  # the frozen slots in the round before
        self._repeats = 0  # how many rounds had the same frozen slots as the round before

    def trained_elsewhere(self, slots: list[Slot]) -> Slot | None:
        """Of the frozen ``slots`` that are checked, return the first whose gradient is not zero: another rank trains it.

        Return ``None`` if there is none.
        """
        checked = slots
        if slots and slots == self._frozen_before:
            self._repeats += 1
            checked = [slots[self._repeats % len(slots)]] if slots[0].view.is_cpu else []
        self._frozen_before = slots
        return next((slot for slot in checked if slot.view.any()), None)
