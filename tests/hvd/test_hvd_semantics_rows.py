"""dualtrain/hvd/README.md#rows-and-process-sets: calls that gather, split or exchange rows, and grouped calls."""

from __future__ import annotations

import torch

from tests.hvd.worlds import EVERY, OURS, OURS_3, check, library, mean_of_ranks, same, sum_of_ranks


def gathers(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        # Rank r has r rows, so rank 0 has none.
        x = torch.full((me, 2), me + 1.0)
        wanted = [[r + 1.0] * 2 for r in range(size) for _ in range(r)]
        two = [wanted, [[2 * row[0]] for row in wanted]]
        empty = torch.ones(0, 3)
        deep = torch.arange(2 * (me + 1) * 2 * 2).reshape(2 * (me + 1), 2, 2)
        check(
            hvd,
            same("uneven", lambda: hvd.allgather(x, name="uneven"), wanted),
            same("nothing", lambda: hvd.allgather(empty, name="nothing"), []),
            same("deep", lambda: len(hvd.allgather(deep, name="deep")), 2 * sum_of_ranks(size)),
            same("group", lambda: hvd.grouped_allgather([x, x[:, :1] * 2], name="g"), tuple(two)),
        )
        assert hvd.allgather(empty, name="shape").shape == (0, 3)
        handle = hvd.grouped_allgather_async([x, x], name="later")
        assert [r.tolist() for r in hvd.synchronize(handle)] == [wanted, wanted]


@EVERY
def test_allgather_accepts_different_numbers_of_rows(real):
    real(gathers)


def alltoalls(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        # Rank r sends r + 1 rows to each rank; each row is (sender, receiver).
        splits = [me + 1] * size
        x = torch.tensor([[me, to] for to in range(size) for _ in range(me + 1)])
        wanted = [[r, me] for r in range(size) for _ in range(r + 1)]
        got = [r + 1 for r in range(size)]
        int32 = torch.tensor(splits, dtype=torch.int32)
        rows = torch.arange(size) + 10 * me
        mine = [10 * r + me for r in range(size)]
        # No rows go to the last rank, and one row of each rank is not sent.
        partial = [1] * (size - 1) + [0]
        some = [10 * r + me for r in range(size)] if me < size - 1 else []
        check(
            hvd,
            same("no splits", lambda: hvd.alltoall(rows, name="a"), mine),
            same("later", lambda: hvd.synchronize(hvd.alltoall_async(rows, name="b")), (mine, [1] * size)),
            same("list", lambda: hvd.alltoall(x, splits, name="c"), (wanted, got)),
            same("tensor", lambda: hvd.alltoall(x, int32, name="d"), (wanted, got)),
            same("int64", lambda: hvd.alltoall(x, int32.long(), name="e"), "ValueError"),
            same("partial", lambda: hvd.alltoall(rows, partial, name="f"), (some, [int(me < size - 1)] * size)),
            same("nothing", lambda: hvd.alltoall(rows, [0] * size, name="g"), ([], [0] * size)),
            same("no rows", lambda: hvd.alltoall(torch.ones(0, 2), name="h"), []),
            same("empty", lambda: hvd.alltoall(rows, [], name="k"), (mine, [1] * size)),
            same("empty tensor", lambda: hvd.alltoall(rows, int32[:0], name="l"), (mine, [1] * size)),
            same("indivisible", lambda: hvd.alltoall(torch.ones(size + 1), name="i"), "ValueError"),
            same("too many", lambda: hvd.alltoall(rows, [size] * size, name="j"), "ValueError"),
        )
        received = hvd.alltoall(x, splits, name="dtype")[1]
        assert received.dtype == torch.int32


@EVERY
def test_alltoall_sends_rows_according_to_the_splits(real):
    real(alltoalls)


def scatters(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        mean, total = mean_of_ranks(size), sum_of_ranks(size)
        first = me == 0

        def rows(n):
            return torch.arange(n) + torch.full((n,), me + 1.0)

        def mine(n, base):
            start = sum(n // size + (r < n % size) for r in range(me))
            return [base + i for i in range(start, start + n // size + (me < n % size))]

        five, x = rows(5), torch.ones(1)
        threes = torch.full((size,), 3.0)
        scaled = lambda **factors: hvd.reducescatter(threes, name=f"{factors}", op=hvd.Sum, **factors)  # noqa: E731
        twice = [[size * i + total for i in mine(5, 0)], [float(size)] if first else []]
        check(
            hvd,
            same("uneven", lambda: hvd.reducescatter(five, name="a"), mine(5, mean)),
            same("one row", lambda: hvd.reducescatter(rows(1), name="b"), mine(1, mean)),
            same("no rows", lambda: hvd.reducescatter(torch.ones(0, 2), name="c"), []),
            same("sum", lambda: hvd.reducescatter(rows(size), name="d", op=hvd.Sum), [size * me + total]),
            same("group", lambda: list(hvd.grouped_reducescatter([five, x], name="e", op=hvd.Sum)), twice),
            # This call of Horovod fails: it applies prescale_factor only in its fusion buffer, and dualtrain's backend for
            # Horovod disables fusion.
            ("before", lambda: scaled(prescale_factor=0.5), "HorovodInternalError", [1.5 * size]),
            same("after", lambda: scaled(postscale_factor=4.0), [12.0 * size]),
            same(
                "integers",
                lambda: hvd.reducescatter(torch.full((size,), -3 - me), name="g"),
                [-((3 * size + size * (size - 1) // 2) // size)],
            ),
            same(
                "compressed",
                lambda: hvd.reducescatter(torch.ones(size), name="h", compression=hvd.Compression.fp16, op=hvd.Sum),
                [size],
            ),
            *(
                same(f"op {op}", lambda op=op: hvd.reducescatter(five, name=f"op {op}", op=op), "HorovodInternalError")
                for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum)
            ),
        )
        handle = hvd.grouped_reducescatter_async([five, five], name="later", op=hvd.Sum)
        assert [r.tolist() for r in hvd.synchronize(handle)] == [twice[0]] * 2


@EVERY
def test_reducescatter_accepts_a_number_of_rows_that_the_world_size_does_not_divide(real):
    real(scatters)


def groups(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        mean, total = mean_of_ranks(size), sum_of_ranks(size)
        tensors = [torch.full((n, 2), me + 1.0) for n in range(4)]  # the first tensor is empty
        for op, wanted in [(hvd.Average, mean), (hvd.Sum, total), (hvd.Min, 1), (hvd.Max, size)]:
            kept = [t.clone() for t in tensors]
            results = hvd.grouped_allreduce(tensors, name=f"{op}", op=op)
            assert isinstance(results, list | tuple)
            assert [r.shape for r in results] == [t.shape for t in tensors]
            assert all((r == wanted).all() for r in results)
            assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))
            results = hvd.synchronize(hvd.grouped_allreduce_async(tensors, name=f"later {op}", op=op))
            assert all((r == wanted).all() for r in results)
            hvd.grouped_allreduce_(kept, name=f"in place {op}", op=op)
            assert all((r == wanted).all() for r in kept)
            kept = [t.clone() for t in tensors]
            results = hvd.synchronize(hvd.grouped_allreduce_async_(kept, name=f"in place later {op}", op=op))
            assert [r.data_ptr() for r in results] == [t.data_ptr() for t in kept]
            assert all((r == wanted).all() for r in kept)
        scaled = hvd.grouped_allreduce(tensors, name="f", op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        assert (scaled[3] == 2 * total).all()
        halves = [t.half() for t in tensors[1:]]
        narrow = hvd.grouped_allreduce(halves, name="h", op=hvd.Sum, prescale_factor=0.5)
        assert all(r.dtype == torch.float16 and (r == total / 2).all() for r in narrow)


@EVERY
def test_grouped_allreduce_reduces_every_tensor(real):
    real(groups)


def sparse(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        x = torch.sparse_coo_tensor([[me, 2]], [[1.0, me], [2.0, 2.0]], (4, 2), check_invariants=False)
        wanted = torch.zeros(4, 2)
        for r in range(size):
            wanted[r] += torch.tensor([1.0, r])
            wanted[2] += 2
        for op, factor in [(hvd.Sum, 1), (hvd.Average, size)]:
            later = hvd.sparse_allreduce_async(x, name=f"sparse {op}", op=op)
            torch.testing.assert_close(later().to_dense(), wanted / factor)


@EVERY
def test_sparse_allreduce_equals_a_dense_one(real):
    real(sparse)


def wrong_sparse(backend):
    """Give wrong operations, a dense tensor, and calls that differ between ranks. Horovod checks none of these."""
    with library(backend) as hvd:
        me, x = hvd.rank(), torch.eye(4).to_sparse()

        def reduce(tensor, op):
            return lambda: hvd.sparse_allreduce_async(tensor, "x", op)().to_dense()

        check(
            hvd,
            same("minimum", reduce(x, hvd.Min), "ValueError"),
            same("dense", reduce(x.to_dense(), hvd.Sum), "ValueError"),
            same("shapes", reduce(torch.eye(4 + me).to_sparse(), hvd.Sum), "HorovodInternalError"),
            same("operations", reduce(x, hvd.Average if me else hvd.Sum), "HorovodInternalError"),
            same("afterwards", reduce(x, hvd.Average), torch.eye(4).tolist()),
        )


@OURS
def test_sparse_allreduce_refuses_what_it_cannot_compute(real):
    real(wrong_sparse)


def in_a_set(backend):
    """Make each kind of call in a process set. A root is a global rank, but rows are split over the set's own ranks."""
    with library(backend) as hvd:
        me = hvd.rank()
        pair = hvd.add_process_set([2, 0])
        assert pair.ranks == [0, 2]
        x = torch.full((3, 2), me + 1.0)
        if pair.included():
            here = pair.rank()
            check(
                hvd,
                same("root 2", lambda: hvd.broadcast(x[0], 2, process_set=pair), [3, 3]),
                same("root 1", lambda: hvd.broadcast(x[0], 1, process_set=pair), "ValueError"),
                same("sum", lambda: hvd.allreduce(x[0], op=hvd.Sum, process_set=pair), [4, 4]),
                same("average", lambda: hvd.allreduce(x[0], process_set=pair), [2, 2]),
                same("grouped", lambda: hvd.grouped_allreduce([x[0]], process_set=pair), [[2, 2]]),
                same("gather", lambda: hvd.allgather(x[: here + 1, 0], process_set=pair), [1, 3, 3]),
                same("scatter", lambda: hvd.reducescatter(x[:, 0], process_set=pair), [2.0] * (2 - here)),
                same("alltoall", lambda: hvd.alltoall(x[:2, 0], process_set=pair), [1, 3]),
                same("splits", lambda: hvd.alltoall(x[:, 0], [1, 2], process_set=pair)[1], [here + 1] * 2),
                same("three", lambda: hvd.alltoall(x, [1, 1, 1], process_set=pair), "ValueError"),
                same("object", lambda: hvd.broadcast_object(me, 2, process_set=pair), 2),
                same("objects", lambda: hvd.allgather_object(me, process_set=pair), [0, 2]),
                same("adasum", lambda: hvd.allreduce(x[0], op=hvd.Adasum, process_set=pair), [2, 2]),
            )
        else:
            for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
                check(hvd, same(call.__name__, lambda call=call: call(x, process_set=pair), "ValueError"))
            check(hvd, same("barrier", lambda: hvd.barrier(process_set=pair), "ValueError"))
        assert hvd.allreduce(x[0], op=hvd.Sum).tolist() == [6, 6]


@OURS_3
def test_each_kind_of_operation_works_in_a_process_set(real):
    real(in_a_set)
