"""Broadcast of parameters and optimizer state, averages of buffers, and a hash of the weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch

from dualtrain.backends import Backend
from dualtrain.backends.collectives import check_backend
from dualtrain.backends.comparison import agree_on_list
from dualtrain.backends.dtensor import is_dtensor
from dualtrain.backends.inference import ordinary
from dualtrain.backends.wire import as_bytes, checked_dense, from_bytes, shares_elements
from dualtrain.gradients.layout import dense_strides, with_strides
from dualtrain.gradients.parameters import check_module, check_optimizer

_CHUNK_BYTES = 25 << 20

Params = torch.nn.Module | Mapping[str, Any] | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@torch.no_grad()
def broadcast_parameters(params: Params, backend: Backend, root: int = 0) -> None:
    """Copy rank ``root``'s values of ``params`` to every rank, in place. Collective; blocks.

    Args:
        params: a module (its parameters and buffers), a ``state_dict()``, or an iterable of tensors or of
            (name, tensor) pairs, of any dtypes, shapes and strides. Entries that are not tensors are ignored.
        backend: the ranks.
        root: the rank whose values are copied.

    Raises:
        TypeError: ``backend`` is not what ``connect()`` returns.
        ValueError: ``root`` is not a rank; ``params`` has a container of tensors as an entry; ``params`` has entries, but
            no tensor; a tensor is sparse or quantized; or a tensor's elements share memory (``expand``), so that it cannot
            be written.
        BackendError: the names, dtypes, shapes or kinds of device of the ranks' tensors differ, the call is invalid on some
            ranks only, a rank failed, or the call timed out.
    """
    check_backend(backend)
    note = ", whose elements share memory"
    try:
        tensors = tensors_among(_named(params))
        shared = [name for name, t in tensors if backend.size > 1 and shares_elements(t)]
        described = [_described(name, t) + note * (name in shared) for name, t in tensors]
    except Exception as problem:  # of any type: ``params`` may be a generator of the user
        backend.refuse("broadcast_parameters", "parameters", problem)
    agree_on_list(backend, "parameters", described, "broadcast_parameters")
    if shared:
        raise ValueError(
            f"{shared[0]!r} cannot be broadcast: elements of this tensor share memory, as after expand(); register a copy "
            "of it (clone())"
        )
    for chunk in _chunks([t for _, t in tensors]):
        packed = torch.cat([as_bytes(t) for t in chunk])
        backend.broadcast_(packed, root, name="parameters")
        if backend.rank != root:
            _unpack(packed, chunk)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, backend: Backend, root: int = 0) -> None:
    """Copy rank ``root``'s optimizer state and options (learning rates and so on) to every rank. Collective; blocks.

    Creates the state that a rank does not have, and copies the options even if there is no state. Never runs a step.
    Horovod's function of this name differs. It does not copy the options of an optimizer without state. To create missing
    state, it runs a step with zero gradients. In this step, weight decay changes the weights, and Adam counts the step.

    Raises:
        TypeError: ``backend`` is not what ``connect()`` returns, or ``optimizer`` is not an optimizer; or, on the root, an
            option is neither a plain value nor a tensor. (In the last case, the other ranks raise BackendError.)
        ValueError: ``root`` is not a rank; or, on a rank that is not the root, its optimizer has other parameter groups
            than the root's.
        BackendError: ``optimizer`` is not an optimizer on some ranks only, the root's ``state_dict()`` has raised, a rank
            failed, or the call timed out.
    """
    check_backend(backend)
    try:
        check_optimizer(optimizer)
        state = optimizer.state_dict() if backend.rank == root else None
    except Exception as problem:  # of any type, since the optimizer may be the user's
        backend.refuse("broadcast_object", "optimizer state", problem)
    received = backend.broadcast_object(state, root, name="optimizer state")
    load_optimizer_state(optimizer, received)


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a ``state_dict()``. Keep its dtypes, and keep the dicts that ``optimizer.param_groups`` consists of.

    In groups with torch's option ``foreach``, state tensors that have the parameter's shape get its strides (channels_last,
    for example), which files of versions up to 0.2.0 do not keep: steps with ``fused=True`` read the memory of both in the
    same order, whatever the strides are. Other optimizers may need other strides: for views of a flat buffer, for example.

    ``optimizer.load_state_dict`` alone casts state to the parameter's dtype, so the float32 moments of bfloat16
    parameters would lose bits. It also replaces the parameter groups by new dicts. If a scheduler belongs to
    a different optimizer object with the same groups, such as a wrapper, it would then change learning rates in the old
    dicts only, without an effect.
    """
    groups = list(optimizer.param_groups)
    optimizer.load_state_dict(state)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if loaded is not group:  # an optimizer may load into its groups in place
            group.clear()
            group.update(loaded)
    optimizer.param_groups[:] = groups
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    params = [(p, p if "foreach" in group else None) for group in optimizer.param_groups for p in group["params"]]
    for number, (p, like) in zip(numbers, params, strict=True):
        if number in state["state"] and p in optimizer.state:
            optimizer.state[p] = _restored(optimizer.state[p], state["state"][number], like)


def _restored(loaded: Any, source: Any, like: torch.Tensor | None) -> Any:
    """Return ``loaded``, a parameter's state, with the dtypes of ``source`` and, if given, the strides of ``like``.

    Where dtypes differ, take ``source``'s tensor, copied to the device of the loaded tensor.
    """
    if isinstance(loaded, torch.Tensor) and isinstance(source, torch.Tensor):
        result = loaded if loaded.dtype == source.dtype else source.detach().to(loaded.device, copy=True)
        return result if like is None else _with_strides_of(result, like)
    if isinstance(loaded, dict) and isinstance(source, dict):
        for key in loaded.keys() & source.keys():
            loaded[key] = _restored(loaded[key], source[key], like)
    elif isinstance(loaded, list) and isinstance(source, list) and len(loaded) == len(source):
        loaded[:] = [_restored(each, other, like) for each, other in zip(loaded, source, strict=True)]
    return loaded


def _with_strides_of(tensor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a copy with the strides that ``torch.zeros_like(p)`` has if the shapes are equal."""
    plain = type(tensor) is torch.Tensor and tensor.layout is p.layout is torch.strided
    if not plain or tensor.shape != p.shape or tensor.stride() == dense_strides(p):
        return tensor
    return with_strides(tensor.detach(), dense_strides(p))


@torch.no_grad()
def average_buffers(model: torch.nn.Module, backend: Backend) -> None:
    """Average the floating-point buffers (running statistics) of ``model`` over the ranks, in place. Collective; blocks.

    Each rank's BatchNorm layers have processed that rank's samples only. Call this before an evaluation or a checkpoint,
    so that all ranks have the same model.

    Raises:
        TypeError: ``backend`` is not what ``connect()`` returns, or ``model`` is not a module.
        ValueError: a floating-point buffer is sparse or nested.
        BackendError: the names or shapes of the ranks' buffers differ, the call is invalid on some ranks only, a rank
            failed, or the call timed out.
    """
    check_backend(backend)
    _average_buffers(_compared_buffers(model, backend), backend)


def _compared_buffers(model: torch.nn.Module, backend: Backend) -> list[tuple[str, torch.Tensor]]:
    """Return :func:`local_buffers`, sorted by name, after the ranks have compared names and shapes. Collective.

    Raises:
        BackendError: on every rank, if the names or shapes differ between the ranks, or the buffers of only some ranks
            cannot be sent.
        Exception: on every rank, the reason why no rank's buffers can be sent, such as ValueError for a sparse buffer.
    """
    try:
        check_module(model)
        found = sorted(local_buffers(model), key=itemgetter(0))
        described = [f"{name} {tuple(checked_dense(buffer).shape)}" for name, buffer in found]
    except Exception as problem:  # of any type, since the model is the user's
        backend.refuse("average_buffers", "buffers", problem)
    cure = "build the same model on every rank; a rank makes the buffers that forward creates only if it has had a batch"
    agree_on_list(backend, "buffers", described, "average_buffers", cure=cure)
    return found


def _average_buffers(
    named: list[tuple[str, torch.Tensor]], backend: Backend, subset: tuple[int, bool] | None = None
) -> None:
    """Average the buffers over all ranks, or over a subset of them. Collective: all ranks call it.

    ``subset`` has the number of ranks in the subset, and whether this rank is one of them; ``None``: all ranks.
    """
    for chunk in _chunks([buffer for _, buffer in named]):
        packed = torch.cat([b.reshape(-1).to(torch.float64) for b in chunk])
        if subset is None:
            packed = backend.allreduce_(packed, name="buffers")
        else:
            # Don't multiply by 0, which would give NaN for infinite values.
            mine = packed if subset[1] else torch.zeros_like(packed)
            packed = backend.allreduce_(mine, "sum", name="buffers").div_(subset[0])
        for buffer, part in zip(chunk, packed.split([b.numel() for b in chunk]), strict=True):
            ordinary(buffer).copy_(part.view(buffer.shape))


def local_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return (name, buffer) of the floating-point buffers (running statistics, which depend on a rank's samples)."""
    return [(name, b) for name, b in model.named_buffers() if b.is_floating_point()]


@contextmanager
def averaged_buffers(model: torch.nn.Module, backend: Backend, *, trained: bool) -> Iterator[None]:
    """Average the buffers for the block, and restore each rank's own values after it. Collective.

    The average is over the ranks with ``trained=True``, since the other ranks' statistics contain no samples. If there are
    no such ranks, it is over all ranks.
    """
    named = _compared_buffers(model, backend)
    own = [(name, buffer, buffer.clone()) for name, buffer in named]
    modules = dict(model.named_modules())  # not get_submodule(), which TorchScript modules do not support
    count = backend.size
    if own:
        flag = torch.tensor([float(trained)], dtype=torch.float64, device="cpu")
        count = int(backend.allreduce(flag, "sum", name="ranks with statistics").item())
    try:
        with torch.no_grad():
            _average_buffers(named, backend, (count, trained) if 0 < count < backend.size else None)
        yield
    finally:
        with torch.no_grad():
            for name, buffer, before in own:
                ordinary(buffer).copy_(before)
                path, _, key = name.rpartition(".")
                module = modules[path]
                if getattr(module, key, None) is not buffer:
                    setattr(module, key, buffer)  # a forward pass has put a different tensor there


def weights_sha256(model: torch.nn.Module | Mapping[str, torch.Tensor]) -> str:
    """Return a hash of the tensors (parameters, persistent buffers) of a model or a ``state_dict()``, in name order.

    Hashes are equal if and only if all names, dtypes, shapes and bits are equal.

    Raises:
        ValueError: a tensor is a DTensor.
    """
    digest = hashlib.sha256()
    for name, tensor in _named(model.state_dict() if isinstance(model, torch.nn.Module) else model):
        if not isinstance(tensor, torch.Tensor):
            continue
        if is_dtensor(tensor):  # its own memory is empty
            raise ValueError(f"{name!r} is a DTensor, of which each rank has another shard: pass its full_tensor()")
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(as_bytes(tensor).cpu().numpy().data)
    return digest.hexdigest()


def tensors_among(named: Iterable[tuple[Any, Any]]) -> list[tuple[Any, torch.Tensor]]:
    """Return the pairs (name, tensor) among pairs of names and values. Ignore a module's extra state if it is no tensor.

    Raises:
        ValueError: a value is a container of tensors, which would be left out; or there are values, but no tensors.
    """
    pairs = [pair for pair in named if isinstance(pair[1], torch.Tensor) or not is_extra_state(pair[0])]
    found = [(name, value) for name, value in pairs if isinstance(value, torch.Tensor)]
    nested = [name for name, value in pairs if not isinstance(value, torch.Tensor) and _has_tensors(value)]
    if nested or (pairs and not found):
        name, value = next((name, value) for name, value in pairs if not nested or name == nested[0])
        raise ValueError(
            f"{name!r} is not a tensor, but of type {type(value).__name__}: pass a flat state_dict() of a model, or "
            "named_parameters(); for the state of an optimizer, call broadcast_optimizer_state"
        )
    return found


def is_extra_state(name: Any) -> bool:
    """Return whether ``name`` is the key of a module's ``get_extra_state()`` in a ``state_dict()``."""
    return str(name).rpartition(".")[2] == "_extra_state"


def _has_tensors(value: Any) -> bool:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(item, torch.Tensor) or _has_tensors(item) for item in items)


def _named(params: Params) -> list[tuple[str, Any]]:
    if isinstance(params, torch.nn.Module):
        # Don't use the module's state_dict, which leaves out buffers that are not persistent.
        params = {**dict(params.named_parameters()), **dict(params.named_buffers())}
    entries = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    return [entry if isinstance(entry, tuple) else (str(i), entry) for i, entry in enumerate(entries)]


def _described(name: str, tensor: torch.Tensor) -> str:
    """Return a text that the ranks compare. Raises ValueError if the tensor is sparse or quantized."""
    try:
        checked_dense(tensor)
    except ValueError as problem:
        raise ValueError(f"{name!r} cannot be broadcast: {problem}") from None
    device = "" if tensor.is_cpu else f", {tensor.device.type}"
    return f"{name} ({tensor.dtype}, {tuple(tensor.shape)}{device})"


def _chunks(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split ``tensors``, in order, into chunks of one device and about 25 MB each."""
    chunks: list[list[torch.Tensor]] = []
    filled = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not chunks or chunks[-1][0].device != tensor.device or filled + size > _CHUNK_BYTES:
            chunks.append([])
            filled = 0
        chunks[-1].append(tensor)
        filled += size
    return chunks


def _unpack(packed: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    for tensor, part in zip(tensors, packed.split([t.numel() * t.element_size() for t in tensors]), strict=True):
        # Copy the slice: its start may not be aligned for the dtype.
        ordinary(tensor).copy_(from_bytes(part.clone(), tensor.dtype, tuple(tensor.shape)))
