"""Keep buffers equal on all ranks after every step, although the forward passes of each shard change them.

Shards (virtual ranks) are the parts of a global batch. A rank may compute several of them.

Every shard of a step begins with the same values. What happens at the end of the step depends on the buffer:

- A floating-point buffer (running statistics) gets the mean of the shards' values. Running statistics are updated linearly,
  so the result is the same as if each shard kept separate statistics over all steps, and these were averaged at the end.
  Shards without samples do not count: they would make the change too small.
- An integer or bool buffer of one element (a counter, for example of batches) must change equally in all shards with
  samples: an integer by the same average amount per forward pass, a bool by the same amount in the whole shard. It gets the
  value of shard 0 or, if shard 0 has no samples, the initial value plus the average change in one forward pass, rounded.
- All other buffers must not change. They include floating-point buffers whose dtype is wider than both float32 and the
  narrowest parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy
import numpy.typing
import torch
from torch import nn

from dualtrain.backends.wire import same_bits
from dualtrain.errors import UserError
from dualtrain.gradients.shard_sums import copy_all

Vector = numpy.typing.NDArray[Any]

#: How many numbers :meth:`CommonBuffers.numbers` returns for each counter: the counter's change (0 except for shard 0), the
#: numerator and the denominator of its change in one pass, and the squares of these two.
_PER_COUNTER = 5
_EXACT = 1 << 24  # float32 represents all integers up to this one


@dataclass(frozen=True)
class _Place:
    """Location of a buffer. A forward pass can put a different tensor there."""

    name: str
    module: nn.Module
    key: str

    def read(self) -> torch.Tensor:
        """Return the buffer that is at this location now. Raises UserError if there is none."""
        # ``_buffers`` is private, and the same in torch 2.5 to 2.15. It is ten times as fast as getattr(), which looks for
        # an ordinary attribute first.
        try:
            tensor = self.module._buffers[self.key]  # not get(): TorchScript modules do not have it
        except KeyError:
            tensor = None
        if tensor is None:
            raise UserError(f"buffer {self.name!r} has become None: virtual ranks need it until the end of training")
        return tensor

    def write(self, value: torch.Tensor) -> None:
        """Set the buffer to ``value``."""
        now = self.read()
        if _is_writable(now, value):
            now.copy_(value)
        else:
            setattr(self.module, self.key, value.clone())


class CommonBuffers:
    """The buffers of ``model``: their values at the start of a step, and the changes that each shard makes.

    The caller sums the results of :meth:`numbers` over all shards, in float32 at least (in float64 if all parameters
    are float64).

    Attributes:
        count: how many numbers :meth:`numbers` returns.
    """

    def __init__(self, model: nn.Module, shards: int) -> None:
        self._modules = list(model.modules())
        self._structure = self._count_buffers()
        #: Largest allowed change of a counter: the shards' changes are compared through the sum of their squares, which
        #: float32 must represent exactly.
        self._largest = math.isqrt(_EXACT // shards)
        # The numbers are sent with gradients, so the narrowest parameter limits their precision.
        narrowest = min((p.dtype.itemsize for p in model.parameters() if p.is_floating_point()), default=4)
        self._averaged: list[_Place] = []
        self._counters: list[_Place] = []
        self._constant: list[_Place] = []
        for place in _places(model):
            buffer = place.read()
            if buffer.is_floating_point() and buffer.dtype.itemsize <= max(narrowest, 4) and buffer.numel():
                self._averaged.append(place)
            elif buffer.numel() == 1 and not buffer.is_floating_point() and not buffer.is_complex():
                self._counters.append(place)
            else:
                self._constant.append(place)
        self._all = [*self._averaged, *self._counters, *self._constant]
        self._sizes = [place.read().numel() for place in self._averaged]
        self._starts = [0, *accumulate(self._sizes[:-1])]
        self._dtype = torch.float64 if narrowest > 4 else torch.float32
        self._bools = [place.read().dtype is torch.bool for place in self._counters]
        self._initial = [buffer.clone() for buffer in self._read()]  # the values at the start of a step
        self._writable = list[torch.Tensor]()  # buffers that passed :meth:`_are_writable`
        #: The values in ``_initial``: the averaged buffers as one vector, the counters as integers.
        self._vector, self._counts = numpy.empty(0), list[int]()
        self.count = sum(self._sizes) + len(self._averaged) + _PER_COUNTER * len(self._counters) + 2

    def keep(self) -> None:
        """Record the present values as the values at the start of a step.

        Raises:
            UserError: the number of modules or buffers, or a buffer's shape or dtype, has changed.
        """
        if self._count_buffers() != self._structure:
            raise UserError(
                "the number of the model's modules or buffers has changed: change the model before you make the trainer"
            )
        now = self._read()
        for place, buffer, initial in zip(self._all, now, self._initial, strict=True):
            if buffer.shape != initial.shape or buffer.dtype != initial.dtype:
                raise UserError(
                    f"buffer {place.name!r} has changed its shape or dtype: change the model before you make the trainer"
                )
        copy_all(self._initial, now)
        self._vector, self._counts = self._flat(self._initial), self._read_counters(self._initial)

    def _count_buffers(self) -> tuple[int, int]:
        """Return how many submodules and buffers all modules have. This is much faster than ``model.buffers()``."""
        # ``_modules`` and ``_buffers`` are private, and the same in torch 2.5 to 2.15.
        submodules = sum(len(module._modules) for module in self._modules)
        return submodules, sum(buffer is not None for module in self._modules for buffer in module._buffers.values())

    def restore(self) -> None:
        """Restore the values that all buffers had at the start of the step."""
        now = self._read()
        if self._are_writable(now):
            copy_all(now, self._initial)
            return
        for place, initial in zip(self._all, self._initial, strict=True):
            place.write(initial)

    def _are_writable(self, buffers: list[torch.Tensor]) -> bool:
        """Return whether values can be copied into all buffers. For tensors that passed before, check only the shape."""
        known = len(self._writable) == len(buffers)
        for number, (buffer, initial) in enumerate(zip(buffers, self._initial, strict=True)):
            same = known and buffer is self._writable[number] and buffer.shape == initial.shape
            if not same and not _is_writable(buffer, initial):
                return False
        self._writable = buffers
        return True

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the model's current buffers by name, without those that have become None."""
        found = {}
        for place in self._all:
            with suppress(UserError):  # this buffer has become None
                found[place.name] = place.read()
        return found

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return CPU copies of all buffers by name, including buffers that are not persistent."""
        return {place.name: place.read().detach().cpu().clone() for place in self._all}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what :meth:`state_dict` returned. Raises KeyError if a buffer is missing."""
        for place in self._all:
            place.write(state[place.name].to(place.read().device))

    @torch.no_grad()
    def numbers(self, shard: int, passes: int, *, refused: bool = False) -> torch.Tensor:
        """Return the numbers that ``shard`` adds to the sum after its ``passes``: float64, (count,), on the CPU.

        The last number is 1 if this rank refuses the step (``refused``), and 0 otherwise: if its sum is not 0, the caller
        raises an error on every rank. The other numbers of a shard without passes are zeros.

        Raises:
            UserError: a buffer that must stay constant has changed, a buffer's number of elements has changed, a counter
                has changed by more than is allowed, or a buffer has become ``None``.
        """
        now = self._read()
        vector = self._flat(now)
        triples = zip(self._all, now, self._initial, strict=True)
        name = next((place.name for place, buffer, initial in triples if buffer.numel() != initial.numel()), None)
        if name is not None:
            raise UserError(f"buffer {name!r} changes its shape in forward: virtual ranks cannot average it")
        first_constant = len(self._averaged) + len(self._counters)
        for place, buffer, initial in zip(
            self._constant, now[first_constant:], self._initial[first_constant:], strict=True
        ):
            if not same_bits(buffer, initial):
                raise UserError(
                    f"buffer {place.name!r} ({place.read().dtype}) changes in forward, and has no mean over virtual ranks: "
                    "make it float32, or train without virtual ranks"
                )
        changes = [count - initial for count, initial in zip(self._read_counters(now), self._counts, strict=True)]
        for place, change in zip(self._counters, changes, strict=True):
            if abs(change) > self._largest:
                raise UserError(
                    f"buffer {place.name!r} changes by {change:g} in a step: with this number of virtual ranks, it may "
                    f"change by {self._largest} at most"
                )
        first = changes if shard == 0 else [0] * len(changes)
        # If every pass sets a bool buffer to the same value, only the first pass changes it: do not divide its change by
        # the number of passes.
        fractions = [
            _per_pass(change, min(passes, 1) if is_bool else passes)
            for is_bool, change in zip(self._bools, changes, strict=True)
        ]
        terms = [fraction[part] for part in (0, 1) for fraction in fractions]
        counters = [*first, *terms, *(term * term for term in terms), passes > 0, refused]
        # NumPy: on small arrays, its operations take a fraction of the time of torch's.
        numbers = numpy.empty(self.count)
        numbers[: len(vector)] = vector if passes else 0.0
        if len(vector):
            changed = numpy.logical_or.reduceat(vector != self._vector, self._starts)
            numbers[len(vector) : len(vector) + len(changed)] = changed
        numbers[self.count - len(counters) :] = counters
        return torch.from_numpy(numbers)

    def _read(self) -> list[torch.Tensor]:
        """Return the model's current buffers in the order of ``_all``: averaged buffers, counters, constant buffers."""
        return [place.read() for place in self._all]

    @torch.no_grad()
    def _flat(self, buffers: Sequence[torch.Tensor]) -> Vector:
        """Return the averaged buffers among ``buffers`` as one vector."""
        parts = [buffer.reshape(-1) for buffer in buffers[: len(self._averaged)]]
        parts = [part if part.dtype is self._dtype else part.to(self._dtype) for part in parts]
        vector: Vector = torch.cat(parts).cpu().numpy() if parts else numpy.empty(0)
        return vector

    def _read_counters(self, buffers: Sequence[torch.Tensor]) -> list[int]:
        begin = len(self._averaged)
        counters = list(buffers[begin : begin + len(self._counters)])
        if any(counter.dtype is not torch.int64 or counter.dim() for counter in counters):
            counters = [counter.reshape(()).long() for counter in counters]
        return torch.stack(counters).tolist() if counters else []

    @torch.no_grad()
    def become_mean(self, total: torch.Tensor) -> None:
        """Set all buffers to the values that the next step begins with.

        Args:
            total: the sum of the results of :meth:`numbers` over all shards.

        Raises:
            UserError: on every rank, if the average change of a counter per forward pass (for a bool, its whole change)
                differs between shards.
        """
        sums_of_values, changed, counters = total.split(
            [sum(self._sizes), len(self._averaged), _PER_COUNTER * len(self._counters) + 2]
        )
        *numbers, shards_with_passes, _ = counters.tolist()
        places = len(self._counters)
        changes, numerators, denominators, *squares = (numbers[i * places : (i + 1) * places] for i in range(_PER_COUNTER))
        for place, *sums in zip(self._counters, numerators, denominators, *squares, strict=True):
            # By Cauchy-Schwarz, the squared sum of n terms equals n times the sum of their squares only if all are equal.
            if any(each * each != square * shards_with_passes for each, square in zip(sums[:2], sums[2:], strict=True)):
                raise UserError(
                    f"buffer {place.name!r} is changed by unequal amounts in the forward passes of the shards: virtual "
                    "ranks have no common value for it; train without virtual ranks",
                    shared=True,
                )
        now = self._read()
        if not self._are_writable(now):
            self.restore()
            now = self._read()
        weight = 1.0 / max(shards_with_passes, 1.0)
        means = sums_of_values.mul(weight).split(self._sizes)
        values = list(self._initial)
        for number, (mean, changing) in enumerate(zip(means, changed.tolist(), strict=True)):  # averaged buffers come first
            if changing:  # the number of shards that changed this buffer
                values[number] = mean if values[number].dim() == 1 else mean.view(values[number].shape)
        copy_all(now, values)
        counters_now = now[len(self._averaged) :]
        rows = zip(counters_now, self._counts, changes, numerators, denominators, strict=False)
        for buffer, count, change, numerator, denominator in rows:
            if change or numerator:  # shard 0 may have had no passes
                buffer.fill_(count + round(change or numerator / denominator))


def _per_pass(change: int, passes: int) -> tuple[int, int]:
    """Return the average change in one of ``passes`` forward passes: numerator and denominator of a reduced fraction.

    Both are 0 without passes.
    """
    divisor = math.gcd(change, passes)
    return (change // divisor, passes // divisor) if passes else (0, 0)


def _is_writable(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether ``value`` can be copied into ``buffer``."""
    # Elements of an expanded tensor share memory, and cannot be written.
    dense = 0 not in buffer.stride() or buffer.numel() < 2
    return buffer.shape == value.shape and buffer.dtype == value.dtype and dense and not buffer.is_inference()


def _places(model: nn.Module) -> Sequence[_Place]:
    found, seen = [], set[int]()
    for path, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in seen:  # a buffer of several modules counts once, as in model.buffers()
                seen.add(id(buffer))
                found.append(_Place(f"{path}.{key}" if path else key, module, key))
    return found
