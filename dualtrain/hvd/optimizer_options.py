"""Check the options of ``hvd.DistributedOptimizer``, and translate them for the reducers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dualtrain.gradients import Transfer
from dualtrain.gradients.parameters import number_parameters
from dualtrain.hvd import basics, compat
from dualtrain.hvd.arithmetic import Sum
from dualtrain.hvd.compression import AnyCompressor, BF16Compressor, Compression, FP16Compressor
from dualtrain.hvd.process_sets import ProcessSet
from dualtrain.hvd.util import split_list

Named = list[tuple[str, torch.nn.Parameter]]
#: The compressors that buckets support, and the dtype in which each sends gradients (``None``: their own dtype).
WIRE_DTYPES: dict[AnyCompressor, torch.dtype | None] = {
    Compression.none: None,
    FP16Compressor: torch.float16,
    BF16Compressor: torch.bfloat16,
}


class FixedOption:
    """Attribute of the wrapper for an option that cannot change after wrapping: a second assignment raises AttributeError.

    Horovod reads the attribute in every step, so a later assignment has an effect there.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, cls: type) -> Any:
        return self if wrapper is None else vars(wrapper)[self._name]

    def __set__(self, wrapper: Any, value: Any) -> None:
        if self._name in vars(wrapper):
            raise AttributeError(
                f"{self._name} of a wrapped optimizer cannot be changed: pass it to a new hvd.DistributedOptimizer"
            )
        vars(wrapper)[self._name] = value


def name_parameters(optimizer: torch.optim.Optimizer, named_parameters: Iterable[Any] | None) -> Named:
    """Return ``named_parameters`` as a list; if it is ``None``, all parameters of ``optimizer`` with generated names.

    Raises:
        ValueError: ``named_parameters`` has elements that are not tuples, has a name twice, or lacks a parameter of
            ``optimizer``.
    """
    all_params = number_parameters(optimizer.param_groups, "allreduce.noname.{}.{}")
    if named_parameters is None:
        return all_params
    named = list(named_parameters)
    if not all(isinstance(pair, tuple) for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    twice = sorted(name for name, count in Counter(name for name, _ in named).items() if count > 1)
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    missing = len({p for _, p in all_params} - {p for _, p in named})
    if missing:
        raise ValueError(f"named_parameters was specified, but {missing} of the optimizer's parameters were not named")
    return named


def transfer_of(
    optimizer: torch.optim.Optimizer,
    op: int,
    predivide: float,
    compression: AnyCompressor,
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
    sparse_as_dense: bool,
    process_set: ProcessSet,
) -> Transfer:
    """Translate Horovod's options into a ``Transfer``.

    Raises:
        ValueError: ``groups`` is invalid.
        HorovodInternalError: ``init`` was not called.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        groups = split_list(params, groups) if groups else ()
    # A generator, such as layer.parameters(), can be read only once. ``Transfer`` refuses a tensor in place of a group.
    sets: list[Any] = [group if isinstance(group, torch.Tensor) else list(group) for group in groups or ()]
    listed = [p for group in sets for p in group]
    if not all(isinstance(p, torch.Tensor) for p in listed):
        raise ValueError("groups must consist of torch.Tensor.")
    if len({id(p) for p in listed}) < len(listed):
        raise ValueError("A parameter can only appear once in groups.")
    if compat.enabled() and predivide != 1 and listed and set(params) <= set(listed):
        compat.note(compat.PREDIVIDED)
        predivide = 1.0
    return Transfer(
        before=1 / predivide,
        after=1.0 if op == Sum else None if predivide == 1 else predivide / len(process_set.ranks or [0]),
        dtype=WIRE_DTYPES.get(compression),
        bucket_bytes=basics.engine().settings.fusion_bytes,
        groups=sets,
        sparse_as_dense=sparse_as_dense,
        coalesce=False,
        average_first=False,
    )


def base_name(named: Named, process_set: ProcessSet) -> str:
    """Return a name for these parameters and ranks, the same on every rank. The order of ``named`` makes no difference."""
    shapes = sorted((name, tuple(p.shape)) for name, p in named)
    digest = hashlib.blake2b(f"{process_set.ranks} {shapes}".encode(), digest_size=4).hexdigest()
    return f"{shapes[0][0] if shapes else 'nothing'}-{digest}"
