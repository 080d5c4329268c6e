"""dualtrain/hvd/README.md#distributedoptimizer: ranks agree on added and unfrozen parameters, and on their order."""

from __future__ import annotations

import pytest
import torch

from tests.hvd.worlds import OURS, OURS_2, OURS_3, PAIR, library, sum_of_ranks


class Program:
    """A trained parameter, a frozen one, and an optimizer."""

    def __init__(self, hvd, op="Sum", name="", **options):
        self.rank = hvd.rank()
        self.a, self.b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        sgd, named = torch.optim.SGD([self.a, self.b], lr=1.0), [(f"a{name}", self.a), (f"b{name}", self.b)]
        self.optimizer = hvd.DistributedOptimizer(sgd, named, op=getattr(hvd, op), **options)

    def step(self, passes=1):
        self.optimizer.zero_grad()
        for _ in range(passes):
            ((self.a.sum() + self.b.sum()) * (self.rank + 1)).backward()
        self.optimizer.step()
        return [self.a[0].item(), self.b[0].item()]


def in_the_next_world(backend, op, unfrozen_before):
    """Keep an optimizer over ``shutdown`` and a second ``init``. Unfreeze a parameter before or after this ``init``.

    If ``unfrozen_before`` is empty, unfreeze it after this ``init``. If ``unfrozen_before`` ends with "already added on
    rank 0", rank 0 alone adds the parameter to the layout before ``shutdown``.
    """
    with library(backend) as hvd:
        program = Program(hvd, op)
        a, _ = program.step()
        if unfrozen_before == "init, already added on rank 0" and hvd.rank() == 0:
            program.b.requires_grad_()
            program.optimizer.reducer.begin_world()  # as if this rank alone had added the parameter before a failure
    if unfrozen_before:
        program.b.requires_grad_()
    with library(backend) as hvd:
        program.b.requires_grad_()
        size = hvd.size()
        # Only rank 0 runs backward in the first step.
        first = program.step(1 - min(hvd.rank(), 1))
        second = program.step()
        if op == "Sum":
            assert first == [a - 1, -1]
            assert second == [a - 1 - sum_of_ranks(size), -1 - sum_of_ranks(size)]
        return first, second


@pytest.mark.parametrize("unfrozen_before", ["", "init", "init, already added on rank 0"])
@pytest.mark.parametrize("op", ["Sum", "Max"])
@OURS
def test_a_parameter_unfrozen_before_or_after_a_second_init_is_reduced(real, op, unfrozen_before):
    found = real(in_the_next_world, op, unfrozen_before)
    assert found == found[:1] * len(found)


def unfreeze_then_join(backend):
    """Unfreeze a parameter on all ranks. Then the last rank joins before it has used the parameter; repeat."""
    with library(backend) as hvd:
        joins, size = hvd.rank() == hvd.size() - 1, hvd.size()
        for number in range(20):
            program = Program(hvd, name=number)
            program.step()
            program.b.requires_grad_()
            if not joins:
                program.step()
                assert program.step()[1] == -2 * sum_of_ranks(size - 1)
            hvd.join()
            found = program.step()[1] if not joins else program.step()[1] - 2 * sum_of_ranks(size - 1)
            assert found == -2 * sum_of_ranks(size - 1) - sum_of_ranks(size)


@OURS
def test_a_rank_may_join_before_it_uses_an_unfrozen_parameter(real):
    real(unfreeze_then_join)


def join_then_unfreeze(backend, op, divide_by):
    """Join on the last rank. Then unfreeze a parameter on the other ranks, and after ``join`` also on the last rank."""
    with library(backend) as hvd:
        joins, size = hvd.rank() == hvd.size() - 1, hvd.size()
        program = Program(hvd, op)
        program.step()
        if not joins:
            hvd.allreduce(torch.zeros(1), name="joined")  # blocks until the last rank has joined
            program.b.requires_grad_()
            divisor = {
                "Sum": 1,
                "Average": size if divide_by == "initial" else size - 1,
                "Max": sum_of_ranks(size - 1) / (size - 1),
            }
            for number in range(1, 3):
                assert program.step()[1] == pytest.approx(-number * sum_of_ranks(size - 1) / divisor[op])
        hvd.join(divide_by=divide_by)
        assert program.b.requires_grad is not joins
        program.b.requires_grad_()
        before = program.b[0].item()
        divisor = {"Sum": 1, "Average": size, "Max": sum_of_ranks(size) / size}
        assert program.step()[1] - before == pytest.approx(-sum_of_ranks(size) / divisor[op])


@pytest.mark.parametrize(("op", "divide_by"), [("Sum", "initial"), ("Average", "active"), ("Max", "initial")])
@OURS
def test_ranks_may_unfreeze_a_parameter_after_another_rank_has_joined(real, op, divide_by):
    real(join_then_unfreeze, op, divide_by)


def join_then_add(backend):
    """Add a group of parameters after the last rank has joined."""
    with library(backend) as hvd:
        program = Program(hvd)
        program.step()
        if hvd.rank() == hvd.size() - 1:
            call = hvd.join
        else:
            hvd.allreduce(torch.zeros(1), name="joined")
            program.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
            call = program.step
        with pytest.raises(hvd.mpi_ops.HorovodInternalError, match=r"join\(\) was called before other ranks added"):
            call()


@OURS_3
def test_parameters_that_a_joined_rank_does_not_have_are_refused(real):
    real(join_then_add)


def join_with_another_layout(backend):
    """Freeze a parameter on the last rank before wrapping. Then this rank joins, and the other ranks step."""
    with library(backend) as hvd:
        last = hvd.rank() == hvd.size() - 1
        params = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2), requires_grad=not last)]
        named = [(f"layout{number}", p) for number, p in enumerate(params)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, 1.0), named)
        if last:
            call = hvd.join
        else:
            sum(p.sum() for p in params).backward()
            call = optimizer.step
        with pytest.raises(hvd.mpi_ops.HorovodInternalError, match=r"layout1 \(.* on rank 0, nothing on rank"):
            call()


@OURS
def test_a_joined_rank_with_another_layout_causes_an_error_on_all_ranks(real):
    real(join_with_another_layout)


def two_optimizers(backend, discards):
    """Join on the last rank. The others run backward for the first optimizer, step the second, and then step the first.

    With ``discards``, they discard the gradients of this backward before they step.
    """
    with library(backend, HOROVOD_FUSION_THRESHOLD="4") as hvd:  # each parameter has its own bucket
        programs = [Program(hvd, name=number) for number in range(2)]
        for program in programs:
            program.b.requires_grad_()
            program.step()
        if hvd.rank() < hvd.size() - 1:
            hvd.allreduce(torch.zeros(1), name="joined")
            first, second = programs
            for parameter in (first.a, first.b):
                first.optimizer.zero_grad()
                parameter.sum().backward()  # sends only some of the gradients
                if discards:
                    first.optimizer.load_state_dict(first.optimizer.state_dict())
                    first.optimizer.zero_grad()
                second.step()
                first.optimizer.step()
        hvd.join()
        return [program.step()[0] for program in programs]


@pytest.mark.parametrize("discards", [False, True])
@OURS
def test_ranks_may_step_several_optimizers_in_any_order_after_another_rank_has_joined(real, discards):
    *others, joined = real(two_optimizers, discards)
    size = real.size
    with_all, without_last = 2 * sum_of_ranks(size), sum_of_ranks(size - 1)
    assert joined == [-with_all, -with_all]
    assert others == [[-with_all - (not discards) * (size - 1), -with_all - 2 * without_last]] * (size - 1)


def replaced_before_join(backend, backward):
    """Run a backward pass on the last rank if ``backward`` is 1. Then replace its optimizer, and join."""
    with library(backend) as hvd:
        program = Program(hvd)
        program.step()
        if hvd.rank() == hvd.size() - 1:
            program.optimizer.zero_grad()
            if backward:
                program.a.sum().backward()
            hvd.DistributedOptimizer(torch.optim.SGD([program.a, program.b], 1.0), [("a", program.a), ("b", program.b)])
        else:
            found = program.step()[0]
            assert found == -sum_of_ranks(hvd.size()) - sum_of_ranks(hvd.size() - 1) - backward
        hvd.join()


@pytest.mark.parametrize("backward", [0, 1])
@OURS
def test_a_rank_may_join_after_it_has_replaced_an_optimizer(real, backward):
    real(replaced_before_join, backward)


def other_order(backend, op):
    """Pass the parameters in a different order on rank 1."""
    with library(backend) as hvd:
        named = [(name, torch.nn.Parameter(torch.zeros(2))) for name in "ab"]
        if hvd.rank() == 1:
            named.reverse()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], 1.0), named, op=getattr(hvd, op))
        a, b = (dict(named)[name] for name in "ab")
        ((a.sum() + 10 * b.sum()) * (hvd.rank() + 1)).backward()
        try:
            optimizer.step()
        except hvd.mpi_ops.HorovodInternalError as error:
            return str(error)
        return [a[0].item(), b[0].item()]


@pytest.mark.parametrize("op", ["Sum", "Max"])
@PAIR
def test_the_order_of_parameters_may_differ_between_ranks_only_if_gradients_are_matched_by_name(real, op):
    found = real(other_order, op)
    if op == "Sum" and real.name != "horovod":
        assert all("the order of the parameters differs: a (float32" in text for text in found)
    else:
        assert found == [{"Sum": [-3.0, -30.0], "Max": [-2.0, -20.0]}[op]] * 2


def steps_of_copies(backend, op):
    """Replace a float16 parameter of the optimizer by a float32 copy, as apex does at level O2, and take two steps."""
    with library(backend) as hvd:
        p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], op=getattr(hvd, op))
        copy = optimizer.param_groups[0]["params"][0] = p.detach().float().requires_grad_()
        for _ in range(2):
            p.grad = copy.grad = None
            (p.sum() * (hvd.rank() + 1)).backward()
            optimizer.synchronize()
            copy.grad = p.grad.float() / 2
            with optimizer.skip_synchronize():
                optimizer.step()
            p.data.copy_(copy.data)
        return p.tolist()


@pytest.mark.parametrize("op", ["Sum", "Max"])
@PAIR
def test_the_optimizer_may_step_copies_of_the_parameters(real, op):
    assert real(steps_of_copies, op) == [[{"Sum": -3.0, "Max": -2.0}[op]] * 2] * 2


def train_an_unknown_parameter(backend, op, when):
    """Put a parameter into a group without add_param_group, and train it before or after the first ``synchronize``."""
    with library(backend) as hvd:
        program = Program(hvd, op)
        added = torch.nn.Parameter(torch.zeros(1))
        program.optimizer.param_groups[0]["params"].append(added)
        if when == "later":
            program.step()
        (program.a.sum() + added.sum()).backward()
        with pytest.raises(hvd.mpi_ops.HorovodInternalError, match=r"parameter 2 \(1,\) was added to the optimizer's"):
            program.optimizer.synchronize()


@pytest.mark.parametrize("when", ["at once", "later"])
@pytest.mark.parametrize("op", ["Sum", "Max"])
@OURS_2
def test_a_trained_parameter_that_was_added_without_add_param_group_is_refused(real, op, when):
    real(train_an_unknown_parameter, op, when)
