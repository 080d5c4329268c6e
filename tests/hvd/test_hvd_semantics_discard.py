"""dualtrain/hvd/README.md#distributedoptimizer: ``load_state_dict`` after backward discards a step, on every rank."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.hvd.worlds import OURS, OURS_2, OURS_3, library

FAILS = r"another rank discarded by load_state_dict\(\) after backward"
LARGE = 20_000  # gradients of 64 KiB or more are copied to their buckets during backward


class Program:
    """Two parameters and an optimizer of the given operation."""

    def __init__(self, hvd, op="Sum", numel=2, **options):
        self.op = op
        self.a, self.b = (torch.nn.Parameter(torch.zeros(numel)) for _ in range(2))
        sgd, named = torch.optim.SGD([self.a, self.b], lr=1.0), [("a", self.a), ("b", self.b)]
        self.optimizer = hvd.DistributedOptimizer(sgd, named, op=getattr(hvd, op), **options)
        self.state = copy.deepcopy(self.optimizer.state_dict())

    def backward(self, factor, uses_b=True):
        (factor * (self.a.sum() + self.b.sum() * uses_b) if uses_b else factor * self.a.sum()).backward()

    def step(self, factor, *, set_to_none=True):
        self.backward(factor)
        self.optimizer.synchronize()
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        gradients = [self.a.grad[-1].item(), self.b.grad[-1].item()]
        self.optimizer.zero_grad(set_to_none)
        return gradients

    def discard(self, *, set_to_none=True):
        self.optimizer.load_state_dict(self.state)
        self.optimizer.zero_grad(set_to_none)


def uneven(backend, op, steps_before, numel, passes):
    """Discard three steps, and check the two steps that follow each discarded step.

    In the first and the third discarded step, only one rank uses both parameters. If a step has two passes, only rank 0
    runs the second pass before the step is discarded.
    """
    with library(backend) as hvd:
        rank, size = hvd.rank(), hvd.size()
        program = Program(hvd, op, numel, backward_passes_per_step=passes)
        expected = [{"Sum": sum(range(1, size + 1)), "Max": size}[op]] * 2
        for _ in range(steps_before):
            for _ in range(passes - 1):
                program.backward(0.0)
            assert program.step(rank + 1.0, set_to_none=False) == expected
        for uses_b in (rank == 0, True, rank == size - 1):
            for _ in range(passes if rank == 0 else 1):
                program.backward(100.0, uses_b)
            program.discard(set_to_none=steps_before != 1)
            for _ in range(2):
                assert program.step(rank + 1.0, set_to_none=steps_before != 1) == expected


@pytest.mark.parametrize(
    ("op", "steps_before", "numel", "passes"),
    [("Sum", 0, 2, 1), ("Sum", 1, LARGE, 1), ("Sum", 2, LARGE, 2), ("Max", 0, 2, 1), ("Max", 1, 2, 2)],
)
@OURS
def test_a_step_that_ranks_have_begun_unevenly_can_be_discarded(real, op, steps_before, numel, passes):
    real(uneven, op, steps_before, numel, passes)


def without_zero_grad(backend, op, numel):
    """Discard a step whose gradients all ranks have sent. Call no ``zero_grad`` before the next step."""
    with library(backend) as hvd:
        rank, size = hvd.rank(), hvd.size()
        program = Program(hvd, op, numel)
        program.step(1.0)
        added = torch.nn.Parameter(torch.zeros(2))
        program.optimizer.add_param_group({"params": [added]})
        added.sum().backward()
        program.backward(100.0)
        hvd.barrier()  # gives the sums time to arrive before the step is discarded
        program.optimizer.load_state_dict(program.optimizer.state_dict())
        assert program.a.grad is program.b.grad is added.grad is None
        assert program.step(rank + 1.0) == [{"Sum": sum(range(1, size + 1)), "Max": size}[op]] * 2


@pytest.mark.parametrize(("op", "numel"), [("Sum", 2), ("Sum", LARGE), ("Max", 2)])
@OURS
def test_gradients_of_a_discarded_step_are_not_added_to_later_ones(real, op, numel):
    real(without_zero_grad, op, numel)


def without_backward(backend, op, steps_before):
    """Discard a step on all ranks, although rank 1 has not run backward."""
    with library(backend) as hvd:
        rank, size = hvd.rank(), hvd.size()
        program = Program(hvd, op)
        expected = [{"Sum": sum(range(1, size + 1)), "Max": size}[op]] * 2
        for _ in range(steps_before):
            program.step(rank + 1.0)
        if rank != 1:
            program.backward(100.0)
        program.discard()
        hvd.barrier()  # rank 1 must know of the discarded step before it begins its next one
        for _ in range(2):
            assert program.step(rank + 1.0) == expected


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("op", ["Sum", "Max"])
@OURS
def test_a_rank_without_a_backward_pass_takes_part_in_a_discarded_step(real, op, steps_before):
    real(without_backward, op, steps_before)


def without_another_backward(backend, op, numel):
    """Discard a step, and call ``step`` without a new backward. Horovod would use the discarded gradients."""
    with library(backend) as hvd:
        program = Program(hvd, op, numel)
        for _ in range(2):  # the first exchange, and a later one
            program.backward(1.0)
            program.optimizer.load_state_dict(program.optimizer.state_dict())
            with pytest.raises(hvd.mpi_ops.HorovodInternalError, match=r"dropped by load_state_dict\(\): call optimizer\."):
                program.optimizer.step()
            program.optimizer.zero_grad()
            assert program.step(1.0) == [hvd.size() if op == "Sum" else 1.0] * 2


@pytest.mark.parametrize(("op", "numel"), [("Sum", 2), ("Sum", LARGE), ("Max", 2)])
@OURS
def test_a_step_without_gradients_after_a_discarded_step_raises_an_error_on_every_rank(real, op, numel):
    real(without_another_backward, op, numel)


def on_one_rank(backend, op, uses_b):
    """Discard a step on rank 0, and take it on the other ranks."""
    with library(backend) as hvd:
        program = Program(hvd, op)
        program.step(1.0)
        program.backward(1.0, uses_b or hvd.rank() == 0)
        hvd.barrier()  # rank 1 runs backward before it can know that rank 0 discards this step

        def continue_():
            if hvd.rank() == 0:
                program.discard()
            else:
                program.optimizer.step()
            for _ in range(1000):  # the report of rank 0 may arrive late
                hvd.allreduce(torch.zeros(1), name="later")

        with pytest.raises(hvd.mpi_ops.HorovodInternalError, match=FAILS):
            continue_()


@pytest.mark.parametrize("uses_b", [True, False])
@pytest.mark.parametrize("op", ["Sum", "Max"])
@OURS_2
def test_a_step_that_only_one_rank_discards_ends_the_world(real, op, uses_b):
    real(on_one_rank, op, uses_b)


def while_joined(backend, op):
    """Discard steps on the last rank before it joins, on the others while it waits, and on all ranks after ``join``."""
    with library(backend) as hvd:
        rank, size = hvd.rank(), hvd.size()
        program = Program(hvd, op)
        for _ in range(2):
            program.step(1.0)
            if rank < size - 1:
                for uses_b in (rank == 0, True):
                    program.backward(100.0, uses_b)
                    program.discard()
                    assert program.step(3.0) == [3.0 * (size - 1 if op == "Sum" else 1)] * 2
            else:
                program.backward(100.0)
                program.discard()
            hvd.join()
            program.backward(100.0, rank == 0)
            program.discard()
            assert program.step(1.0) == [size if op == "Sum" else 1.0] * 2


def before_join(backend):
    """Discard a step on the last rank after the other ranks have joined, then join."""
    with library(backend) as hvd:
        table = torch.nn.Embedding(3, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters())
        for joins_last in (False, hvd.rank() == hvd.size() - 1):
            table(torch.tensor([0])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if joins_last:
                hvd.allreduce(torch.zeros(1), name="joined")  # matched once all other ranks have joined
                table(torch.tensor([0])).sum().backward()
                optimizer.load_state_dict(optimizer.state_dict())
                optimizer.zero_grad()
            hvd.join()
            assert table.weight.grad is None
        table(torch.tensor([1])).sum().backward()
        optimizer.synchronize()
        return table.weight.grad.to_dense().sum(1).tolist()


@OURS
def test_a_rank_may_join_after_it_has_discarded_a_step(real):
    for found in real(before_join):
        assert found == pytest.approx([0, 2, 0])


@pytest.mark.parametrize("op", ["Sum", "Max"])
@OURS_3
def test_steps_can_be_discarded_while_a_rank_has_joined(real, op):
    real(while_joined, op)


def in_the_next_world(backend, op):
    """Discard the last step of a world. In the next world, the last rank joins before its first step."""
    with library(backend) as hvd:
        program = Program(hvd, op)
        program.step(1.0)
        program.backward(1.0)
        program.discard()
        hvd.barrier()  # the first rank that shuts down ends the world for all
    with library(backend) as hvd:
        if hvd.rank() < hvd.size() - 1:
            for _ in range(2):
                program.step(1.0)
        hvd.join()
        program.backward(1.0)
        program.discard()
        assert program.step(1.0) == [hvd.size() if op == "Sum" else 1.0] * 2


@pytest.mark.parametrize("op", ["Sum", "Max"])
@OURS_2
def test_a_discarded_step_does_not_affect_the_next_world(real, op):
    real(in_the_next_world, op)


def of_a_removed_set(backend):
    """Discard a step of an optimizer, remove its process set, then join."""
    with library(backend) as hvd:
        part = hvd.add_process_set([0, 1])
        program = Program(hvd, process_set=part)
        program.step(1.0)
        program.backward(1.0)
        program.discard()
        hvd.remove_process_set(part)
        return hvd.join()


@OURS_3
def test_ranks_may_join_after_a_discarded_step_of_a_removed_set(real):
    found = real(of_a_removed_set)
    assert found == found[:1] * 3
