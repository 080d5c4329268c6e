"""One reduction of a CPU tensor through shared memory: its steps, and the tag by which ranks compare their operations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Protocol

import torch

from dualtrain.backends.base import ReduceOp, Work
from dualtrain.backends.inference import ordinary
from dualtrain.backends.shm.shards import Plan, Region, Tree

STAGE_BYTES = 1 << 20  # size of the buffer through which tensors outside shared memory are copied, piece by piece
TAG_BYTES = 64  # size of the tag of one operation

#: Function that returns whether a condition is met. Its argument says whether to block until the condition is met.
Condition = Callable[[bool], bool]


class Memory(Protocol):
    """The part of ``SharedMemory`` that an operation uses."""

    stage: Region

    @property
    def failed(self) -> bool:
        """Return whether later operations fail: an earlier one failed or was interrupted, or the memory is closed."""

    def is_short(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is so short that every rank computes its whole reduction."""

    def advance(self, work: Reduction | None = None) -> None:
        """Advance operations without blocking; with ``work``, block until it and all earlier ones have ended."""

    def progress(self) -> int:
        """Advance operations without blocking, and return how many are left unfinished. Raises no error of an operation.

        Returns 0 if this thread or another one is advancing them already.
        """

    def post_ready(self, work: Reduction) -> None:
        """Post that this rank's values for ``work`` are in its buffer."""

    def reduce_shard(self, plan: Plan, work: Reduction) -> Iterator[Condition]:
        """Reduce this rank's shard; yield the conditions to wait for."""

    def reduce_short(self, work: Reduction) -> Iterator[Condition]:
        """Reduce a short tensor; yield the conditions to wait for."""


class Reduction(Work[None]):
    """Handle of one reduction over all ranks."""

    def __init__(
        self,
        memory: Memory,
        tensor: torch.Tensor,
        region: Region | None,
        op: ReduceOp,
        name: str,
        factor: float,
        tail: int,
        tree: Tree | None,
    ) -> None:
        self._memory = memory
        self._tree = tree
        self.tensor = tensor
        self.region = region
        self.short = tree is None and memory.is_short(tensor)
        self.values: list[torch.Tensor] = []  # for a short tensor, its values on each rank, in shared memory
        self.posted = False  # whether this rank has posted "ready" for the whole tensor
        self.op, self.name = op, name
        self.factor = factor
        self.scaled = tensor.numel() - tail  # how many elements, from the first on, are multiplied by ``factor``
        #: Description of the operation for messages, and its tag.
        self.what, self.tag = _description(op, name, tensor.dtype, tensor.numel(), region is None)
        self.ended = False
        self._steps: Iterator[Condition] = self._run()
        self._condition: Condition | None = None

    def wait(self) -> None:
        if not self.ended:
            self._memory.advance(self)

    def done(self) -> bool:
        if not self.ended:
            self._memory.progress()
        return self.ended or self._memory.failed

    def progress(self, block: bool) -> bool:
        """Run steps until a condition is not met; with ``block``, wait for each condition and run all steps.

        Return whether the operation has ended.
        """
        while self._condition is None or self._condition(block):
            self._condition = next(self._steps, None)
            if self._condition is None:
                self.ended = True
                return True
        return False

    def _run(self) -> Iterator[Condition]:
        memory, tensor, dtype = self._memory, self.tensor, self.tensor.dtype
        if self.short:
            if not self.posted:
                memory.post_ready(self)
            yield from memory.reduce_short(self)
            return
        if self.region is not None:
            if not self.posted:
                memory.post_ready(self)
            plan = self.region.plan(dtype, tensor.numel(), self.scaled, self._tree)
            yield from memory.reduce_shard(plan, self)
            return
        room = STAGE_BYTES // dtype.itemsize
        for first in range(0, tensor.numel(), room):
            piece = tensor[first : first + room]
            count = piece.numel()
            plan = memory.stage.plan(dtype, count, min(max(self.scaled - first, 0), count))
            plan.own.copy_(piece)
            memory.post_ready(self)
            yield from memory.reduce_shard(plan, self)
            ordinary(piece).copy_(plan.own)


@lru_cache(maxsize=4096)
def _description(op: ReduceOp, name: str, dtype: torch.dtype, numel: int, staged: bool) -> tuple[str, bytes]:
    """Return a description of an operation, and its tag.

    The tag is a hash, then the description with dtype and size, cut or padded to ``TAG_BYTES``. Ranks in the same
    operation compute the same tag.
    """
    what = f"{op.value} of {name!r}"
    text = f"{what} ({str(dtype).removeprefix('torch.')}, {numel})"
    digest = hashlib.blake2b(f"{text} {staged}".encode(), digest_size=8).digest()
    return what, (digest + text.encode())[:TAG_BYTES].ljust(TAG_BYTES, b"\0")
