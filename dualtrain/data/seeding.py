"""Seeding of the global random number generators of the CPU: torch's, numpy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from dualtrain.data.draws import sample_seed


def seed_cpu(value: int) -> None:
    """Seed the generators with ``value``, at least 0. ``torch.manual_seed`` takes longer, and also seeds all GPUs."""
    torch.default_generator.manual_seed(value)
    numpy.random.seed(value % 2**32)
    random.seed(value)


@contextmanager
def seeded(seed: int, number: int) -> Iterator[None]:
    """Seed the generators from (seed, sample index) for the block, and restore their states afterwards."""
    states = torch.default_generator.get_state(), random.getstate(), numpy.random.get_state()
    seed_cpu(sample_seed(seed, number))
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])
