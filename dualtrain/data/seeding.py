"""Seeding of the global random number generators while one sample is read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from dualtrain.data.draws import sample_seed


@contextmanager
def seeded(seed: int, number: int) -> Iterator[None]:
    """Seed torch (CPU), ``random`` and numpy from (seed, sample index), and restore their states afterwards.

    ``torch.manual_seed`` is not used because it would also seed the GPUs, whose generators the model uses.
    """
    value = sample_seed(seed, number)
    states = torch.default_generator.get_state(), random.getstate(), numpy.random.get_state()
    torch.default_generator.manual_seed(value)
    random.seed(value)
    numpy.random.seed(value % 2**32)
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])
