"""Gradients in the program's own memory, gradients with an autograd graph, and gradients that the program changes."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from dualtrain import BackendError, DistributedOptimizer
from dualtrain.gradients import GradientReducer
from dualtrain.gradients.slots import may_be_kept
from tests.models_for_tests import (
    gradients,
    mean_gradients,
    of_every_rank,
    perceptron,
    seeded,
    sgd,
    small_buckets,
    vector_loss,
)
from tests.threads import run_threads

#: Numbers of inputs of the model: one for small gradients only, and one for a large gradient. A large gradient can be
#: copied to its bucket as soon as it is ready.
INPUTS = 4, 20000


def flat_gradients(params):
    """Make all gradients parts of one tensor. Like the four functions below, return the tensors that the program keeps."""
    flat = torch.zeros(sum(p.numel() for p in params))
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = part.view_as(p)
    return [flat]


def detached_parts(params):
    """Make all gradients detached parts of one tensor: autograd does not know that they are views of it."""
    memory = flat_gradients(params)
    for p in params:
        p.grad = p.grad.detach()
    return memory


def flat_views(params):
    """Keep a view of each gradient."""
    for p in params:
        p.grad = torch.zeros_like(p)
    return [p.grad.view(-1) for p in params]


def interleaved_gradients(params):
    """Make each gradient a tensor with gaps."""
    memory = [torch.zeros(*p.shape, 2) for p in params]
    for p, each in zip(params, memory, strict=True):
        p.grad = each[..., 0]
    return memory


def separate_gradients(params):
    for p in params:
        p.grad = torch.zeros_like(p)
    return [p.grad for p in params]


def clips_own_memory(backend, make, inputs, accumulate):
    """Train with gradients in the program's memory, which the program zeroes and halves; compare with one process."""
    x = torch.linspace(-1, 1, backend.size * inputs).view(backend.size, inputs) / inputs
    model, reference = (seeded(nn.Sequential(nn.Linear(inputs, 2), nn.Linear(2, 2))) for _ in range(2))
    optimizer = sgd(model, backend)
    params = list(model.parameters())
    memory = make(params)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for each in memory:
            each.zero_()
        if accumulate:
            with optimizer.no_sync():
                model(x[backend.rank]).square().mean().backward()
        with small_buckets((1, 1)):  # send parts of a flat tensor while backward still changes other parts
            model(x[backend.rank]).square().mean().backward()
        for each in memory:
            each.mul_(0.5)
        optimizer.step()
        plain.zero_grad()
        (reference(x).square().mean() * (1 if accumulate else 0.5)).backward()
        plain.step()
        torch.testing.assert_close(params, list(reference.parameters()), rtol=1e-5, atol=1e-6)
    optimizer.close()


# The filter is set here, not by each rank, because ranks that are threads share the warning filters.
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract:UserWarning")
def test_gradients_stay_in_the_programs_own_memory(typical):
    makes = flat_gradients, detached_parts, flat_views, interleaved_gradients, separate_gradients
    typical.each(
        clips_own_memory,
        itertools.product(makes, INPUTS, [False, True]),
        [(flat_gradients, 20000, False), (separate_gradients, 4, True)],
    )


def gradients_of_another_model(backend, inputs, step):
    """In one step, assign each gradient to a parameter of another model too (``q.grad = p.grad``).

    Only C++ holds such a reference, so Python's reference count does not show it.
    """

    def loss(model, rank):
        return model(torch.ones(inputs) * rank).square().sum()

    model, other = (seeded(nn.Sequential(nn.Linear(inputs, 2), nn.Linear(2, 2))) for _ in range(2))
    expected = mean_gradients(model, of_every_rank(backend, loss))
    optimizer = sgd(model, backend)
    for number in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            (0 * loss(model, backend.rank)).backward()
        if number == step:
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                q.grad = p.grad
        loss(model, backend.rank).backward()
        torch.testing.assert_close(gradients(model), expected)
        if number >= step:
            torch.testing.assert_close(gradients(other), expected)
    optimizer.close()


def test_gradients_of_another_models_parameters_are_averages_too(typical):
    cases = list(itertools.product(INPUTS, [0, 2]))
    typical.each(gradients_of_another_model, cases, cases[-1:])


def parts_that_were_moved(backend):
    """Move parts of one tensor to memory of their own. They still share a version counter."""
    model = perceptron()
    expected = mean_gradients(model, of_every_rank(backend, vector_loss))
    optimizer = sgd(model, backend)
    with small_buckets((1, 1)):
        vector_loss(model, backend.rank).backward()  # makes the buckets, so that the next pass sends gradients early
    optimizer.zero_grad()
    flat_gradients(list(model.parameters()))
    for p in model.parameters():
        p.grad.data = torch.zeros_like(p)
    vector_loss(model, backend.rank).backward()
    torch.testing.assert_close(gradients(model), expected)
    optimizer.close()


def test_gradients_may_be_moved_out_of_the_programs_own_memory():
    run_threads(2, parts_that_were_moved)


def shares_memory(backend):
    """On the last rank only, let gradients overlap: two are parts of a third one, and one repeats a single element."""
    named = {name: nn.Parameter(torch.ones(n)) for name, n in {"whole": 6, "middle": 2, "end": 1, "same": 3}.items()}
    reducer = GradientReducer(named.items(), backend)
    last = backend.size - 1
    memory = torch.full((6,), 1.0)
    parts = {"whole": memory, "middle": memory[2:4], "end": memory[5:], "same": torch.ones(1).expand(3)}
    for name, p in named.items():
        p.grad = parts[name] if name == "whole" or backend.rank == last else torch.full_like(p, 7.0)
    reducer.reduce()
    torch.testing.assert_close(named.pop("whole").grad, torch.ones(6))
    for p in named.values():
        torch.testing.assert_close(p.grad, torch.full_like(p, (7.0 * last + 1) / backend.size))
    reducer.close()


def test_gradients_that_share_memory_get_separate_results(typical):
    typical(shares_memory)


def made_in_inference_mode(backend):
    """Assign gradients that torch refuses to change in place, since they were made in inference mode."""
    p = nn.Parameter(torch.ones(3))
    reducer = GradientReducer([("p", p)], backend)
    with torch.inference_mode():
        kept = torch.full((3,), backend.rank + 1.0)
    p.grad = kept
    reducer.reduce()
    torch.testing.assert_close(p.grad, torch.full((3,), (backend.size + 1) / 2))
    reducer.close()


def test_gradients_that_were_made_in_inference_mode_are_averaged(typical):
    typical(made_in_inference_mode)


def reduces_in_inference_mode(backend):
    """Average gradients in inference mode; the next backward adds to them in place. Move them to shared memory once."""
    p = nn.Parameter(torch.ones(3))
    reducer = GradientReducer([("p", p)], backend)
    for step in range(3):
        with reducer.no_sync():
            (p.sum() * (backend.rank + 1)).backward()
        with torch.inference_mode():
            reducer.reduce()
        torch.testing.assert_close(p.grad, torch.full((3,), (step + 1) * (backend.size + 1) / 2))
        if step == 0:
            p.grad.share_memory_()
    reducer.close()


def test_gradients_are_averaged_in_inference_mode(typical):
    typical(reduces_in_inference_mode)


def penalizes(backend, keep_gradients):
    """Add a penalty on the averaged gradients, and backpropagate it through their graph; compare with one process."""
    losses = [partial(vector_loss, key=rank) for rank in range(backend.size)]
    model, reference = perceptron(), perceptron()
    optimizer = sgd(model, backend)
    for _ in range(2):
        for each in (optimizer, reference):
            each.zero_grad()
        losses[backend.rank](model).backward(create_graph=True)
        assert all(p.grad.requires_grad for p in model.parameters())
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        if not keep_gradients:
            optimizer.zero_grad()
        penalty.backward()
        (sum(loss(reference) for loss in losses) / backend.size).backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in reference.parameters())
        if not keep_gradients:
            reference.zero_grad()
        penalty.backward()
        for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.detach(), expected.grad.detach(), rtol=1e-5, atol=1e-6)
    for each in (optimizer, reference):
        each.zero_grad()  # break the reference cycles between parameters and gradients
    optimizer.close()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_averaged_gradients_keep_their_autograd_graph(typical):
    typical.each(penalizes, [(True,), (False,)])


def differentiates_forward(backend, order):
    """Run backward in forward-mode AD: the new gradient has a tangent, and is added in place to an earlier gradient."""
    p = nn.Parameter(torch.linspace(-1, 1, 5))
    p.grad = torch.zeros(5)
    optimizer = DistributedOptimizer(torch.optim.SGD([p], lr=0.1), backend=backend, sum_order=order)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        with forward_ad.dual_level():
            x = forward_ad.make_dual(torch.full((5,), float(backend.rank)), torch.ones(5))
            (x * p).pow(3).sum().backward()
        mean = sum(3 * rank**3 for rank in range(backend.size)) / backend.size
        torch.testing.assert_close(p.grad, mean * p.detach().square())
        optimizer.step()
    optimizer.close()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")  # torch itself calls it
def test_gradients_with_tangents_are_averaged(processes):
    processes.each(differentiates_forward, [("backend",), ("canonical",)])


@pytest.mark.skipif(
    torch.__version__.startswith(("2.5.", "2.6.", "2.7.")),
    reason="needs torch 2.8 or newer: in older versions, autograd still refers to the gradient when its hook runs",
)
def test_may_be_kept_is_true_only_for_gradients_that_the_program_keeps():
    # ``may_be_kept`` counts references. If a version of Python or torch holds more references to a gradient than expected,
    # dualtrain copies each averaged gradient, which takes time.
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    params, results = list(model.parameters()), []
    for p in params:
        p.register_post_accumulate_grad_hook(lambda p: results.append(may_be_kept([p.grad])))
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 1, 4, 4)).sum().backward()
    assert results == [False] * 2 * len(params)
    assert not may_be_kept([p.grad for p in params])
    for keep in (lambda grad: grad, lambda grad: grad.detach(), lambda grad: grad.view(-1)):
        kept = keep(params[-1].grad)
        assert may_be_kept([p.grad for p in params])
        del kept


def changes_what_was_sent(backend, change, zero_in_place):
    """In a hook of the second layer, change a gradient of the last layer that was already sent."""
    model = seeded(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 500), nn.Linear(500, 600)))
    optimizer = sgd(model, backend, momentum=0.0)
    bias = model[2].bias
    for step in range(3):
        optimizer.zero_grad(set_to_none=not zero_in_place)
        if step == 2:
            model[1].register_full_backward_hook(lambda *_: change(bias))
            with pytest.raises(BackendError, match=r"gradient of '2\.(bias|weight)' changed after it was sent"):
                model(torch.ones(1, 2)).sum().backward()
        else:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    optimizer.zero_grad()
    with optimizer.no_sync():  # as the error message advises
        (model(torch.ones(1, 2)).sum() * backend.rank).backward()
    own = bias.grad.clone()
    optimizer.step()
    torch.testing.assert_close(own, torch.full_like(own, 0.0 if change is replace_by_zeros else 0.5 * backend.rank))
    optimizer.close()


def halve(p):
    p.grad.mul_(0.5)


def replace_by_zeros(p):
    p.grad = torch.zeros_like(p)


def test_changes_of_gradients_that_were_sent_are_refused(typical):
    typical.each(
        changes_what_was_sent,
        itertools.product([halve, replace_by_zeros], [False, True]),
        [(halve, True), (replace_by_zeros, False)],
    )


def assigns_the_heads_gradient(backend):
    """Run backward for the body only, which averages zeros for the head. Then assign the head's gradient.

    This is refused, but works in ``no_sync``, which sends nothing during backward.
    """
    model = perceptron()
    body, head = list(model[0].parameters()), list(model[2].parameters())
    optimizer = sgd(model, backend)

    def backward():
        optimizer.zero_grad()
        loss = vector_loss(model, backend.rank)
        loss.backward(inputs=body, retain_graph=True)
        for p, grad in zip(head, torch.autograd.grad(loss, head), strict=True):
            p.grad = grad

    expected = mean_gradients(model, [partial(vector_loss, key=rank) for rank in range(backend.size)])
    backward()
    with pytest.raises(BackendError, match=r"the gradient of '2\.(weight|bias)' was assigned after backward"):
        optimizer.step()
    with optimizer.no_sync():
        backward()
    optimizer.synchronize()
    torch.testing.assert_close(gradients(model), expected)
    optimizer.step()
    optimizer.close()


def replaces_averages(backend):
    """Replace all averages, as out-of-place clipping does. Only rank 0 uses the parameters of the last layer."""
    model = perceptron()
    optimizer = sgd(model, backend, momentum=0.0)
    before = [p.detach().clone() for p in model.parameters()]
    inputs = list(model.parameters())[: None if backend.rank == 0 else 2]
    for _ in range(2):  # first without a layout from an earlier pass, then with one
        optimizer.zero_grad()
        vector_loss(model, backend.rank).backward(inputs=inputs)
    expected = gradients(model)
    for p in model.parameters():
        p.grad = p.grad * 0.5
    optimizer.step()
    for p, was, grad in zip(model.parameters(), before, expected, strict=True):
        torch.testing.assert_close(p.detach(), was - 0.05 * grad)
    optimizer.close()


def changes_after_backward(backend):
    """Change averages after backward: such changes are local, and stay until the step."""
    model = perceptron()
    optimizer = sgd(model, backend, momentum=0.0)
    before = [p.detach().clone() for p in model.parameters()]
    vector_loss(model, backend.rank).backward(inputs=list(model[0].parameters()))
    expected = gradients(model)
    for p in model.parameters():
        p.grad.add_(p.detach()).mul_(0.5)
    model[0].weight.grad = model[0].weight.grad.clone()
    optimizer.step()
    for p, was, grad in zip(model.parameters(), before, expected, strict=True):
        torch.testing.assert_close(p.detach(), was - 0.05 * (grad + was))
    optimizer.close()


def test_a_gradient_that_is_assigned_after_zeros_were_averaged_is_refused(typical):
    typical(assigns_the_heads_gradient)


def test_averages_may_be_replaced_on_a_rank_that_added_zeros(typical):
    typical(replaces_averages)


def test_changes_after_backward_are_kept(typical):
    typical(changes_after_backward)


def marks_gradients(backend, inputs, set_to_none):
    """After each step, set an attribute on the gradients, and multiply them by a factor that requires a gradient itself."""
    model, factor = seeded(nn.Linear(inputs, 2)), torch.ones((), requires_grad=True)
    optimizer = sgd(model, backend)
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(torch.ones(inputs) * backend.rank).square().sum().backward()
        for p in model.parameters():
            # As in torch: with set_to_none=False, the gradient stays the same tensor.
            assert hasattr(p.grad, "seen") == (step > 0 and not set_to_none)
            assert not p.grad.requires_grad
        optimizer.step()
        for p in model.parameters():
            p.grad.mul_(factor).seen = True
    optimizer.close()


def test_new_gradients_have_no_attributes_or_graph_of_earlier_ones(typical):
    typical.each(marks_gradients, [(inputs, none) for inputs in INPUTS for none in (True, False)])
