"""One optimizer step over all ranks, and everything that a model carries from one step to the next.

It knows a ``Backend`` and a ``DistributedOptimizer``, and never which backend it is on. The command line's run
(``run.py``) gives it the batches of a sampler, a user's own program those of any loader (``fit``).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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
from dualtrain.training.local_state import local_state, restore_local_state
from dualtrain.training.objective import NAMES, CrossEntropy, MeanLoss, Objective, OfTorch, added, metrics
from dualtrain.training.precision import DTYPES, Precision
from dualtrain.training.same_run import compare_arguments, compare_trainer
from dualtrain.training.together import on_root

T = TypeVar("T")
Tensors = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
NEWS = 3  # numbers of the caller's own that travel with a step


@dataclass(frozen=True)
class Step:
    """What a step came to, over all ranks: the sums of ``objective.NAMES``, and the caller's news."""

    totals: list[float]
    news: list[float]

    @property
    def sums(self) -> torch.Tensor:
        """The totals as a tensor, float64, (4,)."""
        return torch.tensor(self.totals, dtype=torch.float64)

    @property
    def loss(self) -> float:
        """The mean loss."""
        return metrics(self.totals, "")["loss"]


class Trainer:
    """A model in training on every rank of ``backend``. Making one is collective: rank 0's weights are taken.

    Args:
        model: on the backend's device; its parameters stay the optimizer's.
        optimizer: any torch optimizer over them, but those that need a closure.
        loss: ``loss(outputs, targets)``, the mean over the samples, or an ``Objective``; cross entropy by default.
        backend: the ranks.
        schedule: a torch scheduler of ``optimizer``; steps once an optimizer step.
        clip_norm: gradients are scaled down to this norm, of all together, after the ranks' sum.
        amp: ``"off"``, ``"bf16"`` or ``"fp16"`` (with a GradScaler).
        ema: the decay of an average of the weights, which is evaluated in their place.
        compress: what gradients travel as: ``"none"``, ``"fp16"`` or ``"bf16"``.
        forward: what computes the outputs, if not ``model`` itself: a compiled form of it, or replicas.
        measure: what computes the loss and its sums of (inputs, targets) in training, if not ``loss`` of the outputs.

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
    ) -> None:
        for name, p in model.named_parameters():
            check_supported(name, p)
        warn_of_ddp(model)
        objects = {"loss": loss, "schedule": schedule, "forward": forward, "measure": measure}
        options = {"clip_norm": clip_norm, "amp": amp, "ema": ema, "compress": compress}
        compare_trainer(backend, model, optimizer, objects, options)
        self.model = model
        self.backend = backend
        self.schedule = schedule
        self.clip_norm = clip_norm
        self.precision = Precision(amp, backend.device)
        self.objective = _objective(loss)
        self._forward = forward or model
        self._measure = measure or (lambda inputs, targets: self.objective(self._forward(inputs), targets))
        self._compressed = compress != "none"
        broadcast_parameters(model, backend)
        # The sums, the ranks whose loss is not finite, and the caller's news travel with the gradients; not where those
        # are rounded to 16 bits on their way.
        # A few numbers are added up faster outside of tensors, and to the same bits.
        self._numbers = [0.0] * (len(NAMES) + 1 + NEWS)
        self.optimizer = DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            backend=backend,
            extra=0 if self._compressed else len(self._numbers),
            transfer=Transfer(dtype=DTYPES[compress] if self._compressed else None),
        )
        self._extra = self.optimizer.extra.numpy()
        self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(ema)) if ema is not None else None

    def close(self) -> None:
        """Stops averaging gradients, so that the model can train on by other means. May be called again."""
        self.optimizer.close()

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self, batches: Iterable[Tensors], expected: float, news: Sequence[float] = (0.0,) * NEWS) -> Step:
        """One optimizer step on all ranks' ``batches`` together. Collective; blocks.

        The gradient is that of the mean loss over all that counts on all ranks, however unequal their shares.

        Args:
            batches: this rank's part, one backward pass each, on the backend's device; may be none.
            expected: how much counts on all ranks together (samples, say), the same on every rank. Where it turns out
                different, the gradients are scaled to what it was.
            news: ``NEWS`` numbers that are summed over the ranks.

        Raises:
            DivergedError: a loss is infinite or not a number; before the weights take it, on every rank.
            BackendError: a rank was lost, or the time ran out.
        """
        self.optimizer.zero_grad()
        self._numbers = [0.0] * (len(NAMES) + 1) + list(news)
        last = False
        for (inputs, targets), last in _with_last(batches):
            self._pass(inputs, targets, expected, last=last)
        if not last:
            self._load_numbers()  # a rank without samples
        self.optimizer.synchronize()
        total = self._total()
        sums, broken, news_of_all = total[: len(NAMES)], total[len(NAMES)], total[-NEWS:]
        if broken:
            raise DivergedError(self._who(self._numbers[len(NAMES)] > 0))
        if sums[1] > 0:
            self._take(expected / sums[1])
        return Step(sums, news_of_all)

    def _pass(self, inputs: torch.Tensor, targets: torch.Tensor, expected: float, *, last: bool) -> None:
        with nullcontext() if last else self.optimizer.no_sync():
            with self.precision.autocast():
                loss, sums = self._measure(inputs, targets)
            found = list(map(float, sums))
            self._numbers[: len(NAMES)] = added(self._numbers[: len(NAMES)], found)
            if not math.isfinite(sum(found)):
                self._numbers[len(NAMES)] = 1.0
            if last:
                self._load_numbers()
            # The ranks' gradients are averaged; the mean over all weighs each batch by what counts in it.
            share = found[1] * self.backend.size / expected
            self.precision.scaler.scale(loss if share == 1 else loss * share).backward()

    def _load_numbers(self) -> None:
        """Has the numbers travel with this step's gradients."""
        if not self._compressed:
            self._extra[:] = self._numbers

    def _total(self) -> list[float]:
        """The numbers' sums over all ranks, once the gradients are there. Collective."""
        if not self._compressed:
            total: list[float] = self._extra.tolist()
            return total
        mine = torch.tensor(self._numbers, dtype=torch.float64)
        return self.backend.allreduce(mine, "sum", name="metrics").tolist()

    def _take(self, factor: float) -> None:
        """Steps on the gradients, which are the same on every rank from here on."""
        scaler, groups = self.precision.scaler, self.optimizer.param_groups
        if factor != 1:
            for gradient in [p.grad for group in groups for p in group["params"] if p.grad is not None]:
                gradient.mul_(factor)
        if self.clip_norm is not None:
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], self.clip_norm)
        scaler.step(self.optimizer)
        scaler.update()
        if self.schedule is not None:
            # Only where it is needed: to catch warnings takes longer than many a step.
            with _order_unwatched() if scaler.is_enabled() else nullcontext():
                self.schedule.step()
        if self.ema is not None:
            self.ema.update_parameters(self.model)

    def _who(self, here: bool) -> str:
        bad = self.backend.allgather_object(here, name="divergence")
        ranks = [str(rank) for rank, at_fault in enumerate(bad) if at_fault]
        if len(ranks) == self.backend.size > 1:
            return "the loss became infinite or not a number on all ranks"
        return f"the loss became infinite or not a number on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"

    # -- any loader -------------------------------------------------------------------------------------------------

    def fit(self, loader: Iterable[Sequence[torch.Tensor]], epochs: int = 1) -> list[dict[str, float]]:
        """Trains on this rank's own ``loader`` of (inputs, targets) batches. Collective; blocks.

        Ranks may have different numbers of batches: those that have run out wait for the others. A loader's
        ``sampler.set_epoch`` is called if it has one.

        Returns:
            One dict an epoch: the mean loss and, of classifiers, the accuracies, over all ranks' samples.

        Raises:
            RanksDifferError: the ranks are given other ``epochs``: one would wait for the others at its end.
        """
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
        total, batches, expected = [0.0] * len(NAMES), _with_last(loader), 0.0
        more = True
        while more:
            batch, last = next(batches, (None, True))
            if not expected:  # what is agreed on once: the largest first batch on every rank
                size = torch.tensor([0.0 if batch is None else float(len(batch[1]))])
                expected = self.backend.allreduce(size, "max", name="batch size").item() * self.backend.size
            mine = [] if batch is None else [self.to_device(batch)]
            step = self.step(mine, expected or 1.0, [float(not last), 0.0, 0.0])
            total = added(total, step.totals)
            more = step.news[0] > 0
        return total

    def to_device(self, batch: Sequence[torch.Tensor]) -> Tensors:
        """``batch`` on the backend's device. Raises TypeError if it is not (inputs, targets)."""
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
        self, batches: Iterable[Sequence[torch.Tensor]], objective: Objective | None = None, prefix: str = "val_"
    ) -> dict[str, float]:
        """The mean loss and accuracies over all ranks' ``batches``. Collective; blocks.

        The ranks' running statistics are averaged for it, and put back.
        """
        model = self.evaluated
        forward = self._forward if self.ema is None else model
        objective = objective or self.objective
        total = [0.0] * len(NAMES)
        with averaged_buffers(model, self.backend):
            training = model.training
            model.eval()
            for batch in batches:
                inputs, targets = self.to_device(batch)
                if len(targets):
                    with self.precision.autocast():
                        total = added(total, map(float, objective(forward(inputs), targets)[1]))
            model.train(training)
        sums = torch.tensor(total, dtype=torch.float64)
        return metrics(self.backend.allreduce(sums, "sum", name="evaluation").tolist(), prefix)

    @property
    def evaluated(self) -> nn.Module:
        """The model that counts: the averaged one if there is an average of the weights."""
        return self.model if self.ema is None else self.ema.module

    # -- what is kept -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, as plain values and tensors. Collective, and the same on every rank.

        What ranks have of their own (running statistics, random numbers) is there once for each.
        """
        mine = local_state(self.model, self.backend.device)
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "schedule": _plain(self.schedule.state_dict()) if self.schedule is not None else None,
            "ema": dict(self.ema.state_dict()) if self.ema is not None else None,
            "ranks": self.backend.allgather_object(mine, name="state of the ranks"),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` gave, on any backend. At another world size, random numbers start anew."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.precision.scaler.load_state_dict(state["scaler"])
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        restore_local_state(self.model, state["ranks"], self.backend)
        if self.ema is not None and state["ema"] is not None:
            self.ema.load_state_dict(state["ema"])
            # As after each step: this rank's own, not those of the rank that wrote the file.
            for average, own in zip(self.ema.module.buffers(), self.model.buffers(), strict=True):
                average.copy_(own)

    def save(self, path: str | Path) -> None:
        """Writes :meth:`state_dict` to one file, on rank 0. Collective. Raises UserError on every rank if it cannot."""
        state = self.state_dict()
        on_root(self.backend, f"the state in {str(path)!r}", lambda: checkpoint.write(Path(path), state))

    def resume(self, path: str | Path) -> None:
        """Goes on from a file of :meth:`save`, or a run's checkpoint, which every rank reads.

        Raises:
            UserError: the file is missing or damaged, or is of another model or optimizer.
        """
        state = checkpoint.load(Path(path))
        with checkpoint.fitting(f"the state in {str(path)!r}"):
            self.load_state_dict(state.get("trainer", state))


def _objective(loss: Loss | Objective | None) -> Objective:
    if loss is None:
        return CrossEntropy()
    if isinstance(loss, nn.CrossEntropyLoss):
        return OfTorch(loss)
    return loss if isinstance(loss, CrossEntropy | MeanLoss | OfTorch) else MeanLoss(loss)  # type: ignore[arg-type]


@contextmanager
def _order_unwatched() -> Iterator[None]:
    """A first step that overflows is skipped, and torch takes that for a wrong order of calls."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        yield


def _with_last(batches: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each batch, and whether it is the last."""
    iterator = iter(batches)
    batch = next(iterator, None)
    while batch is not None:
        following = next(iterator, None)
        yield batch, following is None
        batch = following


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Without the functions that some schedulers keep in their state, which the same program has anyway."""
    return {name: value for name, value in state.items() if not callable(value)}
