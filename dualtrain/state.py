"""Broadcast of parameters and optimizer state, averages of buffers, and a hash of the weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from dualtrain.backends import Backend
from dualtrain.backends.comparison import agree_on_list
from dualtrain.backends.wire import as_bytes, from_bytes

_CHUNK_BYTES = 25 << 20

Params = torch.nn.Module | Mapping[str, Any] | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@torch.no_grad()
def broadcast_parameters(params: Params, backend: Backend, root: int = 0) -> None:
    """Copy rank ``root``'s values of ``params`` to every rank, in place. Collective; blocks.

    Args:
        params: a module (its parameters and buffers), a ``state_dict()``, or an iterable of tensors or of
            (name, tensor) pairs, of any dtypes, shapes and layouts. What is no tensor is left out.
        backend: the ranks.
        root: the rank whose values are taken.

    Raises:
        ValueError: ``root`` is no rank.
        BackendError: the ranks have other tensors, a rank failed, or the time ran out.
    """
    tensors = _named_tensors(params)
    agree_on_list(backend, "parameters", [f"{name} ({t.dtype}, {tuple(t.shape)})" for name, t in tensors])
    for chunk in _chunks([t for _, t in tensors]):
        packed = torch.cat([as_bytes(t) for t in chunk])
        backend.broadcast_(packed, root, name="parameters")
        if backend.rank != root:
            _unpack(packed, chunk)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, backend: Backend, root: int = 0) -> None:
    """Copy rank ``root``'s optimizer state and options (learning rates and so on) to every rank. Collective; blocks.

    Never steps, creates what a rank lacks, and takes options along when there is no state yet. (Horovod's function of
    this name steps a fresh optimizer with zero gradients, which moves weights under weight decay and starts Adam at
    step 1, and skips the options of stateless optimizers.)

    Raises:
        TypeError: on the root, if an option is neither a plain value nor a tensor; BackendError on the others.
        BackendError: a rank failed, or the time ran out.
    """
    state = optimizer.state_dict() if backend.rank == root else None
    received = backend.broadcast_object(state, root, name="optimizer state")
    load_optimizer_state(optimizer, received)


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a ``state_dict()``, and keep the dtypes in it.

    ``optimizer.load_state_dict`` casts to the parameter's dtype: float32 averages of bfloat16 parameters would lose bits.
    """
    optimizer.load_state_dict(state)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in zip(numbers, params, strict=True):
        if number in state["state"] and p in optimizer.state:
            optimizer.state[p] = _with_dtypes(optimizer.state[p], state["state"][number])


def _with_dtypes(loaded: Any, given: Any) -> Any:
    """``loaded`` with those tensors of ``given`` that have another dtype there, copied to the device of the loaded one."""
    if isinstance(loaded, torch.Tensor) and isinstance(given, torch.Tensor):
        return loaded if loaded.dtype == given.dtype else given.detach().to(loaded.device, copy=True)
    if isinstance(loaded, dict) and isinstance(given, dict):
        for key in loaded.keys() & given.keys():
            loaded[key] = _with_dtypes(loaded[key], given[key])
    elif isinstance(loaded, list) and isinstance(given, list) and len(loaded) == len(given):
        loaded[:] = map(_with_dtypes, loaded, given)
    return loaded


@torch.no_grad()
def average_buffers(model: torch.nn.Module, backend: Backend) -> None:
    """Average the floating-point buffers (running statistics) of ``model`` over the ranks, in place. Collective.

    Each rank's BatchNorm has seen its own samples: this is what makes one model of them, before an evaluation or a
    checkpoint.
    """
    buffers = local_buffers(model)
    for chunk in _chunks([b for _, b in buffers]):
        packed = backend.allreduce_(torch.cat([b.reshape(-1).to(torch.float64) for b in chunk]), name="buffers")
        for buffer, part in zip(chunk, packed.split([b.numel() for b in chunk]), strict=True):
            buffer.copy_(part.view(buffer.shape))


def local_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the floating-point buffers (running statistics): each rank's follow its own samples."""
    return [(name, b) for name, b in model.named_buffers() if b.is_floating_point()]


@contextmanager
def averaged_buffers(model: torch.nn.Module, backend: Backend) -> Iterator[None]:
    """:func:`average_buffers` inside the block; after it each rank has its own values again. Collective."""
    own = [(buffer, buffer.clone()) for _, buffer in local_buffers(model)]
    average_buffers(model, backend)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in own:
                buffer.copy_(before)


def weights_sha256(model: torch.nn.Module | Mapping[str, torch.Tensor]) -> str:
    """Return a hash of a model's, or a ``state_dict()``'s, tensors (parameters, persistent buffers), in name order.

    Equal exactly where they are equal bit for bit.
    """
    digest = hashlib.sha256()
    for name, tensor in _named_tensors(model.state_dict() if isinstance(model, torch.nn.Module) else model):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(as_bytes(tensor).cpu().numpy().data)
    return digest.hexdigest()


def _named_tensors(params: Params) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, torch.nn.Module):
        # Not its state_dict, which leaves out buffers that are not persistent.
        params = {**dict(params.named_parameters()), **dict(params.named_buffers())}
    entries = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    pairs = [entry if isinstance(entry, tuple) else (str(i), entry) for i, entry in enumerate(entries)]
    return [(name, t) for name, t in pairs if isinstance(t, torch.Tensor)]


def _chunks(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """``tensors`` in order, cut where a chunk is full or the device changes."""
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
        # Copy it: a slice of bytes may start at an address that the dtype does not allow.
        tensor.copy_(from_bytes(part.clone(), tensor.dtype, tuple(tensor.shape)))
