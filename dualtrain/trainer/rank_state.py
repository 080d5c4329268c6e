"""State that may differ between ranks: random number generators, buffers (running statistics) and extra state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import nn

from dualtrain.backends import Backend
from dualtrain.backends.wire import shares_elements
from dualtrain.data.draws import derived
from dualtrain.data.seeding import seed_cpu


def seed_all(seed: int) -> None:
    """Seed torch (all devices), numpy and ``random``."""
    torch.manual_seed(seed)
    seed_cpu(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of torch's generators (CPU and ``device``), numpy's and Python's, as plain values and tensors."""
    drawn: Any = numpy.random.get_state()
    kind, keys, position, has_gauss, gauss = drawn
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss],
        "python": random.getstate(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what :func:`random_state` returned."""
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, gauss))
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def local_state(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Return this rank's state: CPU copies of its buffers, its modules' extra state, and :func:`random_state`."""
    extra = {name: module.get_extra_state() for name, module in with_extra_state(model).items()}
    return {"buffers": buffers_of(model), "extra": extra, "random": random_state(device)}


def with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that override both ``get_extra_state`` and ``set_extra_state``, by name."""
    plain = nn.Module.get_extra_state, nn.Module.set_extra_state
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not plain[0] and type(module).set_extra_state is not plain[1]
    }


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return CPU copies of this rank's buffers by name, including buffers that are not persistent."""
    return {name: buffer.detach().cpu().clone() for name, buffer in module.named_buffers()}


def restore_local_state(model: nn.Module, ranks: list[dict[str, Any]], backend: Backend) -> None:
    """Restore this rank's entry of ``ranks``.

    If the state is of a different world size, seed the generators anew, and use rank 0's extra state; for buffers, see
    :func:`restore_buffers`.
    """
    restore_buffers(model, [rank["buffers"] for rank in ranks], backend, trained_ranks(ranks))
    same = len(ranks) == backend.size
    own = ranks[backend.rank if same else 0]
    modules = dict(model.named_modules())
    for name, extra in own.get("extra", {}).items():  # not in states of versions before 0.3.0
        modules[name].set_extra_state(extra)
    if same:
        restore_random_state(own["random"], backend.device)
    else:
        seed_all(derived("resumed", backend.size, backend.rank, ranks[0]["random"]["torch"].sum().item()))


def trained_ranks(ranks: list[dict[str, Any]]) -> list[bool]:
    """Return, for each rank's state, whether the rank had computed a batch; true in states of versions before 0.3.0."""
    return [rank.get("trained", True) for rank in ranks]


@torch.no_grad()
def restore_buffers(
    module: nn.Module, ranks: list[dict[str, torch.Tensor]], backend: Backend, trained: Sequence[bool] = ()
) -> None:
    """Restore this rank's entry of ``ranks``.

    If the state is of a different world size, each floating-point buffer that has the same shape in all entries gets the
    average of these entries, and every other buffer gets the value in the first entry. Entries of ranks for which
    ``trained`` is false are ignored, unless it is false for all ranks.
    """
    same = len(ranks) == backend.size
    if not same and any(trained):
        ranks = [rank for rank, counts in zip(ranks, trained, strict=True) if counts]
    modules = dict(module.named_modules())  # TorchScript modules do not support get_submodule()
    # Loop over the state's buffers, not the module's: states of versions before 0.3.0 have only floating-point buffers.
    for name, value in ranks[backend.rank if same else 0].items():
        path, _, key = name.rpartition(".")
        owner = modules[path]
        buffer = getattr(owner, key, None)
        parts = [rank[name] for rank in ranks if name in rank and rank[name].shape == value.shape]
        if not same and value.is_floating_point() and len(parts) == len(ranks):
            value = torch.stack([part.double() for part in parts]).mean(0).to(value.dtype)
        if buffer is None:
            # ``forward`` makes this buffer. It is not persistent: otherwise loading the model's state would have failed.
            owner.register_buffer(key, value.to(backend.device), persistent=False)
        elif value.shape == buffer.shape and not shares_elements(buffer):
            buffer.copy_(value)
        else:  # a buffer that grows in forward, or one that cannot be written in place
            setattr(owner, key, value.to(buffer.device, buffer.dtype))
