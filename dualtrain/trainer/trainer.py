"""``Trainer``: one optimizer step over all ranks, and all state that the next step depends on.

``Trainer`` uses any ``Backend`` and a ``DistributedOptimizer``. The loop of the command line (``loop.py``) calls ``step``
for each batch; your own program can do the same, or pass a loader to ``fit``.
"""

from __future__ import annotations

import copy
import math
import warnings
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dualtrain.backends import Backend
from dualtrain.batchnorm import is_synchronized
from dualtrain.errors import RanksDifferError, UserError
from dualtrain.gradients import Transfer
from dualtrain.gradients.parameters import warn_of_ddp
from dualtrain.on_ranks import on_all_ranks, on_rank_zero
from dualtrain.optimizer import DistributedOptimizer
from dualtrain.run_folder import checkpoint
from dualtrain.state import broadcast_parameters, load_optimizer_state
from dualtrain.trainer.arguments import check_arguments, check_functions, check_options, check_schedule, stateful
from dualtrain.trainer.averaged_weights import check_parameters, copy_extra_state, match_buffers, parameters_of, wraps
from dualtrain.trainer.modes import evaluation_mode, training_mode
from dualtrain.trainer.objective import (
    NAMES,
    Adapted,
    CrossEntropy,
    Loss,
    Objective,
    added,
    counted_targets,
    metrics,
    training_metrics,
)
from dualtrain.trainer.optimizer_state import check_state
from dualtrain.trainer.parts import Batches, Evaluation, Parts, RankParts, passes_of
from dualtrain.trainer.passes import Passes, Tensors
from dualtrain.trainer.precision import DTYPES, Precision, check_range, ignore_order_warning
from dualtrain.trainer.rank_state import buffers_of, restore_buffers, trained_ranks
from dualtrain.trainer.same_run import compare_arguments, compare_trainer
from dualtrain.trainer.same_weights import compare_weights
from dualtrain.trainer.step import CONTROL_FLAGS, Step, StepScalars
from dualtrain.trainer.torch_losses import as_objective, count_of
from dualtrain.trainer.virtual_ranks import VirtualRanks


class Trainer:
    """A model in training on every rank of ``backend``.

    Construction is collective, and broadcasts rank 0's weights and buffers.

    Args:
        model: a model on the backend's device; ``optimizer`` has its parameters.
        optimizer: any torch optimizer of these parameters that needs no closure. A parameter that no rank uses in a step
            gets a gradient of zeros, as in Horovod, so weight decay and momentum change it.
        loss: cross entropy by default, or one of these:

            - a function ``loss(outputs, targets)``, which returns the mean over ``len(targets)`` samples (if ``targets``
              is a dict, the length of its first tensor counts or, if it has none, of its first list)
            - a loss of torch, which returns the mean over its targets; a sample may have any number of targets
            - an ``Objective``, which returns a pair: the mean loss, and four sums as numbers or detached tensors. The sums
              are the loss, its weight (the number of samples), the correct predictions, and the targets among the five
              likeliest classes. Each of the last two is -1 if predictions are not counted.
        backend: the ranks.
        schedule: a torch scheduler of ``optimizer``; it steps after each optimizer step, and in ``fit`` also after batches
            whose total weight is 0 (all targets are ignored).
        clip_norm: limit of the total norm of the averaged gradients; above it, the gradients are scaled down to this norm.
        amp: ``"off"``, ``"bf16"`` or ``"fp16"`` (with a GradScaler).
        ema: the decay of an exponential moving average of the weights; evaluations use this average.
        compress: the dtype in which gradients are sent: ``"none"``, ``"fp16"`` or ``"bf16"``.
        forward: computes the outputs in place of ``model``: the compiled model, an ``nn.DataParallel`` of it, or a function
            that calls ``model``.
        measure: called with (inputs, targets) in training, in place of ``forward`` and ``loss``. Returns the mean loss over
            ``len(targets)`` samples, or the pair that an ``Objective`` returns.
        virtual_ranks: how many shards a step is split into. The resulting model has the same bits on any number of ranks,
            over any backend and transport, if the kind of processor and torch's number of threads are the same. With
            several threads, or on a GPU, call ``torch.use_deterministic_algorithms(True)`` too: without it, some
            operations give different bits each time. With ``None``, a step has one part on each rank, and no shards.
        seed: with ``virtual_ranks``, the seed of all random numbers in forward passes. The generators of torch, numpy and
            Python are seeded before each shard, and after each step and evaluation; they are then equal on all ranks. If a
            program has several trainers, give each a different seed: with equal seeds, they draw the same numbers. A
            resume sets the generators too: of several trainers, the one that took the last step before the save must resume
            last.

    Raises:
        TypeError: ``model`` is not a module, ``optimizer`` is not an optimizer, ``backend`` is not what ``connect()``
            returns, ``schedule`` is not a scheduler, or ``loss``, ``forward`` or ``measure`` cannot be called.
        ValueError: in any of these cases:

            - ``virtual_ranks`` is not a whole number from 1 to 65536, or is given with ``compress`` or with a ``seed`` that
              is not a whole number
            - with ``virtual_ranks``, the model has SyncBatchNorm layers, and either they were not made by
              ``synchronize_norms()``, or the number of ranks is not ``virtual_ranks``
            - a parameter's gradient cannot be averaged
            - a parameter or buffer is on the meta device or, with several ranks, has elements that share memory
            - ``optimizer`` needs a closure
            - ``schedule`` is ReduceLROnPlateau, or the schedule of a different optimizer
            - ``clip_norm`` is not above 0, ``ema`` is not from 0 to 1, or ``amp`` or ``compress`` is not known
            - ``loss`` has parameters that ``optimizer`` trains and ``model`` does not have, or is a loss of torch with
              ``reduction="sum"`` or ``"none"``
        RanksDifferError: on every rank, if an argument's class, function or value, a library's version, the kind of device
            or, with ``virtual_ranks`` on the CPU, torch's number of threads is not the same on all ranks. The message names
            what differs, and each rank's value. The model's weights may differ: rank 0's are used.
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
        measure: Loss | Objective | None = None,
        virtual_ranks: int | None = None,
        seed: int = 0,
    ) -> None:
        check_arguments(model, optimizer, backend)
        check_schedule(schedule, optimizer)
        check_functions(forward=forward, measure=measure)
        check_options(clip_norm, ema, compress, virtual_ranks, seed)
        self._given_loss, self._loss = loss, stateful(loss, model, optimizer)
        warn_of_ddp(model)
        objects = {"loss": loss, "schedule": schedule, "forward": forward, "measure": measure}
        options = {"clip_norm": clip_norm, "amp": amp, "ema": ema, "compress": compress}
        # Matrix products on the CPU depend on the number of threads, so this number must be the same on all ranks.
        threads = torch.get_num_threads() if virtual_ranks is not None and backend.device.type == "cpu" else None
        options |= {"virtual_ranks": virtual_ranks, "seed": seed, "torch.get_num_threads()": threads}
        compare_trainer(backend, model, optimizer, objects, options)
        self.model = model
        self.backend = backend
        self.schedule = schedule
        self.clip_norm = clip_norm
        self.precision = Precision(amp, backend.device)
        self.objective = as_objective(loss)
        self._forward = model if forward is None else forward  # not ``or``: a compiled module may have no truth value
        broadcast_parameters(model, backend)
        self._parts: Parts = (
            RankParts(model, backend)
            if virtual_ranks is None
            else VirtualRanks(virtual_ranks, int(seed), model, self._loss, backend)
        )
        # The scalars are sent with the gradients, unless gradients are rounded to 16 bits.
        piggyback, self._sends_fp16 = compress == "none", compress == "fp16"
        self.optimizer = DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            backend=backend,
            extra=StepScalars.COUNT + self._parts.buffer_number_count if piggyback else 0,
            transfer=Transfer(dtype=None if piggyback else DTYPES[compress]),
            sum_order=self._parts.order,
        )
        run, objective = self._forward, self.objective  # not self, which would be in a reference cycle
        measured = (lambda inputs, targets: objective(run(inputs), targets)) if measure is None else Adapted(measure)
        count = count_of(objective) if measure is None else None
        self._passes = Passes(
            measured,
            self.optimizer,
            self.precision,
            self._parts.count,
            piggyback=piggyback,
            sharded=virtual_ranks is not None,
            count=count,
        )
        self._epochs = 0  # epochs that fit() has completed
        self._steps = 0  # steps since the construction, or since a state was loaded
        self._closed = False
        self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(ema)) if ema is not None else None

    @property
    def virtual_ranks(self) -> int | None:
        """Number of shards of a step; ``None`` for a trainer without virtual ranks."""
        return self._parts.count if isinstance(self._parts, VirtualRanks) else None

    @property
    def shards(self) -> Sequence[int]:
        """The indices of this rank's shards, for which :meth:`step` is given batches; empty without virtual ranks."""
        return self._parts.mine

    def close(self) -> None:
        """Stop averaging gradients, so that the model can be trained by other means. A second call does nothing."""
        self._closed = True
        self.optimizer.close()

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(
        self,
        batches: Batches,
        expected: float,
        control_flags: Sequence[float] = (0.0,) * CONTROL_FLAGS,
        *,
        news: Sequence[float] | None = None,
    ) -> Step:
        """Take one optimizer step on all ranks' ``batches``. Collective; blocks.

        The gradient is the gradient of the mean loss over all samples of all ranks, however unevenly they are split.
        If the total weight of all batches is 0 (all targets are ignored), the optimizer and the schedule do not step.

        Args:
            batches: this rank's batch (inputs, targets), or several batches (possibly none), one for each backward pass, on
                the backend's device. With virtual ranks, a list with one entry for each of :attr:`shards`: a batch, several
                batches, or ``None``. Gradients are sent during the last backward pass; with a generator of batches, only
                after it.
            expected: an estimate of the total weight over all ranks, the same on every rank: the number of samples or, with
                the default loss, the number of targets. If the real total differs, the gradients are rescaled.
            control_flags: ``CONTROL_FLAGS`` numbers that are summed over the ranks.
            news: deprecated name of ``control_flags``.

        Returns:
            The sums over all ranks; its attribute ``loss`` is the mean loss.

        Raises:
            TypeError: ``batches``, or one of its entries for :attr:`shards`, is a tensor; a batch is not a pair; or the
                loss returns neither a mean nor the pair of an ``Objective``.
            ValueError: in any of these cases:

                - ``expected`` is not a finite number above 0, or ``control_flags`` are not ``CONTROL_FLAGS`` numbers
                - the loss has no gradient
                - with ``ema``, the names or shapes of the model's parameters have changed
                - with virtual ranks, ``batches`` does not have one entry for each of :attr:`shards`
                - with virtual ranks, on every rank, forward has changed state that the shards of a step share (see
                  :class:`~dualtrain.trainer.fixed_state.FixedState`), or calls ``dualtrain.functional`` while the numbers
                  of ranks and shards differ
            DivergedError: on every rank, before the optimizer steps, if a loss is infinite or not a number, or if, with
                ``compress="fp16"``, gradients do not fit into fp16. (If ``amp`` is also ``"fp16"``, the GradScaler skips
                the step in the second case, and no error is raised.)
            RanksDifferError: on every rank, if weights, learning rates or ``expected`` differ between ranks. They are
                compared after steps 1, 2, 4, 8 and so on; weights and rates also after an epoch of :meth:`fit`, in an
                evaluation and before a save.
            BackendError: a rank failed, or the timeout passed.
        """
        try:
            usable = 0 < expected < math.inf and float(expected) > 0
        except (OverflowError, TypeError, RuntimeError):  # RuntimeError: a tensor of several elements
            usable = False
        if not usable:
            raise ValueError(
                f"expected={expected!r} is not a finite number above 0: give the number of samples on all ranks"
            )
        expected = float(expected)  # the ranks compare its repr, and those of 8 and 8.0 differ
        if news is not None:
            warnings.warn("Trainer.step(news=…) is deprecated: use control_flags", DeprecationWarning, stacklevel=2)
            control_flags = news
        try:
            flags = [*array("d", control_flags)]  # unlike float(), it refuses strings
        except (OverflowError, TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
            raise ValueError(
                f"control_flags={control_flags!r} does not consist of numbers: give {CONTROL_FLAGS}, such as zeros"
            ) from None
        if len(flags) != CONTROL_FLAGS:
            raise ValueError(f"control_flags has {len(flags)} numbers: give {CONTROL_FLAGS}, such as zeros")
        self.optimizer.zero_grad()
        step = self._parts.step(self._passes, batches, expected, flags)
        if step.totals[1] > 0:
            self._update(expected / step.totals[1])
        elif self.ema is not None:
            self._copy_buffers(self.ema.module)  # forward passes change buffers even if all targets are ignored
        self._steps += 1
        if self._steps.bit_count() == 1:  # after steps 1, 2, 4, 8, …: a comparison takes longer than a small step
            self._compare_weights(expected=expected)
        return step

    def _compare_weights(self, **values: float) -> None:
        """Check that weights, learning rates and ``values`` are equal on all ranks. Collective.

        If the trainer is closed, do not compare them. With virtual ranks, also warn if buffers differ.

        Raises:
            RanksDifferError: they differ.
            UserError: the model's parameters and the average's differ in names or shapes, also if the trainer is closed.
        """
        check = None if self.ema is None else partial(check_parameters, self.ema.module, self.model)
        if not self._closed:  # otherwise the model may be trained by other means
            groups, buffers = self.optimizer.param_groups, self._parts.equal_buffers()
            different = compare_weights(self.backend, self.model, groups, values, buffers, check)
            if different:
                self._parts.warn_of_buffer(different[0])
        elif check is not None:
            check()

    def _update(self, factor: float) -> None:
        """Multiply the gradients, which are the same on every rank, by ``factor``, and clip them.

        Then step the optimizer and the schedule, and update the average of weights. For DivergedError, see :meth:`step`.
        """
        scaler = self.precision.scaler
        scales = scaler.is_enabled()
        if factor != 1:
            for parameter in self._parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        if self._sends_fp16 and not scales:  # a scaler skips a step whose gradients are not finite, and lowers its scale
            check_range(self.optimizer.param_groups)
        if self.clip_norm is not None:
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self._parameters(), self.clip_norm)
        if scales:
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()
        self.advance_schedule(updated=not scales)
        if self.ema is not None:
            # A forward pass may have made buffers that ``ema`` lacks, and update_parameters() pairs the buffers of the two
            # models by position.
            match_buffers(self.ema.module, self.model)
            self.ema.update_parameters(self.model)
            copy_extra_state(self.ema.module, self.model)

    @torch.no_grad()
    def _copy_buffers(self, average: nn.Module) -> None:
        """Copy the model's buffers and extra state to its ``average``."""
        match_buffers(average, self.model)
        copy_extra_state(average, self.model)
        for copied, own in zip(average.buffers(), self.model.buffers(), strict=True):
            copied.copy_(own)

    def _parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all groups of the optimizer."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def advance_schedule(self, *, updated: bool = False) -> None:
        """Step the schedule, if there is one. Not collective: call it on every rank.

        :meth:`step` calls this, except if the total weight of all ranks' batches is 0 (all targets are ignored). If your
        schedule must advance after such a step too, call this yourself. ``updated`` is true if the optimizer has certainly
        stepped before.
        """
        if self.schedule is not None:
            # Filter warnings only if necessary: the filter can take longer than ``schedule.step()``.
            with nullcontext() if updated else ignore_order_warning():
                self.schedule.step()

    def split(self, batch: Tensors) -> list[Tensors | None]:
        """Split a global batch (inputs, targets), the same on every rank; return the batch of each of :attr:`shards`.

        Shards differ by one sample at most. A shard without samples gets ``None``. Besides tensors, objects that are
        indexed by sample numbers can be split, such as a TensorDict.

        Raises:
            TypeError: ``batch`` is not a pair, or has a tuple, list or dict in place of a tensor.
            ValueError: the trainer has no virtual ranks.
        """
        if not isinstance(self._parts, VirtualRanks):
            raise ValueError("only a trainer with virtual_ranks has shards: give virtual_ranks, or split the batch by rank")
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        if not pair or any(isinstance(part, tuple | list | dict) for part in batch):
            _check_pair(batch, "split other batches yourself, into one batch for each of trainer.shards")
        return self._parts.split(batch)

    # -- any loader -------------------------------------------------------------------------------------------------

    def fit(self, loader: Iterable[Sequence[torch.Tensor]], epochs: int = 1) -> list[dict[str, float]]:
        """Train on this rank's own ``loader`` of (inputs, targets) batches. Collective; blocks.

        Ranks may have different numbers of batches: a rank that has no batch left contributes nothing to later steps. If
        the loader's sampler or batch sampler, or the sampler in the batch sampler, has a method ``set_epoch``, each epoch
        begins with a call of it. The argument is the number of epochs that all calls of ``fit`` have completed, including
        those in the run whose state this trainer has restored. Modules in evaluation mode keep that mode if the model
        itself is in training mode.

        Returns:
            One dict for each epoch: the mean loss over all ranks' samples or targets and, if the loss counts correct
            predictions, the accuracy. An ``Objective`` may count them. Cross entropy of class indices counts them. For
            outputs of more than two dimensions, torch's own cross entropy losses count them only with class weights, or
            with an ``ignore_index`` other than -100. With class weights, loss and accuracy use these weights.
            Without samples, values are NaN.

        Raises:
            TypeError: a batch is not (inputs, targets).
            RanksDifferError: the ranks are given different ``epochs``, or different numbers of batches for a model with
                SyncBatchNorm.
            ValueError: the trainer has virtual ranks, ``epochs`` is not a whole number, or no rank's loader has batches in
                an epoch after one with batches.
            DivergedError, BackendError and further errors: see :meth:`step`.
        """
        if not isinstance(self._parts, RankParts):
            raise ValueError(
                "fit() is given each rank's own batches, which depend on the number of ranks: with virtual_ranks, call "
                "step() with the batches of trainer.shards (trainer.split() makes them of a global batch)"
            )
        compare_arguments(self.backend, "fit", {"epochs": epochs})
        try:
            epochs = index(epochs)  # converts tensors too
        except TypeError:
            raise ValueError(f"epochs={epochs!r} is not a whole number: give one") from None
        history: list[dict[str, float]] = []
        had_batches = False
        for _ in range(epochs):
            _set_epoch(loader, self._epochs)
            total, has_batches = self._epoch(loader)
            if had_batches and not has_batches:
                raise ValueError(
                    f"no rank's loader has batches in epoch {len(history) + 1} of this fit(): a generator can be read only "
                    "once, so give a loader that can be read again, or call fit() with a new one for each epoch"
                )
            had_batches = has_batches
            history.append(training_metrics(total, ""))
            self._compare_weights()
            self._epochs += 1
        return history

    def _epoch(self, loader: Iterable[Sequence[torch.Tensor]]) -> tuple[list[float], bool]:
        """Train on the loader once; return the sums of ``objective.NAMES``, and whether any rank had a batch."""
        training_mode(self.model)
        total, left, expected, has_batches = [0.0] * len(NAMES), _length(loader), 0.0, False
        norms = [layer for layer in self.model.modules() if is_synchronized(layer)]
        batches, ended, compare = iter(loader), False, True
        while True:
            # Don't read ahead: some loaders reuse the memory of a batch for the next one.
            mine = [] if ended else [self.to_device(batch) for batch in islice(batches, 1)]
            ended, left = not mine, left - 1
            # Layers that communicate in forward need a forward pass on every rank.
            synchronizes = any(layer.training for layer in norms)
            if compare or synchronizes:
                largest, some_end, all_end = self._compare_batches(mine)
                if all_end:
                    return total, has_batches
                if some_end and synchronizes:
                    raise RanksDifferError(
                        "the ranks have different numbers of batches, and SyncBatchNorm needs a batch of every rank in "
                        "every step: give every rank the same number (DistributedSampler does), or use plain BatchNorm"
                    )
                expected = expected or largest * self.backend.size  # an estimate
            if mine and not len(mine[0][1]) and not synchronizes:
                mine = []  # some models fail with an empty batch
            step = self.step(mine, expected or 1.0, [float(not ended and left > 0), float(bool(mine)), 0.0])
            if step.control_flags[1]:  # some ranks had a batch
                has_batches = True
                if not step.totals[1] > 0:  # all targets are ignored
                    self.advance_schedule()
            # The ranks need not compare batches before the next step if some rank expects another batch. A rank expects
            # one until it has read ``len(loader)`` batches, or until its loader ends.
            total, compare = added(total, step.totals), not (expected and step.control_flags[0])

    def _compare_batches(self, mine: list[Tensors]) -> tuple[float, bool, bool]:
        """Return (weight of the largest batch, whether any rank has no batch, whether all ranks have none). Collective."""
        # Cross entropy counts targets, such as tokens. Most other objectives count samples.
        count = counted_targets if isinstance(self.objective, CrossEntropy) else len
        weight = float(count(mine[0][1])) if mine else 0.0
        sizes = torch.tensor([weight, float(not mine), float(bool(mine))], device="cpu")
        largest, some_end, some_have = self.backend.allreduce(sizes, "max", name="batch size").tolist()
        return largest, some_end > 0, not some_have

    def to_device(self, batch: Sequence[torch.Tensor]) -> Tensors:
        """Copy ``batch`` to the backend's device. Raises TypeError if it is not (inputs, targets), or is one sample."""
        _check_pair(batch, "give a DataLoader whose collate_fn makes one")
        inputs, targets = batch
        if not targets.dim():
            raise TypeError("the targets of a batch have no dimension: give a DataLoader of the dataset, not the dataset")
        device = self.backend.device
        return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    # -- evaluation -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(
        self,
        batches: Evaluation | Sequence[Evaluation],
        objective: Objective | None = None,
        prefix: str = "val_",
    ) -> dict[str, float]:
        """Compute the mean loss and the accuracies over all ranks' ``batches``. Collective; blocks.

        Running statistics are averaged over the ranks for the evaluation, and restored after it.

        Args:
            batches: this rank's batches or, with virtual ranks, a list with one entry for each of :attr:`shards`, as for
                :meth:`step`.
            objective: by default, the trainer's ``loss``.
            prefix: the beginning of the names in the result.

        Returns:
            ``val_loss``, and for losses that count correct predictions (see :meth:`fit`) also ``val_accuracy`` and
            ``val_top5``; the same on every rank. Not a number if there are no samples.

        Raises:
            TypeError: a batch is not (inputs, targets).
            UserError: with ``ema``, the names or shapes of the model's parameters have changed.
            ValueError: with virtual ranks, ``batches`` does not have one entry for each of :attr:`shards`, or forward calls
                ``dualtrain.functional`` while the numbers of ranks and shards differ; or ``objective`` is a loss of torch
                with ``reduction="sum"`` or ``"none"``.
            RanksDifferError: on every rank, if the ranks' weights or learning rates differ.
            BackendError: the ranks' buffers differ in names or shapes, a rank failed, or the timeout passed.
        """
        self._compare_weights()
        model, forward = self.evaluated, self._forward
        averaged: AbstractContextManager[None] = nullcontext()
        if self.ema is not None and wraps(forward, self.model):
            forward = model
        elif self.ema is not None:  # a function of the user computes with the trained model, so put the average there
            model, averaged = self.model, parameters_of(self.model, model)
        modes = (model, forward, self._given_loss, objective)  # the objective may be a function that calls the loss
        objective = self.objective if objective is None else as_objective(objective)

        def sums(batches: Evaluation) -> list[float]:
            total = [0.0] * len(NAMES)
            for batch in passes_of(batches):
                inputs, targets = self.to_device(batch)
                if len(targets):
                    with self.precision.contexts()[0]:
                        total = added(total, map(float, objective(forward(inputs), targets)[1]))
            return total

        with averaged, self._parts.common_buffers(model), evaluation_mode(*modes):
            total = self._parts.evaluate(batches, sums, model)
        return metrics(total, prefix)

    def common_buffers(self) -> AbstractContextManager[None]:
        """Return a context in which :attr:`evaluated` has the average of all ranks' running statistics. Collective."""
        return self._parts.common_buffers(self.evaluated)

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated and saved: with ``ema``, the copy with averaged weights."""
        return self.model if self.ema is None else self.ema.module

    # -- saving -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on, as plain values and tensors. Collective.

        State that differs between ranks is included once for each rank: running statistics, the modules' extra state, the
        states of random generators, and the buffers of a ``loss`` that is a module of your own. With virtual ranks, only
        the loss's buffers may differ. All ranks return equal dicts, except that ``"model"`` and ``"ema"`` have the rank's
        own buffers and extra state.

        The weights and the optimizer's state are the tensors in use, as in a module's ``state_dict()``: the next step
        changes them. Make a deep copy of the state to keep it in memory.

        Raises:
            RanksDifferError, UserError, BackendError: see :meth:`evaluate`.
        """
        self._compare_weights()
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "schedule": _without_functions(self.schedule.state_dict()) if self.schedule is not None else None,
            "ema": dict(self.ema.state_dict()) if self.ema is not None else None,
            "epochs": self._epochs,
            "loss": self._loss_state(),
            "targets_per_sample": self._passes.targets_per_sample,
            **self._parts.state_dict(),
        }

    def _loss_state(self) -> list[dict[str, torch.Tensor]] | None:
        if self._loss is None:
            return None
        return self.backend.allgather_object(buffers_of(self._loss), name="state of the loss")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on any backend.

        With virtual ranks, the next steps are the same at any world size. Without them, a different world size seeds the
        random generators anew, and averages the running statistics. If this trainer averages the weights (``ema``) and the
        state has no average, the average begins with the loaded weights.

        Raises:
            TypeError: ``state`` is not a dict.
            UserError: the state is of a different number of virtual ranks, or has a schedule and this trainer has none, or
                vice versa.
            RuntimeError: the state is of a different model, or is of a trainer without ``amp="fp16"``, and this one has it.
            ValueError: an entry of the state is missing, or the optimizer's entry is malformed.
            ValueError, KeyError: the state is of a different optimizer.
        """
        if not isinstance(state, dict):
            raise TypeError(f"state is of type {type(state).__name__}: give what state_dict() has returned")
        of_parts = "virtual_ranks" if "virtual_ranks" in state else "ranks"
        missing = [name for name in ("model", "optimizer", "schedule", "scaler", "ema", of_parts) if name not in state]
        if missing:
            raise ValueError(f"the state has no {missing[0]!r}: give what state_dict() has returned")
        if (self.schedule is None) != (state["schedule"] is None):
            has, cure = ("no", "without") if state["schedule"] is None else ("a", "with a")
            raise UserError(f"the state has {has} schedule, unlike this trainer: make the trainer {cure} schedule")
        self.model.load_state_dict(state["model"])
        # An optimizer of torch uses the tensors that it loads, and its steps would change the caller's state.
        try:
            load_optimizer_state(self.optimizer, copy.deepcopy(state["optimizer"]))
            check_state(self.optimizer)
        except (AttributeError, IndexError, TypeError) as error:  # an entry is of a wrong type
            raise ValueError(
                f"the state's 'optimizer' cannot be loaded ({error}): give what state_dict() has returned"
            ) from error
        self.precision.scaler.load_state_dict(state["scaler"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        if self._loss is not None and state.get("loss") is not None:
            restore_buffers(self._loss, state["loss"], self.backend, trained_ranks(state.get("ranks", [])))
        self._steps = 0
        self._epochs = state.get("epochs", 0)  # not in states of versions before 0.3.0
        self._passes.targets_per_sample = state.get("targets_per_sample")  # not in states of versions before 0.3.0
        self._parts.load_state_dict(state)
        if self.ema is not None:
            if state["ema"] is None:  # the average begins with the loaded weights
                self.ema.module.load_state_dict(state["model"])
                self.ema.n_averaged.zero_()
            else:
                self.ema.load_state_dict(state["ema"])
            # As after each step, use this rank's own buffers, not those of the rank that made the state.
            self._copy_buffers(self.ema.module)

    def save(self, path: str | Path) -> None:
        """Write :meth:`state_dict` to one file, on rank 0. Collective.

        Raises:
            UserError: on every rank, if the file cannot be written.
            TypeError: on rank 0, if a file cannot hold a value in the state; the other ranks raise UserError.
            RanksDifferError, BackendError: see :meth:`evaluate`.
        """
        state = self.state_dict()
        on_rank_zero(self.backend, f"the state in {str(path)!r}", lambda: checkpoint.write(Path(path), state))

    def resume(self, path: str | Path) -> None:
        """Restore the state from a file of :meth:`save` or from a run's checkpoint, which every rank reads. Collective.

        Raises:
            UserError: the file is missing or damaged, or is of a different model or optimizer.
            RanksDifferError: the ranks' files differ, or only some ranks can read theirs.
        """
        # The name of a collective operation must not depend on the path, which may differ between hosts.
        state = on_all_ranks(self.backend, "state to resume", lambda: checkpoint.load(Path(path)))
        compare_arguments(self.backend, "resume", {"content of the file": checkpoint.generation_in(Path(path))[1]})
        with checkpoint.fitting(f"the state in {str(path)!r}"):
            self.load_state_dict(state.get("trainer", state))


def _check_pair(batch: Any, cure: str) -> None:
    """Raise TypeError, with the ``cure``, if ``batch`` is not a pair of tensors."""
    if isinstance(batch, Sequence) and len(batch) == 2 and all(isinstance(part, torch.Tensor) for part in batch):
        return
    found = type(batch).__name__
    if isinstance(batch, tuple | list) and batch:
        found += f" of {', '.join(type(part).__name__ for part in batch[:3])}"
    raise TypeError(f"a batch must be a pair of tensors, (inputs, targets), not {found}: {cure}")


def _set_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Call ``set_epoch`` of each of the loader's samplers once."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
    for sampler in {id(one): one for one in samplers}.values():
        set_epoch = getattr(sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def _length(loader: Iterable[Any]) -> float:
    """Return ``len(loader)``, the number of batches, or infinity if ``len`` raises."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except Exception:  # a loader's own __len__ may raise any error
        return math.inf


def _without_functions(state: dict[str, Any]) -> dict[str, Any]:
    """Return a scheduler's ``state`` without its functions: the resuming program makes them anew."""
    return {name: value for name, value in state.items() if not callable(value)}
