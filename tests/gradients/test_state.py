"""Broadcast of parameters and optimizer state, averages of buffers, and the hash of the weights."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict

import pytest
import torch
from torch import nn

from dualtrain import (
    BackendError,
    average_buffers,
    broadcast_optimizer_state,
    broadcast_parameters,
    connect,
    state,
    weights_sha256,
)
from tests.models_for_tests import EXACT, conv_net, perceptron, same_on_all, seeded, vector_loss, wrap

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]


class Normalised(nn.Module):
    """A model with running statistics, a counter, a non-persistent buffer, and a frozen parameter."""

    def __init__(self, seed=0):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("table", torch.full((3,), float(seed)))
        self.register_buffer("transient", torch.full((2,), float(seed)), persistent=False)
        seeded(self, seed)
        self.conv.bias.requires_grad_(False)

    def forward(self, x):
        return self.norm(self.conv(x))


def tensors_of(model):
    return [*model.parameters(), *model.buffers()]


def check(actual, expected, **tolerance):
    for mine, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, other, **(tolerance or EXACT))


# -- broadcast_parameters -----------------------------------------------------------------------------------------

FORMS = {
    "module": lambda model: model,
    "state_dict": lambda model: model.state_dict(),
    "unordered": lambda model: dict(reversed(model.state_dict().items())),
    "generator": lambda model: model.named_parameters(),
    "parameters": lambda model: model.parameters(),
    "list": lambda model: [p.data for p in model.parameters()],
}


def broadcasts(backend, form):
    for root in range(backend.size):
        model, expected = Normalised(seed=backend.rank), Normalised(seed=root)
        identities = [id(t) for t in tensors_of(model)]
        broadcast_parameters(FORMS[form](model), backend, root)
        check(model.parameters(), expected.parameters())
        assert [id(t) for t in tensors_of(model)] == identities
        if form in ("module", "state_dict", "unordered"):
            check([model.table, model.norm.running_mean], [expected.table, expected.norm.running_mean])
        if form == "module":
            check([model.transient], [expected.transient])
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in expected.parameters()]


def test_every_rank_gets_the_roots_values(spmd):
    spmd.each(broadcasts, [(form,) for form in FORMS], [("module",), ("generator",)])


def tensors_of_rank(rank, dtype):
    """Return tensors of ``dtype`` in several layouts, with values that depend on ``rank``."""
    numbers = (torch.arange(48) * 7 + 3 * rank + 1) % 120
    full = (numbers % 2 == rank % 2) if dtype is torch.bool else numbers.to(dtype)
    return [
        full.reshape(2, 3, 2, 4),
        full.clone().reshape(6, 8).t(),
        full.clone().reshape(6, 8)[::2, 1::3],
        full.clone().reshape(2, 3, 2, 4).permute(0, 3, 1, 2),
        full.clone()[5],
        full.clone()[:0],
        full.clone()[1:2],
    ]


def broadcasts_layouts(backend, dtype):
    root = backend.size - 1
    tensors = tensors_of_rank(backend.rank, dtype)
    strides = [t.stride() for t in tensors]
    broadcast_parameters(tensors, backend, root)
    expected = tensors_of_rank(root, dtype)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(tensors, expected, strict=True))
    assert [t.stride() for t in tensors] == strides


def bits(tensor):
    return tensor.contiguous().flatten().clone().view(torch.uint8)


def test_tensors_of_every_dtype_and_layout_are_broadcast(typical):
    typical.each(broadcasts_layouts, [(dtype,) for dtype in DTYPES], [(torch.bool,), (torch.float32,)])


def mixed_layouts(backend):
    """Broadcast tensors in layouts that differ between ranks.

    The tensors are sent in the order of their names. ``flag`` has one byte, so ``weight`` begins at an odd offset of the
    packed message.
    """
    layout = torch.channels_last if backend.rank % 2 else torch.contiguous_format
    tensors = OrderedDict(
        flag=torch.tensor([backend.rank == 0]),
        weight=torch.full((2, 3, 4, 5), float(backend.rank)).to(memory_format=layout),
        count=torch.tensor(backend.rank),
        note="not a tensor",
    )
    broadcast_parameters(tensors, backend)
    assert tensors["flag"].item() is True
    assert not tensors["weight"].any()
    assert tensors["weight"].is_contiguous(memory_format=layout)
    assert tensors["count"].item() == 0


def test_a_broadcast_accepts_different_memory_layouts_on_ranks(typical):
    typical(mixed_layouts)


def test_broadcast_parameters_refuses_nested_containers_and_values_without_tensors():
    model = nn.Linear(2, 2)
    saved = torch.optim.SGD(model.parameters(), 0.1).state_dict()
    with connect("local") as backend:
        for wrong in ({"model": model.state_dict(), "weight": model.weight}, saved, {"epoch": 3}, [[model.weight]]):
            with pytest.raises(ValueError, match=r"pass a flat state_dict"):
                broadcast_parameters(wrong, backend)


def named_alike(backend):
    """Broadcast tensors whose names end in ``_extra_state``, like the key of a module's extra state."""
    tensors = {
        "rnn_extra_state": torch.full((2,), float(backend.rank)),
        "lstm._extra_state": torch.full((1,), float(backend.rank)),
    }
    broadcast_parameters(tensors, backend)
    assert not any(t.any() for t in tensors.values())


def test_a_broadcast_includes_tensors_whose_names_contain_extra_state(typical):
    typical(named_alike)


class LoadsInPlace(torch.optim.SGD):
    """An optimizer that changes its groups in place when it loads a state, as some custom ones do."""

    def load_state_dict(self, state):
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})


def test_an_optimizer_may_load_its_state_in_place():
    model = nn.Linear(2, 2)
    optimizer = LoadsInPlace(model.parameters(), lr=0.1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    state.load_optimizer_state(optimizer, saved)
    assert len(optimizer.param_groups[0]["params"]) == 2
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_loaded_state_gets_the_strides_of_its_parameter():
    """A fused step reads the memory of a parameter and of its state in the same order, and does not look at strides."""
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    models = [model, copy.deepcopy(model)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, fused=True) for each in models]
    gradients = [torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) for p in model.parameters()]

    def step(model, optimizer):
        for p, grad in zip(model.parameters(), gradients, strict=True):
            p.grad = torch.empty_like(p).copy_(grad)
        optimizer.step()

    step(models[0], optimizers[0])
    models[1].load_state_dict(models[0].state_dict())
    saved = optimizers[0].state_dict()
    contiguous = {
        number: {name: value.clone(memory_format=torch.contiguous_format) for name, value in entries.items()}
        for number, entries in saved["state"].items()
    }  # as a file holds it
    state.load_optimizer_state(optimizers[1], {**saved, "state": contiguous})
    for each in zip(models, optimizers, strict=True):
        step(*each)
    assert optimizers[1].state[models[1].weight]["exp_avg"].stride() == models[1].weight.stride()
    assert torch.equal(models[0].weight, models[1].weight)


class FlatSum(torch.optim.Optimizer):
    """Descends along the sum of all gradients; its state consists of contiguous views of one buffer."""

    def __init__(self, params):
        super().__init__(params, {})
        params = self.param_groups[0]["params"]
        self.buffer = torch.zeros(sum(p.numel() for p in params))
        for p, part in zip(params, self.buffer.split([p.numel() for p in params]), strict=True):
            self.state[p]["sum"] = part.view(p.shape)

    def load_state_dict(self, state_dict):
        for p, entries in zip(self.param_groups[0]["params"], state_dict["state"].values(), strict=True):
            self.state[p]["sum"].copy_(entries["sum"])


def test_state_in_views_of_a_buffer_stays_there():
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer = FlatSum(model.parameters())
    saved = copy.deepcopy(optimizer.state_dict())
    state.load_optimizer_state(optimizer, saved)
    optimizer.buffer.fill_(1)
    assert all(entries["sum"].eq(1).all() for entries in optimizer.state.values())


def single_elements(backend):
    tensors = [torch.full((4,), float(backend.rank))[::4]]
    broadcast_parameters(tensors, backend)
    assert tensors[0].item() == 0


def test_a_single_element_with_a_stride_is_broadcast(typical):
    typical(single_elements)


def made_in_inference_mode(backend):
    with torch.inference_mode():
        model = Normalised(seed=backend.rank)
    expected = Normalised(seed=0)
    broadcast_parameters(model, backend)
    check(tensors_of(model), tensors_of(expected))
    with torch.inference_mode():
        model.table.fill_(backend.rank)
    mean = [(backend.size - 1) / 2] * 3
    with state.averaged_buffers(model, backend, trained=True):
        assert model.table.tolist() == mean
    assert model.table.tolist() == [backend.rank] * 3
    average_buffers(model, backend)
    assert model.table.tolist() == mean


def test_buffers_are_restored_if_the_second_average_fails(monkeypatch):
    monkeypatch.setattr(state, "_CHUNK_BYTES", 1)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    changed = []

    def change_once(packed, *args, **options):
        if changed:
            raise BackendError("no answer")
        changed.append(packed.add_(1))
        return packed

    with connect("local") as backend:
        monkeypatch.setattr(backend, "allreduce_", change_once)
        with pytest.raises(BackendError, match="no answer"), state.averaged_buffers(model, backend, trained=True):
            pass
    assert len(changed) == 1
    assert weights_sha256(model) == weights_sha256(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)))


def test_a_model_that_was_made_in_inference_mode_is_broadcast_averaged_and_restored(typical):
    typical(made_in_inference_mode)


def broadcasts_nothing(backend):
    broadcast_parameters([], backend)
    broadcast_parameters({}, backend)
    broadcast_parameters(nn.ReLU(), backend)
    broadcast_parameters([torch.empty(0), torch.empty(3, 0)], backend)
    average_buffers(nn.ReLU(), backend)
    average_buffers(perceptron(), backend)


def test_a_broadcast_or_average_of_no_tensors_is_allowed(typical):
    typical(broadcasts_nothing)


def in_chunks(backend):
    """Broadcast tensors of 4 to 400 bytes. If a chunk has 100 bytes, some tensors are larger, and two share one."""
    tensors = [torch.full((n,), backend.rank + i, dtype=torch.float32) for i, n in enumerate((3, 100, 1, 20, 20, 50))]
    broadcast_parameters(tensors, backend, backend.size - 1)
    check(tensors, [torch.full_like(t, backend.size - 1 + i) for i, t in enumerate(tensors)])


def test_many_tensors_are_sent_in_chunks(typical, monkeypatch):
    # Only the ranks of this process (local, threads) use small chunks. The pool's processes send a single chunk.
    monkeypatch.setattr(state, "_CHUNK_BYTES", 100)
    typical(in_chunks)


def mismatches(backend):
    last = backend.rank == backend.size - 1
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5 if last else 4))
    with pytest.raises(BackendError, match=r"parameters: 1\.bias \(torch\.float32, \(4,\)\) on rank 0 and 1\.bias .*5"):
        broadcast_parameters(model, backend)
    with pytest.raises(BackendError, match=r"rank 0 has 1, rank \d has 2"):
        broadcast_parameters([torch.ones(1)] * (1 + last), backend)
    with pytest.raises(BackendError, match=r"parameters: a .* on rank 0 and b "):
        broadcast_parameters({"b" if last else "a": torch.ones(1)}, backend)
    with pytest.raises(BackendError, match=r"float32.* on rank 0 and 0 \(torch\.float64"):
        broadcast_parameters([torch.ones(1, dtype=torch.float64 if last else torch.float32)], backend)
    kept = torch.full((2,), float(backend.rank))
    broadcast_parameters([kept], backend)
    assert not kept.any()


def test_a_mismatch_is_reported_by_name_on_every_rank(many):
    many(mismatches)


def expanded(backend, ranks):
    model = nn.Module()
    mask = torch.zeros(1, 2).expand(3, 2)
    model.register_buffer("mask", mask if backend.rank in ranks else mask.clone())
    if backend.size == 1:
        broadcast_parameters(model, backend)
        return
    same = len(ranks) == backend.size
    said = (
        "'mask' cannot be broadcast: elements of this" if same else "parameters: mask .* and mask .*, whose elements share"
    )
    with pytest.raises(ValueError if same else BackendError, match=said):
        broadcast_parameters(model, backend)
    assert backend.allreduce(torch.ones(1), "sum").item() == backend.size


def test_a_tensor_whose_elements_share_memory_is_refused_by_name_on_every_rank(spmd):
    spmd(expanded, list(range(spmd.size)))
    spmd(expanded, [spmd.size - 1])


def no_such_root(backend):
    for root in (-1, backend.size):
        for call in (
            lambda root: broadcast_parameters(perceptron(), backend, root),
            lambda root: broadcast_optimizer_state(torch.optim.SGD(perceptron().parameters(), lr=0.1), backend, root),
        ):
            with pytest.raises(ValueError, match=f"root {root} is not a rank"):
                call(root)


def test_a_root_that_is_not_a_rank_is_refused(typical):
    typical(no_such_root)


# -- broadcast_optimizer_state ------------------------------------------------------------------------------------

KINDS = {
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.1),
    "adam": lambda params, lr: torch.optim.Adam(params, lr=lr),
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=0.1),
    "lbfgs": lambda params, lr: torch.optim.LBFGS(params, lr=lr, max_iter=4),
}


def wrapped_or_bare(kind, model, lr, backend, wrapped):
    inner = KINDS[kind](model.parameters(), lr)
    return wrap(inner, model, backend) if wrapped else inner


def local_step(model, optimizer, key=0):
    inner = getattr(optimizer, "optimizer", optimizer)

    def closure():
        inner.zero_grad()
        loss = vector_loss(model, key)
        loss.backward()
        return loss

    inner.step(closure)


def fresh(backend, kind, wrapped):
    for root in range(backend.size):
        model = perceptron(seed=backend.rank)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = wrapped_or_bare(kind, model, 0.1 * (1 + backend.rank), backend, wrapped)
        params = optimizer.param_groups[0]["params"]
        model[0].weight.grad = torch.ones_like(model[0].weight)
        broadcast_optimizer_state(optimizer, backend, root)
        check(model.parameters(), before)
        assert not optimizer.state_dict()["state"]
        assert optimizer.param_groups[0]["lr"] == 0.1 * (1 + root)
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))
        assert bool((model[0].weight.grad == 1).all())
        assert model[0].bias.grad is None


def test_a_broadcast_to_a_fresh_optimizer_changes_only_its_options(typical):
    typical.each(fresh, itertools.product(KINDS, [False, True]), [("momentum", False), ("adam", True)])


def resumes(backend, kind, wrapped, all_have_state):
    """Broadcast the root's state.

    The other ranks have no state, as is usual when a run resumes. With ``all_have_state``, they have a different state.
    """
    root = backend.size - 1
    model, oracle = perceptron(), perceptron()
    if backend.rank == root or all_have_state:
        optimizer = wrapped_or_bare(kind, model, 0.01 * (1 + backend.rank), backend, False)
        for step in range(2 + (backend.rank == root)):
            local_step(model, optimizer, key=step + 10 * backend.rank)
    else:
        optimizer = wrapped_or_bare(kind, model, 0.5, backend, False)
    reference = wrapped_or_bare(kind, oracle, 0.01 * (1 + root), backend, False)
    for step in range(3):
        local_step(oracle, reference, key=step + 10 * root)
    if wrapped:
        optimizer = wrap(optimizer, model, backend)
    broadcast_parameters(model, backend, root)
    broadcast_optimizer_state(optimizer, backend, root)
    check(model.parameters(), oracle.parameters())
    found, expected = optimizer.state_dict(), reference.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    torch.testing.assert_close(found["state"], expected["state"], **EXACT)
    local_step(model, optimizer, key=99)
    local_step(oracle, reference, key=99)
    check(model.parameters(), oracle.parameters(), rtol=1e-5, atol=1e-6)
    assert same_on_all(backend, list(model.parameters()))


def test_ranks_with_and_without_a_state_get_the_roots_state(typical):
    typical.each(
        resumes, itertools.product(KINDS, [False, True], [False, True]), [("adam", True, False), ("lbfgs", False, True)]
    )


def step_counts(backend):
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(3 if backend.rank == 0 else 0):
        local_step(model, optimizer, key=step)
    broadcast_optimizer_state(optimizer, backend)
    assert [state["step"].item() for state in optimizer.state.values()] == [3] * len(list(model.parameters()))
    assert {state["exp_avg"].shape for state in optimizer.state.values()} == {p.shape for p in model.parameters()}


def test_every_rank_gets_the_roots_step_count_of_adam(spmd):
    spmd(step_counts)


def keeps_dtypes(backend):
    """Broadcast float32 averages of a bfloat16 parameter, as some optimizers have, and a list, as LBFGS has."""
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([p], lr=0.1)
    exact = torch.tensor([1 + 2**-20, 1.0])
    if backend.rank == 0:
        optimizer.state[p] = {"average": exact, "steps": [exact.double(), 1], "like": torch.ones(2, dtype=torch.bfloat16)}
    broadcast_optimizer_state(optimizer, backend)
    state = optimizer.state[p]
    assert torch.equal(state["average"], exact)
    assert torch.equal(state["steps"][0], exact.double())
    assert state["steps"][1] == 1
    assert state["like"].dtype == torch.bfloat16


def test_a_state_keeps_its_dtypes(typical):
    typical(keeps_dtypes)


def several_groups(backend):
    model = perceptron()
    lr = 0.1 * (1 + backend.rank)
    groups = [
        {"params": list(model[0].parameters()), "lr": lr},
        {"params": list(model[2].parameters()), "lr": torch.tensor(lr)},
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.5 + 0.1 * backend.rank, 0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    broadcast_optimizer_state(optimizer, backend)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert isinstance(optimizer.param_groups[1]["lr"], torch.Tensor)
    assert optimizer.param_groups[1]["lr"].item() == pytest.approx(0.1)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.5, 0.9)] * 2
    assert optimizer.param_groups[0]["initial_lr"] == 0.1
    local_step(model, optimizer)
    scheduler.step()


def test_options_of_every_group_are_broadcast(typical):
    typical(several_groups)


def unsendable(backend):
    optimizer = torch.optim.SGD(perceptron().parameters(), lr=0.1)
    optimizer.param_groups[0]["thing"] = object()
    expected = (TypeError, "cannot be sent") if backend.rank == 0 else (BackendError, "rank 0 could not send")
    with pytest.raises(expected[0], match=expected[1]):
        broadcast_optimizer_state(optimizer, backend)
    assert backend.allreduce(torch.ones(1), "sum").item() == backend.size


def test_options_that_cannot_be_sent_are_refused_on_all_ranks(typical):
    typical(unsendable)


# -- buffers ------------------------------------------------------------------------------------------------------


def averages_buffers(backend):
    model = Normalised().to(memory_format=torch.channels_last)
    inputs = [torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(rank)) for rank in range(backend.size)]
    replicas = [copy.deepcopy(model) for _ in inputs]
    for replica, x in zip(replicas, inputs, strict=True):
        replica(x)
    model(inputs[backend.rank])
    weights = [p.detach().clone() for p in model.parameters()]
    model.table.fill_(backend.rank)
    average_buffers(model, backend)
    for name in ("running_mean", "running_var"):
        expected = torch.stack([getattr(replica.norm, name) for replica in replicas]).double().mean(0).float()
        torch.testing.assert_close(getattr(model.norm, name), expected)
    assert model.norm.num_batches_tracked.item() == 1
    assert model.table.tolist() == [(backend.size - 1) / 2] * 3
    check(model.parameters(), weights)
    assert same_on_all(backend, list(model.buffers()))
    before = weights_sha256(model)
    average_buffers(model, backend)  # averaging equal numbers changes no bit
    assert weights_sha256(model) == before


def test_average_buffers_averages_running_statistics_over_ranks(spmd):
    spmd(averages_buffers)


def buffers(**values):
    model = nn.Module()
    for name, value in values.items():
        model.register_buffer(name, value)
    return model


def averages_in_another_order(backend):
    values = {"a": torch.full((2,), float(backend.rank)), "b": torch.full((2,), 10.0)}
    model = buffers(**(values if backend.rank == 0 else dict(reversed(values.items()))))
    average_buffers(model, backend)
    assert model.a.tolist() == [(backend.size - 1) / 2] * 2
    assert model.b.tolist() == [10.0] * 2


def refuses_other_buffers(backend, kind, words):
    first, other = {
        "shape": (buffers(a=torch.ones(2, 3)), buffers(a=torch.ones(3, 2))),
        "name": (buffers(a=torch.ones(2)), buffers(b=torch.ones(2))),
        "number": (buffers(a=torch.ones(2)), buffers()),
    }[kind]
    with pytest.raises(BackendError, match=words):
        average_buffers(other if backend.rank else first, backend)


def test_buffers_are_averaged_by_name_and_refused_if_names_or_shapes_differ(many):
    many(averages_in_another_order)
    cases = [
        ("shape", r"a \(2, 3\) on rank 0 and a \(3, 2\) on rank 1"),
        ("name", r"a \(2,\) on rank 0 and b \(2,\) on rank 1"),
        ("number", r"rank 0 has 1, rank 1 has 0, and only one of them has a \(2,\)"),
    ]
    many.each(refuses_other_buffers, cases)


# -- the hash -----------------------------------------------------------------------------------------------------


def test_the_hash_depends_on_every_tensor_and_on_the_sign_of_zero():
    model = Normalised()
    reference = weights_sha256(model)
    assert weights_sha256(copy.deepcopy(model)) == reference
    for name, tensor in model.state_dict().items():
        flat = tensor.reshape(-1).view(torch.uint8)
        flat[-1] ^= 1
        assert weights_sha256(model) != reference, name
        flat[-1] ^= 1
    assert weights_sha256(model) == reference
    model.conv.weight.data.flatten()[0] = 0.0
    zero = weights_sha256(model)
    model.conv.weight.data.flatten()[0] = -0.0
    assert weights_sha256(model) != zero


def test_the_hash_does_not_depend_on_registration_order_layout_or_mode():
    one, other = nn.Module(), nn.Module()
    for name in ("first", "second"):
        one.register_parameter(name, nn.Parameter(torch.full((2,), float(len(name)))))
    for name in ("second", "first"):
        other.register_parameter(name, nn.Parameter(torch.full((2,), float(len(name)))))
    assert weights_sha256(one) == weights_sha256(other)
    model = conv_net()
    before = weights_sha256(model)
    assert weights_sha256(model.to(memory_format=torch.channels_last)) == before
    assert weights_sha256(model.train(False).requires_grad_(False)) == before


def test_the_hash_depends_on_names_shapes_and_dtypes():
    def one(name, tensor):
        module = nn.Module()
        module.register_buffer(name, tensor)
        return weights_sha256(module)

    tensors = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(2, dtype=torch.float64), torch.zeros(4, dtype=torch.int32)]
    assert len({one(name, tensor) for name in ("a", "b") for tensor in tensors}) == 2 * len(tensors)


def test_the_hash_ignores_entries_that_are_not_tensors():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"version": 2}

        def set_extra_state(self, state):
            pass

    plain = seeded(nn.Linear(2, 2))
    extra = seeded(Extra(2, 2))
    assert weights_sha256(extra) == weights_sha256(plain)


def test_a_hash_of_a_dtensor_is_refused():
    class DTensor(torch.Tensor):
        pass

    with pytest.raises(ValueError, match=r"'shard' is a DTensor, .*: pass its full_tensor"):
        weights_sha256({"shard": torch.zeros(2).as_subclass(DTensor)})
