"""Refuse a step on averages that this rank has changed and another rank uses unchanged.

A rank that has run no backward pass averages its gradients only in the optimizer's step. If another rank clips the
averages before its own step, the weights of the two ranks differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dualtrain.backends.wire import as_real
from dualtrain.errors import BackendError
from dualtrain.gradients.hooks import reducers_of
from dualtrain.gradients.slots import Slot

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StepCheck:
    """Check of this rank's gradients between an exchange and the optimizer's step.

    Args:
        slots: the reducer's parameters. Those that other reducers average as well are not checked: each of these reducers
            replaces ``param.grad``.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._ranks: list[int] = []
        self._sums: list[tuple[Slot, list[int]]] = []

    def record(self, ranks: list[int]) -> None:
        """Record the gradients as they are now, if there are ``ranks`` that use them unchanged. Not collective."""
        self._ranks = ranks
        self._sums = [(slot, _bit_sums(slot)) for slot in self._slots if _has_one_reducer(slot)] if ranks else []

    def refuse_changed(self, rank: int) -> None:
        """Raise BackendError if a gradient was changed since :meth:`record`. Not collective. ``rank`` is this rank."""
        # Since ``record``, reducers of a parameter may have been closed, freed or made.
        if all(_bit_sums(slot) == sums for slot, sums in self._sums if _has_one_reducer(slot)):
            return
        raise BackendError(
            f"rank {rank} has changed the averages of its gradients (by clipping, for example), but rank "
            f"{self._ranks[0]} uses them unchanged, since it averages only in step(): call synchronize() on every rank "
            "before you change gradients"
        )


def _has_one_reducer(slot: Slot) -> bool:
    """Return whether no other reducer averages this parameter: it has one hook of a reducer, or none after ``close``."""
    return len(reducers_of(slot.param)) <= 1


@torch.no_grad()
def _bit_sums(slot: Slot) -> list[int]:
    """Return, for each part of a gradient, the sum of its values' bit patterns, each read as an integer.

    Nearly every change of a gradient changes a sum.
    """
    return [_bit_sum(part) for part in _parts(slot.param.grad)]


def _parts(grad: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the tensors that ``grad`` consists of: none, one, or the indices and values of a sparse gradient."""
    if grad is None:
        return []
    grad = grad.detach()
    return [grad._indices(), grad._values()] if grad.layout is torch.sparse_coo else [grad]


def _bit_sum(part: torch.Tensor) -> int:
    numbers = as_real(part).resolve_neg().contiguous()
    return int(numbers.view(_INTEGERS[numbers.element_size()]).sum())
