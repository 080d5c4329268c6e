"""Views of a gradient that the program keeps in later steps: as in torch, they keep their values."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

from dualtrain import DistributedOptimizer
from dualtrain.backends.shm.backend import SharedMemoryBackend
from dualtrain.backends.shm.reductions import SharedMemory
from dualtrain.backends.shm.segment import SecondMapping
from dualtrain.backends.sum_order import SumOrder
from dualtrain.errors import BackendError
from dualtrain.gradients import GradientReducer, Transfer
from dualtrain.gradients.slots import Slot
from tests.conftest import SPREAD, TYPICAL, _spmd, _worlds
from tests.models_for_tests import EXACT, small_buckets


@pytest.fixture(**_worlds(sorted({*SPREAD, *TYPICAL, ("horovod", 3)})))
def world(request):
    """Worlds of each kind, with the sizes of ``SPREAD`` and ``TYPICAL``; on Horovod, also three ranks."""
    return _spmd(request)


def with_gradient(grad):
    """Return a new parameter whose gradient is ``grad``. Its reference to ``grad`` is in C++ only."""
    other = nn.Parameter(torch.empty_like(grad))
    other.grad = grad
    return other


VIEWS = {
    "data": lambda grad: grad.data,
    "detach": lambda grad: grad.detach(),
    "flat": lambda grad: grad.view(-1),
    "part": lambda grad: grad[1:],
    "numpy": lambda grad: grad.cpu().numpy(),
    "dlpack": torch.from_dlpack,
    "other": with_gradient,
}
STEPS = 6
#: Name → the steps in which views are kept.
PATTERNS = {"first": [0], "late": [3], "always": range(STEPS), "sometimes": [1, 4], "never": []}


def values(rank, step, numel):
    """Return the gradient of a rank in a step."""
    return torch.arange(numel, dtype=torch.float64) % 7 + (rank + 1) * (step + 1) * 4


def expected(backend, step, numel, dtype):
    """Return the average of all ranks' gradients in a step."""
    return (sum(values(rank, step, numel) for rank in range(backend.size)) / backend.size).to(dtype)


def keeps_views(backend, view, pattern, dtype=torch.float32, options=None, stride=1, sizes=(3, 20000, 500)):
    """Train, keep views of gradients in the steps ``PATTERNS[pattern]``, and check the values of the views at the end.

    Only views of every ``stride``-th parameter are kept.
    """
    params = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes]
    unused = nn.Parameter(torch.zeros(5, dtype=dtype))
    named = [(str(i), p) for i, p in enumerate((*params, unused))]
    kept = []
    tolerance = EXACT if dtype is torch.float32 and backend.size != 3 else {"rtol": 2e-2, "atol": 1e-6}
    with small_buckets():
        reducer = GradientReducer(named, backend, extra=2, **(options or {}))
        for step in range(STEPS):
            for _, p in named:
                p.grad = None
            reducer.renew()
            reducer.extra.fill_(backend.rank + step)
            loss = sum((p * values(backend.rank, step, n).to(dtype)).sum() for p, n in zip(params, sizes, strict=True))
            loss.backward()
            total = sum(range(backend.size)) + step * backend.size
            assert reducer.extra.tolist() == [total, total]
            for p, n in zip(params, sizes, strict=True):
                torch.testing.assert_close(p.grad, expected(backend, step, n, dtype), **tolerance)
            assert unused.grad is None or not unused.grad.any()
            if step in PATTERNS[pattern]:
                for n, p in list(zip(sizes, params, strict=True))[::stride]:
                    kept.append((step, n, VIEWS[view](p.grad)))
            assert reducer.is_reduced()
            p = None
    for step, n, kept_view in kept:
        wanted = expected(backend, step, n, dtype)
        tensor = kept_view.grad if isinstance(kept_view, nn.Parameter) else torch.as_tensor(kept_view)
        torch.testing.assert_close(tensor, wanted[1:] if view == "part" else wanted, **tolerance)
    reducer.close()


def keeps_all_views(backend):
    for view in VIEWS:
        keeps_views(backend, view, "sometimes")
    for pattern in PATTERNS:
        keeps_views(backend, "data", pattern)
    for pattern in ("first", "sometimes"):
        keeps_views(backend, "data", pattern, torch.bfloat16)
        keeps_views(backend, "flat", pattern, options={"transfer": Transfer(dtype=torch.float16)})
        keeps_views(backend, "flat", pattern, options={"unused": "none"}, stride=2)
        keeps_views(backend, "numpy", pattern, options={"order": SumOrder(backend.size, backend.size)})
    keeps_views(backend, "data", "late" if backend.rank == backend.size - 1 else "never")


def test_views_keep_their_values(world):
    world(keeps_all_views)


def backward(backend, params, step):
    """Run a backward pass in which all elements of this rank's gradients are (step + 1)·(rank + 1)."""
    (sum(p.sum() for p in params) * (step + 1) * (backend.rank + 1)).backward()


def mean_of(backend, step):
    """Return the average of the ranks' gradients of :func:`backward`."""
    return (step + 1) * (backend.size + 1) / 2


def views_follow_gradients(backend, keep_first):
    """With ``set_to_none=False``, a view shows each new gradient.

    With ``keep_first``, step 1 begins with ``set_to_none=True``, and views of step 0 keep their values. After a last
    ``zero_grad`` with ``set_to_none=True``, the other views keep their values too.
    """
    params = [nn.Parameter(torch.zeros(n)) for n in (3, 20000)]
    wrapped = DistributedOptimizer(torch.optim.SGD(params, 0.1), backend=backend)
    views, early = [], []
    for step in range(5):
        wrapped.zero_grad(set_to_none=keep_first and step == 1)
        backward(backend, params, step)
        mean = mean_of(backend, step)
        if step == 0 and keep_first:
            early = [p.grad.view(-1) for p in params]
        if step == (1 if keep_first else 0):
            views = [p.grad.view(-1) for p in params]
        for p, v in zip(params, views, strict=False):
            torch.testing.assert_close(p.grad, torch.full_like(p, mean))
            torch.testing.assert_close(v, torch.full_like(p, mean))
        for p, v in zip(params, early, strict=False):
            torch.testing.assert_close(v, torch.full_like(p, mean_of(backend, 0)))
        wrapped.step()
    wrapped.zero_grad()
    sum((p * 77).sum() for p in params).backward()
    for p, v in zip(params, views, strict=True):
        torch.testing.assert_close(p.grad, torch.full_like(p, 77.0))
        torch.testing.assert_close(v, torch.full_like(p, mean))
    wrapped.close()


def test_views_show_new_values_of_gradients_that_are_zeroed_in_place(world):
    world.each(views_follow_gradients, [(False,), (True,)])


def views_follow_into_new_layout(backend):
    """With ``set_to_none=False``, a view shows each new gradient, also after a parameter was added."""
    params = [nn.Parameter(torch.zeros(n)) for n in (3, 20000, 500)]
    wrapped = DistributedOptimizer(torch.optim.SGD(params[:2], 0.0), backend=backend)
    views = []
    for step in range(5):
        wrapped.zero_grad(set_to_none=False)
        if step == 2:
            wrapped.add_param_group({"params": params[2:]})
        backward(backend, params[: 2 + (step >= 2)], step)
        if step == 1:
            views = [p.grad.view(-1) for p in params[:2]]
        for tensor in (*views, *(p.grad for p in params if p.grad is not None)):
            torch.testing.assert_close(tensor, torch.full_like(tensor, mean_of(backend, step)))
        wrapped.step()
    wrapped.close()


def test_views_show_new_values_after_a_parameter_was_added(world):
    world(views_follow_into_new_layout)


def without_views(backend):
    params = [nn.Parameter(torch.zeros(n)) for n in (3, 20000)]
    wrapped = DistributedOptimizer(torch.optim.SGD(params, 0.1), backend=backend)
    addresses = set()
    for step in range(6):
        wrapped.zero_grad(set_to_none=step % 3 != 2)
        backward(backend, params, step)
        g = params[0].grad
        torch.nn.utils.clip_grad_norm_(params, 1e6)
        g = g.clone().view(-1).data
        _ = params[1].grad.sum().item(), params[1].grad.numpy().mean(), params[0].grad.untyped_storage().nbytes()
        # In torch 2.5, autograd still refers to the last gradient of a backward, so this gradient is not in the bucket.
        assert any(s.param.grad.data_ptr() == s.address for s in wrapped.reducer.slots)
        addresses.add(tuple(s.address for s in wrapped.reducer.slots))
        wrapped.step()
    assert len(addresses) == 1
    assert not any(bucket.memory.keeps_views for bucket in wrapped.reducer.buckets)
    assert g is not None
    wrapped.close()


def test_without_views_gradients_stay_in_the_bucket(world):
    world(without_views)


def shares_memory(backend, set_to_none):
    params = [nn.Parameter(torch.zeros(n)) for n in (3, 20000)]
    wrapped = DistributedOptimizer(torch.optim.SGD(params, 0.1), backend=backend)
    views = []
    for step in range(5):
        wrapped.zero_grad(set_to_none=set_to_none)
        backward(backend, params, step)
        mean = mean_of(backend, step)
        for p in params:
            torch.testing.assert_close(p.grad, torch.full_like(p, mean))
        if step == 1:
            params[1].grad.share_memory_()
            views = [p.grad.view(-1) for p in params]
        if not set_to_none:
            for p, v in zip(params, views, strict=False):
                torch.testing.assert_close(v, torch.full_like(p, mean))
        wrapped.step()
    if set_to_none:
        for v in views:
            torch.testing.assert_close(v, torch.full_like(v, mean_of(backend, 1)))
    wrapped.close()


def test_views_have_the_right_values_after_gradients_were_moved_to_shared_memory(world):
    world.each(shares_memory, [(False,), (True,)])


def assigns_data(backend, indices):
    """Keep a view of each gradient at ``indices``, and then assign to the gradient's ``.data``."""
    params = [nn.Parameter(torch.zeros(n)) for n in (3, 20000, 500)]
    wrapped = DistributedOptimizer(torch.optim.SGD(params, 0.1), backend=backend)
    kept = []
    for step in range(4):
        wrapped.zero_grad()
        backward(backend, params, step)
        for p in [params[i] for i in indices]:
            kept.append((step, p.grad.data))
            p.grad.data = p.grad.data * 0.5
        wrapped.step()
    for step, view in kept:
        torch.testing.assert_close(view, torch.full_like(view, mean_of(backend, step)))
    wrapped.close()


def test_views_keep_their_values_after_an_assignment_to_the_data_of_the_gradient(world):
    world.each(assigns_data, [((0, 1, 2),), ((2,),), ((0, 2),), ((1, 2),)])


def keeps_one_element(backend):
    """Keep a view of one element in every step. The bucket gets new memory only once."""
    params = [nn.Parameter(torch.zeros(n)) for n in (3, 20000)]
    wrapped = DistributedOptimizer(torch.optim.SGD(params, 0.1), backend=backend)
    kept, addresses = [], set()
    for step in range(20):
        wrapped.zero_grad()
        backward(backend, params, step)
        kept.append(params[0].grad[0])
        addresses.add(wrapped.reducer.buckets[0].memory.values.data_ptr())
        wrapped.step()
    assert len(addresses) == 2
    assert [round(float(each) * 2) for each in kept] == [(step + 1) * (backend.size + 1) for step in range(20)]
    wrapped.close()


def test_a_bucket_gets_new_memory_only_once_if_a_view_is_kept_in_every_step(world):
    world(keeps_one_element)


def interrupted(method, numbers, call_number):
    """Return a wrapper of ``method`` that raises KeyboardInterrupt if the next of ``numbers`` is ``call_number``."""

    def replacement(*args, **options):
        if next(numbers) == call_number:
            raise KeyboardInterrupt
        method(*args, **options)

    return replacement


def is_interrupted(backend, call_number):
    """Interrupt the move to new memory before a backward pass, which then completes it."""
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(20000))
    wrapped = DistributedOptimizer(torch.optim.SGD([p, q], 0.0), backend=backend)
    kept = None
    for step in range(4):
        wrapped.zero_grad()
        bucket = wrapped.reducer.buckets[0] if step else None
        if step == 2:
            place = Slot.place
            Slot.place = interrupted(place, iter(range(100)), call_number)
            with pytest.raises(KeyboardInterrupt):
                bucket.memory.leave_views()
            Slot.place = place
            assert bucket.memory._left is not None
        backward(backend, (p, q), step)
        mean = mean_of(backend, step)
        for each in (p, q):
            torch.testing.assert_close(each.grad, torch.full_like(each, mean))
        if step == 1:
            kept = q.grad.view(-1)
        wrapped.step()
    torch.testing.assert_close(kept, torch.full_like(kept, mean_of(backend, 1)))
    wrapped.close()


def test_an_interrupted_move_to_new_memory_is_completed(world):
    if world.name == "threads":
        pytest.skip("replaces a method that all threads share")
    world.each(is_interrupted, [(0,), (1,)])


def interrupted_after(method):
    """Return a wrapper of ``method`` that raises KeyboardInterrupt at its end."""

    def replacement(*args):
        method(*args)
        raise KeyboardInterrupt

    return replacement


def is_interrupted_late(backend, owner, name):
    """Interrupt the move to new memory on rank 0, after a method has done its work; a backward pass follows.

    The method, ``name`` of ``owner``, is called with shared memory only. In other worlds, nothing is interrupted.
    """
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(20000))
    reducer = GradientReducer([("p", p), ("q", q)], backend)
    kept = []
    for step in range(4):
        p.grad = q.grad = None
        reducer.renew()
        if step == 1 and backend.rank == 0:  # the views of the first gradients make the next round move the bucket
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, name, interrupted_after(getattr(owner, name)))
                with pytest.raises(KeyboardInterrupt) if backend.transport.startswith("shm") else nullcontext():
                    reducer.buckets[0].memory.leave_views()
        backward(backend, (p, q), step)
        kept.append(q.grad.view(-1))
    for step, view in enumerate(kept):
        torch.testing.assert_close(view, torch.full_like(view, mean_of(backend, step)))
    reducer.close()


def test_a_move_to_new_memory_may_be_interrupted_at_its_end(world):
    if world.name == "threads":
        pytest.skip("replaces methods that all threads share")
    methods = [(SecondMapping, "separate"), (SharedMemory, "replace_buffer"), (SharedMemoryBackend, "replace_buffer")]
    world.each(is_interrupted_late, methods)


def two_reducers(backend):
    """Keep views of the gradients of two optimizers on one backend."""
    p, q, r = (nn.Parameter(torch.zeros(n)) for n in (3, 20000, 7))
    one = DistributedOptimizer(torch.optim.SGD([p, q], 0.0), backend=backend)
    two = DistributedOptimizer(torch.optim.SGD([r], 0.0), backend=backend)
    kept = []
    for step in range(4):
        one.zero_grad()
        two.zero_grad()
        backward(backend, (p, q, r), step)
        kept.append([each.grad.data for each in (p, q, r)[step % 3 :]])
        one.step()
        two.step()
    for step, views in enumerate(kept):
        for view in views:
            torch.testing.assert_close(view, torch.full_like(view, mean_of(backend, step)))
    one.close()
    two.close()


def test_views_keep_their_values_with_two_reducers(world):
    world(two_reducers)


def keeps_gradient_then_view(backend, dtype):
    """Keep gradients themselves first, and views of later gradients."""
    params = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (4, 20000)]
    reducer = GradientReducer([("p", params[0]), ("q", params[1])], backend)
    kept = []
    for step in range(6):
        reducer.renew()
        for p in params:
            p.grad = torch.full_like(p, (step + 1) * (backend.rank + 1))
        reducer.reduce()
        kept += [(step, p.grad if step < 3 else p.grad.view(-1)) for p in params if step != 2]
    for step, tensor in kept:
        torch.testing.assert_close(tensor, torch.full_like(tensor, mean_of(backend, step)))
    reducer.close()


def test_views_keep_their_values_after_gradients_were_kept(world):
    world.each(keeps_gradient_then_view, [(torch.float32,), (torch.float64,), (torch.bfloat16,), (torch.complex64,)])


def accumulates_one(backend):
    """Keep views of one gradient, while the other gradient of its bucket is never zeroed."""
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(20000))
    reducer = GradientReducer([("p", p), ("q", q)], backend)
    total, kept = 0.0, []
    for step in range(5):
        p.grad = None
        reducer.renew()
        backward(backend, (p, q), step)
        mean = mean_of(backend, step)
        total += mean
        torch.testing.assert_close(p.grad, torch.full_like(p, mean))
        torch.testing.assert_close(q.grad, torch.full_like(q, total))
        kept.append(p.grad.view(-1))
    for step, view in enumerate(kept):
        torch.testing.assert_close(view, torch.full_like(view, mean_of(backend, step)))
    reducer.close()


def test_views_keep_their_values_if_another_gradient_is_never_zeroed(world):
    world(accumulates_one)


def changes_zeros(backend):
    """Keep views, and change the zero gradient of an unused parameter in place, as weight decay by hand does.

    Then assign another gradient: the optimizer step refuses it.
    """
    p, unused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(5))
    wrapped = DistributedOptimizer(torch.optim.SGD([p, unused], 0.5), backend=backend)
    kept = []
    for step in range(4):
        wrapped.zero_grad()
        backward(backend, [p], step)
        kept.append(p.grad.view(-1))
        unused.grad.add_(unused.detach(), alpha=0.5)
        wrapped.step()
    torch.testing.assert_close(unused.detach(), torch.full((5,), 0.75**4))
    wrapped.zero_grad()
    backward(backend, [p], 4)
    unused.grad = torch.ones(5)
    with pytest.raises(BackendError, match="was assigned after backward"):
        wrapped.step()
    wrapped.close()


def test_a_gradient_of_zeros_may_change_in_place_after_views_were_kept(world):
    world(changes_zeros)


def raise_out_of_memory(*args):
    raise OSError(12, "Cannot allocate memory")


def runs_without_memory(backend):
    """Keep views although there is no memory for a copy of the bucket: later gradients are right, and overwrite views."""
    with mock.patch.object(backend, "replace_buffer", raise_out_of_memory):
        keeps_views_without_memory(backend)


def keeps_views_without_memory(backend):
    params = [nn.Parameter(torch.zeros(n)) for n in (3, 20000)]
    reducer = GradientReducer([("p", params[0]), ("q", params[1])], backend)
    kept = []
    for step in range(3):
        for p in params:
            p.grad = None
        reducer.renew()
        backward(backend, params, step)
        for p in params:
            torch.testing.assert_close(p.grad, torch.full_like(p, mean_of(backend, step)))
        kept.append(params[0].grad.view(-1))
    assert not any(bucket.memory.keeps_views for bucket in reducer.buckets)
    reducer.close()


def test_training_continues_without_memory_for_views(world):
    world(runs_without_memory)
