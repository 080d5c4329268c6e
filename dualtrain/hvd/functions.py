"""Broadcasts of parameters and optimizer states; broadcasts and gathers of objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

from dualtrain.backends import objects
from dualtrain.hvd import compat
from dualtrain.hvd.basics import engine, rank
from dualtrain.hvd.calls import usable_root, usable_set
from dualtrain.hvd.engine import check_name
from dualtrain.hvd.mpi_ops import broadcast_async_, synchronize
from dualtrain.hvd.process_sets import ProcessSet, global_process_set
from dualtrain.state import load_optimizer_state, tensors_among

T = TypeVar("T")


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Copy the root's values to every rank, in place. Collective; blocks.

    Args:
        params: a ``state_dict()``, or an iterable of tensors or of (name, tensor) pairs. Values other than tensors are
            ignored.
        root_rank: the rank whose values are copied.

    Raises:
        ValueError: in these cases:

            - ``params`` is a single tensor, or is not iterable.
            - A value in it is a container of tensors.
            - It has values, but none of them is a tensor.
            - A name occurs twice, or is not a string.
            - A tensor is sparse, nested or quantized, is neither on the CPU nor on a GPU, or its elements share memory
              (``expand``).
            - ``root_rank`` does not exist.
        HorovodInternalError: the ranks' calls do not match, a rank failed, or Horovod was shut down or is not initialized.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        pairs = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(f"invalid params of type {type(params)}: pass a state_dict or named_parameters")
    named = tensors_among(pairs)
    # Check all names here: broadcast_async_ refuses a name only while an earlier call with this name is running.
    counts = Counter(name for name, _ in named if isinstance(name, str) and name)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(f"names of parameters occur twice: {', '.join(map(repr, twice))}; give each tensor its own name")
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in named]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Send every rank the root's optimizer state and options (learning rates and so on). Collective; blocks.

    If an optimizer has no state, Horovod's function takes a step with gradients of zeros, in which weight decay changes
    the weights. SGD without momentum has no state after this step either, and Horovod's function then does not send the
    options. This function has these defects only with DUALTRAIN_HVD_COMPAT=1; otherwise it takes no step and always sends
    the options. As with Horovod, unfrozen parameters without a gradient get a gradient of zeros if there is no state; with
    DUALTRAIN_HVD_COMPAT=1, those with a gradient do too.

    Args:
        optimizer: any optimizer, distributed or not.
        root_rank: the rank whose state is sent.
        model: ignored; accepted because Horovod accepts it.

    Raises:
        TypeError: on every rank, if the state contains objects that cannot be sent: see :func:`broadcast_object`.
        ValueError: ``root_rank`` does not exist, this process is not in a world, or the state does not fit this rank's
            optimizer.
        HorovodInternalError: the ranks' calls do not match, a rank failed, or Horovod was shut down on another rank.
    """
    if compat.enabled():
        compat.step_if_fresh(optimizer)
    elif not optimizer.state:
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.grad is None):
            p.grad = compat.zero_gradient(optimizer, p)
    state = optimizer.state_dict() if rank() == root_rank else None
    received = broadcast_object(state, root_rank, name="optimizer_state")
    if compat.enabled() and not received["state"]:
        if received["param_groups"] != optimizer.state_dict()["param_groups"]:
            compat.note(compat.OPTIONS)
        return
    load_optimizer_state(optimizer, received)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's ``obj`` on every rank. Collective, matched by name; blocks.

    Plain values, containers, tensors and numpy arrays can be sent, but no code. Objects of your own classes can be sent
    after all ranks have passed the classes to ``torch.serialization.add_safe_globals``.

    Raises:
        TypeError: on every rank of the set, if the object contains anything else. Later calls can succeed.
        pickle.UnpicklingError: on a rank that has not passed such a class to ``add_safe_globals``, if the root has.
        ValueError, HorovodInternalError: as :func:`broadcast`. Outside of a world, ValueError.
    """
    is_root = rank() == root_rank
    set_id, root_rank = usable_set(process_set), usable_root(root_rank, process_set)
    data, problem = objects.encode_or_refuse(obj) if is_root else (torch.empty(0, dtype=torch.uint8, device="cpu"), None)
    [received] = engine().submit("objects", _call_name("broadcast", name), set_id, [data], root=root_rank).wait()
    return obj if is_root and problem is None else _decoded(received, root_rank)


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """Return every rank's ``obj`` in rank order. Collective, matched by name; blocks.

    For the objects that can be sent, and the exceptions, see :func:`broadcast_object`. But outside of a world, this
    function raises HorovodInternalError.
    """
    set_id = usable_set(process_set)
    data, _ = objects.encode_or_refuse(obj)
    received = engine().submit("objects", _call_name("allgather", name), set_id, [data], root=None).wait()
    return [_decoded(part, sender) for part, sender in zip(received, process_set.ranks or [], strict=True)]


def _call_name(operation: str, name: str | None) -> str | None:
    """Return a name that differs between broadcasts and gathers, since both have the kind "objects".

    Calls without a name stay unnamed. Raises ValueError if ``name`` is not a string.
    """
    check_name(name)
    return name and f"{operation}.{name}"


def _decoded(data: torch.Tensor, sender: int) -> Any:
    try:
        return objects.decode(data)
    except TypeError as refusal:
        raise TypeError(f"rank {sender}: {refusal}") from None
