"""``hvd.elastic`` in one process: saved states, repeated training, and split samples. Mocks simulate the other ranks."""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter, deque
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy
import pytest
import torch
from torch.optim import lr_scheduler

from dualtrain.hvd import elastic
from dualtrain.hvd.elastic import common, sampler, state
from tests.conftest import require_horovod

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=99),
    "sequence": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, torch.tensor(0.1), weight_decay=0.1),
}


@contextmanager
def world(size=1, rank=0, module=sampler):
    with mock.patch.multiple(module, rank=lambda: rank, size=lambda: size):
        yield


@pytest.fixture
def sent():
    """Record the objects that the single rank broadcasts."""
    calls = []

    def call(name):
        def broadcast(obj, *args, **kwargs):
            calls.append((name, obj, kwargs))
            return obj

        return broadcast

    with ExitStack() as patches:
        for name in ("broadcast_object", "broadcast_parameters", "broadcast_optimizer_state"):
            patches.enter_context(mock.patch.object(state, name, call(name)))
        patches.enter_context(world())
        yield calls


@pytest.fixture
def resets():
    """Record the calls of ``shutdown`` and ``init`` that ``run`` makes."""
    calls = mock.Mock()
    with mock.patch.object(elastic, "shutdown", calls.shutdown), mock.patch.object(elastic, "init", calls.init):
        yield calls


def objects(**kwargs):
    return elastic.ObjectState(lambda obj: obj, lambda: 0, **kwargs)


def training(kind="sgd", **kwargs):
    """Return the state of a model and its optimizer, which has taken no step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
    optimizer = OPTIMIZERS[kind](model.parameters())
    return elastic.TorchState(model, optimizer, **kwargs)


def step(held):
    loss = held.model(torch.rand(5, 3)).sum() * random.random() * numpy.random.rand()
    held.optimizer.zero_grad()
    loss.backward()
    held.optimizer.step()


def assert_same(left, right):
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


# -- plain objects ------------------------------------------------------------------------------------------------


def test_objects_are_attributes_of_the_state():
    held = objects(epoch=3, history=[1])
    held.epoch += 1
    assert (held.epoch, held.history) == (4, [1])
    held.restore()
    assert held.epoch == 3


def test_changes_inside_an_object_are_rolled_back_repeatedly():
    history = [[1]]
    held = objects(history=history)
    assert held.history is history
    for _ in range(3):
        held.history[0].append(2)
        held.history.append(3)
        held.restore()
        assert held.history == [[1]]
    held.history.append(4)
    held.commit()
    held.history.clear()
    for _ in range(2):
        held.restore()
        assert held.history == [[1], 4]


def test_an_object_in_two_attributes_is_copied_once():
    shared = [1]
    held = objects(a=shared, b={"a": shared}, c=torch.zeros(2))
    held.c += 1
    held.restore()
    assert held.a is held.b["a"]
    assert held.c.tolist() == [0, 0]


def test_the_error_names_an_object_that_cannot_be_copied():
    with pytest.raises(TypeError, match=r"^the state's 'loss' cannot be committed.*\(.+\): keep plain values"):
        objects(loss=torch.ones(1, requires_grad=True) * 2)


def test_sync_takes_the_roots_objects_and_saves_them():
    held = elastic.ObjectState(lambda obj: {**obj, "epoch": 7, "seen": [1, 2]}, lambda: 1, epoch=0, seen=[])
    held.epoch = 5
    held.sync()
    assert (held.epoch, held.seen) == (7, [1, 2])
    held.epoch = 9
    held.seen.append(3)
    held.restore()
    assert (held.epoch, held.seen) == (7, [1, 2])


def test_sync_sends_the_roots_current_objects_not_its_last_commit():
    bcast = mock.Mock(side_effect=lambda obj: obj)
    held = elastic.ObjectState(bcast, lambda: 0, batch=0)
    held.batch = 15
    held.sync()
    bcast.assert_called_once_with({"batch": 15})
    assert held.batch == 15


def test_without_objects_nothing_is_sent():
    bcast = mock.Mock()
    elastic.ObjectState(bcast, lambda: 0).sync()
    bcast.assert_not_called()


# -- hosts --------------------------------------------------------------------------------------------------------


def skip_sync_of_interrupt(held):
    """Return ``skip_sync`` of the HostsUpdatedInterrupt that a check raises; ``None`` if it raises none."""
    try:
        held.check_host_updates()
    except elastic.HostsUpdatedInterrupt as interrupt:
        return interrupt.skip_sync
    return None


UPDATES = common.HostUpdateResult


@pytest.mark.parametrize(
    ("updates", "skip_sync"),
    [
        ([], None),
        ([(1, UPDATES.removed)], True),
        ([(1, UPDATES.added)], False),
        ([(1, UPDATES.no_update)], False),
        ([(1, UPDATES.removed), (2, UPDATES.removed)], True),
        ([(1, UPDATES.removed), (2, UPDATES.added)], False),
        ([(2, UPDATES.removed), (1, UPDATES.added)], True),  # the second update is older, and is ignored
        ([(0, UPDATES.added)], None),
    ],
)
@pytest.mark.parametrize("library", ["dualtrain", "horovod"])
def test_check_host_updates_raises_once_for_all_received_updates(updates, skip_sync, library):
    if library == "dualtrain":
        held = objects(a=1)
    else:
        require_horovod()
        from horovod.common import elastic as real
        from horovod.common.exceptions import HostsUpdatedInterrupt

        held = real.ObjectState(lambda obj: obj, lambda: 0, a=1)
    for timestamp, update in updates:
        held.on_hosts_updated(timestamp, update)
    if library == "dualtrain":
        assert skip_sync_of_interrupt(held) is skip_sync
        assert skip_sync_of_interrupt(held) is None
    elif skip_sync is not None:
        with pytest.raises(HostsUpdatedInterrupt) as caught:
            held.check_host_updates()
        assert caught.value.skip_sync is skip_sync
    held.check_host_updates()


def test_the_root_decides_whether_hosts_have_changed():
    held = objects(a=1)
    held._bcast_object = lambda _: (0, 3, 1)
    assert skip_sync_of_interrupt(held) is True
    held._bcast_object = lambda _: (3, 3, 0)
    held.on_hosts_updated(9, UPDATES.added)
    assert skip_sync_of_interrupt(held) is None


def test_check_host_updates_sends_only_plain_values():
    held = objects(a=1)
    held._bcast_object = mock.Mock(side_effect=lambda obj: obj)
    held.on_hosts_updated(1, UPDATES.mixed)
    assert skip_sync_of_interrupt(held) is False
    ((values,), _) = held._bcast_object.call_args
    assert [type(value) for value in values] == [int, int, int]


def test_commit_saves_before_it_raises():
    held = objects(batch=1)
    held.batch = 2
    held.on_hosts_updated(1, UPDATES.added)
    with pytest.raises(elastic.HostsUpdatedInterrupt):
        held.commit()
    held.restore()
    assert held.batch == 2


def test_a_reset_drops_updates_and_runs_the_callbacks_in_order():
    held, seen = objects(a=1), []
    held.register_reset_callbacks([lambda: seen.append(1), lambda: seen.append(2)])
    held.register_reset_callbacks([lambda: seen.append(3)])
    held.reset = lambda: seen.append(0)
    held.on_hosts_updated(1, UPDATES.added)
    held.on_reset()
    assert seen == [0, 1, 2, 3]
    assert skip_sync_of_interrupt(held) is None


# -- run ----------------------------------------------------------------------------------------------------------


def recorded(fail_in_sync=()):
    """Return a state that records the methods that ``run`` calls. The first calls of ``sync`` raise the given errors."""
    held = mock.Mock()
    held.sync.side_effect = [*fail_in_sync, *[None] * 9]
    return held


def methods_of(held):
    return [call[0] for call in held.method_calls]


def attempts(*outcomes):
    """Return a training function that raises or returns the next of ``outcomes`` in each call."""
    left = deque(outcomes)

    @elastic.run
    def train(held, *args, **kwargs):
        """Train."""
        held.train(*args, **kwargs)
        outcome = left.popleft()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return train


def test_run_syncs_trains_and_returns(resets):
    held, train = recorded(), attempts("done")
    assert train(held, 1, two=2) == "done"
    assert methods_of(held) == ["sync", "train"]
    held.train.assert_called_once_with(1, two=2)
    assert resets.method_calls == []
    assert (train.__name__, train.__doc__) == ("train", "Train.")


def test_after_a_failed_collective_the_state_is_restored_and_synced(resets):
    held = recorded()
    assert attempts(elastic.HorovodInternalError("lost"), "done")(held) == "done"
    assert methods_of(held) == ["sync", "train", "restore", "on_reset", "sync", "train"]
    assert resets.method_calls == [mock.call.shutdown(), mock.call.init()]


def test_the_notification_manager_is_initialized_before_training(resets, monkeypatch):
    order = []
    monkeypatch.setattr(common.notification_manager, "init", lambda: order.append("init"))
    common.run_fn(lambda held: order.append("train"), resets.init)(recorded())
    assert order == ["init", "train"]


def test_a_failed_sync_is_repeated(resets):
    held = recorded([elastic.HorovodInternalError("lost")] * 2)
    assert attempts("done")(held) == "done"
    assert methods_of(held) == ["sync", "restore", "on_reset"] * 2 + ["sync", "train"]
    assert len(resets.method_calls) == 4


@pytest.mark.parametrize("skip_sync", [True, False])
def test_after_a_change_of_hosts_nothing_is_restored(resets, skip_sync):
    held = recorded()
    assert attempts(elastic.HostsUpdatedInterrupt(skip_sync), "done")(held) == "done"
    assert methods_of(held) == ["sync", "train", "on_reset", *["sync"] * (not skip_sync), "train"]
    assert resets.method_calls == [mock.call.shutdown(), mock.call.init()]


def test_a_failed_collective_after_a_skipped_sync_causes_a_sync(resets):
    held = recorded()
    attempts(elastic.HostsUpdatedInterrupt(True), elastic.HorovodInternalError("lost"), "done")(held)
    assert methods_of(held) == ["sync", "train", "on_reset", "train", "restore", "on_reset", "sync", "train"]


def test_other_errors_are_raised_to_the_caller(resets):
    held = recorded()
    with pytest.raises(RuntimeError, match="mine"):
        attempts(RuntimeError("mine"))(held)
    assert methods_of(held) == ["sync", "train"]
    assert resets.method_calls == []
    assert held not in common.notification_manager._listeners


def test_updates_reach_the_state_of_the_running_training(resets, sent):
    held, epochs = elastic.TorchState(epoch=0), []

    @elastic.run
    def train(held):
        while held.epoch < 3:
            epochs.append(held.epoch)
            held.epoch += 1
            if len(epochs) == 2:
                common.notification_manager.handle_hosts_updated(1, UPDATES.added)
            held.check_host_updates()

    train(held)
    assert epochs == [0, 1, 2]
    resets.init.assert_called_once_with()
    common.notification_manager.handle_hosts_updated(2, UPDATES.added)  # no state is registered any more
    assert skip_sync_of_interrupt(held) is None


# -- models, optimizers, schedulers -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_repeated_after_a_restore_give_the_same_bits(sent, kind):
    held = training(kind)
    for _ in range(2):
        step(held)
    held.commit()
    ends = []
    for _ in range(3):
        for _ in range(3):
            step(held)
        ends.append(copy.deepcopy((held.model.state_dict(), held.optimizer.state_dict())))
        held.restore()
    assert_same(ends[0], ends[1])
    assert_same(ends[0], ends[2])


def test_a_restore_discards_the_gradients_of_the_failed_step(sent):
    trained = training()
    step(trained)
    trained.commit()
    trained.model(torch.rand(5, 3)).sum().backward()
    trained.restore()
    assert all(p.grad is None for p in trained.model.parameters())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_saved_before_its_first_step_is_restored_without_state(sent, kind):
    held = training(kind)
    start = copy.deepcopy(held.model.state_dict())
    for _ in range(2):
        step(held)
        assert held.optimizer.state
        held.restore()
        assert not held.optimizer.state
        assert_same(dict(held.model.state_dict()), dict(start))


def test_options_of_the_optimizer_are_rolled_back(sent):
    held = training("adamw")
    held.optimizer.param_groups[0]["lr"].mul_(2)
    held.optimizer.param_groups[0]["weight_decay"] = 9
    held.restore()
    group = held.optimizer.param_groups[0]
    assert (group["lr"].item(), group["weight_decay"]) == (pytest.approx(0.1), 0.1)


# Before torch 2.9, SequentialLR itself causes this warning: it passes an epoch to other schedulers.
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_are_rolled_back(sent, kind):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
    scheduler = SCHEDULERS[kind](optimizer)
    held = elastic.TorchState(optimizer=optimizer, scheduler=scheduler)

    def rates(steps):
        values = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            values.append(optimizer.param_groups[0]["lr"])
        return values

    rates(1)
    held.commit()
    first = rates(4)
    for _ in range(2):
        held.restore()
        assert rates(4) == first


def test_schedulers_are_synced(sent):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    scheduler = lr_scheduler.MultiStepLR(optimizer, [1])
    held = elastic.TorchState(scheduler=scheduler)
    root = {**scheduler.state_dict(), "last_epoch": 5}
    with mock.patch.object(state, "broadcast_object", lambda obj: root if "last_epoch" in obj else obj):
        held.sync()
    assert scheduler.last_epoch == 5
    scheduler.last_epoch = 6
    held.restore()
    assert scheduler.last_epoch == 5


class _Extra(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, seen):
        self.seen = seen


def test_extra_state_of_a_model_is_rolled_back_as_often_as_needed(sent):
    model = _Extra()
    held = elastic.TorchState(model)
    for _ in range(2):
        model.seen.append(1)
        held.restore()
        assert model.seen == []


def test_random_numbers_are_rolled_back(sent):
    def draw():
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    held = elastic.TorchState(epoch=0)
    draw()
    held.commit()
    first = draw()
    held.sync()  # sync saves the state too
    second = draw()
    assert second != first
    for _ in range(2):
        held.restore()
        assert draw() == second


def test_the_gpus_generator_state_is_saved_only_if_cuda_is_initialized(sent):
    with mock.patch.object(state.torch, "cuda") as cuda:
        cuda.is_initialized.return_value = True
        elastic.TorchState().restore()
        cuda.set_rng_state.assert_called_once_with(cuda.get_rng_state.return_value)
        cuda.set_rng_state.reset_mock()
        cuda.is_initialized.return_value = False
        elastic.TorchState().restore()
        cuda.set_rng_state.assert_not_called()


def test_sync_broadcasts_every_kind_of_attribute_from_rank_0(sent):
    with world():
        sampler = elastic.ElasticSampler(range(4))
    held = training(sampler=sampler, epoch=2)
    held.sync()
    assert [name for name, _, _ in sent] == [
        "broadcast_object",
        "broadcast_parameters",
        "broadcast_optimizer_state",
        "broadcast_object",
    ]
    assert sent[0][1] == {"epoch": 0, "processed_num": 0}
    assert list(sent[1][1]) == list(held.model.state_dict())
    assert sent[2][1] is held.optimizer
    assert sent[1][2] == sent[2][2] == {"root_rank": 0}
    assert sent[3][1] == {"epoch": 2}


def test_a_restore_after_a_sync_returns_to_the_synced_state(sent):
    held = training()

    def from_root(parameters, root_rank):
        for value in parameters.values():
            value.fill_(3)

    with mock.patch.object(state, "broadcast_parameters", from_root):
        held.sync()
    step(held)
    held.restore()
    assert {value.unique().item() for value in held.model.state_dict().values()} == {3.0}


def test_a_second_model_replaces_the_first(sent):
    held = training()
    other = torch.nn.Linear(2, 2)
    weight = other.weight.clone()
    held.model = other
    with torch.no_grad():
        other.weight.zero_()
    held.restore()
    assert held.model is other
    assert torch.equal(other.weight, weight)


def test_a_model_that_is_assigned_later_gets_a_handler(sent):
    held = elastic.TorchState(epoch=0)
    model = torch.nn.Linear(2, 2)
    held.model = model
    weight = model.weight.clone()
    held.commit()
    with torch.no_grad():
        model.weight.zero_()
    held.restore()
    assert held.model is model
    assert torch.equal(model.weight, weight)
    held.sync()
    assert [(name, obj) for name, obj, _ in sent if name == "broadcast_object"][-1][1] == {"epoch": 0, "optimizer": None}


def test_only_objects_that_the_constructor_got_are_part_of_the_state(sent):
    held = elastic.TorchState(epoch=0)
    held.helper, held.count = torch.nn.Linear(2, 2), 0
    held.commit()
    with torch.no_grad():
        held.helper.weight.zero_()
    held.count = 1
    held.sync()
    held.restore()
    assert (held.helper.weight.any().item(), held.count) == (False, 1)
    assert sent[-1][1] == {"epoch": 0, "model": None, "optimizer": None}


def test_a_reset_splits_the_samples_again_without_a_sync(sent):
    with world(2, 1):
        sampler = elastic.ElasticSampler(range(8), shuffle=False)
        held = elastic.TorchState(sampler=sampler)
        sampler.record_batch(0, 1)
        assert list(sampler) == [1, 3, 5, 7]
    with world(3, 0):
        held.on_reset()
    assert list(sampler) == [2, 5]


class _Number:
    value = 0


class _NumberHandler(state.StateHandler):
    def save(self):
        self.saved = self.value.value

    def restore(self):
        self.value.value = self.saved

    def sync(self):
        self.value.value = 42


def test_users_can_register_their_own_handlers(sent):
    before = state.get_handler_registry()
    state.set_handler_registry([(_Number, _NumberHandler), *before])
    try:
        held = elastic.TorchState(counter=_Number())
    finally:
        state.set_handler_registry(before)
    held.sync()
    held.counter.value = 1
    held.restore()
    held.on_reset()
    assert held.counter.value == 42


# -- the sampler --------------------------------------------------------------------------------------------------


def split(library, samples, size, *, shuffle=True, seed=0, epoch=0, processed=0):
    """Return, for each rank of a world of ``size``, the samples and attributes of its sampler from ``library``."""
    results = []
    for rank in range(size):
        if library == "dualtrain":
            cls, module = elastic.ElasticSampler, sampler
        else:
            import horovod.torch.elastic.sampler as module

            cls = module.ElasticSampler
        with world(size, rank, module):
            one = cls(list(range(samples)), shuffle=shuffle, seed=seed)
            one.load_state_dict({"epoch": epoch, "processed_num": processed})
            names = "epoch processed_num num_replicas rank remaining_indices num_samples total_size seed shuffle"
            results.append((list(one), one.indices, len(one), one.state_dict(), [getattr(one, n) for n in names.split()]))
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_of_samples_is_that_of_horovod(size, shuffle):
    require_horovod()
    for samples, seed, epoch, processed in [(10, 0, 0, 0), (11, 5, 2, 4), (23, 1, 1, 12), (8, 0, 3, 8)]:
        case = functools.partial(
            split, samples=samples, size=size, shuffle=shuffle, seed=seed, epoch=epoch, processed=processed
        )
        assert case("dualtrain") == case("horovod")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_every_sample_is_used_and_all_ranks_get_the_same_number(size):
    for left in range(20):
        parts = [part for part, *_ in split("dualtrain", 20, size, processed=20 - left)]
        assert {len(part) for part in parts} == {-(-left // size)}
        counts = Counter(sample for part in parts for sample in part).values()
        assert len(counts) == left
        assert not counts or max(counts) - min(counts) <= 1


def test_samples_are_repeated_if_they_are_fewer_than_the_ranks():
    parts = [part for part, *_ in split("dualtrain", 10, 5, shuffle=False, processed=8)]
    assert parts == [[8], [9], [8], [9], [8]]


def test_record_batch_may_count_more_samples_than_the_dataset_has():
    with world(4, 1):
        sampler = elastic.ElasticSampler(range(10))
        assert len(sampler) == 3
        for number, batch in enumerate((2, 2)):  # the second batch is short, but its nominal size is recorded
            sampler.record_batch(number, batch)
        assert sampler.processed_num == 16  # more than the 10 samples, as in Horovod
        sampler.load_state_dict(sampler.state_dict())
        assert (list(sampler), len(sampler)) == ([], 0)


def test_an_epoch_uses_every_sample_although_the_world_changes():
    samples, seen, saved = 29, [], {"epoch": 3, "processed_num": 0}
    for size, batches in ((4, 2), (3, 1), (2, 99)):
        for rank in range(size):
            with world(size, rank):
                sampler = elastic.ElasticSampler(range(samples), seed=1)
                sampler.load_state_dict(saved)
                part = list(sampler)
                for number in range(batches):
                    batch = part[2 * number : 2 * number + 2]
                    seen += batch
                    sampler.record_batch(number, len(batch))
        saved = sampler.state_dict()
    assert saved["processed_num"] >= samples
    assert set(seen) == set(range(samples))
    assert len(seen) == samples + 1  # the last split is 7 samples over 2 ranks: one sample is repeated


def test_the_next_epoch_begins_with_all_samples_in_another_order():
    with world(2, 0):
        sampler = elastic.ElasticSampler(range(10))
        first = list(sampler)
        sampler.record_batch(0, 5)
        assert list(sampler) == first  # recorded samples are left out only after a reset
        sampler.set_epoch(1)
        assert (sampler.epoch, sampler.processed_num, len(sampler)) == (1, 0, 5)
        assert list(sampler) != first
        sampler.set_epoch(0)
        assert list(sampler) == first


def test_the_sampler_feeds_a_data_loader_and_its_progress_is_rolled_back(sent):
    sampler = elastic.ElasticSampler(range(10), shuffle=False)
    loader = torch.utils.data.DataLoader(list(range(10)), batch_size=3, sampler=sampler)
    held = elastic.TorchState(sampler=sampler)
    for number, batch in enumerate(loader):
        sampler.record_batch(number, len(batch))
        if number == 1:
            held.commit()
    assert sampler.processed_num >= 10
    held.restore()
    assert sampler.processed_num == 6
    assert [batch.tolist() for batch in loader] == [[6, 7, 8], [9]]
