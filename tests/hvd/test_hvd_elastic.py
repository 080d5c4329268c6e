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
from dualtrain.hvd.elastic import common, sampler
from dualtrain.hvd.elastic import state as state_module
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
            patches.enter_context(mock.patch.object(state_module, name, call(name)))
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


def step(state):
    loss = state.model(torch.rand(5, 3)).sum() * random.random() * numpy.random.rand()
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()


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
    state = objects(epoch=3, history=[1])
    state.epoch += 1
    assert (state.epoch, state.history) == (4, [1])
    state.restore()
    assert state.epoch == 3


def test_changes_inside_an_object_are_rolled_back_repeatedly():
    history = [[1]]
    state = objects(history=history)
    assert state.history is history
    for _ in range(3):
        state.history[0].append(2)
        state.history.append(3)
        state.restore()
        assert state.history == [[1]]
    state.history.append(4)
    state.commit()
    state.history.clear()
    for _ in range(2):
        state.restore()
        assert state.history == [[1], 4]


def test_an_object_in_two_attributes_is_copied_once():
    shared = [1]
    state = objects(a=shared, b={"a": shared}, c=torch.zeros(2))
    state.c += 1
    state.restore()
    assert state.a is state.b["a"]
    assert state.c.tolist() == [0, 0]


def test_the_error_names_an_object_that_cannot_be_copied():
    with pytest.raises(TypeError, match=r"^the state's 'loss' cannot be committed.*\(.+\): keep plain values"):
        objects(loss=torch.ones(1, requires_grad=True) * 2)


def test_sync_takes_the_roots_objects_and_saves_them():
    state = elastic.ObjectState(lambda obj: {**obj, "epoch": 7, "seen": [1, 2]}, lambda: 1, epoch=0, seen=[])
    state.epoch = 5
    state.sync()
    assert (state.epoch, state.seen) == (7, [1, 2])
    state.epoch = 9
    state.seen.append(3)
    state.restore()
    assert (state.epoch, state.seen) == (7, [1, 2])


def test_sync_sends_the_roots_current_objects_not_its_last_commit():
    bcast = mock.Mock(side_effect=lambda obj: obj)
    state = elastic.ObjectState(bcast, lambda: 0, batch=0)
    state.batch = 15
    state.sync()
    bcast.assert_called_once_with({"batch": 15})
    assert state.batch == 15


def test_without_objects_nothing_is_sent():
    bcast = mock.Mock()
    elastic.ObjectState(bcast, lambda: 0).sync()
    bcast.assert_not_called()


# -- hosts --------------------------------------------------------------------------------------------------------


def skip_sync_of_interrupt(state):
    """Return ``skip_sync`` of the HostsUpdatedInterrupt that a check raises; ``None`` if it raises none."""
    try:
        state.check_host_updates()
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
        ([(0, UPDATES.added)], None),  # not later than the initial timestamp, which is 0
    ],
)
@pytest.mark.parametrize("library", ["dualtrain", "horovod"])
def test_check_host_updates_raises_once_for_all_received_updates(updates, skip_sync, library):
    if library == "dualtrain":
        state = objects(a=1)
    else:
        require_horovod()
        from horovod.common import elastic as real
        from horovod.common.exceptions import HostsUpdatedInterrupt

        state = real.ObjectState(lambda obj: obj, lambda: 0, a=1)
    for timestamp, update in updates:
        state.on_hosts_updated(timestamp, update)
    if library == "dualtrain":
        assert skip_sync_of_interrupt(state) is skip_sync
        assert skip_sync_of_interrupt(state) is None
    elif skip_sync is not None:
        with pytest.raises(HostsUpdatedInterrupt) as caught:
            state.check_host_updates()
        assert caught.value.skip_sync is skip_sync
    state.check_host_updates()


def test_the_root_decides_whether_hosts_have_changed():
    state = objects(a=1)
    state._bcast_object = lambda _: (0, 3, 1)
    assert skip_sync_of_interrupt(state) is True
    state._bcast_object = lambda _: (3, 3, 0)
    state.on_hosts_updated(9, UPDATES.added)
    assert skip_sync_of_interrupt(state) is None


def test_check_host_updates_sends_only_plain_values():
    state = objects(a=1)
    state._bcast_object = mock.Mock(side_effect=lambda obj: obj)
    state.on_hosts_updated(1, UPDATES.mixed)
    assert skip_sync_of_interrupt(state) is False
    ((values,), _) = state._bcast_object.call_args
    assert [type(value) for value in values] == [int, int, int]


def test_commit_saves_before_it_raises():
    state = objects(batch=1)
    state.batch = 2
    state.on_hosts_updated(1, UPDATES.added)
    with pytest.raises(elastic.HostsUpdatedInterrupt):
        state.commit()
    state.restore()
    assert state.batch == 2


def test_a_reset_drops_updates_and_runs_the_callbacks_in_order():
    state, seen = objects(a=1), []
    state.register_reset_callbacks([lambda: seen.append(1), lambda: seen.append(2)])
    state.register_reset_callbacks([lambda: seen.append(3)])
    state.reset = lambda: seen.append(0)
    state.on_hosts_updated(1, UPDATES.added)
    state.on_reset()
    assert seen == [0, 1, 2, 3]
    assert skip_sync_of_interrupt(state) is None


# -- run ----------------------------------------------------------------------------------------------------------


def recorded(fail_in_sync=()):
    """Return a state that records the methods that ``run`` calls. The first calls of ``sync`` raise the given errors."""
    state = mock.Mock()
    state.sync.side_effect = [*fail_in_sync, *[None] * 9]
    return state


def methods_of(state):
    return [call[0] for call in state.method_calls]


def attempts(*outcomes):
    """Return a training function that raises or returns the next of ``outcomes`` in each call."""
    left = deque(outcomes)

    @elastic.run
    def train(state, *args, **kwargs):
        """Train."""
        state.train(*args, **kwargs)
        outcome = left.popleft()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return train


def test_run_syncs_trains_and_returns(resets):
    state, train = recorded(), attempts("done")
    assert train(state, 1, two=2) == "done"
    assert methods_of(state) == ["sync", "train"]
    state.train.assert_called_once_with(1, two=2)
    assert resets.method_calls == []
    assert (train.__name__, train.__doc__) == ("train", "Train.")


def test_after_a_failed_collective_the_state_is_restored_and_synced(resets):
    state = recorded()
    assert attempts(elastic.HorovodInternalError("lost"), "done")(state) == "done"
    assert methods_of(state) == ["sync", "train", "restore", "on_reset", "sync", "train"]
    assert resets.method_calls == [mock.call.shutdown(), mock.call.init()]


def test_the_notification_manager_is_initialized_before_training(resets, monkeypatch):
    order = []
    monkeypatch.setattr(common.notification_manager, "init", lambda: order.append("init"))
    common.run_fn(lambda state: order.append("train"), resets.init)(recorded())
    assert order == ["init", "train"]


def test_a_failed_sync_is_repeated(resets):
    state = recorded([elastic.HorovodInternalError("lost")] * 2)
    assert attempts("done")(state) == "done"
    assert methods_of(state) == ["sync", "restore", "on_reset"] * 2 + ["sync", "train"]
    assert len(resets.method_calls) == 4


@pytest.mark.parametrize("skip_sync", [True, False])
def test_after_a_change_of_hosts_nothing_is_restored(resets, skip_sync):
    state = recorded()
    assert attempts(elastic.HostsUpdatedInterrupt(skip_sync), "done")(state) == "done"
    assert methods_of(state) == ["sync", "train", "on_reset", *["sync"] * (not skip_sync), "train"]
    assert resets.method_calls == [mock.call.shutdown(), mock.call.init()]


def test_a_failed_collective_after_a_skipped_sync_causes_a_sync(resets):
    state = recorded()
    attempts(elastic.HostsUpdatedInterrupt(True), elastic.HorovodInternalError("lost"), "done")(state)
    assert methods_of(state) == ["sync", "train", "on_reset", "train", "restore", "on_reset", "sync", "train"]


def test_other_errors_are_raised_to_the_caller(resets):
    state = recorded()
    with pytest.raises(RuntimeError, match="mine"):
        attempts(RuntimeError("mine"))(state)
    assert methods_of(state) == ["sync", "train"]
    assert resets.method_calls == []
    assert state not in common.notification_manager._listeners


def test_updates_reach_the_state_of_the_running_training(resets, sent):
    state, epochs = elastic.TorchState(epoch=0), []

    @elastic.run
    def train(state):
        while state.epoch < 3:
            epochs.append(state.epoch)
            state.epoch += 1
            if len(epochs) == 2:
                common.notification_manager.handle_hosts_updated(1, UPDATES.added)
            state.check_host_updates()

    train(state)
    assert epochs == [0, 1, 2]
    resets.init.assert_called_once_with()
    common.notification_manager.handle_hosts_updated(2, UPDATES.added)  # no state is registered any more
    assert skip_sync_of_interrupt(state) is None


# -- models, optimizers, schedulers -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_repeated_after_a_restore_give_the_same_bits(sent, kind):
    state = training(kind)
    for _ in range(2):
        step(state)
    state.commit()
    ends = []
    for _ in range(3):
        for _ in range(3):
            step(state)
        ends.append(copy.deepcopy((state.model.state_dict(), state.optimizer.state_dict())))
        state.restore()
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
    state = training(kind)
    start = copy.deepcopy(state.model.state_dict())
    for _ in range(2):
        step(state)
        assert state.optimizer.state
        state.restore()
        assert not state.optimizer.state
        assert_same(dict(state.model.state_dict()), dict(start))


def test_options_of_the_optimizer_are_rolled_back(sent):
    state = training("adamw")
    state.optimizer.param_groups[0]["lr"].mul_(2)
    state.optimizer.param_groups[0]["weight_decay"] = 9
    state.restore()
    group = state.optimizer.param_groups[0]
    assert (group["lr"].item(), group["weight_decay"]) == (pytest.approx(0.1), 0.1)


# Before torch 2.9, SequentialLR itself causes this warning: it passes an epoch to other schedulers.
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_are_rolled_back(sent, kind):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
    scheduler = SCHEDULERS[kind](optimizer)
    state = elastic.TorchState(optimizer=optimizer, scheduler=scheduler)

    def rates(steps):
        values = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            values.append(optimizer.param_groups[0]["lr"])
        return values

    rates(1)
    state.commit()
    first = rates(4)
    for _ in range(2):
        state.restore()
        assert rates(4) == first


def test_schedulers_are_synced(sent):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    scheduler = lr_scheduler.MultiStepLR(optimizer, [1])
    state = elastic.TorchState(scheduler=scheduler)
    root = {**scheduler.state_dict(), "last_epoch": 5}
    with mock.patch.object(state_module, "broadcast_object", lambda obj: root if "last_epoch" in obj else obj):
        state.sync()
    assert scheduler.last_epoch == 5
    scheduler.last_epoch = 6
    state.restore()
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
    state = elastic.TorchState(model)
    for _ in range(2):
        model.seen.append(1)
        state.restore()
        assert model.seen == []


def test_random_numbers_are_rolled_back(sent):
    def draw():
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    state = elastic.TorchState(epoch=0)
    draw()
    state.commit()
    first = draw()
    state.sync()  # sync saves the state too
    second = draw()
    assert second != first
    for _ in range(2):
        state.restore()
        assert draw() == second


def test_the_gpus_generator_state_is_saved_only_if_cuda_is_initialized(sent):
    with mock.patch.object(state_module.torch, "cuda") as cuda:
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
    state = training(sampler=sampler, epoch=2)
    state.sync()
    assert [name for name, _, _ in sent] == [
        "broadcast_object",
        "broadcast_parameters",
        "broadcast_optimizer_state",
        "broadcast_object",
    ]
    assert sent[0][1] == {"epoch": 0, "processed_num": 0}
    assert list(sent[1][1]) == list(state.model.state_dict())
    assert sent[2][1] is state.optimizer
    assert sent[1][2] == sent[2][2] == {"root_rank": 0}
    assert sent[3][1] == {"epoch": 2}


def test_a_restore_after_a_sync_returns_to_the_synced_state(sent):
    state = training()

    def from_root(parameters, root_rank):
        for value in parameters.values():
            value.fill_(3)

    with mock.patch.object(state_module, "broadcast_parameters", from_root):
        state.sync()
    step(state)
    state.restore()
    assert {value.unique().item() for value in state.model.state_dict().values()} == {3.0}


def test_a_second_model_replaces_the_first(sent):
    state = training()
    other = torch.nn.Linear(2, 2)
    weight = other.weight.clone()
    state.model = other
    with torch.no_grad():
        other.weight.zero_()
    state.restore()
    assert state.model is other
    assert torch.equal(other.weight, weight)


def test_a_model_that_is_assigned_later_gets_a_handler(sent):
    state = elastic.TorchState(epoch=0)
    model = torch.nn.Linear(2, 2)
    state.model = model
    weight = model.weight.clone()
    state.commit()
    with torch.no_grad():
        model.weight.zero_()
    state.restore()
    assert state.model is model
    assert torch.equal(model.weight, weight)
    state.sync()
    assert [(name, obj) for name, obj, _ in sent if name == "broadcast_object"][-1][1] == {"epoch": 0, "optimizer": None}


def test_only_objects_that_the_constructor_got_are_part_of_the_state(sent):
    state = elastic.TorchState(epoch=0)
    state.helper, state.count = torch.nn.Linear(2, 2), 0
    state.commit()
    with torch.no_grad():
        state.helper.weight.zero_()
    state.count = 1
    state.sync()
    state.restore()
    assert (state.helper.weight.any().item(), state.count) == (False, 1)
    assert sent[-1][1] == {"epoch": 0, "model": None, "optimizer": None}


def test_a_reset_splits_the_samples_again_without_a_sync(sent):
    with world(2, 1):
        sampler = elastic.ElasticSampler(range(8), shuffle=False)
        state = elastic.TorchState(sampler=sampler)
        sampler.record_batch(0, 1)
        assert list(sampler) == [1, 3, 5, 7]
    with world(3, 0):
        state.on_reset()
    assert list(sampler) == [2, 5]


class _Number:
    value = 0


class _NumberHandler(state_module.StateHandler):
    def save(self):
        self.saved = self.value.value

    def restore(self):
        self.value.value = self.saved

    def sync(self):
        self.value.value = 42


def test_users_can_register_their_own_handlers(sent):
    before = state_module.get_handler_registry()
    state_module.set_handler_registry([(_Number, _NumberHandler), *before])
    try:
        state = elastic.TorchState(counter=_Number())
    finally:
        state_module.set_handler_registry(before)
    state.sync()
    state.counter.value = 1
    state.restore()
    state.on_reset()
    assert state.counter.value == 42


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
    state = elastic.TorchState(sampler=sampler)
    for number, batch in enumerate(loader):
        sampler.record_batch(number, len(batch))
        if number == 1:
            state.commit()
    assert sampler.processed_num >= 10
    state.restore()
    assert sampler.processed_num == 6
    assert [batch.tolist() for batch in loader] == [[6, 7, 8], [9]]
