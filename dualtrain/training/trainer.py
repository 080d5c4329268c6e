"""``Trainer``: one optimizer step over all ranks, and all state that a model takes from one step to the next.

It knows a ``Backend`` and a ``DistributedOptimizer``, and never which backend it is on. ``loop.py`` gives it the batches of
the command line's run; a user's own program gives it any loader (``fit``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dualtrain.backends import Backend
from dualtrain.errors import DivergedError
from dualtrain.gradients import Transfer
from dualtrain.gradients.parameters import check_supported, warn_of_ddp
from dualtrain.optimizer import DistributedOptimizer
from dualtrain.state import averaged_buffers, broadcast_parameters
from dualtrain.training import checkpoint
from dualtrain.training.objective import NAMES, Loss, Objective, added, as_objective, metrics
from dualtrain.training.on_ranks import on_rank_zero
from dualtrain.training.precision import DTYPES, Precision
from dualtrain.training.rank_state import local_state, restore_local_state
from dualtrain.training.same_run import compare_arguments, compare_trainer
from dualtrain.training.step import CONTROL_FLAGS, Step, StepScalars, with_last
from dualtrain.training.virtual_ranks import ShardBatches, VirtualRanks, check_virtual_ranks, passes_of

Tensors = tuple[torch.Tensor, torch.Tensor]


class Trainer:
    """A model in training on every rank of ``backend``. Making one is collective; rank 0's weights are broadcast.

    Args:
        model: on the backend's device; its parameters stay the optimizer's.
        optimizer: any torch optimizer over them that needs no closure.
        loss: ``loss(outputs, targets)``, the mean over the samples, or an ``Objective``, which returns a pair of that and
            four sums; cross entropy by default.
        backend: the ranks.
        schedule: a torch scheduler of ``optimizer``; steps once an optimizer step.
        clip_norm: gradients are scaled down to this total norm, after the sum over ranks.
        amp: ``"off"``, ``"bf16"`` or ``"fp16"`` (with a GradScaler).
        ema: the decay of an exponential moving average of the weights, which is evaluated in their place.
        compress: the dtype in which gradients are sent: ``"none"``, ``"fp16"`` or ``"bf16"``.
        forward: computes the outputs, if not ``model`` itself: a compiled form of it, or replicas.
        measure: an ``Objective`` of (inputs, targets) in training, in place of ``loss`` of the outputs.
        virtual_ranks: how many shards a step has. The same model results on any number of ranks, over any backend and
            transport, bit for bit on one kind of processor with ``torch.get_num_threads()`` equal. ``None`` for one part of
            a step on each rank.
        seed: of all random numbers in forward passes, with ``virtual_ranks``: the generators of torch, numpy and Python are
            seeded from it before each shard.

    Attributes:
        shards: the numbers of this rank's shards; empty without ``virtual_ranks``.

    Raises:
        RanksDifferError: on every rank, where the ranks are given other classes, functions or settings; the model's weights
            may differ. Names what differs, and each rank's value.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss | Objective | None = None,
        *,
        backend: Backend,
        schedule: LRScheduler | None = None,
        clip_norm: float | None = None,
        amp: str = "off",
        ema: float | None = None,
        compress: str = "none",
        forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
        measure: Objective | None = None,
        virtual_ranks: int | None = None,
        seed: int = 0,
    ) -> None:
        for name, p in model.named_parameters():
            check_supported(name, p)
        warn_of_ddp(model)
        objects = {"loss": loss, "schedule": schedule, "forward": forward, "measure": measure}
        options = {"clip_norm": clip_norm, "amp": amp, "ema": ema, "compress": compress}
        options |= {"virtual_ranks": virtual_ranks, "seed": seed}
        compare_trainer(backend, model, optimizer, objects, options)
        if virtual_ranks is not None and compress != "none":
            raise ValueError("virtual_ranks and compress exclude each other: rounded partial sums depend on the ranks")
        self.model = model
        self.backend = backend
        self.schedule = schedule
        self.clip_norm = clip_norm
        self.precision = Precision(amp, backend.device)
        self.objective = as_objective(loss)
        self._forward = forward or model
        self._measure = measure or (lambda inputs, targets: self.objective(self._forward(inputs), targets))
        broadcast_parameters(model, backend)
        self._virtual = None if virtual_ranks is None else VirtualRanks(virtual_ranks, seed, model, backend)
        self.shards: Sequence[int] = () if self._virtual is None else self._virtual.mine
        #: How many parts a step has: what the gradient is the mean of.
        self._parts = virtual_ranks or backend.size
        # The scalars are sent with the gradients, but not where those are rounded to 16 bits.
        self._scalars = StepScalars()
        self._piggyback = compress == "none"
        self.optimizer = DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            backend=backend,
            extra=self._extra_count(),
            sum_order="backend" if self._virtual is None else self._virtual.order,
            transfer=Transfer(dtype=None if self._piggyback else DTYPES[compress]),
        )
        self._extra = self.optimizer.extra.numpy()
        self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(ema)) if ema is not None else None

    def close(self) -> None:
        """Stop averaging gradients, so that the model can be trained by other means. May be called again."""
        self.optimizer.close()

    def _extra_count(self) -> int:
        if self._virtual is not None:
            return StepScalars.COUNT + self._virtual.buffers.count
        return StepScalars.COUNT if self._piggyback else 0

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(
        self,
        batches: Iterable[Tensors] | Sequence[ShardBatches],
        expected: float,
        control_flags: Sequence[float] = (0.0,) * CONTROL_FLAGS,
        *,
        news: Sequence[float] | None = None,
    ) -> Step:
        """Take one optimizer step on all ranks' ``batches``. Collective; blocks.

        The gradient is that of the mean loss over all samples of all ranks, however unevenly they are split.

        Args:
            batches: this rank's part, one backward pass each, on the backend's device; may be empty. With virtual ranks,
                for each of :attr:`shards` a batch, several batches (one backward pass each), or ``None``.
            expected: the total weight on all ranks (the number of samples, say), the same on every rank. Where the real
                one differs, the gradients are rescaled to it.
            control_flags: ``CONTROL_FLAGS`` numbers that are summed over the ranks.
            news: deprecated name of ``control_flags``.

        Raises:
            DivergedError: on every rank, before the optimizer steps: a loss is infinite or not a number.
            BackendError: a rank failed, or the timeout passed.
        """
        if news is not None:
            warnings.warn("Trainer.step(news=…) is deprecated: use control_flags", DeprecationWarning, stacklevel=2)
            control_flags = news
        self.optimizer.zero_grad()
        if self._virtual is not None:
            return self._virtual_step(self._virtual, list(batches), expected, control_flags)
        self._scalars.reset(control_flags)
        last = False
        for (inputs, targets), last in with_last(cast("Iterable[Tensors]", batches)):
            self._pass(inputs, targets, expected, self._load_scalars if last else None, send=last)
        if not last:
            self._load_scalars()  # a rank without samples
        return self._update(self._reduced(), expected)

    def _virtual_step(
        self, virtual: VirtualRanks, batches: Sequence[ShardBatches], expected: float, control_flags: Sequence[float]
    ) -> Step:
        """Take one step on this rank's shards, which are computed one after another."""
        if len(batches) != len(self.shards):
            raise ValueError(f"this rank has shards {list(self.shards)}, and was given batches for {len(batches)} shards")
        reducer, flags = self.optimizer.reducer, virtual.flags(control_flags, self.backend)
        with virtual.step():
            reducer.prepare()
            for shard, given in zip(self.shards, batches, strict=True):
                virtual.begin_shard(shard)
                self._scalars.reset(flags if shard == self.shards[0] else (0.0,) * CONTROL_FLAGS)
                ends, passes = shard == self.shards[-1], 0
                for passes, ((inputs, targets), last) in enumerate(with_last(passes_of(given)), 1):
                    load = partial(self._load_shard, virtual, shard, passes) if last else None
                    self._pass(inputs, targets, expected, load, send=last and ends)
                if not passes:
                    self._load_shard(virtual, shard, passes)
                if not ends:
                    reducer.add_shard()
            step = self._reduced()
            virtual.buffers.become_mean(self.optimizer.extra[StepScalars.COUNT :], self._parts)
        return self._update(step, expected)

    def _pass(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        expected: float,
        load: Callable[[], None] | None,
        *,
        send: bool,
    ) -> None:
        """Compute one batch; call ``load`` between forward and backward, which sends the gradients if ``send``."""
        with nullcontext() if send else self.optimizer.no_sync():
            with self.precision.autocast():
                loss, sums = self._measure(inputs, targets)
            found = list(map(float, sums))
            self._scalars.add(found)
            if load is not None:
                load()
            # The parts' gradients are averaged; the mean over all samples weighs each batch by its own weight.
            share = found[1] * self._parts / expected
            self.precision.scaler.scale(loss if share == 1 else loss * share).backward()

    def _load_scalars(self) -> None:
        """Send the scalars with this step's gradients."""
        if self._piggyback:
            self._extra[: StepScalars.COUNT] = self._scalars.values

    def _load_shard(self, virtual: VirtualRanks, shard: int, passes: int) -> None:
        """Send the scalars of ``shard``, and what its ``passes`` forward passes have made of the buffers."""
        self._load_scalars()
        self.optimizer.extra[StepScalars.COUNT :] = virtual.buffers.numbers(shard, passes)

    def _reduced(self) -> Step:
        """Return the result over all ranks, once the gradients are reduced. Collective; blocks."""
        self.optimizer.synchronize()
        step, diverged = StepScalars.result(self._total_scalars())
        if diverged:
            raise DivergedError(self._divergence())
        return step

    def _total_scalars(self) -> list[float]:
        """Return the scalars' sums over all ranks, once the gradients are reduced. Collective."""
        if self._piggyback:
            total: list[float] = self._extra[: StepScalars.COUNT].tolist()
            return total
        mine = torch.tensor(self._scalars.values, dtype=torch.float64)
        return self.backend.allreduce(mine, "sum", name="metrics").tolist()

    def _update(self, step: Step, expected: float) -> Step:
        """Rescale the gradients, which are the same on every rank, to the real weight; clip them; step."""
        if not step.totals[1] > 0:
            return step
        factor, scaler, groups = expected / step.totals[1], self.precision.scaler, self.optimizer.param_groups
        if factor != 1:
            for gradient in [p.grad for group in groups for p in group["params"] if p.grad is not None]:
                gradient.mul_(factor)
        if self.clip_norm is not None:
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], self.clip_norm)
        scaler.step(self.optimizer)
        scaler.update()
        if self.schedule is not None:
            with self.precision.skipped_step_allowed():
                self.schedule.step()
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        return step

    def _divergence(self) -> str:
        """Name the ranks whose loss is not finite. Collective."""
        flags = self.backend.allgather_object(self._scalars.diverged, name="divergence")
        ranks = [str(rank) for rank, diverged in enumerate(flags) if diverged]
        if len(ranks) == self.backend.size > 1:
            return "the loss became infinite or not a number on all ranks"
        return f"the loss became infinite or not a number on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"

    def split(self, batch: Tensors) -> list[Tensors | None]:
        """Return the batch of each of :attr:`shards`: its part of a global batch (inputs, targets), which every rank has.

        Shards differ by one sample at most; those without samples get ``None``.

        Raises:
            ValueError: the trainer has no virtual ranks.
        """
        if self._virtual is None:
            raise ValueError("only a trainer with virtual_ranks has shards: give virtual_ranks, or split the batch by rank")
        return self._virtual.split(batch)

    # -- any loader -------------------------------------------------------------------------------------------------

    def fit(self, loader: Iterable[Sequence[torch.Tensor]], epochs: int = 1) -> list[dict[str, float]]:
        """Train on this rank's own ``loader`` of (inputs, targets) batches. Collective; blocks.

        Ranks may have different numbers of batches: those without any left contribute nothing to the remaining steps. A
        loader's ``sampler.set_epoch`` is called if it has one.

        Returns:
            One dict an epoch: the mean loss and, of classifiers, the accuracies, over all ranks' samples.

        Raises:
            RanksDifferError: the ranks are given other ``epochs``: one would wait for the others at its end.
        """
        if self._virtual is not None:
            raise ValueError(
                "fit() is given each rank's own batches, which depend on the number of ranks: with virtual_ranks, call "
                "step() with the batches of trainer.shards (trainer.split() makes them of a global batch)"
            )
        compare_arguments(self.backend, "fit", {"epochs": epochs})
        history = []
        for epoch in range(epochs):
            set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
            history.append(metrics(self._epoch(loader), ""))
        return history

    def _epoch(self, loader: Iterable[Sequence[torch.Tensor]]) -> list[float]:
        self.model.train()
        total, batches, expected = [0.0] * len(NAMES), with_last(loader), 0.0
        more = True
        while more:
            batch, last = next(batches, (None, True))
            if not expected:  # agreed on once: the largest first batch of any rank, times the ranks
                size = torch.tensor([0.0 if batch is None else float(len(batch[1]))])
                expected = self.backend.allreduce(size, "max", name="batch size").item() * self.backend.size
            mine = [] if batch is None else [self.to_device(batch)]
            step = self.step(mine, expected or 1.0, [float(not last), 0.0, 0.0])
            total = added(total, step.totals)
            more = step.control_flags[0] > 0
        return total

    def to_device(self, batch: Sequence[torch.Tensor]) -> Tensors:
        """Copy ``batch`` to the backend's device. Raises TypeError if it is not (inputs, targets)."""
        if not isinstance(batch, Sequence) or len(batch) != 2 or not all(isinstance(part, torch.Tensor) for part in batch):
            raise TypeError(
                f"a batch must be a pair of tensors, (inputs, targets), not {type(batch).__name__}: give the loader a "
                "collate_fn that makes one"
            )
        inputs, targets = batch
        device = self.backend.device
        return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    # -- evaluation -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(
        self,
        batches: Iterable[Sequence[torch.Tensor]] | Sequence[Iterable[Sequence[torch.Tensor]]],
        objective: Objective | None = None,
        prefix: str = "val_",
    ) -> dict[str, float]:
        """Compute the mean loss and the accuracies over all ranks' ``batches``. Collective; blocks.

        Running statistics are averaged over the ranks for the evaluation, and restored after it.

        Args:
            batches: this rank's; with virtual ranks, the batches of each of :attr:`shards`.
            objective: another one than in training.
            prefix: of the names in the result.
        """
        objective = self.objective if objective is None else as_objective(objective)
        with self.common_buffers():
            training = self.evaluated.training
            self.evaluated.eval()
            total = self._evaluation_sums(batches, objective)
            self.evaluated.train(training)
        return metrics(total, prefix)

    def _evaluation_sums(self, batches: Iterable[Any], objective: Objective) -> list[float]:
        """Return the sums of ``NAMES`` over all ranks. Collective."""
        virtual = self._virtual
        if virtual is None:
            sums = torch.tensor(self._sums(batches, objective), dtype=torch.float64)
            return self.backend.allreduce(sums, "sum", name="evaluation").tolist()
        rows = []
        for shard, part in zip(self.shards, batches, strict=True):
            virtual.seed(virtual.steps, shard, "evaluation")
            rows.append(self._sums(part, objective))
        mine = torch.tensor(rows, dtype=torch.float64).view(-1, len(NAMES))
        return virtual.sum_of_shards(self.backend.allgather(mine, name="evaluation")).tolist()

    def _sums(self, batches: Iterable[Sequence[torch.Tensor]], objective: Objective) -> list[float]:
        total = [0.0] * len(NAMES)
        forward = self._forward if self.ema is None else self.evaluated
        for batch in batches:
            inputs, targets = self.to_device(batch)
            if len(targets):
                with self.precision.autocast():
                    total = added(total, map(float, objective(forward(inputs), targets)[1]))
        return total

    def common_buffers(self) -> AbstractContextManager[None]:
        """Return a context in which running statistics are the average over the ranks. Collective."""
        return nullcontext() if self._virtual is not None else averaged_buffers(self.evaluated, self.backend)

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated and saved: the average of the weights, if there is one."""
        return self.model if self.ema is None else self.ema.module

    # -- saving -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on, as plain values and tensors, equal on every rank. Collective.

        State of single ranks (running statistics, random numbers) is included once for each rank; with virtual ranks there
        is none.
        """
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "schedule": _without_functions(self.schedule.state_dict()) if self.schedule is not None else None,
            "ema": dict(self.ema.state_dict()) if self.ema is not None else None,
            **self._state_of_parts(),
        }

    def _state_of_parts(self) -> dict[str, Any]:
        """Return what is in no ``state_dict`` of torch: of each rank, or with virtual ranks the same on all. Collective."""
        if self._virtual is not None:
            return {"virtual_ranks": self._virtual.state_dict()}
        mine = local_state(self.model, self.backend.device)
        return {"ranks": self.backend.allgather_object(mine, name="state of the ranks")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on any backend. At another world size, generators are seeded anew.

        With virtual ranks, the next steps are the same at any world size.

        Raises:
            UserError: the state is of another number of virtual ranks.
        """
        check_virtual_ranks(self._virtual, state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.precision.scaler.load_state_dict(state["scaler"])
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        if self._virtual is not None:
            self._virtual.load_state_dict(state["virtual_ranks"])
        else:
            restore_local_state(self.model, state["ranks"], self.backend)
        if self.ema is not None and state["ema"] is not None:
            self.ema.load_state_dict(state["ema"])
            # As after each step: this rank's own buffers, not those of the rank that wrote the file.
            for average, own in zip(self.ema.module.buffers(), self.model.buffers(), strict=True):
                average.copy_(own)

    def save(self, path: str | Path) -> None:
        """Write :meth:`state_dict` to one file, on rank 0. Collective. Raises UserError on every rank if it cannot."""
        state = self.state_dict()
        on_rank_zero(self.backend, f"the state in {str(path)!r}", lambda: checkpoint.write(Path(path), state))

    def resume(self, path: str | Path) -> None:
        """Restore the state of a file of :meth:`save`, or of a run's checkpoint, which every rank reads.

        Raises:
            UserError: the file is missing or damaged, or is of another model or optimizer.
        """
        state = checkpoint.load(Path(path))
        with checkpoint.fitting(f"the state in {str(path)!r}"):
            self.load_state_dict(state.get("trainer", state))


def _without_functions(state: dict[str, Any]) -> dict[str, Any]:
    """Drop the functions that some schedulers keep in their state: the resuming program has them too."""
    return {name: value for name, value in state.items() if not callable(value)}
