"""The parts of a step: one on each rank, or shards, of which a rank may compute several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, cast

import torch
from torch import nn

from dualtrain.backends import Backend
from dualtrain.backends.sum_order import SumOrder
from dualtrain.errors import UserError
from dualtrain.state import averaged_buffers
from dualtrain.trainer.passes import Passes, Tensors
from dualtrain.trainer.rank_state import local_state, restore_local_state, trained_ranks
from dualtrain.trainer.step import Step, known_length

#: The input of one shard: a batch, several batches (one backward pass each), or ``None`` for no samples.
ShardBatches = Tensors | Iterable[Tensors] | None
Batches = Iterable[Tensors] | Sequence[ShardBatches]
#: The input of an evaluation on one part. Batches of a loader may be lists.
Evaluation = Tensors | Iterable[Sequence[torch.Tensor]] | None


def passes_of(batches: ShardBatches | Evaluation) -> Iterable[Tensors]:
    """Return the batches of one part, one for each pass. The argument may also be one batch: a tuple or a list.

    A pair that contains a tensor is one batch, because the elements of a list of batches are not tensors. The other element
    of the pair may be a dict or a tuple of tensors.
    """
    if batches is None:
        return ()
    if isinstance(batches, tuple | list) and len(batches) == 2 and any(isinstance(part, torch.Tensor) for part in batches):
        return (cast("Tensors", tuple(batches)),)  # a loader's batch is a list
    return cast("Iterable[Tensors]", batches)


class Parts(Protocol):
    """Division of a trainer's steps into parts, and the state that the parts of the next step depend on.

    Each rank's batches are one part; with virtual ranks, each shard is one.

    Attributes:
        count: the number of parts of a step; the gradient is the mean of the parts' gradients.
        buffer_number_count: how many numbers, which describe changes of buffers, a part sends after its ``StepScalars``.
    """

    count: int
    buffer_number_count: int

    @property
    def mine(self) -> Sequence[int]:
        """The indices of this rank's shards; empty without virtual ranks."""

    @property
    def order(self) -> Literal["backend"] | SumOrder:
        """The order in which gradients are summed."""

    def step(self, passes: Passes, batches: Batches, expected: float, control_flags: Sequence[float]) -> Step:
        """Compute this rank's parts of a step, reduce the gradients, and return the result over all ranks. Collective."""

    def evaluate(self, batches: Any, sums: Callable[[Evaluation], list[float]], model: nn.Module) -> list[float]:
        """Return the sums of ``objective.NAMES`` over all ranks' ``batches``. Collective.

        ``sums`` evaluates ``model`` on the batches of one part, and returns their sums.
        """

    def equal_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the model's buffers that every step leaves equal on all ranks, by name."""

    def warn_of_buffer(self, name: str) -> None:
        """Warn that this one of :meth:`equal_buffers` differs between ranks."""

    def common_buffers(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the running statistics of ``model`` are equal on all ranks. Collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the parts, equal on every rank: plain values and tensors. Collective."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            UserError: the state belongs to a different division into parts.
        """


class RankParts:
    """One part of a step on each rank. Running statistics and random numbers differ between ranks."""

    buffer_number_count = 0
    order: Literal["backend"] = "backend"
    mine: Sequence[int] = ()

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        self.count = backend.size
        self._model, self._backend = model, backend
        self._trained = False  # whether this rank has computed a batch; see ``common_buffers``

    def step(self, passes: Passes, batches: Batches, expected: float, control_flags: Sequence[float]) -> Step:
        """See :class:`Parts`. ``batches`` are this rank's batches, one for each backward pass."""
        passes.begin_part(control_flags)
        if isinstance(batches, torch.Tensor):
            raise TypeError("step() is given a tensor: give batches (inputs, targets), one for each backward pass")
        number, mine = 0, passes_of(cast("ShardBatches", batches))
        count = known_length(mine)
        for number, batch in enumerate(mine, 1):
            passes.compute(batch, expected, passes.load, send=number == count)
            self._trained = True
        if not number:
            passes.load()  # a rank without samples
        return passes.reduce()

    def evaluate(self, batches: Any, sums: Callable[[Evaluation], list[float]], model: nn.Module) -> list[float]:
        """See :class:`Parts`. ``batches`` are this rank's batches."""
        mine = torch.tensor(sums(batches), dtype=torch.float64, device="cpu")
        return self._backend.allreduce(mine, "sum", name="evaluation").tolist()

    def equal_buffers(self) -> Mapping[str, torch.Tensor]:
        """See :class:`Parts`: none, since each rank has its own running statistics."""
        return {}

    def warn_of_buffer(self, name: str) -> None:
        """See :class:`Parts`: never called."""

    def common_buffers(self, model: nn.Module) -> AbstractContextManager[None]:
        """See :class:`Parts`: statistics are averaged over the ranks; at the end, each rank gets its own values back.

        Ranks that have not computed a batch at this world size are left out of the average, unless no rank has.
        """
        return averaged_buffers(model, self._backend, trained=self._trained)

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Parts`: running statistics and generators of every rank."""
        mine = {**local_state(self._model, self._backend.device), "trained": self._trained}
        return {"ranks": self._backend.allgather_object(mine, name="state of the ranks")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :class:`Parts`. At a different world size, generators are seeded anew."""
        if "virtual_ranks" in state:
            raise UserError(
                f"the state is of a trainer with virtual_ranks={state['virtual_ranks']['shards']}: make this trainer with "
                "the same number"
            )
        restore_local_state(self._model, state["ranks"], self._backend)
        # At a different world size, all ranks start from the average. A rank then counts as trained after its next batch.
        trained = trained_ranks(state["ranks"])
        self._trained = len(trained) == self._backend.size and trained[self._backend.rank]
