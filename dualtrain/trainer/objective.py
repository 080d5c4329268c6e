"""Objectives: a differentiable mean loss, and the sums from which metrics over all ranks are computed exactly.

Sums of any batches on any ranks can be added; means cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import eq
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional

from dualtrain.data.sources import IGNORED
from dualtrain.errors import UserError

#: The sums: the loss; its weight (the number of samples, or of tokens to predict); correct predictions; and targets that
#: are among the five likeliest classes. Only evaluations report this last sum. An objective that does not count predictions
#: gives a negative number, such as ``NOT_COUNTED``, in place of each of the last two sums.
NAMES = ("loss", "weight", "correct", "top5")
#: A sum that contains this number is negative, even if most of the added batches have correct predictions.
NOT_COUNTED = -1e18
_TINY = 128  # largest number of targets that are counted in Python

#: The sums of ``NAMES``: a tensor, (4,), or four floats, which need no conversion.
Sums = torch.Tensor | Sequence[float]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Count = Callable[[torch.Tensor], int]


class Objective(Protocol):
    """A loss that also returns the sums for metrics. Any callable with this signature is an objective."""

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        """Return the mean loss, a differentiable tensor of shape (), and the four sums of ``NAMES``."""


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the cross entropy of each target, and the sums over all of them.

    Args:
        logits: (…, classes), of any floating dtype; computed in float32 at least.
        targets: class indices, (…), int64; targets of -100 are left out.
        label_smoothing: the probability that is moved from the true class to all classes.

    Returns:
        The losses of the n targets, (n,), differentiable, and 0 where a target is left out. The sums of ``NAMES``, float64,
        (4,), on the logits' device. The function does not wait for the device.

    Raises:
        UserError: ``targets`` has several axes, one fewer than ``logits``, but their lengths differ from those of the
            axes of ``logits`` without the classes (axes of length 1 do not count).
    """
    logits, targets = _flatten(logits, targets)
    losses = functional.cross_entropy(
        logits, targets, reduction="none", ignore_index=IGNORED, label_smoothing=label_smoothing
    )
    with torch.no_grad():
        # In double precision, so that the sum hardly depends on how the samples are split into batches.
        total = losses.sum(dtype=torch.float64)
        # The five likeliest classes, or all if there are fewer. IGNORED is not a class, so it is never a hit.
        hits = logits.topk(min(5, logits.shape[1]), 1).indices == targets[:, None]
        counts = [torch.count_nonzero(each) for each in (targets != IGNORED, hits[:, 0], hits)]
        return losses, torch.stack([total, *counts])


def _flatten(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits (n, classes), in float32 at least, and targets (n,). Raises UserError if the axes do not fit."""
    if logits.dim() != 2 or targets.dim() != 1:
        if logits.dim() == targets.dim() + 1 and _long_axes(logits.shape[:-1]) != _long_axes(targets.shape):
            # The user may have exchanged two axes by mistake. Axes of length 1 do not matter.
            raise UserError(
                f"the outputs have the shape {tuple(logits.shape)}, and the targets {tuple(targets.shape)}: return one row "
                "of logits for each target, with the axes in the order of the targets"
            )
        logits, targets = logits.flatten(0, -2), targets.flatten()
    if targets.dtype == torch.uint8:  # torch accepts it for class indices, but -100 is 156 as uint8
        targets = targets.long()
    if logits.dtype != torch.float32:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits, targets if targets.device == logits.device else targets.to(logits.device)


def _long_axes(shape: torch.Size) -> list[int]:
    return [length for length in shape if length != 1]


def counted_targets(targets: torch.Tensor) -> int:
    """Return the number of targets that :class:`CrossEntropy` counts."""
    return int(torch.count_nonzero(targets != IGNORED))


def _counted(best: Any, targets: Any, count_nonzero: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Count the ``targets`` that are not ``IGNORED``, and those equal to ``best``. The arguments are tensors or arrays."""
    return count_nonzero(targets != IGNORED), count_nonzero(best == targets)


def _counted_on_cpu(logits: torch.Tensor, targets: torch.Tensor) -> tuple[int, int]:
    """Count as :func:`_counted` does, but faster: with NumPy for small arrays, and with Python for tiny ones."""
    best = logits.detach().numpy().argmax(1)
    if len(best) > _TINY:
        return _counted(best, targets.numpy(), np.count_nonzero)
    numbers = targets.tolist()
    return len(numbers) - numbers.count(IGNORED), sum(map(eq, best.tolist(), numbers))


class CrossEntropy:
    """Cross entropy of logits (…, classes) and class indices (…). Targets of -100 are left out."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        """See :class:`Objective`. In training (the outputs require a gradient), the fourth sum is not computed, and is 0.

        Training uses few operations, since their overhead dominates a tiny model's step.
        """
        training = outputs.requires_grad and torch.is_grad_enabled()
        if not training:
            # Sum in double precision, so that the sums of an evaluation hardly depend on the world size.
            sums = cross_entropy(outputs, targets, self.label_smoothing)[1].cpu()
            return sums[0] / max(sums[1].item(), 1.0), sums.tolist()
        logits, targets = _flatten(outputs, targets)
        loss = functional.cross_entropy(logits, targets, ignore_index=IGNORED, label_smoothing=self.label_smoothing)
        if loss.is_cpu:
            mean, (counted, correct) = loss.item(), _counted_on_cpu(logits, targets)
        else:
            counts = _counted(logits.argmax(1), targets, torch.count_nonzero)
            mean, counted, correct = torch.stack([loss.detach().double(), *counts]).tolist()  # waits for the device once
        if not counted:
            # All targets of a batch may be left out: the mean is then 0, not 0/0.
            loss, mean = logits.sum() * 0.0, 0.0
        return loss, [mean * counted, float(counted), float(correct), 0.0]


def samples_of(targets: Any) -> int:
    """Return ``len(targets)``. For a dict, whose length is its number of keys, use its first tensor that has an axis.

    Dicts in the dict are searched after its own values. Without such a tensor, use the first list or tuple; without that,
    the dict itself.

    Raises:
        TypeError: ``targets`` has no length.
    """
    sized = targets
    if isinstance(targets, Mapping):
        values = list(_values(targets))
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
        sized = [*tensors, *(value for value in values if isinstance(value, list | tuple)), targets][0]
    try:
        return len(sized)
    except TypeError:
        raise TypeError(
            f"the targets are of type {type(targets).__name__} and have no length, so their samples cannot be counted: "
            f"return the pair of the mean loss and the {len(NAMES)} sums {NAMES}"
        ) from None


def _values(targets: Mapping[Any, Any]) -> Iterator[Any]:
    """Iterate over the values of a dict, and then over those of dicts in it."""
    yield from (value for value in targets.values() if not isinstance(value, Mapping))
    for value in targets.values():
        if isinstance(value, Mapping):
            yield from _values(value)


class Adapted:
    """The caller's ``loss(outputs, targets)`` as an objective.

    The callable returns either a mean, or the pair that an :class:`Objective` returns. ``count(targets)`` is the number of
    terms in the mean, by default the number of samples.
    """

    def __init__(self, loss: Loss | Objective, count: Count = samples_of) -> None:
        self.loss, self.count = loss, count

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        """See :class:`Objective`. If the callable returns only a mean, correct predictions are not counted.

        A batch of weight 0 has no effect, even if its loss is 0/0.

        Raises:
            TypeError: the callable returns something else; or, in training, the mean in a pair is not a tensor with one
                element.
        """
        result: Any = self.loss(outputs, targets)
        if isinstance(result, tuple | list):
            try:
                fits = len(result) == 2 and len(result[1]) == len(NAMES)
            except TypeError:  # the second value has no length: it may be an accuracy
                fits = False
            if not fits:
                raise TypeError(
                    f"the loss returned {len(result)} values, but not the pair of the mean loss and the {len(NAMES)} sums "
                    f"{NAMES}: return the mean loss, or this pair"
                )
            if torch.is_grad_enabled():
                _check_mean(result[0], " as the mean loss")
            loss, sums = result[0], list(map(float, result[1]))
            return (loss, sums) if sums[1] else _without_weight(outputs, loss, sums)
        _check_mean(result)
        weight = float(self.count(targets))
        sums = [result.item() * weight, weight, NOT_COUNTED, NOT_COUNTED]
        return (result, sums) if weight else _without_weight(outputs, result, sums)


def _check_mean(loss: Any, role: str = "") -> None:
    """Raise TypeError if ``loss`` is not a tensor with one element. The message has ``role`` after the loss's type."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return
    got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    raise TypeError(f"the loss returned {got}{role}: return the mean over the samples, a tensor with one element")


def _without_weight(outputs: Any, loss: Any, sums: list[float]) -> tuple[Any, list[float]]:
    """Return the loss and the sums of a batch of weight 0. If the loss is not finite, replace both by 0.

    The new loss has a gradient of zeros for the outputs; the gradient of ``loss * 0.0`` could be NaN. If no output requires
    a gradient, only the sums are replaced.

    With gradients disabled, ``loss`` may be of any type, and is returned as it is. The sums are replaced if they are not
    finite.
    """
    training = torch.is_grad_enabled()
    if math.isfinite(loss.item() if training else sum(sums)):
        return loss, sums
    return zero_of(_tensors(outputs) if training else (), loss), [0.0] * len(NAMES)


def zero_of(tensors: Iterable[torch.Tensor], loss: Any) -> Any:
    """Return a loss whose gradient is 0 for those of ``tensors`` that require one; ``loss`` itself if there are none."""
    parts = [torch.real(each).sum().to(loss.device) * 0.0 for each in tensors if each.requires_grad]
    return sum(parts[1:], parts[0]) if parts else loss


def _tensors(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors among a model's outputs: a tensor, or a dict, list, tuple or dataclass of them."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        items: Iterable[Any] = outputs.values()
    elif is_dataclass(outputs):
        items = [getattr(outputs, field.name, None) for field in fields(outputs)]
    else:
        items = outputs if isinstance(outputs, list | tuple) else ()
    return [part for item in items for part in _tensors(item)]


def added(one: Iterable[float], other: Iterable[float]) -> list[float]:
    """Add two lists of sums. Raises ValueError if they are not equally long."""
    return [a + b for a, b in zip(one, other, strict=True)]


def metrics(sums: Sums, prefix: str) -> dict[str, float]:
    """Divide the ``sums`` of ``NAMES`` over all ranks by the weight; the results are NaN if the weight is 0.

    Sums that were not counted are left out, unless the weight is 0.
    """
    loss, weight, *counts = map(float, sums)
    whole = weight or math.nan
    found = {f"{prefix}loss": loss / whole}
    for name, count in zip(("accuracy", "top5"), counts, strict=True):
        if count >= 0 or weight <= 0:
            found[f"{prefix}{name}"] = count / whole
    return found


def training_metrics(sums: Sums, prefix: str) -> dict[str, float]:
    """Return :func:`metrics` without the metrics that only evaluations compute."""
    found = metrics(sums, prefix)
    found.pop(f"{prefix}top5", None)
    return found
