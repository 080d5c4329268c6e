"""Collectives with gradients, compared with the same computation in one process."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import dualtrain
from dualtrain import functional
from dualtrain.batchnorm import SyncBatchNorm, synchronize_norms
from dualtrain.errors import BackendError, UserError
from dualtrain.gradients import GradientReducer, Transfer
from tests.threads import run_threads


def inputs(size, rows):
    return [torch.arange(1.0, 1 + 2 * rows(r)).reshape(rows(r), 2) * (r + 1) for r in range(size)]


def loss_of(result, rank):
    return (result * torch.linspace(1, 2, result.numel()).reshape(result.shape) * (rank + 1)).square().sum()


def check(backend, call, reference, rows=lambda r: 4):
    """Compare ``call`` on the ranks with ``reference`` in one process: the results, and first and second derivatives."""
    size, me = backend.size, backend.rank
    leaves = [x.requires_grad_() for x in inputs(size, rows)]
    total = sum(loss_of(result, r) for r, result in enumerate(reference(leaves)))
    expected = torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)
    sum(grad.square().sum() for grad in expected).backward()
    mine = inputs(size, rows)[me].requires_grad_()
    result = call(mine)
    torch.testing.assert_close(result.detach(), reference(leaves)[me].detach())
    (grad,) = torch.autograd.grad(loss_of(result, me), mine, create_graph=True)
    torch.testing.assert_close(grad.detach(), expected[me].detach())
    grad.square().sum().backward()
    torch.testing.assert_close(mine.grad, leaves[me].grad if leaves[me].grad is not None else torch.zeros_like(mine))


def reductions(backend):
    size = backend.size
    check(backend, lambda x: functional.allreduce(x, backend, "sum"), lambda xs: [sum(xs)] * size)
    check(backend, lambda x: functional.allreduce(x, backend), lambda xs: [sum(xs) / size] * size)
    rows = lambda r: 2 * size + 1  # noqa: E731
    parts = lambda total: total.split([3] + [2] * (size - 1))  # noqa: E731
    check(backend, lambda x: functional.reducescatter(x, backend, "sum"), lambda xs: parts(sum(xs)), rows)
    check(backend, lambda x: functional.reducescatter(x, backend), lambda xs: parts(sum(xs) / size), rows)
    for call in (functional.allreduce, functional.reducescatter):
        with pytest.raises(ValueError, match="max has no gradient over ranks: use sum or average"):
            call(torch.ones(size), backend, "max")


def movements(backend):
    size = backend.size
    check(backend, lambda x: functional.allgather(x, backend), lambda xs: [torch.cat(xs)] * size, lambda r: r + 1)
    for root in {0, size - 1}:
        check(backend, lambda x, root=root: functional.broadcast(x, backend, root), lambda xs, root=root: [xs[root]] * size)
    equal = lambda xs: [torch.cat([x[2 * r : 2 * r + 2] for x in xs]) for r in range(size)]  # noqa: E731
    check(backend, lambda x: functional.alltoall(x, backend), equal, lambda r: 2 * size)
    first = lambda xs: [torch.cat([x[:1] for x in xs]) if r == 0 else xs[0][:0] for r in range(size)]  # noqa: E731
    check(backend, lambda x: functional.alltoall(x, backend, [1] + [0] * (size - 1)), first)
    with pytest.raises(ValueError, match="without a dimension"):
        functional.alltoall(torch.ones(()), backend)


def scalars(backend):
    x = torch.tensor(float(backend.rank), requires_grad=True)
    gathered = functional.allgather(x, backend)
    gathered.sum().backward()
    assert gathered.tolist() == list(range(backend.size))
    assert x.grad.item() == backend.size


@pytest.mark.parametrize("body", [reductions, movements, scalars])
def test_gradients_equal_those_of_one_process(typical, body):
    typical(body)


def allreduce_in_backward(backend):
    """Let backward run the allreduce of ``shared``'s gradient while ranks send different buckets.

    After the first step, only rank 0 uses ``side``.
    """
    early, side, big = params = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    reducer = GradientReducer([("early", early), ("side", side), ("big", big)], backend, transfer=Transfer(bucket_bytes=0))
    gradients = []
    for step in range(3):
        for p in params:
            p.grad = None
        shared = functional.allreduce(early * 2, backend)
        loss = 10 * (shared * big).sum()
        if backend.rank == 0 or step == 0:
            loss = loss + (shared.detach() * side).sum()
        loss.backward()
        gradients.append([p.grad.tolist() for p in params])
    reducer.close()
    for step, grads in enumerate(gradients):
        users = backend.size if step == 0 else 1
        for grad, expected in zip(grads, (20.0, 2.0 * users / backend.size, 20.0), strict=True):
            torch.testing.assert_close(torch.tensor(grad), torch.full((4,), expected))


def test_an_allreduce_during_backward_is_not_mixed_with_gradient_buckets(many):
    many(allreduce_in_backward)


def gradient_of(backend, call, leaf, mine):
    """Run ``call(mine)`` and backward; return the gradient of ``leaf``, or ``None`` on a rank without ``leaf``.

    On a rank with ``leaf``, ``mine`` was computed from it.
    """
    result = call(mine)
    assert result.requires_grad
    (result * (backend.rank + 1)).sum().backward()
    return None if leaf is None else leaf.grad.flatten().tolist()


def inputs_of_some_ranks(backend):
    """Make calls whose input requires a gradient on rank 0 only, such as ``weight if rank == 0 else torch.empty(2)``.

    Repeat each call with an input that requires no gradient on any rank, and under ``no_grad``: no result requires one.
    """
    size, total = backend.size, backend.size * (backend.size + 1) / 2
    calls = {
        "broadcast": (lambda x: functional.broadcast(x, backend), total),
        "allgather": (lambda x: functional.allgather(x, backend), total),
        "sum": (lambda x: functional.allreduce(x, backend, "sum"), total),
        "average": (lambda x: functional.allreduce(x, backend), total / size),
        "reducescatter": (lambda x: functional.reducescatter(x, backend, "sum"), None),
        "alltoall": (lambda x: functional.alltoall(x, backend), None),
    }
    factors = [float(rank + 1) for rank in range(size) for _ in range(2)]
    for name, (call, expected) in calls.items():
        leaf = torch.ones(2 * size, requires_grad=True) if backend.rank == 0 else None
        gradient = gradient_of(backend, call, leaf, torch.ones(2 * size) if leaf is None else leaf * 1)
        assert leaf is None or gradient == (factors if expected is None else [expected] * 2 * size), name
        assert not call(torch.ones(2 * size)).requires_grad, name
        with torch.no_grad():
            assert not call(torch.ones(2 * size, requires_grad=True)).requires_grad, name
    assert backend.allreduce(torch.ones(1), "sum").item() == size


def test_all_ranks_run_the_backward_pass_if_one_rank_needs_a_gradient(spmd):
    spmd(inputs_of_some_ranks)


@pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated")  # by torch itself, in an import inside make_dual
@pytest.mark.parametrize("name", functional.__all__)
def test_a_tensor_with_a_tangent_is_refused(name):
    with dualtrain.connect("local") as backend, forward_ad.dual_level():
        tensor = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(UserError, match="collectives have no forward-mode derivative"):
            getattr(functional, name)(tensor, backend)


def tangent_on_rank_0(backend):
    """Call collectives on a tensor that has a tangent on rank 0 only."""
    for name in functional.__all__:
        with forward_ad.dual_level() if backend.rank == 0 else nullcontext():  # two threads cannot both be in a level
            tensor = torch.ones(backend.size)
            if backend.rank == 0:
                tensor = forward_ad.make_dual(tensor, torch.ones(backend.size))
            with pytest.raises(BackendError, match="collectives have no forward-mode derivative"):
                getattr(functional, name)(tensor, backend)


@pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated")
def test_a_tangent_on_one_rank_is_refused_on_every_rank():
    run_threads(2, tangent_on_rank_0)


def differentiates_in_transforms(backend):
    x = torch.ones(backend.size, requires_grad=True)
    for name in functional.__all__:
        call, rows = partial(getattr(functional, name), backend=backend), torch.ones(3, backend.size)
        with pytest.raises(ValueError, match=r"inside of a torch\.func transform"):
            torch.func.grad(lambda x, call=call: call(x).sum())(x.detach())
        with pytest.raises(ValueError, match=r"inside of a torch\.func transform"):
            torch.func.vmap(call)(rows)
        result = call(x)
        with pytest.raises(ValueError, match="is_grads_batched=True"):
            torch.autograd.grad(result, x, torch.ones(3, *result.shape), is_grads_batched=True)
    assert backend.allreduce(torch.ones(1), "sum").item() == backend.size


def test_torch_func_transforms_are_refused_on_every_rank(typical):
    typical(differentiates_in_transforms)


def norms_without_samples(backend):
    """Normalize batches of different sizes; rank 0 has no samples."""
    model, whole = torch.nn.Sequential(torch.nn.BatchNorm1d(2, momentum=None)), torch.nn.BatchNorm1d(2, momentum=None)
    synchronize_norms(model, backend)
    parts = [x.requires_grad_() for x in inputs(backend.size, lambda r: 3 * r)]
    expected = whole(torch.cat(parts)).split([len(x) for x in parts])
    sum(map(loss_of, expected, range(backend.size))).backward()
    mine = parts[backend.rank].detach().requires_grad_()
    result = model(mine)
    loss_of(result, backend.rank).backward()
    torch.testing.assert_close(result, expected[backend.rank])
    torch.testing.assert_close(mine.grad, parts[backend.rank].grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model[0].running_var, whole.running_var)


def test_synchronized_norms_work_if_a_rank_has_no_samples(many):
    many(norms_without_samples)


def differentiates_norms_twice(backend):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    synchronize_norms(model, backend)
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()
    y = model(x).pow(3).sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):  # it must not return the gradient of y alone
        torch.autograd.grad(y + grad.square().sum(), x)


def test_second_derivatives_of_synchronized_norms_are_refused(typical):
    typical(differentiates_norms_twice)


def checkpoints_a_norm(backend):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    synchronize_norms(model, backend)
    x = (torch.arange(6.0).view(3, 2) ** (backend.rank + 1)).requires_grad_()
    expected = torch.autograd.grad(model(x).pow(3).sum(), x)
    y = checkpoint(model, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y.pow(3).sum(), x), expected)


def test_synchronized_norms_work_with_activation_checkpointing(typical):
    typical(checkpoints_a_norm)


def test_a_norm_without_a_backend_says_how_to_convert_a_model():
    model = SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(2)))
    with pytest.raises(NotImplementedError, match=r"synchronize_norms\(model, backend\)"):
        model(torch.ones(3, 2))


def test_the_error_for_a_public_module_that_is_not_imported_yet_names_the_import(monkeypatch):
    for module in ("functional", "data"):
        monkeypatch.delattr(dualtrain, module, raising=False)
        with pytest.raises(AttributeError, match=rf"add `import dualtrain\.{module}`"):
            getattr(dualtrain, module)
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        dualtrain.conect  # noqa: B018
