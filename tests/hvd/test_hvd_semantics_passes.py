"""dualtrain/hvd/README.md#distributedoptimizer: ``set_backward_passes_per_step`` at any time, on both libraries."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.hvd.worlds import OURS_2, PAIR, library, mean_of_ranks, outcome

#: The initial ``backward_passes_per_step``, the actions (see ``act``), and by how much each step decreases the parameters
#: if the mean of the ranks' factors is 1.
CHANGES = {
    "after the only pass": (1, "b 2 step zero b b step", [1, 110]),
    "after the last of two passes": (2, "b b 1 step zero b step", [11, 100]),
    "fewer, between two passes": (2, "b 1 b step", [11]),
    "more, between two passes": (2, "b 3 b b step", [111]),
    "fewer, before a short step": (2, "b 1 step", [1]),
    "between two steps": (1, "b step zero 2 b b step zero b b step", [1, 110, 11000]),
}


def act(optimizer, params, actions, factor, passes_run=0):
    """Run ``actions``: "b" is a backward pass, "zero" is ``zero_grad()``, and a number is the new number of passes.

    Return, for each step, by how much it has decreased each parameter. With a learning rate of 1, this is the gradient.
    The gradients of the first pass are ``factor``, those of the second are ten times as large, and so on.
    """
    decreases = []
    for action in actions.split():
        if action == "b":
            (sum(p.sum() for p in params) * 10.0**passes_run * factor).backward()
            passes_run += 1
        elif action == "step":
            before = [p.detach().clone() for p in params]
            optimizer.step()
            decreases.append([(old - p)[0].item() for old, p in zip(before, params, strict=True)])
        elif action == "zero":
            optimizer.zero_grad()
        else:
            optimizer.set_backward_passes_per_step(int(action))
    return decreases


def wrapped(hvd, name, passes, **options):
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    named = [(f"{name}{i}", p) for i, p in enumerate(params)]
    inner = torch.optim.SGD(params, lr=1.0)
    return params, hvd.DistributedOptimizer(inner, named, backward_passes_per_step=passes, **options)


def changes(backend):
    with library(backend) as hvd:
        for number, (title, (passes, actions, sums)) in enumerate(CHANGES.items()):
            params, optimizer = wrapped(hvd, f"change{number}", passes)
            found = act(optimizer, params, actions, hvd.rank() + 1)
            wanted = [[each * mean_of_ranks(hvd.size())] * len(params) for each in sums]
            torch.testing.assert_close(found, wanted, msg=lambda m, t=title: f"{t}: {m}")
        params, optimizer = wrapped(hvd, "early", 2)
        act(optimizer, params, "b 1", 1.0)
        assert outcome(optimizer.zero_grad) == "AssertionError"
        optimizer.step()


@PAIR
def test_the_number_of_passes_may_be_changed_at_any_time(real):
    real(changes)


def more_passes_after_the_last(backend):
    """Increase the number of passes after gradients were sent: one more pass is refused; the next step takes two passes."""
    with library(backend) as hvd:
        mean = mean_of_ranks(hvd.size())
        for op in ("Average", "Max"):
            params, optimizer = wrapped(hvd, f"more {op}", 1, op=getattr(hvd, op))
            for _ in range(2):
                act(optimizer, params, "b 2", hvd.rank() + 1)
                with pytest.raises(AssertionError, match="a new value applies from the next step on"):
                    act(optimizer, params, "b", 1.0)
                optimizer.step()
                decreases = act(optimizer, params, "zero b b step", hvd.rank() + 1)
                assert decreases == [[11 * (mean if op == "Average" else hvd.size())] * 2]
                optimizer.zero_grad()
                optimizer.backward_passes_per_step = 1


@OURS_2
def test_more_passes_after_the_last_one_are_refused_until_the_next_step(real):
    real(more_passes_after_the_last)
