"""Steps of a wrapped optimizer: the losses that closures return, and steps that bypass the wrapper."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from numbers import Real
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from dualtrain.backends.compilation import not_compiled
from dualtrain.errors import BackendError


class Wrapper(Protocol):
    """The part of a wrapper that this module uses."""

    @property
    def may_step(self) -> bool:
        """Return whether the wrapped optimizer may step now: the wrapper runs this step, or there is one rank."""

    def has_local_gradients(self) -> bool:
        """Return whether gradients on this rank are not combined with those of the other ranks."""

    def count_own_step(self) -> None:
        """Count a step that the wrapped optimizer has taken itself, if the ranks compare their numbers of steps."""

    def average_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Average ``values`` over the ranks. Collective; blocks."""


def check_own_steps(optimizer: torch.optim.Optimizer, wrapper: Wrapper) -> None:
    """Check the steps that ``optimizer`` takes itself, as long as ``wrapper`` exists.

    Such a step happens if a method of the optimizer's class calls ``self.step()``, or if other code calls ``step()`` of
    ``optimizer`` and not of the wrapper. It also happens if a method, as ``second_step()`` of SAM, calls ``step()`` of an
    optimizer that ``optimizer`` keeps in an attribute. The step raises RuntimeError if gradients are not combined over the
    ranks. The losses of the step's closure are averaged, as in the wrapper's step. The wrapper counts each step that has a
    closure or gradients, unless it is part of another step.
    """

    @not_compiled
    def pre_hook(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        living = ref()
        if living is None or living.may_step:
            running.clear()  # an earlier step may have failed
            return None
        has_closure = any(map(callable, (*args[1:], *options.values())))
        optimizer_class = type(args[0])
        if not has_closure:  # a closure makes new gradients
            _refuse_local_gradients(optimizer_class, living)
        checked = [_checked(each, optimizer_class, living) for each in args[1:]]
        running.append(has_closure or _has_gradients(args[0]))
        return (args[0], *checked), {name: _checked(each, optimizer_class, living) for name, each in options.items()}

    def remove_hooks(_: Any) -> None:
        for handle in handles:
            handle.remove()

    def post_hook(*_: Any) -> None:
        if running:
            counts, living = running.pop(), ref()
            if counts and not running and living is not None:
                living.count_own_step()

    #: For each running step, whether it counts. A step that calls super().step() may run the hooks twice.
    running: list[bool] = []
    handles: list[RemovableHandle] = []
    for each in _with_kept(optimizer):
        if _takes_step_hooks(each):
            handles += each.register_step_pre_hook(pre_hook), each.register_step_post_hook(post_hook)
    ref = weakref.ref(wrapper, remove_hooks)


def _with_kept(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return ``optimizer``, and the optimizers of its parameters that it keeps in attributes, or in lists or dicts there.

    Other wrappers are left out: they combine gradients themselves.
    """
    found, params = [optimizer], _params(optimizer)
    for one in found:  # ``found`` grows in this loop
        for value in vars(one).values():
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            for each in values:
                kept = isinstance(each, torch.optim.Optimizer) and not hasattr(each, "count_own_step")
                if kept and each not in found and not params.isdisjoint(_params(each)):
                    found.append(each)
    return found


def _params(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}


def _takes_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    # An optimizer whose class does not call Optimizer.__init__ runs no hooks, and may lack their dictionaries or have plain
    # dicts in their place, which take no hooks. The names are private API of torch, the same in torch 2.5 to 2.15.
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return all(isinstance(getattr(optimizer, name, None), OrderedDict) for name in names)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a parameter has a gradient. A step of torch's optimizers without any gradient changes nothing."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _refuse_local_gradients(optimizer_class: type, wrapper: Wrapper) -> None:
    if wrapper.has_local_gradients():
        raise RuntimeError(
            f"step() of the wrapped {optimizer_class.__name__} was called with this rank's own gradients, so that the "
            "ranks' weights would differ: call step() of the DistributedOptimizer, or its synchronize() before"
        )


def _checked(argument: Any, optimizer_class: type, wrapper: Wrapper) -> Any:
    """If ``argument`` is a closure, wrap it: refuse local gradients, and average the loss. Return other arguments as is."""
    # Don't wrap a closure twice: the ranks might then average the loss different numbers of times. If a step calls its base
    # class's step, torch runs the hooks again, but only on ranks that have made an optimizer of exactly this base class.
    if not callable(argument) or hasattr(argument, "averages_loss"):
        return argument

    def evaluate(*args: Any, **options: Any) -> Any:
        loss = argument(*args, **options)
        _refuse_local_gradients(optimizer_class, wrapper)
        return combined_loss(loss, wrapper.average_over_ranks)

    evaluate.averages_loss = True  # type: ignore[attr-defined]
    return evaluate


@torch.no_grad()
def combined_loss(loss: Any, reduce: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Combine the losses that the ranks' closures returned. Return any other value unchanged. Collective; blocks.

    Args:
        loss: a tensor of one element or a real number on every rank, or something else on every rank.
        reduce: reduces a float64 tensor over the ranks in the same way as gradients.

    Raises:
        BackendError: on every rank, if ``loss`` is a number on some ranks only.
    """
    is_number = isinstance(loss, Real) or (isinstance(loss, torch.Tensor) and loss.numel() == 1)
    # Every rank makes the same call, whatever its closure returned. The results show whether all closures returned numbers.
    mine = [float(loss), 1.0, 0.0] if is_number else [0.0, 0.0, 1.0]
    total, numbers, others = reduce(torch.tensor(mine, dtype=torch.float64, device="cpu")).tolist()
    if numbers and others:
        raise BackendError(
            "the closure given to step() returned a loss on some ranks and something else on others "
            f"({type(loss).__name__} on this rank): return the loss on every rank"
        )
    if not is_number:
        return loss
    return torch.full_like(loss, total) if isinstance(loss, torch.Tensor) else total
