"""Weights that differ between the ranks after a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dualtrain import BackendError, DistributedOptimizer, broadcast_parameters
from tests.threads import run_threads


def drifts(backend, cause):
    """Train with a ``cause`` of different weights, and go on after the error."""
    p, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    factor = backend.rank + 1
    if cause == "start":
        p.data.mul_(factor)
    inner = torch.optim.SGD([p], lr=factor if cause == "rate" else 1.0)
    optimizer = DistributedOptimizer(inner, [("p", p)], backend=backend)
    (p.sum() + other.sum() * factor).backward()
    if cause == "clipping":
        nn.utils.clip_grad_norm_([p, other], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(BackendError, match=r"parameter 'p' differs between the ranks 0 and 1 after step 1: call "):
        p.sum().backward()
    optimizer.zero_grad()
    p.data.fill_(1.0)
    p.sum().backward()
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("cause", ["start", "rate", "clipping"])
def test_different_weights_cause_an_error_on_all_ranks(cause):
    run_threads(2, drifts, cause)


def rounds(backend):
    """Differ by rounding, and perturb the weights on each rank before the gradients are averaged, as SAM does."""
    p = nn.Parameter(torch.ones(3))
    optimizer = DistributedOptimizer(torch.optim.SGD([p], lr=0.1), [("p", p)], backend=backend)
    p.data.mul_(1 + backend.rank * 1e-6)
    for _ in range(5):
        p.data.add_(backend.rank)
        p.sum().backward()
        p.data.sub_(backend.rank)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


def test_rounding_and_changes_between_two_steps_cause_no_error():
    run_threads(3, rounds)


def becomes_equal(backend):
    """Take a step before the weights are made equal, to make the optimizer's state, for example."""
    p = nn.Parameter(torch.ones(3) + backend.rank)
    optimizer = DistributedOptimizer(torch.optim.Adam([p]), [("p", p)], backend=backend)
    for _ in range(3):
        p.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        broadcast_parameters({"p": p.data}, backend)
    optimizer.close()


def test_parameters_that_are_equal_again_cause_no_error():
    run_threads(2, becomes_equal)
