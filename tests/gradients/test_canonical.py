"""``sum_order="canonical"``: averaged gradients have the same bits with every backend and transport."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from dualtrain import BackendError, DistributedOptimizer
from dualtrain.backends.sum_order import sum_order
from dualtrain.gradients import Transfer
from tests.backends.test_sum_order import tree
from tests.hvd.worlds import worlds
from tests.models_for_tests import CLASSES, conv_net, image_loss, perceptron, small_buckets, vector_loss, vectors
from tests.threads import run_threads


def own_gradients(rank):
    model = conv_net()
    image_loss(model, rank).backward()
    return [p.grad for p in model.parameters()]


def averaged(backend, options=None):
    """Take two steps with learning rate 0; return the gradients (as bytes) and the extra scalar of the second step."""
    model = conv_net()
    with small_buckets():
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            model.named_parameters(),
            backend=backend,
            extra=1,
            sum_order="canonical",
            **(options or {}),
        )
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.extra[0] = 0.1 * (backend.rank + 1)
            image_loss(model, backend.rank).backward()
            optimizer.step()
    optimizer.close()
    return [p.grad.numpy().tobytes() for p in model.parameters()], optimizer.extra.item()


def expected(size):
    parts = [own_gradients(rank) for rank in range(size)]
    means = [tree([part[i] for part in parts]) * (1.0 / size) for i in range(len(parts[0]))]
    return [mean.numpy().tobytes() for mean in means], tree([torch.tensor(0.1 * (r + 1)) for r in range(size)]).item()


@worlds(("torch", 2), ("torch", 3), ("torch", 4), ("horovod", 3), ("shm", 2), ("shm", 3))
def test_canonical_sums_equal_the_tree_sum_over_the_ranks_bitwise(real):
    for found in real(averaged):
        assert found == expected(real.size)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_canonical_sums_of_threads_equal_the_tree_sum_over_the_ranks_bitwise(size):
    for found in run_threads(size, averaged):
        assert found == expected(size)


def sharded(backend, shards, dtype, factor=1.0):
    """Return a step's gradients, multiplied by ``factor`` before the sum and divided by it after, and its extra scalar.

    Only shard 1 uses the parameter ``rare``, and no shard uses the parameter ``never``.
    """
    model = perceptron(dtype=dtype)
    model.register_parameter("rare", nn.Parameter(torch.ones(3, dtype=dtype)))
    model.register_parameter("never", nn.Parameter(torch.ones(2, dtype=dtype)))
    order = sum_order(shards, backend.size)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"sum_order": order, "unused": "none", "extra": 1, "transfer": Transfer(before=factor)}
    optimizer = DistributedOptimizer(inner, model.named_parameters(), backend=backend, **options)
    optimizer.reducer.begin_shards()
    mine = order.ranges[backend.rank]
    for shard in mine:
        optimizer.extra[0] = 1 / (shard + 3)
        for number in range(3):
            with optimizer.no_sync():
                loss = model[:3](vectors(10 * shard + number, dtype=dtype)).square().mean()
                (loss + model.rare.sum() if shard == 1 else loss).backward()
        if shard != mine[-1]:
            optimizer.reducer.add_shard()
    optimizer.step()
    optimizer.close()
    grads = {name: p.grad for name, p in model.named_parameters()}
    found = {name: None if grad is None else (grad / factor).float().numpy().tobytes() for name, grad in grads.items()}
    return found, optimizer.extra.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shards", [3, 4, 7])
def test_shards_on_any_number_of_ranks_have_the_same_bits(shards, dtype):
    alone = run_threads(1, sharded, shards, dtype)[0]
    assert alone[0]["never"] is None
    assert alone[0]["rare"] is not None
    for size in (*range(2, shards + 1), shards + 1):
        for found in run_threads(size, sharded, shards, dtype):
            assert found == alone, size


def with_infinite_gradients(backend):
    """Return the average over four shards of a complex gradient that has infinite real and imaginary parts."""
    p = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    optimizer, mine = with_four_shards(nn.ParameterList([p]), backend)
    optimizer.reducer.begin_shards()
    for shard in mine:
        with optimizer.no_sync():
            p.view_as(p).backward(torch.tensor([complex(math.inf, 1), complex(1, shard), complex(1, -math.inf)]))
        if shard != mine[-1]:
            optimizer.reducer.add_shard()
    optimizer.step()
    optimizer.close()
    return p.grad.tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_real_and_imaginary_parts_of_complex_shards_are_added_separately(size):
    assert run_threads(size, with_infinite_gradients) == [[complex(math.inf, 1), 1 + 1.5j, complex(1, -math.inf)]] * size


def test_the_factor_before_the_sum_applies_to_every_shard():
    expected = run_threads(2, sharded, 7, torch.float32)
    assert run_threads(2, sharded, 7, torch.float32, 0.5) == expected


def has_a_sparse_gradient(backend):
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, CLASSES))
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backend=backend, sum_order="canonical"
    )
    with pytest.raises(BackendError, match=r"rank 0: the gradient of '0\.weight' is sparse.*give its module sparse=False"):
        model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.close()


def test_sparse_gradients_are_refused_on_every_rank():
    run_threads(3, has_a_sparse_gradient)


def with_four_shards(model, backend):
    """Return an optimizer (learning rate 0) whose steps have four shards, and the indices of this rank's shards."""
    order = sum_order(4, backend.size)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), backend=backend, sum_order=order)
    return optimizer, order.ranges[backend.rank]


def compute_shards(optimizer, model, mine):
    optimizer.reducer.begin_shards()
    for shard in mine:
        with optimizer.no_sync():
            vector_loss(model, shard).backward()
        if shard != mine[-1]:
            optimizer.reducer.add_shard()


def take_step(optimizer, model, mine):
    compute_shards(optimizer, model, mine)
    optimizer.step()
    optimizer.zero_grad()


def steps_with_a_closure(backend):
    p = nn.Parameter(torch.zeros(2))
    optimizer = DistributedOptimizer(torch.optim.SGD([p], lr=0.0), backend=backend, sum_order="canonical")

    def closure():
        loss = p.sum() + 0.1 * (backend.rank + 1)
        loss.backward()
        return loss

    return optimizer.step(closure).item()


def test_a_closures_loss_is_averaged_by_a_tree_sum_over_the_ranks():
    losses = [torch.tensor(0.1 * (rank + 1)).double() for rank in range(3)]
    assert run_threads(3, steps_with_a_closure) == [(tree(losses) / 3).float().item()] * 3


def unfrozen(backend):
    """Return the second step's gradients; between the steps a parameter is unfrozen, which changes the layout."""
    model = perceptron()
    model[0].weight.requires_grad_(False)
    optimizer, mine = with_four_shards(model, backend)
    for step in range(2):
        optimizer.zero_grad()
        compute_shards(optimizer, model, mine)
        optimizer.step()
        if step == 0:
            assert model[0].weight.grad is None
            model[0].weight.requires_grad_(True)
    optimizer.close()
    return [p.grad.numpy().tobytes() for p in model.parameters()]


def test_a_parameter_may_be_unfrozen_between_steps():
    alone = run_threads(1, unfrozen)[0]
    for size in (2, 3):
        assert run_threads(size, unfrozen) == [alone] * size


def one_changes_its_layout(backend):
    """Change the layout on rank 1 alone: the step must fail on every rank."""
    model = perceptron()
    model[0].weight.requires_grad_(False)
    optimizer, mine = with_four_shards(model, backend)
    step = partial(take_step, optimizer, model, mine)

    step()
    model[0].weight.requires_grad_(backend.rank == 1)
    with pytest.raises(BackendError, match=r"rank 1: .*before the same backward"):
        step()
    optimizer.close()


def test_a_bucket_layout_that_one_rank_changes_causes_an_error_on_all_ranks():
    run_threads(3, one_changes_its_layout)


def idle_rank_differs(backend, change):
    """Make rank 4, which has no shard, differ in or after the second step: the third step must fail on every rank."""
    model = perceptron()
    model[0].bias.requires_grad_(False)
    optimizer, mine = with_four_shards(model, backend)
    step = partial(take_step, optimizer, model, mine)

    step()
    if backend.rank != 4:
        step()
    elif change == "skips a step":
        compute_shards(optimizer, model, mine)
        optimizer.synchronize()
        optimizer.zero_grad()
    elif change == "replaces a parameter":
        step()
        model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight))
    else:
        step()
        model[0].bias.requires_grad_(True)
    errors = {
        "skips a step": "rank 0 has taken 2 steps of an optimizer, and rank 4 has taken 1",
        "replaces a parameter": "rank 4: parameter '0.weight' was replaced",
        "unfreezes a parameter": "rank 4: .*before the same backward",
    }
    with pytest.raises(BackendError, match=errors[change]):
        step()
    optimizer.close()


@pytest.mark.parametrize("change", ["skips a step", "replaces a parameter", "unfreezes a parameter"])
def test_a_rank_without_shards_that_differs_causes_an_error_on_all_ranks(change):
    run_threads(5, lambda backend: idle_rank_differs(backend, change))


def begun_twice(backend):
    """Return the gradients of a step. The previous step was abandoned after this rank's first shard."""
    model = perceptron()
    optimizer, mine = with_four_shards(model, backend)
    reducer = optimizer.reducer
    for failing in (True, False):
        optimizer.zero_grad()
        reducer.begin_shards()
        for shard in mine:
            with optimizer.no_sync():
                vector_loss(model, shard + 10 * failing).backward()
            if shard != mine[-1]:
                reducer.add_shard()
            if failing:
                break
    optimizer.step()
    optimizer.close()
    return [p.grad.numpy().tobytes() for p in model.parameters()]


def test_the_shards_of_a_step_that_failed_are_not_part_of_the_next_one():
    parts = [own_vector_gradients(shard) for shard in range(4)]
    means = [(tree([part[i] for part in parts]) * 0.25).numpy().tobytes() for i in range(len(parts[0]))]
    for size in (1, 2, 4):
        assert run_threads(size, begun_twice) == [means] * size


def own_vector_gradients(shard):
    model = perceptron()
    vector_loss(model, shard).backward()
    return [p.grad for p in model.parameters()]


def test_unknown_or_impossible_orders_of_sums_are_refused():
    def body(backend):
        model = perceptron()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        for options, message in (
            ({"sum_order": "tree"}, "sum_order='tree' is not known"),
            ({"sum_order": "canonical", "transfer": Transfer(dtype=torch.float16)}, "in their own dtype"),
            ({"sum_order": sum_order(4, backend.size + 1)}, "fit the backend's size"),
        ):
            with pytest.raises(ValueError, match=message):
                DistributedOptimizer(copy.copy(inner), model.named_parameters(), backend=backend, **options)

    run_threads(2, body)


def sharing(backend):
    """Return both gradients after a step of four shards. Before each ``add_shard``, they share memory."""
    one, two = (nn.Parameter(torch.zeros(shape)) for shape in (4, (2, 2)))
    optimizer = DistributedOptimizer(
        torch.optim.SGD([one, two], lr=0.0),
        [("one", one), ("two", two)],
        backend=backend,
        sum_order=sum_order(4, backend.size),
    )
    mine = sum_order(4, backend.size).ranges[backend.rank]
    optimizer.reducer.begin_shards()
    for shard in mine:
        with optimizer.no_sync():
            ((one + two.view(4)) @ torch.full((4,), 2.0**shard)).backward()
        if shard != mine[-1]:
            two.grad = one.grad.view(2, 2)
            optimizer.reducer.add_shard()
    optimizer.step()
    optimizer.close()
    return one.grad.tolist(), two.grad.flatten().tolist()


def test_two_gradients_in_the_same_memory_are_each_summed_once_over_the_shards():
    for size in (1, 2, 4):
        assert run_threads(size, sharing) == [([15 / 4] * 4, [15 / 4] * 4)] * size
