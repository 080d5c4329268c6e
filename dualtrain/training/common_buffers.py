"""Keep buffers equal on all ranks after every step, although the forward passes of each shard change them.

Every shard of a step begins with the same values. A floating-point buffer (running statistics) then gets the mean of the
shards' values. Running statistics are updated linearly, so this mean equals the mean of separate statistics for each
shard. An integer buffer of one element (a count of batches) gets the value of shard 0, and must change by the same
amount in every forward pass of every shard. All other buffers must not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dualtrain.backends.wire import as_bytes

_EXACT = 1 << 24  # float32 has all whole numbers up to this one


@dataclass(frozen=True)
class _Place:
    """Location of a buffer. A forward pass may assign another tensor to it."""

    name: str
    module: nn.Module
    key: str

    def read(self) -> torch.Tensor:
        """Return the buffer that is there now."""
        tensor: torch.Tensor = getattr(self.module, self.key)
        return tensor

    def write(self, value: torch.Tensor) -> None:
        """Set the buffer to ``value``."""
        now = self.read()
        if _same_form(now, value):
            now.copy_(value)
        else:
            setattr(self.module, self.key, value.clone())


class CommonBuffers:
    """The buffers of ``model``: their values at the start of a step, and the changes to them by each of ``shards`` shards.

    The caller sums the ``numbers`` of all shards, in float32 at least (in float64 if all parameters are float64).

    Attributes:
        count: how many numbers a shard adds to that sum.
    """

    def __init__(self, model: nn.Module, shards: int) -> None:
        self._model = model
        #: Largest change of a counter. The shards' changes are compared by the sum of their squares, which must be exact.
        self._largest = math.isqrt(_EXACT // shards)
        # The numbers are sent with gradients, so the narrowest parameter limits their precision.
        exact = min((p.dtype.itemsize for p in model.parameters() if p.is_floating_point()), default=4)
        self._averaged: list[_Place] = []
        self._counters: list[_Place] = []
        self._constant: list[_Place] = []
        for place in _places(model):
            buffer = place.read()
            if buffer.is_floating_point() and buffer.dtype.itemsize <= max(exact, 4):
                self._averaged.append(place)
            elif buffer.numel() == 1 and not buffer.is_floating_point() and not buffer.is_complex():
                self._counters.append(place)
            else:
                self._constant.append(place)
        self._all = [*self._averaged, *self._counters, *self._constant]
        self._sizes = [place.read().numel() for place in self._averaged]
        self._ends = torch.tensor([0, *self._sizes]).cumsum(0)
        self._dtype = torch.float64 if exact > 4 else torch.float32
        self._began = [place.read().clone() for place in self._all]
        #: The values in ``_began``: those of averaged buffers as one vector, those of counters as numbers.
        self._vector, self._counts = torch.empty(0), list[int]()
        self.count = sum(self._sizes) + len(self._averaged) + 3 * len(self._counters) + 1

    def keep(self) -> None:
        """Keep the present values as those at the start of a step.

        Raises:
            ValueError: the number, a shape or a dtype of the model's buffers has changed.
        """
        if len(list(self._model.buffers())) != len(self._all):
            raise ValueError("the model has gained or lost buffers since the trainer was made: make the trainer afterwards")
        for place, began in zip(self._all, self._began, strict=True):
            now = place.read()
            if now.shape != began.shape or now.dtype != began.dtype:
                raise ValueError(f"buffer {place.name!r} has changed its shape or dtype: make the trainer afterwards")
            began.copy_(now)
        self._vector, self._counts = self._flat(), self._read_counters()

    def restore(self) -> None:
        """Restore the values that all buffers had at the start of the step."""
        now = [place.read() for place in self._all]
        if all(map(_same_form, now, self._began)):
            if now:
                with torch.no_grad():
                    # Private in torch 2.5 to 2.15, and the only way to copy many tensors in one call.
                    torch._foreach_copy_(now, self._began)
            return
        for place, began in zip(self._all, self._began, strict=True):
            place.write(began)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of all buffers on the CPU by name, including those that are not persistent."""
        return {place.name: place.read().detach().cpu().clone() for place in self._all}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what :meth:`state_dict` returned. Raises KeyError where a buffer is missing."""
        for place in self._all:
            place.write(state[place.name].to(place.read().device))

    @torch.no_grad()
    def numbers(self, shard: int, passes: int) -> torch.Tensor:
        """Return the numbers that ``shard`` adds to the sum after its forward passes: float64, (count,), on the CPU.

        Raises:
            ValueError: a buffer has changed that must stay the same.
        """
        vector = self._flat()
        if vector.shape != self._vector.shape:
            # Averaged buffers come first in ``_began``.
            pairs = zip(self._averaged, self._began, strict=False)
            name = next(place.name for place, began in pairs if place.read().numel() != began.numel())
            raise ValueError(f"buffer {name!r} changes its shape in forward: virtual ranks cannot average it")
        counts = (vector != self._vector).cumsum(0)
        so_far = torch.cat([counts.new_zeros(1), counts])[self._ends]
        changed = so_far.diff() > 0
        for place, began in zip(self._constant, self._began[len(self._averaged) + len(self._counters) :], strict=True):
            if not torch.equal(as_bytes(place.read()), as_bytes(began)):  # bytes: a NaN is not equal to itself
                raise ValueError(
                    f"buffer {place.name!r} ({place.read().dtype}) changes in forward, and has no mean over virtual ranks: "
                    "make it float32, or train without virtual ranks"
                )
        changes = [float(now - began) for now, began in zip(self._read_counters(), self._counts, strict=True)]
        for place, change in zip(self._counters, changes, strict=True):
            if abs(change) > self._largest:
                raise ValueError(
                    f"buffer {place.name!r} changes by {change:g} in a step: with this number of virtual ranks, it may "
                    f"change by {self._largest} at most"
                )
        first = changes if shard == 0 else [0.0] * len(changes)
        each = [self._of_one_pass(place, change, passes) for place, change in zip(self._counters, changes, strict=True)]
        counters = [*first, *each, *(change * change for change in each), float(passes > 0)]
        return torch.cat([vector.double(), changed.double(), torch.tensor(counters, dtype=torch.float64)])

    @staticmethod
    def _of_one_pass(place: _Place, change: float, passes: int) -> float:
        """Return the change in one forward pass; a bool buffer changes in the first pass only."""
        if not passes or place.read().dtype is torch.bool:
            return change if passes else 0.0
        return change / passes

    def _flat(self) -> torch.Tensor:
        """Return the averaged buffers as one vector, on the CPU."""
        parts = [place.read().detach().reshape(-1).to(self._dtype) for place in self._averaged]
        return torch.cat(parts).cpu() if parts else torch.empty(0, dtype=self._dtype)

    def _read_counters(self) -> list[int]:
        return torch.stack([place.read().reshape(()).long() for place in self._counters]).tolist() if self._counters else []

    @torch.no_grad()
    def become_mean(self, total: torch.Tensor, shards: int) -> None:
        """Set all buffers to the values that the next step begins with.

        Args:
            total: the sum of the ``numbers`` of all shards.
            shards: the number of shards.

        Raises:
            ValueError: on every rank: shards have changed an integer buffer by unequal amounts in a pass.
        """
        means, changed, counters = total.split([sum(self._sizes), len(self._averaged), 3 * len(self._counters) + 1])
        *numbers, shards_with_passes = counters.tolist()
        changes, sums, squares = (numbers[i * len(self._counters) : (i + 1) * len(self._counters)] for i in range(3))
        for place, each, square in zip(self._counters, sums, squares, strict=True):
            if each * each != square * shards_with_passes:  # equal only if all changes are equal
                raise ValueError(
                    f"buffer {place.name!r} is changed by unequal amounts in the forward passes of the shards: virtual "
                    "ranks have no common value for it; train without them"
                )
        self.restore()
        for place, mean, some in zip(
            self._averaged, means.mul(1.0 / shards).split(self._sizes), changed.tolist(), strict=True
        ):
            if some:
                now = place.read()
                now.copy_(mean.view(now.shape))
        for place, change in zip(self._counters, changes, strict=True):
            now = place.read()
            now.fill_(now.item() + int(change))


def _same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Elements of an expanded tensor share memory, and cannot be written.
    dense = 0 not in one.stride() or one.numel() < 2
    return one.shape == other.shape and one.dtype == other.dtype and dense and not one.is_inference()


def _places(model: nn.Module) -> Sequence[_Place]:
    found, seen = [], set[int]()
    for path, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in seen:  # a buffer of several modules counts once, as in model.buffers()
                seen.add(id(buffer))
                found.append(_Place(f"{path}.{key}" if path else key, module, key))
    return found
