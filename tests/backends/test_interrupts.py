"""Exceptions such as KeyboardInterrupt during a call: all ranks go on with correct results, or all get an error."""

from __future__ import annotations

import time
from contextlib import suppress
from unittest import mock

import pytest
import torch

from dualtrain import BackendError, DistributedOptimizer, PeerFailedError
from dualtrain.backends import base
from dualtrain.backends.shm import SharedMemoryBackend
from dualtrain.backends.sum_order import SumOrder
from dualtrain.gradients import Transfer
from tests.threads import run_threads


def interrupt_before(owner, name, times=1):
    """Patch ``name`` of ``owner``: each of its first ``times`` calls raises KeyboardInterrupt and does nothing else."""
    original, left = getattr(owner, name), [None] * times

    def interrupted(*args, **kwargs):
        if left:
            left.pop()
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    return mock.patch.object(owner, name, interrupted)


def interrupt_after(owner, name, when=lambda result: True):
    """Patch ``name`` of ``owner``: the first call whose result satisfies ``when`` raises KeyboardInterrupt at its end."""
    original, left = getattr(owner, name), [None]

    def interrupted(*args, **kwargs):
        result = original(*args, **kwargs)
        if left and when(result):
            left.pop()
            raise KeyboardInterrupt
        return result

    return mock.patch.object(owner, name, interrupted)


def after_the_wait_for_a_post(backend, count):
    backend = SharedMemoryBackend(backend)
    backend.timeout = 5.0
    memory = backend.sums
    for number in range(3):
        tensor = torch.full((count,), backend.rank + 1.0)
        if backend.rank == 0:
            semaphores = memory._semaphores
            # try_wait() never succeeds, so this rank must wait for the post.
            with mock.patch.object(semaphores, "try_wait", return_value=False):
                work = backend.start_sum(tensor, f"sum {number}")
                with interrupt_after(memory, "_wait_and_progress", bool), pytest.raises(KeyboardInterrupt):
                    work.wait()
            work.wait()
        else:
            backend.start_sum(tensor, f"sum {number}").wait()
        assert tensor.unique().tolist() == [3.0]


@pytest.mark.parametrize("count", [3, 30000])
def test_an_interrupted_wait_for_a_semaphore_does_not_lose_its_post(count):
    run_threads(2, after_the_wait_for_a_post, count)


def at_the_start(backend):
    backend = SharedMemoryBackend(backend)
    backend.timeout = 5.0
    tensor = torch.ones(3)
    if backend.rank == 0:
        with interrupt_after(backend.sums, "post_ready"), pytest.raises(KeyboardInterrupt):
            backend.start_sum(tensor, "first")
        reason = "sum of 'first' was interrupted by KeyboardInterrupt and cannot continue"
    else:
        backend.start_sum(tensor, "first").wait()  # succeeds, since rank 0 has sent the values of this short sum
        reason = "rank 0 was interrupted in an operation and cannot complete it"
    with pytest.raises(BackendError, match=reason):
        backend.start_sum(tensor, "later").wait()


def test_the_next_sum_fails_on_every_rank_after_an_interrupted_start_of_a_sum():
    run_threads(2, at_the_start)


def call_is_interrupted(backend):
    tensor = torch.ones(3)
    if backend.rank == 0:
        with interrupt_after(backend, "exchange_call"), pytest.raises(KeyboardInterrupt):
            backend.allreduce(tensor, "sum")
        for _ in range(2):
            with pytest.raises(BackendError, match="a collective call on rank 0 was interrupted by KeyboardInterrupt"):
                backend.barrier()
    else:
        # Rank 0 takes part in the comparison of the call, but not in the sum.
        with pytest.raises(PeerFailedError, match="rank 0 stopped: a collective call on rank 0 was interrupted"):
            backend.allreduce(tensor, "sum")


def test_every_rank_gets_an_error_after_one_rank_is_interrupted_in_a_call():
    run_threads(2, call_is_interrupted)


def comparison_times_out(backend):
    """Without the errors, rank 1's first call would get the data of rank 0's second call."""
    if backend.rank == 0:
        backend.timeout = 0.5
        with pytest.raises(BackendError, match=r"waited 0\.5 s for"):
            backend.allgather(torch.zeros(1))
        with pytest.raises(BackendError, match="a collective call on rank 0 failed or timed out, so that"):
            backend.allgather(torch.ones(1))
        return
    deadline = time.monotonic() + 20
    while not backend.watch.peer_failed and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(PeerFailedError, match="rank 0 stopped: a collective call on rank 0 failed or timed out"):
        backend.allgather(torch.zeros(1))


def test_every_rank_gets_an_error_after_a_comparison_timed_out_on_one_rank():
    run_threads(2, comparison_times_out)


def call_in_a_world_of_one_rank_is_interrupted(backend):
    with interrupt_before(backend, "exchange_call"), pytest.raises(KeyboardInterrupt):
        backend.barrier()
    backend.barrier()


def test_a_world_of_one_rank_goes_on_after_an_interrupt():
    run_threads(1, call_in_a_world_of_one_rank_is_interrupted)


def scaling_is_interrupted(backend, tree):
    tensor = torch.ones(3)
    order = SumOrder(backend.size, backend.size)
    work = backend.start_tree_sum(tensor, [], order, "x", 0.5) if tree else backend.start_sum(tensor, "x", 0.5)
    owner, name = (work, "_sum") if tree else (base, "_scale")
    if backend.rank == 0:
        with interrupt_after(owner, name), pytest.raises(KeyboardInterrupt):
            work.wait()
        with pytest.raises(BackendError, match="was interrupted"):
            work.wait()
        backend.abort("ends")
    elif tree:
        work.wait()


@pytest.mark.parametrize("tree", [False, True])
def test_a_wait_that_was_interrupted_after_it_scaled_the_sum_cannot_be_repeated(tree):
    run_threads(3, scaling_is_interrupted, tree)


def _optimizer(backend):
    params = [torch.nn.Parameter(torch.ones(50)) for _ in range(3)]
    plain = torch.optim.SGD(params, lr=0.5)
    return params, DistributedOptimizer(plain, backend=backend, transfer=Transfer(bucket_bytes=200))


def exchange_of_a_step_is_interrupted(backend, method):
    """Interrupt the method ``method`` of some buckets. Repeat the step after each interrupt."""
    params, optimizer = _optimizer(backend)
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            sum((p * (backend.rank + 1.0)).sum() for p in params).backward()
        optimizer.synchronize()
        optimizer.reducer.renew()
        interrupted = 0
        buckets = optimizer.reducer.buckets
        assert len(buckets) == 3
        for bucket in buckets[backend.rank :]:
            original = getattr(bucket, method)

            def interrupt(bucket=bucket, original=original):
                setattr(bucket, method, original)
                raise KeyboardInterrupt

            setattr(bucket, method, interrupt)
        while True:
            try:
                optimizer.step()
                break
            except KeyboardInterrupt:
                interrupted += 1
        assert interrupted == 3 - backend.rank
        assert [p.unique().tolist() for p in params] == [[1 - 0.75 * (step + 1)]] * 3


@pytest.mark.parametrize("method", ["finish", "unpack"])
def test_a_step_whose_exchange_is_interrupted_may_be_repeated(method):
    run_threads(2, exchange_of_a_step_is_interrupted, method)


def gradients_change_after_interrupt(backend):
    params, optimizer = _optimizer(backend)
    for _ in range(2):
        optimizer.zero_grad()
        with optimizer.no_sync():
            sum(p.sum() for p in params).backward()
        optimizer.synchronize()
        optimizer.reducer.renew()
    with interrupt_after(optimizer.reducer.buckets[0], "unpack"), pytest.raises(KeyboardInterrupt):
        optimizer.synchronize()
    optimizer.zero_grad()
    with pytest.raises(BackendError, match=r"the gradient of 'group 0 parameter 1' changed after it was sent"):
        optimizer.step()


def test_a_change_of_gradients_in_an_interrupted_exchange_is_refused():
    run_threads(2, gradients_change_after_interrupt)


def wrapped_step_is_interrupted(backend):
    params, optimizer = _optimizer(backend)
    state = optimizer.state_dict()
    sum(p.sum() for p in params).backward()
    with interrupt_after(optimizer.optimizer, "step"), pytest.raises(KeyboardInterrupt):
        optimizer.step()
    message = "step of the optimizer was interrupted on this rank, whose parameters may differ"
    if backend.size > 1:
        with pytest.raises(BackendError, match=message):
            optimizer.step()
        optimizer.load_state_dict(state)
    optimizer.step()
    assert params[0].unique().tolist() == [0.0]


@pytest.mark.parametrize("size", [1, 2])
def test_after_an_interrupted_step_several_ranks_refuse_a_step_until_load_state_dict(size):
    run_threads(size, wrapped_step_is_interrupted)


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_was_interrupted_at_its_end_is_refused_too(fails):
    """Interrupt the wrapper's first assignment to its attributes after the wrapped step: it records how the step ended.

    With ``fails``, interrupt the end of the wrapped step too.
    """
    ended, set_attribute = [], DistributedOptimizer.__setattr__

    def interrupt(self, name, value):
        if self in ended:
            ended.remove(self)
            raise KeyboardInterrupt
        set_attribute(self, name, value)

    def body(backend):
        params, optimizer = _optimizer(backend)
        original, state = optimizer.optimizer.step, optimizer.state_dict()

        def wrapped_step():
            original()
            ended.append(optimizer)
            if fails:
                raise KeyboardInterrupt

        sum(p.sum() for p in params).backward()
        with mock.patch.object(optimizer.optimizer, "step", wrapped_step), pytest.raises(KeyboardInterrupt):
            optimizer.step()
        with pytest.raises(BackendError, match="step of the optimizer was interrupted on this rank"):
            optimizer.step()
        optimizer.load_state_dict(state)
        optimizer.step()
        assert params[0].unique().tolist() == [0.0]

    with mock.patch.object(DistributedOptimizer, "__setattr__", interrupt):
        run_threads(2, body)


def end_of_backward_is_interrupted(backend):
    params, optimizer = _optimizer(backend)
    for number in range(2):
        with interrupt_before(optimizer.reducer._exchange, "wait", times=number), suppress(KeyboardInterrupt):
            sum(p.sum() for p in params).backward()
        if number == 0:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(BackendError, match=r"an earlier backward pass failed on rank \d, after some .* call synchronize"):
        sum(p.sum() for p in params).backward()
    optimizer.synchronize()
    assert params[0].grad.unique().tolist() == [1.0]


def test_a_backward_pass_after_an_interrupted_one_is_refused_with_the_cure():
    run_threads(2, end_of_backward_is_interrupted)
