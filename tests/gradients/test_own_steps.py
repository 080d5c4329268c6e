"""Steps that a wrapped optimizer takes itself, and wrapped optimizers that have an attribute ``optimizer``.

``hvd.DistributedOptimizer`` is tested in ``tests/hvd/test_hvd_semantics_own_steps.py``.
"""

from __future__ import annotations

import gc
from collections import OrderedDict

import pytest
import torch
from torch import nn

from dualtrain import BackendError, DistributedOptimizer
from tests.models_for_tests import same_on_all
from tests.threads import run_threads


class Own(torch.optim.SGD):
    """An optimizer with a method ``go`` that steps. ``step`` calls ``SGD.step``: torch can run step hooks in both."""

    def step(self, closure=None):
        return super().step(closure)

    def go(self, *args):
        return self.step(*args)


class Lookahead(torch.optim.Optimizer):
    """An optimizer that keeps another one in ``optimizer``, and does not call ``Optimizer.__init__``."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def replace_base(self, optimizer):
        self.optimizer = optimizer


def wrapped(backend, make_inner, **options):
    p = nn.Parameter(torch.zeros(2))
    inner = make_inner(p)
    return p, inner, DistributedOptimizer(inner, [("p", p)], backend=backend, **options)


def own(p):
    return Own([p], lr=1.0)


def own_steps(backend):
    mean = (backend.size + 1) / 2
    p, inner, optimizer = wrapped(backend, own)
    for step in (optimizer.go, inner.step):
        (p.sum() * (backend.rank + 1)).backward()
        step()
        optimizer.zero_grad()
    p.grad = torch.full((2,), mean)  # an average that the program has computed itself
    inner.step()
    p.grad = None
    (p.sum() * (backend.rank + 1)).backward()
    optimizer.step()
    inner.step()  # a second step with the same average
    optimizer.zero_grad()
    assert p.tolist() == [-5 * mean] * 2
    p.data.fill_(-2 * mean)  # any value: the next step, with a gradient of zero, must not change it
    (p.sum() * 0).backward()
    p.grad.mul_(2)  # an in-place change, as by clipping; the gradient is zero
    optimizer.go()
    optimizer.zero_grad()
    with optimizer.no_sync():
        (p.sum() * (backend.rank + 1)).backward()
    if backend.size == 1:
        optimizer.go()
    else:
        for step in (optimizer.go, inner.step):
            with pytest.raises(
                RuntimeError, match=r"step\(\) of the wrapped Own was called with this rank's own gradients"
            ):
                step()
        optimizer.synchronize()
        inner.step()
    assert p.tolist() == [-3 * mean] * 2
    optimizer.close()
    inner.zero_grad()
    (p.sum() * (backend.rank + 1)).backward()
    inner.step()
    assert p.tolist() == [-3 * mean - backend.rank - 1] * 2
    del optimizer, step
    gc.collect()
    assert not inner._optimizer_step_pre_hooks


def test_a_step_that_the_wrapped_optimizer_takes_itself_uses_averages_or_is_refused(typical):
    typical(own_steps)


def own_step_of_one_rank(backend):
    """On rank 1 only, call ``step()`` of the wrapped optimizer, which is a second step with the same averages."""
    p, inner, optimizer = wrapped(backend, own)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # from now on, ``SGD.step`` runs the hooks, too
    if backend.rank == 1:
        inner.step()  # not counted, since there is no gradient yet
    p.sum().backward()
    optimizer.step()
    if backend.rank == 1:
        inner.step()
    optimizer.zero_grad()
    with pytest.raises(BackendError, match=r"rank 0 has taken 1 .* rank 1 has taken 2: their weights differ"):
        p.sum().backward()
    optimizer.close()


def test_a_step_of_the_wrapped_optimizer_on_one_rank_causes_an_error_on_all_ranks():
    run_threads(3, own_step_of_one_rank)


class Sam(torch.optim.Optimizer):
    """An optimizer that steps in two methods. The second one calls ``step`` of an optimizer that it keeps, as in SAM."""

    def __init__(self, params):
        super().__init__(params, {})
        self.base = [torch.optim.SGD(self.param_groups, lr=1.0)]

    @torch.no_grad()
    def first_step(self):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad)
            self.state[p] = p.grad.clone()

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p])
        self.base[0].step()

    def step(self, closure):
        closure()
        self.first_step()
        self.zero_grad()
        closure()
        self.second_step()


def steps_of_a_kept_optimizer(backend):
    p, _, optimizer = wrapped(backend, lambda p: Sam([p]))
    mean = (backend.size + 1) / 2

    def closure():
        (p.square().sum() / 2 * (backend.rank + 1)).backward()

    with torch.no_grad():
        p.fill_(1.0)
    closure()
    optimizer.first_step()
    optimizer.zero_grad()
    with optimizer.no_sync():
        closure()
    if backend.size > 1:
        with pytest.raises(RuntimeError, match=r"step\(\) of the wrapped SGD was called with this rank's own gradients"):
            optimizer.second_step()
        with torch.no_grad():
            p.fill_(1 + mean)  # undo the part of second_step() that has run
        optimizer.synchronize()
    optimizer.second_step()
    assert p.tolist() == [1 - mean * (1 + mean)] * 2
    optimizer.zero_grad()
    with torch.no_grad():
        p.fill_(1.0)
    optimizer.step(closure)
    assert p.tolist() == [1 - mean * (1 + mean)] * 2
    assert optimizer.reducer.steps == (2 if backend.size > 1 else 1)  # one rank alone does not count its own steps
    optimizer.close()


def test_steps_of_an_optimizer_that_the_wrapped_one_keeps_are_checked(typical):
    typical(steps_of_a_kept_optimizer)


class Zeroes(torch.optim.SGD):
    """An optimizer whose step drops the gradients at its end."""

    def step(self, closure=None):
        result = super().step(closure)
        self.zero_grad()
        return result


def own_step_that_drops_gradients(backend):
    p, inner, optimizer = wrapped(backend, lambda p: Zeroes([p], lr=1.0))
    p.sum().backward()
    if backend.rank == 1:
        inner.step()
    optimizer.zero_grad()
    with pytest.raises(BackendError, match=r"rank 0 has taken 0 .* rank 1 has taken 1: their weights differ"):
        p.sum().backward()
    optimizer.close()


def test_a_step_that_drops_the_gradients_is_counted():
    run_threads(2, own_step_that_drops_gradients)


def failed_own_step(backend):
    """Go on after a step of the wrapped optimizer that has failed on rank 0 only."""
    p, inner, optimizer = wrapped(backend, own)
    p.sum().backward()
    if backend.rank == 0:
        with pytest.raises(ZeroDivisionError):
            inner.step(lambda: 1 / 0)
    optimizer.step()
    optimizer.zero_grad()
    p.sum().backward()
    inner.step()
    optimizer.zero_grad()
    p.sum().backward()
    optimizer.step()
    assert p.tolist() == [-3.0, -3.0]
    optimizer.close()


def test_steps_are_counted_after_a_step_has_failed():
    run_threads(2, failed_own_step)


def own_closures(backend, passes):
    """Call ``step(closure)`` in a method of the wrapped optimizer, with a loss that differs between the ranks.

    With two passes per step and more than one rank, every rank refuses the step, because the closure runs only one pass.
    """
    p, inner, optimizer = wrapped(backend, own, backward_passes_per_step=passes)

    def closure():
        inner.zero_grad()
        loss = p.sum() * (backend.rank + 1) + backend.rank
        loss.backward()
        return loss

    if passes > 1 and backend.size > 1:
        with pytest.raises(RuntimeError, match="this rank's own gradients"):
            optimizer.go(closure)
        optimizer.synchronize()
    else:
        loss = optimizer.go(closure)
        assert loss.item() == (backend.size - 1) / 2
        assert same_on_all(backend, [p])
        assert inner.step(closure=closure).item() != 0


@pytest.mark.parametrize("passes", [1, 2])
def test_losses_of_the_wrapped_optimizers_own_steps_are_averaged(typical, passes):
    typical(own_closures, passes)


def functions_of_arguments(backend):
    """Give ``step`` of the wrapped optimizer a function that is not a closure."""

    class Losses(torch.optim.SGD):
        def step(self, function, *args):
            return function(*args)

        def go(self):
            return self.step(torch.add, torch.ones(1), torch.ones(1))

    _, _, optimizer = wrapped(backend, lambda p: Losses([p], lr=1.0))
    assert optimizer.go().item() == 2


def test_a_function_that_is_not_a_closure_gets_its_arguments(typical):
    typical(functions_of_arguments)


def lookaheads(backend):
    p, inner, optimizer = wrapped(backend, lambda p: Lookahead(torch.optim.SGD([p], lr=1.0)))
    base = inner.optimizer
    assert optimizer.optimizer is base
    (p.sum() * (backend.rank + 1)).backward()
    optimizer.step()
    assert p.tolist() == [-(backend.size + 1) / 2] * 2
    other = torch.optim.SGD([p], lr=2.0)
    optimizer.optimizer = other
    assert inner.optimizer is other
    optimizer.replace_base(base)
    assert optimizer.optimizer is base
    plain = wrapped(backend, own)
    assert plain[2].optimizer is plain[1]


@pytest.mark.parametrize(("pre_hooks", "post_hooks"), [({}, {}), (OrderedDict(), None)])
def test_an_optimizer_without_dictionaries_for_step_hooks_is_wrapped(pre_hooks, post_hooks):
    def steps(backend):
        def make(p):
            inner = Lookahead(torch.optim.SGD([p], lr=1.0))
            inner._optimizer_step_pre_hooks = pre_hooks
            if post_hooks is not None:
                inner._optimizer_step_post_hooks = post_hooks
            return inner

        p, _, optimizer = wrapped(backend, make)
        p.sum().backward()
        optimizer.step()
        assert p.tolist() == [-1, -1]

    run_threads(1, steps)


def test_the_attribute_optimizer_comes_from_the_wrapped_optimizer_if_it_has_one(typical):
    typical(lookaheads)
