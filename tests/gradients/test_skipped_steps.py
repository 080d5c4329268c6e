"""A step that only some ranks take is an error on all ranks, even if they cannot detect that gradients were zeroed."""

from __future__ import annotations

import pytest
import torch

from dualtrain import BackendError
from tests.hvd.worlds import library, worlds
from tests.models_for_tests import mean_gradients, perceptron, same_on_all, sgd, vector_loss
from tests.threads import run_threads


def zero_data(model):
    """Zero the gradients without changing their version counters."""
    for p in model.parameters():
        p.grad.data.zero_()


def zero_part(model):
    model[2].zero_grad()


def zero_nothing(model):
    """Change nothing. Zeroing in place on a GPU looks the same to the reducer, which reads no values there."""


ZERO = pytest.mark.parametrize("zero", [zero_data, zero_part, zero_nothing])


def one_rank_steps(backend, zero):
    model = perceptron()
    optimizer = sgd(model, backend)
    # The ranks normally compare only whether their numbers of steps are odd or even. Before the extra step, the number is
    # odd here, and even in ``steps_alone``.
    for step in range(3):
        vector_loss(model, step + backend.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    vector_loss(model, backend.rank).backward()
    zero(model)
    if backend.rank == 1:
        optimizer.step()
    with pytest.raises(BackendError, match=r"rank 0 has taken 3 .* rank 1 has taken 4: .*optimizer\.zero_grad\(\)"):
        vector_loss(model, backend.rank).backward()
    optimizer.close()


@ZERO
def test_an_extra_step_on_one_rank_causes_an_error_on_all_ranks(zero):
    run_threads(2, one_rank_steps, zero)


@worlds(("torch", 2), ("horovod", 2), ("shm", 2))
def test_an_extra_step_on_one_rank_causes_an_error_on_every_transport(real):
    real(one_rank_steps, zero_data)


def steps_alone(backend):
    """Take a step on rank 2 that ranks 0 and 1 skip."""
    model = perceptron()
    optimizer = sgd(model, backend)
    vector_loss(model, backend.rank).backward()
    if backend.rank == 2:
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(BackendError, match=r"rank 0 has taken 0 .* rank 2 has taken 1: "):
        vector_loss(model, backend.rank).backward()
    optimizer.close()


def test_a_step_that_some_ranks_skip_causes_an_error_on_all_ranks():
    run_threads(3, steps_alone)


def synchronizes_without_backward(backend, zero, op):
    """Synchronize again, with a new backward on rank 0 only: as in Horovod, all ranks take part in every synchronize()."""
    with library(backend) as hvd:
        model = perceptron()
        expected = mean_gradients(model, [lambda m: vector_loss(m, 0), None])
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=getattr(hvd, op))
        vector_loss(model, hvd.rank()).backward()
        optimizer.synchronize()
        zero(model)
        if hvd.rank() == 0:
            vector_loss(model, 0).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        if zero is zero_data and op == "Average":
            for p, grad in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(p.grad, grad)
        assert same_on_all(backend, list(model.parameters()))


@ZERO
@worlds(("torch", 2), ("horovod", 2))
def test_a_second_synchronize_is_collective_as_with_horovod(real, zero):
    for op in ("Average", "Max"):
        real(synchronizes_without_backward, zero, op)
