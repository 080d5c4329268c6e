"""Messages by which the ranks compare a call. They also contain the call's data if it is short, which saves messages.

Each rank sends two numbers that describe its call (``agreement.py``), followed by its data. Rank 0 reduces or gathers the
data, and replies with all ranks' numbers and with the result. If the calls of the ranks differ, or a rank's data is
missing, the reply has no result. The messages are frames (``call_channel.py``). Lengths and numbers are int64.

| frame | contents |
|---|---|
| from each rank | length, 2 numbers, data |
| reply of rank 0 | length, 2 numbers per rank, result |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy
import torch

from dualtrain.backends.base import REDUCIBLE, Broadcast, Gather, Reduction, Short
from dualtrain.backends.call_channel import HEADER
from dualtrain.backends.ring_order import reduce_in_ring_order

_NUMBERS = 2
_WORD = 8
_NUMBERS_BYTES = _WORD * _NUMBERS  # bytes after the header, in the frame of a rank that sends no data
_MOST_VIEWS = 64


def longest(size: int, *, one_host: bool, few_cores: bool) -> int:
    """Return the largest number of bytes of data in a frame, for ``size`` ranks: a multiple of 8.

    Rank 0 receives and sends the data of all ranks, so this limit decreases with ``size``, down to 4096. It is lower on
    several hosts, because a ring all-reduce uses the network links of all hosts, and not only those of rank 0's host. With
    ``few_cores`` (one host, with no more cores than ranks), a ring often waits for a switch between processes. The limit is
    then 8 MB divided by ``size``, and 1 MB at most.
    """
    total = 1 << (23 if few_cores else 20 if one_host else 18)
    return max(1 << 12, min(1 << 20, total // size // _WORD * _WORD))


class _Views(NamedTuple):
    """Views of the frames in the dtype of the sent data: this rank's values, all ranks' values, a reduction's result.

    ``mine`` and ``result`` have the shape of the data. Only rank 0 has all ranks' values.
    """

    mine: torch.Tensor
    all_values: torch.Tensor
    result: torch.Tensor
    flat_result: torch.Tensor


class CallBuffers:
    """Buffers for the frames of one rank, for one comparison at a time.

    Args:
        rank: this rank.
        size: the number of ranks.
        limit: the largest number of bytes of data in a frame, a multiple of 8.

    Attributes:
        rows: on rank 0, buffers for the frames of the other ranks.
        reply: buffer for rank 0's reply.
    """

    # Leave inference mode: tensors and views that are made in it could not be written outside of it.

    @torch.inference_mode(False)
    def __init__(self, rank: int, size: int, limit: int) -> None:
        self._size = size
        self._stride = 1 + _NUMBERS + limit // _WORD  # size of the buffer for a rank's frame, in int64 numbers
        self._end = 1 + _NUMBERS * size  # where the numbers in the reply end
        # Each memoryview shares its memory with a tensor: Python reads and writes single numbers faster through the
        # memoryview. On rank 0, ``_frames`` holds the frames of all ranks, rank 0's own frame first.
        self._frames, gathered = _shared(self._stride * (size if rank == 0 else 1))
        self._answer, self._reply = _shared(self._end + limit // _WORD)
        self._gathered = gathered.view(-1, self._stride)
        memory, end = self._frames.cast("B"), self._stride * _WORD
        self._frame = memory[:end]
        self.rows = [memory[begin : begin + end] for begin in range(end, len(memory), end)]
        self.reply = self._answer.cast("B")
        self._numbers_in, self._numbers_out = self._gathered[:, 1 : 1 + _NUMBERS], self._reply[1 : self._end]
        self._data_bytes = self._gathered[:, 1 + _NUMBERS :].view(torch.uint8)
        self._result_bytes = self._reply[self._end :].view(torch.uint8)
        # Cached, since a program repeats the same few calls, and making a view takes as long as reducing a few values.
        self._views: dict[tuple[torch.dtype, torch.Size], _Views] = {}

    def message(self, numbers: Sequence[int], data: Short | None) -> memoryview:
        """Write this rank's frame, and return it."""
        length, own = _NUMBERS_BYTES, _own_values(data)
        if own is not None:
            self._views_of(own).mine.copy_(own)
            length += own.nbytes
        self._frames[0] = length
        self._frames[1], self._frames[2] = numbers
        return self._frame[: HEADER + length]

    def answer(self, data: Short | None) -> memoryview:
        """Write rank 0's reply, from the frames of all ranks, and return it."""
        self._numbers_out.view(self._size, _NUMBERS).copy_(self._numbers_in)
        length = _NUMBERS_BYTES * self._size
        if data is not None and self._agreed():
            lengths = [number - _NUMBERS_BYTES for number in self._frames[:: self._stride]]
            if isinstance(data, Reduction):
                length += self._reduce(data, lengths)
            elif isinstance(data, Broadcast):
                length += self._concatenate({data.root: lengths[data.root]})
            elif lengths == [count * data.unit for count in self._frames[2 :: self._stride]]:
                length += self._concatenate(dict(enumerate(lengths)))
        self._answer[0] = length
        return self.reply[: HEADER + length]

    def read(self, data: Short | None) -> list[list[int]]:
        """Return all ranks' numbers from the reply, and set the result of ``data`` if the reply has one."""
        length = self._answer[0] - _NUMBERS_BYTES * self._size
        if data is not None and length > 0:
            if isinstance(data, Reduction):
                data.result = self._views_of(data.tensor).result
            else:
                data.result = self._result_bytes[:length]
        numbers = self._answer[1 : self._end].tolist()
        return [[one, two] for one, two in zip(numbers[::2], numbers[1::2], strict=True)]

    def _agreed(self) -> bool:
        """Return whether all fingerprints are equal. A rank whose ``Backend.flag`` is set sends ``~fingerprint``."""
        return len({max(number, ~number) for number in self._answer[1 : self._end : _NUMBERS]}) == 1

    def _reduce(self, reduction: Reduction, lengths: Sequence[int]) -> int:
        """Write the result, if all ranks have sent their values, and return its length in bytes, or 0."""
        if any(length != lengths[0] for length in lengths):
            return 0
        views = self._views_of(reduction.tensor)
        reduce_in_ring_order(views.all_values, reduction.op, views.flat_result)
        return reduction.tensor.nbytes

    def _concatenate(self, lengths: Mapping[int, int]) -> int:
        """Write the data of the ranks in ``lengths`` (number of bytes by rank) to the reply; return the total length."""
        end = 0
        for rank, length in lengths.items():
            self._result_bytes[end : end + length] = self._data_bytes[rank, :length]
            end += length
        return end

    def _views_of(self, tensor: torch.Tensor) -> _Views:
        key = tensor.dtype, tensor.shape
        if (views := self._views.get(key)) is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            views = self._views[key] = self._new_views(tensor)
        return views

    @torch.inference_mode(False)
    def _new_views(self, tensor: torch.Tensor) -> _Views:
        fields = self._gathered[0, 1 + _NUMBERS :], self._gathered[:, 1 + _NUMBERS :], self._reply[self._end :]
        mine, all_values, result = (field.view(tensor.dtype)[..., : tensor.numel()] for field in fields)
        return _Views(mine.view(tensor.shape), all_values, result.view(tensor.shape), result)


def is_sent_with_call(data: Short | None, size: int, limit: int) -> bool:
    """Return whether ``data`` may be sent with the comparison of its call, in frames of at most ``limit`` bytes of data."""
    own = _own_values(data)
    if own is None:
        return data is not None  # a broadcast from another rank
    if isinstance(data, Reduction) and own.dtype not in REDUCIBLE:
        return False
    return own.is_cpu and own.nbytes <= (limit // size if isinstance(data, Gather) else limit)


def _own_values(data: Short | None) -> torch.Tensor | None:
    """Return the tensor that this rank sends; ``None`` if it sends none."""
    return None if data is None else data.tensor if isinstance(data, Reduction) else data.data


def _shared(length: int) -> tuple[memoryview, torch.Tensor]:
    """Return a memoryview of zeros, and a tensor that shares its memory.

    The system allocates a page of this memory when it is first written: a long buffer costs nothing until it is used.
    """
    numbers = numpy.zeros(length, numpy.int64)
    return numbers.data, torch.from_numpy(numbers)
