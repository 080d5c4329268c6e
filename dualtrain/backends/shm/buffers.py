"""Buffers of gradients in memory that the ranks of a host share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from dualtrain.backends.shm.segment import SecondMapping, UnsharedError
from dualtrain.backends.shm.shards import PAGE, Region


class Buffers:
    """This rank's buffers in shared memory, each with the region of all ranks' buffers.

    Args:
        new_region: maps a region with this many bytes per rank. Collective; blocks. Raises UnsharedError on every rank.
        rank: this process's rank on its host.
    """

    def __init__(self, new_region: Callable[[int], Region], rank: int) -> None:
        self._new_region, self._rank = new_region, rank
        self._regions: dict[int, Region] = {}  # by the address of this rank's buffer
        #: For the address of each buffer that :meth:`replace` has begun to replace: the second mapping of its memory and
        #: the new buffer in this mapping; ``None`` after the replacement.
        self._replacing: dict[int, tuple[SecondMapping, torch.Tensor] | None] = {}
        self._reserved: Region | None = None  # memory for the next buffers; ``None`` if :meth:`reserve` was not called

    def region_of(self, tensor: torch.Tensor) -> Region | None:
        """Return the region of ``tensor``; ``None`` if it is not one of these buffers."""
        return self._regions.get(tensor.data_ptr())

    def new(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new buffer: zeros, (numel,). Collective; blocks.

        After :meth:`reserve` it does not block, and the ranks may call it at different times.

        Raises:
            UnsharedError: on every rank, if the ranks of a host cannot share this much memory, or if the rest of the memory
                that :meth:`reserve` has mapped is too small.
        """
        if numel == 0:
            return torch.zeros(0, dtype=dtype, device="cpu")
        nbytes = numel * dtype.itemsize
        region = self._new_region(nbytes) if self._reserved is None else self._take_reserved(self._reserved, nbytes)
        return self._buffer_in(region, region.slots[self._rank], numel, dtype)

    def _buffer_in(self, region: Region, memory: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):
            buffer: torch.Tensor = memory[: numel * dtype.itemsize].view(dtype)
        self._regions[buffer.data_ptr()] = region
        for by_address in (self._regions, self._replacing):
            weakref.finalize(buffer, by_address.pop, buffer.data_ptr(), None)
        return buffer

    def replace(self, buffer: torch.Tensor, use: Callable[[torch.Tensor], None]) -> bool:
        """Call ``use`` with a new tensor on the shared memory of ``buffer``, and move ``buffer`` to private memory.

        The other ranks are not affected. Return ``False``, and do nothing, if ``buffer`` is not shared. If an interrupt
        such as Ctrl-C has stopped this call, or code right after it, repeat it with the same ``buffer``. It then calls
        ``use`` again, unless ``buffer`` was replaced already.

        Raises:
            OSError: the memory cannot be mapped again.
        """
        address = buffer.data_ptr()
        region = self._regions.get(address)
        if region is None:
            return address in self._replacing
        replacing = self._replacing.get(address)
        if replacing is None:
            with torch.inference_mode(False):
                second = SecondMapping(region.slots[self._rank])
            new = self._buffer_in(region, second.memory, buffer.numel(), buffer.dtype)
            self._replacing[address] = replacing = second, new
        second, new = replacing
        region.replace(self._rank, second.memory)
        use(new)
        # Until here, both mappings have the same pages.
        second.separate()
        self._replacing[address] = None
        del self._regions[address]
        return True

    def reserve(self, sizes: Sequence[int]) -> None:
        """Map memory for the next buffers, which have these sizes in bytes; more buffers are refused. Collective; blocks.

        Raises:
            UnsharedError: on every rank, if the ranks of a host cannot share this much memory.
        """
        self._reserved = self._new_region(sum(map(in_pages, sizes)))

    def _take_reserved(self, reserved: Region, nbytes: int) -> Region:
        left, needed = reserved.slots[0].numel() if reserved.slots else 0, in_pages(nbytes)
        if left < needed:
            raise UnsharedError("the gradients need more memory than was reserved for them")
        part = reserved.part(0, needed)
        if left == needed:
            reserved.close()  # from now on, only the buffers keep the memory mapped
        else:
            self._reserved = reserved.part(needed, left)
        return part

    def close(self) -> None:
        """Drop the references to the memory; the buffers stay valid."""
        self._regions.clear()
        self._replacing.clear()
        if self._reserved is not None:
            self._reserved.close()


def in_pages(nbytes: int) -> int:
    """Return ``nbytes``, rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE
