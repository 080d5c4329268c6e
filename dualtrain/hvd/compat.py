"""Horovod's own defects that change numbers. With DUALTRAIN_HVD_COMPAT=1, dualtrain reproduces them.

``horovodize --prove`` uses this to find out which differences are due to a defect of Horovod. ``hvd.init`` reads the
variable. The modules that reproduce a defect call :func:`enabled`, and :func:`note` to record the script's line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from dualtrain.optimizer import DistributedOptimizer

FRESH_STATE = "broadcast_optimizer_state takes a step with an optimizer that has no state"
DROPPED_STATE = "DistributedOptimizer drops the state (momentum) of the optimizer that it wraps"
REMADE = "DistributedOptimizer drops hooks and attributes of the optimizer that it wraps"
OPTIONS = "broadcast_optimizer_state leaves out the options of an optimizer without state"
FROZEN = "parameters that are frozen after the optimizer was wrapped get gradients of zeros"
UNREDUCED = "the gradients of parameters that are added or unfrozen after the optimizer was wrapped are not reduced"
HALF = "float16 is summed in 16 bits"
PREDIVIDED = "gradient_predivide_factor is ignored for parameters in groups"

#: Optimizers that count steps in their state, although their updates do not depend on the count.
_COUNTER_UNUSED = (torch.optim.Adadelta, torch.optim.RMSprop)
#: Attributes that :func:`_attributes` leaves out. ``without_state`` compares ``state`` separately, keeps the parameter
#: groups, and drops the defaults. The other attributes are private in torch 2.5 to 2.15, which uses them for warnings only.
_NOT_COMPARED = {"state", "param_groups", "defaults", "_opt_called", "_step_count", "_warned_capturable_if_run_uncaptured"}
_LIBRARY_FOLDERS = tuple(str(folder) + os.sep for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))
_reproduced: dict[tuple[str, str, int], None] = {}
_enabled = False


def enable(reproduce: bool) -> None:
    """Set whether Horovod's defects are reproduced."""
    global _enabled
    _enabled = reproduce


def enabled() -> bool:
    """Return whether Horovod's defects are reproduced."""
    return _enabled


def note(defect: str) -> None:
    """Record that ``defect`` was reproduced at the script's current line; for :data:`HALF`, the first such line only."""
    if defect == HALF and any(known == HALF for known, _, _ in _reproduced):
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARY_FOLDERS):
        frame = frame.f_back
    _reproduced.setdefault((defect, frame.f_code.co_filename, frame.f_lineno))


def reproduced() -> list[tuple[str, str, int]]:
    """Return the defects that were reproduced: (defect, file, line)."""
    return list(_reproduced)


def without_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and parameter groups, without the state and defaults of ``optimizer``.

    Records the defects of Horovod that this reproduces.
    """
    kind: Any = type(optimizer)
    fresh: torch.optim.Optimizer = kind(optimizer.param_groups)
    # Compare with the state of fresh, which is not always empty: Adagrad makes its state in its constructor.
    if not _equal(dict(optimizer.state), dict(fresh.state)):
        note(DROPPED_STATE)
    if not _equal(_attributes(optimizer), _attributes(fresh)):
        note(REMADE)
    return fresh


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = {name: value for name, value in vars(optimizer).items() if name not in _NOT_COMPARED}
    if hasattr(found.get("step"), "_wrapped_by_lr_sched"):
        del found["step"]  # a scheduler's wrapper of step(), which counts calls for a warning (torch 2.5 to 2.15)
    return found


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are certainly equal. Objects of unknown classes count as equal only if identical."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one is other or (isinstance(one, bool | int | float | str) and one == other)


def zero_gradient(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> torch.Tensor:
    """Return a gradient of zeros for ``p``, in a layout that ``optimizer`` accepts."""
    zeros = torch.zeros_like(p.detach())
    return zeros.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else zeros


@torch.no_grad()
def step_if_fresh(optimizer: torch.optim.Optimizer) -> None:
    """Take a step without communication, with gradients of zeros, if ``optimizer`` has no state.

    The step overwrites the gradients, and is recorded as a defect if it makes a difference. LBFGS takes no step, because
    Horovod refuses it.
    """
    if optimizer.state or isinstance(optimizer, torch.optim.LBFGS):
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in params]
    lost = any(p.grad is not None and _is_nonzero(p.grad) for p in params if p.requires_grad)  # overwritten below
    for p in params:
        if p.requires_grad:
            p.grad = zero_gradient(optimizer, p)
    with torch.enable_grad():
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.step_alone()
        else:
            optimizer.step()
    moved = any(not torch.equal(p, old) for p, old in zip(params, before, strict=True))
    unused = {"step"} if isinstance(optimizer, _COUNTER_UNUSED) else set()
    state = [each for state in optimizer.state.values() for name, each in state.items() if name not in unused]
    # SGD dampens each gradient except the first. The step with zeros counts as the first.
    if moved or lost or any(map(_is_nonzero, state)) or any(group.get("dampening") for group in optimizer.param_groups):
        note(FRESH_STATE)


def _is_nonzero(value: Any) -> bool:
    return bool(value.any()) if isinstance(value, torch.Tensor) else bool(value)


def rounded_sum(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``total``, rounded to 16 bits if defects are reproduced and the ranks' tensors have the ``dtype`` float16."""
    return total.to(dtype).to(total.dtype) if dtype == torch.float16 and enabled() else total
