"""State that a ``Trainer`` keeps over epochs, evaluations and resumes: modes, epochs, buffers, optimizer, averages."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from dualtrain import Trainer, UserError, connect
from dualtrain.batchnorm import synchronize_norms
from dualtrain.data.memory import TensorSource
from dualtrain.data.sources import Task
from dualtrain.errors import BackendError, RanksDifferError
from dualtrain.training.assemble import try_out
from tests.threads import run_threads


def batch(seed: int = 0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=draw).to(dtype), torch.randint(0, 3, (6,), generator=draw)


def net(dtype=torch.float32) -> nn.Module:
    model = nn.Linear(4, 3, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 12).view(3, 4))
        model.bias.zero_()
    return model


class Recorded(RandomSampler):
    """A sampler that records the arguments of ``set_epoch``."""

    def __init__(self, data, seen):
        super().__init__(data)
        self.seen = seen

    def set_epoch(self, epoch):
        self.seen.append(epoch)


class RecordedBatches(BatchSampler):
    """A batch sampler that records the arguments of ``set_epoch``."""

    def set_epoch(self, epoch):
        self.sampler.seen.append(f"batches {epoch}")


def test_epochs_are_counted_over_all_calls_of_fit_and_a_resume(tmp_path):
    seen: list[object] = []
    data = TensorDataset(*batch())
    samples = DataLoader(data, 2, sampler=Recorded(data, seen))
    batches = DataLoader(data, batch_sampler=RecordedBatches(Recorded(data, seen), 2, False))
    with connect("local") as backend:
        for number in range(2):
            model = net()
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)
            if number:
                trainer.resume(tmp_path / "state")
            trainer.fit(samples, epochs=2)
            trainer.fit(batches)
            trainer.save(tmp_path / "state")
    assert seen == [0, 1, "batches 2", 2, 3, 4, "batches 5", 5]


def test_frozen_layers_stay_in_evaluation_mode_even_after_a_failed_evaluation():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[1].eval()
    frozen = model[1].running_mean.clone()
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)
        trainer.fit([batch()])
        trainer.evaluate([batch()])
        with pytest.raises(RuntimeError):
            trainer.evaluate([(torch.randn(2, 5), torch.zeros(2, dtype=torch.int64))])
        trainer.fit([batch()])
        modes = [module.training for module in model]
        source = TensorSource(*batch())
        try_out(Task(source, source, (4,), 3), model, "data", "model")
        assert modes == [module.training for module in model] == [True, False, True]
        assert torch.equal(model[1].running_mean, frozen)
        model.eval()  # some libraries return models in evaluation mode
        try_out(Task(source, source, (4,), 3), model, "data", "model")
    assert all(module.training for module in model.modules())


class Master(torch.optim.Optimizer):
    """An optimizer whose state has float32 copies of the parameters, and integer counts."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["master"], state["seen"] = p.float().clone(), torch.zeros(p.shape, dtype=torch.int64)
            state["master"].sub_(p.grad.float() * 1e-3)
            state["seen"] += p.grad != 0
            p.copy_(state["master"])


@pytest.mark.parametrize(("kind", "dtype"), [(Master, torch.bfloat16), (torch.optim.NAdam, torch.float64)])
def test_optimizer_state_keeps_its_dtypes_over_a_resume(kind, dtype, tmp_path):
    with connect("local") as backend:

        def trained(begin):
            model = net(dtype)
            trainer = Trainer(model, kind(model.parameters()), backend=backend)
            if begin:
                trainer.resume(tmp_path / "state")
            for number in range(begin, 30):
                trainer.step([batch(number, dtype)], 6)
                if number == 3 and not begin:
                    trainer.save(tmp_path / "state")
            trainer.close()
            return model.weight.detach()

        assert torch.equal(trained(0), trained(4))


class Counting(nn.Module):
    """A model with buffers of several kinds that its forward passes change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("kept", torch.zeros((), dtype=torch.int64))
        self.register_buffer("phase", torch.zeros(1, dtype=torch.complex64), persistent=False)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("grows", torch.zeros(0, dtype=torch.bool), persistent=False)

    def forward(self, x):
        if self.training:
            for buffer in (self.count, self.kept, self.phase, self.mean):
                buffer += len(x)
            self.grows = torch.cat([self.grows, torch.ones(1, dtype=torch.bool)])
        return self.linear(x)


def buffers_after_resume(backend, folder):
    """Take two steps and save the state; resume a second model from the file on all ranks, and return its buffers."""
    model = Counting()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)
    inputs, targets = batch()
    mine = slice(0, 1 + backend.rank)
    for _ in range(2):
        trainer.step([(inputs[mine], targets[mine])], 3.0)
    trainer.save(folder / "state")
    other = Counting()
    again = Trainer(other, torch.optim.SGD(other.parameters(), 0.1), backend=backend)
    again.resume(folder / "state")
    ours, theirs = dict(model.named_buffers()), dict(other.named_buffers())
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    return {name: buffer.tolist() for name, buffer in theirs.items()}


def test_all_buffers_of_each_rank_are_restored(typical, tmp_path):
    found = typical(buffers_after_resume, tmp_path)
    counts = [2 * (1 + rank) for rank in range(len(found))]
    assert [rank["count"] for rank in found] == [rank["kept"] for rank in found] == counts
    with connect("local") as backend:
        model = Counting()
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)
        # A single rank resumes with the average of all ranks' ``mean``, and with rank 0's other buffers.
        trainer.resume(tmp_path / "state")
        assert model.mean.item() == sum(counts) / len(counts)
        assert (model.count.item(), model.kept.item(), model.phase.item()) == (2, 2, 2)
        assert model.grows.tolist() == [True, True]
        old = trainer.state_dict()
        for rank in old["ranks"]:
            rank["buffers"] = {"mean": rank["buffers"]["mean"]}  # as version 0.2.0 wrote it
        trainer.load_state_dict(old)


@pytest.mark.parametrize("virtual_ranks", [None, 2])
def test_a_state_that_the_program_keeps_can_be_restored_several_times(virtual_ranks):
    """A program may return to its best state each time that training gets worse."""
    model = nn.Sequential(net(), nn.BatchNorm1d(3))
    with connect("local") as backend:
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        schedule = lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 1, 0.9)])
        options = {"schedule": schedule, "ema": 0.5, "virtual_ranks": virtual_ranks}
        trainer = Trainer(model, optimizer, backend=backend, **options)

        def train(steps: int) -> list[float]:
            for _ in range(steps):
                trainer.step([batch()] if virtual_ranks is None else trainer.split(batch()), 6.0)
            mine = [batch()] * (virtual_ranks or 1)
            return [*trainer.evaluate(mine).values(), *(p.sum().item() for p in model.parameters())]

        train(2)
        kept = copy.deepcopy(trainer.state_dict())
        expected = train(3)
        for _ in range(3):
            trainer.load_state_dict(kept)
            assert train(3) == expected


class WithNote(Trainer):
    """A trainer with state of the program's own."""

    note = 0

    def state_dict(self):
        return {**super().state_dict(), "note": self.note}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.note = state["note"]


def test_a_subclass_can_save_and_resume_state_of_its_own(tmp_path):
    model = net()
    with connect("local") as backend:
        trainer = WithNote(model, torch.optim.AdamW(model.parameters(), 0.1), backend=backend)
        trainer.note = 7
        trainer.save(tmp_path / "state")
        trainer.note = 0
        trainer.resume(tmp_path / "state")
        assert trainer.note == 7


@pytest.mark.parametrize(
    ("saved_kind", "loaded_kind", "words"),
    [
        (torch.optim.SGD, torch.optim.Adam, "has no usable value of betas"),
        (torch.optim.Adam, torch.optim.SGD, "has no usable value of momentum"),
        (torch.optim.Adam, torch.optim.Adamax, "exp_inf is missing"),
    ],
)
def test_the_state_of_a_different_optimizer_is_refused(saved_kind, loaded_kind, words, tmp_path):
    with connect("local") as backend:
        for kind in (saved_kind, loaded_kind):
            model = net()
            trainer = Trainer(model, kind(model.parameters(), 0.1), backend=backend)
            if kind is saved_kind:
                trainer.step([batch()], 6.0)
                trainer.save(tmp_path / "state")
        with pytest.raises(UserError, match=f"does not fit this model and optimizer .*{words}"):
            trainer.resume(tmp_path / "state")


def test_a_resume_restores_the_scale_of_the_loss(tmp_path):
    scalers = []
    with connect("local") as backend:
        for resumes in (False, True):
            model = net()
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, amp="fp16")
            if resumes:
                trainer.resume(tmp_path / "state")
            else:
                trainer.precision.scaler.update(512.0)
                trainer.step([batch()], 6)
                trainer.save(tmp_path / "state")
            scalers.append(trainer.precision.scaler.state_dict())
    assert scalers[0] == scalers[1]
    assert (scalers[1]["scale"], scalers[1]["_growth_tracker"]) == (512.0, 1)


def test_averaged_weights_start_from_the_weights_of_a_state_without_an_average(tmp_path):
    with connect("local") as backend:
        model = net()
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), backend=backend)
        trainer.step([batch()], 6)
        trainer.save(tmp_path / "state")
        trainer.close()
        wanted = trainer.evaluate([batch()])
        model = net()
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), backend=backend, ema=0.9)
        trainer.step([batch(1)], 6)
        trainer.resume(tmp_path / "state")
        assert trainer.evaluate([batch()]) == wanted
        trainer.step([batch(1)], 6)
        assert torch.equal(trainer.evaluated.weight, model.weight)  # the first update of an average copies the weights


@pytest.mark.parametrize("state_has_schedule", [True, False])
def test_resume_refuses_a_schedule_in_only_the_state_or_only_the_trainer(state_has_schedule, tmp_path):
    with connect("local") as backend:
        for scheduled in (state_has_schedule, not state_has_schedule):
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), 0.5)
            schedule = lr_scheduler.StepLR(optimizer, 2) if scheduled else None
            trainer = Trainer(model, optimizer, backend=backend, schedule=schedule)
            if scheduled == state_has_schedule:
                trainer.step([batch()], 6)
                trainer.save(tmp_path / "state")
                continue
            with pytest.raises(UserError, match=r"schedule.*: make the trainer with"):
                trainer.resume(tmp_path / "state")


def other_files(backend, folder, kind):
    model = net()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), backend=backend)
    for name in ("first", "second"):
        trainer.step([batch()], 6.0 * backend.size)
        trainer.save(folder / name)
    last = backend.rank == backend.size - 1
    path = folder / ({"other": "second", "missing": "none"}[kind] if last else "first")
    with pytest.raises(RanksDifferError, match=r"content of the file|does not exist") as refusal:
        trainer.resume(path)
    trainer.resume(folder / "first")
    return str(refusal.value)


@pytest.mark.parametrize("kind", ["other", "missing"])
def test_a_resume_is_refused_if_ranks_load_different_files(many, kind, tmp_path):
    messages = many(other_files, tmp_path, kind)
    assert len(set(messages)) == 1


class Centred(nn.Module):
    """A loss with a buffer that each call changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, outputs, targets):
        result = nn.functional.cross_entropy(outputs - self.centre, targets)
        self.centre.lerp_(outputs.detach().mean(0), 0.1)
        return result


def centres_after_resume(backend, folder):
    weights, centres = [], []
    for begin in (0, 3):
        model, loss = net(), Centred()
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.5), loss, backend=backend)
        if begin:
            trainer.resume(folder / "state")
        for number in range(begin, 6):
            trainer.step([batch(number * backend.size + backend.rank)], 6.0 * backend.size)
            if number == 2:
                trainer.save(folder / "state")
        weights.append(model.weight.detach())
        centres.append(loss.centre.tolist())
    assert torch.equal(*weights)
    assert centres[0] == centres[1]
    return centres[0]


def test_buffers_of_the_loss_are_restored_on_each_rank(typical, tmp_path):
    typical(centres_after_resume, tmp_path)


def test_a_loss_with_trainable_parameters_is_refused():
    model, loss = net(), Centred()
    loss.scale = nn.Parameter(torch.ones(1))
    with connect("local") as backend, pytest.raises(ValueError, match=r"parameters to train \(scale\)"):
        Trainer(model, torch.optim.SGD([*model.parameters(), loss.scale], 0.5), loss, backend=backend)


class Cached(nn.Module):
    """A model that makes a buffer in its first forward pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", None, persistent=False)
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        if self.cache is None:
            self.cache = torch.full((3,), 100.0)
        return self.norm(self.linear(x)) + self.cache


def test_averaged_weights_include_buffers_that_the_first_forward_pass_creates():
    model = Cached()
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, ema=0.9)
        for number in range(3):
            trainer.step([batch(number)], 6)
    wanted = dict(model.named_buffers())
    found = dict(trainer.evaluated.named_buffers())
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class Late(nn.Module):
    """A model whose second forward pass makes the buffer that ``named_buffers()`` lists first. Later passes enlarge it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", None, persistent=False)
        self.norm, self.linear, self.passes = nn.BatchNorm1d(4), nn.Linear(4, 3), 0

    def forward(self, x):
        self.passes += 1
        if self.passes >= 2:
            self.cache = torch.full((4, self.passes), 100.0)
        return self.linear(self.norm(x))


def late_buffers(backend) -> None:
    model = Late()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, ema=0.9)
    for number, batches in enumerate([2, 1, 1] if backend.rank == 0 else [0, 2, 1]):
        trainer.step([batch(number)] * batches, 6)
        wanted = dict(model.named_buffers())
        found = dict(trainer.evaluated.named_buffers())
        assert list(found) == list(wanted)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert "cache" not in trainer.evaluated.state_dict()


def test_averaged_weights_include_buffers_that_a_later_forward_pass_creates():
    run_threads(2, late_buffers)


def evaluates_without_a_buffer(backend) -> None:
    model = Cached()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)
    trainer.step([batch()] if backend.rank == 0 else [], 6)
    with pytest.raises(BackendError, match=r"the ranks do not have the same buffers: cache \(3,\) on rank 0 and norm\.r"):
        trainer.evaluate([batch()])


def test_an_evaluation_is_refused_if_only_some_ranks_have_made_a_buffer():
    run_threads(2, evaluates_without_a_buffer)


class Masked(nn.Module):
    """A model that makes a buffer in evaluations only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None, persistent=False)
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        if not self.training and self.mask is None:
            self.mask = torch.ones(4)
        return self.linear(self.norm(x) if self.mask is None else self.norm(x) * self.mask)


def test_averaged_weights_leave_out_buffers_that_only_an_evaluation_creates():
    model = Masked()
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, ema=0.9)
        for number in range(3):
            trainer.evaluate([batch(number)])
            assert trainer.evaluated.mask is not None  # the evaluation has made it, in the averaged model only
            trainer.step([batch(number)], 6)
            assert torch.equal(trainer.evaluated.norm.running_mean, model.norm.running_mean)
            assert torch.equal(trainer.evaluated.norm.running_var, model.norm.running_var)


def test_averaged_weights_leave_out_buffers_that_the_programs_own_evaluation_creates():
    model = Masked()
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, ema=0.9)
        average = trainer.evaluated
        for number in range(3):
            trainer.step([batch(number)], 6)
            assert torch.equal(average.norm.running_var, model.norm.running_var)
            average.eval()(batch(number)[0])
            assert average.mask is not None


class Untied(nn.Module):
    """A model with two buffers that are one tensor at first. Each forward pass assigns a new tensor to the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.first, self.second = nn.Module(), nn.Module()
        self.first.register_buffer("scale", torch.ones(3))
        self.second.register_buffer("scale", self.first.scale)

    def forward(self, x):
        self.second.scale = torch.full((3,), 2.0)
        return self.linear(x) * self.first.scale * self.second.scale


def test_averaged_weights_follow_buffers_that_were_one_tensor():
    model = Untied()
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, ema=0.9)
        for number in range(2):
            trainer.step([batch(number)], 6)
        assert {name: b.tolist() for name, b in trainer.evaluated.named_buffers()} == {
            "first.scale": [1.0] * 3,
            "second.scale": [2.0] * 3,
        }


def changes_layers_on_one_rank(backend) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, ema=0.9)
    trainer.step([batch()], 6)
    if backend.rank == 1:
        model.append(nn.Linear(4, 4))
    with pytest.raises(RanksDifferError, match=r"rank 1: the model's parameters have changed .*'2\.weight'"):
        trainer.evaluate([batch()])


def test_a_change_of_the_models_layers_on_one_rank_is_refused_on_all():
    run_threads(2, changes_layers_on_one_rank)


def test_averaged_weights_are_refused_after_a_change_of_the_models_layers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, ema=0.9)
        trainer.step([batch()], 6)
        model.insert(0, nn.Linear(4, 4))
        with pytest.raises(UserError, match=r"parameters have changed since the trainer was made .'2\.weight"):
            trainer.evaluate([batch()])


class CachedLater(Cached):
    """A model that registers a buffer in its first forward pass."""

    def __init__(self):
        super().__init__()
        del self.cache

    def forward(self, x):
        if "cache" not in self._buffers:
            self.register_buffer("cache", torch.full((3,), 100.0), persistent=False)
        return super().forward(x)


def test_a_trainer_that_averages_weights_resumes_a_model_that_registers_a_buffer_in_forward(tmp_path):
    with connect("local") as backend:
        for resumes in (False, True):
            model = CachedLater()
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, ema=0.9)
            if resumes:
                trainer.resume(tmp_path / "state")
            else:
                trainer.step([batch(0)], 6)
                trainer.save(tmp_path / "state")
            assert torch.equal(trainer.evaluated.cache, torch.full((3,), 100.0))
            assert "cache" not in trainer.evaluated.state_dict()
            trainer.close()


class Changing(nn.Module):
    """A model whose first two forward passes replace its buffer ``table``. Its passes also register buffers of its layers.

    Evaluations register ``mask``. Training passes register one tensor as ``scale`` in two layers, unless ``table`` is still
    empty.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.first, self.linear, self.norm = nn.Identity(), nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        if not self.training:
            self.norm.register_buffer("mask", torch.ones(3), persistent=False)
        elif len(self.table):  # not the first pass
            self.first.register_buffer("scale", torch.tensor(2.0), persistent=False)
            self.norm.register_buffer("scale", self.first.scale, persistent=False)
        if len(self.table) < 8:
            self.table = torch.arange(len(self.table) + 4.0)
        return self.norm(self.linear(x))


class Shifted(nn.Linear):
    """A layer whose forward pass replaces a buffer of integers by the mean of the inputs, in training mode."""

    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.int64), persistent=False)

    def forward(self, x):
        if self.training:
            self.mean = x.mean(0)
        return super().forward(x - self.mean)


def test_averaged_weights_follow_buffers_that_change_their_dtype():
    model = Shifted()
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, ema=0.9)
        trainer.step([batch(0)], 6)
        assert model.mean.any()
        assert torch.equal(trainer.evaluated.mean, model.mean)


@pytest.mark.parametrize("virtual_ranks", [None, 2])
def test_averaged_weights_follow_buffers_in_steps_whose_targets_are_all_ignored(virtual_ranks):
    model = nn.Sequential(net(), nn.BatchNorm1d(3))
    with connect("local") as backend:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = Trainer(model, optimizer, backend=backend, ema=0.9, virtual_ranks=virtual_ranks)
        for number in range(3):
            inputs, targets = batch(number)
            whole = inputs, targets if number == 1 else torch.full_like(targets, -100)
            trainer.step(trainer.split(whole) if virtual_ranks else [whole], 6)
            found = trainer.evaluated[1]
            assert torch.equal(found.running_mean, model[1].running_mean)
            assert found.num_batches_tracked == model[1].num_batches_tracked == number + 1
            state = copy.deepcopy(trainer.state_dict())
            before = trainer.evaluate([batch(3), batch(4)])
            trainer.load_state_dict(state)
            assert trainer.evaluate([batch(3), batch(4)]) == before


def test_averaged_weights_follow_buffers_that_later_forward_passes_change(tmp_path):
    models = Changing(), Changing()
    with connect("local") as backend:
        for model in models:
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, ema=0.9)
            if model is models[1]:
                trainer.resume(tmp_path / "state")
            for number in range(3):
                trainer.step([batch(number)], 6)
                wanted, found = dict(model.named_buffers()), dict(trainer.evaluated.named_buffers())
                assert list(found) == list(wanted)
                assert all(torch.equal(found[name], wanted[name]) for name in wanted)
                trainer.evaluate([batch(number)])
            trainer.save(tmp_path / "state")
            trainer.close()
            assert [len(model.table), model.norm.scale.item()] == [8, 2]


SCRIPTING = threading.Lock()  # in Python 3.11, ast.parse raises SystemError if two threads call it at once


def scripted(backend, virtual_ranks, folder):
    """Train a TorchScript module, and a second one from the state after step 1; return their equal validation loss."""
    losses, weights = [], []
    for begin in (0, 1):
        with SCRIPTING:
            model = torch.jit.script(nn.Sequential(net(), nn.BatchNorm1d(3)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = Trainer(model, optimizer, backend=backend, ema=0.5, virtual_ranks=virtual_ranks)
        if begin:
            trainer.resume(folder / "state")
        for number in range(begin, 3):
            whole = batch(number)
            mine = trainer.split(whole) if virtual_ranks else [[part[backend.rank :: backend.size] for part in whole]]
            trainer.step(mine, 6.0)
            if number == 0:
                trainer.save(folder / "state")
        losses.append(trainer.evaluate(mine)["val_loss"])
        weights.append([tensor.clone() for tensor in model.state_dict().values()])
        trainer.close()
    assert losses[0] == losses[1]
    assert all(map(torch.equal, *weights))
    return losses[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("virtual_ranks", [None, 3])
def test_a_torchscript_module_is_trained_and_resumed(virtual_ranks, tmp_path):
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        found = run_threads(ranks, scripted, virtual_ranks, tmp_path / str(ranks))
        assert found == found[:1] * ranks


class Normed(nn.Sequential):
    """A model with running statistics and an infinite constant."""

    def __init__(self):
        super().__init__(net(), nn.BatchNorm1d(3))
        self.register_buffer("limit", torch.tensor([-torch.inf]))

    @staticmethod
    def trainer(backend) -> Trainer:
        model = Normed()
        return Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)


def statistics_without_samples(backend, folder: str) -> None:
    """Train with samples on every rank except the last; check the mean of the running statistics, also after a resume."""
    last = backend.rank == backend.size - 1
    trainer = Normed.trainer(backend)
    norm = trainer.model[1]
    with trainer.common_buffers():  # no rank has samples yet
        assert torch.equal(norm.running_mean, torch.zeros(3))
    for number in range(2):
        trainer.step([] if last else [batch(10 * backend.rank + number)], 6.0 * (backend.size - 1))
    own = norm.running_mean.clone(), norm.running_var.clone()
    ranks = backend.allgather_object(own)
    assert torch.equal(ranks[-1][0], torch.zeros(3))
    wanted = [torch.stack(values[:-1]).double().mean(0).float() for values in zip(*ranks, strict=True)]
    trainer.save(f"{folder}/state")
    again = Normed.trainer(backend)
    again.resume(f"{folder}/state")
    for one in (trainer, again):
        norm = one.model[1]
        with one.common_buffers():
            torch.testing.assert_close([norm.running_mean, norm.running_var], wanted, rtol=0, atol=0)
            assert one.model.limit.item() == -torch.inf
        assert torch.equal(norm.running_mean, own[0])
    if backend.rank == 0:
        with connect("local") as alone:  # a different world size
            one = Normed.trainer(alone)
            one.resume(f"{folder}/state")
            norm = one.model[1]
            torch.testing.assert_close([norm.running_mean, norm.running_var], wanted, rtol=0, atol=0)
            assert one.model.limit.item() == -torch.inf
            assert norm.num_batches_tracked.item() == 2


def test_running_statistics_of_ranks_without_samples_do_not_count(many, tmp_path):
    many(statistics_without_samples, str(tmp_path))


def uneven_norms(backend, one_batch):
    """Train with SyncBatchNorm on two batches per rank, or on one if ``one_batch``. The last rank has one batch fewer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    synchronize_norms(model, backend)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)
    batches = [batch(), batch(1)][one_batch:]
    with pytest.raises(RanksDifferError, match="different numbers of batches, and SyncBatchNorm needs a batch of every"):
        trainer.fit(batches[: len(batches) - (backend.rank == backend.size - 1)])
    assert trainer.fit([batch(2)])[0]["loss"] > 0  # training can continue


@pytest.mark.parametrize("one_batch", [False, True])
def test_sync_batchnorm_refuses_different_numbers_of_batches_on_ranks(many, one_batch):
    many(uneven_norms, one_batch)


def test_sums_of_the_loss_ignore_torchs_default_device():
    model, data = net(), batch()
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)
        with torch.device("meta"):
            trainer.fit([data])
            assert trainer.evaluate([data])["val_loss"] > 0
            trainer.step([data], 6.0).sums.tolist()


class Frozen(nn.Sequential):
    """A model whose ``train()`` keeps its BatchNorm in evaluation mode, as is common for fine-tuning."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


def test_a_models_own_train_method_decides_which_modules_train():
    # The model's train() has not been called yet, so all modules are in training mode.
    model = Frozen(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    frozen = model[1].running_mean.clone()
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)
        trainer.fit([batch()])
        trainer.evaluate([batch()])
        trainer.fit([batch()])
    assert [module.training for module in model] == [True, False, True]
    assert torch.equal(model[1].running_mean, frozen)


class Scaled(nn.CrossEntropyLoss):
    """A loss of the user's own that is derived from torch's."""

    def forward(self, outputs, targets):
        return 7 * super().forward(outputs, targets)


def test_the_forward_of_a_cross_entropy_subclass_is_used():
    with connect("local") as backend:
        losses = []
        for loss in (nn.CrossEntropyLoss(), Scaled()):
            model = net()
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, loss=loss)
            losses.append(trainer.step([batch()], 6).loss)
    assert losses[1] == pytest.approx(7 * losses[0])


class Counted(nn.Module):
    """A loss with a buffer that it changes in training mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, outputs, targets):
        if self.training:
            self.seen += len(targets)
        return nn.functional.cross_entropy(outputs, targets)


class LargerInTraining(nn.Module):
    """A module that a test uses as ``loss``, ``forward`` or ``objective``. The output is 100 times larger in training."""

    def forward(self, outputs, targets=None):
        factor = 100.0 if self.training else 1.0
        return outputs * factor if targets is None else nn.functional.cross_entropy(outputs, targets) * factor


def test_a_loss_is_evaluated_in_evaluation_mode():
    model, loss = net(), Counted()
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, loss=loss)
        trainer.evaluate([batch()])
        assert (loss.seen.item(), loss.training) == (0, True)
        trainer.evaluate([batch()], lambda outputs, targets: (loss(outputs, targets), [0.0, len(targets), -1, -1]))
        assert (loss.seen.item(), loss.training) == (0, True)
        trainer.step([batch()], 6)
        assert loss.seen.item() == 6


def test_an_evaluation_of_averaged_weights_does_not_call_train_of_the_trained_model():
    """A model may do more in ``train()`` than set the mode: it may merge weights."""
    model, modes = net(), []
    with connect("local") as backend:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), ema=0.9, backend=backend)
        model.train = modes.append
        trainer.evaluate([batch()])
    assert not modes


@pytest.mark.parametrize("role", ["loss", "objective", "forward"])
def test_all_modules_of_an_evaluation_are_in_evaluation_mode(role):
    model, larger = net(), LargerInTraining()
    around = nn.Sequential(larger, model) if role == "forward" else None
    with connect("local") as backend:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = Trainer(model, optimizer, larger if role == "loss" else None, forward=around, backend=backend)
        found = trainer.evaluate([batch()], larger if role == "objective" else None)["val_loss"]
    model.eval()
    assert found == pytest.approx(nn.functional.cross_entropy(model(batch()[0]), batch()[1]).item())
    assert larger.training


@pytest.mark.parametrize("virtual_ranks", [None, 2])
def test_a_function_as_forward_is_evaluated_with_the_averaged_weights(virtual_ranks):
    model = net()
    with connect("local") as backend:
        trainer = Trainer(
            *(model, torch.optim.SGD(model.parameters(), 0.5)),
            forward=lambda inputs: model(inputs) * 3,
            ema=0.9,
            backend=backend,
            virtual_ranks=virtual_ranks,
        )
        for _ in range(3):
            trainer.step([batch()] if virtual_ranks is None else trainer.split(batch()), 6)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        found = trainer.evaluate([batch()] if virtual_ranks is None else trainer.split(batch()))["val_loss"]
        average = trainer.evaluated.eval()
    assert found == pytest.approx(nn.functional.cross_entropy(average(batch()[0]) * 3, batch()[1]).item())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(next(average.parameters()), next(model.parameters()))


def test_measure_may_return_a_mean():
    model = net()
    with connect("local") as backend:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        mean = nn.functional.cross_entropy(model(batch()[0]), batch()[1]).item()
        trainer = Trainer(
            *(model, optimizer), measure=lambda x, y: nn.functional.cross_entropy(model(x), y), backend=backend
        )
        assert trainer.step([batch()], 6).loss == pytest.approx(mean)


def test_a_loss_that_changes_its_buffers_is_refused_with_virtual_ranks():
    model = net()
    with connect("local") as backend:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = Trainer(model, optimizer, backend=backend, loss=Counted(), virtual_ranks=2)
        with pytest.raises(UserError, match="the loss changes its buffers in forward"):
            trainer.step(trainer.split(batch()), 6)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_loss_may_have_buffers_of_any_kind_with_virtual_ranks():
    model, loss = net(), Counted()
    loss.eval()
    loss.register_buffer("sparse", torch.eye(3).to_sparse())
    loss.register_buffer("quantized", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    with connect("local") as backend:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = Trainer(model, optimizer, backend=backend, loss=loss, virtual_ranks=2)
        trainer.step(trainer.split(batch()), 6)
