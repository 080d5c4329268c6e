"""Replacement of gradients or parameters by the user.

Either the gradients are averaged correctly, or every rank raises an error that names the parameter.
"""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from dualtrain import BackendError, DistributedOptimizer, Trainer
from dualtrain.gradients import GradientReducer, Transfer
from tests.hvd.worlds import OURS_2, library, worlds
from tests.models_for_tests import (
    mean_gradients,
    perceptron,
    same_on_all,
    seeded,
    sgd,
    sgd_of,
    small_buckets,
    vector_loss,
    vectors,
)
from tests.threads import run_threads

STEPS = 3


def halve_data(model):
    for p in model.parameters():
        p.grad.data = p.grad.data * 0.5


def halve_assigned(model):
    for p in model.parameters():
        p.grad = p.grad * 0.5


def halve_in_place(model):
    for p in model.parameters():
        p.grad.mul_(0.5)


def halve_set(model):
    for p in model.parameters():
        p.grad.set_((p.grad * 0.5).clone())


def transpose_storage(model):
    """Halve the gradients, and move them to other memory with other strides."""
    for p in model.parameters():
        p.grad.data = (p.grad * 0.5).t().contiguous().t()


def transpose_in_place(model):
    """Give the gradient of shape (4, 4) other values and strides at the same address."""
    for p in model.parameters():
        if p.shape == (4, 4):
            p.grad.data = p.grad.data.t()


def share_memory(model):
    """Halve the gradients, and move the buckets that hold them. New tensors may then get the buckets' old memory."""
    halve_in_place(model)
    model.share_memory()


def cast_and_back(model):
    model.double().float()


REPLACE = [
    halve_data,
    halve_assigned,
    halve_in_place,
    halve_set,
    transpose_storage,
    transpose_in_place,
    cast_and_back,
    share_memory,
]


def net():
    return seeded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))


def expected(size, replace):
    model = net()
    optimizer = sgd_of(model)
    for step in range(STEPS):
        keys = range(step * size, (step + 1) * size)
        averages = mean_gradients(model, [lambda m, key=key: vector_loss(m, key) for key in keys])
        for p, grad in zip(model.parameters(), averages, strict=True):
            p.grad = grad
        replace(model)
        optimizer.step()
    return list(model.parameters())


def native(backend, model, replace):
    optimizer = sgd(model, backend)
    for step in range(STEPS):
        vector_loss(model, step * backend.size + backend.rank).backward()
        replace(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
    optimizer.close()


def horovods(hvd, model, replace):
    optimizer = hvd.DistributedOptimizer(sgd_of(model), named_parameters=model.named_parameters())
    for step in range(STEPS):
        model.zero_grad(set_to_none=step == 1)
        vector_loss(model, step * hvd.size() + hvd.rank()).backward()
        optimizer.synchronize()
        replace(model)
        with optimizer.skip_synchronize():
            optimizer.step()


def trainers(backend, model, replace):
    inner = sgd_of(model)
    inner.register_step_pre_hook(lambda *_: replace(model))
    trainer = Trainer(model, inner, lambda outputs, _: outputs.square().mean(), backend=backend)
    for step in range(STEPS):
        inputs = vectors(step * backend.size + backend.rank)
        trainer.step([(inputs, torch.zeros(len(inputs)))], len(inputs) * backend.size)
    trainer.close()


def replaces(backend):
    with small_buckets((64, 64)):
        # Horovod's operations are slow, so in its world, this loop runs only three replacements: gradients in new memory,
        # gradients with new strides, and parameters and gradients in new memory.
        for replace in REPLACE if backend.name != "horovod" else [halve_data, transpose_storage, cast_and_back]:
            wanted = expected(backend.size, replace)
            for train in (native, trainers):
                verify(backend, train, backend, replace, wanted)
    with library(backend) as hvd:
        # Horovod itself accepts only contiguous gradients.
        for replace in [r for r in REPLACE if not r.__name__.startswith("transpose") or backend.name != "horovod"]:
            verify(backend, horovods, hvd, replace, expected(backend.size, replace))


def verify(backend, train, interface, replace, wanted):
    model = net()
    train(interface, model, replace)
    what = f"{train.__name__}, {replace.__name__}"
    assert same_on_all(backend, list(model.parameters())), what
    for p, oracle in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p, oracle, msg=lambda text: f"{what}: {text}")


@worlds(("torch", 2), ("horovod", 2), ("shm", 2))
def test_gradients_are_averaged_after_their_tensors_were_replaced_in_an_earlier_step(real):
    real(replaces)


# -- refused changes ----------------------------------------------------------------------------------------------

# Each function of (model, optimizer) makes a change; it returns a pattern of the error message, and a function to undo it.


def cast(model, optimizer):
    model[2].double()
    return (
        r"parameter '2\.weight' was float32 \(3, 6\) on cpu when its gradient bucket was allocated, and is float64",
        model.float,
    )


def cast_all(model, optimizer):
    model.double()
    return (
        r"parameter '0\.weight' was float32 \(6, 4\) on cpu when its gradient bucket was allocated, and is float64",
        model.float,
    )


def load_assigned(model, optimizer):
    before = dict(model.named_parameters())
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)

    def back():
        for name, p in before.items():
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], p)

    return r"parameter '0\.weight' was replaced in its module", back


def replace_module(model, optimizer):
    before, model[2] = model[2], nn.Identity()
    model[2] = before
    model[2] = nn.Linear(6, 3)
    return r"the module of parameter '2\.weight' was replaced by one with", lambda: model.__setitem__(2, before)


def remove_and_replace_module(model, optimizer):
    """Assign ``None`` before the new module, and take a step in between."""
    before, model[2] = model[2], None
    optimizer.step()
    optimizer.zero_grad()
    model[2] = nn.Linear(6, 3)
    return r"the module of parameter '2\.weight' was replaced by one with", lambda: model.__setitem__(2, before)


def with_gradient():
    """Return a parameter with a gradient. hvd refuses unknown parameters only if they have gradients."""
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return p


def append(model, optimizer):
    params = optimizer.param_groups[0]["params"]
    params.append(with_gradient())
    return r"group 0 parameter 4 \(2,\) was added to the optimizer's param_groups", params.pop


def replace_by_equal_parameter(model, optimizer):
    params = optimizer.param_groups[0]["params"]
    before, params[1] = params[1], nn.Parameter(params[1].detach().clone())
    return r"group 0 parameter 1 \(6,\) was added to the optimizer's param_groups", lambda: params.__setitem__(1, before)


def misplace(model, optimizer):
    a, b = model[0].bias, model[0].weight
    a.grad = b.grad.flatten()[: a.numel()]
    return r"the gradient of '0\.bias' lies in the memory of another gradient", model.zero_grad


def reshape(model, optimizer):
    p = model[2].bias
    values = p.data
    p.data = values[None].expand(2, 3).clone()

    def back():
        p.data = values

    return r"parameter '2\.bias' was float32 \(3,\)", back


def reshape_equally(model, optimizer):
    p = model[0].weight
    values = p.data
    p.data = values.view(4, 6)

    def back():
        p.data = values

    return r"parameter '0\.weight' or its gradient no longer has the shape \(6, 4\): change it back, or make a new", back


def refused(backend, change):
    """Make a change that rank 0 undoes at once: both ranks raise, and training can continue after rank 1 undoes it too."""
    model = perceptron()
    optimizer = sgd(model, backend)
    vector_loss(model, backend.rank).backward()
    optimizer.step()
    if change is not misplace:
        optimizer.zero_grad()
    text, undo = change(model, optimizer)
    if backend.rank == 0:
        undo()

    def backward():
        vector_loss(model, backend.rank).backward()

    # A new module is refused only after it has gradients.
    exchange = backward if backend.rank == 0 or change in (misplace, *NEW_MODULES) else optimizer.synchronize
    with pytest.raises(BackendError, match=rf"^rank 1: {text}"):
        exchange()
    if backend.rank == 1:
        undo()
    optimizer.zero_grad()
    vector_loss(model, backend.rank).backward()
    optimizer.step()
    assert same_on_all(backend, list(model.parameters()))
    optimizer.close()


NEW_MODULES = [replace_module, remove_and_replace_module]
CHANGES = [cast, load_assigned, *NEW_MODULES, append, replace_by_equal_parameter, misplace, reshape, reshape_equally]


@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_one_rank_changed_is_named_in_an_error_on_every_rank(change):
    run_threads(2, refused, change)


def sharded(backend):
    """Mark a parameter as ``fully_shard`` does, and compute no gradient for it."""
    model = perceptron()
    optimizer = sgd(model, backend)
    first, last = model[0], model[2]
    first.weight._fsdp_orig_uid = 0
    with pytest.raises(BackendError, match=r"^rank 0: parameter '0\.weight' was replaced .* fully_shard"):
        last(torch.ones(1, 6)).sum().backward()
    optimizer.close()


def test_a_parameter_that_fully_shard_has_replaced_is_refused():
    run_threads(2, sharded)


def unfrozen(backend):
    """Append a frozen parameter on all ranks; one step later, unfreeze it on rank 1."""
    model = perceptron()
    optimizer = sgd(model, backend)
    late = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer.param_groups[0]["params"].append(late)
    vector_loss(model, backend.rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    late.requires_grad_(backend.rank == 1)
    with pytest.raises(BackendError, match=r"rank 1: group 0 parameter 4 .* add_param_group"):
        (vector_loss(model, backend.rank) + late.sum()).backward()
    optimizer.close()


def test_a_frozen_parameter_that_is_appended_to_a_group_is_refused_when_unfrozen():
    run_threads(2, unfrozen)


def unfreeze_late(optimizer, late):
    late.requires_grad_(True)


def add_late(optimizer, late):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def layout_of_one_rank(backend, change):
    """Change the layout on one rank: backward fails on all ranks. With the same change on all ranks, backward succeeds."""
    model = perceptron()
    late = nn.Parameter(torch.zeros(3), requires_grad=False)
    inner = torch.optim.SGD([*model.parameters(), late], lr=0.1)
    optimizer = DistributedOptimizer(inner, backend=backend)
    unlisted = nn.Parameter(torch.ones(backend.rank + 1))  # not a parameter of the optimizer

    def loss():
        return vector_loss(model, backend.rank) + (late * (backend.rank + 1)).sum() + unlisted.sum()

    for _ in range(2):  # gradients lie in the buckets from the second step on
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    if backend.rank == backend.size - 1:
        change(optimizer, late)
    with pytest.raises(BackendError, match=rf"^rank {backend.size - 1}: parameters were unfrozen, or added to the opt"):
        loss().backward()
    if backend.rank != backend.size - 1:
        change(optimizer, late)
    optimizer.zero_grad(set_to_none=False)
    expected = mean_gradients(model, [lambda m, key=key: vector_loss(m, key) for key in range(backend.size)])
    loss().backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)
    if change is unfreeze_late:
        assert late.grad.tolist() == [(backend.size + 1) / 2] * 3
    optimizer.step()
    assert same_on_all(backend, list(model.parameters()))
    optimizer.close()


@pytest.mark.parametrize("change", [unfreeze_late, add_late])
def test_a_bucket_layout_that_only_one_rank_changes_is_refused_in_the_next_backward(many, change):
    many(layout_of_one_rank, change)


def reshaped(backend, old_shape, new_shape):
    """Change the shape of a parameter on one rank after the first step."""
    model = nn.Module()
    model.q = nn.Parameter(torch.ones(old_shape))
    optimizer = sgd(model, backend)
    model.q.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if backend.rank == 1:
        model.q.data = torch.ones(new_shape)
    with pytest.raises(BackendError, match=rf"rank 1: .*'q'.* {re.escape(str(old_shape))}.*make a new opt"):
        model.q.square().sum().backward()
    optimizer.close()


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 6)])
def test_a_parameter_whose_shape_changed_before_backward_is_refused(shape):
    run_threads(2, reshaped, (1, 6), shape)


def test_a_large_parameter_whose_shape_changed_before_backward_is_refused():
    run_threads(3, reshaped, (1, 20000), (2, 10000))


def without_the_other_rank(backend):
    """Stop rank 1 after a step. Rank 0's next backward fails, and the backward after that fails with the same reason."""
    model = perceptron()
    optimizer = sgd(model, backend)
    vector_loss(model, backend.rank).backward()
    optimizer.step()
    if backend.rank == 1:
        return
    backend.timeout = 0.1
    with pytest.raises(BackendError, match=r"waited 0\.1 s for rank 1") as failed:
        vector_loss(model, backend.rank).backward()
    earlier = f"an earlier exchange of gradients failed: {failed.value}"
    with pytest.raises(BackendError, match=f"^{re.escape(earlier)}$"):
        vector_loss(model, backend.rank).backward()
    # Rank 1 could still complete the sums of the failed backward, and take a step. So rank 0 must refuse all later calls.
    with pytest.raises(BackendError, match="a collective call on rank 0 failed or timed out, so that"):
        backend.barrier()


def test_a_backward_after_a_failed_exchange_raises_the_reason_of_the_failure():
    run_threads(2, without_the_other_rank)


def sparse_and_cast(backend):
    """Cast a parameter on rank 1. All gradients are sparse, so rank 1 sends its refusal in a bucket without gradients."""
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = sgd(seeded(table), backend, momentum=0)
    for step in range(2):
        with pytest.raises(BackendError, match="rank 1: parameter 'weight' was float32") if step else nullcontext():
            table(torch.tensor([1])).sum().backward()
        optimizer.zero_grad()
        if backend.rank == 1:
            table.double()
    optimizer.close()


def test_a_cast_parameter_is_refused_even_if_all_gradients_are_sparse():
    run_threads(2, sparse_and_cast)


def refused_after_backward(backend):
    model = perceptron()
    optimizer = sgd(model, backend)
    vector_loss(model, backend.rank).backward()
    append(model, optimizer)
    with pytest.raises(BackendError, match="group 0 parameter 4"):
        optimizer.step()


def frozen_and_cast(backend):
    model = perceptron()
    optimizer = sgd(model, backend)
    vector_loss(model, backend.rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0].requires_grad_(False).half()
    for _ in range(2):
        model[2](torch.full((1, 6), 1.0 + backend.rank)).sum().backward()
        assert model[0].bias.grad is None
        assert model[2].weight.grad.tolist() == [[(backend.size + 1) / 2] * 6] * 3
        optimizer.step()
        optimizer.zero_grad()


def test_a_frozen_parameter_may_be_cast():
    run_threads(2, frozen_and_cast)


def added_after_backward(backend):
    model = perceptron()
    optimizer = sgd(model, backend)
    for _ in range(2):
        vector_loss(model, backend.rank).backward()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        optimizer.step()
        optimizer.zero_grad()
    assert same_on_all(backend, list(model.parameters()))


def test_groups_may_be_added_between_backward_and_step():
    run_threads(2, added_after_backward)


def test_parameters_appended_between_backward_and_step_are_refused():
    run_threads(2, refused_after_backward)


def refused_by_hvd(backend):
    with library(backend) as hvd:
        model = perceptron()
        optimizer = hvd.DistributedOptimizer(sgd_of(model), named_parameters=model.named_parameters())
        vector_loss(model, hvd.rank()).backward()
        optimizer.step()
        swap(model)
        swap(model)
        vector_loss(model, hvd.rank()).backward()
        optimizer.step()
        vector_loss(model, hvd.rank()).backward()
        with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after loss.backward"):
            optimizer.zero_grad()
        optimizer.step()
        assert same_on_all(backend, list(model.parameters()))
        optimizer.zero_grad()
        if hvd.rank() == 1:
            cast(model, optimizer)
        else:
            vector_loss(model, 0).backward()
        with pytest.raises(RuntimeError, match=r"rank 1: parameter '2\.weight' was float32"):
            optimizer.step()


@OURS_2
def test_hvd_raises_on_every_rank_if_one_rank_changed_a_parameter(real):
    real(refused_by_hvd)


def dropped(params, step, backward, zero_grad):
    """Check that a refused exchange has dropped all gradients, and that no step is taken until there are new ones."""
    assert [p.grad for p in params] == [None, None]
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match=r"rank 0: the gradients were dropped .* call optimizer.zero_grad\(\)"):
        step()
    assert all(map(torch.equal, params, before))
    zero_grad()
    backward()
    step()
    assert [p[0].item() - old[0].item() for p, old in zip(params, before, strict=True)] == [-1.5, -1.5]


def refused_and_repeated(backend):
    """Make a change on rank 1 that is refused, then undo it.

    The first run has a large gradient, which is copied to its bucket as soon as it is ready. The second run has none.
    """
    for numel in (40000, 3):
        params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(numel))]
        named = [(f"{numel}.{number}", p) for number, p in enumerate(params)]

        def backward(params=params):
            ((backend.rank + 1) * (params[0].sum() + params[1].sum())).backward()

        def train(optimizer, params=params):
            backward()
            optimizer.step()
            optimizer.zero_grad()
            listed = optimizer.param_groups[0]["params"]
            listed += [with_gradient()] * backend.rank
            return lambda: listed.__delitem__(slice(2, None))

        wrapped = DistributedOptimizer(torch.optim.SGD(params, 1.0), named, backend=backend)
        undo = train(wrapped)
        with pytest.raises(BackendError, match="rank 1: group 0 parameter 2"):
            backward()
        undo()
        dropped(params, wrapped.step, backward, wrapped.zero_grad)
        wrapped.close()
        with library(backend) as hvd:
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, 1.0), named)

            def make_refused_change(optimizer=optimizer, train=train, backward=backward):
                optimizer.zero_grad()
                undo = train(optimizer)
                backward()
                with pytest.raises(RuntimeError, match="rank 1: group 0 parameter 2"):
                    optimizer.step()
                undo()

            make_refused_change()
            dropped(params, optimizer.step, backward, optimizer.zero_grad)
            make_refused_change()  # a rank may also join after the refusal
            if hvd.rank() == 0:
                before = params[0][0].item()
                backward()
                optimizer.step()
                assert params[0][0].item() == before - 0.5
            hvd.join()


@OURS_2
def test_a_refused_exchange_drops_all_gradients(real):
    real(refused_and_repeated)


def refused_without_buckets(backend, change):
    """Make a change on rank 1 with ``op=Max``, which uses no buckets.

    The change is refused whether or not rank 1 runs a backward pass after it.
    """
    with library(backend) as hvd:
        for with_backward in (False, True):
            model = perceptron()
            optimizer = hvd.DistributedOptimizer(sgd_of(model), model.named_parameters(), op=hvd.Max)
            vector_loss(model, hvd.rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
            text, undo = change(model, optimizer.optimizer)
            if hvd.rank() == 0:
                undo()
            if with_backward or hvd.rank() == 0:
                vector_loss(model, hvd.rank()).backward()
            with pytest.raises(RuntimeError, match=f"rank 1: {text}"):
                optimizer.step()
            if hvd.rank() == 1:
                undo()
            optimizer.close()
            with pytest.raises(RuntimeError, match="this optimizer was closed"):
                optimizer.step()
            hvd.barrier()  # other calls still work


@pytest.mark.parametrize("change", [cast_all, load_assigned, append])
@OURS_2
def test_hvd_refuses_a_changed_parameter_with_an_operation_without_buckets(real, change):
    real(refused_without_buckets, change)


def unfrozen_without_buckets(backend):
    """Freeze and unfreeze layers with ``op=Max``: only unfrozen parameters are reduced, as with buckets.

    If only some ranks have frozen a parameter, the step raises an error on every rank, and changes no parameter.
    """
    with library(backend) as hvd:
        model = perceptron()
        model[0].requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(sgd_of(model), model.named_parameters(), op=hvd.Max)
        for frozen, trained in ((0, 2), (None, 0), (2, 0)):
            model.requires_grad_(True)
            if frozen is not None:
                model[frozen].requires_grad_(False)
            vector_loss(model, hvd.rank()).backward()
            optimizer.step()
            assert same_on_all(backend, list(model.parameters()))
            assert model[trained].weight.grad is not None
            assert frozen is None or model[frozen].weight.grad is None
            optimizer.zero_grad()
        before = [p.tolist() for p in model.parameters()]
        model.requires_grad_(True)
        model[hvd.rank()].requires_grad_(False)  # no effect on rank 1: module 1 has no parameters
        vector_loss(model, hvd.rank()).backward()
        with pytest.raises(RuntimeError, match=r"parameter '0\.bias' is frozen on rank 0 and trained on rank 1, so that"):
            optimizer.step()
        assert [p.tolist() for p in model.parameters()] == before


@OURS_2
def test_hvd_reduces_unfrozen_parameters_with_an_operation_without_buckets(real):
    real(unfrozen_without_buckets)


def swap(model):
    """Swap parameters as ``load_state_dict`` does after ``set_swap_module_params_on_conversion(True)``.

    The tests do not set this option, because it would affect the whole process.
    """
    for p in model.parameters():
        torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone()))


def swapped(backend):
    """Swap parameters, which drops their hooks. ``zero_grad`` restores them; without it, every rank refuses the step."""
    model = perceptron()
    optimizer = sgd(model, backend)
    for step in range(4):
        swap(model)
        if step != 2:
            swap(model)
            optimizer.zero_grad()
        expected = mean_gradients(model, [lambda m, key=key: vector_loss(m, key) for key in range(backend.size)])
        vector_loss(model, backend.rank).backward()
        if step == 2:
            with pytest.raises(BackendError, match=r"^rank 0: the gradient of '0\.weight' was not averaged in backward"):
                optimizer.step()
            continue
        for p, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, grad)
        optimizer.step()
    optimizer.close()


def test_step_is_refused_unless_zero_grad_restored_the_hooks_of_swapped_parameters():
    run_threads(2, swapped)


def swapped_with_each_other(backend):
    """Swap ``a`` and ``b``: autograd calls the hook of ``a`` with ``b``, and vice versa. Backward never reaches ``u``."""
    _, a, b, c = params = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    reducer = GradientReducer(zip("uabc", params, strict=True), backend, transfer=Transfer(bucket_bytes=0))
    for step in range(2):
        for p in params:
            p.grad = None
        if step:
            torch.utils.swap_tensors(a, b)
        ((backend.rank + 1) * (3 * b + 5 * a + 7 * c).sum()).backward()
        assert [p.grad[0].item() for p in params] == [0, 7.5, 4.5, 10.5]
        reducer.renew()
    reducer.close()


def test_gradients_are_correct_after_two_parameters_are_swapped_with_each_other():
    run_threads(2, swapped_with_each_other)


def tied_later(backend):
    """Tie two parameters of one optimizer, replace a parameter by a frozen one, and put a replaced parameter back."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = sgd(seeded(model), backend)
    weight = model[1].weight
    model[1].weight = model[0].weight
    model(torch.ones(1, 3)).sum().backward()
    model[1].bias = nn.Parameter(torch.ones(3), requires_grad=False)
    model(torch.ones(1, 3)).sum().backward()
    model[1].weight = nn.Parameter(torch.ones(3, 3))
    model[1].weight = weight
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert same_on_all(backend, list(model.parameters()))


def added_later(backend):
    """Add parameters to the optimizer: those of a module before the model has it, and a bias after the model has it."""
    model = seeded(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)))
    optimizer = sgd(model, backend)
    vector_loss(model, backend.rank).backward()
    optimizer.step()
    bias, head = nn.Parameter(torch.ones(3)), nn.Linear(3, 2)
    optimizer.add_param_group({"params": head.parameters()})
    model[1].bias, model[2] = bias, nn.Sequential(seeded(head), nn.Dropout(0.5)).eval()
    optimizer.add_param_group({"params": [bias]})
    for _ in range(2):
        optimizer.zero_grad()
        expected = mean_gradients(model, [lambda m, key=key: vector_loss(m, key) for key in range(backend.size)])
        vector_loss(model, backend.rank).backward()
        for p, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, grad)
        optimizer.step()
    model[2] = model[2][0]
    vector_loss(model, backend.rank).backward()
    # A module may be replaced by a copy that is not trained, such as a target network.
    model.target = model[2]
    model.target = copy.deepcopy(model[2])
    optimizer.zero_grad()
    model[:3](torch.ones(1, 4)).sum().backward()
    optimizer.close()


def test_new_parameters_of_a_module_may_be_added_to_the_optimizer():
    run_threads(2, added_later)


def test_parameters_may_be_tied_or_restored_or_replaced_by_frozen_ones():
    run_threads(2, tied_later)
