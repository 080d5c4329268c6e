"""Reductions through shared memory: values, order of the sum, failures, freed memory.

``library`` is the backend below the shared memory: torch, Horovod or threads.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache, partial, reduce
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from dualtrain import BackendError, PeerFailedError, PeerFailure, ReduceOp
from dualtrain.backends import factory
from dualtrain.backends.base import FOLD
from dualtrain.backends.comparison import agree_on_list
from dualtrain.backends.shm import SharedMemoryBackend, UnsharedError, segment
from dualtrain.backends.shm.buffers import Buffers
from dualtrain.backends.sum_order import sum_order
from tests.conftest import require_horovod
from tests.short_waits import short_waits
from tests.threads import run_threads, switch_interval

CPU = torch.device("cpu")
#: Sizes around the boundaries of shards and of the staging buffer.
SIZES = (1, 63, 64, 65, 129, 1000, 262143, 262144, 300001)
HOSTS = {"one host": (0, 0, 0), "two hosts": (0, 0, 1, 1), "two hosts, mixed": (0, 1, 1, 0, 0, 1)}


@cache
def values(rank, count, dtype):
    """Return the values of a rank. Callers must not change this tensor, because it is cached."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(-9, 9, (count,), generator=generator, dtype=dtype)


def share_memory(backend, hosts):
    """Return a shared-memory backend over ``backend``, as if its ranks were on the given hosts (one entry per rank)."""
    backend.hosts = hosts
    backend.world = backend.world.placed(backend.rank, hosts)
    shared = factory._share_memory(backend, "shm")
    assert isinstance(shared, SharedMemoryBackend)
    return shared


def expected(backend, hosts, op, count, dtype):
    """Reduce in rank order inside each host, then in the order of the hosts."""
    parts = [values(rank, count, dtype) for rank in range(backend.size)]
    inside = [reduce(FOLD[op], [p for p, h in zip(parts, hosts, strict=True) if h == host]) for host in sorted(set(hosts))]
    return reduce(FOLD[op], inside)


def check_reductions(backend, hosts, op, dtype, sizes=SIZES):
    if backend.name == "threads":
        backend = share_memory(backend, hosts)
    for count, factor, tail in itertools.product(sizes, (1.0, 0.25), (0, 1)):
        if factor != 1 and not dtype.is_floating_point:
            continue
        want = expected(backend, hosts, op, count, dtype)
        want[: count - tail] *= factor if dtype.is_floating_point else 1
        buffer = backend.new_buffer(count, dtype, CPU)
        assert not buffer.any()
        for tensor in (buffer, torch.empty(count, dtype=dtype)):
            tensor.copy_(values(backend.rank, count, dtype))
            work = backend.sums.start(tensor, op, "values", factor, tail)
            work.wait()
            work.wait()
            assert work.done()
            assert torch.equal(tensor, want), (count, factor, tail)


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS.keys())
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN])
def test_reductions_are_in_rank_order_on_each_host_then_in_host_order(hosts, op):
    run_threads(len(hosts), check_reductions, hosts, op, torch.float32)


def test_every_operation_on_every_dtype(shared):
    """Reduce short tensors, and a long one that is reduced by shards. (The test above covers all lengths in ``SIZES``.)"""
    dtypes = torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.bfloat16
    hosts = (0,) * shared.size
    shared.each(check_reductions, [(hosts, op, dtype, (1, 65, 1000, 300001)) for op in FOLD for dtype in dtypes])


def bits_of(backend):
    found = []
    for count in (5, 1000, 70000):
        tensor = values(backend.rank, count, torch.float32)
        found.append(backend.allreduce(tensor, "average").tolist())
    return found


def test_two_ranks_get_the_same_bits_as_over_gloo(pool):
    found = []
    for name in ("torch", "shm"):
        pool.connect(name, 2)
        found.append(pool.run(bits_of))
    assert found[0] == found[1]


def interleaved(backend):
    """Run short and long sums at the same time, on shared buffers and other tensors. Each rank waits in its own order."""
    generator = torch.Generator().manual_seed(backend.rank)
    buffers = [backend.new_buffer(count, torch.float32, CPU) for count in (1000, 5001, 1002, 5003)]
    for step in range(30):
        tensors = [*buffers, torch.empty(400000), torch.empty(3)]
        works = []
        for n in (0, 4, 1, 2, 5, 3):
            tensors[n].fill_(backend.rank + n + step)
            works.append((n, backend.start_sum(tensors[n], f"t{n}")))
        if step % 3 == 0:
            assert backend.exchange([backend.rank, step]) == [[rank, step] for rank in range(backend.size)]
        for index in torch.randperm(len(works), generator=generator).tolist():
            n, work = works[index]
            if step % 2:
                while not work.done():
                    time.sleep(0)
            work.wait()
            want = sum(rank + n + step for rank in range(backend.size))
            assert bool((tensors[n] == want).all())
    rows = backend.exchange([backend.rank] * 1000)  # too many numbers for the slots: the library exchanges them
    assert rows == [[rank] * 1000 for rank in range(backend.size)]


def test_ranks_may_wait_for_operations_in_any_order(shared):
    shared(interleaved)


def threads_interleave(backend):
    backend = share_memory(backend, (0, 0, 1, 1))
    interleaved(backend)


def test_ranks_on_several_hosts_may_wait_for_operations_in_any_order():
    run_threads(4, threads_interleave)


def held(kind):
    if kind == "descriptors":
        return sorted(os.listdir("/proc/self/fd"))[:-1]  # one less, because listdir itself opens a descriptor
    return sum("memfd:dualtrain" in line for line in Path("/proc/self/maps").read_text().splitlines())


def frees_memory(backend):
    before = held("maps"), len(held("descriptors"))
    buffers = [backend.new_buffer(1000, torch.float32, CPU) for _ in range(3)]
    assert (held("maps"), len(held("descriptors"))) == (before[0] + 3, before[1])
    for buffer in buffers:
        backend.start_sum(buffer, "b").wait()
    regions = len(backend.sums.buffers._regions)
    del buffers, buffer
    assert len(backend.sums.buffers._regions) == regions - 3
    assert held("maps") == before[0]
    # Ignore folders that `horovodize --prove` makes for Open MPI: a test in another pytest-xdist worker may use one now.
    return [name for name in os.listdir("/dev/shm") if "dualtrain" in name and not name.startswith("dualtrain-prove-")]


def test_buffers_free_their_shared_memory_and_leave_no_file(shared):
    assert shared(frees_memory) == [[]] * shared.size


def late(backend):
    """Start a sum on all ranks except rank 0."""
    backend.timeout = 1.0
    tensor = torch.ones(3)
    if backend.rank == 0:
        time.sleep(2.0)
        return
    work = backend.start_sum(tensor, "t")
    message = r"sum of 't' \(waiting for rank 0\) failed on rank \d of \d: waited 1 s"
    with pytest.raises(BackendError, match=message) as caught:
        work.wait()
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert work.done()
    with pytest.raises(BackendError, match="waited 1 s"):
        work.wait()
    for call in (lambda: backend.start_sum(tensor, "next"), lambda: backend.exchange([1])):
        with pytest.raises(BackendError, match="waited 1 s"):
            call()


def threads_late(backend):
    backend = share_memory(backend, (0,) * backend.size)
    late(backend)


def test_when_a_sum_times_out_the_error_names_the_rank_that_did_not_start_it():
    run_threads(2, threads_late)


def interrupted(backend, count):
    """Raise KeyboardInterrupt on rank 0: first in a wait, which can be repeated, then within a sum, which cannot."""
    library, backend = backend, share_memory(backend, (0,) * backend.size)
    tensor, interrupt = torch.ones(count), mock.Mock(side_effect=KeyboardInterrupt)
    if backend.rank == 0:
        work = backend.start_sum(tensor, "first")
        with mock.patch.object(backend.sums._semaphores, "timed_wait", interrupt), pytest.raises(KeyboardInterrupt):
            work.wait()
    library.exchange([0])
    if backend.rank:
        work = backend.start_sum(tensor, "first")
    work.wait()
    assert tensor.unique().tolist() == [backend.size]
    if backend.rank == 0:
        with mock.patch.object(backend.sums, "_check_tags", interrupt), pytest.raises(KeyboardInterrupt):
            backend.start_sum(tensor, "second").wait()
        message = "sum of 'second' was interrupted by KeyboardInterrupt and cannot continue"
    else:
        work = backend.start_sum(tensor, "second")
        with suppress(BackendError):  # a short sum may succeed, because rank 0 has already written its values
            work.wait()
        message = "rank 0 was interrupted in an operation and cannot complete it"
    for _ in range(2):
        with pytest.raises(BackendError, match=message):
            backend.start_sum(tensor, "later").wait()


@pytest.mark.parametrize("count", [3, 300001])
def test_after_an_interruption_within_a_sum_all_later_sums_fail_on_every_rank(count):
    run_threads(2, interrupted, count)


def fails_in_a_sum(backend, second_error, report):
    """On rank 0, raise an error in a sum, and ``second_error`` when the backend looks for its cause.

    The errors of later sums end with ``report``.
    """
    library, backend = backend, share_memory(backend, (0,) * backend.size)
    if backend.rank:
        backend.start_sum(torch.ones(3), "t")
    library.exchange([0])
    if backend.rank == 0:
        with (
            mock.patch.object(backend.sums, "_check_tags", side_effect=RuntimeError("no memory")),
            mock.patch.object(library, "failure", side_effect=second_error),
            pytest.raises(type(second_error)),
        ):
            backend.start_sum(torch.ones(3), "t")
        kind = PeerFailedError if isinstance(second_error, PeerFailedError) else BackendError
        with pytest.raises(kind, match=f"^sum of 'later' cannot be done after an earlier failure: {report}$"):
            backend.start_sum(torch.ones(3), "later")
    library.exchange([1])


def test_after_an_error_in_a_sum_and_the_failure_of_a_rank_all_later_sums_fail():
    run_threads(2, fails_in_a_sum, PeerFailedError("rank 1 died", PeerFailure(1, "died")), "rank 1 died")


def test_after_an_error_in_a_sum_and_an_interrupt_all_later_sums_fail():
    run_threads(2, fails_in_a_sum, KeyboardInterrupt(), "sum of 't' failed: no memory")


def late_for_the_comparison(backend):
    backend = share_memory(backend, (0,) * backend.size)
    backend.timeout = 1.0
    if backend.rank == 0:
        time.sleep(2.0)
    else:
        with pytest.raises(BackendError, match=r"comparing calls .*\(waiting for rank 0\)"):
            backend.exchange([1])


def test_when_a_comparison_of_calls_times_out_the_error_names_the_missing_rank():
    run_threads(2, late_for_the_comparison)


def in_any_mode(backend):
    tensor = torch.ones(500)
    group = backend.group(range(backend.size))  # the group's calls do not use shared memory
    with torch.inference_mode():
        assert group.allreduce(tensor, "sum").tolist() == [backend.size] * 500
        inside = torch.full((500,), 1.0)
        assert backend.allreduce(inside, "sum").tolist() == [backend.size] * 500
        assert backend.allreduce_async(inside, "sum").wait().tolist() == [backend.size] * 500
        buffer = backend.new_buffer(7, torch.float32, CPU)
    for each in (backend, group):
        assert each.allreduce(tensor, "sum").tolist() == [backend.size] * 500
    buffer.fill_(1.0)
    backend.start_sum(buffer, "b").wait()
    with torch.inference_mode():
        backend.start_sum(buffer, "b").wait()
    assert buffer.tolist() == [backend.size**2] * 7


def test_reductions_work_inside_and_outside_of_inference_mode(shared):
    shared(in_any_mode)


def buffer_on_rank_zero(backend):
    """Reduce a tensor that is part of a shared buffer on rank 0, and an ordinary tensor on the other ranks."""
    buffer = backend.new_buffer(1000, torch.float32, CPU)
    tensor = buffer[:3] if backend.rank == 0 else torch.empty(3)
    tensor.fill_(backend.rank + 1)
    backend.allreduce_(tensor, "sum")
    assert tensor.tolist() == [sum(range(1, backend.size + 1))] * 3


def test_a_slice_of_a_buffer_is_reduced_like_an_ordinary_tensor(shared):
    shared(buffer_on_rank_zero)


def other_calls(backend):
    call = backend.barrier if backend.rank == 0 else partial(agree_on_list, backend, "parameters", ["a"])
    for _ in range(3):
        with pytest.raises(BackendError, match="do not agree on a collective call"):
            call()
        assert backend.allreduce(torch.tensor([1]), "sum").tolist() == [backend.size]


def test_different_calls_are_an_error_on_all_ranks_and_the_backend_stays_usable(shared):
    shared(other_calls)


def short_among_other_calls(backend):
    """Reduce short tensors after mismatched calls, and with a sum pending. In each step, a different rank is late."""
    last = backend.rank == backend.size - 1
    for step in range(12):
        values = torch.arange(5.0) + 10 * backend.rank + step
        with pytest.raises(BackendError, match=r"average \(float32, 5\); rank \d: (barrier|average \(float32, 4\))"):
            backend.allreduce(values[:4]) if last and step % 2 else backend.barrier() if last else backend.allreduce(values)
        pending = backend.start_sum(torch.full((step * 2000 + 1,), float(backend.rank)), "pending")
        if step % backend.size == backend.rank:
            time.sleep(0.005)
        for shift in range(3):
            found = backend.allreduce(values + shift, "sum")
            want = [sum(n + 10 * rank + step + shift for rank in range(backend.size)) for n in range(5)]
            assert found.tolist() == want
        pending.wait()


def test_short_reductions_are_correct_after_mismatched_calls(shared):
    shared(short_among_other_calls)


def different_sum(backend, name, count):
    """Start a sum on every rank, a different one on the last rank; return the error."""
    backend = share_memory(backend, (0,) * backend.size)
    last = backend.rank == backend.size - 1
    tensor = torch.ones(count if last else 3)
    with pytest.raises(BackendError) as caught:
        backend.start_sum(tensor, name if last else "t").wait()
    with pytest.raises(BackendError, match="after an earlier failure"):
        backend.start_sum(tensor, "t")
    return str(caught.value)


@pytest.mark.parametrize(("name", "count"), [("u", 3), ("t", 4)])
def test_a_different_sum_on_one_rank_is_an_error_on_every_rank(name, count):
    for said in run_threads(3, different_sum, name, count):
        assert (
            f"(rank 0: sum of 't' (float32, 3); rank 1: sum of 't' (float32, 3); rank 2: sum of '{name}' (float32" in said
        )


def done_after_a_failure(backend):
    """Start different sums, first on rank 0. Assert that rank 0's is done, and fails, once rank 1 has started its own."""
    library, backend = backend, share_memory(backend, (0,) * backend.size)
    if backend.rank == 0:
        work = backend.start_sum(torch.ones(3), "t")
        assert not work.done()
        library.exchange([0])
        library.exchange([1])
        assert work.done()
        with pytest.raises(BackendError, match="the ranks are in different operations"):
            work.wait()
    else:
        library.exchange([0])
        with suppress(BackendError):
            backend.start_sum(torch.ones(3), "u")
        library.exchange([1])


def test_a_failed_sum_is_done_and_raises_in_wait():
    run_threads(2, done_after_a_failure)


def many_pending(backend, count):
    backend = share_memory(backend, (0,) * backend.size)
    buffers = [backend.new_buffer(count, torch.float32, CPU) for _ in range(150)]
    for buffer in buffers:
        buffer.fill_(1.0)
    works = [backend.start_sum(buffer, f"b{n}") for n, buffer in enumerate(buffers)]
    for work in works[:: 1 if backend.rank == 0 else -1]:
        work.wait()
    assert all(buffer.tolist() == [backend.size] * count for buffer in buffers)


@pytest.mark.parametrize("count", [2, 5000])
def test_more_operations_than_tags_may_be_pending(count):
    run_threads(2, many_pending, count)


def group_between(backend):
    """On rank 0, wait for the sum before the group's call; on the other ranks, after the call."""
    group = backend.group(range(backend.size))
    tensor = torch.ones(5)
    work = backend.start_sum(tensor, "t")
    for step in ("wait", "call")[:: 1 if backend.rank == 0 else -1]:
        if step == "wait":
            work.wait()
        else:
            group.barrier()
    assert tensor.tolist() == [backend.size] * 5


def sum_beside_a_call(backend):
    """On rank 0, start a sum before a call; on the other ranks, after the call.

    There are two such calls, which both use the library: one of a group, and one with too many numbers for shared memory.
    """
    group = backend.group(range(backend.size))
    tensor = torch.ones(5000)
    for call in (group.barrier, partial(backend.exchange, [1] * 1000)):
        if backend.rank:
            call()
        work = backend.start_sum(tensor, "t")
        if not backend.rank:
            call()
        work.wait()
    assert tensor.unique().tolist() == [backend.size**2]


def test_ranks_may_order_a_sum_and_the_librarys_calls_differently(shared):
    shared(sum_beside_a_call)


def sum_beside_a_call_of_a_channel(backend, sum_backend, call_backend):
    """On rank 0, wait for the sum of one backend before the call of another; on rank 1, after the call."""
    library, backend = backend, share_memory(backend, (0,) * backend.size)
    channel = backend.channel()
    backends = [backend, channel, channel.channel(), backend.group([0, 1]).channel()]
    for each in backends:
        each.timeout = 5.0
    tensor = torch.ones(5000)
    if backend.rank == 1:
        work = backends[sum_backend].start_sum(tensor, "t")
    library.exchange([0])  # rank 1 has started the sum, and must reduce its shard of the sum during the barrier
    if backend.rank == 0:
        backends[sum_backend].start_sum(tensor, "t").wait()
    backends[call_backend].barrier()
    if backend.rank == 1:
        work.wait()
    assert tensor.unique().tolist() == [backend.size]
    backend.close()
    assert backend._sum_memories == []


@pytest.mark.parametrize(("sum_backend", "call_backend"), [(0, 1), (1, 0), (0, 2), (2, 0), (0, 3), (1, 3)])
def test_ranks_may_order_a_sum_and_a_call_of_another_channel_differently(sum_backend, call_backend):
    run_threads(2, sum_beside_a_call_of_a_channel, sum_backend, call_backend)


def sums_of_two_channels(backend, hosts):
    """Start a sum of one backend on all ranks, and then a sum of another backend.

    Half of the ranks wait for the second sum first. The other half start the second sum only after the first has ended.
    """
    backend = share_memory(backend, hosts)
    backends = [backend, backend.channel()]
    for each in backends:
        each.timeout = 5.0
    for step in range(4):
        first, second = backends[:: 1 if step % 2 else -1]
        tensors = torch.ones(5000), torch.ones(5000)
        work = first.start_sum(tensors[0], "t")
        if backend.rank < backend.size // 2:
            second.start_sum(tensors[1], "t").wait()
            work.wait()
        else:
            work.wait()
            second.start_sum(tensors[1], "t").wait()
        assert [tensor.unique().tolist() for tensor in tensors] == [[backend.size]] * 2


@pytest.mark.parametrize("hosts", [(0, 0), (0, 0, 1, 1)], ids=["one host", "two hosts"])
def test_ranks_may_wait_for_the_sums_of_two_channels_in_different_orders(hosts):
    run_threads(len(hosts), sums_of_two_channels, hosts)


def test_channels_may_be_closed_in_several_threads():
    """Close channels of one backend in several threads at once. The channels are fakes without shared memory."""
    sum_memories = []

    def close_in_turn(_):
        for _ in range(2000):
            # An ExitStack stands for a memory, since it has a method ``close``.
            channel = SimpleNamespace(_sum_memories=sum_memories, sums=ExitStack(), calls=ExitStack())
            sum_memories.append(channel.sums)
            SharedMemoryBackend.release(channel)

    with switch_interval(1e-6), ThreadPoolExecutor(4) as threads:
        list(threads.map(close_in_turn, range(4)))
    assert sum_memories == []


def test_a_channel_over_horovod_may_have_several_hosts(pool):
    """Horovod refuses a second process set of the same ranks: the channel must use that of its backend."""
    require_horovod()
    pool.connect("horovod", 4)
    pool.run(sums_of_two_channels, (0, 0, 1, 1))
    pool.disconnect()  # the next test needs a world on one host


def asynchronous_group_call(backend):
    """On rank 0, wait for the group's call before the next call; on the other ranks, after the next call."""
    group, tensor = backend.group(range(backend.size)), torch.ones(3)
    for _ in range(10):
        work = group.allreduce_async(tensor, "sum")
        if backend.rank == 0:
            work.wait()
        assert backend.allreduce(tensor, "sum").tolist() == work.wait().tolist() == [backend.size] * 3


def test_an_asynchronous_call_of_a_group_runs_during_other_calls(shared):
    shared(asynchronous_group_call)


def short_group_call(backend):
    group = backend.group(range(backend.size))
    with mock.patch.object(
        group, "start_allreduce", side_effect=AssertionError("the tensor was not sent with the comparison")
    ):
        assert group.allreduce(torch.ones(3), "sum").tolist() == [backend.size] * 3


def test_a_group_sends_a_short_tensor_in_the_comparison_of_calls(shared):
    shared(short_group_call)


def test_a_groups_call_does_not_block_a_sum(shared):
    shared(group_between)


def closes(backend):
    backend = share_memory(backend, (0,) * backend.size)
    backend.sums.close()
    with pytest.raises(BackendError, match=r"sum of 't' cannot be done: this backend is closed"):
        backend.start_sum(torch.ones(3), "t")


def test_a_sum_on_a_closed_backend_is_refused():
    run_threads(2, closes)


def dies(backend):
    backend.start_sum(torch.ones(3), "first").wait()
    if backend.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with short_waits(backend), pytest.raises(BackendError, match=r"sum of 'last' .*rank 0"):
        backend.start_sum(torch.ones(3), "last").wait()
    with pytest.raises(PeerFailedError, match="after an earlier failure") as caught:
        backend.start_sum(torch.ones(3), "after it")
    assert caught.value.failure.rank == 0
    assert time.monotonic() - began < backend.timeout / 2
    raise BackendError("the expected failure")


def test_a_rank_that_dies_is_reported_by_the_others(shared, pool):
    pool.connect(shared.name, shared.size)
    outcomes = pool.outcomes(dies)
    assert "died with exit code -9" in outcomes[0].error
    assert all("the expected failure" in outcome.error for outcome in outcomes[1:])


FAULTS = {
    "no memory": (
        "os.memfd_create",
        OSError(12, "Cannot allocate memory"),
        "bytes of shared memory: Cannot allocate memory",
    ),
    "too little memory": (
        "os.posix_fallocate",
        OSError(28, "No space left on device"),
        "bytes of shared memory: No space left",
    ),
    "a peer has no permission": ("_open", PermissionError(13, "Permission denied"), ": Permission denied"),
    "wrong process": ("os.pread", b"\1" * 8, "its PID belongs to another process in this container"),
}


def falls_back(backend):
    assert factory._share_memory(backend, "shm") is backend
    tensor = torch.full((3,), float(backend.rank))
    backend.start_sum(tensor, "t").wait()
    assert tensor.tolist() == [1.0] * 3
    return backend.transport


@pytest.mark.parametrize("fault", FAULTS)
def test_a_shared_memory_fault_falls_back_to_the_library_with_one_warning(monkeypatch, caplog, fault):
    name, result, said = FAULTS[fault]

    def fails(*_):
        if isinstance(result, OSError):
            raise result
        return result

    monkeypatch.setattr(f"{segment.__name__}.{name}", fails)
    assert run_threads(2, falls_back) == ["memory"] * 2
    lines = [message for message in caplog.messages if "shared memory cannot be used" in message]
    assert len(lines) == 1
    assert said in lines[0]


def fails_while_sharing(backend):
    if backend.rank == 1:
        backend.abort("RuntimeError: boom")
    else:
        with short_waits(backend), pytest.raises(BackendError, match="rank 1 stopped: RuntimeError: boom"):
            factory._share_memory(backend, "shm")


def test_a_rank_that_fails_while_memory_is_mapped_is_named(caplog):
    run_threads(2, fails_while_sharing)
    assert "cannot be used" not in caplog.text


def uneven(backend):
    backend.hosts = (0, 0, 1)
    backend.world = backend.world.placed(backend.rank, backend.hosts)
    assert factory._share_memory(backend, "shm") is backend


def test_hosts_with_unequal_numbers_of_ranks_use_the_library(caplog):
    run_threads(3, uneven)
    assert "the hosts do not have equally many ranks" in caplog.text


def memory_runs_out(backend):
    backend = share_memory(backend, (0, 0))
    with pytest.MonkeyPatch.context() as patch:
        if backend.rank == 0:
            patch.setattr(Buffers, "new", fails_to_share)
        backend.barrier()
        buffer = backend.new_buffer(1000, torch.float32, CPU)
        backend.barrier()
    backend.barrier()
    buffer.fill_(1.0)
    backend.start_sum(buffer, "b").wait()
    assert buffer.tolist() == [2.0] * 1000
    # Each rank has two partial sums: `newest` is in shared memory, and `buffer` is not.
    order, newest = sum_order(5, 2), backend.new_buffer(1000, torch.float32, CPU)
    assert order.buffers == 1
    buffer.fill_(1.0 + 3.0 * backend.rank)
    newest.fill_(2.0 + 6.0 * backend.rank)
    backend.start_tree_sum(newest, [buffer], order, "t").wait()
    assert newest.tolist() == [15.0] * 1000


def fails_to_share(buffers, numel, dtype):
    raise UnsharedError("rank 1: no more")


def test_a_buffer_that_cannot_be_shared_is_copied(caplog):
    run_threads(2, memory_runs_out)
    assert "no more memory can be shared (rank 1: no more)" in caplog.text


@pytest.mark.parametrize("ends", [False, True])
def test_an_interrupted_move_of_private_pages_can_be_repeated(tmp_path, ends):
    """Raise KeyboardInterrupt before or after the private pages were moved."""
    first = torch.from_file(str(tmp_path / "shared"), shared=True, size=8192, dtype=torch.uint8)
    second = segment.SecondMapping(first)
    real = segment._mremap

    def interrupted(*args):
        if ends:
            real(*args)
        raise KeyboardInterrupt

    first.fill_(1)
    with mock.patch.object(segment, "_mremap", interrupted), pytest.raises(KeyboardInterrupt):
        second.separate()
    second.separate()
    second.memory.fill_(2)
    assert first.tolist() == [1] * 8192
