"""dualtrain/hvd/README.md#matching-and-errors: matching of calls, and errors if calls do not match."""

from __future__ import annotations

import time

import pytest
import torch

from tests.hvd.worlds import EVERY, OURS, OURS_3, check, library, same, sum_of_ranks

FAILS = "HorovodInternalError"


def any_order(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        names = [f"t{i}" for i in range(6)]
        mine = names[me:] + names[:me]
        handles = {n: hvd.allreduce_async(torch.full((2,), float(n[1:])), name=n, op=hvd.Sum) for n in mine}
        for name in names[::-1]:
            assert hvd.synchronize(handles[name]).tolist() == [size * float(name[1:])] * 2
        # Calls of different kinds (allreduce, allgather, grouped) may have the same name.
        x = torch.ones(size)
        several = [
            lambda: hvd.allreduce_async(x, name="x", op=hvd.Sum),
            lambda: hvd.allgather_async(x[:1], name="x"),
            lambda: hvd.broadcast_async(x, 1, name="x"),
            lambda: hvd.alltoall_async(x, name="x"),
            lambda: hvd.reducescatter_async(x, name="x", op=hvd.Sum),
            lambda: hvd.grouped_allreduce_async([x, x], name="x", op=hvd.Sum),
        ]
        order = several if me else several[::-1]
        results = [hvd.synchronize(handle) for handle in [call() for call in order]]
        results = results if me else results[::-1]
        assert results[0].tolist() == [size] * size
        assert results[1].tolist() == results[2].tolist() == results[3][0].tolist() == [1] * size
        assert results[4].tolist() == [size]
        assert [r.tolist() for r in results[5]] == [[size] * size] * 2


@EVERY
def test_named_calls_match_in_any_order(real):
    real(any_order)


def pending(backend):
    """Make calls on rank 0 first, and on the other ranks only after a barrier."""
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        x = torch.full((size, 2), me + 1.0)
        calls = [
            lambda: hvd.allreduce_async(x, name="late", op=hvd.Sum),
            lambda: hvd.allgather_async(x, name="late"),
            lambda: hvd.broadcast_async(x, size - 1, name="late"),
            lambda: hvd.alltoall_async(x, name="late"),
            lambda: hvd.reducescatter_async(x, name="late", op=hvd.Sum),
            lambda: hvd.grouped_allreduce_async([x, x], name="late group", op=hvd.Sum),
        ]
        handles = []
        if me == 0:
            handles = [call() for call in calls]
            time.sleep(0.02)
            assert not any(hvd.poll(handle) for handle in handles)
            check(hvd, *(same(f"twice {i}", call, "ValueError") for i, call in enumerate(calls)))
        hvd.barrier()
        if me:
            handles = [call() for call in calls]
        total = sum_of_ranks(size)
        results = [hvd.synchronize(handle) for handle in handles]
        assert results[0].flatten().tolist() == [total] * size * 2
        assert results[1].shape == (size * size, 2)
        assert results[2].flatten().tolist() == [size] * size * 2
        assert results[3][0][:, 0].tolist() == [r + 1.0 for r in range(size)]
        assert results[3][1].tolist() == [1] * size
        assert results[4].tolist() == [[total, total]]
        assert results[5][1].flatten().tolist() == [total] * size * 2
        # The names can be used again. poll() becomes true without synchronize().
        handle = calls[0]()
        deadline = time.monotonic() + 10
        while not hvd.poll(handle) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert hvd.poll(handle)
        hvd.synchronize(handle)


@EVERY
def test_a_pending_call_completes_once_the_other_ranks_make_the_same_call(real):
    real(pending)


def asynchronous(backend):
    with library(backend) as hvd:
        seen = []
        for attempt in range(3):
            tensors = [torch.full((64, 64), float(i)) for i in range(30)]
            handles = [hvd.allreduce_async(x, name=f"{attempt} {i}", op=hvd.Sum) for i, x in enumerate(tensors)]
            seen += [hvd.poll(handle) for handle in handles]
            for i, handle in enumerate(handles):
                assert (hvd.synchronize(handle) == i * hvd.size()).all()
        assert not all(seen)


@EVERY
def test_poll_can_return_false_right_after_an_asynchronous_call(real):
    real(asynchronous)


def mismatches(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        first = me == 0
        x = torch.ones(4, 3)
        other = torch.ones(5, 3) if first else x
        op = hvd.Sum if first else hvd.Min
        factor = 2.0 if first else 3.0
        kinds = {"fp64": x.double() if first else x, "ints": torch.ones(4, 3).int() if first else x}
        cases = {
            "shape": lambda: hvd.allreduce(other, name="m", op=hvd.Sum),
            "number of dimensions": lambda: hvd.allreduce(x[0] if first else x, name="m", op=hvd.Sum),
            "as many elements": lambda: hvd.allreduce(x.view(3, 4) if first else x, name="m", op=hvd.Sum),
            "reduction": lambda: hvd.allreduce(x, name="m", op=op),
            "prescale": lambda: hvd.allreduce(x, name="m", op=hvd.Sum, prescale_factor=factor),
            "postscale": lambda: hvd.allreduce(x, name="m", op=hvd.Sum, postscale_factor=factor),
            "grouped shape": lambda: hvd.grouped_allreduce([x, other], name="m", op=hvd.Sum),
            "grouped dtype": lambda: hvd.grouped_allreduce([x, kinds["fp64"]], name="m", op=hvd.Sum),
            "allgather columns": lambda: hvd.allgather(torch.ones(2, 2 + me), name="m"),
            "allgather dimensions": lambda: hvd.allgather(x[0] if first else x, name="m"),
            "broadcast shape": lambda: hvd.broadcast(other, 0, name="m"),
            "root": lambda: hvd.broadcast(x, 0 if first else 1, name="m"),
            "alltoall columns": lambda: hvd.alltoall(torch.ones(size, 2 + me), name="m"),
            "reducescatter shape": lambda: hvd.reducescatter(other, name="m", op=hvd.Sum),
            "reducescatter factor": lambda: hvd.reducescatter(x, name="m", op=hvd.Sum, prescale_factor=factor),
            "reducescatter op": lambda: hvd.reducescatter(x, name="m", op=hvd.Sum if first else hvd.Average),
        }
        for what, t in kinds.items():
            cases |= {
                f"allreduce {what}": lambda t=t: hvd.allreduce(t, name="m", op=hvd.Sum),
                f"allgather {what}": lambda t=t: hvd.allgather(t, name="m"),
                f"broadcast {what}": lambda t=t: hvd.broadcast(t, 0, name="m"),
                f"alltoall {what}": lambda t=t: hvd.alltoall(t, [0] * size, name="m"),
                f"reducescatter {what}": lambda t=t: hvd.reducescatter(t, name="m", op=hvd.Sum),
            }
        if backend.name != "horovod":  # If groups have different sizes, Horovod waits forever for the missing tensors
            cases["number of tensors"] = lambda: hvd.grouped_allreduce([x] * (2 + first), name="m", op=hvd.Sum)
        wrong = []
        for title, call in cases.items():
            with pytest.raises(RuntimeError) as info:
                wrong.append((title, call()))
            assert info.type is hvd.mpi_ops.HorovodInternalError
            if backend.name != "horovod" and not ("rank 0" in str(info.value) and "rank 1" in str(info.value)):
                wrong.append((title, str(info.value)))
            after = hvd.allreduce(x[0], name=title, op=hvd.Sum)
            assert after.tolist() == [size] * 3, title
        assert not wrong


@EVERY
def test_calls_that_do_not_match_fail_on_every_rank_and_later_calls_work(real):
    real(mismatches)


def local_mistakes(backend):
    """Make mistakes on rank 0 only. Each raises on rank 0, before anything is sent."""
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        x = torch.ones(4, 3)
        bad = torch.tensor([4] * size)
        if me == 0:
            check(
                hvd,
                same("root", lambda: hvd.broadcast(x, size, name="l"), "ValueError"),
                same("negative root", lambda: hvd.broadcast(x, -1, name="l"), "ValueError"),
                same("splits dtype", lambda: hvd.alltoall(x, bad, name="l"), "ValueError"),
                same("splits too large", lambda: hvd.alltoall(x, [3] * size, name="l"), "ValueError"),
                same("splits too few", lambda: hvd.alltoall(x, [1], name="l"), "ValueError"),
                same("no equal splits", lambda: hvd.alltoall(x.new_ones(size + 1), name="l"), "ValueError"),
                same("op and average", lambda: hvd.allreduce(x, average=True, op=1, name="l"), "ValueError"),
                same("reducescatter 0-d", lambda: hvd.reducescatter(x[0, 0], name="l"), "ValueError"),
            )
            if backend.name != "horovod":
                check(
                    hvd,
                    same("op", lambda: hvd.allreduce(x, op=17), "ValueError"),
                    same("negative splits", lambda: hvd.alltoall(x, [-1] + [1] * (size - 1)), "ValueError"),
                    same("no tensors", lambda: hvd.grouped_allreduce([]), "ValueError"),
                    same("bool average", lambda: hvd.allreduce(x > 0), "ValueError"),
                    same("complex minimum", lambda: hvd.allreduce(x * 1j, op=hvd.Min), "ValueError"),
                    same("scatter op", lambda: hvd.reducescatter(x, op=hvd.Min), FAILS),
                )
        assert hvd.allreduce(x[0], name="after", op=hvd.Sum).tolist() == [size] * 3
        if backend.name != "horovod":
            assert hvd.allreduce(x[0], op=hvd.Sum).tolist() == [size] * 3


@EVERY
def test_invalid_arguments_on_one_rank_raise_only_on_that_rank(real):
    real(local_mistakes)


def not_initialized(backend):
    from tests.hvd.worlds import ours

    hvd = ours()
    assert not hvd.is_initialized()
    others = hvd.global_process_set.size, lambda: hvd.start_timeline("/x"), lambda: hvd.broadcast_object(1)
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, hvd.stop_timeline, *others):
        with pytest.raises(ValueError, match="not been initialized"):
            call()
    with pytest.raises(hvd.mpi_ops.HorovodInternalError, match="not been initialized"):
        hvd.allreduce(torch.ones(1))
    hvd.shutdown()  # does nothing before init()
    with library(backend) as hvd:
        hvd.init()  # does nothing, because library() has called init()
        assert hvd.size() == backend.size
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == backend.size


@OURS_3
def test_calls_before_init_raise_and_a_second_init_does_nothing(real):
    real(not_initialized)


def asymmetric(backend):
    """Make some calls on some ranks only. Afterwards, Horovod's unnamed calls would hang.

    Horovod names an unnamed call by a counter of all calls of its process, so the names would differ between ranks.
    """
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        x = torch.full((2,), me + 1.0)
        total = [sum_of_ranks(size)] * 2
        subset = hvd.add_process_set([0]) if size == 2 else hvd.add_process_set([0, 2])
        if subset.included():
            hvd.allreduce(x, process_set=subset)
            hvd.allgather(x, process_set=subset)
            hvd.barrier(process_set=subset)
        assert hvd.allreduce(x, op=hvd.Sum).tolist() == total
        # Rank 0 makes an allgather, which stays pending while all ranks make calls of other kinds.
        handle = hvd.allgather_async(x) if me == 0 else None
        assert hvd.allreduce(x, op=hvd.Sum).tolist() == total
        assert hvd.broadcast(x, 1).tolist() == [2, 2]
        hvd.barrier()
        handle = hvd.allgather_async(x) if handle is None else handle
        assert hvd.synchronize(handle).shape == (2 * size,)
        # Unnamed calls of one kind match in the order in which each rank makes them.
        several = [hvd.allreduce_async(x * i, op=hvd.Sum) for i in range(3)]
        assert [hvd.synchronize(h).tolist() for h in several[::-1]] == [[i * total[0]] * 2 for i in (2, 1, 0)]
        # Calls still match after a mistake of one rank, a mismatch, and a call that fails because a rank has joined.
        if me == 0:
            check(hvd, same("splits", lambda: hvd.alltoall(x, [9] * size), "ValueError"))
        with pytest.raises(hvd.mpi_ops.HorovodInternalError):
            hvd.allreduce(torch.ones(1 + me))
        assert hvd.allreduce(x, op=hvd.Sum).tolist() == total
        if me == 0:
            hvd.join()
        else:
            with pytest.raises(hvd.mpi_ops.HorovodInternalError, match="rank 0 has joined"):
                hvd.allgather(x)
            assert hvd.allreduce(x, op=hvd.Sum).tolist() == [sum_of_ranks(size) - 1] * 2
            hvd.join()
        assert hvd.allgather(x).shape == (2 * size,)
        assert hvd.allreduce(x, op=hvd.Sum).tolist() == total
        if me == size - 1:
            unmatched = hvd.reducescatter_async(torch.ones(size))  # still pending: it fails at shutdown
        hvd.barrier()
        if me == size - 1:
            hvd.shutdown()
            with pytest.raises(hvd.mpi_ops.HorovodInternalError, match="shut"):
                hvd.synchronize(unmatched)


@OURS
def test_unnamed_calls_match_after_calls_that_only_some_ranks_made(real):
    real(asymmetric)
