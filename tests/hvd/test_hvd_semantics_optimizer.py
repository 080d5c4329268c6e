"""dualtrain/hvd/README.md#distributedoptimizer: training as with Horovod's optimizer, with every option."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.conftest import Spmd
from tests.hvd.worlds import OURS_2, OURS_3, PAIR, library

STEPS = 3  # the third step has half the learning rate


class Net(nn.Module):
    """Layers that are always used, and three parameters: ``sometimes`` (used if ``with_all``), ``never``, ``frozen``."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(6, 19, sparse=sparse)  # 19: whole SIMD vectors, and a remainder
        self.first = nn.Linear(19, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)
        self.sometimes = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x, with_all):
        out = self.last(torch.relu(self.norm(self.first(self.embedding(x)))))
        return out + self.sometimes.sum() if with_all else out


class Halved:
    """A compressor that the user wrote."""

    @staticmethod
    def compress(tensor):
        return tensor / 2, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx) * 2


def optimizer_of(hvd, model, kind, sparse, **options):
    named = list(model.named_parameters())
    if kind == "sgd":
        inner = torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.0 if sparse else 0.9, weight_decay=0.0)
    elif kind == "decay":
        inner = torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9, weight_decay=0.1)
    else:
        inner = torch.optim.AdamW([p for _, p in named], lr=0.01, weight_decay=0.1)
    options = {name: getattr(hvd, value) if name == "op" else value for name, value in options.items()}
    if "compression" in options:
        choice = options["compression"]
        options["compression"] = Halved if choice == "own" else getattr(hvd.Compression, choice)
    if options.get("groups") == "lists":
        options["groups"] = [list(model.first.parameters()), list(model.last.parameters())]
    return hvd.DistributedOptimizer(inner, named_parameters=named, **options)


#: Options, and the allowed difference between dualtrain's and Horovod's weights (0: the same bits).
CASES = {
    "average": ({}, 0),
    "weight decay of unused parameters": ({"kind": "decay"}, 0),
    "adamw": ({"kind": "adamw"}, 0),
    "sum": ({"op": "Sum"}, 0),
    "min": ({"op": "Min"}, 0),
    "two passes": ({"backward_passes_per_step": 2}, 0),
    "predivide": ({"gradient_predivide_factor": 2.0}, 0),
    "groups": ({"groups": 2}, 0),
    "groups as lists": ({"groups": "lists"}, 0),
    "fp16": ({"compression": "fp16"}, 1e-3),
    "compressor": ({"compression": "own"}, 0),
    "compressor, predivided": ({"compression": "own", "gradient_predivide_factor": 3.0}, 0),
    "sparse as dense": ({"sparse": True, "sparse_as_dense": True}, 0),
    "sparse": ({"sparse": True}, 0),
    "sparse, predivided by the size": ({"sparse": True, "gradient_predivide_factor": 2.0}, 0),
    "sparse, two passes": ({"sparse": True, "backward_passes_per_step": 2}, 0),
}


def train(backend, cases):
    """Return the weights after a few steps with each set of options.

    Horovod hangs if only some ranks use a parameter of a group. So with groups, all ranks use the parameter ``sometimes``.
    """
    with library(backend) as hvd:
        me, found = hvd.rank(), {}
        for title, options in cases.items():
            options = dict(options)
            kind, sparse = options.pop("kind", "sgd"), options.pop("sparse", False)
            model = Net(sparse)
            if sparse:
                model.never.requires_grad_(False)
            hvd.broadcast_parameters(model.state_dict(), 0)
            optimizer = optimizer_of(hvd, model, kind, sparse, **options)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            for step in range(STEPS):
                for micro in range(options.get("backward_passes_per_step", 1)):
                    rows = 3 if sparse else 6  # few rows, so that a sparse gradient contains a row twice
                    x = torch.tensor([(step + me + micro + i) % rows for i in range(4)])
                    (
                        model(x, me == 0 or "groups" in options).square().mean() + x.float().mean() * model.last.bias.sum()
                    ).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found[title] = {name: p.detach().clone() for name, p in model.named_parameters()}
            assert list(model.state_dict()) == list(Net(sparse).state_dict())  # no prefix such as DDP's "module."
        return found


RESULTS = {}


@PAIR
def test_training_ends_with_the_same_weights_as_with_horovod(real, pool):
    cases = {title: options for title, (options, _) in CASES.items()}
    RESULTS[real.name] = found = real(train, cases)
    for title in CASES:
        for name, p in found[0][title].items():
            torch.testing.assert_close(found[1][title][name], p, rtol=0, atol=0)  # all ranks have the same weights
    if real.name == "horovod":
        our = RESULTS.get("torch") or Spmd("torch", 2, pool)(train, cases)
        for title, (_, near) in CASES.items():
            for name, p in found[0][title].items():
                torch.testing.assert_close(our[0][title][name], p, rtol=0, atol=near, msg=lambda m, t=title: f"{t}: {m}")


@OURS_3
def test_every_option_gives_all_three_ranks_the_same_weights(real):
    cases = {title: options for title, (options, _) in CASES.items()}
    cases |= {"bf16": {"compression": "bf16"}, "num_groups": {"groups": 3}, "product": {"op": "Product"}}
    cases |= {"adasum": {"op": "Adasum"}, "fp16 sum": {"compression": "fp16", "op": "Sum"}}
    cases |= {"fp16, predivide": {"compression": "fp16", "gradient_predivide_factor": 3.0}}
    cases |= {"min, compressed": {"compression": "fp16", "op": "Min"}}
    cases |= {"own, two passes": {"compression": "own", "backward_passes_per_step": 2}}
    found = real(train, cases)
    for title, weights in found[0].items():
        for name, p in weights.items():
            assert torch.equal(found[1][title][name], p), (title, name)
            assert torch.equal(found[2][title][name], p), (title, name)
            assert p.isfinite().all()
    for like, titles in [
        ("average", ("predivide", "fp16", "compressor", "bf16", "fp16, predivide")),
        ("groups", ("groups as lists", "num_groups")),
    ]:
        for title in titles:
            for name, p in found[0][title].items():
                torch.testing.assert_close(p, found[0][like][name], rtol=0, atol=2e-2 if title == "bf16" else 2e-3)


def adversaries(backend):
    """Train two networks alternately: in each step, one of them is frozen and gets no gradients."""
    with library(backend) as hvd:
        me = hvd.rank()
        torch.manual_seed(0)
        models = nn.Linear(3, 3), nn.Linear(3, 1)
        optimizers = []
        for i, model in enumerate(models):
            named = [(f"{i}.{name}", p) for name, p in model.named_parameters()]
            optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), named))
        weights = []
        for step in range(4):
            turn = step % 2
            for i, model in enumerate(models):
                for p in model.parameters():
                    p.requires_grad_(i == turn)
            x = torch.full((2, 3), me + 1.0 + step)
            models[1](models[0](x)).mean().backward()
            optimizers[turn].step()
            optimizers[turn].zero_grad()
            weights.append([p.detach().clone() for model in models for p in model.parameters()])
        return weights


@PAIR
def test_requires_grad_may_change_in_each_step(real, pool):
    RESULTS["gan", real.name] = found = real(adversaries)
    for mine, others in zip(*found, strict=True):
        assert all(map(torch.equal, mine, others))
    if real.name == "horovod":
        our = RESULTS.get(("gan", "torch")) or Spmd("torch", 2, pool)(adversaries)
        for mine, theirs in zip(our[0], found[0], strict=True):
            for p, q in zip(mine, theirs, strict=True):
                torch.testing.assert_close(p, q, rtol=0, atol=0)


def frozen_later(backend):
    """Freeze a parameter after a step, under momentum and weight decay; return its weight after each step."""
    with library(backend) as hvd:
        frozen, trained = (nn.Parameter(torch.ones(1)) for _ in range(2))
        inner = torch.optim.SGD([frozen, trained], 0.1, momentum=0.5, weight_decay=0.5)
        optimizer = hvd.DistributedOptimizer(inner, [("frozen", frozen), ("trained", trained)])
        weights = []
        for step in range(3):
            frozen.requires_grad_(step == 0)
            (frozen * 2 + trained).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            weights.append(frozen.item())
        return weights


@PAIR
def test_a_parameter_that_is_frozen_later_changes_only_with_horovod(real):
    first, second = real(frozen_later)
    assert first == second
    if real.name == "torch":
        assert first == [0.75, 0.75, 0.75]
    else:  # Horovod gives the frozen parameter a gradient of zeros, so momentum and weight decay change it
        assert first == pytest.approx([0.75, 0.5875, 0.476875], abs=1e-6)


def recognized(backend):
    """Return the results of checks by which programs recognize a wrapped optimizer or an elastic sampler."""
    with library(backend) as hvd:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
        return {
            "class": isinstance(optimizer, hvd.optimizer._DistributedOptimizer),
            "Adasum": isinstance(optimizer, hvd.optimizer._DistributedAdasumOptimizer),
            "base": isinstance(optimizer, torch.optim.SGD),
            "text": "horovod" in str(type(optimizer)),
            "module": type(optimizer).__module__ == hvd.DistributedOptimizer.__module__,
            "name": type(optimizer).__name__,
            "sampler": hvd.elastic.ElasticSampler(range(4)).processed_indices,
        }


@PAIR
def test_checks_that_recognize_hvd_objects_have_the_same_results_as_with_horovod(real):
    expected = {
        "class": False,
        "Adasum": False,
        "base": True,
        "text": True,
        "module": True,
        "name": "SGD",
        "sampler": set(),
    }
    assert real(recognized) == [expected] * real.size


def wrapped_anew(backend):
    """Continue training with two new optimizers, then an Adasum optimizer, while the first one still exists."""
    with library(backend) as hvd:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        old, other = (hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, nn.Linear(2, 2)))
        for _ in range(2):
            new = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(2):
                new.zero_grad()
                model(torch.full((1, 2), 1.0 + hvd.rank())).sum().backward()
                new.step()
        with pytest.raises(RuntimeError, match="closed"):
            old.step()
        other.step()  # not closed: its model is a different one, with parameters of the same names and shapes
        adasum = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), op=hvd.Adasum)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            adasum.step()
        return model.weight.tolist()


@OURS_2
def test_a_second_optimizer_of_the_same_parameters_replaces_the_first(real):
    first, second = real(wrapped_anew)
    assert first == second
    torch.manual_seed(0)
    assert torch.tensor(first).allclose(nn.Linear(2, 2).weight - 4 * 0.1 * 1.5)


def backward(model, ranks, step):
    """Run backward for the mean loss over the samples of ``ranks``: each rank has one sample in each step."""
    model(torch.tensor([[1.0 + rank, 0.1 * step] for rank in ranks])).square().sum(1).mean().backward()


def trained_in_two_phases(wrap, ranks, change):
    """Train the last layer and unfreeze the first, or train both and replace the first. Then train with a new optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(change != "unfreeze")
    kept = []
    for _ in range(2):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        kept.append(wrap(torch.optim.SGD([p for _, p in named], lr=0.1), named))
        for step in range(3):
            kept[-1].zero_grad(set_to_none=False)
            backward(model, ranks, step)
            kept[-1].step()
        if change == "replace":
            model[0] = nn.Linear(2, 2)
        model[0].requires_grad_()
    return model[1].weight, kept[0]


def wrapped_with_more(backend, change, with_names):
    with library(backend, HOROVOD_FUSION_THRESHOLD="4") as hvd:
        wrap = lambda sgd, params: hvd.DistributedOptimizer(sgd, params if with_names else None)  # noqa: E731
        weight, old = trained_in_two_phases(wrap, [hvd.rank()], change)
        with pytest.raises(RuntimeError, match="replaced by a new optimizer of some of its parameters"):
            old.step()
        return weight.tolist()


@pytest.mark.parametrize("with_names", [True, False])
@pytest.mark.parametrize("change", ["unfreeze", "replace"])
@OURS_2
def test_a_second_optimizer_may_have_parameters_that_the_first_does_not_have(real, change, with_names):
    found = real(wrapped_with_more, change, with_names)
    expected, _ = trained_in_two_phases(lambda sgd, _: sgd, range(real.size), change)
    assert torch.allclose(torch.tensor(found), expected.detach().expand(real.size, 2, 2))


def trained_then_unfrozen(wrap, ranks):
    """Train all layers. With a new optimizer, train a new last layer while the first layer is frozen, then both layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    kept = []
    for phase in range(3):
        if phase == 1:
            model[1] = nn.Linear(2, 2)
        model[0].requires_grad_(phase != 1)
        if phase < 2:
            kept.append(wrap(torch.optim.SGD(model.parameters(), lr=0.1), list(model.named_parameters())))
        for step in range(3):
            kept[-1].zero_grad()
            backward(model, ranks, step)
            kept[-1].step()
    return [p.tolist() for p in model.parameters()]


def trained_on_ranks(backend, train):
    with library(backend) as hvd:
        return train(hvd.DistributedOptimizer, [hvd.rank()])


def check_against_one_process(real, train):
    expected = [torch.tensor(values) for values in train(lambda sgd, _: sgd, range(real.size))]
    for found in real(trained_on_ranks, train):
        assert all(map(torch.allclose, map(torch.tensor, found), expected))


@OURS_2
def test_a_second_optimizer_may_step_parameters_of_the_first_after_they_are_unfrozen(real):
    check_against_one_process(real, trained_then_unfrozen)


def trained_in_turns(wrap, ranks):
    """Train two layers in turns: the last one with an optimizer of its own, the first one with an optimizer of both."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = []
    for layer, trained in ((1, model[1]), (0, model)):
        model.requires_grad_(False)[layer].requires_grad_()
        names = {id(p): name for name, p in model.named_parameters()}
        parameters = list(trained.parameters())
        optimizers.append(wrap(torch.optim.SGD(parameters, lr=0.1), [(names[id(p)], p) for p in parameters]))
    for step in range(4):
        model.requires_grad_(False)[1 - step % 2].requires_grad_()
        optimizers[step % 2].zero_grad()
        backward(model, ranks, step)
        optimizers[step % 2].step()
    return [p.tolist() for p in model.parameters()]


@PAIR
def test_optimizers_may_share_parameters_that_are_frozen_when_the_newer_optimizer_steps(real):
    check_against_one_process(real, trained_in_turns)


def scaled(backend, overflow):
    """Scale the loss as Horovod documents for mixed precision. In step 1, rank ``overflow`` has an infinite gradient."""
    with library(backend) as hvd:
        p = nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], 1.0), [("p", p)])
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scales = []
        for step in range(3):
            factor = float("inf") if step == 1 and hvd.rank() == overflow else hvd.rank() + 1.0
            scaler.scale((p * factor).sum()).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([p], 1.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return p.tolist(), scales


@PAIR
def test_loss_scaling_works_as_documented_by_horovod(real):
    results = real(scaled, 1)
    step = 2 * 0.5**0.5
    for weights, scales in results:
        assert weights == pytest.approx([1 - step] * 2, abs=1e-5)
        assert scales == [4.0, 2.0, 2.0]


def kept_gradients(backend):
    """Keep a view of each step's gradient, and the gradient itself."""
    with library(backend) as hvd:
        p = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], 0.1), [("p", p)])
        steps = []
        for factor in (1.0, 2.0, 3.0):
            p.grad = None
            (factor * p.sum()).backward()
            optimizer.step()
            steps.append((p.grad.view(-1), p.grad.clone(), p.grad))
        for each, factor in zip(steps, (1.0, 2.0, 3.0), strict=True):
            assert [tensor.tolist() for tensor in each] == [[factor, factor]] * 3


@PAIR
def test_views_of_an_earlier_gradient_keep_their_values(real):
    real(kept_gradients)
