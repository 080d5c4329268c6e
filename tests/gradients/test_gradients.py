"""``GradientReducer``: after backward every rank's gradients are the average, for all kinds of models and passes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dualtrain import BackendError, DistributedOptimizer, PeerFailedError
from dualtrain.gradients import GradientReducer, Transfer
from tests.forked import wait_until
from tests.models_for_tests import (
    EXACT,
    conv_net,
    count_live_tensors,
    gradients,
    image_loss,
    images,
    mean_gradients,
    of_every_rank,
    perceptron,
    same_on_all,
    seeded,
    sgd,
    small_buckets,
    vector_loss,
    vectors,
    wrap,
)
from tests.threads import run_threads

UNUSED = ["zero", "none"]


def check(actual, expected, **tolerance):
    assert len(actual) == len(expected)
    for mine, oracle in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, oracle, **tolerance)


# -- the average --------------------------------------------------------------------------------------------------


def averages(backend, sizes):
    model = conv_net()
    expected = mean_gradients(model, of_every_rank(backend, image_loss))
    with small_buckets(sizes):
        optimizer = sgd(model, backend)
        for _ in range(3):  # the first backward makes the buckets
            optimizer.zero_grad()
            image_loss(model, backend.rank).backward()
            check(gradients(model), expected)
            assert same_on_all(backend, gradients(model))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    check([(old - p.detach()) for old, p in zip(before, model.parameters(), strict=True)], [0.1 * g for g in expected])


def test_gradients_are_the_mean_over_ranks_right_after_backward(spmd):
    spmd.each(averages, [((1, 1),), ((1 << 8, 1 << 11),), ((1 << 20, 25 << 20),)])


def reducer_alone(backend):
    model = perceptron()
    expected = mean_gradients(model, of_every_rank(backend, vector_loss))
    reducer = GradientReducer(model.named_parameters(), backend)
    vector_loss(model, backend.rank).backward()
    check(gradients(model), expected)
    reducer.reduce()  # has no effect after backward
    check(gradients(model), expected)
    reducer.close()
    model.zero_grad()
    vector_loss(model, backend.rank).backward()
    check(gradients(model), mean_gradients(model, [lambda m: vector_loss(m, backend.rank)]))


def test_a_reducer_works_without_an_optimizer_and_ends_with_close(typical):
    typical(reducer_alone)


def views(backend):
    model = conv_net()
    optimizer = sgd(model, backend)
    image_loss(model, backend.rank).backward()
    inside = [
        (wire.data_ptr(), wire.data_ptr() + wire.nbytes) for wire in (b.memory.wire for b in optimizer.reducer.buckets)
    ]
    for p in model.parameters():
        assert any(start <= p.grad.data_ptr() < end for start, end in inside)
    first = gradients(model)
    optimizer.zero_grad(set_to_none=False)
    image_loss(model, backend.rank).backward()  # adds to the zeroed gradients
    check(gradients(model), first, **EXACT)


def test_gradients_are_views_into_the_buckets_and_may_be_zeroed_in_place(typical):
    typical(views)


def clips(backend):
    model = conv_net()
    optimizer = sgd(model, backend)
    image_loss(model, backend.rank).backward()
    expected = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in gradients(model)]))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert same_on_all(backend, [norm])
    torch.testing.assert_close(norm, expected)
    clipped = gradients(model)
    optimizer.synchronize()
    optimizer.step()
    check(gradients(model), clipped, **EXACT)  # step() does not average them again
    assert same_on_all(backend, list(model.parameters()))


def test_clipping_after_backward_uses_the_average(spmd):
    spmd(clips)


# -- layouts, dtypes ----------------------------------------------------------------------------------------------


def channels_last(backend):
    models = [conv_net(), conv_net().to(memory_format=torch.channels_last)]
    with small_buckets():
        optimizers = [sgd(model, backend) for model in models]
        for step in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                image_loss(model, step * backend.size + backend.rank).backward()
                assert [p.grad.stride() for p in model.parameters()] == [p.stride() for p in model.parameters()]
                optimizer.step()
    assert models[1][0].weight.stride() != models[0][0].weight.stride()
    check(list(models[1].parameters()), list(models[0].parameters()))


def test_channels_last_gradients_keep_the_strides_of_their_parameters(typical):
    typical(channels_last)


def strange_strides(backend):
    base = torch.arange(24.0).reshape(4, 6)
    params = [
        nn.Parameter(base[:, ::2]),
        nn.Parameter(base.t()),
        nn.Parameter(torch.tensor(2.0)),
        nn.Parameter(torch.ones(0)),
    ]
    reducer = GradientReducer([(str(i), p) for i, p in enumerate(params)], backend)
    ((backend.rank + 1.0) * sum((p * p).sum() for p in params)).backward()
    mean = (backend.size + 1) / 2
    check([p.grad for p in params], [2 * mean * p.detach() for p in params])
    reducer.close()


def test_parameters_may_be_strided_transposed_scalar_or_empty(typical):
    typical(strange_strides)


def several_hooks(backend, numel):
    """Register hooks of two reducers and of the user on a parameter. Each hook must get this rank's own gradient."""
    p, seen = nn.Parameter(torch.zeros(numel)), []
    halves = Transfer(before=0.5, after=2.0 / backend.size)
    reducers = [GradientReducer([("p", p)], backend, transfer=halves) for _ in range(2)]
    hook = p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for _ in range(3):
        p.grad = None
        ((backend.rank + 1) * p.sum()).backward()
        check([p.grad, seen[-1]], [torch.full((numel,), x) for x in ((backend.size + 1) / 2, backend.rank + 1.0)])
    hook.remove()
    for reducer in reducers:
        reducer.close()


def test_other_hooks_of_a_parameter_get_the_local_gradient(typical):
    typical.each(several_hooks, [(1000,), (20000,)])


TOLERANCES = {
    torch.bfloat16: {"rtol": 3e-2, "atol": 1e-3},
    torch.float16: {"rtol": 4e-3, "atol": 1e-4},
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.complex64: {"rtol": 1e-5, "atol": 1e-6},
}


def of_dtype(backend, dtype):
    model = perceptron(dtype=dtype)
    expected = mean_gradients(model, of_every_rank(backend, vector_loss))
    optimizer = sgd(model, backend)
    for _ in range(2):
        optimizer.zero_grad()
        vector_loss(model, backend.rank).backward()
        assert {p.grad.dtype for p in model.parameters()} == {dtype}
        check(gradients(model), expected, **TOLERANCES[dtype])
    optimizer.step()
    assert same_on_all(backend, list(model.parameters()))


def test_gradients_of_other_dtypes_than_float32_are_averaged(typical):
    typical.each(of_dtype, [(dtype,) for dtype in TOLERANCES])


def large_float16_gradients(backend):
    p = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    reducer = GradientReducer([("p", p)], backend)
    (p.float() * 60000.0).sum().backward()
    check([p.grad], [torch.full((3,), 60000.0).half()], **EXACT)
    reducer.close()


def test_the_average_of_large_16_bit_gradients_does_not_overflow(typical):
    typical(large_float16_gradients)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.bf16 = nn.Linear(4, 5, dtype=torch.bfloat16)
        self.single = nn.Linear(5, 6)
        self.wide = nn.Linear(6, 2, dtype=torch.float64)
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.last = nn.Linear(2, 1, dtype=torch.float16)

    def forward(self, x):
        y = self.wide(self.single(self.bf16(x.bfloat16()).float()).double())
        return self.last((y * self.phase).abs().half()).float()


def mixed_loss(model, key):
    return model(vectors(key)).square().mean()


def mixed(backend, extra, unused):
    model = seeded(Mixed())
    expected = mean_gradients(model, of_every_rank(backend, mixed_loss))
    with small_buckets((16, 64)):
        optimizer = sgd(model, backend, extra=extra, unused=unused)
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.extra[:] = backend.rank + 1
            mixed_loss(model, backend.rank).backward()
            check(gradients(model), expected, rtol=3e-2, atol=2e-3)
            assert optimizer.extra.tolist() == [backend.size * (backend.size + 1) / 2] * extra
    of_buckets = [{slot.param.dtype for slot in bucket.slots} for bucket in optimizer.reducer.buckets]
    assert all(len(dtypes) == 1 for dtypes in of_buckets)
    assert set().union(*of_buckets) == {p.dtype for p in model.parameters()}


def test_one_model_may_mix_dtypes(typical):
    typical.each(mixed, itertools.product([0, 2], UNUSED), [(0, "none"), (2, "zero")])


# -- unused and frozen parameters ---------------------------------------------------------------------------------


class Branches(nn.Module):
    """Three parameters; a pass can use any of them."""

    def __init__(self):
        super().__init__()
        self.common = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.left = nn.Parameter(torch.tensor([3.0, 4.0]))
        self.right = nn.Parameter(torch.tensor([5.0, 6.0]))

    def loss(self, names, factor=1.0):
        return factor * sum((getattr(self, name) ** 2).sum() for name in names)


def unused_somewhere(backend, unused):
    model = Branches()
    plans = [["common", "left"] if rank == 0 else ["common"] for rank in range(backend.size)]
    expected = mean_gradients(model, [lambda m, names=names: m.loss(names) for names in plans])
    optimizer = sgd(model, backend, momentum=0, unused=unused)
    for _ in range(3):  # from the second pass on, the buckets still hold the previous pass's values
        optimizer.zero_grad()
        model.loss(plans[backend.rank]).backward()
        check([model.common.grad, model.left.grad], expected[:2])
        if unused == "zero":
            check([model.right.grad], expected[2:], **EXACT)
        else:
            assert model.right.grad is None


def test_a_gradient_that_is_missing_on_some_ranks_counts_as_zero_there(spmd):
    spmd.each(unused_somewhere, [(unused,) for unused in UNUSED])


def unused_everywhere(backend, unused):
    model = Branches()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = wrap(inner, model, backend, unused=unused)
    before = model.right.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        model.loss(["common", "left"]).backward()
        optimizer.step()
    decayed = before * (1 - 0.1 * 0.5) ** 2
    check([model.right.detach()], [decayed if unused == "zero" else before])
    optimizer.zero_grad()
    model.loss(["common", "right"]).backward()  # an unused parameter can be used later
    check([model.right.grad], [2 * model.right.detach()])


def test_weight_decay_changes_an_unused_parameter_only_with_unused_zero(typical):
    typical.each(unused_everywhere, [(unused,) for unused in UNUSED])


def no_backward(backend, unused):
    model = perceptron()
    optimizer = sgd(model, backend, unused=unused)
    last = backend.size - 1
    losses = of_every_rank(backend, vector_loss)
    for step in range(3):
        idle = last if step != 1 else 0
        expected = mean_gradients(model, [None if rank == idle else loss for rank, loss in enumerate(losses)])
        optimizer.zero_grad()
        if backend.rank != idle:
            vector_loss(model, backend.rank).backward()
        optimizer.step()
        if backend.size > 1 or unused == "zero":
            check(gradients(model), expected)
    assert same_on_all(backend, list(model.parameters()))


def test_a_rank_without_backward_adds_zeros_at_step(spmd):
    spmd.each(no_backward, [(unused,) for unused in UNUSED])


def changed_by_some_ranks(backend, change, synchronize):
    """Change the averages before the step. The last rank has no backward, and changes them only with ``synchronize``.

    Without ``synchronize``, the step must fail on the other ranks.
    """
    model = perceptron()
    optimizer = sgd(model, backend, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        if backend.rank < backend.size - 1:
            vector_loss(model, backend.rank).backward()
        if synchronize:
            optimizer.synchronize()
        if backend.rank < backend.size - 1 or synchronize:
            change(model)
        if backend.rank < backend.size - 1 and not synchronize:
            last = backend.size - 1
            with pytest.raises(BackendError, match=rf"rank {backend.rank} has changed .* rank {last} uses them unchanged"):
                optimizer.step()
            return
        optimizer.step()
        if not synchronize:
            return
    assert same_on_all(backend, list(model.parameters()))


def clip_norm(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clamp_data(model):
    for p in model.parameters():
        p.grad.data.clamp_(-0.01, 0.01)  # ``.data`` has a version counter of its own


def assign_other(model):
    next(model.parameters()).grad = next(model.parameters()).grad * 0.5


def negate(model):
    list(model.parameters())[-1].grad.neg_()


def test_a_step_is_refused_if_all_ranks_but_the_one_without_backward_changed_the_averages(spmd):
    spmd.each(changed_by_some_ranks, [(change, False) for change in (clip_norm, clamp_data, assign_other, negate)])


def test_a_rank_without_backward_can_change_averages_after_synchronize(typical):
    typical.each(changed_by_some_ranks, [(clip_norm, True), (clamp_data, True)])


def closed_before_step(backend):
    """Close the optimizer between backward and step. The last rank has no backward, and closes it after its step."""
    model = perceptron()
    optimizer = sgd(model, backend)
    if backend.rank < backend.size - 1:
        vector_loss(model, backend.rank).backward()
        optimizer.close()
    optimizer.step()
    optimizer.close()
    assert same_on_all(backend, list(model.parameters()))


def test_unchanged_averages_may_be_used_after_close_if_a_rank_has_no_backward(typical):
    typical(closed_before_step)


def skipped_then_idle(backend, zero_grad):
    """Skip a step on all ranks, as GradScaler can do; in the next step, the last rank has no backward."""
    model = perceptron()
    expected = mean_gradients(model, [*of_every_rank(backend, vector_loss)[:-1], None])
    model.unused = nn.Parameter(torch.ones(2))  # never gets a gradient
    optimizer = sgd(model, backend, unused="none")
    vector_loss(model[0:], backend.rank).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    zero_grad(model, optimizer)
    if backend.rank < backend.size - 1:
        vector_loss(model[0:], backend.rank).backward()
    optimizer.step()
    assert model.unused.grad is None
    check([torch.zeros_like(p) if p.grad is None else p.grad for p in model[0:].parameters()], expected)


def by_optimizer(model, optimizer):
    optimizer.zero_grad()


def by_model(model, optimizer):
    model.zero_grad()


def by_model_in_place(model, optimizer):
    model.zero_grad(set_to_none=False)


def test_gradients_of_a_skipped_step_do_not_enter_the_next_step(typical):
    typical.each(skipped_then_idle, [(by_optimizer,), (by_model,), (by_model_in_place,)], [(by_optimizer,)])


def frozen(backend):
    model = conv_net()
    model[0].requires_grad_(False)
    start = model[0].weight.detach().clone()
    optimizer = sgd(model, backend, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        image_loss(model, step * backend.size + backend.rank).backward()
        assert model[0].weight.grad is None
        optimizer.step()
    check([model[0].weight.detach()], [start], **EXACT)
    model[0].requires_grad_(True)
    for step in range(3, 5):
        expected = mean_gradients(model, of_every_rank(backend, lambda m, r, s=step: image_loss(m, s * backend.size + r)))
        optimizer.zero_grad()
        image_loss(model, step * backend.size + backend.rank).backward()
        check(gradients(model), expected)
        optimizer.step()
    assert not torch.equal(model[0].weight, start)
    assert same_on_all(backend, list(model.parameters()))


def test_frozen_parameters_are_trained_only_after_they_are_unfrozen(typical):
    typical(frozen)


def all_frozen_then_unfrozen(backend):
    model = perceptron().requires_grad_(False)
    optimizer = sgd(model, backend, momentum=0)
    optimizer.step()  # has no effect
    model.requires_grad_(True)
    for step in range(2):
        expected = mean_gradients(model, of_every_rank(backend, vector_loss))
        optimizer.zero_grad()
        vector_loss(model, backend.rank).backward()
        optimizer.step() if step == 0 else optimizer.synchronize()
        check(gradients(model), expected)


def test_a_model_that_is_frozen_as_a_whole_may_be_unfrozen(typical):
    typical(all_frozen_then_unfrozen)


def frozen_later(backend, unused):
    model = perceptron()
    optimizer = sgd(model, backend, unused=unused)
    for trained in (True, False, True):
        model[0].requires_grad_(trained)
        expected = mean_gradients(model, of_every_rank(backend, vector_loss))
        optimizer.zero_grad()
        vector_loss(model, backend.rank).backward()
        if trained:
            check(gradients(model), expected)
        else:
            assert model[0].weight.grad is None
            check([model[2].weight.grad, model[2].bias.grad], expected[2:])
        optimizer.step()
    assert same_on_all(backend, list(model.parameters()))


def test_parameters_may_be_frozen_later(typical):
    typical.each(frozen_later, [(unused,) for unused in UNUSED], [("none",)])


def adversaries(backend):
    """Train two models with two optimizers in turn, then with one backward through both models."""
    generator, critic = seeded(nn.Linear(4, 4), 1), perceptron(2)
    generator_optimizer, critic_optimizer = sgd(generator, backend), sgd(critic, backend)

    def loss(pair, rank):
        return pair[1](pair[0](vectors(rank))).square().mean()

    pair = nn.ModuleList([generator, critic])
    for _ in range(2):
        for trained, optimizer in ((1, critic_optimizer), (0, generator_optimizer)):
            for i, model in enumerate(pair):
                model.requires_grad_(i == trained)
            expected = mean_gradients(pair[trained], of_every_rank(backend, _with_other(pair, trained, loss)))
            optimizer.zero_grad()
            loss(pair, backend.rank).backward()
            check(gradients(pair[trained]), expected)
            optimizer.step()
    pair.requires_grad_(True)
    expected = mean_gradients(pair, of_every_rank(backend, loss))
    generator_optimizer.zero_grad()
    critic_optimizer.zero_grad()
    loss(pair, backend.rank).backward()
    check(gradients(pair), expected)
    generator_optimizer.step()
    critic_optimizer.step()
    assert same_on_all(backend, list(pair.parameters()))


def _with_other(pair, trained, loss):
    def one(model, rank):
        return loss([model if i == trained else other for i, other in enumerate(pair)], rank)

    return one


def test_two_optimizers_may_step_alternately_or_after_one_common_backward(spmd):
    spmd(adversaries)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def tied(backend):
    model = seeded(Tied())
    expected = mean_gradients(model, of_every_rank(backend, vector_loss))
    optimizer = sgd(model, backend)
    for _ in range(2):
        optimizer.zero_grad()
        vector_loss(model, backend.rank).backward()
        check(gradients(model), expected)
    assert len(optimizer.reducer.slots) == len(list(model.parameters())) == 3
    optimizer.step()
    assert model.second.weight is model.first.weight


def test_shared_parameters_are_reduced_once(typical):
    typical(tied)


# -- sparse gradients ---------------------------------------------------------------------------------------------


class Lookup(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table = nn.Embedding(7, 3, sparse=sparse)
        self.head = nn.Linear(3, 2)

    def loss(self, words):
        out = self.head(torch.ones(1, 3))
        return (out if words is None else out + self.head(self.table(words)).mean(0)).square().sum()


def words(step, rank, size):
    """Return the indices, some repeated, that ``rank`` looks up; None for the last of several ranks."""
    if size > 1 and rank == size - 1:
        return None
    return torch.tensor([0, rank, 5, 5, step])


def look_up(backend, unused, momentum):
    sparse, dense = (seeded(Lookup(kind)) for kind in (True, False))
    with small_buckets():
        optimizer = sgd(sparse, backend, momentum=momentum, unused=unused)
    oracle = torch.optim.SGD(dense.parameters(), lr=0.1, momentum=momentum)
    for step in range(4):
        losses = [lambda m, r=rank, s=step: m.loss(words(s, r, backend.size)) for rank in range(backend.size)]
        expected = mean_gradients(dense, losses)
        optimizer.zero_grad()
        sparse.loss(words(step, backend.rank, backend.size)).backward()
        assert sparse.table.weight.grad.is_sparse
        check(gradients(sparse), expected)
        optimizer.step()
        for p, grad in zip(dense.parameters(), expected, strict=True):
            p.grad = grad
        oracle.step()
    check(list(sparse.parameters()), list(dense.parameters()))
    assert same_on_all(backend, list(sparse.parameters()))


def test_sparse_gradients_equal_dense_ones(typical):
    typical.each(look_up, itertools.product(UNUSED, [0.0, 0.9]), [("zero", 0.9), ("none", 0.0)])


def look_up_nothing(backend, unused):
    model = seeded(Lookup(True))
    optimizer = sgd(model, backend, momentum=0, unused=unused)
    for step, used in enumerate((True, False, True)):
        optimizer.zero_grad()
        model.loss(torch.tensor([backend.rank % 7, step]) if used else None).backward()
        grad = model.table.weight.grad
        assert (grad is None) == (not used and unused == "none")
        assert used or grad is None or (grad.is_sparse and grad._nnz() == 0)
        optimizer.step()


def test_a_sparse_parameter_that_no_rank_used_gets_no_gradient_or_an_empty_one(typical):
    typical.each(look_up_nothing, [(unused,) for unused in UNUSED])


def looks_up_densely_on_one_rank(backend):
    """Give one rank a dense gradient of a parameter whose gradient is sparse on the other ranks."""
    table, last = nn.Parameter(torch.ones(4, 2)), backend.size - 1
    reducer = GradientReducer([("table", table)], backend)
    for _ in range(2):
        table.grad = None
        nn.functional.embedding(torch.tensor([1]), table, sparse=backend.rank != last).sum().backward()
        assert table.grad.to_dense()[:, 0].tolist() == [0, 1, 0, 0]
        reducer.renew()
    reducer.close()


def test_a_gradient_may_be_sparse_on_some_ranks_only(many):
    many(looks_up_densely_on_one_rank)


def sparse_adam(backend):
    model, replica = (seeded(nn.Embedding(7, 3, sparse=True)) for _ in range(2))
    optimizer = wrap(torch.optim.SparseAdam(model.parameters(), lr=0.1), model, backend)
    oracle = torch.optim.SparseAdam(replica.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        looked_up = words(step, backend.rank, backend.size)
        if looked_up is not None:
            model(looked_up).square().sum().backward()
        optimizer.step()
        seen = [words(step, rank, backend.size) for rank in range(backend.size)]
        seen = torch.cat([each for each in seen if each is not None])
        oracle.zero_grad()
        (replica(seen).square().sum() / backend.size).backward()
        oracle.step()
    check(list(model.parameters()), list(replica.parameters()))
    assert same_on_all(backend, list(model.parameters()))


def test_sparse_adam_equals_one_process(typical):
    typical(sparse_adam)


# -- several passes -----------------------------------------------------------------------------------------------


def accumulated(model, keys):
    return sum(vector_loss(model, key) for key in keys)


def in_passes(backend, mode, unused):
    passes = 3
    model = perceptron()
    optimizer = sgd(model, backend, unused=unused, **({"backward_passes_per_step": passes} if mode == "counted" else {}))
    for step in range(2):
        keys = [[(step * passes + i) * backend.size + rank for i in range(passes)] for rank in range(backend.size)]
        expected = mean_gradients(model, [lambda m, mine=mine: accumulated(m, mine) for mine in keys])
        optimizer.zero_grad()
        *early, last = keys[backend.rank]
        dropped = mode == "counted" and step == 1
        if dropped:  # drop the gradients of a pass on all ranks
            vector_loss(model, last).backward()
            optimizer.zero_grad()
        for key in early:
            if mode == "no_sync":
                with optimizer.no_sync():
                    vector_loss(model, key).backward()
            else:
                vector_loss(model, key).backward()
        if mode != "every" and not dropped:
            local = mean_gradients(model, [lambda m, mine=early: accumulated(m, mine)])
            check(gradients(model), local)  # nothing has been sent yet
        vector_loss(model, last).backward()
        check(gradients(model), expected)
        optimizer.step()
    assert same_on_all(backend, list(model.parameters()))


def drops_alone(backend):
    """On one rank, drop the gradients of the first of two passes. All ranks still average in the second pass."""
    model = perceptron()
    optimizer = sgd(model, backend, backward_passes_per_step=2)
    for stepped in (True, False, True):
        vector_loss(model, backend.rank).backward()
        if backend.rank == 1:
            optimizer.zero_grad()
        vector_loss(model, backend.rank).backward()
        assert same_on_all(backend, gradients(model))
        if stepped:
            optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


def test_one_rank_may_drop_the_gradients_of_a_pass():
    run_threads(2, drops_alone)


def steps_in_backward(backend):
    """In a hook of each parameter, step with this rank's own gradient and drop it. Every rank must refuse these steps."""
    model = perceptron()
    reducer = GradientReducer(model.named_parameters(), backend)
    vector_loss(model, backend.rank).backward()  # makes the bucket

    def step(p):
        torch.optim.SGD([p], lr=0.1).step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    with pytest.raises(BackendError, match="changed in backward, and its gradient was dropped"):
        vector_loss(model, backend.rank).backward()
    reducer.close()


def test_steps_in_hooks_are_refused_if_they_use_local_gradients():
    for size in (1, 2):
        run_threads(size, steps_in_backward)


def steps_before_the_hook_of_the_reducer(backend, set_to_none, every, size):
    """In a hook that runs before the reducer's, step the optimizer that has only the hook's parameter.

    Step in each ``every``-th call of the hook. Without ``backend``, train on the batches of ``size`` ranks in one process.
    """
    model, optimizers, calls = perceptron(), {}, Counter()

    def step(p):
        calls[p] += 1
        if calls[p] % every == 0:
            optimizers[p].step()
            optimizers[p].zero_grad(set_to_none)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
        optimizer = torch.optim.SGD([p], lr=0.1)
        optimizers[p] = optimizer if backend is None else DistributedOptimizer(optimizer, backend=backend)
    for _ in range(4):
        ranks = range(size) if backend is None else [backend.rank]
        (sum(vector_loss(model, rank) for rank in ranks) / len(ranks)).backward()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("every", [1, 2])
def test_optimizers_may_step_in_hooks_that_run_before_those_of_the_reducer(set_to_none, every):
    for size in (1, 2):
        alone = steps_before_the_hook_of_the_reducer(None, set_to_none, every, size)
        for result in run_threads(size, steps_before_the_hook_of_the_reducer, set_to_none, every, size):
            torch.testing.assert_close(result, alone)


def steps_before_the_gradient_is_accumulated(backend, size):
    """In a hook that runs before autograd accumulates a gradient, step with the clipped gradient of the previous backward.

    Without ``backend``, train on the batches of ``size`` ranks in one process.
    """
    model, optimizers = perceptron(), {}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_hook(lambda _, p=p: step(p))
        optimizer = torch.optim.SGD([p], lr=0.1)
        optimizers[p] = optimizer if backend is None else DistributedOptimizer(optimizer, backend=backend)
    for _ in range(3):
        ranks = range(size) if backend is None else [backend.rank]
        (sum(vector_loss(model, rank) for rank in ranks) / len(ranks)).backward()
        for p in model.parameters():
            nn.utils.clip_grad_norm_([p], 0.01)
    return [p.detach().clone() for p in model.parameters()]


def test_gradients_are_averaged_in_backward_if_optimizers_step_before_autograd_accumulates_them():
    alone = steps_before_the_gradient_is_accumulated(None, 2)
    for result in run_threads(2, steps_before_the_gradient_is_accumulated, 2):
        torch.testing.assert_close(result, alone)


def updates_by_hand(backend, update, first):
    """Change parameters in their hooks, which are registered before the optimizer is wrapped, or after it."""
    model = perceptron()

    def register():
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)

    if first:
        register()
    optimizer = sgd(model, backend)
    if not first:
        register()
    for _ in range(2):
        optimizer.zero_grad()
        vector_loss(model, backend.rank).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def descend(p):
    p.data.add_(p.grad, alpha=-0.1)


def descend_and_drop(p):
    descend(p)
    p.grad = None


def clamp(p):
    p.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("update", [descend, descend_and_drop])
def test_updates_by_hand_in_hooks_are_refused_if_parameters_then_differ(update, first):
    with pytest.raises(BackendError, match=r"^rank 0: parameter '0\.weight' was changed in backward, and now differs"):
        run_threads(2, updates_by_hand, update, first)


@pytest.mark.parametrize("first", [True, False])
def test_hooks_may_make_the_same_change_to_parameters_on_every_rank(first):
    results = run_threads(2, updates_by_hand, clamp, first)
    assert all(map(torch.equal, *results))


def updates_by_hand_in_a_node(backend):
    model = perceptron()
    weight = model[0].weight
    node = torch.autograd.graph.get_gradient_edge(weight).node
    node.register_hook(lambda *_: descend(weight))
    optimizer = sgd(model, backend)
    vector_loss(model, backend.rank).backward()
    optimizer.close()


def test_updates_by_hand_in_hooks_of_autograd_nodes_are_refused_too():
    with pytest.raises(BackendError, match=r"parameter '0\.weight' was changed in backward, and now differs"):
        run_threads(2, updates_by_hand_in_a_node)


def clamps_different_weights(backend):
    model = perceptron()
    with torch.no_grad():
        model[0].weight.add_(0.01 * backend.rank)
    model[0].weight.register_post_accumulate_grad_hook(clamp)
    optimizer = sgd(model, backend)
    vector_loss(model, backend.rank).backward()
    optimizer.step()


def test_hooks_may_change_parameters_that_differed_between_the_ranks_before():
    run_threads(2, clamps_different_weights)


def frees_weights(backend):
    """Free a parameter's memory in its hook, and load the parameter before the step, as offloading does."""
    model = perceptron()
    weight = model[0].weight
    optimizer = sgd(model, backend)
    storage, saved = weight.untyped_storage(), weight.detach().clone()
    size = storage.size()

    def free(_):
        storage.resize_(0)

    weight.register_post_accumulate_grad_hook(free)
    vector_loss(model, backend.rank).backward()
    storage.resize_(size)
    weight.data.copy_(saved)
    optimizer.step()
    return weight.detach().clone()


def test_hooks_may_free_the_memory_of_parameters():
    first, second = run_threads(2, frees_weights)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def drops_in_backward(backend):
    """On one rank, let a hook call zero_grad() before backward has reached all parameters."""
    model = perceptron()
    optimizer = sgd(model, backend)
    vector_loss(model, backend.rank).backward()  # makes the bucket: all gradients are sent together
    optimizer.step()
    optimizer.zero_grad()
    if backend.rank == backend.size - 1:
        model[2].bias.register_post_accumulate_grad_hook(lambda _: optimizer.zero_grad())
    vector_loss(model, backend.rank).backward()
    assert same_on_all(backend, gradients(model))
    optimizer.close()


def test_a_backward_in_which_gradients_are_dropped_ends_with_averages():
    run_threads(2, drops_in_backward)


def test_gradients_of_several_passes_add_up(typical):
    """With ``no_sync`` or ``backward_passes_per_step``, gradients are sent in the last pass, else in every pass."""
    typical.each(
        in_passes,
        itertools.product(["no_sync", "counted", "every"], UNUSED),
        [("no_sync", "zero"), ("counted", "none"), ("every", "zero")],
    )


def steps_without_an_exchange_in_backward(backend, mode):
    model = perceptron()
    optimizer = sgd(model, backend, **({"backward_passes_per_step": 3} if mode == "counted" else {}))
    for _ in range(2):
        expected = mean_gradients(model, of_every_rank(backend, vector_loss))
        optimizer.zero_grad()
        if mode == "no_sync":
            with optimizer.no_sync():
                vector_loss(model, backend.rank).backward()
        else:
            vector_loss(model, backend.rank).backward()
        optimizer.step()  # sends the accumulated gradients
        check(gradients(model), expected)
    assert same_on_all(backend, list(model.parameters()))


def test_step_sends_gradients_that_were_accumulated_but_not_yet_sent(typical):
    typical.each(steps_without_an_exchange_in_backward, [("no_sync",), ("counted",)], [("counted",)])


def nested_no_sync(backend):
    model = perceptron()
    optimizer = sgd(model, backend)
    with optimizer.no_sync():
        with pytest.raises(KeyError), optimizer.no_sync():
            raise KeyError
        vector_loss(model, backend.rank).backward()
        check(gradients(model), mean_gradients(model, [lambda m: vector_loss(m, backend.rank)]))
    optimizer.zero_grad()
    vector_loss(model, backend.rank).backward()
    check(gradients(model), mean_gradients(model, of_every_rank(backend, vector_loss)))


def test_no_sync_can_be_nested_and_is_left_when_an_exception_is_raised(typical):
    typical(nested_no_sync)


def different_parts(backend):
    """Accumulate passes that use different parameters."""
    model = Branches()
    factors = list(range(1, backend.size + 1))
    expected = mean_gradients(
        model, [lambda m, f=f: m.loss(["common", "left"], f) + m.loss(["common", "right"], f) for f in factors]
    )
    optimizer = sgd(model, backend, backward_passes_per_step=2)
    with small_buckets((1, 1)):
        for _ in range(2):
            optimizer.zero_grad()
            for side in ("left", "right"):
                model.loss(["common", side], factors[backend.rank]).backward()
            check(gradients(model), expected)


def test_accumulated_passes_may_use_different_parameters(typical):
    typical(different_parts)


def retained(backend):
    model = perceptron()
    once = mean_gradients(model, of_every_rank(backend, vector_loss))
    optimizer = sgd(model, backend)
    for _ in range(2):
        optimizer.zero_grad()
        loss = vector_loss(model, backend.rank)
        loss.backward(retain_graph=True)
        check(gradients(model), once)
        loss.backward()
        check(gradients(model), [2 * g for g in once])
        optimizer.zero_grad()
        vector_loss(model, backend.rank).backward(create_graph=True)
        check(gradients(model), once)


# The filter is set here, not by each rank, because ranks that are threads share the warning filters.
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_backward_may_run_twice_through_a_retained_graph(typical):
    typical(retained)


def functional_gradients(backend):
    model = perceptron()
    optimizer = sgd(model, backend)
    if backend.rank == 0:  # autograd.grad is not collective: one rank alone can call it
        torch.autograd.grad(vector_loss(model, 0), list(model.parameters()))
    expected = mean_gradients(model, of_every_rank(backend, vector_loss))
    optimizer.zero_grad()
    vector_loss(model, backend.rank).backward(inputs=list(model[2].parameters()))
    optimizer.synchronize()
    check([p.grad for p in model[2].parameters()], expected[2:])


def test_autograd_grad_is_local_and_backward_with_inputs_is_averaged(typical):
    typical(functional_gradients)


class Checkpointed(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.reentrant = reentrant
        self.body, self.head = perceptron(1), seeded(nn.Linear(3, 2), 2)

    def forward(self, x):
        if self.reentrant is None:
            return self.head(self.body(x))
        return self.head(checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant))


def checkpointed(backend, reentrant):
    model = Checkpointed(reentrant)
    expected = mean_gradients(Checkpointed(), of_every_rank(backend, vector_loss))
    with small_buckets((1, 1)):
        optimizer = sgd(model, backend)
        for _ in range(3):
            optimizer.zero_grad()
            vector_loss(model, backend.rank).backward()
            check(gradients(model), expected)
    optimizer.step()
    assert same_on_all(backend, list(model.parameters()))


def test_gradients_are_averaged_with_activation_checkpointing(typical):
    typical.each(checkpointed, [(False,), (True,)], [(True,)])


class Segments(nn.Module):
    """Model whose trained layers are all in checkpointed segments; the last layer's segment is inside another segment.

    With ``reentrant=None``, it computes the same without checkpoints.
    """

    def __init__(self, reentrant=None):
        super().__init__()
        self.reentrant = reentrant
        self.parts = nn.ModuleList(seeded(nn.Linear(4, 4), number) for number in range(4))

    def segment(self, part, x):
        return part(x).tanh() if self.reentrant is None else checkpoint(part, x, use_reentrant=self.reentrant).tanh()

    def forward(self, x):
        x = x.requires_grad_()
        for part in self.parts[:-1]:
            x = self.segment(part, x)
        return self.segment(lambda y: self.segment(self.parts[-1], y), x)


def all_in_segments(backend, reentrant, passes):
    model, sent = Segments(reentrant), []
    losses = [lambda m, r=rank: sum(vector_loss(m, r + i) for i in range(passes)) for rank in range(backend.size)]
    expected = mean_gradients(Segments(), losses)
    with small_buckets((1, 1)):
        optimizer = sgd(model, backend, extra=1, backward_passes_per_step=passes)
        start = backend.start_sum
        backend.start_sum = lambda tensor, name, *rest: sent.append(name) or start(tensor, name, *rest)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.extra[0] = 1
            sent.clear()
            for i in range(passes):
                vector_loss(model, backend.rank + i).backward()
            check(gradients(model), expected)  # already averaged when backward returns
            assert optimizer.extra.tolist() == [backend.size]
            assert len(sent) == len(set(sent)) == len(list(model.parameters()))
            optimizer.step()
            with torch.no_grad():
                for p, q in zip(model.parameters(), Segments().parameters(), strict=True):
                    p.copy_(q)
        del backend.start_sum


def test_each_bucket_is_reduced_once_in_a_backward_of_many_checkpointed_segments(typical):
    typical.each(all_in_segments, itertools.product([False, True], [1, 2]), [(False, 2), (True, 1)])


# -- extra scalars ------------------------------------------------------------------------------------------------


def sums_extra_scalars(backend, unused):
    model = conv_net()
    with small_buckets():
        optimizer = sgd(model, backend, extra=3, unused=unused)
        for step in range(3):
            optimizer.zero_grad()
            optimizer.extra.copy_(torch.tensor([backend.rank, step, 0.5]))
            image_loss(model, backend.rank).backward()
            size = backend.size
            assert optimizer.extra.tolist() == [size * (size - 1) / 2, step * size, size / 2]
            assert optimizer.extra.dtype is torch.float64
            optimizer.step()


def test_extra_scalars_are_summed_with_the_gradients(typical):
    typical.each(sums_extra_scalars, [(unused,) for unused in UNUSED], [("none",)])


def sums_extra_scalars_once(backend):
    """Clip averages that are all zero. They then look as if the program had zeroed them, so ``synchronize`` reduces again.

    The extra scalars keep their sums.
    """
    model = torch.nn.Linear(3, 2)
    model.weight.data.zero_(), model.bias.data.zero_()  # the ranks are threads, which draw different numbers
    optimizer = sgd(model, backend, extra=2)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.extra[0], optimizer.extra[1] = backend.rank + 1, math.nan
        (0.0 * model(torch.ones(1, 3)).sum()).backward()
        for _ in range(2):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.synchronize()
        optimizer.step()
        assert optimizer.extra[0] == backend.size * (backend.size + 1) / 2
    optimizer.zero_grad()
    optimizer.step()  # ``extra`` still holds the last sum on every rank, so this step adds the sums of all ranks
    assert optimizer.extra[0] == backend.size**2 * (backend.size + 1) / 2


def test_extra_scalars_are_summed_once_if_all_averages_are_zero(typical):
    typical(sums_extra_scalars_once)


def sums_extra_scalars_alone(backend):
    """Train with sparse gradients only, so that no bucket of gradients can hold the extra scalars."""
    table = seeded(nn.Embedding(4, 2, sparse=True))
    optimizer = sgd(table, backend, momentum=0, extra=1)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.extra[0] = backend.rank
        table(torch.tensor([1])).sum().backward()
        assert optimizer.extra.tolist() == [backend.size * (backend.size - 1) / 2]


def test_extra_scalars_are_summed_without_dense_gradients(typical):
    typical(sums_extra_scalars_alone)


# -- mistakes -----------------------------------------------------------------------------------------------------


def differing(backend, difference):
    last = backend.rank == backend.size - 1
    if difference == "shape":
        layer = nn.Linear(4, 5 if last else 6)
    elif difference == "dtype":
        layer = nn.Linear(4, 6, dtype=torch.float64 if last else torch.float32)
    elif difference == "device":
        layer = nn.Linear(4, 6, device="meta" if last else "cpu")
    else:
        layer = nn.Conv2d(4, 2, 2).to(memory_format=torch.channels_last if last else torch.contiguous_format)
    model = nn.Sequential(nn.Tanh(), layer)
    optimizer = sgd(model, backend)
    with pytest.raises(BackendError, match=r"same parameters: 1\.weight .* on rank 0 and 1\.weight .* on rank"):
        sum((p * p).sum() for p in model.parameters()).backward()
    assert backend.allreduce(torch.ones(1), "sum").item() == backend.size  # the backend still works
    with pytest.raises(BackendError, match=r"1\.weight"):
        optimizer.step()


def test_different_parameters_are_reported_on_every_rank(many):
    many.each(differing, [("shape",), ("dtype",), ("strides",), ("device",)], [("strides",)])


def fewer(backend):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(2 + (backend.rank == 0))))
    optimizer = sgd(model, backend)
    with pytest.raises(BackendError, match=r"rank 0 has 6, rank 1 has 4"):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.close()


def test_fewer_parameters_on_one_rank_are_reported(many):
    many(fewer)


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.armed:
            raise ArithmeticError("backward failed")
        return grad, None


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = seeded(nn.Linear(4, 4), 1), seeded(nn.Linear(4, 4), 2)
        self.armed = False

    def forward(self, x):
        return self.second(Explode.apply(self.first(x), self.armed))


def fails_in_backward(backend, sizes, passes):
    """Make backward fail in the same layer on all ranks. With small buckets, the first bucket has been sent by then."""
    model = Fragile()
    losses = of_every_rank(backend, lambda m, rank: passes * vector_loss(m, rank))
    with small_buckets(sizes):
        optimizer = sgd(model, backend, backward_passes_per_step=passes)
        for armed in (False, True, False, True, True, False):
            model.armed = False
            expected = mean_gradients(model, losses)
            optimizer.zero_grad()
            for _ in range(passes):
                model.armed = armed
                with pytest.raises(ArithmeticError) if armed else nullcontext():
                    vector_loss(model, backend.rank).backward()
            if armed:
                optimizer.synchronize()
            else:
                check(gradients(model), expected)
                optimizer.step()
    assert same_on_all(backend, list(model.parameters()))


def test_synchronize_ends_the_exchange_of_a_failed_backward(typical):
    # With small buckets, backward fails after the first bucket is sent; with large buckets, before any is sent.
    after_sending, before_sending = ([(sizes, passes) for passes in (1, 2)] for sizes in ((1, 1), (1 << 20, 25 << 20)))
    typical.each(fails_in_backward, [*after_sending, *before_sending], [after_sending[1], before_sending[0]])


def fails_before_sending(backend):
    model = Fragile()
    optimizer = sgd(model, backend)
    for armed in (False, True, False):
        expected = mean_gradients(model, of_every_rank(backend, vector_loss))
        optimizer.zero_grad()
        model.armed = armed
        if armed:
            with pytest.raises(ArithmeticError):
                vector_loss(model, backend.rank).backward()
            model.armed = False
        else:
            vector_loss(model, backend.rank).backward()
            check(gradients(model), expected)  # averaged by backward, without a call of synchronize()
            optimizer.step()


def test_a_pass_that_failed_before_anything_was_sent_is_discarded(typical):
    typical(fails_before_sending)


def fails_while_sending(backend):
    model = Fragile()
    with small_buckets((1, 1)):
        optimizer = sgd(model, backend)
        vector_loss(model, backend.rank).backward()
        optimizer.step()
        for context in (nullcontext, optimizer.no_sync):
            optimizer.zero_grad()
            model.armed = True
            with pytest.raises(ArithmeticError):
                vector_loss(model, backend.rank).backward()
            model.armed = False
            optimizer.zero_grad()
            with context(), pytest.raises(BackendError, match="call synchronize"):
                vector_loss(model, backend.rank).backward()
            optimizer.synchronize()
            optimizer.zero_grad()
            vector_loss(model, backend.rank).backward()
            check(gradients(model), mean_gradients(model, of_every_rank(backend, vector_loss)))


def test_a_backward_that_failed_while_it_sent_gradients_needs_a_call_of_synchronize(typical):
    typical(fails_while_sending)


def interrupted_send(backend, adds):
    """Interrupt rank 0 before it sends its first bucket. Rank 1 must not get rank 0's second bucket instead.

    With ``adds``, rank 0 then adds a parameter, which changes the layout.
    """

    def interrupt():
        raise KeyboardInterrupt

    model = perceptron()
    with small_buckets((1, 1)):
        optimizer = sgd(model, backend)
        vector_loss(model, backend.rank).backward()
        optimizer.zero_grad()
        if backend.rank:
            with pytest.raises(PeerFailedError, match="rank 0 has left the job"):
                vector_loss(model, backend.rank).backward()
            return
        optimizer.reducer.buckets[0].pack = interrupt
        with pytest.raises(KeyboardInterrupt):
            vector_loss(model, backend.rank).backward()
        if adds:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        for _ in range(2):
            with pytest.raises(BackendError, match="the exchange of gradients was interrupted, and cannot continue"):
                optimizer.synchronize()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("adds", [False, True])
def test_no_bucket_is_sent_after_one_that_was_interrupted(adds):
    run_threads(2, interrupted_send, adds)


def fails_to_send(backend, method):
    """Let ``method`` of a bucket fail on rank 0.

    There, each later backward, ``synchronize`` and ``step`` must raise an error that names this failure.
    """

    def fail():
        raise MemoryError("no memory for the bucket")

    def backward():
        vector_loss(model, backend.rank).backward()

    model = perceptron()
    with small_buckets((1, 1)):
        optimizer = sgd(model, backend)
        backward()
        optimizer.zero_grad()
        if backend.rank:
            with pytest.raises(PeerFailedError, match="rank 0 has left the job"):
                backward()
            return
        setattr(optimizer.reducer.buckets[1], method, fail)
        with pytest.raises(MemoryError):
            backward()
        for again in (backward, optimizer.synchronize, optimizer.step) * 2:
            with pytest.raises(BackendError, match=r"^an earlier exchange of gradients failed: no memory for the bucket$"):
                again()
            optimizer.zero_grad()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        for again in (backward, optimizer.synchronize):
            with pytest.raises(BackendError, match=r"^an earlier exchange of gradients failed: no memory for the bucket$"):
                again()


@pytest.mark.parametrize("method", ["pack", "start"])
def test_steps_after_a_bucket_that_could_not_be_sent_name_its_error(method):
    run_threads(2, fails_to_send, method)


# -- lifetime -----------------------------------------------------------------------------------------------------


def nothing_grows(backend):
    model = conv_net()
    with small_buckets():
        optimizer = sgd(model, backend, unused="none", extra=1)
        for step in range(12):
            optimizer.zero_grad()
            image_loss(model, step).backward()
            optimizer.step()
            if step == 4:
                before = count_live_tensors()
    # Horovod's thread may hold a tensor a little longer on a busy machine.
    assert wait_until(lambda: count_live_tensors() <= before, 20)
    optimizer.reducer.close()
    model.zero_grad()
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("real", [("torch", 2), ("horovod", 2)], ids=["torch-2", "horovod-2"], indirect=True)
def test_many_steps_leave_no_tensors_behind(real):
    real(nothing_grows)


def wrapped_again(backend):
    model = perceptron()
    for _ in range(3):
        expected = mean_gradients(model, of_every_rank(backend, vector_loss))
        optimizer = sgd(model, backend)
        optimizer.zero_grad()
        vector_loss(model, backend.rank).backward()
        check(gradients(model), expected)
        optimizer.step()
        optimizer.reducer.close()


def test_parameters_may_be_wrapped_again_after_close(typical):
    typical(wrapped_again)


def sums_on_one_rank(backend):
    """Configure rank 0 to sum the sparse gradients, and the other rank to average them."""
    parameters = nn.Embedding(4, 2, sparse=True).named_parameters()
    transfer = Transfer(before=1.0 if backend.rank == 0 else 0.5, after=1.0, coalesce=False)
    reducer = GradientReducer(parameters, backend, transfer=transfer)
    with pytest.raises(BackendError, match="plain sums"):
        reducer.reduce()


def test_sums_of_sparse_gradients_on_only_some_ranks_are_refused():
    run_threads(2, sums_on_one_rank)


def test_bad_options_are_refused(typical):
    typical(refuses)


def refuses(backend):
    model = perceptron()
    with pytest.raises(ValueError, match='unused=\'sometimes\' is not known: choose "zero" or "none"'):
        GradientReducer(model.named_parameters(), backend, unused="sometimes")
    with pytest.raises(ValueError, match="1 or more, not 0"):
        GradientReducer(model.named_parameters(), backend, passes=0)
    with pytest.raises(ValueError, match="groups is a list of parameters, and must be a list of lists"):
        Transfer(groups=list(model.parameters()))
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def batches_of_different_sizes(backend):
    """Use batches of different sizes: the average gives every rank, not every sample, the same weight."""
    model = conv_net()

    def loss(m, rank):
        x, y = images(rank, n=2 + rank)
        return nn.functional.cross_entropy(m(x), y)

    expected = mean_gradients(model, of_every_rank(backend, loss))
    optimizer = sgd(model, backend)
    loss(model, backend.rank).backward()
    check(gradients(model), expected)
    optimizer.close()


def test_ranks_with_batches_of_different_sizes_have_equal_weight(typical):
    typical(batches_of_different_sizes)


# -- how gradients are sent ---------------------------------------------------------------------------------------


def check_transfer(backend, transfer, factor, tolerance):
    model = perceptron()
    expected = [g * factor(backend.size) for g in mean_gradients(model, of_every_rank(backend, vector_loss))]
    reducer = GradientReducer(model.named_parameters(), backend, transfer=transfer)
    for _ in range(2):
        model.zero_grad()
        vector_loss(model, backend.rank).backward()
        check(gradients(model), expected, rtol=tolerance, atol=tolerance)
        reducer.renew()
    assert all(p.grad.dtype == p.dtype for p in model.parameters())


#: Name → transfer, function that returns the expected multiple of the mean for a number of ranks, tolerance.
TRANSFERS = {
    "sum": (Transfer(after=1.0), float, 1e-6),
    "half before": (Transfer(before=0.5, after=2.0), lambda size: float(size), 1e-6),
    "predivided": (Transfer(before=0.25), lambda size: 0.25, 1e-6),
    "float16": (Transfer(dtype=torch.float16), lambda size: 1.0, 2e-3),
    "one at a time": (Transfer(bucket_bytes=0), lambda size: 1.0, 1e-6),
}


def test_gradients_are_scaled_by_the_factors_of_the_transfer_with_any_wire_dtype_or_bucket_size(typical):
    typical.each(of_transfer, [(name,) for name in TRANSFERS], [("predivided",), ("float16",), ("one at a time",)])


def of_transfer(backend, name):
    check_transfer(backend, *TRANSFERS[name])


def large_in_float16(backend):
    p = nn.Parameter(torch.zeros(3))
    reducer = GradientReducer([("p", p)], backend, transfer=Transfer(dtype=torch.float16))
    (p * 40000.0).sum().backward()
    check([p.grad], [torch.full((3,), 40000.0)], rtol=2e-3, atol=0)
    reducer.close()


def test_the_average_of_large_gradients_sent_as_float16_does_not_overflow(typical):
    typical(large_in_float16)


def bfloat16(backend):
    transfer = Transfer(dtype=torch.bfloat16)
    if torch.bfloat16 in backend.narrow:
        check_transfer(backend, transfer, lambda size: 1.0, 2e-2)
        return
    with pytest.raises(ValueError, match=r"does not reduce torch\.bfloat16: compress to float16"):
        GradientReducer(perceptron().named_parameters(), backend, transfer=transfer)


def test_bfloat16_is_sent_if_the_backend_reduces_it_and_is_refused_otherwise(typical):
    typical(bfloat16)


def grouped(backend):
    model = conv_net()
    chosen = [[model[0].weight, model[7].bias], [model[5].weight]]
    expected = mean_gradients(model, of_every_rank(backend, image_loss))
    # Like ``layer.parameters()``, the groups are iterators.
    transfer = Transfer(groups=(iter(group) for group in chosen), bucket_bytes=0)
    reducer = GradientReducer(model.named_parameters(), backend, transfer=transfer)
    for _ in range(2):
        model.zero_grad()
        image_loss(model, backend.rank).backward()
        check(gradients(model), expected)
        reducer.renew()
    contents = [{slot.param for slot in bucket.slots} for bucket in reducer.buckets]
    assert all(set(group) in contents for group in chosen)
    assert len(contents) == len(list(model.parameters())) - 1


def test_parameters_of_a_group_share_a_bucket(typical):
    typical(grouped)


def dense(backend):
    model = seeded(nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1)))
    rows = torch.tensor([backend.rank, 9])
    loss = lambda m, rank: m(torch.tensor([rank, 9])).sum()  # noqa: E731
    expected = mean_gradients(model, of_every_rank(backend, loss))
    reducer = GradientReducer(model.named_parameters(), backend, transfer=Transfer(sparse_as_dense=True))
    for _ in range(2):
        model.zero_grad()
        model(rows).sum().backward()
        assert model[0].weight.grad.is_sparse
        check([p.grad.to_dense() for p in model.parameters()], [g.to_dense() for g in expected])
        reducer.renew()


def test_sparse_gradients_may_be_sent_as_dense_ones(typical):
    typical(dense)


def changes_backend(backend):
    model = perceptron()
    expected = mean_gradients(model, of_every_rank(backend, vector_loss))
    reducer = GradientReducer(model.named_parameters(), backend)
    vector_loss(model, backend.rank).backward()
    group = backend.group(range(backend.size))
    reducer.forget(group)
    assert reducer.backend is group
    model.zero_grad()
    vector_loss(model, backend.rank).backward()
    check(gradients(model), expected)


def test_a_reducer_may_change_its_backend(typical):
    typical(changes_backend)


def fails_after_sending(model, optimizer, backend, ranks):
    """Take a step. Then, on ``ranks``, let backward fail after it has sent a bucket, and call ``zero_grad``.

    Returns:
        Whether this rank is one of ``ranks``.
    """
    vector_loss(model, backend.rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    if backend.rank not in ranks:
        return False
    model.armed = True
    with pytest.raises(ArithmeticError):
        vector_loss(model, backend.rank).backward()
    model.armed = False
    optimizer.zero_grad()
    return True


def dropped_after_sending(backend, ranks, *closure):
    model = Fragile()
    with small_buckets((1, 1)):
        optimizer = sgd(model, backend)
        failed = fails_after_sending(model, optimizer, backend, ranks)
        call = (lambda: optimizer.step(*closure)) if failed else vector_loss(model, backend.rank).backward
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(BackendError, match=r"rank 0: .* zero_grad\(\) was called before their exchange had ended"):
            call()
        with pytest.raises(BackendError, match="the gradients were dropped"):
            optimizer.step()
        check(list(model.parameters()), before)
        vector_loss(model, backend.rank).backward()
        check(gradients(model), mean_gradients(model, of_every_rank(backend, vector_loss)))
        optimizer.step()
    assert same_on_all(backend, list(model.parameters()))


def test_no_rank_takes_a_step_with_gradients_that_a_rank_dropped_after_they_were_sent(typical):
    typical.each(dropped_after_sending, [((0,),), ((0,), loss_of_zero), (range(4),)], [((0,),)])


def loss_of_zero():
    return torch.zeros(())


def dropped_after_the_last_bucket(backend):
    layer = seeded(nn.Linear(4, 4), 1)
    optimizer = sgd(layer, backend)
    for armed in (False, True):
        with pytest.raises(ArithmeticError) if armed else nullcontext():
            layer(Explode.apply(torch.ones(1, 4, requires_grad=True), armed)).sum().backward()
        if not armed:
            optimizer.step()
        optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    for closure in (None, loss_of_zero):
        with pytest.raises(BackendError, match=r"zero_grad\(\) was called before their exchange had ended"):
            optimizer.step(closure)
    check(list(layer.parameters()), before)


def test_a_step_does_not_use_gradients_that_were_dropped_after_all_were_sent(typical):
    typical(dropped_after_the_last_bucket)


def drops_sums_later(backend, drop):
    """End a failed backward's exchange with ``synchronize()``, and drop the sums by the model's own ``zero_grad()``.

    With ``drop="no_sync"``, the next backward is inside ``no_sync``.
    """
    model = Fragile()
    with small_buckets((1, 1)):
        optimizer = sgd(model, backend)
        if fails_after_sending(model, optimizer, backend, (0,)):
            optimizer.synchronize()
        else:
            vector_loss(model, backend.rank).backward()
        model.zero_grad(set_to_none=drop == "set_to_none")
        with optimizer.no_sync() if drop == "no_sync" else nullcontext():
            vector_loss(model, backend.rank).backward()
        optimizer.synchronize()
        check(gradients(model), mean_gradients(model, of_every_rank(backend, vector_loss)))
        optimizer.step()
    assert same_on_all(backend, list(model.parameters()))


def test_sums_of_a_failed_backward_may_be_dropped_without_the_optimizer(typical):
    typical.each(drops_sums_later, [("set_to_none",), ("zeros",), ("no_sync",)], [("set_to_none",)])
