"""The ranks' weights are compared during training. Other state that forward changes is saved for each rank, or refused."""

from __future__ import annotations

import copy
import itertools
import math

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from dualtrain import Trainer, connect
from dualtrain.errors import RanksDifferError
from dualtrain.trainer import same_weights
from tests.models_for_tests import seeded
from tests.threads import run_threads


def data(backend, samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch that differs between ranks."""
    draw = torch.Generator().manual_seed(1 + backend.rank)
    return torch.randn(samples, 4, generator=draw), torch.randn(samples, 2, generator=draw)


def make_trainer(backend, model: nn.Module | None = None, **options) -> Trainer:
    model = model or seeded(nn.Linear(4, 2))
    return Trainer(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), mse_loss, backend=backend, **options)


def refused(size: int, body, words: str) -> None:
    """Check that all ranks refuse ``body`` with the same message, which matches ``words``."""

    def member(backend) -> str:
        with pytest.raises(RanksDifferError, match=words) as error:
            body(backend)
        return str(error.value)

    assert len(set(run_threads(size, member))) == 1


def renormalized(backend, virtual_ranks: int | None = None) -> None:
    model = seeded(nn.Sequential(nn.Embedding(10, 4, max_norm=0.1), nn.Flatten(), nn.Linear(12, 2)))
    trainer = make_trainer(backend, model, virtual_ranks=virtual_ranks)
    tokens = torch.arange(3) + 3 * backend.rank
    batch = tokens[None], torch.ones(1, 2)
    trainer.step([batch] if virtual_ranks is None else [batch] * len(trainer.shards), 2.0)


def test_weights_that_forward_passes_change_on_each_rank_are_refused():
    refused(2, renormalized, r"the ranks do not have the same weights.*checksum of '0.weight' is -?\d+ on rank 0 and")
    with connect("local") as backend:
        renormalized(backend)  # accepted with one rank, as in torch


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_virtual_ranks_refuse_weights_that_a_forward_pass_changes(ranks):
    def member(backend) -> None:
        with pytest.raises(ValueError, match=r"parameter '0\.weight' changes in forward"):
            renormalized(backend, 2)

    run_threads(ranks, member)


@pytest.mark.parametrize(("steps", "name"), [(0, "1.running_mean"), (1, "1.num_batches_tracked")])
def test_virtual_ranks_warn_of_buffers_that_one_rank_changes_between_steps(steps, name, caplog):
    def preview(backend) -> None:
        model = seeded(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
        trainer = make_trainer(backend, model, virtual_ranks=4)
        batch = data(backend)
        trainer.step([batch] * len(trainer.shards), 32.0)
        if backend.rank == 0:
            model(batch[0])
        for _ in range(steps):
            trainer.step([batch] * len(trainer.shards), 32.0)
        trainer.evaluate([None] * len(trainer.shards))

    same_weights.warn_once.cache_clear()
    run_threads(1, preview)
    assert not caplog.messages
    run_threads(2, preview)
    assert [f"buffer {name!r} differs between ranks" in message for message in caplog.messages] == [True]


class Codebook(nn.Linear):
    """A layer whose forward changes a frozen codebook, by operations that do not increment its version counter."""

    def __init__(self, change) -> None:
        super().__init__(4, 2)
        self.codebook, self._change = nn.Parameter(torch.ones(3, 4), requires_grad=False), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._change(self.codebook, x.mean(0))
        return super().forward(x + self.codebook.mean(0))


def assign(p: torch.Tensor, mean: torch.Tensor) -> None:
    p.data = 0.9 * p.data + 0.1 * mean


@pytest.mark.parametrize(
    "change",
    [assign, lambda p, mean: p.data.lerp_(mean.expand(3, 4), 0.1), lambda p, mean: p.detach().numpy().__imul__(0.9)],
)
def test_virtual_ranks_refuse_changes_that_do_not_increment_the_version_counter(change):
    def body(backend) -> None:
        layer = seeded(Codebook(lambda p, mean: None))
        weights = [layer.weight, layer.bias]
        trainer = Trainer(layer, torch.optim.SGD(weights, 0.1), mse_loss, backend=backend, virtual_ranks=2)
        trainer.step([data(backend)] * len(trainer.shards), 16.0)
        layer.codebook.data += 1  # between steps, any change is allowed
        trainer.step([data(backend)] * len(trainer.shards), 16.0)
        trainer.step([data(backend)] * len(trainer.shards), 16.0)
        layer._change = change
        with pytest.raises(ValueError, match="parameter 'codebook' changes in forward"):
            trainer.step([data(backend)] * len(trainer.shards), 16.0)

    for ranks in (1, 2):
        run_threads(ranks, body)


def test_equal_values_of_expected_may_have_different_types():
    def body(backend):
        return make_trainer(backend).step([data(backend)], (16, 16.0, torch.tensor(16))[backend.rank]).totals[1]

    assert run_threads(3, body) == [24.0] * 3


def test_values_of_expected_that_differ_between_ranks_are_refused():
    def body(backend) -> None:
        make_trainer(backend).step([data(backend)], 8.0 + backend.rank)

    refused(
        3, body, r"different values for the same step: expected is 8\.0 on rank 0, 9\.0 on rank 1 and 10\.0 on rank 2; use"
    )


def test_learning_rates_that_differ_between_ranks_are_refused():
    def body(backend) -> None:
        trainer = make_trainer(backend)
        trainer.step([data(backend)], 16.0)
        trainer.optimizer.param_groups[0]["lr"] = 0.5 + backend.rank
        trainer.step([data(backend)], 16.0)

    refused(2, body, r"different values for the same step: lr is \[0\.5\] on rank 0 and \[1\.5\] on rank 1; use the same")


def test_frozen_weights_that_ranks_change_differently_are_refused():
    """An example is a momentum encoder that each forward pass updates."""

    def body(backend) -> None:
        model = seeded(nn.Linear(4, 2))
        model.bias.requires_grad_(False)
        trainer = make_trainer(backend, model)
        model.bias += backend.rank
        trainer.step([data(backend)], 16.0)

    refused(2, body, "the checksum of 'bias' is")


@pytest.mark.parametrize(
    "use",
    [
        lambda trainer, batch: [trainer.step([batch], 16.0) for _ in range(4)],
        lambda trainer, batch: trainer.fit([batch] * 3),
        lambda trainer, batch: trainer.evaluate([batch]),
        lambda trainer, batch: trainer.state_dict(),
    ],
)
def test_weights_that_a_rank_changes_are_refused_before_results_are_used(use):
    def body(backend) -> None:
        trainer, batch = make_trainer(backend), data(backend)
        for _ in range(4):
            trainer.step([batch], 16.0)
        if backend.rank:
            trainer.model.bias.data[0] += 1e-3
        use(trainer, batch)

    refused(2, body, "checksum of 'bias'")


def test_weights_may_differ_outside_the_optimizer_and_after_close():
    def body(backend) -> None:
        model = seeded(nn.Linear(4, 2))
        trainer = Trainer(model, torch.optim.SGD([model.weight], 0.1), mse_loss, backend=backend)
        model.bias.data += backend.rank
        trainer.step([data(backend)], 16.0)
        trainer.optimizer.param_groups[0]["lr"] = None  # optimizers that compute their learning rate do this
        trainer.evaluate([data(backend)])
        trainer.close()
        model.weight.data += backend.rank
        trainer.evaluate([data(backend)])

    run_threads(2, body)


def evaluate_after_change(backend, change) -> None:
    """Change the weights of rank 1 after a step, and evaluate twice."""
    trainer = make_trainer(backend)
    trainer.step([data(backend)], 16.0)
    if backend.rank:
        change(trainer.model)
    trainer.evaluate([data(backend)])
    trainer.evaluate([data(backend)])


@pytest.fixture
def different_processors(monkeypatch):
    monkeypatch.setattr(same_weights, "processor", lambda backend: {"CPU capability": f"AVX{backend.rank}"})


def test_rounding_differences_between_different_processors_cause_a_warning(different_processors, caplog):
    same_weights.warn_once.cache_clear()
    run_threads(2, lambda backend: evaluate_after_change(backend, lambda model: model.weight.data.mul_(1 + 1e-6)))
    assert caplog.messages == [
        "the weights of the ranks differ slightly, because CPU capability is 'AVX0' on rank 0 and 'AVX1' on rank 1"
    ]


@pytest.mark.parametrize("value", [1.01, float("nan")])
def test_larger_differences_are_refused_with_different_processors_too(different_processors, value):
    words = r"'weight' on rank 1 differs from rank 0's by \S+ \(norm on rank 0: [\d.]+\); rounding would cause a smaller"
    refused(2, lambda backend: evaluate_after_change(backend, lambda model: model.weight.data.mul_(value)), words)


def change_in_a_group(backend):
    group = backend.group([1, 3])
    if group is not None:
        with pytest.raises(RanksDifferError, match=r"'weight' on rank 3 differs from rank 1's by \S+ \(norm on rank 1: "):
            evaluate_after_change(group, lambda model: model.weight.data.mul_(2))


def test_a_difference_in_a_group_is_reported_with_the_ranks_numbers_in_the_job(different_processors):
    run_threads(4, change_in_a_group)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.int64])
def test_the_accepted_difference_depends_on_the_dtype(dtype):
    """A difference counts as rounding if the weights agree in half of their digits. Integers are never rounded."""
    is_integer = dtype is torch.int64
    unit = 0.0 if is_integer else torch.finfo(dtype).eps

    def body(backend, change: float) -> str | None:
        p = nn.Parameter((torch.ones(4, dtype=torch.float64) * (1 + backend.rank * change)).to(dtype), not is_integer)
        return same_weights._far_apart(backend, {"the checksum of 'p'": p})

    def with_infinity(backend, change: float) -> str | None:
        p = nn.Parameter(torch.tensor([1.0 + backend.rank * change, -float("inf")]))
        return same_weights._far_apart(backend, {"the checksum of 'p'": p})

    assert [bool(run_threads(2, lambda backend, c=c: with_infinity(backend, c))[0]) for c in (1e-6, 1.0)] == [False, True]
    for change, is_far in ((2 * unit, False), (10 * unit**0.5 or 1.0, True)):
        found = run_threads(2, lambda backend, change=change: body(backend, change))
        assert found[0] == found[1]
        assert bool(found[0]) == is_far


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_a_checksum_depends_on_every_element(dtype):
    memory = torch.zeros(64, dtype=dtype)
    for tensor in (memory[:1], memory[0], memory[3:24], memory[2:26].view(4, 6).t(), memory[::2], memory[:0]):
        memory.zero_()
        assert same_weights._checksum(tensor) == 0
        for index in itertools.product(*map(range, tensor.shape)):
            memory.zero_()
            tensor[index] = 1
            assert same_weights._checksum(tensor) != 0


class Centered(nn.Linear):
    """A layer that subtracts a running mean, which it keeps as extra state."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self._mean = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self._mean = 0.9 * self._mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self._mean)

    def get_extra_state(self) -> torch.Tensor:
        return self._mean

    def set_extra_state(self, state: torch.Tensor) -> None:
        self._mean = state


def centered(backend, **options) -> Trainer:
    return make_trainer(backend, nn.Sequential(seeded(Centered())), **options)


def test_a_resume_restores_the_extra_state_and_the_buffers_of_each_rank(tmp_path):
    def normalized(backend) -> Trainer:
        return make_trainer(backend, nn.Sequential(seeded(Centered()), nn.BatchNorm1d(2)), ema=0.5)

    def body(backend) -> None:
        trainer, batch = normalized(backend), data(backend)
        for number in range(4):
            if number == 2:
                trainer.save(tmp_path / "state.safetensors")
            trainer.step([batch], 16.0)
        resumed = normalized(backend)
        resumed.resume(tmp_path / "state.safetensors")
        assert torch.equal(resumed.evaluated[0]._mean, resumed.model[0]._mean)
        assert torch.equal(resumed.evaluated[1].running_mean, resumed.model[1].running_mean)
        for _ in range(2):
            resumed.step([batch], 16.0)
        assert torch.equal(resumed.model[0].weight, trainer.model[0].weight)
        assert torch.equal(resumed.model[0]._mean, trainer.model[0]._mean)
        # If the loaded state was saved with a different world size, all ranks get rank 0's extra state.
        state = copy.deepcopy(resumed.state_dict())
        state["ranks"].pop()
        resumed.load_state_dict(state)
        means = backend.allgather_object(resumed.model[0]._mean)
        assert torch.equal(means[0], means[1])

    run_threads(2, body)


def test_virtual_ranks_refuse_extra_state_that_a_forward_pass_changes():
    def body(backend) -> None:
        trainer = centered(backend, virtual_ranks=3)
        with pytest.raises(ValueError, match=r"extra state of '0' changes in forward, and has no mean over virtual ranks"):
            trainer.step([data(backend)] * len(trainer.shards), 24.0)

    run_threads(2, body)


class Holder(nn.Linear):
    """A layer with the extra state ``state``. Its forward calls ``change(state)``."""

    def __init__(self, state: object, change=lambda state: None) -> None:
        super().__init__(4, 2)
        self._state, self._change = state, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._change(self._state)
        return super().forward(x)

    def get_extra_state(self) -> object:
        return self._state

    def set_extra_state(self, state: object) -> None:
        self._state = state


def nested() -> dict[str, object]:
    return {"tensors": [torch.full((3,), math.nan), torch.zeros(5)[1:]], "sizes": (1, 2), "scale": numpy.ones(2)}


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["tensors"][1].add_(1),
        lambda state: state["tensors"][1].data.add_(1),
        lambda state: state["tensors"].append(torch.zeros(1)),
        lambda state: state["tensors"].__setitem__(0, torch.zeros(3)),
        lambda state: state["tensors"].__setitem__(0, torch.full((3,), math.nan, dtype=torch.float64)),
        lambda state: state.update(sizes=(1, 3)),
        lambda state: state.update(more=1),
        lambda state: state["scale"].__iadd__(1),
    ],
)
def test_virtual_ranks_refuse_a_change_in_a_nested_extra_state(change):
    with connect("local") as backend:
        layer = Holder(nested())
        trainer = make_trainer(backend, layer, virtual_ranks=2)
        trainer.step([data(backend)] * 2, 16.0)
        change(layer._state)  # between steps, any change is allowed
        trainer.step([data(backend)] * 2, 16.0)
        layer._state, layer._change = nested(), change
        with pytest.raises(ValueError, match="the extra state of the model changes in forward"):
            trainer.step([data(backend)] * 2, 16.0)


def test_averaged_weights_are_evaluated_with_the_current_extra_state():
    with connect("local") as backend:
        trainer = centered(backend, ema=0.5)
        for use in (lambda: trainer.evaluated, lambda: trainer.ema.module):
            trainer.step([data(backend)], 8.0)
            assert torch.equal(use()[0]._mean, trainer.model[0]._mean)
        trainer.step([data(backend)], 8.0)
        state = trainer.state_dict()
        assert torch.equal(state["ema"]["module.0._extra_state"], trainer.model[0]._mean)
