"""Virtual ranks: a job computes the results of a job of V ranks, whatever its own number of ranks is.

A global batch is split into V shards. Each rank owns consecutive shards and computes them one after another. Before each
shard, random generators are seeded from (seed, step, shard), and running statistics are reset to their values from before
the step. At the end of the step, the statistics that the shards have computed are averaged, in the same tree order as the
gradients, and the random generators are set to the same state on all ranks. Related work: EasyScale (Li et al., SC 2023),
VirtualFlow (Or et al., MLSys 2022).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from dualtrain.backends import Backend
from dualtrain.backends.sum_order import SumOrder, sum_order
from dualtrain.backends.wire import same_bits
from dualtrain.batchnorm import RankNorm, is_synchronized
from dualtrain.data.draws import derived
from dualtrain.data.sampler import part_of_rank
from dualtrain.data.seeding import seed_cpu
from dualtrain.errors import UserError
from dualtrain.functional import without_collectives
from dualtrain.trainer.common_buffers import CommonBuffers
from dualtrain.trainer.fixed_state import FixedState
from dualtrain.trainer.machine import warn_once
from dualtrain.trainer.objective import NAMES
from dualtrain.trainer.parts import Batches, Evaluation, ShardBatches, passes_of
from dualtrain.trainer.passes import Passes, Tensors
from dualtrain.trainer.rank_state import random_state, restore_random_state
from dualtrain.trainer.step import CONTROL_FLAGS, Step, known_length

log = logging.getLogger("dualtrain")
T = TypeVar("T")
#: The trainers with virtual ranks in this process, by backend.
_trainers: WeakKeyDictionary[Backend, WeakSet[VirtualRanks]] = WeakKeyDictionary()
#: Buffers for which a warning was given: a step of another trainer has changed them.
_changed_by_others: WeakSet[CommonBuffers] = WeakSet()


class VirtualRanks:
    """Division of a trainer's steps into shards; see :class:`~dualtrain.trainer.parts.Parts`.

    Args:
        shards: the number of shards, V.
        seed: the seed of all random numbers.
        model: the model. Its forward passes may change its buffers, but no other state.
        loss: the loss function, if it is a module. Its buffers must not change.
        backend: communicates with the other ranks.

    Raises:
        ValueError: ``shards`` is below 1; or the model has SyncBatchNorm layers, and either they were not made by
            ``synchronize_norms()`` or the number of ranks is not ``shards``.
    """

    def __init__(self, shards: int, seed: int, model: nn.Module, loss: nn.Module | None, backend: Backend) -> None:
        self.count = shards
        self.order = sum_order(shards, backend.size)
        self.mine = self.order.ranges[backend.rank]
        self._backend, self._seed = backend, seed
        self._steps = 0  # steps taken so far
        self._after = "step"  # the last operation: "step" or "evaluation", then " failed" for each failure since
        _order_norms(model, self.order, backend)
        self._buffers = CommonBuffers(model, shards)
        self._fixed = FixedState(model, loss)
        self.buffer_number_count = self._buffers.count
        _trainers.setdefault(backend, WeakSet()).add(self)
        if backend.size > shards and backend.rank == 0:
            idle = f"rank {shards} has" if backend.size == shards + 1 else f"ranks {shards} to {backend.size - 1} have"
            log.warning(
                "%s nothing to compute, since there are %d virtual ranks: start fewer ranks, or begin a run with more "
                "virtual ranks",
                idle,
                shards,
            )

    def split(self, batch: Tensors) -> list[Tensors | None]:
        """Return this rank's shards of ``batch``, a global batch equal on every rank; ``None`` for an empty shard."""
        numbers = torch.arange(len(batch[1]), device="cpu")
        parts = [part_of_rank(numbers, shard, self.count) for shard in self.mine]
        return [(batch[0][part], batch[1][part]) if len(part) else None for part in parts]

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self, passes: Passes, batches: Batches, expected: float, control_flags: Sequence[float]) -> Step:
        """See :class:`~dualtrain.trainer.parts.Parts`. ``batches``: one entry for each of this rank's shards, in order."""
        pairs, reducer = self._of_shards(batches), passes.optimizer.reducer
        flags = self._flags(control_flags)
        # This step's backward may also reach parameters of other trainers. These trainers must not exchange the gradients.
        with self._begun_step(), reducer.alone(), self._without_collectives():
            reducer.begin_shards()
            for shard, part in pairs:
                begins, ends = shard == self.mine[0], shard == self.mine[-1]
                if not begins:
                    self._buffers.restore()
                self._seed_all(self._steps, shard)
                passes.begin_part(flags if begins else (0.0,) * CONTROL_FLAGS, is_first=begins)
                self._compute(passes, shard, part, expected, send=ends)
                if not ends:
                    reducer.add_shard()
            step = passes.reduce()
            if passes.summed_numbers[-1]:  # a rank has found a change of fixed state
                self._fixed.refuse(self._backend)
            self._buffers.become_mean(passes.summed_numbers)
        return step

    def _of_shards(self, batches: Iterable[T]) -> list[tuple[int, T]]:
        """Pair this rank's shards with their batches. Raises ValueError if the counts differ."""
        given = list(batches)
        if len(given) != len(self.mine):
            shards = f"{len(given)} shard{'s' * (len(given) != 1)}"
            raise ValueError(f"this rank has shards {list(self.mine)}, but was given batches for {shards}")
        return list(zip(self.mine, given, strict=True))

    def _compute(self, passes: Passes, shard: int, batches: ShardBatches, expected: float, *, send: bool) -> None:
        number, mine = 0, _passes_of(batches)
        count = known_length(mine)
        for number, batch in enumerate(mine, 1):
            # ``_load`` reads the buffers before backward, since backward may run forward again (activation checkpointing).
            passes.compute(batch, expected, partial(self._load, passes, shard, number), send=send and number == count)
        if not number:
            self._load(passes, shard, number)

    def _load(self, passes: Passes, shard: int, number: int) -> None:
        changed = self._fixed.difference() is not None
        passes.load(self._buffers.numbers(shard, number, refused=changed))

    @contextmanager
    def _begun_step(self) -> Iterator[None]:
        """Record the state with which all shards begin; after the block, count one step, and seed the random generators.

        If the block fails, restore the buffers, seed the generators, and do not count the step. Otherwise, warn if it has
        changed the buffers that :meth:`_buffers_of_others` has copied.
        """
        self._buffers.keep()
        self._fixed.keep()
        others = self._buffers_of_others()
        with self._restored_after_failure(self._buffers):
            yield
        for buffers, before in others:
            _warn_of_changes(buffers, before)
        self._steps += 1
        self._seed_after("step")

    @contextmanager
    def _restored_after_failure(self, buffers: CommonBuffers) -> Iterator[None]:
        """If the block fails, restore ``buffers``, and seed the random generators."""
        try:
            yield
        except BaseException:
            buffers.restore()
            # The ranks may have stopped in different shards, so their generators may differ. Each further failure gives a
            # different seed, because the caller may draw random numbers after each failure.
            self._seed_after(f"{self._after} failed")
            raise

    def _buffers_of_others(self) -> list[tuple[CommonBuffers, dict[str, torch.Tensor]]]:
        """Return other trainers' buffers, with copies of those that this trainer's model does not contain.

        A step resets only the buffers of its own model before each shard, so a loss must not change other buffers. The
        list is empty except on rank 0 in steps 1, 2, 3, 5, 9, …, since copies take time. It is always empty with one shard.
        """
        if self._backend.rank or self._steps.bit_count() > 1 or self.count == 1:
            return []
        others = [each._buffers for each in _trainers[self._backend] if each is not self]
        own = set(map(id, self._buffers.tensors().values()))
        # An earlier model may have been moved to the meta device, to free its memory.
        return [
            (
                buffers,
                {name: one.clone() for name, one in buffers.tensors().items() if id(one) not in own and not one.is_meta},
            )
            for buffers in others
        ]

    def _without_collectives(self) -> AbstractContextManager[None]:
        """Refuse differentiable collectives in the block. With V ranks, allow them: they then combine all shards."""
        if self._backend.size == self.count:
            return nullcontext()
        return without_collectives(
            "the model or the loss calls a function of dualtrain.functional, whose result depends on the number of ranks: "
            f"with virtual_ranks={self.count}, start {self.count} ranks, not {self._backend.size}, or train without "
            "virtual_ranks"
        )

    def _seed_after(self, what: str) -> None:
        """Seed the generators for the user's code between steps, so that this code draws the same numbers on every rank."""
        self._after = what
        self._seed_all(self._steps, "after", what)

    def _seed_all(self, *keys: object) -> None:
        """Seed torch's generators (of the CPU and this rank's device), numpy's and Python's from the seed and ``keys``."""
        value = derived(self._seed, "shard", *keys)
        seed_cpu(value)
        if self._backend.device.type == "cuda":  # not torch.manual_seed, which also seeds the other ranks' GPUs
            with torch.cuda.device(self._backend.device):
                torch.cuda.manual_seed(value)

    def _flags(self, mine: Sequence[float]) -> Sequence[float]:
        """Return the control flags that this rank sends with its first shard.

        A rank without a shard cannot send its flags. If there are such ranks, this method is collective: it sums ``mine``
        over all ranks, and rank 0 sends the sum, while the other ranks send zeros.
        """
        if self._backend.size <= self.count:
            return mine
        values = torch.tensor(mine, dtype=torch.float64, device="cpu")
        total = self._backend.allreduce(values, "sum", name="control flags").tolist()
        return total if self._backend.rank == 0 else [0.0] * len(mine)

    # -- evaluation and state ---------------------------------------------------------------------------------------

    def evaluate(self, batches: Any, sums: Callable[[Evaluation], list[float]], model: nn.Module) -> list[float]:
        """See :class:`~dualtrain.trainer.parts.Parts`. ``batches``: one entry for each of this rank's shards, in order."""
        rows, buffers = [], CommonBuffers(model, self.count)  # to restore the present values after each shard
        pairs = self._of_shards(batches)
        with self._restored_after_failure(buffers), self._without_collectives():
            for shard, part in pairs:
                self._seed_all(self._steps, shard, "evaluation")
                rows.append(sums(part))
                buffers.restore()
        self._seed_after("evaluation")
        mine = torch.tensor(rows, dtype=torch.float64, device="cpu").view(-1, len(NAMES))
        return self.order.total(self._backend.allgather(mine, name="evaluation")).tolist()

    def equal_buffers(self) -> Mapping[str, torch.Tensor]:
        """See :class:`~dualtrain.trainer.parts.Parts`: all buffers."""
        return self._buffers.tensors()

    def warn_of_buffer(self, name: str) -> None:
        """See :class:`~dualtrain.trainer.parts.Parts`.

        Only rank 0 warns, and not after a warning that a step of another trainer changes buffers of this trainer's model.
        """
        if self._backend.rank == 0 and self._buffers not in _changed_by_others:
            warn_once(
                f"with virtual_ranks, buffer {name!r} differs between ranks, so the result may depend on the number of "
                "ranks: between steps, run forward passes in evaluation mode (model.eval()), or on every rank with the "
                "same inputs"
            )

    def common_buffers(self, model: nn.Module) -> AbstractContextManager[None]:
        """See :class:`~dualtrain.trainer.parts.Parts`. Does nothing: every step leaves equal buffers on all ranks."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """See :class:`~dualtrain.trainer.parts.Parts`. The state is equal on all ranks."""
        numbers = {"shards": self.count, "steps": self._steps, "seed": self._seed, "after": self._after}
        numbers["threads"] = torch.get_num_threads()
        # The program may have drawn numbers since the last seeding, and a resumed program must draw the numbers after them.
        drawn = self._backend.broadcast_object(random_state(self._backend.device), name="random generators")
        return {"virtual_ranks": {**numbers, "buffers": self._buffers.state_dict(), "random": drawn}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :class:`~dualtrain.trainer.parts.Parts`. The next steps give the same results at any world size.

        On the CPU, the bits of results depend on torch's number of threads. So a warning is logged if this number differs
        from the one in the saved state.
        """
        had = state["virtual_ranks"]["shards"] if "virtual_ranks" in state else None
        if had != self.count:
            raise UserError(
                f"the state is of a trainer with virtual_ranks={had}, not {self.count}: give virtual_ranks={had}"
            )
        own = state["virtual_ranks"]
        threads, saved = torch.get_num_threads(), own.get("threads")  # states of versions before 0.2.0 have no "threads"
        if saved not in (None, threads) and self._backend.device.type == "cpu":
            log.warning(
                f"the number of intra-op threads was {saved} when the state was saved, and is {threads} in this process: "
                f"call torch.set_num_threads({saved}) for the same bits"
            )
        self._steps, self._seed = int(own["steps"]), int(own["seed"])
        self._buffers.load_state_dict(own["buffers"])
        self._seed_after(str(own["after"]))
        if "random" in own:  # not in states of versions before 0.3.0
            restore_random_state(own["random"], self._backend.device)


def _warn_of_changes(buffers: CommonBuffers, copies: dict[str, torch.Tensor]) -> None:
    """Warn if a step of one trainer has changed the buffers of another trainer's model since their copies were made."""
    now = buffers.tensors()
    name = next((name for name, one in now.items() if name in copies and not same_bits(one, copies[name])), None)
    if name is not None:
        _changed_by_others.add(buffers)
        warn_once(
            f"with virtual_ranks, a trainer's step changes buffer {name!r} of another trainer's model, so the result "
            "depends on the number of ranks: give the trainer a module that contains both models, and its model as forward"
        )


def _passes_of(batches: ShardBatches) -> Iterable[Tensors]:
    """Return the batches of one shard, one for each backward pass. Raises TypeError for a tensor."""
    if isinstance(batches, torch.Tensor):
        raise TypeError(
            "an entry of the list given to step() is a tensor: give one entry for each of trainer.shards (trainer.split() "
            "returns such a list); an entry is a batch (inputs, targets), a list of batches, or None"
        )
    return passes_of(batches)


def _order_norms(model: nn.Module, order: SumOrder, backend: Backend) -> None:
    """Make SyncBatchNorm sum in ``order``. Raises ValueError for a layer that cannot do this."""
    for name, layer in model.named_modules():
        if not is_synchronized(layer):
            continue
        if not isinstance(layer, RankNorm) or backend.size != order.shards:
            raise ValueError(
                f"{name!r} needs the statistics of all shards at once: with virtual_ranks={order.shards}, make it with "
                f"synchronize_norms() and start {order.shards} ranks, not {backend.size}, or use plain BatchNorm"
            )
        layer.order = order
