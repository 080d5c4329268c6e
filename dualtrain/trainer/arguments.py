"""Check a trainer's arguments, before its ranks compare them."""

from __future__ import annotations

import inspect
import sys
from numbers import Integral, Real

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dualtrain.backends import Backend
from dualtrain.backends.collectives import check_backend
from dualtrain.gradients.parameters import check_module, check_optimizer, check_supported
from dualtrain.trainer.precision import DTYPES

_MOST_SHARDS = 65536  # planning the tree of a sum takes seconds with more shards


def check_arguments(model: nn.Module, optimizer: torch.optim.Optimizer, backend: Backend) -> None:
    """Raise TypeError or ValueError for an argument that a trainer cannot use."""
    check_backend(backend)
    check_module(model)
    check_optimizer(optimizer)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(optimizer).__name__} needs a closure, which it calls several times in a step, and the trainer computes "
            "one gradient in a step: choose another optimizer, or use DistributedOptimizer in your own loop"
        )
    for name, p in model.named_parameters():
        check_supported(name, p)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(f"the model's {name!r} is on the meta device, which holds no data: make it an ordinary tensor")


def check_options(clip_norm: float | None, ema: float | None, compress: str, virtual_ranks: int | None, seed: int) -> None:
    """Raise ValueError for an invalid option, or for options that exclude each other."""
    for name, value in (("clip_norm", clip_norm), ("ema", ema)):
        if value is not None and not _is_number(value):
            raise ValueError(f"{name}={value!r} is not a number: give one, or None")
        if isinstance(value, Integral) and value > sys.float_info.max:
            raise ValueError(f"{name} is too large for a float: give a smaller number, or None")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm={clip_norm!r} is not above 0: give the largest norm of the gradients, or None")
    if ema is not None and not 0 <= ema <= 1:
        raise ValueError(f"ema={ema!r} is not from 0 to 1: give the decay of the average, such as 0.999, or None")
    if compress not in ("none", *DTYPES):
        raise ValueError(f"compress={compress!r} is not known: choose none, fp16 or bf16")
    if virtual_ranks is not None and (isinstance(virtual_ranks, bool) or not isinstance(virtual_ranks, Integral)):
        raise ValueError(f"virtual_ranks={virtual_ranks!r} is not a whole number: give the number of shards, or None")
    if virtual_ranks is not None and virtual_ranks > _MOST_SHARDS:
        raise ValueError(f"virtual_ranks={virtual_ranks} is more than {_MOST_SHARDS}: give fewer shards")
    if virtual_ranks is not None and not isinstance(seed, Integral):
        raise ValueError(f"seed={seed!r} is not a whole number: give one")
    if virtual_ranks is not None and compress != "none":
        raise ValueError("virtual_ranks and compress exclude each other: rounded sums depend on the number of ranks")


def _is_number(value: object) -> bool:
    """Return whether ``value`` is a number or a tensor of one number. A bool is refused: a decay of ``True`` would be 1."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def check_functions(**functions: object) -> None:
    """Raise TypeError for an argument that cannot be called, or is an ``nn.Module`` class; None is accepted."""
    for name, function in functions.items():
        if isinstance(function, type) and issubclass(function, nn.Module):
            raise TypeError(f"{name} is the class {function.__name__}: give an instance of it, or a function")
        if function is not None and not callable(function):
            raise TypeError(f"{name} is {function!r}, which cannot be called: give a function")


def check_schedule(schedule: LRScheduler | None, optimizer: torch.optim.Optimizer) -> None:
    """Raise an error for an unusable schedule.

    Raises:
        TypeError: ``schedule`` is a class, or has no method ``step``.
        ValueError: ``schedule`` needs a metric, or was made for a different optimizer.
    """
    if schedule is not None and (isinstance(schedule, type) or not hasattr(schedule, "step")):
        raise TypeError(
            f"schedule is {schedule!r}, not a scheduler: give one that has the trainer's optimizer, such as "
            "CosineAnnealingLR(optimizer, steps)"
        )
    if isinstance(schedule, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau needs a metric in each step(): leave schedule out, and after trainer.evaluate() call "
            'the scheduler\'s step(values["val_loss"]) on every rank'
        )
    own = {id(group) for group in optimizer.param_groups}
    groups = getattr(getattr(schedule, "optimizer", None), "param_groups", optimizer.param_groups)
    if not any(id(group) in own for group in groups):
        raise ValueError("the schedule belongs to a different optimizer: make it with the trainer's optimizer")


def stateful(loss: object, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module | None:
    """Return ``loss`` if it is the user's own module and has buffers, which training may change; else ``None``.

    Raises:
        ValueError: the optimizer trains parameters of the loss that the model does not have.
    """
    if not isinstance(loss, nn.Module):
        return None
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]} - set(map(id, model.parameters()))
    own = [name for name, p in loss.named_parameters() if id(p) in trained]
    if own:
        raise ValueError(f"the loss has parameters to train ({', '.join(own[:3])}): make it a part of the model")
    plain = type(loss).__module__.startswith("torch.nn.")  # the buffers of torch's losses are options: class weights
    return None if plain or not any(True for _ in loss.buffers()) else loss
