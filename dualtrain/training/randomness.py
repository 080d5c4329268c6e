"""Random numbers: the same first weights on every rank, draws of its own after that, and states that can be kept."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def seed_all(seed: int) -> None:
    """Seeds torch (all devices), numpy and ``random``."""
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of torch's, numpy's and Python's generators, as plain values and tensors."""
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
    """Goes on with the draws where :func:`random_state` was called."""
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, gauss))
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
