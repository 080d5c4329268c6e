"""dualtrain/hvd/README.md#join: a rank that has no data left joins, and the other ranks continue."""

from __future__ import annotations

import gc
import math
import time
from unittest import mock

import pytest
import torch

from tests.hvd.worlds import EVERY, OURS, OURS_2, OURS_3, check, library, same, sum_of_ranks

FAILS = "HorovodInternalError"


def identities(backend):
    """Join on the last rank, and check results on the other ranks (inputs 5, 6, …). Return the rank that joined last."""
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        if me == size - 1:
            return hvd.join()
        values = [5.0 + r for r in range(size - 1)]
        total, product = sum(values), 5.0 * 6.0 ** (size - 2)
        x = torch.tensor([values[me]])

        def reduce(x, title, **options):
            return lambda: hvd.allreduce(x, name=title, **options)

        check(
            hvd,
            same("average divides by all", reduce(x, "average"), [pytest.approx(total / size)]),
            same("negative", reduce(-x, "negative"), [pytest.approx(-total / size)]),
            same("sum", reduce(x, "sum", op=hvd.Sum), [total]),
            same("factors", reduce(x, "factors", op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0), [6 * total]),
            same("integers", reduce(x.int(), "ints", op=hvd.Sum), [total]),
            # For a joined rank, Horovod contributes zeros to minima, maxima and products too, which makes them wrong.
            ("min", reduce(x, "min", op=hvd.Min), [0], [5]),
            ("max", reduce(-x, "max", op=hvd.Max), [0], [-5]),
            ("product", reduce(x, "product", op=hvd.Product), [0], [product]),
            ("scaled min", reduce(x, "scaled", op=hvd.Min, prescale_factor=-1.0), [min(0, -values[-1])], [-values[-1]]),
            ("int min", reduce(x.int(), "int min", op=hvd.Min), [0], [5]),
            ("int product", reduce(x.long(), "int product", op=hvd.Product), [0], [product]),
            same("group", lambda: list(hvd.grouped_allreduce([x, x.double()], name="g", op=hvd.Sum)), [[total]] * 2),
            same("allgather", lambda: hvd.allgather(x, name="others"), FAILS),
            same("broadcast", lambda: hvd.broadcast(x, 0, name="others"), FAILS),
            same("alltoall", lambda: hvd.alltoall(x, [0] * size, name="others"), FAILS),
            same("reducescatter", lambda: hvd.reducescatter(x, name="others"), FAILS),
        )
        if backend.name != "horovod":
            check(
                hvd,
                same("group min", lambda: hvd.grouped_allreduce([x, -x], op=hvd.Min), [[5], [-values[-1]]]),
                same("bool", lambda: hvd.allreduce(x > 0, op=hvd.Min), [True]),
                same("half", lambda: hvd.allreduce(x.half(), op=hvd.Max), [values[-1]]),
                same("float8", lambda: hvd.allreduce(x.to(torch.float8_e4m3fn), op=hvd.Min).float(), [5]),
                same("infinite", lambda: hvd.allreduce((x / 0).to(torch.float8_e5m2), op=hvd.Min).float(), [math.inf]),
                same("adasum", lambda: hvd.allreduce(x[:1] * 0 + 2, op=hvd.Adasum), [2]),
                same("grouped gather", lambda: hvd.grouped_allgather([x]), FAILS),
                same("objects", lambda: hvd.allgather_object(1), FAILS),
            )
            hvd.barrier()  # a barrier of the ranks that have not joined
        return hvd.join()


@EVERY
def test_joined_ranks_contribute_the_identity_element_in_dualtrain_and_zeros_in_horovod(real):
    last = real(identities)
    assert last == last[:1] * real.size
    assert last[0] < real.size - 1
    if real.name == "horovod":
        real.leave()  # after a join, Horovod's unnamed calls hang in this world


def afterwards(backend):
    """Join several times; all ranks get an equal result. Check later unnamed calls, and the divisor of averages."""
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        x = torch.tensor([me + 1.0])
        for round_ in range(3):
            for _ in range(round_ + (me != round_ % size)):
                hvd.allreduce(x)
            last = hvd.join()
            assert hvd.allgather(torch.tensor([last])).tolist() == [last] * size
            assert hvd.allreduce(x, op=hvd.Sum).item() == sum_of_ranks(size)
        # A call is pending when its rank joins. It completes when the other ranks make the same call.
        if me == 0:
            handle = hvd.allreduce_async(x, op=hvd.Sum)
            hvd.join()
            assert hvd.synchronize(handle).item() == sum_of_ranks(size)
        else:
            assert hvd.allreduce(x, op=hvd.Sum).item() == sum_of_ranks(size)
            hvd.join()
        # An average divides by the number of all ranks, or of the ranks that have not joined.
        for divide_by, divisor in [("initial", size), ("active", size - 1)]:
            if me == 0:
                hvd.join(divide_by=divide_by)
            else:
                found = hvd.allreduce(x).item(), hvd.grouped_allreduce([x])[0].item()
                assert found == pytest.approx([(sum_of_ranks(size) - 1) / divisor] * 2)
                hvd.join(divide_by=divide_by)
        with pytest.raises(ValueError, match="divide_by"):
            hvd.join(divide_by="none")
        assert hvd.allreduce(x, op=hvd.Sum).item() == sum_of_ranks(size)


@OURS
def test_ranks_can_join_repeatedly_and_make_calls_afterwards(real):
    real(afterwards)


def uneven_steps(backend, divide_by, op_name, passes, on_cpu=True):
    """Take 2 + r steps on rank r. A rank joins after its last step, and contributes zeros to later steps."""
    # With on_cpu=False, the optimizer runs its code for GPUs: it reads the number of joined ranks only if a rank may have
    # joined.
    with library(backend) as hvd, mock.patch("dualtrain.hvd.channel_reducer._are_on_cpu", return_value=on_cpu):
        me, size = hvd.rank(), hvd.size()
        p = torch.nn.Parameter(torch.zeros(3))
        q = torch.nn.Parameter(torch.zeros(2))
        # With the predivide factor ``size``, the factor after the sum is 1 for averages, as for sums.
        options = {"op": getattr(hvd, op_name), "gradient_predivide_factor": size if op_name == "Average" else 1.0}
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p, q], 1.0), [("p", p), ("q", q)], backward_passes_per_step=passes, **options
        )
        expected = torch.zeros(3)
        for step in range(size + 1):
            active = [r for r in range(size) if step < 2 + r]
            if me in active:
                for _ in range(passes):
                    ((me + 1.0) * p.sum() + q.sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
                divisor = {"Sum": 1, "Average": size if divide_by == "initial" else len(active)}[op_name]
                expected -= passes * sum(r + 1.0 for r in active) / divisor
                torch.testing.assert_close(p.detach(), expected)
        last = hvd.join(divide_by=divide_by)
        assert last == size - 1 if size == 2 else last in range(size)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
        hvd.broadcast_parameters([("p", p), ("q", q)], last)
        # After the joins, all ranks step together again.
        (p.sum() * 0 + q.sum()).backward()
        optimizer.step()
        assert hvd.allgather(p.detach()[None]).std(0).max() == 0


@pytest.mark.parametrize(
    ("divide_by", "op", "passes", "on_cpu"),
    [
        ("initial", "Average", 1, True),
        ("active", "Average", 2, True),
        ("active", "Sum", 1, True),
        ("active", "Average", 1, False),
        ("initial", "Average", 2, False),
    ],
)
@OURS
def test_optimizers_step_while_a_rank_has_joined(real, divide_by, op, passes, on_cpu):
    real(uneven_steps, divide_by, op, passes, on_cpu)


def equal_names(backend, ops, pass_order):
    """Join on rank 1 without any step. The other ranks step two optimizers of parameters with the same name.

    Each optimizer steps after two backward passes; ``pass_order`` is the order of these passes. After ``join``, all ranks
    step both optimizers.
    """
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        params = p, q = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        first, second = (
            hvd.DistributedOptimizer(torch.optim.SGD([x], 1.0), [("p", x)], backward_passes_per_step=2, op=getattr(hvd, op))
            for x, op in zip(params, ops, strict=True)
        )

        def step(order):
            for i, name in enumerate(order):
                (p.sum() if name == "p" else 10 * q.sum()).backward()
                if name in order[:i]:
                    optimizer = first if name == "p" else second
                    optimizer.step()
                    optimizer.zero_grad()

        if me != 1:
            step(pass_order)
        hvd.join()
        before = p.tolist() + q.tolist()
        step("pqpq")
        a, b = (2 * (size if op == "Sum" else 1) for op in ops)
        assert p.tolist() + q.tolist() == [x - a for x in before[:3]] + [x - 10 * b for x in before[3:]]


@pytest.mark.parametrize(
    ("ops", "pass_order"),
    [(("Sum", "Sum"), "qqpp"), (("Sum", "Sum"), "pqqp"), (("Max", "Max"), "qqpp"), (("Sum", "Max"), "qqpp")],
)
@OURS
def test_a_joined_rank_takes_part_with_the_optimizer_that_the_other_ranks_use(real, ops, pass_order):
    real(equal_names, ops, pass_order)


def after_a_join(backend):
    """Join on rank 1 without any step. Then step a new optimizer of parameters with the same name on all ranks."""
    with library(backend) as hvd:
        p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        old = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], op=hvd.Max)
        train(p, old, 0 if hvd.rank() == 1 else 1)
        hvd.join()
        train(q, hvd.DistributedOptimizer(torch.optim.SGD([q], lr=1.0), [("p", q)], op=hvd.Max), 1)
        assert q.tolist() == [-1.0] * 3


@OURS
def test_a_new_optimizer_steps_after_a_rank_has_joined_without_a_step(real):
    real(after_a_join)


def made_after_a_join(backend):
    """Join on rank 1 before it makes the optimizer that the other ranks step. Then step it on all ranks."""
    with library(backend) as hvd:
        p = torch.nn.Parameter(torch.zeros(3))
        optimizers = []
        for rank_1 in (False, True):
            if (hvd.rank() == 1) == rank_1:
                optimizers += [hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], op=hvd.Max)]
            for optimizer in optimizers:
                train(p, optimizer, 1)
            if not rank_1:
                hvd.join()
        return p[0].item()


@OURS
def test_an_optimizer_with_op_max_may_be_made_after_a_join(real):
    found = real(made_after_a_join)
    assert found == [-1.0 if rank == 1 else -2.0 for rank in range(len(found))]


def before_any_step(backend):
    """Join on rank 1 without any step. In their first step, the other ranks agree on the parameters without rank 1."""
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        p = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], op=hvd.Sum)
        if me != 1:
            (p.sum()).backward()
            optimizer.step()
            assert p.tolist() == [1.0 - size] * 3
        hvd.join()


@OURS_3
def test_a_rank_may_join_before_its_first_step(real):
    real(before_any_step)


def train(p, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()


def frozen_at_the_end(backend):
    """Join on the last rank with a model that is frozen then, as a GAN's discriminator is in the generator's step."""
    with library(backend) as hvd:
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)])
        last = hvd.rank() == hvd.size() - 1
        train(p, optimizer, 2 if last else 5)
        p.requires_grad_(not last)
        hvd.join()
        return p[0].item()


@OURS
def test_a_rank_may_join_with_frozen_parameters(real):
    found = real(frozen_at_the_end)
    assert found[-1] == -2
    # In the last three steps, the gradient of the rank that has joined counts as zero.
    assert found[:-1] == pytest.approx([-2 - 3 * (1 - 1 / len(found))] * (len(found) - 1))


def after_another_world(backend, steps):
    """Step an earlier world's optimizer in a new world. Rank 0 joins after ``steps`` steps, the others after one more."""
    with library(backend) as hvd:
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], op=hvd.Sum)
        train(p, optimizer, 3)
    with library(backend) as hvd:
        with torch.no_grad():
            p.zero_()
        train(p, optimizer, steps + (hvd.rank() > 0))
        hvd.join()
        return p[0].item()


@pytest.mark.parametrize("steps", [0, 2])
@OURS
def test_an_optimizer_of_an_earlier_world_steps_while_a_rank_has_joined(real, steps):
    found = real(after_another_world, steps)
    size = len(found)
    assert found == [-steps * size] + [-steps * size - (size - 1)] * (size - 1)


def optimizers_of_three_worlds(backend):
    """Join on rank 1 without any step. Rank 1 makes three optimizers in the last world, rank 0 one in each of three."""
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    optimizers: list = []
    for world in range(3):
        with library(backend) as hvd:
            to_wrap = [params[world]] if hvd.rank() == 0 else params if world == 2 else []
            optimizers += [hvd.DistributedOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], op=hvd.Sum) for p in to_wrap]
            if world < 2:
                continue
            if hvd.rank() == 0:
                train(params[0], optimizers[0], 1)
            hvd.join()
            optimizers[0].zero_grad()
            before = [p.tolist() for p in params]
            (params[0].sum() + 10 * params[1].sum() + 100 * params[2].sum()).backward()
            for optimizer in optimizers:
                optimizer.step()
            assert [p.tolist() for p in params] == [[x - 2 * 10**n for x in old] for n, old in enumerate(before)]


@OURS_2
def test_a_joined_rank_pairs_its_new_optimizers_with_those_that_another_rank_made_in_earlier_worlds(real):
    real(optimizers_of_three_worlds)


def without_the_optimizer(backend):
    """Join on rank 0, which does not make the optimizer that the other ranks step."""
    with library(backend) as hvd:
        p = torch.nn.Parameter(torch.zeros(2))
        if hvd.rank() == 0:
            call = hvd.join
        else:
            call = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("only in this test", p)]).step
            p.sum().backward()
        for later in (call, lambda: hvd.allreduce(torch.ones(1))):
            with pytest.raises(hvd.mpi_ops.HorovodInternalError, match=r"join\(\) was called, but there is no optimizer"):
                later()


@OURS
def test_joining_without_an_optimizer_that_other_ranks_use_ends_the_world(real):
    real(without_the_optimizer)


def other_numbers(backend, op):
    """Join on rank 1 without any step. Rank 0 makes three optimizers for parameters with the same name, rank 1 two."""
    with library(backend) as hvd:
        params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3 - hvd.rank())]
        optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], op=getattr(hvd, op)) for p in params]

        def step_and_join():
            train(params[-1], optimizers[-1], 1 if hvd.rank() == 0 else 0)
            hvd.join()
            hvd.allreduce(torch.ones(1), name="later")  # with Max, rank 0's join() may return before rank 1 ends the world

        with pytest.raises(hvd.mpi_ops.HorovodInternalError, match="make the same optimizers on every rank before join"):
            step_and_join()


@pytest.mark.parametrize("op", ["Average", "Max"])
@OURS_2
def test_joining_is_an_error_if_ranks_have_different_numbers_of_equal_optimizers(real, op):
    real(other_numbers, op)


def outside_of_the_set(backend):
    """Join on the last rank, which is not in the process set of the optimizer that the other ranks step."""
    with library(backend) as hvd:
        part = hvd.add_process_set(list(range(hvd.size() - 1)))
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], op=hvd.Sum, process_set=part)
        if hvd.rank() < hvd.size() - 1:
            train(p, optimizer, 3)
        hvd.join()
        return p[0].item()


@OURS_3
def test_a_rank_outside_of_an_optimizers_process_set_may_join(real):
    assert real(outside_of_the_set) == [-6.0, -6.0, 0.0]


def after_backward_alone(backend, backward_passes):
    """Join on rank 1 after its last step, or after one more backward pass without a step (``backward_passes`` = 1)."""
    with library(backend) as hvd:
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], op=hvd.Sum)
        train(p, optimizer, 2 if hvd.rank() == 1 else 5)
        if hvd.rank() == 1 and backward_passes:
            optimizer.zero_grad()
            p.sum().backward()
        hvd.join()
        return p[0].item()


@pytest.mark.parametrize("backward_passes", [0, 1])
@OURS
def test_a_rank_may_join_after_a_backward_pass_without_a_step(real, backward_passes):
    found = real(after_backward_alone, backward_passes)
    size = len(found)
    everywhere = 2 + backward_passes  # exchanges with gradients of all ranks
    assert found[0] == -(everywhere * size + (5 - everywhere) * (size - 1))


def with_a_freed_optimizer(backend):
    """Join after the optimizer was freed. Rank 0 joins late: it waits between the last backward pass and the step."""
    with library(backend) as hvd:

        def train_and_free():
            p = torch.nn.Parameter(torch.zeros(2))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("freed", p)], op=hvd.Sum)
            train(p, optimizer, 1)
            optimizer.zero_grad()
            p.sum().backward()
            if hvd.rank() == 0:
                time.sleep(1.0)
            optimizer.step()
            return p[0].item()

        found = train_and_free()
        gc.collect()
        hvd.join()
        return found


@OURS
def test_a_rank_may_join_after_its_optimizer_was_freed(real):
    found = real(with_a_freed_optimizer)
    assert found == [-2.0 * len(found)] * len(found)


def refused_while_joined(backend):
    """Refuse an exchange, on rank 0, while the last rank has joined; then step. Return by how much the weight fell."""
    with library(backend) as hvd:
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)])
        train(p, optimizer, 1)
        before = p[0].item()
        if hvd.rank() < hvd.size() - 1:
            p.data = p.data.double() if hvd.rank() == 0 else p.data
            with pytest.raises(hvd.HorovodInternalError, match="rank 0: parameter 'p' was float32"):
                train(p, optimizer, 1)
            p.data = p.data.float()
            train(p, optimizer, 1)
        hvd.join(divide_by="active")
        change = before - p[0].item()
        # No rank counts as joined any more.
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
        optimizer.step()
        train(p, optimizer, 1)
        return change


@OURS
def test_a_refused_exchange_changes_neither_the_joined_ranks_nor_the_divisor_of_the_next_one(real):
    *others, last = real(refused_while_joined)
    assert others == [1.0] * len(others)
    assert last == 0
