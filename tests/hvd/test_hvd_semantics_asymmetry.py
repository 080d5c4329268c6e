"""dualtrain/hvd/README.md#matching-and-errors: optimizers used in different orders, or different numbers of times."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.hvd.worlds import EVERY, OURS_2, library, mean_of_ranks, sum_of_ranks


def wrapped(hvd, lr=1.0, name="p"):
    p = nn.Parameter(torch.zeros(2))
    return p, hvd.DistributedOptimizer(torch.optim.SGD([p], lr), [(name, p)])


def uneven_backwards(backend, kind):
    """In each step, run one or two backward passes on each rank, and one exchange.

    If ``kind`` is "some" or "alternating", only one rank has a gradient of ``b``.
    """
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], 1.0), [(f"{kind}.a", a), (f"{kind}.b", b)])
        for step in range(3):
            has_b = {"some": me == 0, "alternating": me == step % size, "joint": True}[kind]
            if kind == "joint" and me == 0:
                ((a + b) * (me + 1)).sum().backward()
            else:
                (a * (me + 1)).sum().backward()
                if has_b:
                    (b * (me + 1)).sum().backward()
            optimizer.step()
            sum_of_b = {"some": 1, "alternating": step % size + 1, "joint": sum_of_ranks(size)}[kind]
            torch.testing.assert_close(a.grad, torch.tensor([mean_of_ranks(size)]))
            torch.testing.assert_close(b.grad, torch.tensor([sum_of_b / size]))
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["some", "alternating", "joint"])
@EVERY
def test_ranks_may_run_different_numbers_of_backward_passes(real, kind):
    real(uneven_backwards, kind)


def any_order(backend):
    """Run two optimizers in one order on rank 0, and in the reverse order on all other ranks.

    Then run one more backward pass. Rank 0 calls allreduce before this pass, and all other ranks call it after the pass.
    Do all of this three times.
    """
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        pairs = [wrapped(hvd, lr=1.0, name=f"order.{i}") for i in range(2)]
        for step in range(3):
            order = pairs if me == 0 else pairs[::-1]
            for p, _ in order:
                (p * (me + 1)).sum().backward()
            for _, optimizer in order:
                optimizer.step()
                optimizer.zero_grad()
            log = torch.full((1,), me + 1.0)
            p, optimizer = pairs[0]
            if me == 0:
                hvd.allreduce(log, name=f"log {step}")
            p.sum().backward()
            if me > 0:
                hvd.allreduce(log, name=f"log {step}")
            optimizer.step()
            optimizer.zero_grad()
        assert pairs[1][0][0].item() == pytest.approx(-3 * mean_of_ranks(size))


@EVERY
def test_ranks_may_use_two_optimizers_in_different_orders(real):
    real(any_order)


def second_optimizer(backend):
    """On rank 0 only, make an additional optimizer, whose parameter has the same name, and never use it."""
    with library(backend) as hvd:
        if hvd.rank() == 0:
            wrapped(hvd, name="same")
        p, optimizer = wrapped(hvd, name="same")
        p.sum().backward()
        optimizer.step()
        assert p.grad.eq(1).all()


@EVERY
def test_an_unused_optimizer_on_only_one_rank_does_not_affect_other_optimizers(real):
    real(second_optimizer)


def many_optimizers(backend):
    """Make and free many optimizers. Their channels must be closed, because each channel has sockets and threads."""
    with library(backend) as hvd:
        for _ in range(24):
            p, optimizer = wrapped(hvd, name="passing")
            p.sum().backward()
            optimizer.step()
        return len((channels := hvd.mpi_ops._basics.engine().channels).sets) + len(channels.gradients)


@OURS_2
def test_channels_of_freed_optimizers_are_closed(real):
    assert max(real(many_optimizers)) <= 20


def different_thresholds(backend):
    """Set a different HOROVOD_FUSION_THRESHOLD on rank 0, so that its buckets would differ from those of other ranks."""
    with library(backend, HOROVOD_FUSION_THRESHOLD="0" if backend.rank == 0 else "1000") as hvd:
        p, optimizer = wrapped(hvd, name="threshold")
        p.sum().backward()
        message = "options differ: buckets of at most 0 bytes on rank 0, buckets of at most 1000 bytes on rank 1"
        with pytest.raises(hvd.mpi_ops.HorovodInternalError, match=message):
            optimizer.step()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@OURS_2
def test_different_bucket_sizes_cause_an_error_on_all_ranks(real):
    real(different_thresholds)
