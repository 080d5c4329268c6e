"""Several reducers, or SyncBatchNorm, in a backward pass that uses different parameters on different ranks.

Other tests close reducers, move them to another backend, and interrupt an exchange.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dualtrain import BackendError, DistributedOptimizer, weights_sha256
from dualtrain.backends.local import LocalBackend
from dualtrain.batchnorm import synchronize_norms
from dualtrain.gradients import GradientReducer, Transfer
from dualtrain.gradients.turns import turns
from dualtrain.launchers import World
from tests.short_waits import short_waits
from tests.threads import run_threads

SMALL = Transfer(bucket_bytes=64)
#: Each entry: the indices of the models that a rank uses in one step, in the order in which their losses are added. The
#: entry depends on the rank and the step.
PARTS = [(0, 1), (1,), (1, 0), (), (0,), (0, 1), (1,)]
STEPS = 7
SECOND_ALONE = 2  # this step uses only the second optimizer, so in the next step, its buckets are sent first


def wrapped(model, backend, transfer=SMALL):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return DistributedOptimizer(optimizer, model.named_parameters(), backend=backend, transfer=transfer)


@torch.no_grad()
def filled(model):
    """Set the same weights on every rank, without torch's generator, because ranks that are threads share it."""
    for number, p in enumerate(model.parameters()):
        p.copy_(torch.sin(torch.arange(p.numel()) * 0.7 + number).view_as(p) * 0.4)
    return model


def two_models():
    return [filled(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))) for _ in range(2)]


def loss_of(models, rank, step):
    parts = (1,) if step == SECOND_ALONE else PARTS[(3 * rank + step) % len(PARTS)]
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + step))
    return sum(models[part](x).square().mean() for part in parts)


def alone(size):
    """Repeat in one process the training that :func:`in_parts` does on ``size`` ranks; return both models' weights."""
    models = two_models()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        total = sum(loss_of(models, rank, step) for rank in range(size)) / size
        total.backward()
        for optimizer in optimizers[step == SECOND_ALONE :]:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            optimizer.step()
    return [p for model in models for p in model.parameters()]


def in_parts(backend):
    """Train two models with one optimizer each, where a rank uses the models that ``PARTS`` gives for each step.

    In step ``SECOND_ALONE``, all ranks use only the second model. Compare the weights with those of :func:`alone`, and
    return their hashes.
    """
    models = two_models()
    optimizers = [wrapped(model, backend) for model in models]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(models, backend.rank, step)
        if isinstance(loss, torch.Tensor):
            loss.backward()
        used = optimizers[step == SECOND_ALONE :]
        for optimizer in used[:: (-1) ** (backend.rank + step)]:  # in opposite orders on even and odd ranks
            optimizer.step()
    mine = [p for model in models for p in model.parameters()]
    for p, expected in zip(mine, alone(backend.size), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-4, atol=1e-6)
    return [weights_sha256(model) for model in models]


def test_ranks_may_use_different_optimizers_in_one_backward(many):
    hashes = many(in_parts)
    assert hashes == hashes[:1] * many.size


def exchanges_every_second_pass(backend):
    """Run two passes. The optimizer ``two_passes`` exchanges after every second pass, ``one_pass`` after every pass.

    The exchange of ``one_pass`` after the first pass must not start an exchange of ``two_passes``.
    """
    models = two_models()
    options = {"extra": 1, "backward_passes_per_step": 2}
    two_passes = DistributedOptimizer(torch.optim.SGD(models[0].parameters(), lr=0.1), backend=backend, **options)
    one_pass = wrapped(models[1], backend)
    two_passes.extra[0] = 1
    for number in range(2):
        sum(model(torch.ones(2, 6)).sum() for model in models).backward()
        assert two_passes.extra.item() == (backend.size if number else 1)
        one_pass.step()


def test_gradients_are_not_exchanged_before_the_last_of_backward_passes_per_step():
    run_threads(2, exchanges_every_second_pass)


class Branched(nn.Module):
    """Model with a BatchNorm layer, followed by a branch that ``forward`` uses only if ``use_branch`` is true."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.branch = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x, use_branch):
        x = self.norm(self.first(x))
        return self.last(x) + (self.branch(x) if use_branch else 0.0)


def samples(rank, step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(7 * rank + step)).double()


def trains_branched(backend):
    """Train :class:`Branched` with SyncBatchNorm, where only even ranks use the branch; return the hash of the weights.

    Compare them with those of a model that gets the samples of all ranks in one process.
    """
    model = filled(Branched().double())
    whole = copy.deepcopy(model)
    synchronize_norms(model, backend)
    optimizer = wrapped(model, backend)
    reference = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        model(samples(backend.rank, step), backend.rank % 2 == 0).square().mean().backward()
        optimizer.step()
        reference.zero_grad()
        x = whole.norm(whole.first(torch.cat([samples(rank, step) for rank in range(backend.size)])))
        outputs = [whole.last(x), whole.branch(x)]
        total = torch.zeros(())
        for rank, (plain, branched) in enumerate(zip(*(each.split(4) for each in outputs), strict=True)):
            total = total + (plain + (branched if rank % 2 == 0 else 0.0)).square().mean() / backend.size
        total.backward()
        reference.step()
    for p, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, expected)
    torch.testing.assert_close(model.norm.running_var, whole.norm.running_var)
    return weights_sha256(model)


def test_sync_batchnorm_works_with_parameters_that_only_some_ranks_use(many):
    hashes = many(trains_branched)
    assert hashes == hashes[:1] * many.size


def uses_an_absent_optimizer(backend, closed):
    models = [*two_models(), filled(nn.Linear(6, 1))]
    optimizers = [wrapped(model, backend) for model in models]
    if backend.rank == 1 and closed:
        optimizers[1].close()
    elif backend.rank == 1:
        turns(backend)._members[1] = lambda: None  # like a weak reference to an object that no longer exists
    loss = sum(model(torch.ones(2, 6)).sum() for model in models)
    with pytest.raises(BackendError, match="was garbage-collected or closed on rank 1: keep it as long as its"):
        loss.backward()
    return len(optimizers)


@pytest.mark.parametrize("closed", [False, True])
def test_an_optimizer_garbage_collected_or_closed_on_one_rank_causes_an_error_on_every_rank(closed):
    assert run_threads(2, uses_an_absent_optimizer, closed) == [3, 3]


def test_buckets_of_other_reducers_do_not_wait_for_a_closed_reducer():
    backend = LocalBackend(World(), torch.device("cpu"), 60.0)
    first, second = (wrapped(model, backend) for model in two_models())
    order = turns(backend)
    assert [order.may_send(n) for n in (0, 1)] == [True, False]
    second.synchronize()
    # Only the second reducer took part in the last exchange, so its buckets are sent first from now on.
    assert [order.may_send(n) for n in (0, 1)] == [False, True]
    first.reducer.close()
    first.reducer.close()
    assert len(order._members) == 1
    assert order.may_send(1)


def trains_models_in_another_order(backend):
    models = two_models()
    optimizers = [wrapped(model, backend) for model in models]
    order = (0, 1) if backend.rank == 0 else (1, 0)

    def train():
        for number in order:
            optimizers[number].zero_grad()
            models[number](torch.ones(2, 6)).square().mean().backward()
            optimizers[number].step()

    with pytest.raises(BackendError, match="have not taken the same steps on every rank"), short_waits(backend):
        train()
    return True


@pytest.mark.parametrize("size", [2, 3])
def test_training_two_models_in_different_orders_causes_an_error_on_every_rank(size):
    assert run_threads(size, trains_models_in_another_order) == [True] * size


def changes_backend(backend):
    """Move two reducers to a backend that has one already. All three names must differ: Horovod matches sums by name."""
    old, new = (backend.group(range(backend.size)) for _ in range(2))
    params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    reducers = [GradientReducer([(str(number), p)], old) for number, p in enumerate(params)]
    reducers.append(GradientReducer([("other", nn.Parameter(torch.zeros(3)))], new))
    for reducer in reducers[:2]:
        reducer.forget(new)
    assert (len(turns(old)._members), len(turns(new)._members)) == (0, 3)
    assert len({reducer.name for reducer in reducers}) == 3
    sum(p.sum() * (backend.rank + 1) for p in params).backward()
    for p in params:
        torch.testing.assert_close(p.grad, torch.full((3,), (backend.size + 1) / 2))


def test_several_reducers_may_change_their_backend():
    run_threads(2, changes_backend)


def forgets_sparse(backend):
    """Use a sparse gradient on rank 0's first backend only. Then move to a backend of all ranks, and use dense ones."""
    first_backend = [backend.group([rank]) for rank in range(backend.size)][backend.rank]
    table, layer = nn.Embedding(4, 3, sparse=True), filled(nn.Linear(3, 1))
    reducer = GradientReducer([*table.named_parameters("t"), *layer.named_parameters("l")], first_backend)
    for use_table in (backend.rank == 0, False):
        x = torch.ones(1, 3) * (backend.rank + 1)
        layer(x + table(torch.tensor([1])) if use_table else x).sum().backward()
        weight = layer.weight.grad.clone()
        for p in (*table.parameters(), *layer.parameters()):
            p.grad = None
        reducer.renew()
        reducer.forget(backend)
    torch.testing.assert_close(weight, torch.full((1, 3), (backend.size + 1) / 2))


def test_a_new_backend_does_not_use_the_sparse_gradients_of_the_earlier_one():
    run_threads(2, forgets_sparse)


def forgets_steps(backend):
    """Let only rank 0 take a step on its first backend, then move to a backend of all ranks."""
    first_backend = [backend.group([rank]) for rank in range(backend.size)][backend.rank]
    layer = filled(nn.Linear(3, 1))
    reducer = GradientReducer(layer.named_parameters(), first_backend)
    reducer.renew(stepped=backend.rank == 0)
    reducer.forget(backend)
    layer(torch.ones(1, 3) * (backend.rank + 1)).sum().backward()
    torch.testing.assert_close(layer.weight.grad, torch.full((1, 3), (backend.size + 1) / 2))


def test_a_new_backend_does_not_count_the_steps_on_the_earlier_one():
    run_threads(2, forgets_steps)


def made_and_closed(backend):
    models = two_models()
    kept = wrapped(models[0], backend)
    for _ in range(50):
        other = wrapped(models[1], backend)
        for model in models:
            model(torch.ones(2, 6)).square().mean().backward()
        for optimizer in (kept, other):
            optimizer.step()
            optimizer.zero_grad()
        other.close()
    return weights_sha256(models[0]), weights_sha256(models[1])


def test_any_number_of_optimizers_may_be_made_and_closed_in_turn():
    assert len(set(run_threads(2, made_and_closed))) == 1


def closed_again(backend):
    """Close an optimizer again after a new one has got its place in the turns.

    In backward, the ranks reach the two open optimizers in different orders.
    """
    models = two_models()
    closed, kept = wrapped(nn.Linear(6, 3), backend), wrapped(models[0], backend)
    closed.close()
    other = wrapped(models[1], backend)
    closed.close()
    for step in range(2):
        x = torch.ones(2, 6) * (backend.rank + step)
        sum(model(x).square().mean() for model in models[:: 1 if backend.rank == 0 else -1]).backward()
        for optimizer in (kept, other):
            optimizer.step()
            optimizer.zero_grad()
    return weights_sha256(models[0]), weights_sha256(models[1])


def test_closing_an_optimizer_again_does_not_change_the_turns_of_others():
    assert len(set(run_threads(2, closed_again))) == 1


def overflows_in_no_sync(backend, fused):
    """Let rank 0's gradients overflow in ``no_sync``: ``scaler.step`` averages them just before its overflow check."""
    model = filled(nn.Linear(4, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), backend=backend)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = weights_sha256(model)
    with optimizer.no_sync():
        scaler.scale(model(torch.full((2, 4), float("inf") if backend.rank == 0 else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return weights_sha256(model) == before, scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_in_no_sync_on_one_rank_makes_all_ranks_skip_the_step(fused):
    assert run_threads(2, overflows_in_no_sync, fused) == [(True, 2.0)] * 2


def interrupted_after_the_sums(backend):
    """Interrupt rank 0's exchange for the second optimizer after all sums have arrived.

    Rank 0 then completes this exchange without the other rank.
    """

    def interrupt():
        raise KeyboardInterrupt

    models = two_models()
    optimizers = [wrapped(model, backend) for model in models]
    for step in (1, 2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = sum(model(torch.ones(2, 6) * (backend.rank + step)).square().mean() for model in models)
        if backend.rank == 0 and step == 2:
            bucket = optimizers[1].reducer.buckets[0]
            bucket.unpack = interrupt
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
            del bucket.unpack
            for optimizer in optimizers:
                optimizer.synchronize()
        else:
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return [weights_sha256(model) for model in models]


def test_sums_that_arrived_before_an_interrupt_are_not_exchanged_again():
    of_rank_0, of_rank_1 = run_threads(2, interrupted_after_the_sums)
    assert of_rank_0 == of_rank_1


def interrupted_in_step(backend, repeated_call):
    """Interrupt rank 0's step after the ranks have averaged gradients that backward did not average.

    Rank 0 then completes this step without the other rank.
    """

    def interrupt():
        raise KeyboardInterrupt

    model = two_models()[0]
    optimizer = wrapped(model, backend)
    for step in (1, 2, 3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            model(torch.ones(2, 6) * (backend.rank + step)).square().mean().backward()
        if backend.rank == 0 and step == 2:
            bucket = optimizer.reducer.buckets[0]
            bucket.unpack = interrupt
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            del bucket.unpack
            if repeated_call == "synchronize":
                optimizer.synchronize()
        optimizer.step()
    return weights_sha256(model)


@pytest.mark.parametrize("repeated_call", ["step", "synchronize"])
def test_a_rank_that_completes_an_interrupted_step_does_not_compare_states_again(repeated_call):
    of_rank_0, of_rank_1 = run_threads(2, interrupted_in_step, repeated_call)
    assert of_rank_0 == of_rank_1
