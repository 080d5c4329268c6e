"""``DistributedOptimizer`` works as any torch optimizer does: with schedulers, scalers, checkpoints and closures."""

from __future__ import annotations

import copy
import importlib
import io
import itertools
import math
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dualtrain import (
    BackendError,
    DistributedOptimizer,
    average_buffers,
    broadcast_optimizer_state,
    broadcast_parameters,
    connect,
    functional,
)
from dualtrain.backends.local import LocalBackend
from dualtrain.batchnorm import synchronize_norms
from dualtrain.gradients import GradientReducer, Transfer
from dualtrain.launchers import World
from tests.models_for_tests import (
    EXACT,
    gradients,
    mean_gradients,
    of_every_rank,
    perceptron,
    same_on_all,
    seeded,
    sgd,
    vector_loss,
    vectors,
    wrap,
)
from tests.threads import run_threads

KINDS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "lr-tensor": (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
}


def make(kind, model):
    build, options = KINDS[kind]
    return build(model.parameters(), **options)


def key(backend, step, rank=None):
    return step * backend.size + (backend.rank if rank is None else rank)


def train(model, optimizer, backend, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        vector_loss(model, key(backend, step)).backward()
        optimizer.step()


def alone(model, optimizer, backend, steps, start=0, before_step=lambda: None):
    """Run the steps of :func:`train` without communication, as a reference.

    Compute the average of all ranks' gradients locally.
    """
    for step in range(start, start + steps):
        keys = [key(backend, step, rank) for rank in range(backend.size)]
        losses = [lambda m, k=k: vector_loss(m, k) for k in keys]
        for p, grad in zip(model.parameters(), mean_gradients(model, losses), strict=True):
            p.grad = grad
        before_step()
        optimizer.step()


def check(model, oracle, **tolerance):
    for p, expected in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(p, expected, **tolerance)


# -- interface ----------------------------------------------------------------------------------------------------


def is_optimizer(backend, kind):
    model, oracle = perceptron(), perceptron()
    inner = make(kind, model)
    optimizer = wrap(inner, model, backend)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert "DistributedOptimizer" in repr(optimizer)
    assert type(inner).__name__ in repr(optimizer)
    assert f"rank {backend.rank} of {backend.size}" in repr(optimizer)
    train(model, optimizer, backend, 4)
    alone(oracle, make(kind, oracle), backend, 4)
    check(model, oracle)
    assert same_on_all(backend, list(model.parameters()))
    assert inner.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


def test_a_step_is_the_wrapped_optimizers_step_on_averaged_gradients(typical):
    typical.each(is_optimizer, [(kind,) for kind in KINDS], [("sgd",), ("adamw-fused",)])


def keeps_state(backend):
    model, oracle = perceptron(), perceptron()
    inner, single = (torch.optim.Adam(m.parameters(), lr=0.05) for m in (model, oracle))
    alone(model, inner, backend, 3)
    alone(oracle, single, backend, 6)
    optimizer = wrap(inner, model, backend)
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}
    train(model, optimizer, backend, 3, start=3)
    check(model, oracle)
    assert {int(state["step"]) for state in inner.state.values()} == {6}


def test_state_from_before_wrapping_is_kept(typical):
    typical(keeps_state)


def copies(backend):
    model = perceptron()
    inner = torch.optim.Adam(model.parameters(), lr=0.05)
    optimizer = wrap(inner, model, backend)
    train(model, optimizer, backend, 2)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is torch.optim.Adam
        assert other is not inner
        assert other.param_groups[0]["lr"] == 0.05
        assert [int(state["step"]) for state in other.state.values()] == [2] * 4
    buffer = io.BytesIO()
    torch.save({"optimizer": optimizer}, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=False)["optimizer"]) is torch.optim.Adam


def test_a_copy_is_an_optimizer_without_wrapper(typical):
    typical(copies)


def state_dicts(backend):
    model, oracle = perceptron(), perceptron()
    optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.05), model, backend)
    train(model, optimizer, backend, 3)
    bare = torch.optim.Adam(oracle.parameters(), lr=1.0)
    oracle.load_state_dict(model.state_dict())
    bare.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch's load_state_dict does not copy tensors
    assert bare.param_groups[0]["lr"] == 0.05
    alone(oracle, bare, backend, 2, start=3)
    train(model, optimizer, backend, 2, start=3)
    check(model, oracle)

    again = perceptron()
    again.load_state_dict(oracle.state_dict())
    fresh = wrap(torch.optim.Adam(again.parameters(), lr=1.0), again, backend)
    fresh.load_state_dict(copy.deepcopy(bare.state_dict()))
    train(again, fresh, backend, 2, start=5)
    train(model, optimizer, backend, 2, start=5)
    check(again, model)


def test_bare_and_wrapped_optimizers_can_load_each_others_state_dicts(typical):
    typical(state_dicts)


def zeroes(backend):
    model = perceptron()
    optimizer = sgd(model, backend)
    vector_loss(model, backend.rank).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(not grad.any() for grad in gradients(model))
    vector_loss(model, backend.rank).backward()
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
    vector_loss(model, backend.rank).backward()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_zero_grad_sets_gradients_to_zeros_or_none(typical):
    typical(zeroes)


def synchronizes(backend):
    model = perceptron()
    expected = mean_gradients(model, of_every_rank(backend, vector_loss))
    optimizer = sgd(model, backend, backward_passes_per_step=2)
    vector_loss(model, backend.rank).backward()  # the first of two passes: nothing is sent yet
    for _ in range(3):
        optimizer.synchronize()
        for mine, mean in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(mine, mean)
    for p in model.parameters():
        p.grad.mul_(0.5)
    optimizer.step()
    for mine, mean in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(mine, 0.5 * mean)


def test_synchronize_is_idempotent_and_step_uses_changed_gradients(typical):
    typical(synchronizes)


def hooked(backend):
    model = perceptron()
    optimizer = sgd(model, backend)
    seen = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append(("before", opt)))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append(("after", opt)))
    optimizer.optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append(("inner", opt)))
    train(model, optimizer, backend, 2)
    assert seen == [("before", optimizer), ("inner", optimizer.optimizer), ("after", optimizer)] * 2


def hooked_for_all(backend):
    model = perceptron()
    optimizer = sgd(model, backend)
    seen = []

    def note(label):
        # Ranks that are threads share global hooks, so ignore the other ranks' optimizers.
        return lambda opt, args, kwargs: seen.append((label, opt)) if opt in (optimizer, optimizer.optimizer) else None

    optimizer.register_step_pre_hook(lambda *_: None)  # global hooks run once in each step, even if the wrapper has hooks
    handles = register_optimizer_step_pre_hook(note("before")), register_optimizer_step_post_hook(note("after"))
    try:
        train(model, optimizer, backend, 2)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [("before", optimizer.optimizer), ("after", optimizer.optimizer)] * 2


def hooked_with_other_arguments(backend):
    """Replace the arguments of the step in a step pre-hook."""
    model, oracle = perceptron(), perceptron()
    optimizer, expected = sgd(model, backend), sgd(oracle, backend)
    seen = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append((args, kwargs)) or ((opt,), {}))
    train(model, optimizer, backend, 2)
    train(oracle, expected, backend, 2)
    assert seen == [((optimizer,), {})] * 2
    assert all(map(torch.equal, model.parameters(), oracle.parameters()))


@pytest.mark.parametrize("body", [hooked, hooked_for_all, hooked_with_other_arguments])
def test_step_hooks_run_once_in_each_step(typical, body):
    typical(body)


# -- learning-rate schedules --------------------------------------------------------------------------------------

SCHEDULES = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "one-cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=8),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
        ],
        milestones=[3],
    ),
}


def scheduled(backend, name, on_inner):
    model, oracle = perceptron(), perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if a scheduler did not detect the call of optimizer.step()
        if name == "sequential":
            warnings.filterwarnings("ignore", "The epoch parameter")
        early = SCHEDULES[name](inner) if on_inner else None
        optimizer = wrap(inner, model, backend)
        scheduler = early or SCHEDULES[name](optimizer)
        single = torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9)
        reference = SCHEDULES[name](single)
        for step in range(6):
            train(model, optimizer, backend, 1, start=step)
            scheduler.step()
            alone(oracle, single, backend, 1, start=step)
            reference.step()
            assert optimizer.param_groups[0]["lr"] == single.param_groups[0]["lr"]
    check(model, oracle)
    scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    pickle.dumps(scheduler.state_dict())


def test_schedulers_may_be_made_before_or_after_wrapping(typical):
    typical.each(scheduled, itertools.product(SCHEDULES, [False, True]), [("lambda", False), ("lambda", True)])


# -- mixed precision ----------------------------------------------------------------------------------------------


def scaled_step(model, optimizer, scaler, loss, max_norm=None):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if max_norm is not None:
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return norm if max_norm is not None else None


def scales(backend, max_norm):
    model, oracle = perceptron(), perceptron()
    optimizer, single = sgd(model, backend), torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def clip():
        if max_norm is not None:
            nn.utils.clip_grad_norm_(oracle.parameters(), max_norm)

    for step in range(4):
        norm = scaled_step(model, optimizer, scaler, vector_loss(model, key(backend, step)), max_norm)
        assert norm is None or same_on_all(backend, [norm])
    alone(oracle, single, backend, 4, before_step=clip)
    check(model, oracle)
    assert scaler.get_scale() == 2.0**12


def test_loss_scaling_works_with_and_without_clipping(typical):
    typical.each(scales, [(None,), (0.05,)], [(0.05,)])


class TakesScaler(torch.optim.SGD):
    """Optimizer with torch's older interface, in which ``step`` has an argument for the GradScaler.

    When it is wrapped, GradScaler unscales the gradients and does not pass itself to ``step``.
    """

    _step_supports_amp_scaling = True

    def step(self, closure=None, grad_scaler=None):
        assert grad_scaler is None
        return super().step(closure)


FUSED = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "takes scaler": (TakesScaler, {"lr": 0.1}),
}


def unscaled_by_the_step(backend):
    """Train three steps with a GradScaler. In the second, the last rank's loss overflows, so all ranks skip the update."""
    for title, (build, options) in FUSED.items():
        for clip in (False, True):
            model, oracle = perceptron(), perceptron()
            optimizer = wrap(build(model.parameters(), **options), model, backend)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            seen = []
            optimizer.optimizer.register_step_pre_hook(
                lambda opt, args, kwargs, seen=seen: seen.append(hasattr(opt, "found_inf"))
            )
            for step in range(3):
                loss = vector_loss(model, key(backend, step))
                overflow = step == 1 and backend.rank == backend.size - 1
                scaled_step(model, optimizer, scaler, loss * torch.inf if overflow else loss, 1e3 if clip else None)
            single = build(oracle.parameters(), **options)
            alone(oracle, single, backend, 1)
            alone(oracle, single, backend, 1, start=2)
            check(model, oracle)
            assert scaler.get_scale() == 2.0**9
            assert same_on_all(backend, list(model.parameters()))
            # A fused optimizer gets found_inf as a tensor, so that the CPU need not wait for its value.
            assert set(seen) == {title != "takes scaler"}
            assert not hasattr(optimizer, "found_inf")


def test_loss_scaling_works_with_optimizers_that_can_unscale_in_their_step(typical):
    typical(unscaled_by_the_step)


def overflows(backend, clip):
    model = perceptron()
    optimizer = sgd(model, backend)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    last = backend.size - 1
    for step in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        scale = scaler.get_scale()
        loss = vector_loss(model, key(backend, step))
        if step % 2 and backend.rank == last:
            loss = loss * torch.inf
        scaled_step(model, optimizer, scaler, loss, 1.0 if clip else None)
        stayed = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        assert stayed == bool(step % 2)
        assert scaler.get_scale() == (scale / 2 if step % 2 else scale)
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        assert same_on_all(backend, list(model.parameters()))


def test_an_overflow_on_one_rank_makes_all_ranks_skip_the_step(spmd):
    spmd.each(overflows, [(False,), (True,)])


def autocasts(backend):
    model = perceptron()
    optimizer = sgd(model, backend)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(vectors(key(backend, step)))
            assert y.dtype is torch.bfloat16
            loss = y.float().square().mean()
        loss.backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        optimizer.step()
    assert same_on_all(backend, list(model.parameters()))
    oracle = perceptron()
    alone(oracle, torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9), backend, 3)
    check(model, oracle, rtol=5e-2, atol=5e-3)


def test_a_model_trains_under_autocast_to_bfloat16(typical):
    typical(autocasts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("overflow", [False, True], ids=["plain", "overflow"])
def test_float16_on_a_gpu_takes_a_step_or_skips_it_on_overflow(overflow):
    from dualtrain import connect

    with connect("local") as backend:
        model = perceptron().cuda()
        optimizer = sgd(model, backend)
        scaler = torch.amp.GradScaler("cuda")
        before, scale = [p.detach().clone() for p in model.parameters()], scaler.get_scale()
        with torch.autocast("cuda", dtype=torch.float16):
            y = model(vectors(0).cuda())
            assert y.dtype is torch.float16
        scaled_step(model, optimizer, scaler, y.float().square().mean() * (torch.inf if overflow else 1.0), 1.0)
        stayed = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        assert stayed == overflow
        assert scaler.get_scale() == (scale / 2 if overflow else scale)


# -- groups, closures ---------------------------------------------------------------------------------------------


def adds_group(backend, named):
    model, oracle = perceptron(), perceptron()

    def first_only(m):
        return torch.optim.SGD(m[0].parameters(), lr=0.1, momentum=0.9)

    inner, single = first_only(model), first_only(oracle)
    optimizer = DistributedOptimizer(inner, model.named_parameters() if named else None, backend=backend)
    train(model, optimizer, backend, 2)
    alone(oracle, single, backend, 2)
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
    single.add_param_group({"params": list(oracle[2].parameters()), "lr": 0.02})
    train(model, optimizer, backend, 2, start=2)
    alone(oracle, single, backend, 2, start=2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02]
    check(model, oracle)
    assert same_on_all(backend, list(model.parameters()))


def test_a_group_added_later_is_reduced_too(spmd):
    spmd.each(adds_group, [(True,), (False,)], [(True,)])


def line_search(backend, as_number):
    """Step with LBFGS: the line search uses the averaged loss, so that all ranks take the same steps."""
    model, oracle = perceptron(), perceptron()
    options = {"max_iter": 6, "line_search_fn": "strong_wolfe"}
    optimizer = wrap(torch.optim.LBFGS(model.parameters(), **options), model, backend)
    single = torch.optim.LBFGS(oracle.parameters(), **options)

    def closure():
        optimizer.zero_grad()
        loss = vector_loss(model, backend.rank) * (1 + backend.rank)
        loss.backward()
        return loss.item() if as_number else loss

    def whole():
        single.zero_grad()
        loss = sum(vector_loss(oracle, rank) * (1 + rank) for rank in range(backend.size)) / backend.size
        loss.backward()
        return loss.item() if as_number else loss

    for _ in range(3):
        loss, expected = map(torch.as_tensor, (optimizer.step(closure), single.step(whole)))
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-3, atol=1e-5)
        assert same_on_all(backend, [loss, *model.parameters()])
    assert optimizer.state[next(model.parameters())]["func_evals"] > 3
    check(model, oracle, rtol=5e-3, atol=1e-3)


def test_lbfgs_with_a_closure_takes_the_same_steps_on_all_ranks(typical):
    typical.each(line_search, [(False,), (True,)], [(False,)])


def closure_of_sgd(backend):
    """Step with closures. Losses are averaged, other values returned as they are; a loss on only some ranks is refused."""
    model, oracle = perceptron(), perceptron()
    optimizer = sgd(model, backend)
    cases = [
        (torch.tensor([backend.rank + 1.0], dtype=torch.float16), torch.tensor([(1 + backend.size) / 2]).half()),
        (backend.rank, (backend.size - 1) / 2),
        (None, None),
        ("text", "text"),
        (torch.arange(2), torch.arange(2)),
        (None if backend.rank else 1.0, 1.0),
    ]
    for step, (value, expected) in enumerate(cases):

        def closure(step=step, value=value):
            optimizer.zero_grad()
            vector_loss(model, key(backend, step)).backward()
            return value

        if step == len(cases) - 1 and backend.size > 1:
            with pytest.raises(BackendError, match="a loss on some ranks and something else on others"):
                optimizer.step(closure)
            continue
        returned = optimizer.step(closure)
        assert type(returned) is type(expected)
        torch.testing.assert_close(returned, expected) if isinstance(returned, torch.Tensor) else None
        assert isinstance(returned, torch.Tensor) or returned == expected
    alone(oracle, torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9), backend, len(cases) - (backend.size > 1))
    check(model, oracle)


def test_a_closures_loss_is_averaged_and_other_values_are_returned_unchanged(typical):
    typical(closure_of_sgd)


# -- names and mistakes -------------------------------------------------------------------------------------------


def without_names(backend):
    model = perceptron()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backend=backend)
    train(model, optimizer, backend, 2)
    assert same_on_all(backend, list(model.parameters()))
    assert optimizer.reducer.slots[0].name == "group 0 parameter 0"


def test_names_of_parameters_are_optional(typical):
    typical(without_names)


def test_arguments_of_a_wrong_type_are_refused():
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong in ("torch", None, 0):
        for call in (
            lambda wrong=wrong: DistributedOptimizer(inner, backend=wrong),
            lambda wrong=wrong: broadcast_parameters(model, wrong),
            lambda wrong=wrong: broadcast_optimizer_state(inner, wrong),
            lambda wrong=wrong: average_buffers(model, wrong),
            lambda wrong=wrong: synchronize_norms(model, wrong),
        ):
            with pytest.raises(TypeError, match=rf"backend is a {type(wrong).__name__}: give what connect\(\) returns"):
                call()
    with connect("local") as backend, pytest.raises(TypeError, match="optimizer is a generator: give an optimizer"):
        DistributedOptimizer(model.parameters(), backend=backend)


def objects_of_a_wrong_type(backend):
    calls = {
        "model is a dict: give a module": (average_buffers, synchronize_norms),
        "optimizer is a dict: give an optimizer": (broadcast_optimizer_state,),
    }
    for message, functions in calls.items():
        for function in functions:
            with pytest.raises(TypeError, match=message):
                function({}, backend)
    for function, right in ((average_buffers, perceptron()), (broadcast_optimizer_state, sgd(perceptron(), backend))):
        with pytest.raises(BackendError, match=r"rank 1: .* refused since (model|optimizer) is a dict: give a"):
            function({} if backend.rank else right, backend)
    assert backend.allreduce(torch.ones(1)).item() == 1


def test_an_object_of_a_wrong_type_is_refused_on_every_rank():
    run_threads(2, objects_of_a_wrong_type)


def wrong_names_and_options(backend):
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"lacks 2 of the optimizer's parameters \(the first is group 0 parameter 2\)"):
        DistributedOptimizer(inner, model[0].named_parameters(), backend=backend)
    with pytest.raises(ValueError, match="has the name 'w' twice"):
        DistributedOptimizer(inner, [("w", p) for p in model.parameters()], backend=backend)
    with pytest.raises(ValueError, match="backward passes per step must be 1 or more, not -1"):
        wrap(inner, model, backend, backward_passes_per_step=-1)
    with pytest.raises(ValueError, match="number of extra scalars must be 0 or more, not -1"):
        wrap(inner, model, backend, extra=-1)
    for wrong in (1.5, math.nan, math.inf, None, "2"):
        with pytest.raises(ValueError, match=f"backward passes per step must be a whole number, not {wrong!r}"):
            wrap(inner, model, backend, backward_passes_per_step=wrong)
    with pytest.raises(ValueError, match=r"number of extra scalars must be a whole number, not 2\.5"):
        wrap(inner, model, backend, extra=2.5)
    assert wrap(inner, model, backend, backward_passes_per_step=8 / 4).reducer.passes == 2
    with pytest.raises(TypeError, match=r"transfer is a NoneType: give a dualtrain\.gradients\.Transfer"):
        wrap(inner, model, backend, transfer=None)
    for wrong in (model, dict(model.named_parameters())):
        with pytest.raises(TypeError, match=rf"is a {type(wrong).__name__}: pass model\.named_parameters\(\)"):
            DistributedOptimizer(inner, wrong, backend=backend)
    with pytest.raises(TypeError, match=r"has a Parameter in place of \(name, parameter\): pass model"):
        DistributedOptimizer(inner, model.parameters(), backend=backend)
    with pytest.raises(ValueError, match="unused='all' is not known"):
        wrap(inner, model, backend, unused="all")
    with pytest.raises(ValueError, match="some parameters appear"):
        wrap(inner, model, backend).add_param_group({"params": list(model.parameters())})


def test_wrong_names_and_options_are_refused(typical):
    typical(wrong_names_and_options)


def parts_of_a_model(backend):
    """Give the names of a whole model to an optimizer of some of its parameters; the other parameters are ignored."""
    model = perceptron()
    inner = torch.optim.SGD(model[2].parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), backend=backend)
    assert [slot.name for slot in optimizer.reducer.slots] == ["2.weight", "2.bias"]
    vector_loss(model, backend.rank).backward()
    local = mean_gradients(perceptron(), [lambda m: vector_loss(m, backend.rank)])
    torch.testing.assert_close(model[0].weight.grad, local[0], **EXACT)


def test_parameters_outside_of_the_optimizer_are_ignored(typical):
    typical(parts_of_a_model)


def same_parameter_twice(backend):
    """Give each parameter two names, as ``named_parameters(remove_duplicate=False)`` does."""
    layer = seeded(nn.Linear(4, 4))
    model = nn.Sequential(layer, nn.Tanh(), layer)
    expected = mean_gradients(model, of_every_rank(backend, vector_loss))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model.named_parameters(remove_duplicate=False), backend=backend)
    for _ in range(2):
        optimizer.zero_grad()
        vector_loss(model, backend.rank).backward()
        for mine, mean in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(mine, mean)
    assert len(optimizer.reducer.slots) == len(list(model.parameters()))


def test_a_parameter_with_two_names_is_reduced_once(typical):
    typical(same_parameter_twice)


# -- former names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GradientReducer, DistributedOptimizer])
def test_the_former_names_of_the_extra_scalars_work_and_warn(kind):
    backend, model = LocalBackend(World(), torch.device("cpu"), 10.0), perceptron()
    first = model.named_parameters() if kind is GradientReducer else torch.optim.SGD(model.parameters())
    with pytest.warns(DeprecationWarning, match="^carry is deprecated: use extra$") as caught:
        instance = kind(first, backend=backend, carry=2)
    with pytest.warns(DeprecationWarning, match="^cargo is deprecated: use extra$") as caught_later:
        instance.cargo[0] = 3
    assert [each.filename for each in [*caught, *caught_later]] == [__file__] * 2
    vector_loss(model, 0).backward()
    assert instance.extra.tolist() == [3.0, 0.0]
    instance.close()


def test_transfer_can_be_imported_from_its_former_place():
    with pytest.warns(DeprecationWarning, match=r"dualtrain\.buckets\.Transfer is .*use dualtrain\.gradients\.Transfer$"):
        from dualtrain.buckets import Transfer as Former
    assert Former is Transfer
    with pytest.raises(ImportError, match="lay_out"):
        from dualtrain.buckets import lay_out  # noqa: F401


class WithoutOptions(torch.optim.SGD):
    """An optimizer whose ``zero_grad`` takes no argument."""

    def zero_grad(self):
        super().zero_grad()


def test_assignments_hooks_and_zero_grad_are_forwarded_to_the_wrapped_optimizer():
    p = nn.Parameter(torch.ones(2))
    inner = WithoutOptions([p], 1.0, momentum=0.9)
    inner.scale = 1.0
    optimizer = DistributedOptimizer(inner, [("p", p)], backend=LocalBackend(World(), torch.device("cpu"), 10.0))
    p.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert p.grad is None
    optimizer.state = {}
    assert inner.state == {}
    groups = [dict(inner.param_groups[0], lr=0.5)]
    optimizer.param_groups = groups
    assert inner.param_groups is groups
    optimizer.scale = 0.5
    optimizer.defaults = defaults = dict(inner.defaults, lr=0.5)
    assert inner.scale == 0.5
    assert inner.defaults is defaults
    del optimizer.scale
    assert not hasattr(inner, "scale")
    seen = []
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("save"))
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("load"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["save", "load"]
    optimizer.__setstate__({"state": {}})
    assert inner.state == {}


@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
    reason=f"torch {torch.__version__} cannot leave functions uncompiled",
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_step_with_collectives_gives_the_result_of_a_plain_one():
    # "eager" is torch.compile without code generation.
    found = []
    for wrapper in (lambda function: function, partial(torch.compile, backend="eager")):
        with connect("local") as backend:
            model = nn.Sequential(perceptron(), nn.BatchNorm1d(3))
            synchronize_norms(model, backend)
            optimizer = sgd(model, backend)

            @wrapper
            def step(x, model=model, optimizer=optimizer, backend=backend):
                optimizer.zero_grad()
                out = model(x)
                loss = (out - functional.allreduce(out.mean(0), backend) - 1).pow(4).mean()
                loss.backward()
                optimizer.step()
                return backend.allreduce(loss.detach())

            found.append([step(vectors(key)) for key in range(3)] + list(model.parameters()))
    torch.testing.assert_close(*found, **EXACT)


@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
    reason=f"torch {torch.__version__} cannot leave functions uncompiled",
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("layer", ["functional", "norm"])
def test_backward_of_collectives_is_not_compiled(layer):
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with connect("local") as backend:
        norm = nn.Sequential(nn.BatchNorm1d(4))
        synchronize_norms(norm, backend)
        x = vectors(0).requires_grad_()
        out = norm(x) if layer == "norm" else functional.reducescatter(x, backend)
        torch.compile(out.sum().backward, backend=record)()
    assert not graphs


@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
    reason=f"torch {torch.__version__} compiles the hooks of gradients too, and then refuses queue_callback",
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_step_whose_backward_is_compiled_gives_the_result_of_a_plain_one():
    found = []
    for wrapper in (lambda function: function, partial(torch.compile, backend="eager")):
        with connect("local") as backend, importlib.import_module("torch._dynamo").config.patch(compiled_autograd=True):
            model = perceptron()
            optimizer = sgd(model, backend)

            @wrapper
            def step(x, model=model):
                (model(x) - 1).pow(2).mean().backward()

            for key in range(2):
                optimizer.zero_grad()
                step(vectors(key))
                optimizer.step()
            found.append(list(model.parameters()))
    torch.testing.assert_close(*found, **EXACT)
