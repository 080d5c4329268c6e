"""Checks on the parameters of a reducer: which kinds it accepts, and whether one changed after its bucket was made.

The hook on a parameter holds its reducer weakly, so that a reducer is freed with the object that uses it. A hook whose
reducer is gone raises an error: the ranks would otherwise train apart without a message.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

_DTYPE = attrgetter("dtype")
_observing = False


class Reducer(Protocol):
    """The reducer's side of a hook."""

    #: For hooks that run in several threads; ``None`` where all parameters are on one device, and so in one thread.
    lock: Any
    slots: Any

    def gradient_is_there(self, slot: Any) -> None:
        """Autograd has accumulated the gradient of the parameter of ``slot``."""

    def parameter_replaced(self, place: tuple[int, str], number: int | None) -> None:
        """In ``place`` (a module and a name) there is a new one instead of parameter ``number``; of none if ``None``."""


def gradient_dtype(p: torch.Tensor) -> torch.dtype:
    """The dtype of the gradient of ``p``, which torch allows to differ from its own."""
    return getattr(p, "grad_dtype", None) or p.dtype


def check_supported(name: str, p: torch.Tensor) -> None:
    """Raises ValueError if the gradient of ``p`` cannot be averaged over the ranks."""
    reason = None
    if is_lazy(p):
        reason = "is not initialized: run one batch through the model first"
    elif any(cls.__name__ == "DTensor" for cls in type(p).__mro__):
        reason = "is a DTensor (FSDP2 or tensor parallel): each rank has a shard of its own, and no average of them exists"
    elif getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
        reason = "belongs to FullyShardedDataParallel: each rank has a shard of its own, and no average of them exists"
    elif getattr(p, "grad_dtype", p.dtype) is None:
        reason = "has grad_dtype=None (any dtype), but the ranks must know the dtype before: set it to one"
    if reason is not None:
        raise ValueError(f"parameter {name!r} {reason}")


def warn_of_ddp(model: nn.Module) -> None:
    """Warn if ``model`` is or has a DistributedDataParallel. Parameters do not tell: it leaves no trace on them."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        warnings.warn(
            "the model is in DistributedDataParallel: its gradients would be reduced twice. Give the model itself "
            "(ddp.module), or use DistributedDataParallel alone",
            stacklevel=3,
        )


class Forms:
    """Dtype, device and shape of parameters at the time when their buckets were made."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._names = [name for name, _ in named]
        self._params = [p for _, p in named]
        self._dtypes = [p.dtype for p in self._params]
        self._devices = [p.device for p in self._params]
        self._indices = [p.get_device() for p in self._params]  # -1 on the CPU; an object less to make than a device
        self._shapes = [p.shape for p in self._params]
        self._numels = [p.numel() for p in self._params]

    def difference(self) -> str | None:
        """The first parameter that has another form now, for an error message; ``None`` if there is none."""
        # Whole lists are compared in C: this runs in every step.
        params = self._params
        if (
            list(map(_DTYPE, params)) == self._dtypes
            and list(map(torch.Tensor.get_device, params)) == self._indices
            and list(map(torch.Tensor.numel, params)) == self._numels
        ):
            return None
        before = zip(self._dtypes, self._devices, self._shapes, strict=True)
        for name, p, was in zip(self._names, params, before, strict=True):
            now = p.dtype, p.device, p.shape
            if now != was and p.requires_grad:  # a frozen one takes part as zeros
                return (
                    f"parameter {name!r} was {_form(*was)} when its gradient was laid out, and is {_form(*now)} now: "
                    "change it back, or make the optimizer anew after the change"
                )
        return None


def _form(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} on {device}"


# -- hooks --------------------------------------------------------------------------------------------------------


def make_hook(reducer: Reducer, number: int, name: str) -> Callable[[torch.Tensor], None]:
    """A post-accumulate-grad hook for parameter ``number``. Raises RuntimeError in backward if the reducer is gone."""
    ref = weakref.ref(reducer)

    def hook(p: torch.Tensor) -> None:
        living = ref()
        if living is not None:
            if living.lock is None:
                living.gradient_is_there(living.slots[number])
            else:
                with living.lock:
                    living.gradient_is_there(living.slots[number])
        elif not any(other() is not None for other, _ in _watchers(p)):
            raise RuntimeError(
                f"the gradient of {name!r} is not averaged any more: its DistributedOptimizer, GradientReducer or Trainer "
                "was dropped. Keep it as long as the model trains, or call its close() before dropping it"
            )

    hook.watcher = ref, number  # type: ignore[attr-defined]
    _observe_replacements()
    return hook


def _watchers(p: torch.Tensor | None) -> Iterable[tuple[weakref.ref[Reducer], int]]:
    hooks = getattr(p, "_post_accumulate_grad_hooks", None) or {}
    return [hook.watcher for hook in hooks.values() if hasattr(hook, "watcher")]


def _observe_replacements() -> None:
    """Has modules report it when a watched parameter is replaced by another one, once in a process."""
    global _observing
    if not _observing:
        _observing = True
        register_module_parameter_registration_hook(_on_registration)


def _on_registration(module: nn.Module, name: str, new: Any) -> None:
    old = module._parameters.get(name)
    if new is None or new is old:
        return
    place = id(module), name
    keepers = [ref() for ref, _ in _watchers(new)]
    for keeper in keepers:
        if keeper is not None:
            keeper.parameter_replaced(place, None)
    # A frozen one is not trained, and one that the same reducer watches is tied to another parameter.
    for ref, number in _watchers(old) if new.requires_grad else ():
        reducer = ref()
        if reducer is not None and not any(reducer is keeper for keeper in keepers):
            reducer.parameter_replaced(place, number)
