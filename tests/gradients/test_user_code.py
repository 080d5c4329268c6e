"""User code that keeps gradients, registers hooks or freezes parameters; and options that differ between ranks."""

from __future__ import annotations

import itertools
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dualtrain import BackendError, DistributedOptimizer, connect
from dualtrain.backends.sum_order import SumOrder
from dualtrain.gradients import GradientReducer, Transfer
from dualtrain.gradients.slots import REFERENCES, Slot
from tests.models_for_tests import (
    EXACT,
    gradients,
    mean_gradients,
    of_every_rank,
    perceptron,
    same_on_all,
    seeded,
    sgd,
    small_buckets,
    vector_loss,
    wrap,
)

#: Numbers of elements of a small and a large gradient. A small gradient is copied into its bucket together with the
#: bucket's other gradients, a large gradient as soon as it is ready.
SIZES = 1000, 20000


def keeps(backend, numel, unused):
    """Keep the gradients of three backward passes; the last pass uses only the second parameter."""
    params = [nn.Parameter(torch.zeros(numel)), nn.Parameter(torch.zeros(3))]
    reducer = GradientReducer([("p", params[0]), ("q", params[1])], backend, unused=unused)
    mean = (backend.size + 1) / 2
    kept = []
    for factor in (1, 5, 25):
        for p in params:
            p.grad = None
        used = params if factor < 25 else params[1:]
        ((backend.rank + 1) * factor * sum(p.sum() for p in used)).backward()
        kept.append([p.grad for p in params])
    for factor, (first, second) in zip((1, 5, 25), kept, strict=True):
        torch.testing.assert_close(second, torch.full((3,), factor * mean), **EXACT)
        if factor < 25:
            torch.testing.assert_close(first, torch.full((numel,), factor * mean), **EXACT)
    assert kept[2][0] is None if unused == "none" else not kept[2][0].any()
    reducer.close()


def test_later_passes_do_not_change_gradients_that_the_program_keeps(typical):
    typical.each(keeps, itertools.product(SIZES, ["zero", "none"]), [(1000, "none"), (20000, "zero")])


def keeps_over_a_new_layout(backend):
    model = perceptron()
    model[0].requires_grad_(False)
    optimizer = sgd(model, backend)
    vector_loss(model, backend.rank).backward()
    kept = model[2].weight.grad
    before = kept.clone()
    optimizer.zero_grad()
    model[0].requires_grad_(True)
    vector_loss(model, backend.rank).backward()
    assert model[2].weight.grad is not kept
    torch.testing.assert_close(kept, before, **EXACT)


def test_a_new_bucket_layout_does_not_change_gradients_that_the_program_keeps(typical):
    typical(keeps_over_a_new_layout)


def test_a_step_copies_no_gradient():
    model = perceptron()
    with connect("local") as backend:
        optimizer = sgd(model, backend)
        vector_loss(model, 0).backward()
        aliases = [slot.alias for slot in optimizer.reducer.slots]
        ids = [id(alias) for alias in aliases]
        del aliases
        for _ in range(2):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            vector_loss(model, 0).backward()
        assert [id(slot.alias) for slot in optimizer.reducer.slots] == ids


def lists_parameters_in_another_order(backend, in_new_group):
    """Give the optimizer the same parameters in a different order on each rank, when it is made or in a later group."""
    model = seeded(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))))
    first = nn.Parameter(torch.ones(1))
    params = list(model.parameters())
    params = params[backend.rank :] + params[: backend.rank]
    wrapped = DistributedOptimizer(torch.optim.SGD([first] if in_new_group else [first, *params], 0.1), backend=backend)
    if in_new_group:
        wrapped.add_param_group({"params": params})
    name = r"'group \d parameter \d'"
    pattern = rf"ranks 0 and 1 have the same parameters in different orders \({name} is the first one that differs\)"
    with refused(backend, pattern):
        (vector_loss(model, backend.rank) * first).sum().backward()
    wrapped.close()


@contextmanager
def refused(backend, pattern):
    """Expect a BackendError in the block if there are several ranks."""
    if backend.size == 1:
        yield
        return
    with pytest.raises(BackendError, match=pattern):
        yield


def test_parameters_in_another_order_on_each_rank_are_refused(typical):
    typical.each(lists_parameters_in_another_order, [(False,), (True,)])


def adds_a_group_again(backend, zero_in_place):
    """List each weight twice in its group; later remove a group from the optimizer, and add it again."""
    model = perceptron()
    base = torch.optim.SGD([{"params": [p, p]} if p.dim() > 1 else {"params": [p]} for p in model.parameters()], 0.1)
    wrapped = DistributedOptimizer(base, backend=backend)
    expected = mean_gradients(model, of_every_rank(backend, vector_loss))
    for step in range(4):
        wrapped.zero_grad(set_to_none=not zero_in_place)
        vector_loss(model, backend.rank).backward()
        for p, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=1e-5, atol=1e-6)
        if step == 1:
            wrapped.add_param_group(wrapped.param_groups.pop(0))
    assert len(wrapped.reducer.slots) == len(list(model.parameters()))
    wrapped.close()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_group_that_is_added_again_and_a_parameter_listed_twice_are_averaged_once(typical):
    typical.each(adds_a_group_again, [(False,), (True,)])


def freezes_a_sparse_embedding(backend, on_all_ranks):
    """Freeze an embedding with sparse gradients after two steps, on all ranks or on rank 0 only.

    If it is frozen on rank 0 only, the second step after that is refused.
    """
    embedding, head = seeded(nn.Embedding(10, 3, sparse=True)), seeded(nn.Linear(3, 1))
    params = [*embedding.parameters(), *head.parameters()]
    wrapped = DistributedOptimizer(torch.optim.SGD(params, 0.1, momentum=0.9), backend=backend)

    def step():
        wrapped.zero_grad()
        head(embedding(torch.arange(backend.rank, backend.rank + 3))).sum().backward()
        wrapped.step()

    step()
    step()
    if on_all_ranks or backend.rank == 0:
        embedding.weight.requires_grad_(False)
    before = embedding.weight.detach().clone()
    step()
    if on_all_ranks or backend.rank == 0:
        assert embedding.weight.grad is None
        assert torch.equal(embedding.weight, before)
    if on_all_ranks:
        step()
        assert torch.equal(embedding.weight, before)
    else:
        with refused(backend, "rank 0: parameter 'group 0 parameter 0' was frozen on this rank and trained on others"):
            step()
    wrapped.close()


def test_a_frozen_parameter_with_sparse_gradients_does_not_change(typical):
    typical.each(freezes_a_sparse_embedding, [(True,), (False,)])


def steps_one_optimizer_per_parameter(backend, count):
    """Step in backward with one optimizer for each of many parameters."""
    params = [nn.Parameter(torch.full((2,), float(number))) for number in range(count)]
    wrapped = {p: DistributedOptimizer(torch.optim.SGD([p], 1.0), backend=backend) for p in params}

    def step(p):
        wrapped[p].step()
        wrapped[p].zero_grad()

    for p in params:
        p.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        sum((p * (backend.rank + 1)).sum() for p in params).backward()
    mean = (backend.size + 1) / 2
    for number, p in enumerate(params):
        torch.testing.assert_close(p.detach(), torch.full((2,), number - 2 * mean))
    for each in wrapped.values():
        each.close()


def test_more_than_twenty_optimizers_may_share_a_backend(typical):
    typical.each(steps_one_optimizer_per_parameter, [(45,)], [(21,)])


def conjugates(backend):
    """Assign the conjugate of an averaged gradient, on rank 0 only, and average again."""
    p = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    reducer = GradientReducer([("p", p)], backend)
    for _ in range(2):
        p.grad = torch.full((2,), 1 + 2j)
        reducer.renew()
        reducer.reduce()
    if backend.rank == 0:
        p.grad = p.grad.conj()
    reducer.renew()
    reducer.reduce()
    mean = 1 + 2j * (backend.size - 2) / backend.size
    torch.testing.assert_close(p.grad.resolve_conj(), torch.full((2,), mean))
    reducer.close()


def test_a_lazily_conjugated_gradient_is_averaged_with_its_conjugated_values(typical):
    typical(conjugates)


def conjugates_kept(backend):
    """Conjugate the ``.data`` of an averaged gradient that the program keeps; then accumulate another gradient."""
    p = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    reducer = GradientReducer([("p", p)], backend)
    weights = torch.tensor([1 + 2j, 3 - 4j])
    (p * weights * (backend.rank + 1)).sum().real.backward()
    kept, mean = p.grad, p.grad.clone()
    kept.data = kept.data.conj()
    reducer.renew()
    (p * weights * (backend.rank + 1)).sum().real.backward()
    torch.testing.assert_close(kept.resolve_conj(), mean.conj().resolve_conj() + mean)
    assert p.grad is kept
    reducer.close()


def test_a_kept_gradient_whose_data_was_conjugated_holds_the_average(typical):
    typical(conjugates_kept)


def conjugates_data(backend):
    """Assign the conjugate of an averaged gradient to its ``.data``; then average new gradients."""
    p = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    reducer = GradientReducer([("p", p)], backend)
    for _ in range(2):
        p.grad = None
        reducer.renew()
        (p * torch.tensor([1 + 2j, 3 - 4j])).sum().abs().backward()
        mean = p.grad.resolve_conj().clone()
        p.grad.data = p.grad.data.conj()
        torch.testing.assert_close(p.grad.resolve_conj(), mean.conj().resolve_conj())
    torch.testing.assert_close(mean, torch.autograd.grad((p * torch.tensor([1 + 2j, 3 - 4j])).sum().abs(), p)[0])
    reducer.close()


def test_a_gradient_has_the_new_average_after_its_conjugate_was_assigned_to_its_data(typical):
    typical(conjugates_data)


def double(gradient):
    gradient.mul_(2)


def changes_a_kept_gradient(backend, numel):
    """Change an earlier gradient in place while the next backward runs.

    At the end, zero all gradients in place: they no longer count as reduced.
    """
    first, last = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(numel))
    with small_buckets():
        reducer = GradientReducer([("first", first), ("last", last)], backend)
        kept = None
        for _ in range(3):
            first.grad = last.grad = None
            scaled = first * (backend.rank + 1)
            if kept is not None:
                before = kept.clone()
                scaled.register_hook(lambda _, kept=kept: double(kept))
            (scaled.sum() * last).sum().backward()
            torch.testing.assert_close(last.grad, torch.full((numel,), 1.5 * (backend.size + 1)), **EXACT)
            if kept is not None:
                torch.testing.assert_close(kept, 2 * before, **EXACT)
                del before
            kept = last.grad
        assert reducer.is_reduced()
        last.grad.zero_()
        first.grad.zero_()
        assert not reducer.is_reduced()
    reducer.close()


def test_an_earlier_gradient_may_be_changed_during_backward(typical):
    typical.each(changes_a_kept_gradient, [(3,), (20000,)])


def converts_a_parameter_in_backward(backend):
    """Change the dtype of a parameter on rank 0 during backward, before its gradient is sent."""
    first, last = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(20000))
    reducer = GradientReducer([("first", first), ("last", last)], backend, transfer=Transfer(groups=[[first, last]]))
    for step in range(2):
        first.grad = last.grad = None
        scaled = first * 2
        if step == 1 and backend.rank == 0:
            scaled.register_hook(lambda _: setattr(last, "data", last.data.double()))
        loss = (scaled.sum() * last).sum()
        if step == 0:
            loss.backward()
    with pytest.raises(BackendError, match="rank 0: parameter 'last'"):
        loss.backward()
    reducer.close()


def test_a_parameter_converted_in_backward_is_refused_on_all_ranks(typical):
    typical(converts_a_parameter_in_backward)


def unfreezes_in_backward(backend, numel, zero_in_place):
    """Unfreeze a parameter during backward, when only rank 0 has sent the gradient of ``last``; return the error or ""."""
    frozen, first, extra = (nn.Parameter(torch.ones(3)) for _ in range(3))
    last = nn.Parameter(torch.ones(numel))
    named = [("frozen", frozen.requires_grad_(False)), ("first", first), ("extra", extra), ("last", last)]
    reducer = GradientReducer(named, backend, transfer=Transfer(groups=[[extra, last]]))

    def unfreeze(_):
        frozen.requires_grad_()

    for step in range(3):
        for _, p in named:
            p.grad = p.grad.zero_() if zero_in_place and p.grad is not None else None
        scaled = first * (backend.rank + 1)
        if step == 2:
            scaled.register_hook(unfreeze)
        loss = (scaled.sum() * last).sum()
        if backend.rank == 0 or step == 0:
            loss = loss + extra.sum()
        try:
            loss.backward()
        except BackendError as error:
            reducer.close()
            return str(error)
        torch.testing.assert_close(last.grad, torch.full((numel,), 1.5 * (backend.size + 1)), **EXACT)
    reducer.close()
    return ""


@pytest.mark.parametrize("zero_in_place", [False, True])
@pytest.mark.parametrize("numel", SIZES)
def test_a_parameter_unfrozen_in_backward_gives_averages_or_an_error_on_all_ranks(typical, numel, zero_in_place):
    errors = typical(unfreezes_in_backward, numel, zero_in_place)
    if any(errors):
        assert all("added or unfrozen during backward, when one of the ranks" in error for error in errors)


def test_gradients_that_the_program_does_not_keep_are_not_copied():
    # move_kept copies a gradient if its reference count is above REFERENCES, which is measured on an example. If the
    # example had fewer references than a gradient that the program does not keep, every gradient would be copied.
    slot = Slot("p", nn.Parameter(torch.zeros(3)))
    memory = torch.zeros(3)
    slot.alias, slot.address = memory.detach(), memory.data_ptr()
    slot.view, slot.strides = memory, memory.stride()
    alias = id(slot.alias)
    slot.param.grad = slot.alias
    slot.param.grad = None
    slot.move_kept()
    count = sys.getrefcount(slot.alias)
    assert id(slot.alias) == alias, (
        f"a gradient that the program does not keep has {count} references, REFERENCES is {REFERENCES}"
    )
    kept = slot.alias
    slot.move_kept()
    assert slot.alias is not kept
    assert kept.data_ptr() != memory.data_ptr()


def zeroes_in_hooks(backend, place, bucket_bytes):
    """Zero the gradients in hooks of parameters or of autograd nodes, which run before or after the reducer's hooks."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    named = [(str(number), p) for number, p in enumerate(params)]

    def zero(p):
        p.grad.zero_()

    def register(hook_place):
        if place == hook_place == "node":
            return [node.register_hook(lambda *_, p=p: zero(p)) for node, p in zip(nodes, params, strict=True)]
        return [p.register_post_accumulate_grad_hook(zero) for p in params] if place == hook_place else []

    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in params]
    with small_buckets(bucket_bytes):
        hooks = [*register("before"), *register("node")]
        reducer = GradientReducer(named, backend)
        hooks += register("after")
        for step in range(4):
            for p in params if step < 2 else []:  # later steps accumulate in the buckets
                p.grad = None
            sum((p * p).sum() for p in params).backward()
            assert not any(p.grad.any() for p in params)
    for hook in hooks:
        hook.remove()
    reducer.close()


def test_hooks_may_change_gradients_before_they_are_sent(typical):
    typical.each(
        zeroes_in_hooks,
        itertools.product(["before", "after", "node"], [(1, 1), (1 << 20, 25 << 20)]),
        [("before", (1, 1)), ("after", (1 << 20, 25 << 20)), ("node", (1, 1))],
    )


def changes_during_backward(backend):
    """Change a gradient after it has become ready, while its bucket still waits for another gradient."""
    p, q = nn.Parameter(torch.full((20000,), 2.0)), nn.Parameter(torch.full((20000,), 3.0))
    reducer = GradientReducer([("q", q), ("p", p)], backend)
    mean = (backend.size + 1) / 2

    def change(_):
        if factor == 3:
            p.grad.mul_(factor)
        elif factor == 4:
            p.grad.data.mul_(factor)
        else:
            p.grad = p.grad * factor

    for factor in (3, 4, 5):
        p.grad = q.grad = None
        x = q * 1.0
        x.register_hook(change)
        ((backend.rank + 1) * (x * p).sum()).backward()
        torch.testing.assert_close(p.grad, torch.full((20000,), mean * 3 * factor), **EXACT)
        torch.testing.assert_close(q.grad, torch.full((20000,), mean * 2), **EXACT)
    reducer.close()


def test_hooks_of_activations_may_change_gradients_that_wait_for_their_bucket(typical):
    typical(changes_during_backward)


def ready_twice(backend):
    """Use a parameter both outside and inside a reentrant checkpoint, so that its gradient becomes ready twice."""
    p, q = nn.Parameter(torch.full((20000,), 2.0)), nn.Parameter(torch.full((20000,), 3.0))
    reducer = GradientReducer([("q", q), ("p", p)], backend)
    mean = (backend.size + 1) / 2
    for _ in range(3):
        p.grad = q.grad = None
        inner = checkpoint(lambda x: x * p, q * 1.0, use_reentrant=True)
        ((backend.rank + 1) * (inner * p).sum()).backward()
        torch.testing.assert_close(p.grad, torch.full((20000,), mean * 12), **EXACT)
        torch.testing.assert_close(q.grad, torch.full((20000,), mean * 4), **EXACT)
    reducer.close()


def test_a_gradient_that_is_ready_twice_is_sent_once_as_the_sum(typical):
    typical(ready_twice)


def averages_of_overflowing_sums(backend):
    """Average gradients whose sum overflows.

    With ``average_first``, gradients are multiplied by 1/size before the sum, so that the average is finite. This needs a
    number of ranks that is a power of two, and a backend that does not scale sums itself.
    """
    for numel in SIZES:
        for average_first in (True, False):
            p = nn.Parameter(torch.zeros(numel))
            reducer = GradientReducer([("p", p)], backend, transfer=Transfer(average_first=average_first))
            exact = backend.size == 1 or (average_first and backend.size in (2, 4) and not backend.scales_sums)
            for _ in range(2):
                p.grad = None
                (2e38 * p).sum().backward()
                torch.testing.assert_close(p.grad, torch.full((numel,), 2e38 if exact else torch.inf), **EXACT)
            reducer.close()


def test_averages_of_large_gradients_do_not_overflow_if_the_factor_is_applied_first(typical):
    typical(averages_of_overflowing_sums)


def drops_one_gradient(backend, dropped):
    """Drop one gradient between two backward passes; the second pass adds to the other gradient, in the bucket."""
    params = [nn.Parameter(torch.zeros(numel)) for numel in SIZES]
    reducer = GradientReducer([(str(number), p) for number, p in enumerate(params)], backend)
    mean = (backend.size + 1) / 2
    for _ in range(2):
        params[dropped].grad = None
        ((backend.rank + 1) * sum(p.sum() for p in params)).backward()
    for number, p in enumerate(params):
        torch.testing.assert_close(p.grad, torch.full_like(p, mean if number == dropped else 2 * mean), **EXACT)
    reducer.close()


def test_an_accumulated_gradient_is_averaged_together_with_a_new_one(typical):
    typical.each(drops_one_gradient, [(0,), (1,)])


def casts_a_large_parameter(backend):
    model, last = seeded(nn.Linear(2, 20000)), backend.size - 1
    optimizer = sgd(model, backend)
    for step in range(2):  # after the first step, the last rank casts its model
        optimizer.zero_grad()
        model.to(torch.float64 if step and backend.rank == last else torch.float32)
        loss = model(torch.ones(1, 2, dtype=model.bias.dtype)).sum()
        if step:
            with pytest.raises(BackendError, match=rf"rank {last}: parameter 'weight' was float32"):
                loss.backward()
        else:
            loss.backward()
            optimizer.step()


def test_a_large_parameter_that_is_cast_on_one_rank_is_refused(spmd):
    spmd(casts_a_large_parameter)


def freezes_on_one_rank(backend):
    model = perceptron()
    optimizer = sgd(model, backend)
    last = backend.size - 1
    for step in range(2):  # in the second step, the last rank freezes the weight
        model[0].weight.requires_grad_(step == 0 or backend.rank != last)
        optimizer.zero_grad()
        vector_loss(model, backend.rank).backward()
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(BackendError, match=rf"rank {last}: parameter '0\.weight' was frozen on this rank and trained on"):
        vector_loss(model, backend.rank).backward()


def test_a_parameter_that_is_frozen_on_some_ranks_is_refused(many):
    many(freezes_on_one_rank)


def unfreezes_on_one_rank(backend):
    """Freeze two parameters on all ranks; later, unfreeze them on the first rank only."""
    model = perceptron()
    optimizer = sgd(model, backend)

    def step(requires_grad):
        model[0].requires_grad_(requires_grad)
        optimizer.zero_grad()
        vector_loss(model, backend.rank).backward()
        optimizer.step()

    for requires_grad in (True, False, False, backend.rank == 0):
        step(requires_grad)
    with pytest.raises(BackendError, match=r"rank 1: parameter '0\.(weight|bias)' was frozen on this rank and trained on"):
        step(backend.rank == 0)


def test_a_parameter_that_is_unfrozen_on_some_ranks_is_refused(many):
    many(unfreezes_on_one_rank)


def freezes_with_shards(backend):
    """Take steps of two shards per rank; the last rank freezes a parameter that the others train."""
    model, order = perceptron(), SumOrder(2 * backend.size, backend.size)
    reducer = GradientReducer(model.named_parameters(), backend, order=order)
    last = backend.size - 1

    def step():
        reducer.begin_shards()
        with reducer.no_sync():
            vector_loss(model, backend.rank).backward()
        reducer.add_shard()
        vector_loss(model, backend.rank).backward()
        for p in model.parameters():
            p.grad = None
        reducer.renew()

    step()
    model[0].weight.requires_grad_(backend.rank != last)
    step()
    with pytest.raises(BackendError, match=rf"rank {last}: parameter '0\.weight' was frozen on this rank and trained on"):
        step()
    reducer.close()


def test_a_parameter_that_is_frozen_on_some_ranks_is_refused_with_shards_too(many):
    many(freezes_with_shards)


def test_backward_computes_gradients_of_parameters_unfrozen_after_close():
    model = perceptron()
    model[0].requires_grad_(False)
    with connect("local") as backend:
        optimizer = sgd(model, backend)
        vector_loss(model, 0).backward()
        optimizer.step()
        optimizer.close()
        model[0].requires_grad_(True)
        optimizer.zero_grad()
        vector_loss(model, 0).backward()
        assert model[0].weight.grad.any()


def test_backward_computes_gradients_of_parameters_added_after_close():
    model = perceptron()
    with connect("local") as backend:
        optimizer = wrap(torch.optim.SGD(model[0].parameters(), lr=0.1), model, backend)
        vector_loss(model, 0).backward()
        optimizer.close()
        optimizer.add_param_group({"params": model[2].parameters()})
        optimizer.step()  # with the averages of the backward before close()
        optimizer.zero_grad()
        vector_loss(model, 0).backward()
        assert model[2].weight.grad.any()


def swaps_what_is_frozen(backend):
    """Swap the frozen and the trained layer between steps: backward averages the gradients of the newly trained one."""
    body, head = seeded(nn.Linear(3, 2), 1).requires_grad_(False), seeded(nn.Linear(2, 1), 2)
    model = nn.Sequential(body, head)
    optimizer = sgd(model, backend)
    for frozen, trained in ((body, head), (head, body), (body, head)):
        frozen.requires_grad_(False)
        trained.requires_grad_(True)
        optimizer.zero_grad()
        (backend.rank + model(torch.ones(2, 3)).sum()).square().backward()
        assert same_on_all(backend, gradients(trained))
        optimizer.step()


def test_gradients_are_averaged_after_frozen_and_trained_layers_are_swapped(typical):
    typical(swaps_what_is_frozen)


def own_factors(backend):
    """Multiply by a different factor on each rank before the sum, and by 1/size after it.

    Rank 0 gives ``after=None``, which also means 1/size. One gradient is dense, and one is sparse.
    """
    p, table = nn.Parameter(torch.ones(3)), nn.Embedding(3, 1, sparse=True)
    after = 1 / backend.size if backend.rank else None
    named = [("p", p), ("table", table.weight)]
    reducer = GradientReducer(named, backend, transfer=Transfer(before=backend.rank + 1.0, after=after))
    (p.sum() + table(torch.arange(3)).sum()).backward()
    for grad in (p.grad, table.weight.grad.to_dense().flatten()):
        torch.testing.assert_close(grad, torch.full((3,), (backend.size + 1) / 2))
    reducer.close()


def test_ranks_may_multiply_gradients_by_different_factors_before_the_sum(many):
    many(own_factors)


def other_options(backend, option):
    p = nn.Parameter(torch.ones(3))
    last = backend.size - 1
    other = backend.rank == last
    unused = "none" if other and option == "unused" else "zero"
    transfer = Transfer(after=1.0 if other and option == "factor" else 0.5)
    reducer = GradientReducer([("p", p)], backend, unused=unused, transfer=transfer)
    values = (
        ("unused=zero", "unused=none") if option == "unused" else ("factor 0.5 after the sum", "factor 1.0 after the sum")
    )
    message = f"same options of the gradients' exchange: {values[0]} on rank 0 and {values[1]} on rank {last};"
    with pytest.raises(BackendError, match=message):
        p.sum().backward()
    reducer.close()


@pytest.mark.parametrize("option", ["unused", "factor"])
def test_options_that_differ_between_ranks_are_refused(many, option):
    many(other_options, option)


class ScheduleFree(torch.optim.SGD):
    """An optimizer that has a train mode and an eval mode, as schedule-free optimizers do."""

    mode = "train"

    def eval(self):
        self.mode = "eval"


def test_methods_of_the_wrapped_optimizer_are_found():
    model = perceptron()
    with connect("local") as backend:
        optimizer = wrap(ScheduleFree(model.parameters(), lr=0.1), model, backend)
        optimizer.eval()
        assert (optimizer.mode, optimizer.optimizer.mode) == ("eval", "eval")
        with pytest.raises(AttributeError, match="no attribute 'missing'"):
            _ = optimizer.missing
