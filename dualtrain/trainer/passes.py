"""The forward and backward passes of one step on this rank, and the scalars that are sent with their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch

from dualtrain.backends import Backend
from dualtrain.differences import ranks_in_words
from dualtrain.errors import DivergedError, UserError
from dualtrain.optimizer import DistributedOptimizer
from dualtrain.trainer.objective import Count, Sums, zero_of
from dualtrain.trainer.precision import Precision
from dualtrain.trainer.step import Step, StepScalars

Tensors = tuple[torch.Tensor, torch.Tensor]
Measure = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, Sums]]


def _checked_pair(batch: Any) -> Tensors:
    """Return ``batch`` as a tuple. Raises TypeError if it is not an iterable of two elements, (inputs, targets).

    A tensor is refused even if it has two rows, because the caller has probably passed one batch in place of a list of
    batches: in ``step((inputs, targets, weights))``, each of the three tensors counts as a batch.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Iterable) and not isinstance(batch, torch.Tensor | Mapping):
        parts = tuple(islice(batch, 3))
        if len(parts) == 2:
            return parts[0], parts[1]
    found = type(batch).__name__ + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
    raise TypeError(f"step() is given a {found} in place of a batch: a batch is a pair, (inputs, targets)")


class Passes:
    """Computation of the passes of a step.

    Args:
        measure: returns, for (inputs, targets), the differentiable mean loss and the sums of ``objective.NAMES``.
        optimizer: averages the gradients over ``parts`` parts of a step.
        precision: autocast for forward, and the scale of the loss.
        parts: how many parts a step has, over all ranks.
        sharded: whether the parts are shards of virtual ranks.
        piggyback: whether the scalars are sent with the gradients, in ``optimizer.extra``.
        count: returns the number of targets of a batch; ``None`` if ``measure`` returns the weight (see
            ``objective.NAMES``) in the unit of ``expected``.

    Attributes:
        targets_per_sample: with ``count``, the mean number of targets per sample in one batch. Without shards, that batch
            is the first one of the lowest rank whose first batch in a step has targets. With shards, it is the first one of
            the lowest rank that has batches. The number is equal on all ranks, and ``None`` until a step in which such a
            batch has targets. Sums are divided by it, so that ``expected`` can be a number of samples.
    """

    def __init__(
        self,
        measure: Measure,
        optimizer: DistributedOptimizer,
        precision: Precision,
        parts: int,
        *,
        piggyback: bool,
        sharded: bool,
        count: Count | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.backend: Backend = optimizer.backend
        self._measure, self._precision, self._parts, self._piggyback = measure, precision, parts, piggyback
        self._scalars = StepScalars()
        self._diverged = False  # whether this rank has computed, in this step, a loss that is not finite
        self._extra = optimizer.extra.numpy().data
        self._count, self._sharded = count, sharded
        self.targets_per_sample: float | None = None
        self._compared = False  # whether the ranks have compared ``targets_per_sample`` in this step

    def begin_part(self, control_flags: Sequence[float], *, is_first: bool = True) -> None:
        """Begin a part of a step with these control flags; ``is_first`` is true for this rank's first part."""
        self._diverged = self._diverged and not is_first
        self._compared = self._compared and not is_first  # a step that failed has not reset it
        self._scalars.reset(control_flags)

    def compute(self, batch: Tensors, expected: float, load: Callable[[], None], *, send: bool) -> None:
        """Compute one batch, forward and backward. With ``count``, the call may be collective: see :meth:`_in_samples`.

        Args:
            batch: an iterable of two elements: the model's inputs, and the loss's targets.
            expected: an estimate of the total weight of all batches of the step, over all ranks.
            load: called between forward and backward.
            send: true if this is known to be this rank's last batch: its backward then sends the gradients.

        Raises:
            TypeError: ``batch`` is not a pair.
            UserError: the loss has no gradient.
        """
        inputs, targets = _checked_pair(batch)
        forward, backward = self._precision.contexts()
        with nullcontext() if send else self._accumulating():
            with forward:
                loss, sums = self._measure(inputs, targets)
            found = list(map(float, sums))
            if not found[1] and not math.isfinite(loss.item()):  # 0 times its gradient would not be a number
                loss = zero_of((p for group in self.optimizer.param_groups for p in group["params"]), loss)
            if self._count is not None:
                found = self._in_samples(found, targets, self._count)
            self._scalars.add(found)
            self._diverged = self._diverged or self._scalars.diverged
            load()
            # The optimizer averages gradients over parts. Scale the loss, so that the result is the mean over all samples.
            share = found[1] * self._parts / expected
            if not loss.requires_grad:
                raise UserError(
                    "the loss has no gradient: compute it from outputs of trained parameters, without detach(), no_grad() "
                    "or integers"
                )
            with backward:
                self._precision.scaler.scale(loss if share == 1 else loss * share).backward()

    def _in_samples(self, sums: list[float], targets: torch.Tensor, count: Count) -> list[float]:
        """Divide the ``sums`` by :attr:`targets_per_sample`.

        While that number is ``None``, the call for a rank's first batch of a step is collective.
        """
        if self.targets_per_sample is None and not self._compared:
            mine = count(targets) / len(targets) if len(targets) else 0.0
            self._agree(mine if mine or self._sharded else -1.0)
        # If the ranks found no targets, the sums of this step are not divided, and the next step's first batches are used.
        unit = self.targets_per_sample or 1.0
        return [each / unit for each in sums]

    def _agree(self, mine: float) -> None:
        """Set :attr:`targets_per_sample` to ``mine`` of the first rank where it is not negative. Collective.

        On ranks without batches, ``mine`` is -1; without shards, also if the first batch has no targets. If the result is
        0, or if all ranks' numbers are -1, :attr:`targets_per_sample` stays ``None``.

        With shards, the first rank's first batch is the same at any world size, so the result is the same, too. That batch
        counts even if it has no targets: a rank cannot wait for a later batch, because backward may be collective.
        """
        row = torch.tensor([mine], dtype=torch.float64, device="cpu")
        counts = self.backend.allgather(row, name="targets per sample").tolist()
        self.targets_per_sample = next((each for each in counts if each >= 0), None) or None
        self._compared = True

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        """Inside the block, pause the gradient exchange of all optimizers: ranks may have unequal numbers of passes."""
        with self.optimizer.no_sync(), self.optimizer.reducer.alone():
            yield

    def load(self, numbers: torch.Tensor | None = None) -> None:
        """Write this part's scalars (with ``piggyback``), then the ``numbers``, into ``optimizer.extra``."""
        if self._piggyback:
            StepScalars.LAYOUT.pack_into(self._extra, 0, *self._scalars.values)
        if numbers is not None:
            self.optimizer.extra[StepScalars.COUNT :] = numbers

    @property
    def summed_numbers(self) -> torch.Tensor:
        """After :meth:`reduce`: the ``numbers`` given to :meth:`load`, summed over parts; float64, on the CPU."""
        return self.optimizer.extra[StepScalars.COUNT :]

    def reduce(self) -> Step:
        """Reduce the gradients that backward has not reduced; return the result over all ranks. Collective; blocks.

        Raises:
            DivergedError: on every rank, if a loss is infinite or not a number.
        """
        if self._count is not None and self.targets_per_sample is None and not self._compared:  # on a rank without batches
            self._agree(-1.0)
        self._compared = False
        # Backward has not reduced them if this rank's last part had no batches, or an unknown number of them.
        if not self.optimizer.reducer.is_reduced():
            self.optimizer.synchronize()
        step, diverged = StepScalars.result(self._totals())
        if diverged:
            raise DivergedError(self._divergence())
        return step

    def _totals(self) -> Sequence[float]:
        """Return the scalars' sums over all ranks. Call this after the gradients are reduced. Collective."""
        if self._piggyback:
            return StepScalars.LAYOUT.unpack_from(self._extra)
        mine = torch.tensor(self._scalars.values, dtype=torch.float64, device="cpu")
        return self.backend.allreduce(mine, "sum", name="metrics").tolist()

    def _divergence(self) -> str:
        """Name the ranks whose loss is not finite. Collective."""
        flags = self.backend.allgather_object(self._diverged, name="divergence")
        ranks = [rank for rank, diverged in zip(self.backend.members, flags, strict=True) if diverged]
        if len(ranks) == self.backend.size > 1:
            return "the loss became infinite or not a number on all ranks"
        return f"the loss became infinite or not a number on {ranks_in_words(ranks)}"
