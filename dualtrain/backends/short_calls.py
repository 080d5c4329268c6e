"""Messages of a comparison of calls in which the values of a short reduction travel, so that it needs no other message.

Every rank sends a message of fixed length, whatever its call: libraries may abort the process if lengths differ. Rank 0
reduces the values and replies with all ranks' numbers and with the result, which is discarded if the calls differ. Two
ranks need no reply: both get both messages.

| message | int64 |
|---|---|
| of each rank | its 2 numbers, 512 of values |
| rank 0's reply | 2 numbers per rank, 512 of the result |
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dualtrain.backends.base import REDUCIBLE, Reduction
from dualtrain.backends.ring_order import reduce_in_ring_order

LONGEST = 4096  # bytes of a short reduction
_NUMBERS = 2
_MOST_VIEWS = 64


class _Views(NamedTuple):
    """Views of the messages, of the dtype of a reduction: this rank's values, those of all ranks, and the result.

    ``mine`` and ``result`` have the shape of the reduced tensor.
    """

    mine: torch.Tensor
    rows: torch.Tensor
    result: torch.Tensor
    flat_result: torch.Tensor


class CallBuffers:
    """Messages of one rank, for one comparison at a time.

    Attributes:
        message: this rank's message.
        rows: where to gather all ranks' messages: on rank 0, and on both of two ranks.
        reply: rank 0's reply.
    """

    # Tensors and views that are made in inference mode could not be written outside of it.

    @torch.inference_mode(False)
    def __init__(self, rank: int, size: int) -> None:
        # Arrays and tensors share their memory: Python reads and writes single numbers faster through an array.
        self._numbers, self.message = _shared(_NUMBERS + LONGEST // 8)
        self._answers, self.reply = _shared(_NUMBERS * size + LONGEST // 8)
        self._gathered = torch.zeros(
            size if rank == 0 or size == 2 else 0, len(self.message), dtype=torch.int64, device="cpu"
        )
        self.rows = list(self._gathered)
        self._end = _NUMBERS * size
        self._numbers_in, self._numbers_out = self._gathered[:, :_NUMBERS], self.reply[: self._end].view(size, _NUMBERS)
        # A program repeats the same few calls, and to make a view takes as long as to reduce a few values.
        self._views: dict[tuple[torch.dtype, torch.Size], _Views] = {}

    def write(self, numbers: Sequence[int], reduction: Reduction | None) -> None:
        """Write this rank's message."""
        self._numbers[0], self._numbers[1] = numbers
        if reduction is not None:
            self._views_of(reduction.tensor).mine.copy_(reduction.tensor)

    def answer(self, reduction: Reduction | None) -> None:
        """Write rank 0's reply, from the messages of all ranks. If their calls differ, its result is meaningless."""
        self._numbers_out.copy_(self._numbers_in)
        if reduction is not None:
            views = self._views_of(reduction.tensor)
            reduce_in_ring_order(views.rows, reduction.op, views.flat_result)

    def read(self, reduction: Reduction | None) -> list[list[int]]:
        """Return all ranks' numbers from the reply, and set the result of ``reduction``."""
        if reduction is not None:
            reduction.result = self._views_of(reduction.tensor).result
        numbers = self._answers[: self._end]
        return [[one, two] for one, two in zip(numbers[::2], numbers[1::2], strict=True)]

    def _views_of(self, tensor: torch.Tensor) -> _Views:
        key = tensor.dtype, tensor.shape
        if (views := self._views.get(key)) is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            views = self._views[key] = self._new_views(tensor)
        return views

    @torch.inference_mode(False)
    def _new_views(self, tensor: torch.Tensor) -> _Views:
        fields = self.message[_NUMBERS:], self._gathered[:, _NUMBERS:], self.reply[self._end :]
        mine, rows, result = (field.view(tensor.dtype)[..., : tensor.numel()] for field in fields)
        return _Views(mine.view(tensor.shape), rows, result.view(tensor.shape), result)


def travels(reduction: Reduction | None) -> bool:
    """Return whether the values of ``reduction`` travel with the comparison of its call."""
    if reduction is None or not reduction.tensor.is_cpu:
        return False
    return reduction.tensor.dtype in REDUCIBLE and reduction.tensor.nbytes <= LONGEST


def _shared(length: int) -> tuple[array[int], torch.Tensor]:
    """Return an array of zeros, and a tensor that shares its memory."""
    numbers = array("q", bytes(8 * length))
    return numbers, torch.frombuffer(numbers, dtype=torch.int64)
