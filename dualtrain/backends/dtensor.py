"""Recognize DTensors: the shards of FSDP2 and of tensor parallelism."""

from __future__ import annotations

from functools import cache

import torch


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor. Does not import its class, which takes time."""
    return _is_dtensor_class(type(tensor))


@cache
def _is_dtensor_class(cls: type) -> bool:
    return any(base.__name__ == "DTensor" for base in cls.__mro__)
