"""Recognize DTensors: the shards of FSDP2 and of tensor parallelism."""

from __future__ import annotations

import torch


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor. Does not import its class, which takes time."""
    return any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__)
