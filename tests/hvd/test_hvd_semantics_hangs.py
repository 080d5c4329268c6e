"""dualtrain/hvd/README.md#matching-and-errors: calls that must not hang or crash.

Horovod itself hangs or crashes in the calls of ``BODIES``, as tests/launch/test_hangs.py shows.
"""

from __future__ import annotations

import threading
import time
from unittest import mock

import pytest
import torch

from tests.hvd.worlds import OURS_2, OURS_3, library


def alltoall_without_a_dimension(hvd):
    with pytest.raises(ValueError, match="alltoall"):
        hvd.alltoall(torch.tensor(1.0))


def unnamed_calls_of_another_kind_on_one_rank(hvd):
    if hvd.rank() == 0:
        extra = hvd.allgather_async(torch.ones(1))  # noqa: F841 - stays pending
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def unnamed_calls_after_join(hvd):
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(1), name="alone")
    hvd.join()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def a_group_with_a_parameter_that_only_some_ranks_use(hvd):
    p, q = (torch.nn.Parameter(torch.ones(1)) for _ in "pq")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q], 1.0), [("p", p), ("q", q)], groups=[[p, q]])
    (p.sum() + (q.sum() if hvd.rank() == 0 else 0)).backward()
    optimizer.step()
    assert q.item() == 0.5


BODIES = [
    alltoall_without_a_dimension,
    unnamed_calls_of_another_kind_on_one_rank,
    unnamed_calls_after_join,
    a_group_with_a_parameter_that_only_some_ranks_use,
]


def each_in_a_new_world(backend):
    for body in BODIES:
        with library(backend) as hvd:
            body(hvd)


@OURS_2
def test_calls_that_hang_or_crash_in_horovod_return_or_raise_in_dualtrain(real):
    real(each_in_a_new_world)
    real.leave()


def other_parameters(backend):
    """Step with models whose shapes or parameters are different on rank 1. Every step fails, also the second one."""
    with library(backend) as hvd, mock.patch("dualtrain.hvd.pending.BLOCKED_SECONDS", 0.1):
        from dualtrain.hvd import HorovodInternalError

        differs = hvd.rank() == 1
        weight = r"'bias'.*: weight \(float32, \(4, 3\).* on rank 0, weight \(float32, \(5, 3\).* on rank 1"
        for options, other_shape, text in (
            ({}, True, weight),
            ({"op": hvd.Max}, True, r"bias.*: shape \(4,\) on rank 0, \(5,\) on rank 1"),
            ({}, False, r"'bias'.*: bias \(float32, \(4,\).* on rank 0, nothing on rank 1"),
        ):
            model = torch.nn.Linear(3, 5 if differs and other_shape else 4, bias=other_shape or not differs)
            inner = torch.optim.SGD(model.parameters(), 1.0)
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **options)
            model(torch.ones(1, 3)).sum().backward()
            for _ in range(2):
                with pytest.raises(HorovodInternalError, match=text):
                    optimizer.step()
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@OURS_3
def test_optimizers_with_other_parameters_on_a_rank_fail_on_all_ranks(real):
    real(other_parameters)
    real.leave()


def calls_of_a_second_thread(backend):
    """Let rank 0's main thread wait for "main" and rank 1 for "later", until a second thread of rank 0 calls "later"."""
    with library(backend) as hvd, mock.patch("dualtrain.hvd.pending.BLOCKED_SECONDS", 0.1):

        def total(name):
            return hvd.allreduce(torch.ones(1), name=name, op=hvd.Sum).item()

        def second_thread():
            results.append(total("first"))
            time.sleep(2)
            results.append(total("later"))

        results = []
        if hvd.rank() == 0:
            thread = threading.Thread(target=second_thread)
            thread.start()
            while not results:
                time.sleep(0.01)
            results.append(total("main"))
            thread.join()
        else:
            results = [total(name) for name in ("first", "later", "main")]
        assert results == [hvd.size()] * 3


@OURS_2
def test_main_threads_may_wait_while_a_second_thread_makes_calls(real):
    real(calls_of_a_second_thread)
    real.leave()
