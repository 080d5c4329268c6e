"""The parameters of a reducer: their names, the kinds that are accepted, and changes after the buckets were made."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from dualtrain.backends.dtensor import is_dtensor
from dualtrain.torch_versions import grad_dtype

_DTYPE = attrgetter("dtype")
SHARDED = "was replaced in its module by a DTensor (torch's fully_shard), which the optimizer does not have"


def gradient_dtype(p: torch.Tensor) -> torch.dtype:
    """Return the dtype of the gradient of ``p``; torch allows it to differ from the dtype of ``p``."""
    return grad_dtype(p) or p.dtype


def is_sharded(p: torch.Tensor) -> bool:
    """Return whether ``fully_shard`` (FSDP2) has replaced ``p`` in its module by a DTensor."""
    # This attribute is private (torch 2.15), but no public one marks such a parameter. Older versions may have no mark.
    return hasattr(p, "_fsdp_orig_uid")


def check_supported(name: str, p: torch.Tensor) -> None:
    """Raise ValueError if the gradient of ``p`` cannot be averaged over the ranks."""
    reason = None
    if is_lazy(p):
        reason = "is not initialized: run one batch through the model first"
    elif is_dtensor(p):
        reason = "is a DTensor (FSDP2 or tensor parallel): each rank has a different shard, and shards have no average"
    elif is_sharded(p):
        reason = f"{SHARDED}: make the optimizer after fully_shard, and do not wrap it"
    # No public attribute marks FSDP's parameters. Both attributes are private in torch 2.5 to 2.15. FSDP's flat parameters
    # have both; the user's own parameters (use_orig_params=True) have only the second.
    elif getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
        reason = "belongs to FullyShardedDataParallel: each rank has a different shard, and shards have no average"
    elif grad_dtype(p) is None:
        reason = (
            "has grad_dtype=None (any dtype), but the ranks must know the gradient's dtype in advance: set grad_dtype to it"
        )
    if reason is not None:
        raise ValueError(f"parameter {name!r} {reason}")


def check_optimizer(optimizer: object) -> None:
    """Raise TypeError if ``optimizer`` is not an optimizer: for example, a list of parameters."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: give an optimizer, such as torch.optim.SGD")


def check_module(model: object) -> None:
    """Raise TypeError if ``model`` is not a module: for example, its ``state_dict()``."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give a module")


def name_parameters(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]] | None
) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) for every parameter of the optimizer, in the order of ``named``.

    Without ``named``, the names are those of :func:`number_parameters`, in the order of the groups.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, or ``named`` does not consist of pairs: for example, a module.
        ValueError: ``named`` has a name twice, or lacks a parameter of the optimizer.
    """
    check_optimizer(optimizer)
    theirs = number_parameters(optimizer.param_groups)
    if named is None:
        return theirs
    if isinstance(named, nn.Module | Mapping) or not isinstance(named, Iterable):
        raise TypeError(f"named_parameters is a {type(named).__name__}: pass model.named_parameters()")
    pairs = list(named)
    other = next((pair for pair in pairs if not isinstance(pair, tuple | list) or len(pair) != 2), None)
    if other is not None:
        found = f"a {type(other).__name__} in place of (name, parameter)"
        raise TypeError(f"named_parameters has {found}: pass model.named_parameters()")
    doubled = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if doubled:
        raise ValueError(f"named_parameters has the name {doubled[0]!r} twice: pass model.named_parameters()")
    given = {p for _, p in pairs}
    missing = [name for name, p in theirs if p not in given]
    if missing:
        raise ValueError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters (the first is {missing[0]}): "
            "pass model.named_parameters() of the whole model"
        )
    return first_names(pairs, optimizer)


def number_parameters(
    groups: Iterable[dict[str, Any]], form: str = "group {} parameter {}"
) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) for all parameters of an optimizer's ``groups``.

    ``form`` makes a name from the index of the group and the index of the parameter in the group.
    """
    return [(form.format(g, i), p) for g, group in enumerate(groups) for i, p in enumerate(group["params"])]


def first_names(
    named: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) for each parameter of ``optimizer`` in ``named``, in the order of ``named``.

    A shared parameter may have several names. The first one counts.
    """
    wanted = {p for group in optimizer.param_groups for p in group["params"]}
    names: dict[nn.Parameter, str] = {}
    for name, p in named:
        if p in wanted:
            names.setdefault(p, name)
    return [(name, p) for p, name in names.items()]


def warn_of_ddp(model: nn.Module) -> None:
    """Warn if ``model`` is or contains a DistributedDataParallel."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        warnings.warn(
            "the model is in DistributedDataParallel: its gradients would be reduced twice. Give the model itself "
            "(ddp.module), or use DistributedDataParallel alone",
            stacklevel=3,
        )


class Forms:
    """Dtype, device and shape of parameters at the time when their buckets were allocated."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._names = [name for name, _ in named]
        self._params = [p for _, p in named]
        self._dtypes = [p.dtype for p in self._params]
        self._devices = [p.device for p in self._params]
        self._indices = [p.get_device() for p in self._params]  # -1 on the CPU; faster than making a device object
        self._shapes = [p.shape for p in self._params]
        self._numels = [p.numel() for p in self._params]

    def difference(self) -> str | None:
        """Describe, for an error message, the first trained parameter whose dtype, device or shape has changed.

        Return ``None`` if there is none. A new shape with the same number of elements may be missed here; ``Bucket.pack``
        finds it later.
        """
        # This runs in every step, so it compares whole lists, in C.
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
            if now != was and p.requires_grad:  # the gradients of frozen parameters count as zeros
                return (
                    f"parameter {name!r} was {_form(*was)} when its gradient bucket was allocated, and is "
                    f"{_form(*now)} now: change it back, or make a new optimizer after the change"
                )
        return None


def _form(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} on {device}"
