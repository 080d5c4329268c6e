"""The layout of gradients in buckets, and the order in which buckets are sent. No test communicates."""

from __future__ import annotations

import random

import torch
from torch import nn

from dualtrain.backends.local import LocalBackend
from dualtrain.gradients import Transfer, layout
from dualtrain.gradients.buckets import make_buckets
from dualtrain.gradients.layout import lay_out
from dualtrain.gradients.schedule import Schedule
from dualtrain.gradients.slots import Slot
from dualtrain.launchers import World
from tests.models_for_tests import conv_net, small_buckets


def alone():
    return LocalBackend(World(), torch.device("cpu"), 60.0)


def test_gradients_are_adjacent_and_have_the_strides_of_their_parameters():
    params = [torch.zeros(2, 3), torch.zeros(4, 2, 3, 3).to(memory_format=torch.channels_last), torch.zeros(3, 2).t()]
    (found,) = lay_out(params)
    assert [each.number for each in found.places] == [2, 1, 0]
    assert [each.offset for each in found.places] == [0, 6, 78]
    assert found.numel == 84
    assert [each.strides for each in found.places] == [params[i].stride() for i in (2, 1, 0)]
    assert (found.dtype, found.device) == (torch.float32, torch.device("cpu"))


def test_a_parameter_with_gaps_in_memory_gets_a_place_without_gaps():
    (found,) = lay_out([torch.zeros(4, 4)[:, ::2]])
    assert found.numel == 8
    assert found.places[0].strides == (2, 1)


def test_the_layout_is_a_function_of_the_parameters_alone():
    params = [torch.zeros(n, dtype=dtype) for n in (3, 5) for dtype in (torch.float32, torch.float64, torch.complex64)]
    with small_buckets((8, 16)):
        found = lay_out(params)
        assert found == lay_out([p.clone() for p in params])
    assert all({params[each.number].dtype for each in bucket.places} == {bucket.dtype} for bucket in found)
    assert sorted(each.number for bucket in found for each in bucket.places) == list(range(6))
    devices = [bucket.device.type for bucket in lay_out([torch.zeros(2), torch.zeros(2, device="meta")])]
    assert devices == ["meta", "cpu"]


def test_a_group_of_parameters_shares_one_bucket_even_above_the_size_limit():
    params = [torch.zeros(4) for _ in range(4)]
    found = lay_out(params, Transfer(groups=[[params[0], params[2]]], bucket_bytes=0))
    assert [[each.number for each in bucket.places] for bucket in found] == [[3], [2, 0], [1]]


# -- the buckets --------------------------------------------------------------------------------------------------


def test_buckets_are_in_reverse_registration_order_and_the_first_is_smaller():
    model = conv_net()
    with small_buckets((600, 4096)):
        slots = [Slot(name, p) for name, p in model.named_parameters()]
        found = make_buckets(slots, 2, alone())
    order = [slot.name for bucket in found for slot in bucket.slots]
    assert order == [name for name, _ in model.named_parameters()][::-1]
    sizes = [sum(slot.param.numel() * slot.param.element_size() for slot in bucket.slots) for bucket in found]
    assert len(found) >= 3
    assert sizes[0] <= 600
    assert all(size <= 4096 or len(bucket.slots) == 1 for size, bucket in zip(sizes, found, strict=True))
    assert [bucket.memory.extra.numel() for bucket in found] == [0] * (len(found) - 1) + [2]
    assert [bucket.name for bucket in found] == [f"gradients.{i}" for i in range(len(found))]
    for bucket in found:
        assert bucket.memory.wire.numel() == sum(slot.param.numel() for slot in bucket.slots) + bucket.memory.extra.numel()
        for slot in bucket.slots:
            assert slot.view.shape == slot.param.shape
            assert slot.view.stride() == slot.param.stride()


def test_the_default_buckets_are_filled_to_their_size_limits():
    first, later = layout.FIRST_BUCKET_BYTES, layout.BUCKET_BYTES
    assert (first, later) == (1 << 20, 25 << 20)
    params = [nn.Parameter(torch.empty(1 << 18, device="meta")) for _ in range(60)]
    found = make_buckets([Slot(str(i), p) for i, p in enumerate(params)], 0, alone())
    sizes = [sum(slot.param.numel() * slot.param.element_size() for slot in bucket.slots) for bucket in found]
    assert sizes[0] == first
    assert sizes[1:-1] == [later] * (len(sizes) - 2)


def test_without_parameters_there_is_a_bucket_only_for_extra_scalars():
    assert make_buckets([], 0, alone()) == []
    (bucket,) = make_buckets([], 3, alone())
    assert bucket.memory.extra.shape == (3,)


# -- the schedule -------------------------------------------------------------------------------------------------


class FakeBucket:
    """Fake bucket of ``count`` gradients, with the attributes and methods that the schedule uses."""

    def __init__(self, count):
        self.slots = [None] * count
        self.pending = count

    def forget_ready(self):
        self.pending = len(self.slots)


def sent_in_a_round(schedule, order):
    """For each entry of ``order``, mark one gradient of that bucket ready, and send buckets as soon as possible.

    Then send the others. Return the indices of the buckets in the order of sending, and how many were sent while gradients
    became ready.
    """
    sent = []
    for bucket in order:
        if schedule.mark_ready(bucket):
            while schedule.next_is_complete:
                sent.append(schedule.buckets.index(schedule.take_next()))
    early = len(sent)
    while schedule.has_unsent:
        sent.append(schedule.buckets.index(schedule.take_next()))
    return sent, early


def test_buckets_are_sent_in_order_whatever_the_order_of_the_gradients():
    rng = random.Random(0)
    for _ in range(50):
        schedule = Schedule()
        schedule.use([FakeBucket(rng.randint(1, 4)) for _ in range(5)])
        ready = [bucket for bucket in schedule.buckets for _ in bucket.slots]
        rng.shuffle(ready)
        assert sent_in_a_round(schedule, ready) == ([0, 1, 2, 3, 4], 5)


def test_an_incomplete_bucket_delays_the_later_ones():
    schedule = Schedule()
    schedule.use([FakeBucket(1), FakeBucket(2), FakeBucket(1)])
    first, second, third = schedule.buckets
    assert sent_in_a_round(schedule, [third, second, first]) == ([0, 1, 2], 1)


def test_forgetting_a_failed_pass_starts_a_new_round():
    schedule = Schedule()
    schedule.use([FakeBucket(2)])
    (bucket,) = schedule.buckets
    assert not schedule.mark_ready(bucket)
    schedule.forget_ready()
    assert (bucket.pending, schedule.round) == (2, 2)
    assert not schedule.mark_ready(bucket)
    assert schedule.mark_ready(bucket)
    assert schedule.take_next() is bucket
    schedule.start_round()
    assert (schedule.next, schedule.round) == (0, 3)
