"""Training with virtual ranks gives the same bits on any number of ranks, over every backend and transport."""

from __future__ import annotations

import copy
import math
import random
from contextlib import nullcontext
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dualtrain import Trainer, UserError, connect, functional, weights_sha256
from dualtrain.trainer.common_buffers import CommonBuffers
from dualtrain.trainer.machine import warn_once
from tests.hvd.worlds import worlds
from tests.models_for_tests import conv_net, images, seeded, vectors
from tests.threads import run_threads
from tests.training.virtual import CASES, evaluate, step, trained, trainer_of

ALL = tuple(CASES)
#: Cases for Horovod's worlds, by world size; the other worlds run all cases. Horovod's operations take ten times as long.
#: tests/backends/test_sum_order.py also tests the sums of shards on Horovod. "transformer" has the most buckets. It has 3
#: shards, so in a world of 4 ranks, one rank has none.
ON_HOROVOD = {2: ("convnet", "drawing"), 3: ("branches", "bf16"), 4: ("transformer",)}


@pytest.fixture(scope="module")
def alone():
    """Return the hash of each training on one rank."""
    with connect("local") as backend:
        return trained(backend, ALL)


@worlds(("torch", 2), ("torch", 3), ("torch", 4), ("horovod", 2), ("horovod", 3), ("horovod", 4), ("shm", 2), ("shm", 3))
def test_virtual_ranks_give_the_same_result_on_every_backend_and_world_size(real, alone):
    names = ON_HOROVOD[real.size] if real.name == "horovod" else ALL
    for found in real(trained, names):
        assert found == {name: alone[name] for name in names}


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_virtual_ranks_give_the_same_result_on_2_to_8_ranks_in_threads(size, alone):
    names = ("branches", "narrow", "double")  # no random numbers, because threads share the generators
    for found in run_threads(size, trained, names):
        assert found == {name: alone[name] for name in names}


# -- against torch ----------------------------------------------------------------------------------------------------


def as_ddp(backend):
    """Train with raw DDP, then with two virtual ranks; return the hashes of both models' weights."""
    hashes = []
    for ddp in (True, False):
        model = conv_net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
        if ddp:
            backend.make_default_group()
            replica = DistributedDataParallel(model)
        else:
            trainer = Trainer(model, optimizer, backend=backend, virtual_ranks=2)
        for number in range(10):
            inputs, targets = images(2 * number + backend.rank)
            if ddp:
                optimizer.zero_grad()
                nn.functional.cross_entropy(replica(inputs), targets).backward()
                optimizer.step()
            else:
                trainer.step([(inputs, targets)], 2.0 * len(targets))
        if ddp:
            torch.distributed.destroy_process_group()
        hashes.append(weights_sha256(model))
    return hashes


@worlds(("torch", 2))
def test_two_virtual_ranks_give_the_same_bits_as_raw_ddp(real):
    assert len({each for hashes in real(as_ddp) for each in hashes}) == 1


# -- random numbers ---------------------------------------------------------------------------------------------------


def drawn():
    """Return a random number from each global generator."""
    return torch.rand(()).item(), float(numpy.random.random()), random.random()


def draws(backend):
    """Return the random numbers that forward draws, by step and shard, and those drawn after each step and evaluation."""
    case, found, between = CASES["drawing"], {}, []
    trainer = trainer_of(backend, case)
    seen = []
    trainer.model.register_forward_hook(lambda model, *_: seen.append(tuple(model.drawn.tolist())))
    for number in range(3):
        seen.clear()
        step(trainer, case, 0)
        found.update({(number, shard): mine for shard, mine in zip(trainer.shards, seen, strict=True)})
        between.append(drawn())
        evaluate(trainer, case)
        between.append(drawn())
    trainer.close()
    return found, between


@pytest.fixture(scope="module")
def draws_alone():
    with connect("local") as backend:
        return draws(backend)


@worlds(("torch", 2), ("horovod", 3), ("shm", 3), ("torch", 4))
def test_random_numbers_depend_on_the_step_and_the_shard_only(real, draws_alone):
    found, between = draws_alone
    results = real(draws)
    assert {key: value for mine, _ in results for key, value in mine.items()} == found
    for each in range(3):  # torch, numpy, Python
        assert len({value[each] for value in found.values()}) == 9
        assert len({value[each] for value in between}) == 6
    assert [mine for _, mine in results] == [between] * real.size


@pytest.mark.parametrize("last_call", ["step", "evaluation", "draw"])
def test_numbers_drawn_after_a_restore_are_those_drawn_after_the_save(last_call):
    case = CASES["drawing"]
    with connect("local") as backend:
        trainer, restored = trainer_of(backend, case), trainer_of(backend, case)
        step(trainer, case, 0)
        if last_call == "evaluation":
            evaluate(trainer, case)
        if last_call == "draw":
            drawn()
        state = copy.deepcopy(trainer.state_dict())
        expected = drawn()
        restored.load_state_dict(state)
        assert drawn() == expected


# -- buffers ----------------------------------------------------------------------------------------------------------


class Buffers(nn.Module):
    """A linear layer whose forward calls ``change(self, inputs)`` in training."""

    def __init__(self, change, **buffers):
        super().__init__()
        self.linear, self.change = seeded(nn.Linear(4, 3)), change
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        if self.training:
            self.change(self, x)
        return self.linear(x)


def vector_batch(samples=12):
    return vectors(7, samples), torch.arange(samples) % 3


def trainer_with(model, backend, shards=3):
    return Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, virtual_ranks=shards)


def changed_buffers(backend):
    """Return the buffer ``mean`` after three steps; assert the values of the others, except the empty one."""

    def change(model, x):
        model.mean = 0.5 * model.mean + x.mean(0)  # a new tensor, not a change in place
        model.count += 1
        model.ready.fill_(True)

    constant = torch.linspace(0.1, 1.7, 999)
    zeros = {"mean": torch.zeros(4), "count": torch.tensor(0), "ready": torch.tensor(False)}
    model = Buffers(change, constant=constant.clone(), table=torch.arange(5), empty=torch.zeros(0), **zeros)
    trainer = trainer_with(model, backend)
    for _ in range(3):
        trainer.step(trainer.split(vector_batch()), 12.0)
    assert torch.equal(model.constant, constant)
    assert torch.equal(model.table, torch.arange(5))
    assert model.count == 3
    assert model.ready
    trainer.close()
    return model.mean.tolist()


def test_each_kind_of_buffer_is_averaged_or_counted_or_kept():
    x = vector_batch()[0]
    mean = torch.zeros(4)
    for _ in range(3):
        mean = 0.5 * mean + torch.stack([part.mean(0) for part in x.tensor_split(3)]).mean(0)
    for size in (1, 2, 3, 4):
        for found in run_threads(size, changed_buffers):
            torch.testing.assert_close(torch.tensor(found), mean)


def buffers_of_some_shards(backend):
    """Take steps in which some or all shards have no samples; return the buffers."""

    def change(model, x):
        model.mean.lerp_(x.mean(0), 0.5)
        model.count += 1

    model = Buffers(change, mean=torch.zeros(4), count=torch.tensor(0))
    trainer = trainer_with(model, backend, 4)
    batch = vector_batch(3)
    for parts in ([batch, None, batch, None], [None, batch, None, None], [None] * 4):
        trainer.step([parts[shard] for shard in trainer.shards], 6.0)
    trainer.close()
    return model.mean, model.count


def test_shards_without_samples_do_not_count_in_the_mean_of_a_buffer():
    whole = vector_batch(3)[0].mean(0)
    for size in (1, 2, 3):
        for mean, count in run_threads(size, buffers_of_some_shards):
            torch.testing.assert_close(mean, 0.75 * whole)
            assert count == 2


def refused_buffer(backend, name, message):
    def change(model, x):
        if name == "table":
            model.table[1] += 1
        elif name == "samples":
            model.samples += len(x)
        elif name == "largest":
            model.largest += int(x[0, 0] > x.new_tensor(0.0)) + 1
        elif name == "wave":
            model.wave += 1
        elif name == "cache":
            model.cache = torch.zeros(len(x) + 9)
        elif name == "queue":
            model.queue = torch.cat([model.queue, x])

    tensors = {"table": torch.arange(3), "samples": torch.tensor(0), "largest": torch.tensor(0)}
    tensors |= {"wave": torch.zeros(1, dtype=torch.complex64), "cache": torch.zeros(2), "queue": torch.zeros(0, 4)}
    model = Buffers(change, **{name: tensors[name]})
    trainer = trainer_with(model, backend)
    inputs, targets = vector_batch(10)  # shards of 4, 3 and 3
    with pytest.raises(UserError, match=message):
        trainer.step(trainer.split((inputs, targets)), 10.0)
    assert torch.equal(getattr(model, name), tensors[name])
    trainer.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("table", r"buffer 'table' \(torch.int64\) changes in forward, and has no mean over virtual ranks"),
        ("wave", r"buffer 'wave' \(torch.complex64\) changes in forward"),
        ("samples", "buffer 'samples' is changed by unequal amounts in the forward passes of the shards"),
        ("largest", "buffer 'largest' is changed by unequal amounts"),
        ("cache", "buffer 'cache' changes its shape in forward"),
        ("queue", "buffer 'queue' changes its shape in forward"),
    ],
)
def test_buffers_that_cannot_be_combined_over_shards_are_refused_by_name(name, message):
    with connect("local") as backend:
        refused_buffer(backend, name, message)


# With 100 shards, a counter may change by 409 at most: 100 × 409² is below 2**24, up to which float32 has all integers.
@pytest.mark.parametrize(("other_amount", "message"), [(409, ""), (408, "unequal amounts"), (410, "by 409 at most")])
def test_a_counter_that_one_of_100_shards_changes_by_another_amount_is_refused(other_amount, message):
    model = nn.Linear(1, 1)
    model.register_buffer("samples", torch.tensor(7))
    buffers = CommonBuffers(model, 100)
    buffers.keep()
    total = torch.zeros(buffers.count)  # of the gradients' dtype, float32
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        for shard in range(100):
            buffers.restore()
            model.samples += other_amount if shard == 57 else 409
            total += buffers.numbers(shard, 1)
        buffers.become_mean(total.double())
    if not message:
        assert model.samples.item() == 7 + 409


def test_a_counter_whose_change_per_pass_differs_slightly_between_shards_is_refused():
    model = nn.Linear(1, 1)
    model.register_buffer("samples", torch.tensor(7))
    buffers = CommonBuffers(model, 2)
    buffers.keep()
    total = torch.zeros(buffers.count)
    for shard, samples in enumerate((2003, 2001)):  # in two passes each
        buffers.restore()
        model.samples += samples
        total += buffers.numbers(shard, 2)
    with pytest.raises(ValueError, match="unequal amounts"):
        buffers.become_mean(total.double())


def samples_of_uneven_passes(backend, difference):
    """Take a step in which each shard counts its samples in a buffer, in three passes of 3 or 4; return the buffer.

    The last shard has ``difference`` more samples.
    """

    def change(model, x):
        model.samples += len(x)

    model = Buffers(change, samples=torch.tensor(0))
    trainer = trainer_with(model, backend, 7)
    inputs, targets = vector_batch(10)
    passes = list(zip(inputs.tensor_split(3), targets.tensor_split(3), strict=True))
    other = [passes[1], passes[1], (inputs[: 4 + difference], targets[: 4 + difference])]
    parts = [*[passes] * 6, other]
    trainer.step([parts[shard] for shard in trainer.shards], 70.0)
    trainer.close()
    return model.samples.item()


def test_a_counter_need_not_change_by_the_same_amount_in_each_pass_of_a_shard():
    for size in (1, 2, 3):
        assert run_threads(size, lambda backend: samples_of_uneven_passes(backend, 0)) == [10] * size
    with connect("local") as backend, pytest.raises(ValueError, match="buffer 'samples' is changed by unequal amounts"):
        samples_of_uneven_passes(backend, 1)


def unequal_on_every_rank(backend):
    """Take a step whose shards change a counter by unequal amounts: every rank must raise."""

    def change(model, x):
        model.samples += len(x)

    model = Buffers(change, samples=torch.tensor(0))
    trainer = trainer_with(model, backend)
    inputs, targets = vector_batch(12)
    parts = [[(inputs[:2], targets[:2])], [(inputs[:3], targets[:3])] * 2, [(inputs[:1], targets[:1])] * 5]
    with pytest.raises(UserError, match="buffer 'samples' is changed by unequal amounts"):
        trainer.step([parts[shard] for shard in trainer.shards], 12.0)
    trainer.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_counter_that_shards_change_by_unequal_amounts_is_refused_on_every_rank(size):
    run_threads(size, unequal_on_every_rank)


def calls_in_averaged_model(backend):
    """Return the buffer ``calls`` of the averaged model (``ema``) after two steps and two evaluations.

    Every forward pass adds 1 to ``calls``. The shards of a step start from the same value, so a step adds 1, not 4.
    """

    def change(model, x):
        model.calls += 1.0

    model = Buffers(lambda model, x: None, calls=torch.zeros(1))
    model.register_forward_pre_hook(lambda model, x: change(model, x))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = Trainer(model, optimizer, backend=backend, virtual_ranks=4, ema=0.9)
    for _ in range(2):
        trainer.step(trainer.split(vector_batch()), 12.0)
        trainer.evaluate([[vector_batch(2)] * 2 for _ in trainer.shards])
    trainer.close()
    return trainer.evaluated.calls.item()


def test_an_evaluation_does_not_change_the_buffers_of_the_averaged_model():
    for size in (1, 2, 4):
        assert run_threads(size, calls_in_averaged_model) == [2.0] * size


def test_a_double_precision_buffer_beside_single_precision_weights_is_refused_if_it_changes():
    def change(model, x):
        model.mean += x.mean(0)

    with connect("local") as backend:
        trainer = trainer_with(Buffers(change, mean=torch.zeros(4, dtype=torch.float64)), backend)
        with pytest.raises(ValueError, match=r"buffer 'mean' \(torch.float64\) changes in forward, and has no mean"):
            trainer.step(trainer.split(vector_batch()), 12.0)
        trainer.close()


def test_expanded_constants_and_constants_with_nan_are_kept():
    constants = {"ones": torch.ones(1, 4).expand(3, 4), "gap": torch.tensor([1.0, float("nan")], dtype=torch.float64)}
    with connect("local") as backend:
        model = Buffers(lambda model, x: None, **constants)
        trainer = trainer_with(model, backend)
        for _ in range(2):
            trainer.step(trainer.split(vector_batch()), 12.0)
        assert torch.equal(model.ones, torch.ones(3, 4))
        assert torch.isnan(model.gap[1])
        trainer.close()


def counted_evaluations(backend):
    model = Buffers(lambda model, x: None, calls=torch.zeros(1))

    def count(model, _):  # also called in evaluation
        model.calls.add_(1)

    model.register_forward_pre_hook(count)
    trainer = trainer_with(model, backend)
    trainer.evaluate([[vector_batch(2)] for _ in trainer.shards])
    trainer.close()
    return model.calls.item()


def test_an_evaluation_does_not_change_buffers():
    for size in (1, 2, 4):
        assert run_threads(size, counted_evaluations) == [0.0] * size


def contrast(backend):
    """Compare each sample with the samples of all ranks; return what a step and an evaluation raise or compute."""
    model = seeded(nn.Linear(4, 3))

    def loss(outputs, targets):
        return (outputs @ functional.allgather(outputs, backend).T).logsumexp(1).mean()

    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loss, backend=backend, virtual_ranks=2)
    found = []
    for use in (lambda parts: trainer.step(parts, 12.0).loss, lambda parts: trainer.evaluate(parts)["val_loss"]):
        try:
            found.append(use(trainer.split(vector_batch())))
        except UserError as error:
            found.append(str(error))
    trainer.close()
    functional.allreduce(torch.ones(1), backend)  # accepted: this call is not made during a shard
    return found


def test_a_loss_over_all_ranks_needs_as_many_ranks_as_shards():
    ((found, evaluated),) = run_threads(1, contrast)
    assert found == evaluated
    assert "dualtrain.functional" in found
    assert "with virtual_ranks=2, start 2 ranks, not 1, or train without virtual_ranks" in found
    one, other = run_threads(2, contrast)
    assert one == other
    assert all(isinstance(loss, float) for loss in one)


def test_a_trainer_can_be_evaluated_in_a_step_of_another_one():
    """A generator of batches may evaluate the model of another trainer."""
    with connect("local") as backend:
        models = [seeded(nn.Linear(4, 3)) for _ in range(2)]
        one, other = (
            Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, virtual_ranks=2) for model in models
        )

        def batches():
            other.evaluate(other.split(vector_batch()))
            yield vector_batch()

        assert math.isfinite(one.step([batches(), batches()], 24.0).loss)


def adversaries(backend, *, joint_model: bool) -> str:
    """Train a critic that has BatchNorm, and a generator whose loss calls the critic; return the hash of both.

    With ``joint_model``, the critic is also a part of the model of the generator's trainer.
    """
    critic, generator = nn.Sequential(nn.BatchNorm1d(4), seeded(nn.Linear(4, 3))), seeded(nn.Linear(4, 4), 1)
    both, options = nn.ModuleList([generator, critic]), {"backend": backend, "virtual_ranks": 3}
    one = Trainer(critic, torch.optim.SGD(critic.parameters(), 0.1), **options)
    optimizer = torch.optim.SGD(generator.parameters(), 0.1)
    other = Trainer(
        *(both if joint_model else generator, optimizer),
        lambda outputs, targets: nn.functional.cross_entropy(critic(outputs), targets) * -1.0,
        forward=generator,
        **options,
    )
    for trainer in (one, other, one, other):
        trainer.step(trainer.split(vector_batch()), 12.0)
    one.close()
    other.close()
    return weights_sha256(both.state_dict())


def test_a_step_that_changes_buffers_of_another_trainer_causes_a_warning(caplog):
    warn_once.cache_clear()
    hashes = [run_threads(size, partial(adversaries, joint_model=True)) for size in (1, 2, 3)]
    assert len({each for ranks in hashes for each in ranks}) == 1
    assert not caplog.messages
    run_threads(2, partial(adversaries, joint_model=False))
    (line,) = caplog.messages
    assert "step changes buffer '0.running_mean' of another trainer's model, so the result depends on the number of" in line


def test_a_step_works_after_another_trainers_model_was_moved_to_the_meta_device():
    models = [nn.Sequential(nn.BatchNorm1d(4), seeded(nn.Linear(4, 3))) for _ in range(2)]
    with connect("local") as backend:
        _, later = (
            Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend, virtual_ranks=3) for model in models
        )
        models[0].to("meta")
        assert math.isfinite(later.step(later.split(vector_batch()), 12.0).loss)
