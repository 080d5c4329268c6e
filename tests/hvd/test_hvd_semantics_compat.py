"""DUALTRAIN_HVD_COMPAT=1: the defects of Horovod that change numbers are reproduced, with the same bits."""

from __future__ import annotations

import os

import torch
from torch import nn

from dualtrain.hvd import compat
from tests.conftest import Spmd
from tests.hvd.worlds import OURS_2, PAIR, library


def model_of(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def trained(hvd, model, optimizer, steps=3, before_step=lambda step: None, factor=3):
    """Train, with different data on each rank; return all weights after the last step."""
    for step in range(steps):
        before_step(step)
        x = torch.linspace(-1, 1 + step + hvd.rank(), 20).view(5, 4).to(model[0].weight.dtype)
        (model(x).float().square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def fresh(hvd, kind, wrapped_first, **options):
    """Broadcast, before or after wrapping, the state of an optimizer that has taken no step.

    The ranks have different learning rates.
    """
    model = model_of()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01 * (1 + hvd.rank()), **options)
    if wrapped_first:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, 1)
    if not wrapped_first:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    return trained(hvd, model, optimizer)


def resumed(hvd):
    """Resume with optimizer state on rank 0 only, as if only that rank had read a checkpoint."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    if hvd.rank() == 0:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    optimizer.load_state_dict(optimizer.state_dict())
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    return trained(hvd, model, optimizer)


def dropped(hvd):
    """Wrap an optimizer that already has momentum buffers."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return trained(hvd, model, hvd.DistributedOptimizer(optimizer, model.named_parameters()))


def frozen(hvd, **options):
    """Freeze a layer after the first step."""
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **options)
    return trained(hvd, model, optimizer, before_step=lambda step: model[0].requires_grad_(step == 0))


def unfrozen(hvd):
    """Unfreeze a layer after the first step."""
    model = model_of()
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    return trained(hvd, model, optimizer, before_step=lambda step: model[0].requires_grad_(step > 0))


def added(hvd):
    """Add a parameter group after wrapping.

    On Horovod, the group's momentum and weight decay are SGD's defaults, which are 0.
    """
    model = model_of()
    inner = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(inner, model[2].named_parameters())
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.1})
    return trained(hvd, model, optimizer)


def narrow(hvd, scale, **options):
    """Scale the weights so that gradients are small, and send the gradients as float16, which rounds them coarsely."""
    model = model_of()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"compression": hvd.Compression.fp16, **options}
    return trained(hvd, model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options))


def half(hvd):
    """Train float16 weights with gradients whose sum overflows float16."""
    model = model_of().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return trained(hvd, model, hvd.DistributedOptimizer(optimizer, model.named_parameters()), steps=1, factor=3e5)


def sums(hvd):
    """Reduce float16 tensors by ``allreduce``, without an optimizer."""
    mine = torch.tensor([60000.0, 6e-8 * (1 + hvd.rank()), 1.0009765625 + hvd.rank(), -3e-5]).half()
    return [
        hvd.allreduce(mine, op=hvd.Average, name="a"),
        hvd.allreduce(mine, op=hvd.Sum, name="s"),
        hvd.allreduce(mine, op=hvd.Average, name="p", prescale_factor=0.5, postscale_factor=2.0),
    ]


class Factored(torch.optim.SGD):
    """An optimizer with an option that is not in its parameter groups."""

    def __init__(self, params, lr=0.5, factor=1.0):
        super().__init__(params, lr=lr)
        self.factor = factor

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad.mul_(self.factor)
        return super().step(closure)


def remade(hvd):
    """Wrap an optimizer whose attribute ``factor`` Horovod resets to its default by calling ``__init__`` again."""
    model = model_of()
    return trained(hvd, model, hvd.DistributedOptimizer(Factored(model.parameters(), factor=0.5), model.named_parameters()))


def grouped(hvd, groups, **options):
    """Divide gradients by 3 before their sum, and send them in groups."""
    model = model_of()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    options |= {"gradient_predivide_factor": 3.0, "groups": groups(model)}
    return trained(hvd, model, hvd.DistributedOptimizer(sgd, model.named_parameters(), **options))


#: Scripts that trigger defects, and the defects that must be recorded.
CASES = {
    "fresh sgd": (lambda hvd: fresh(hvd, "SGD", True, momentum=0.9, weight_decay=0.1), {compat.FRESH_STATE}),
    "fresh dampened": (lambda hvd: fresh(hvd, "SGD", True, momentum=0.9, dampening=0.5), {compat.FRESH_STATE}),
    "fresh stateless": (lambda hvd: fresh(hvd, "SGD", True), {compat.OPTIONS}),
    "fresh adam": (lambda hvd: fresh(hvd, "Adam", True), {compat.FRESH_STATE}),
    "fresh, then wrapped": (
        lambda hvd: fresh(hvd, "AdamW", False, weight_decay=0.1),
        {compat.FRESH_STATE, compat.DROPPED_STATE},
    ),
    "resumed": (resumed, {compat.FRESH_STATE, compat.DROPPED_STATE}),
    "dropped": (dropped, {compat.DROPPED_STATE}),
    "remade": (remade, {compat.REMADE}),
    "frozen": (frozen, {compat.FROZEN}),
    "frozen, min": (lambda hvd: frozen(hvd, op=hvd.Min), {compat.FROZEN}),
    "unfrozen": (unfrozen, {compat.UNREDUCED}),
    "added": (added, {compat.UNREDUCED}),
    "fp16": (lambda hvd: narrow(hvd, 1e-3), {compat.HALF}),
    "fp16, predivide": (lambda hvd: narrow(hvd, 1e-3, gradient_predivide_factor=4.0), {compat.HALF}),
    "fp16 weights": (half, {compat.HALF}),
    "groups, predivide": (lambda hvd: grouped(hvd, lambda _: 2), {compat.PREDIVIDED}),
    "fp16, groups, predivide": (
        lambda hvd: grouped(hvd, lambda model: [list(model.parameters())], compression=hvd.Compression.fp16),
        {compat.HALF, compat.PREDIVIDED},
    ),
    "sums": (sums, {compat.HALF}),
}


def defective(backend, titles, compat_mode):
    """Return, for each case in ``titles``, the resulting tensors and the recorded defects with their files."""
    results = {}
    env = {"DUALTRAIN_HVD_COMPAT": "1"} if compat_mode else {}
    with library(backend, **env) as hvd:
        for title in titles:
            compat._reproduced.clear()
            tensors = CASES[title][0](hvd)
            results[title] = tensors, [(what, os.path.basename(file)) for what, file, _ in compat.reproduced()]
    return results


#: Results in the torch world, for the comparison in the Horovod world. Key "torch": with compat mode; "plain": without it.
RESULTS = {}


@PAIR
def test_compat_mode_reproduces_horovods_defects_bit_for_bit(real, pool):
    titles = list(CASES)
    if real.name == "torch":
        RESULTS["plain"] = real(defective, titles, False)
        RESULTS["torch"] = real(defective, titles, True)
        return
    horovod = real(defective, titles, False)
    torch_world = Spmd("torch", 2, pool)
    our = RESULTS.get("torch") or torch_world(defective, titles, True)
    plain = RESULTS.get("plain") or torch_world(defective, titles, False)
    wrong = []
    for title, (_, defects) in CASES.items():
        same = [equal(horovod[rank][title][0], our[rank][title][0]) for rank in (0, 1)]
        as_without_compat = [equal(horovod[rank][title][0], plain[rank][title][0]) for rank in (0, 1)]
        recorded = {what for rank in (0, 1) for what, _ in our[rank][title][1]}
        files = {file for rank in (0, 1) for _, file in our[rank][title][1]}
        if same != [True, True] or all(as_without_compat) or recorded != defects or files != {os.path.basename(__file__)}:
            wrong.append((title, same, as_without_compat, recorded, files))
    assert not wrong, "\n".join(map(str, wrong))


def equal(one, other):
    return all(torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9)) for a, b in zip(one, other, strict=True))


#: Optimizers without weight decay. If an optimizer has no state, Horovod's broadcast_optimizer_state takes a step on zero
#: gradients. This step has no effect with RMSprop, Adadelta and SGD without dampening: the first two count steps but do not
#: use the count. Adagrad has a state from the start, so Horovod takes no step.
HARMLESS = [("SGD", {"momentum": 0.9}), ("Adagrad", {}), ("RMSprop", {"momentum": 0.9}), ("Adadelta", {})]


def harmless(backend):
    """Run a script that triggers none of the defects; return the recorded defects."""
    compat._reproduced.clear()
    with library(backend, DUALTRAIN_HVD_COMPAT="1") as hvd:
        for kind, options in HARMLESS:
            model = model_of()
            optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
            torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces optimizer.step, which must not be recorded as REMADE
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
            hvd.broadcast_optimizer_state(optimizer, 0)
            trained(hvd, model, optimizer)
    return compat.reproduced()


@OURS_2
def test_no_defect_is_recorded_for_a_script_that_triggers_none(real):
    assert real(harmless) == [[], []]


def fresh_sparse_adam_and_lbfgs(backend):
    with library(backend) as hvd:
        layer = nn.Embedding(2, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(layer.parameters())
        hvd.broadcast_optimizer_state(optimizer, 0)
        # Autograd adds this gradient to the zeros that the broadcast has left, so the zeros must be sparse.
        layer(torch.tensor([1])).sum().backward()
        optimizer.step()
        assert layer.weight.grad.is_sparse
    with library(backend, DUALTRAIN_HVD_COMPAT="1") as hvd:
        p = nn.Parameter(torch.ones(2, 2))
        optimizer = torch.optim.SparseAdam([p], lr=0.1 * (1 + hvd.rank()))
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert ([state["step"] for state in optimizer.state.values()], optimizer.param_groups[0]["lr"]) == ([1], 0.1)
        assert torch.equal(p, torch.ones(2, 2))
        if backend.name == "torch":  # Horovod refuses LBFGS
            hvd.broadcast_optimizer_state(torch.optim.LBFGS([p]), 0)
            assert torch.equal(p, torch.ones(2, 2))


@PAIR
def test_fresh_optimizers_whose_step_needs_sparse_gradients_or_a_closure_are_broadcast(real):
    real(fresh_sparse_adam_and_lbfgs)
