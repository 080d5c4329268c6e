"""Optimizers by name, and the learning rate as a function of the step."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from dualtrain.config import ScheduleSection, StepSection
from dualtrain.config.fields import steps_in
from dualtrain.config.values import option_value, split_options
from dualtrain.errors import UserError

# The base class; LBFGS, which needs a closure; and SparseAdam, which needs sparse gradients.
_UNSUITABLE = {"optimizer", "lbfgs", "sparseadam"}


def optimizer_names() -> dict[str, Any]:
    """Return the optimizers of torch that a run can use, by lower-case name."""
    kinds = {name.lower(): kind for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    return {
        name: kind for name, kind in kinds.items() if issubclass(kind, torch.optim.Optimizer) and name not in _UNSUITABLE
    }


def make_optimizer(step: StepSection, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Make the optimizer that the settings ``step`` name, over the parameters that require gradients.

    Raises:
        UserError: the optimizer is unknown or does not accept its options, or the model has no parameters to train.
    """
    kinds = optimizer_names()
    kind = kinds.get(step.optimizer.lower())
    if kind is None:
        raise UserError(f"--optimizer {step.optimizer!r} is not known: choose one of {', '.join(sorted(kinds))}")
    known = {name: option.default for name, option in inspect.signature(kind).parameters.items() if name != "params"}
    options = _options(step, known)
    for name, value in (("momentum", step.momentum), ("weight_decay", step.weight_decay)):
        if name in known:
            options.setdefault(name, value)
        elif value:
            raise UserError(f"--{name.replace('_', '-')} {value:g}: {step.optimizer} has no such option; leave it out")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UserError("the model has no parameters to train: choose another --model, or leave out --freeze-backbone")
    try:
        optimizer: torch.optim.Optimizer = kind(parameters, lr=lr, **options)
        # torch refuses some options only in step(): capturable=true on a CPU, for example.
        twin = nn.Parameter(torch.zeros(2, 2, dtype=parameters[0].dtype, device=parameters[0].device))
        twin.grad = torch.zeros_like(twin)
        kind([twin], lr=lr, **options).step()
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"--optimizer {step.optimizer} refuses its options or the model's parameters ({error}): change the options, or "
            "choose another optimizer"
        ) from error
    return optimizer


def _options(step: StepSection, known: dict[str, Any]) -> dict[str, Any]:
    """Parse ``--optimizer-options``; ``known`` has the names and defaults of the optimizer's options.

    Raises UserError if an option is ``lr``, is not in ``known``, has two values, or has no usable value.
    """
    options: dict[str, Any] = {}
    for name, text in split_options(step.optimizer_options):
        if text is None:
            raise UserError(f"--optimizer-options must be name=value pairs as in nesterov=true, not {name!r}")
        part = f"{name}={text}"
        if name == "lr":
            raise UserError(f"--optimizer-options {part!r}: the learning rate has its own flag: give --lr")
        if name not in known:
            others = [other for other in known if other != "lr"]
            near = difflib.get_close_matches(name, others, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(others)}"
            raise UserError(f"--optimizer-options {part!r}: {step.optimizer} has no option {name!r}{hint}")
        if name in options:
            raise UserError(f"--optimizer-options {step.optimizer_options!r}: {name!r} has two values: give one")
        options[name] = option_value(text)
        if isinstance(options[name], str) and isinstance(known[name], bool | int | float | tuple):
            needed = (
                "numbers joined by colons, as in 0.9:0.999" if isinstance(known[name], tuple) else "a number, true or false"
            )
            raise UserError(f"--optimizer-options {part!r}: {text!r} is not a valid value; give {needed}")
    return options


def scaled_lr(schedule: ScheduleSection, step: StepSection, size: int) -> tuple[float, str]:
    """Return the learning rate for ``size`` ranks, real or virtual, and its computation in words.

    P. Goyal et al., Accurate, Large Minibatch SGD, 2017, propose the linear rule. A. Krizhevsky, One weird trick for
    parallelizing convolutional neural networks, 2014, proposes the square root.

    Raises:
        UserError: the rule needs a batch size that neither the settings nor the checkpoint have.
    """
    if schedule.lr_scale == "none":
        return schedule.lr, f"learning rate {schedule.lr:g}, not scaled"
    batch, reference = step.global_batch(size), schedule.lr_batch or step.batch_size
    if reference is None:  # only in a resumed run, since parse() refuses this in a new run
        raise UserError(
            f"--lr-scale {schedule.lr_scale} needs the batch size that --lr was chosen for, and the checkpoint has none: "
            "give --lr-batch or --batch-size",
            shared=True,
        )
    factor = batch / reference
    words = f"{batch}/{reference}"
    if schedule.lr_scale == "sqrt":
        factor, words = math.sqrt(factor), f"√({words})"
    lr = schedule.lr * factor
    return lr, f"learning rate {schedule.lr:g} × {words} = {lr:g} ({schedule.lr_scale})"


def make_schedule(section: ScheduleSection, optimizer: torch.optim.Optimizer, lr: float, total_steps: int) -> LambdaLR:
    """Make the schedule: a function of the step alone, so that a resumed run needs no other state.

    Raises:
        UserError: ``section.lr_min`` is above ``lr`` (cosine, polynomial), or ``section.lr_gamma`` is too large (step,
            multistep).
    """
    shape = _shape(section, max(total_steps - section.warmup_steps, 1), lr)
    warmup = section.warmup_steps

    def factor(step: int) -> float:
        return (step + 1) / (warmup + 1) if step < warmup else shape(step - warmup)

    return LambdaLR(optimizer, factor)


def restore_rates(schedule: LambdaLR) -> None:
    """Set the optimizer's learning rates to those of ``schedule`` at its current step.

    A loaded state has the learning rates of the saved schedule, and ``LambdaLR`` computes new ones only after a step.
    """
    groups = schedule.optimizer.param_groups
    for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = base * factor(schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in groups]


def _shape(section: ScheduleSection, steps: int, lr: float) -> Callable[[int], float]:
    """Return a function that takes a step, counted from the end of the warm-up, and returns the learning rate's factor.

    ``steps`` is the number of steps after the warm-up. Raises UserError: see :func:`make_schedule`.
    """
    floor = section.lr_min / lr
    if floor > 1 and section.name in ("cosine", "polynomial"):
        raise UserError(f"--lr-min {section.lr_min:g} is above the learning rate {lr:g}: lower it")
    drops = steps_in(section.lr_milestones)
    if section.name in ("step", "multistep"):
        changes = steps // (section.lr_step or steps) if section.name == "step" else sum(drop <= steps for drop in drops)
        _check_gamma(section.lr_gamma, changes, lr)
    shapes: dict[str, Callable[[float], float]] = {
        "constant": lambda step: 1.0,
        # I. Loshchilov, F. Hutter: SGDR: Stochastic Gradient Descent with Warm Restarts, 2017.
        "cosine": lambda step: floor + (1 - floor) * _half_cosine(step / steps),
        "polynomial": lambda step: floor + (1 - floor) * max(1 - step / steps, 0.0) ** section.lr_power,
        "step": lambda step: section.lr_gamma ** (step // (section.lr_step or steps)),
        "multistep": lambda step: section.lr_gamma ** sum(step >= drop for drop in drops),
        "one-cycle": lambda step: _one_cycle(step, steps),
    }
    return shapes[section.name]


def _check_gamma(gamma: float, changes: int, lr: float) -> None:
    """Raise UserError if the rate, multiplied ``changes`` times by ``gamma``, exceeds the range of float32.

    torch refuses such a rate.
    """
    largest = torch.finfo(torch.float32).max
    if math.log(lr) + changes * math.log(gamma) > math.log(largest):
        raise UserError(f"--lr-gamma {gamma:g} raises the learning rate above {largest:.2g}: lower it")


def _half_cosine(part: float) -> float:
    """Return a factor that falls along half a cosine: 1 at ``part`` 0, and 0 at ``part`` 1."""
    return 0.5 * (1 + math.cos(math.pi * min(part, 1.0)))


def _one_cycle(step: float, steps: int) -> float:
    """Return a factor that rises from 1/25 to 1 in the first 30 % of the steps, and then falls to 1/250,000.

    The values are the defaults of torch's OneCycleLR. L. Smith, N. Topin: Super-Convergence, 2018.
    """
    top, start, end = 0.3 * steps - 1, 1 / 25, 1 / 25e4
    if step < top:
        return start + (1 - start) * (1 - _half_cosine(step / top))
    return end + (1 - end) * _half_cosine((step - top) / max(steps - 1 - top, 1))
