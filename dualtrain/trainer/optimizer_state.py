"""Check the state that was loaded into an optimizer."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

_FACTORED = ("row_var", "col_var")  # Adafactor's second moments, factored into rows and columns
#: Options that choose an implementation of the step. Some implementations cannot run on meta tensors.
_IMPLEMENTATION = ("capturable", "foreach", "fused")


def check_state(optimizer: torch.optim.Optimizer) -> None:
    """Check that the loaded options and state of ``optimizer`` have the same kinds and shapes as in a new optimizer.

    If the optimizer is not from ``torch.optim``, check only that no option is missing.

    Raises:
        ValueError: an entry is missing, or has a different kind or shape. A step would then fail, or torch would
            expand the entry to the parameter's shape.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    of_torch = type(inner).__module__.startswith("torch.optim.")
    known = inspect.signature(type(inner)).parameters  # loading a state adds names to inner.defaults
    for number, group in enumerate(inner.param_groups):
        for name, default in inner.defaults.items():
            if name not in known:
                continue
            if name not in group or (of_torch and not _alike(group[name], default)):
                found = f"a value of type {type(group[name]).__name__}" if name in group else "no value"
                raise ValueError(f"the optimizer's parameter group {number} has no usable value of {name}: found {found}")
        for parameter in group["params"]:
            if of_torch and inner.state.get(parameter):
                _check_state_of(parameter, inner.state[parameter], _first_state(inner, group, parameter))


def _check_state_of(parameter: torch.Tensor, state: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if value is not None and (name not in state or not _alike(state[name], value)):
            raise ValueError(f"the optimizer's {name} is missing, or has the wrong type")
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and name not in _FACTORED and (value.dim() or name in expected):
            wanted = expected[name].shape if isinstance(expected.get(name), torch.Tensor) else parameter.shape
            if value.shape != wanted:
                shapes = f"{tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}"
                raise ValueError(f"the optimizer's {name} has the shape {shapes}")


def _first_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return the state that a first step creates, as meta tensors; empty if the optimizer cannot step on meta tensors."""
    known = inspect.signature(type(optimizer)).parameters
    options = {name: group[name] for name in optimizer.defaults if name in known and name not in _IMPLEMENTATION}
    twin = nn.Parameter(torch.empty_like(parameter, device="meta"))
    twin.grad = torch.empty_like(twin)
    try:
        new: Any = type(optimizer)([twin], **options)
        new.step()
    except Exception:
        return {}
    return dict(new.state[twin])


def _alike(value: Any, expected: Any) -> bool:
    """Return whether ``value`` is of the kind of ``expected``; if ``expected`` is ``None``, any value is accepted."""
    if expected is None or (isinstance(expected, torch.Tensor) and isinstance(value, torch.Tensor)):
        return True
    if isinstance(expected, int | float) and not isinstance(expected, bool):
        return isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)
    if isinstance(expected, torch.Tensor) and not expected.dim():  # a learning rate may be a tensor
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(expected, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(expected) and all(map(_alike, value, expected))
    return type(value) is type(expected)
