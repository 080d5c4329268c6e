"""dualtrain/hvd/README.md#distributedoptimizer: its rules and errors, on Horovod itself and on ``dualtrain.hvd``."""

from __future__ import annotations

import copy
import pickle
import warnings
from unittest import mock

import pytest
import torch
from torch import nn

from dualtrain.errors import BackendError
from dualtrain.hvd.pending import Pending
from tests.hvd.worlds import OURS_2, PAIR, THEIRS, check, is_horovod, library, mean_of_ranks, same


def wrapped(hvd, lr=1.0, name="p", **options):
    p = nn.Parameter(torch.zeros(2))
    return p, hvd.DistributedOptimizer(torch.optim.SGD([p], lr), [(name, p)], **options)


def refusals(backend):
    with library(backend) as hvd:
        p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        inner = torch.optim.SGD([p, q], 0.1)
        named = [("p", p), ("q", q)]

        def wrap(named=named, **options):
            return lambda: hvd.DistributedOptimizer(inner, named_parameters=named, **options)

        check(
            hvd,
            same("missing", wrap([("p", p)]), "ValueError"),
            same("twice", wrap([("p", p), ("p", q)]), "ValueError"),
            same("no pairs", wrap([p, q]), "ValueError"),
            same("predivide and sum", wrap(op=hvd.Sum, gradient_predivide_factor=2.0), "ValueError"),
            same("no passes", wrap(backward_passes_per_step=0), "ValueError"),
            same("negative groups", wrap(groups=-1), "ValueError"),
            same("twice in groups", wrap(groups=[[p], [p]]), "ValueError"),
            same("groups of text", wrap(groups=[["p"]]), "ValueError"),
            ("no set", wrap(process_set=3), "AttributeError", "ValueError"),
            same("wrapped twice", lambda: hvd.DistributedOptimizer(wrap()(), named), "TypeError"),
            same("no_sync", lambda: wrap()().no_sync().__enter__(), "AttributeError"),
        )
        if not is_horovod(hvd):  # Horovod fails in the first backward pass
            for option in ({"op": "sum"}, {"compression": None}):
                with pytest.raises(ValueError, match="is not a"):
                    wrap(**option)()


@PAIR
def test_wrong_options_are_refused(real):
    real(refusals)


def buckets_of_generators(backend):
    with library(backend) as hvd:
        model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
        sgd, named = torch.optim.SGD(model.parameters(), 0.1), model.named_parameters()
        optimizer = hvd.DistributedOptimizer(sgd, named, groups=[layer.parameters() for layer in model])
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return [sorted(slot.name for slot in bucket.slots) for bucket in optimizer.reducer._exchange.schedule.buckets]


@OURS_2
def test_groups_may_be_generators(real):
    assert real(buckets_of_generators)[0] == [["1.bias", "1.weight"], ["0.bias", "0.weight"]]


def rules(backend):
    on_horovod = backend.name == "horovod"
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        p, optimizer = wrapped(hvd)
        assert isinstance(optimizer, torch.optim.SGD)
        assert type(optimizer).__name__ == "SGD"
        assert optimizer._parameter_names == {p: "p"}
        p.sum().backward()
        check(
            hvd,
            same("zero_grad too early", optimizer.zero_grad, "AssertionError"),
            same("too many backward passes", lambda: p.sum().backward(), "AssertionError"),
        )
        optimizer.step()
        check(hvd, ("set_to_none", lambda: optimizer.zero_grad(set_to_none=True), "TypeError", None))
        optimizer.zero_grad()
        # Change gradients between synchronize() and a step in skip_synchronize().
        (p.sum() * (me + 1)).backward()
        optimizer.synchronize()
        assert p.grad.tolist() == [mean_of_ranks(size)] * 2
        p.grad.mul_(2)
        start = p[0].item()
        with optimizer.skip_synchronize():
            optimizer.step()
        assert p[0].item() - start == -2 * mean_of_ranks(size)
        # A step after synchronize() warns outside of skip_synchronize().
        (p.sum() * (me + 1)).backward()
        optimizer.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert len(caught) == 1
        assert "optimizer.step() called without optimizer.skip_synchronize()" in str(caught[0].message)
        optimizer.zero_grad()
        # Run fewer backward passes than backward_passes_per_step; then change backward_passes_per_step.
        q, accumulating = wrapped(hvd, name="q", backward_passes_per_step=3)
        (q.sum() * (me + 1)).backward()
        accumulating.step()
        assert q[0].item() == -mean_of_ranks(size)
        accumulating.zero_grad()
        accumulating.set_backward_passes_per_step(2)
        for _ in range(2):
            (q.sum() * (me + 1)).backward()
        accumulating.step()
        assert q[0].item() == -3 * mean_of_ranks(size)  # summed over passes, averaged over ranks
        accumulating.backward_passes_per_step = 1
        for _ in range(2):
            accumulating.zero_grad()
            (q.sum() * (me + 1)).backward()
            accumulating.step()
        check(hvd, same("another pass", lambda: [q.sum().backward() for _ in range(2)], "AssertionError"))
        accumulating.step()
        accumulating.zero_grad()
        # On Horovod, options may be changed at any time.
        for option in ("op", "process_set", "gradient_predivide_factor", "sparse_as_dense", "_compression"):
            value = getattr(accumulating, option)
            check(hvd, (option, lambda: setattr(accumulating, option, value), None, "AttributeError"))  # noqa: B023
        predivided = wrapped(hvd, name="predivided", gradient_predivide_factor=49.0)[1]
        assert predivided.gradient_predivide_factor == 49.0  # not the rounded 1 / (1 / 49.0)
        # Wrap an optimizer that has a state and options.
        used = nn.Parameter(torch.ones(2))
        adam = torch.optim.Adam([used], lr=0.5, weight_decay=0.25)
        used.sum().backward()
        adam.step()
        again = hvd.DistributedOptimizer(adam, [("used", used)])
        assert len(again.state) == (0 if on_horovod else 1)
        assert again.defaults["lr"] == (0.001 if on_horovod else 0.5)
        assert again.param_groups[0]["lr"] == 0.5
        assert again.param_groups[0] is adam.param_groups[0]
        # Add a group after wrapping.
        r = nn.Parameter(torch.zeros(1))
        optimizer.add_param_group({"params": [r], "lr": 1.0})
        ((p.sum() + r.sum()) * (me + 1)).backward()
        optimizer.step()
        # Horovod does not average the gradients of this group: ranks get different values without an error.
        assert r.item() == (-me - 1 if on_horovod else -mean_of_ranks(size))
        # Weight decay also applies to a parameter that no rank uses.
        s, t = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        decay = hvd.DistributedOptimizer(torch.optim.SGD([s, t], 0.1, weight_decay=1.0), [("s", s), ("t", t)])
        s.sum().backward()
        decay.step()
        assert t.grad.tolist() == [0]
        assert torch.allclose(t, torch.full((1,), 0.9))


def added_again(backend):
    with library(backend) as hvd:
        p, r = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], 1.0), [("p", p)])
        optimizer.add_param_group({"params": [r]})
        for step in range(4):
            if step == 2:
                optimizer.add_param_group(optimizer.param_groups.pop())
            optimizer.zero_grad()
            ((p.sum() + r.sum()) * (hvd.rank() + 1)).backward()
            optimizer.step()
        assert r.item() == -4 * mean_of_ranks(hvd.size())


@OURS_2
def test_a_group_may_be_removed_and_added_again(real):
    real(added_again)


@PAIR
def test_the_optimizer_follows_horovods_rules_except_for_known_differences(real):
    real(rules)


def broken_rules(backend):
    """Change gradients between two synchronizations. Then step another optimizer without any synchronization."""
    with library(backend) as hvd, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        me, size = hvd.rank(), hvd.size()
        for op, divisor in (("Average", size), ("Sum", 1)):
            p, optimizer = wrapped(hvd, name=f"twice {op}", op=getattr(hvd, op))
            (p.sum() * (me + 1)).backward()
            optimizer.synchronize()
            once = p.grad[0].item()
            p.grad.add_(10 * me)
            optimizer.step()
            assert p[0].item() == -sum(once + 10 * rank for rank in range(size)) / divisor
        q, optimizer = wrapped(hvd, name="never")
        if me > 0:
            hvd.barrier()  # rank 0 must step first: once all ranks have sent, Horovod overwrites rank 0's gradient
        (q.sum() * (me + 1)).backward()
        with optimizer.skip_synchronize():
            optimizer.step()
        if me == 0 or backend.name != "horovod":
            assert q[0].item() == -(me + 1)
        if me == 0:
            hvd.barrier()
        check(
            hvd,
            same("zero_grad", optimizer.zero_grad, "AssertionError"),
            same("backward", lambda: q.sum().backward(), "AssertionError"),
        )
        optimizer.synchronize()  # end the exchange that backward has started


@PAIR
def test_incorrect_use_has_the_same_effect_as_with_horovod(real):
    real(broken_rules)
    real.leave()


def mixed_precision_trap(backend):
    """Call ``scaler.step`` without ``synchronize`` when one rank's gradient is infinite."""
    with library(backend) as hvd:
        p, optimizer = wrapped(hvd, name="trap")
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        if hvd.rank() == 0:
            hvd.barrier()  # rank 1 must look at its gradient first: once all ranks have sent, Horovod overwrites it
        scaler.scale((p * (float("inf") if hvd.rank() == 0 else 1.0)).sum()).backward()
        scaler.unscale_(optimizer)
        if hvd.rank() == 1:
            hvd.barrier()
        scaler.step(optimizer)
        scaler.update()
        # Rank 1 has synchronized in its step. Rank 0 has skipped its step, so its sum is still pending.
        if hvd.rank() == 0:
            optimizer.synchronize()
        return p[0].item(), scaler.get_scale()


@THEIRS
def test_scaling_losses_without_synchronize_lets_horovods_ranks_diverge(real):
    assert real(mixed_precision_trap) == [(0, 2), (float("-inf"), 4)]  # weights and loss scales differ between the ranks


def scaled_too_early(backend):
    """Call ``scaler.step`` before ``synchronize``, in the first step and in a later one.

    Do so with a plain optimizer, with a fused optimizer, and after ``unscale_``.
    """
    with library(backend) as hvd:
        me = hvd.rank()
        for fused, unscaled in ((False, False), (True, False), (False, True)):
            p = nn.Parameter(torch.zeros(2))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], 1.0, fused=fused), [("p", p)])
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for early in (True, False, True):
                scaler.scale((p * (me + 1)).sum()).backward()
                if early:
                    if unscaled:
                        scaler.unscale_(optimizer)
                    with pytest.raises(AssertionError, match=r"call optimizer.synchronize\(\) first"):
                        scaler.step(optimizer)
                    optimizer.synchronize()
                else:
                    optimizer.synchronize()
                    with optimizer.skip_synchronize():
                        scaler.step(optimizer)
                optimizer.zero_grad()
                scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            assert p.tolist() == [-mean_of_ranks(hvd.size())] * 2


@OURS_2
def test_scaling_losses_without_synchronize_is_refused(real):
    real(scaled_too_early)


def mixed_precision(backend):
    """Call ``synchronize`` first, so that every rank has the infinite gradient."""
    with library(backend) as hvd:
        p, optimizer = wrapped(hvd, name="scaled")
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        found = []
        for factor in (float("inf"), 1.0):
            scaler.scale((p * (factor if hvd.rank() == 0 else 1.0)).sum()).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([p], 100.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append((p[0].item(), scaler.get_scale()))
        return found


@PAIR
def test_scaling_losses_after_synchronize_works(real):
    results = real(mixed_precision)
    assert results == results[:1] * 2
    assert results[0][0] == (0, 2)
    assert results[0][1][0] < 0


def fused(backend):
    """Train with a fused step: it unscales gradients, unless ``unscale_`` has done so.

    It skips an update if a gradient has overflowed. Rank 0's gradient overflows in step 1.
    """
    found = {}
    with library(backend) as hvd:
        mean = mean_of_ranks(hvd.size())
        for kind, options in (("SGD", {"momentum": 0.9}), ("AdamW", {}), ("SGD", {"momentum": 0.9, "clip": True})):
            clip = options.pop("clip", False)
            p, alone = nn.Parameter(torch.full((2,), 0.5)), nn.Parameter(torch.full((2,), 0.5))
            build = getattr(torch.optim, kind)
            optimizer = hvd.DistributedOptimizer(build([p], lr=0.1, fused=True, **options), [("p", p)])
            single = build([alone], lr=0.1, **options)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for step in range(3):
                factor = float("inf") if step == 1 and hvd.rank() == 0 else hvd.rank() + 1.0
                scaler.scale((p * factor).sum()).backward()
                optimizer.synchronize()
                if clip:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_([p], 100.0)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if step != 1:
                    alone.grad = torch.full((2,), mean)
                    single.step()
            torch.testing.assert_close(p.detach(), alone.detach())
            found[kind, clip] = p.tolist(), scaler.get_scale()
    return found


@PAIR
def test_loss_scaling_works_with_a_fused_optimizer(real):
    first, *others = real(fused)
    assert others == [first] * len(others)
    assert {scale for _, scale in first.values()} == {512}


def line_search(backend):
    """Step with LBFGS, which evaluates several points per step. All ranks must evaluate the same points."""
    with library(backend) as hvd:
        me, size, found = hvd.rank(), hvd.size(), []
        for op, divisor in ((hvd.Average, size), (hvd.Sum, 1)):
            start, options = torch.tensor([3.0, -2.0, 0.5]), {"max_iter": 8, "line_search_fn": "strong_wolfe"}
            q, alone = nn.Parameter(start.clone()), nn.Parameter(start.clone())
            lbfgs = hvd.DistributedOptimizer(torch.optim.LBFGS([q], **options), [(f"{op}.q", q)], op=op)
            single = torch.optim.LBFGS([alone], **options)

            def loss_of(x, rank):
                # The loss is not convex, and differs between ranks.
                values = (x - rank * 2).square() * torch.tensor([1.0, 10.0 + rank, 100.0]) + (4 * x).cos()
                return values.sum() * (rank + 1)

            def closure(lbfgs=lbfgs, q=q):
                lbfgs.zero_grad()
                loss = loss_of(q, me)
                loss.backward()
                return loss

            def whole(single=single, alone=alone, divisor=divisor):
                single.zero_grad()
                loss = sum(loss_of(alone, rank) for rank in range(size)) / divisor
                loss.backward()
                return loss

            check(hvd, ("steps", lambda: [lbfgs.step(closure) for _ in range(3)] and None, "AssertionError", None))  # noqa: B023
            if backend.name == "horovod":
                return None
            for _ in range(3):
                single.step(whole)
            torch.testing.assert_close(q.detach(), alone.detach(), rtol=1e-3, atol=1e-3)
            found.append((q.tolist(), lbfgs.state[q]["func_evals"]))
        return found


@PAIR
def test_lbfgs_uses_the_combined_loss_of_all_ranks_and_raises_on_horovod(real):
    first, *others = real(line_search)
    assert others == [first] * len(others)
    if real.name == "horovod":
        real.leave()  # Horovod refused the second evaluation while gradients were being summed: its world is unusable


def only_ours(backend):
    with library(backend) as hvd:
        p, optimizer = wrapped(hvd, lr=0.5, name="own")
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=False)
        p.sum().backward()
        optimizer.step()
        scheduler.step()
        copied = pickle.loads(pickle.dumps(optimizer))
        assert type(copied) is torch.optim.SGD
        assert copied.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert type(copy.deepcopy(optimizer)) is torch.optim.SGD
        state = optimizer.state_dict()
        optimizer.zero_grad()
        # A scheduler that was made before wrapping still works; state can be loaded after wrapping.
        inner = torch.optim.SGD([p], 1.0, momentum=0.9)
        earlier = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
        late = hvd.DistributedOptimizer(inner, [("own", p)])
        p.sum().backward()
        late.step()
        earlier.step()
        assert late.param_groups[0]["lr"] == 0.5
        late.load_state_dict(late.state_dict())
        assert len(late.state) == 1
        assert "momentum_buffer" in next(iter(late.state.values()))
        late.zero_grad()
        optimizer.load_state_dict(state)
        # Loading a state discards an unfinished step.
        p.sum().backward()
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
        # Step with LBFGS and a closure; then wrap the same parameter again, with the deprecated num_groups.
        q = nn.Parameter(torch.tensor([3.0, -2.0]))
        lbfgs = hvd.DistributedOptimizer(torch.optim.LBFGS([q], max_iter=5), [("q", q)])

        def closure():
            lbfgs.zero_grad()
            loss = ((q - hvd.rank() * 2).square()).sum()
            loss.backward()
            return loss

        lbfgs.step(closure)
        where = hvd.allgather(q.detach()[None])
        assert torch.equal(where[0], where[-1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.DistributedOptimizer(torch.optim.SGD([q], 0.1), [("q", q)], num_groups=1)
        assert [w.category for w in caught] == [DeprecationWarning]
        # Leave out named_parameters.
        nameless = hvd.DistributedOptimizer(torch.optim.SGD([q], 1.0))
        nameless.zero_grad()
        before = q.detach().clone()
        (q.sum() * (hvd.rank() + 1)).backward()
        nameless.step()
        assert torch.allclose(before - q.detach(), torch.tensor(mean_of_ranks(hvd.size())))


@OURS_2
def test_optimizer_features_that_horovod_lacks_work(real):
    real(only_ours)


def in_a_world_of_one_rank(backend):
    """Take steps with several options, and make calls, in a world of one rank. Nothing is sent."""
    import dualtrain.hvd as hvd

    hvd.init(comm=backend)
    try:
        for options in ({}, {"op": hvd.Adasum}, {"compression": hvd.Compression.fp16}, {"backward_passes_per_step": 2}):
            p, optimizer = wrapped(hvd, **options)
            for _ in range(2):
                optimizer.zero_grad()
                p.sum().backward()
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
            optimizer.zero_grad(set_to_none=False)
            assert p.tolist() == [-2, -2]
        assert hvd.allreduce(torch.ones(2), op=hvd.Adasum).tolist() == [1, 1]
        assert hvd.join() == 0
    finally:
        hvd.shutdown()


def test_the_optimizer_works_in_a_world_of_one_rank():
    from dualtrain import connect
    from tests.hvd.worlds import ours

    ours()
    with connect("local") as backend:
        in_a_world_of_one_rank(backend)


def replaced_and_added(backend):
    """Replace a module, and add its parameters to the optimizer. Horovod does not average their gradients."""
    with library(backend) as hvd:
        for options in ({}, {"op": hvd.Min}):
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
            inner = torch.optim.SGD(model.parameters(), 0.1)
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **options)
            for step in range(4):
                if step == 1:
                    model[1] = nn.Linear(2, 1)
                    optimizer.add_param_group({"params": list(model[1].parameters())})
                hvd.broadcast_parameters(model.state_dict(), 0)
                optimizer.zero_grad()
                model(torch.full((1, 2), hvd.rank() + 1.0)).sum().backward()
                optimizer.step()
            weights = hvd.allgather(model[1].weight.detach())
            assert weights.unique(dim=0).shape[0] == 1


@OURS_2
def test_a_replaced_module_may_be_added_to_the_optimizer(real):
    real(replaced_and_added)


def changes_in_a_hook(backend):
    """Change the gradients of every step in hooks of parameters and of autograd's nodes, before gradients are sent."""
    with library(backend) as hvd:
        found = []
        cases = [("node", 2), ("before", 2), ("after", 2)]
        if backend.name != "horovod":  # Horovod may have sent the gradient before a later hook of the node runs
            cases += [("later node", 2), ("later node", 40000)]  # a large gradient is copied to its bucket early
        for place, numel in cases:
            params = [nn.Parameter(torch.zeros(numel)) for _ in range(2)]
            nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in params]

            def double(p):
                p.grad.mul_(2)

            def register(params=params):
                for p in params:
                    p.register_post_accumulate_grad_hook(double)

            if place == "node":
                for p, node in zip(params, nodes, strict=True):
                    node.register_hook(lambda *_, p=p: double(p))
            if place == "before":
                register()
            named = [(f"{place}{numel}.{number}", p) for number, p in enumerate(params)]
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, 1.0), named)
            if place == "after":
                register()
            nodes.clear()  # the optimizer keeps them
            for step in range(3):
                if place == "later node" and step == 1:
                    for p in params:
                        p.data.mul_(2)  # doubles the change of step 0, in which this hook did not exist
                        torch.autograd.graph.get_gradient_edge(p).node.register_hook(lambda *_, p=p: double(p))
                optimizer.zero_grad()
                sum((hvd.rank() + 1) * p.sum() for p in params).backward()
                optimizer.step()
            found += [p[:2].tolist() for p in params]
        return found


@PAIR
def test_hooks_of_the_program_change_gradients_before_they_are_sent(real):
    for found in real(changes_in_a_hook):
        assert found == [[-3 * 2 * mean_of_ranks(real.size)] * 2] * len(found)


def groups_and_closures(backend):
    with library(backend) as hvd:
        p = torch.nn.Parameter(torch.zeros(1))
        options = {"gradient_predivide_factor": 2.0, "groups": 1}
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], 0.0), [("p", p)], **options)
        (p * 3e38).sum().backward()  # a sum of two such gradients is infinite
        optimizer.synchronize()
        check(hvd, ("predivide in groups", lambda: p.grad.isinf().item(), True, False))
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        p.data.zero_()  # Horovod's step has made p NaN
        loss = p.sum() + hvd.rank()
        loss.backward()
        check(hvd, ("loss", lambda: optimizer.step(loss.detach).item(), float(hvd.rank()), 0.5))


@PAIR
def test_predivided_groups_and_closure_losses_differ_from_horovods(real):
    real(groups_and_closures)


def closures_that_synchronize(backend):
    """Step with closures as in Lightning 1.x: they synchronize by themselves, or run no backward."""
    with library(backend) as hvd:
        p, q = (nn.Parameter(torch.zeros(2)) for _ in "pq")
        sgd = torch.optim.SGD([p, q], lr=1.0, momentum=0.5)
        optimizer = hvd.DistributedOptimizer(sgd, [("p", p), ("q", q)], op=hvd.Sum)

        def closure():
            optimizer.zero_grad()
            ((hvd.rank() + 1.0) * (p + q).sum()).backward()
            optimizer.synchronize()

        def closure_without_q():
            closure()
            q.grad = None

        found = []
        with optimizer.skip_synchronize():
            for call in (closure, closure_without_q, optimizer.zero_grad):
                optimizer.step(call)
                found.append((p[0].item(), q[0].item()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.zero_grad()
            (p + q).sum().backward()
            optimizer.step()
        return [*found, (p[0].item(), q[0].item())]


@PAIR
def test_a_closure_may_synchronize_by_itself(real):
    sums = [(3.0, 3.0), (3.0, None), (None, None), (2.0, 2.0)]
    model = nn.ParameterList([torch.zeros(()), torch.zeros(())])
    sgd, expected = torch.optim.SGD(model, lr=1.0, momentum=0.5), []
    for step in sums:
        for p, gradient in zip(model, step, strict=True):
            p.grad = None if gradient is None else torch.tensor(gradient)
        sgd.step()
        expected.append(tuple(p.item() for p in model))
    assert real(closures_that_synchronize) == [expected] * 2


def closures_that_leave_gradients_local(backend):
    """Step in ``skip_synchronize()`` while both ranks, or only rank 1, have a gradient that is not combined yet."""
    with library(backend) as hvd:
        p, optimizer = wrapped(hvd, op=hvd.Sum)

        def after_synchronize():
            optimizer.synchronize()
            optimizer.zero_grad()
            on_rank_1()

        def on_rank_1():
            if hvd.rank() == 1:
                p.sum().backward()

        found = []
        with optimizer.skip_synchronize():
            for closure in (lambda: None, on_rank_1, after_synchronize, lambda: None):
                if len(found) in (0, 3):
                    p.sum().backward()
                optimizer.step(closure)
                found.append(p[0].item())
                p.grad = None
            optimizer.close()
            with pytest.raises(RuntimeError, match="was closed"):
                optimizer.step(p.sum().backward)
        return found


@OURS_2
def test_gradients_that_a_closure_leaves_local_are_combined(real):
    assert real(closures_that_leave_gradients_local) == [[-2.0, -3.0, -4.0, -6.0]] * 2


def shared_weight(backend):
    """Train a weight that has two names, and keep its gradient's tensor."""
    with library(backend) as hvd:
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("encoder", p), ("decoder", p)], op=hvd.Sum)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            p.sum().backward()
            optimizer.step()
        return p[0].item()


@OURS_2
def test_a_weight_with_two_names_is_reduced_once(real):
    assert real(shared_weight) == [-6.0, -6.0]


def later_hook(backend):
    """Scale gradients in hooks that are registered after the optimizer was wrapped with op=Max."""
    with library(backend) as hvd:
        params = [torch.nn.Parameter(torch.ones(2) * (hvd.rank() + 1)) for _ in range(2)]
        named = [(str(number), p) for number, p in enumerate(params)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), named, op=hvd.Max)
        for p in params:
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 10))
        sum((p * (hvd.rank() + 1)).sum() for p in params).backward()
        optimizer.synchronize()
        return [p.grad[0].item() for p in params]


@OURS_2
def test_a_grouped_allreduce_of_all_gradients_waits_for_hooks_that_were_registered_later(real):
    assert real(later_hook) == [[20.0, 20.0]] * 2


class Scaled(torch.optim.SGD):
    """An optimizer with attributes and methods of its own."""

    scale = 1.0
    steps = 0

    def set_scale(self, scale):
        self.scale = scale

    def train(self, loss):
        loss.backward()
        self.step()

    def state_dict(self, comment):
        return {**super().state_dict(), "comment": comment}

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(self.scale)
        return super().step(closure)


def own_attributes(backend):
    """Use a wrapper as if it were the optimizer that it wraps."""
    with library(backend) as hvd:
        me, mean = hvd.rank(), mean_of_ranks(hvd.size())
        p = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(Scaled([p], 1.0), [("p", p)])
        assert (optimizer.scale, optimizer.steps) == (1, 0)
        optimizer.set_scale(0.5)
        optimizer.train((p * (me + 1)).sum())
        assert (p.tolist(), optimizer.scale, optimizer.steps) == ([-0.5 * mean] * 2, 0.5, 1)
        optimizer.scale = 2.0
        optimizer.note = "set later"
        optimizer.zero_grad()
        optimizer.train((p * (me + 1)).sum())
        assert (p.tolist(), optimizer.steps, optimizer.note) == ([-2.5 * mean] * 2, 2, "set later")
        del optimizer.note
        assert not hasattr(optimizer, "note")
        seen = []
        optimizer.register_state_dict_pre_hook(lambda opt: seen.append(opt.steps))
        optimizer.register_state_dict_post_hook(lambda opt, state: {**state, "scale": opt.scale})
        optimizer.register_load_state_dict_pre_hook(lambda opt, state: setattr(opt, "scale", state["scale"]))
        optimizer.register_load_state_dict_post_hook(lambda opt: seen.append(opt.scale))
        state = optimizer.state_dict(comment="an argument of its own")
        optimizer.scale = 0.0
        optimizer.load_state_dict(state)
        assert (seen, optimizer.scale) == ([2, 2.0], 2.0)
        q, plain = wrapped(hvd, name="hooked")
        seen.clear()
        plain.register_step_pre_hook(lambda opt, args, kwargs: seen.append(q.grad[0].item()))
        (q * (me + 1)).sum().backward()
        plain.step()
        # Horovod also runs the hook before gradients are combined: the first value in ``seen`` may be this rank's gradient.
        assert seen[-1] == mean
        assert len(seen) == (2 if backend.name == "horovod" else 1)


@PAIR
def test_a_wrapper_has_the_attributes_methods_and_hooks_of_its_optimizer(real):
    real(own_attributes)


class Interrupted(torch.optim.SGD):
    """An optimizer that raises KeyboardInterrupt in ``step`` after it has changed the first parameter, if ``armed``."""

    armed = False

    def step(self):  # without a closure
        if self.armed:
            self.param_groups[0]["params"][0].data.sub_(1)
            raise KeyboardInterrupt
        super().step()


def interrupted_steps(backend):
    """Raise KeyboardInterrupt in steps of rank 0, while it waits for the other ranks and while it changes parameters."""
    with library(backend) as hvd:
        me, found = hvd.rank(), []
        for op in ("Sum", "Max"):
            p = nn.Parameter(torch.zeros(2))
            optimizer = hvd.DistributedOptimizer(Interrupted([p], 1.0), [(op, p)], op=getattr(hvd, op))
            reducer = optimizer.reducer
            owner, name = (reducer._exchange, "wait") if op == "Sum" else (Pending, "wait_for_end")
            for _ in range(2):
                (p * (me + 1)).sum().backward()
                if me == 0:
                    with mock.patch.object(owner, name, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
                        optimizer.step()
                optimizer.step()
                optimizer.zero_grad()
            if op == "Sum":
                assert (reducer.exchanges, reducer.exchanging) == (2, False)
            found.append(p.tolist())
            (p * (me + 1)).sum().backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.armed = me == 0
                for error in (KeyboardInterrupt, BackendError) if me == 0 else ():
                    with pytest.raises(error):
                        optimizer.step()
                optimizer.armed = False
                optimizer.load_state_dict(optimizer.state_dict())
                optimizer.step()
        return found


@OURS_2
def test_an_interrupted_exchange_continues_and_an_interrupted_change_of_parameters_is_not_repeated(real):
    assert real(interrupted_steps) == [[[-6.0, -6.0], [-4.0, -4.0]]] * 2


def unused_stay_unchanged(backend, used_by_one):
    with library(backend) as hvd:
        used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        sgd = torch.optim.SGD([used, unused], 1.0, weight_decay=0.5)
        optimizer = hvd.DistributedOptimizer(sgd, [(f"used {used_by_one}", used), ("unused", unused)])
        assert optimizer._requires_update == {used, unused}
        optimizer._requires_update = set()
        assert not optimizer._requires_update
        for _ in range(2):
            optimizer.zero_grad()
            (used.sum() * (hvd.rank() + 1)).backward()
            optimizer.step()
        assert (unused.tolist(), unused.grad) == ([1, 1], None)
        assert used.tolist() == [0.25 - 1.5 * mean_of_ranks(hvd.size())] * 2
        if not used_by_one:
            return
        with pytest.raises(AttributeError, match="only be emptied"):
            optimizer._requires_update = {used}
        optimizer.zero_grad()
        ((used + unused if hvd.rank() == 0 else used).sum()).backward()
        if hvd.rank() == 0:
            optimizer.step()
        with pytest.raises(hvd.mpi_ops.HorovodInternalError, match="'unused' has a gradient on some ranks only"):
            (hvd.barrier if hvd.rank() == 0 else optimizer.step)()


@PAIR
def test_weight_decay_does_not_change_unused_parameters_if_requires_update_is_empty(real):
    real(unused_stay_unchanged, False)


@OURS_2
def test_all_ranks_must_use_the_same_parameters_if_requires_update_is_empty(real):
    real(unused_stay_unchanged, True)
