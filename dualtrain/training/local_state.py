"""What each rank has of its own in training: running statistics of its own samples, and its random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dualtrain.backends import Backend
from dualtrain.data.draws import derived
from dualtrain.state import local_buffers
from dualtrain.training.randomness import random_state, restore_random_state, seed_all


def local_state(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """This rank's own part of the state, as plain values and tensors."""
    buffers = {name: buffer.detach().cpu().clone() for name, buffer in local_buffers(model)}
    return {"buffers": buffers, "random": random_state(device)}


@torch.no_grad()
def restore_local_state(model: nn.Module, ranks: list[dict[str, Any]], backend: Backend) -> None:
    """Gives this rank its part back; in a world of another size the mean of the buffers, and fresh random numbers."""
    same = len(ranks) == backend.size
    for name, buffer in local_buffers(model):
        parts = [rank["buffers"][name] for rank in ranks]
        buffer.copy_(parts[backend.rank] if same else torch.stack([part.double() for part in parts]).mean(0))
    if same:
        restore_random_state(ranks[backend.rank]["random"], backend.device)
    else:
        seed_all(derived("resumed", backend.size, backend.rank, ranks[0]["random"]["torch"].sum().item()))
