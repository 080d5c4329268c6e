"""Reductions of short tensors: every rank computes the whole result from the values of all ranks.

This needs one signal from each rank. A reduction by parts (reduce-scatter, then all-gather) needs two. Both reduce the
values in rank order, so they give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce

import torch

from dualtrain.backends.base import FOLD, ReduceOp
from dualtrain.backends.inference import ordinary
from dualtrain.backends.subnormals import keep_subnormals

SHORT_BYTES = 16 << 10  # size of the longest tensor whose whole reduction every rank computes
_LAYOUTS = 64  # largest number of (dtype, shape) pairs whose views an object caches


class ShortTensors:
    """Two slots of ``SHORT_BYTES`` per rank: a rank writes to one while other ranks may still read its other slot.

    Args:
        memory: for each rank, in rank order, ``2 * SHORT_BYTES`` bytes that all ranks share, as uint8.
        rank: this process's rank.
    """

    def __init__(self, memory: Sequence[torch.Tensor], rank: int) -> None:
        self._slots = [list(both.view(2, -1)) for both in memory]  # by rank, then by number
        self._rank = rank
        #: For each dtype and shape: views of all slots, by number, then by rank.
        self._views: dict[tuple[torch.dtype, torch.Size], list[list[torch.Tensor]]] = {}

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is short enough for a slot."""
        return tensor.nbytes <= SHORT_BYTES

    def write(self, tensor: torch.Tensor, number: int) -> list[torch.Tensor]:
        """Copy ``tensor`` to this rank's slot ``number`` (0 or 1); return that slot of all ranks, in the tensor's shape.

        Read another rank's slot only after that rank has signalled that it has written to the slot.
        """
        key = tensor.dtype, tensor.shape
        if (views := self._views.get(key)) is None:
            if len(self._views) == _LAYOUTS:
                self._views.clear()
            views = self._views[key] = self._new_views(*key)
        values = views[number]
        values[self._rank].copy_(tensor)
        return values

    @torch.inference_mode(False)  # views made in inference mode could not be written outside it
    def _new_views(self, dtype: torch.dtype, shape: torch.Size) -> list[list[torch.Tensor]]:
        nbytes = shape.numel() * dtype.itemsize
        return [[slots[number][:nbytes].view(dtype).view(shape) for slots in self._slots] for number in range(2)]

    def close(self) -> None:
        """Drop the references to the memory."""
        self._slots.clear()
        self._views.clear()


@keep_subnormals
def reduced(values: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Return a new tensor with the reduction of ``values``, in their order."""
    first, *others = values
    return reduce(FOLD[op], others, first) if others else first.clone()


@keep_subnormals
def reduce_into(
    tensor: torch.Tensor, values: Sequence[torch.Tensor], op: ReduceOp, factor: float = 1.0, scaled: int = 0
) -> None:
    """Reduce ``values`` in their order into ``tensor``, and multiply its first ``scaled`` elements by ``factor``."""
    tensor = ordinary(tensor)
    # With one rank, the only value is a copy of ``tensor``: ``reduce`` calls nothing, and ``tensor`` already holds the
    # result.
    reduce(partial(FOLD[op], out=tensor), values)
    if factor != 1:
        tensor[:scaled].mul_(factor)
