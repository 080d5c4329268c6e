"""dualtrain/hvd/README.md#distributedoptimizer: steps in methods of the wrapped optimizer, and without the wrapper."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.gradients.test_own_steps import Lookahead, Own
from tests.hvd.worlds import OURS_2, PAIR, library, mean_of_ranks


def own_steps(backend):
    """Call ``go`` of the wrapper, which calls ``step``. Then synchronize, and call ``step`` of the wrapped optimizer."""
    with library(backend) as hvd:
        p = nn.Parameter(torch.zeros(2))
        inner = Own([p], lr=1.0)
        optimizer = hvd.DistributedOptimizer(inner, [("p", p)])
        factor, mean = hvd.rank() + 1, mean_of_ranks(hvd.size())
        (p.sum() * factor).backward()
        optimizer.go()
        assert p.tolist() == [-mean] * 2
        optimizer.zero_grad()
        (p.sum() * factor).backward()
        optimizer.synchronize()
        inner.step()
        assert p.tolist() == [-2 * mean] * 2


@PAIR
def test_a_method_that_calls_step_combines_gradients_first(real):
    real(own_steps)


def without_wrapper(backend):
    with library(backend) as hvd:
        for op in ("Average", "Max", "Adasum"):
            p = nn.Parameter(torch.zeros(2))
            inner = Own([p], lr=1.0)
            optimizer = hvd.DistributedOptimizer(inner, [(op, p)], op=getattr(hvd, op))

            def closure(p=p):
                p.grad = None
                p.sum().backward()

            for call in (inner.step, lambda: inner.step(closure)):  # noqa: B023
                for _ in range(2):
                    if op == "Adasum" or call == inner.step:
                        p.sum().backward()
                    with pytest.raises(RuntimeError, match=r"step\(\) of the wrapped Own was called with this rank"):
                        call()
                    assert p.tolist() == [0, 0]
                    optimizer.synchronize()
            p.grad = torch.ones(2)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # step() warns, because synchronize() was called before
                optimizer.step()
            assert p.tolist() == [-1, -1]
            optimizer.close()
            inner.step()
            assert p.tolist() == [-2, -2]


@OURS_2
def test_a_step_without_the_wrapper_is_refused_if_gradients_are_not_combined(real):
    real(without_wrapper)


def added_after_close(backend):
    """Close an optimizer whose parameters are all frozen, then add others: backward keeps this rank's own gradients."""
    with library(backend) as hvd:
        frozen, p = nn.Parameter(torch.zeros(2), requires_grad=False), nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([frozen], lr=1.0), [("frozen", frozen)])
        optimizer.close()
        optimizer.add_param_group({"params": [p]})
        for _ in range(2):
            (p.sum() * (hvd.rank() + 1)).backward()
            assert p.grad.tolist() == [hvd.rank() + 1] * 2
            optimizer.zero_grad()


@OURS_2
def test_parameters_added_after_close_are_not_averaged(real):
    real(added_after_close)


def lookaheads(backend):
    """Wrap an optimizer that has a different optimizer in the attribute ``optimizer``."""
    with library(backend) as hvd:
        p = nn.Parameter(torch.zeros(2))
        inner = Lookahead(torch.optim.SGD([p], lr=1.0))
        base = inner.optimizer
        optimizer = hvd.DistributedOptimizer(inner, [("p", p)])
        assert optimizer.optimizer is base
        (p.sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
        assert p.tolist() == [-mean_of_ranks(hvd.size())] * 2
        optimizer.replace_base(None)  # a method of Lookahead
        assert inner.optimizer is None


@OURS_2
def test_an_attribute_named_optimizer_of_the_wrapped_optimizer_is_returned(real):
    real(lookaheads)
