"""A model that cannot be trained on one sample is refused before the first step if a pass of the run has one sample."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dualtrain.training.loop as loop
from dualtrain import UserError, connect
from dualtrain.config import StepSection, parse
from dualtrain.data.memory import TensorSource
from dualtrain.data.sampler import Sampler
from dualtrain.data.sources import Task
from dualtrain.training.assemble import check_batches
from dualtrain.training.batch_plan import BatchPlan
from dualtrain.training.one_sample import check_one_sample, smallest_pass


class Norm(nn.Module):
    """A model for images. Its BatchNorm layer gets the images if ``images`` is true, and otherwise flattened images."""

    def __init__(self, *, images: bool = False) -> None:
        super().__init__()
        self.images, self.dropout = images, nn.Dropout()
        self.norm = nn.BatchNorm2d(1) if images else nn.BatchNorm1d(64)
        self.last = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(self.norm(x if self.images else x.flatten(1)).flatten(1)))


def vectors(shape, classes) -> nn.Module:
    return Norm()


def check(samples: int, batch: int, parts: int, *, model: nn.Module | None = None, steps: int = 1000, **options) -> None:
    drop_last, model = options.pop("drop_last", False), model or Norm()
    source = TensorSource(torch.randn(samples, 1, 8, 8), torch.arange(samples) % 10)
    task = Task(source, source, (1, 8, 8), 10)
    sampler, step = Sampler(samples, batch, 0, drop_last), StepSection(global_batch_size=batch, **options)
    check_one_sample(model, "mine", task, sampler, step, parts, steps)


LAST = "the last batch of an epoch has {} for {}: give --drop-last, another batch size or fewer {}"
EVERY = "a batch has {} for {}: give another batch size or fewer {}"


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ((49, 8, 2), {}, LAST.format("1 sample", "2 ranks × 1 pass", "ranks")),
        ((51, 8, 2), {}, LAST.format("3 samples", "2 ranks × 1 pass", "ranks")),
        ((50, 8, 1), {"accumulate": 2}, LAST.format("2 samples", "1 rank × 2 passes", "passes")),
        ((49, 8, 2), {"virtual_ranks": 2}, LAST.format("1 sample", "2 virtual ranks × 1 pass", "virtual ranks")),
        ((48, 2, 2), {"drop_last": True}, EVERY.format("2 samples", "2 ranks × 1 pass", "ranks")),
        ((48, 2, 2), {"steps": 1}, EVERY.format("2 samples", "2 ranks × 1 pass", "ranks")),
        ((3, 8, 2), {}, "the last batch of an epoch has 3 samples for 2 ranks × 1 pass: give another batch size or fewer"),
    ],
)
def test_batchnorm_is_refused_if_a_pass_has_one_sample(case, options, message):
    with pytest.raises(UserError) as caught:
        check(*case, **options)
    start = "--model mine cannot be trained on one sample (ValueError: Expected more than 1 value per channel when training"
    assert str(caught.value).startswith(start)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def frozen() -> nn.Module:
    model = Norm()
    model.norm.eval()
    return model


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ((48, 8, 2), {}),
        ((49, 8, 2), {"drop_last": True}),
        ((49, 8, 2), {"steps": 6}),  # the run ends before the short batch
        ((50, 8, 1), {}),
        ((49, 8, 2), {"model": Norm(images=True)}),
        ((49, 8, 2), {"model": frozen()}),
        ((49, 8, 2), {"model": nn.Linear(3, 3)}),  # fails with two samples too, so the size of the pass is not the reason
    ],
)
def test_a_run_is_accepted_unless_a_pass_of_one_sample_makes_it_fail(case, options):
    check(*case, **options)


def test_the_check_changes_neither_buffers_nor_mode_nor_random_state():
    model = Norm(images=True)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    source = TensorSource(torch.ones(9, 1, 8, 8), torch.zeros(9, dtype=torch.int64))
    task = Task(source, source, (1, 8, 8), 10)
    check_one_sample(model, "mine", task, Sampler(9, 8, 0), StepSection(global_batch_size=8), 1, 2)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_smallest_pass_equals_the_length_of_the_shortest_pass_in_the_batch_plan():
    for size in range(1, 20):
        for parts in range(1, 6):
            for accumulate in range(1, 5):
                plan = BatchPlan(Sampler(size, size, 0), parts, range(parts), accumulate)
                found = [len(one) for part in plan.passes(torch.arange(size)) for one in part]
                assert smallest_pass(size, parts, accumulate) == min(found)


def test_dropping_all_samples_is_refused():
    with pytest.raises(UserError, match="a batch has 16 over all ranks: give a smaller batch size"):
        check_batches(Sampler(10, 16, 0, True), 1, 1, sync_batchnorm=False)


def test_a_run_is_refused_before_its_first_step(tmp_path):
    folder = tmp_path / "run"
    flags = ["--model", f"{__name__}:vectors", "--global-batch-size", "359", "--workers", "0", "--run-dir", str(folder)]
    with connect("local") as backend, pytest.raises(UserError, match="1 sample for 1 rank × 1 pass: give --drop-last"):
        loop.train(parse(flags), backend)
    assert not folder.exists()
