"""Statements of dualtrain/hvd/README.md#gradients-of-collectives, on Horovod itself and on ``dualtrain.hvd``."""

from __future__ import annotations

import math

import pytest
import torch

from tests.hvd.worlds import EVERY, OURS_2, OURS_3, library, mean_of_ranks, sum_of_ranks


def gradient(call, x, output_gradient):
    """Return the gradient of ``x`` if each element of the output has the gradient ``output_gradient``."""
    x = x.clone().requires_grad_()
    results = call(x)
    results = list(results) if isinstance(results, list | tuple) else [results]
    torch.autograd.backward(results, [torch.full_like(r, output_gradient) for r in results])
    return x.grad.tolist()


def table(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        mean, total, per_rank = mean_of_ranks(size), sum_of_ranks(size), [r + 1.0 for r in range(size)]
        one, many = torch.tensor([me + 1.0]), torch.ones(size)
        root = [mean if me == 1 else 0.0]
        wanted = {
            "allreduce sum": (one, lambda x: hvd.allreduce(x, op=hvd.Sum), [total]),
            "allreduce average": (one, hvd.allreduce, [mean]),
            "allreduce min": (one, lambda x: hvd.allreduce(x, op=hvd.Min), [1]),
            "allreduce max": (one, lambda x: hvd.allreduce(x, op=hvd.Max), [size]),
            "allreduce product": (one, lambda x: hvd.allreduce(x, op=hvd.Product), [math.factorial(size)]),
            "factors": (
                one,
                lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
                [1.5 * total],
            ),
            "grouped sum": (one, lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum), [2 * total]),
            "grouped average": (one, lambda x: hvd.grouped_allreduce([x, 3 * x]), [4 * mean]),
            "allgather": (one, hvd.allgather, [mean]),
            "allgather uneven": (torch.ones(me + 1), hvd.allgather, [mean] * (me + 1)),
            "grouped allgather": (one, lambda x: hvd.grouped_allgather([x, 2 * x]), [3 * mean]),
            "broadcast": (one, lambda x: hvd.broadcast(x, 1), root),
            "reducescatter sum": (many, lambda x: hvd.reducescatter(x, op=hvd.Sum), [size * r for r in per_rank]),
            "reducescatter average": (many, hvd.reducescatter, per_rank),
            "reducescatter uneven": (torch.ones(size + 1), hvd.reducescatter, [1.0, *per_rank]),
            "scatter factors": (
                many,
                lambda x: hvd.reducescatter(x, op=hvd.Sum, postscale_factor=3.0),
                [3 * size * r for r in per_rank],
            ),
            "grouped reducescatter": (
                many,
                lambda x: hvd.grouped_reducescatter([x, 2 * x], op=hvd.Sum),
                [3 * size * r for r in per_rank],
            ),
            "alltoall": (many, hvd.alltoall, per_rank),
            "alltoall splits": (
                torch.ones(2 * size),
                lambda x: hvd.alltoall(x, [2] * size)[0],
                [r for r in per_rank for _ in "12"],
            ),
        }
        wrong = {}
        for title, (x, call, expected) in wanted.items():
            found = gradient(call, x, me + 1.0)
            if found != pytest.approx(expected):
                wrong[title] = found, expected
        assert not wrong
        # Horovod cannot run these cases. Its gradient of this alltoall lacks the rows that were not sent, so torch raises
        # an error. It cannot gather a scalar, and has no Compression.bf16. Without fusion, its reducescatter with a
        # prescale_factor fails.
        if backend.name != "horovod":
            kept = gradient(lambda x: hvd.alltoall(x, [1] * size)[0], torch.ones(size + 2), me + 1.0)
            assert kept == [*per_rank, 0, 0]
            assert gradient(hvd.allgather, torch.tensor(1.0), me + 1.0) == mean
            factors = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0}
            found = gradient(lambda x: hvd.reducescatter(x, **factors), many, me + 1.0)
            assert found == [1.5 * size * r for r in per_rank]
            compress = {"compression": hvd.Compression.bf16, "op": hvd.Sum}
            assert gradient(lambda x: hvd.allreduce(x, **compress), one, me + 1.0) == [total]


@EVERY
def test_backward_works_through_every_operation(fresh):
    fresh(table)


def of_sets(backend):
    with library(backend) as hvd:
        me, pair = hvd.rank(), hvd.add_process_set([0, 2])
        if pair.included():
            options = {"process_set": pair}
            one, many = torch.tensor([me + 1.0]), torch.ones(2)
            wanted = {
                "allreduce": (one, lambda x: hvd.allreduce(x, op=hvd.Sum, **options), [4]),
                "average": (one, lambda x: hvd.allreduce(x, **options), [2]),
                "grouped": (one, lambda x: hvd.grouped_allreduce([x], op=hvd.Sum, **options), [4]),
                "allgather": (one, lambda x: hvd.allgather(x, **options), [2]),
                "broadcast": (one, lambda x: hvd.broadcast(x, 2, **options), [2.0 if me == 2 else 0.0]),
                "reducescatter": (many, lambda x: hvd.reducescatter(x, op=hvd.Sum, **options), [2, 6]),
                "scattered average": (many, lambda x: hvd.reducescatter(x, **options), [1, 3]),
                "alltoall": (many, lambda x: hvd.alltoall(x, **options), [1, 3]),
            }
            found = {title: gradient(call, x, me + 1.0) for title, (x, call, _) in wanted.items()}
            assert found == {title: expected for title, (_, _, expected) in wanted.items()}
        hvd.barrier()


@OURS_3
def test_backward_works_through_operations_in_a_process_set(real):
    real(of_sets)


def through_a_model(backend):
    """Differentiate through a call in the middle of a model, and twice through a broadcast.

    Integer results have no gradient.
    """
    with library(backend) as hvd:
        size = hvd.size()
        weight = torch.ones(2, 2, requires_grad=True)
        out = hvd.allreduce(torch.ones(1, 2) @ weight, op=hvd.Sum).square().sum()
        out.backward()
        assert weight.grad.tolist() == [[4.0 * size * size] * 2] * 2
        assert not hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Sum).requires_grad
        x = torch.full((1,), hvd.rank() + 1.0, requires_grad=True)
        (first,) = torch.autograd.grad(hvd.broadcast(x, 1).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert (first.item(), second.item()) == ((12.0, 12.0 / size) if hvd.rank() == 1 else (0.0, 0.0))


@EVERY
def test_backward_works_through_an_allreduce_inside_a_model(fresh):
    fresh(through_a_model)


def complex_gradients(backend):
    with library(backend) as hvd:
        for call in (hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0)):
            x = torch.full((2,), 1 + 2j, requires_grad=True)
            result = call(x)
            assert result.requires_grad
            (result * (1 - 1j)).real.sum().backward()
            real = torch.full((2,), 1.0, requires_grad=True)
            (call(real) * 1.0).sum().backward()
            assert torch.equal(x.grad, real.grad * (1 + 1j))


@OURS_2
def test_complex_tensors_have_gradients(real):
    real(complex_gradients)
