"""Find parameters that differ between the ranks after a step.

Averaged gradients keep equal weights equal. But nothing may have made the weights equal at the start, or the ranks may have
different learning rates, or the program may have changed gradients after they were averaged: by clipping with a norm that
differs between the ranks, for example.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch

from dualtrain.backends import Backend
from dualtrain.gradients.changed_parameters import checksum, checksum_of, sample
from dualtrain.gradients.slots import Slot


class Drift:
    """Comparison of the parameters after each step whose number is a power of two.

    In the next exchange, the ranks compare a checksum of about 1000 elements of each parameter. If it differs, they compare
    the parameters' checksums, and the elements of the parameters whose checksums differ. Parameters that are equal again
    are left out: the program may have called broadcast_parameters() after the step. Those on a GPU are left out too.
    """

    def __init__(self) -> None:
        #: This rank's checksum; ``None`` if the next exchange does not compare weights.
        self.checksum: int | None = None
        #: The reason to refuse the last exchange, for an error message; the same on every rank.
        self.reason: str | None = None
        # Keep the elements: the program may change parameters on each rank until the exchange, as SAM does in no_sync().
        self._samples: dict[Slot, torch.Tensor] = {}

    def record(self, step: int, slots: Sequence[Slot]) -> None:
        """Compute the checksum, if the weights are compared after this step. ``slots`` are the averaged parameters."""
        if step & (step - 1) == 0:
            found = ((slot, sample(slot.param)) for slot in slots)
            self._samples = {slot: elements for slot, elements in found if elements is not None}
            self.checksum = zlib.crc32(repr(list(map(checksum_of, self._samples.values()))).encode())

    def clear(self) -> None:
        """Don't compare weights in the next exchange."""
        self.checksum, self._samples = None, {}

    def compare(self, backend: Backend, step: int) -> None:
        """Set :attr:`reason` if a parameter differs by more than rounding explains. Collective; blocks."""
        sums = {slot.name: (checksum_of(elements), checksum(slot.param)) for slot, elements in self._samples.items()}
        of_ranks = backend.allgather_object(sums, name="checksums of parameters")
        differ = {slot.name: elements for slot, elements in self._samples.items() if _differ(slot.name, of_ranks)}
        values = backend.allgather_object(differ, name="parameters that differ")
        for rank, others in zip(backend.members, values, strict=True):
            for name, first in values[0].items():
                if name in others and _far_apart(first, others[name]):
                    self.reason = (
                        f"parameter {name!r} differs between the ranks {backend.members[0]} and {rank} after step {step}: "
                        "call broadcast_parameters() before training, use the same options of the optimizer on every rank, "
                        "and change averaged gradients in the same way on every rank (clip averaged gradients only)"
                    )
                    return


def _differ(name: str, of_ranks: Sequence[dict[str, tuple[int, int | None]]]) -> bool:
    """Return whether a parameter differed after the step, and still differs."""
    after, now = zip(*(sums.get(name, (None, None)) for sums in of_ranks), strict=True)
    return len(set(after)) > 1 and len(set(now)) > 1


def _far_apart(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two samples differ by more than rounding explains."""
    if first.shape != other.shape or first.dtype != other.dtype:
        return True
    _, _, far = distance(other, first, equal_nan=True)
    return far


def distance(own: torch.Tensor, first: torch.Tensor, *, equal_nan: bool = False) -> tuple[float, float, bool]:
    """Compare two tensors of the same shape and dtype.

    Returns:
        The norm of their difference, the norm of ``first``, and whether they agree in less than half of their digits: then
        the difference is not due to rounding. Also true if an element is not a number, unless ``equal_nan``, and both are.
    """
    epsilon = torch.finfo(own.dtype).eps if own.is_floating_point() or own.is_complex() else 0.0
    wide = torch.promote_types(own.dtype, torch.float32)
    own, first = own.to(wide), first.to(wide)
    # Equal elements count as no difference, also if they are infinite. The norm leaves out elements that are not finite,
    # because an infinite norm would allow any difference.
    same = own == first
    if equal_nan:
        same |= own.isnan() & first.isnan()
    difference = (own - first).masked_fill(same, 0).norm().item()
    norm = first.masked_fill(~first.isfinite(), 0).norm().item()
    return difference, norm, not difference <= math.sqrt(epsilon) * norm
