"""Losses of torch as objectives. Each batch's loss gets a weight, so that averages over any batches and ranks are exact."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from dualtrain.data.sources import IGNORED
from dualtrain.errors import UserError
from dualtrain.trainer.objective import NAMES, NOT_COUNTED, Adapted, Count, CrossEntropy, Loss, Objective, Sums, samples_of


class TorchCrossEntropy:
    """``nn.CrossEntropyLoss`` or ``nn.NLLLoss``, as torch defines it.

    Counts correct predictions, except in the cases that :meth:`__call__` lists.

    ``compiled``, if given, is what ``torch.compile`` has made of the loss, and is called in its place.
    """

    def __init__(self, loss: nn.CrossEntropyLoss | nn.NLLLoss, compiled: Callable[..., Any] | None = None) -> None:
        self._loss = loss
        self._compute: Callable[..., Any] = loss if compiled is None else compiled
        self._loss_only = Adapted(self._compute, self.count)
        self._weighted = loss.weight is not None or loss.ignore_index != IGNORED
        plain = not self._weighted and compiled is None
        self._default_loss = CrossEntropy(loss.label_smoothing) if isinstance(loss, nn.CrossEntropyLoss) and plain else None

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        """See :class:`Objective`. A target has weight 1, or the weight of its class; the accuracy uses these weights too.

        Ignored targets have weight 0. A batch with only targets of weight 0 has loss 0 and weight 0, even if label
        smoothing gives it a loss.

        If the targets are class probabilities, or if the outputs have no batch dimension, each target has weight 1, and
        correct predictions are not counted. For outputs of more than two dimensions, correct predictions are counted only
        if the loss has ``weight``, or an ``ignore_index`` other than -100.
        """
        if targets.is_floating_point() or outputs.dim() < 2:
            return self._loss_only(outputs, targets)
        if targets.dtype != torch.int64:  # torch accepts uint8 too, which cannot select class weights
            targets = targets.long()
        if outputs.dim() > 2 and not self._weighted:
            return self._of_kept_targets(outputs, targets)
        if self._default_loss is not None:
            return self._default_loss(outputs, targets)
        loss: torch.Tensor = self._compute(outputs, targets)
        with torch.no_grad():
            kept = targets != self._loss.ignore_index
            weights = kept.double()
            if self._loss.weight is not None:
                weights = weights * self._loss.weight.double()[targets.where(kept, 0)]
            best = outputs.topk(min(5, outputs.shape[1]), 1).indices == targets[:, None]
            total = weights.sum()
            sums = torch.stack([total, (weights * best[:, 0]).sum(), (weights * best.any(1)).sum()]).tolist()
        if not sums[0]:  # torch's mean is then 0/0
            return outputs.sum() * 0.0, [0.0] * len(NAMES)
        return loss, [loss.item() * sums[0], *sums]

    def _of_kept_targets(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        loss: torch.Tensor = self._compute(outputs, targets)
        counted = torch.count_nonzero(targets != IGNORED)
        mean, kept = torch.stack([loss.detach().double(), counted]).tolist()  # waits for the device once
        if not kept:  # torch's mean is then 0/0
            return outputs.sum() * 0.0, [0.0] * len(NAMES)
        return loss, [mean * kept, kept, NOT_COUNTED, NOT_COUNTED]

    @staticmethod
    def count(targets: torch.Tensor) -> int:
        """Return the number of targets, ignored or not. In a batch of class probabilities, each distribution is one."""
        rows = targets.is_floating_point() and targets.dim() > 1
        return targets.numel() // (targets.shape[1] if rows else 1)


#: Loss functions of torch, and the modules that take the same options.
_MODULES = {functional.cross_entropy: nn.CrossEntropyLoss, functional.nll_loss: nn.NLLLoss}
#: Losses of torch that are means over all elements.
_OF_ELEMENTS = (
    *(functional.mse_loss, nn.MSELoss.forward, functional.l1_loss, nn.L1Loss.forward),
    *(functional.smooth_l1_loss, nn.SmoothL1Loss.forward, functional.huber_loss, nn.HuberLoss.forward),
    *(functional.binary_cross_entropy, nn.BCELoss.forward),
    *(functional.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss.forward),
    *(functional.kl_div, nn.KLDivLoss.forward, functional.poisson_nll_loss, nn.PoissonNLLLoss.forward),
    *(functional.soft_margin_loss, nn.SoftMarginLoss.forward),
    *(functional.multilabel_soft_margin_loss, nn.MultiLabelSoftMarginLoss.forward),
    *(functional.hinge_embedding_loss, nn.HingeEmbeddingLoss.forward),
)


def _uncompiled(loss: Any) -> Any:
    """Return the loss from which ``torch.compile`` has made ``loss``; ``loss`` itself if it is not compiled.

    In a ``functools.partial``, replace a compiled function by the original one.
    """
    if isinstance(loss, nn.Module):
        return getattr(loss, "_orig_mod", loss)  # a private name, the same in torch 2.5 to 2.15
    # torch.compile puts one or two functions of its own around the given one. A function's globals may lack __name__.
    while isinstance(loss, types.FunctionType) and str(loss.__globals__.get("__name__")).startswith("torch._dynamo."):
        loss = vars(loss)["__wrapped__"]
    if isinstance(loss, partial):
        function = _uncompiled(loss.func)
        return loss if function is loss.func else partial(function, *loss.args, **loss.keywords)
    return loss


def _as_module(loss: Loss | Objective) -> Loss | Objective:
    """Return the ``nn.Module`` for a function in ``_MODULES``, also with options in a ``partial``; else ``loss``."""
    function, options = (loss.func, loss.keywords) if isinstance(loss, partial) and not loss.args else (loss, {})
    module_class = _MODULES.get(function) if isinstance(function, types.FunctionType) else None
    return module_class(**options) if module_class is not None else loss


def _reduction(loss: Loss | Objective) -> object:
    """Return the option ``reduction`` of a loss of torch: of a module, or of a function in ``functools.partial``.

    Return ``None`` for a function without this option, and for other losses.
    """
    if isinstance(loss, partial):
        return loss.keywords.get("reduction") if getattr(loss.func, "__module__", "") == functional.__name__ else None
    forward = getattr(type(loss), "forward", None)
    of_torch = getattr(forward, "__module__", "") == nn.CrossEntropyLoss.__module__
    return getattr(loss, "reduction", None) if of_torch else None


def _is_mean_over_elements(loss: Loss | Objective) -> bool:
    """Return whether ``loss`` is a loss of torch that averages over all elements of the outputs and targets."""
    called = loss.func if isinstance(loss, partial) else getattr(type(loss), "forward", loss)
    return any(called is each for each in _OF_ELEMENTS) and _reduction(loss) in (None, "mean")  # not "batchmean"


def count_of(objective: Objective) -> Count | None:
    """Return the function that counts the targets over which a loss of torch averages; ``None`` for other objectives."""
    count = objective.count if isinstance(objective, Adapted | TorchCrossEntropy) else samples_of
    return None if count is samples_of else count


def _check_loss(loss: object) -> None:
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise TypeError(f"the loss is the class {loss.__name__}: give an instance of it, such as {loss.__name__}()")
    if not callable(loss):
        raise TypeError(f"the loss is {loss!r}, which cannot be called: give a function of (outputs, targets)")


def as_objective(loss: Loss | Objective | None) -> Objective:
    """Return ``loss`` as an objective; ``None`` is cross entropy.

    Raises:
        TypeError: ``loss`` cannot be called, or is an ``nn.Module`` class.
        UserError: a loss of torch has ``reduction="sum"`` or ``"none"``.
    """
    if loss is None:
        return CrossEntropy()
    _check_loss(loss)
    if isinstance(loss, CrossEntropy):
        return loss
    original = _uncompiled(loss)
    known, compiled = _as_module(original), None if original is loss else loss
    reduction = _reduction(known)
    if reduction in ("sum", "none"):
        raise UserError(
            f"the loss has reduction={reduction!r}, but the trainer averages the losses of the ranks, and needs means, so "
            'that steps do not depend on the number of ranks: use reduction="mean", and adapt the learning rate'
        )
    # A user's subclass may compute a different loss (a focal loss, for example).
    if isinstance(known, nn.CrossEntropyLoss | nn.NLLLoss) and type(known).forward.__module__ == nn.NLLLoss.__module__:
        return TorchCrossEntropy(known, compiled)
    return Adapted(loss, torch.numel if _is_mean_over_elements(known) else samples_of)
