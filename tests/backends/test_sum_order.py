"""The fixed order of sums: its tree, each rank's partial sums, and the bits of a sum with each library and transport."""

from __future__ import annotations

import numpy
import pytest
import torch

from dualtrain.backends import tree_sum
from dualtrain.backends.base import ReduceOp
from dualtrain.backends.sum_order import SumOrder, sum_order
from dualtrain.gradients.shard_sums import ShardSums
from tests.hvd.worlds import worlds
from tests.threads import run_threads

SHARD_COUNTS = (1, 2, 3, 4, 5, 7, 8, 13)


def numbers(shards, numel):
    """Return float32 numbers of shape (shards, numel). Their sum over the shards depends on the order."""
    generator = numpy.random.default_rng(shards * 1000 + numel)
    magnitudes = generator.integers(-3, 4, (shards, numel))
    return (generator.standard_normal((shards, numel)) * 10.0**magnitudes).astype(numpy.float32)


def tree(rows):
    """Add ``rows`` as a tree (RFC 6962). The size of its left subtree is the largest power of two below ``len(rows)``."""
    if len(rows) == 1:
        return rows[0]
    half = 1
    while half * 2 < len(rows):
        half *= 2
    return tree(rows[:half]) + tree(rows[half:])


def halves(buffer):
    return [buffer[: len(buffer) // 2], buffer[len(buffer) // 2 :]]


def sums(backend, cases):
    """Return one sum per case ``(shards, numel)``. All elements of a sum except the last two are scaled."""
    results = []
    for shards, numel in cases:
        order, rows = sum_order(shards, backend.size), torch.from_numpy(numbers(shards, numel))
        wire = backend.new_buffer(numel, torch.float32, torch.device("cpu"))
        shard_sums = ShardSums(backend, wire, order, halves)
        for _ in range(2):  # the second sum reuses the buffers of the first
            mine = order.ranges[backend.rank]
            for shard in mine:
                if shard != mine[-1]:
                    shard_sums.add_shard(halves(rows[shard].clone()))
                else:
                    wire.copy_(rows[shard])
            shard_sums.start(f"sum of {shards}", 0.75, min(2, numel)).wait()
        results.append(wire.clone().numpy())
    return results


def expected(cases):
    results = []
    for shards, numel in cases:
        total = tree(numbers(shards, numel)).copy()
        total[: max(0, numel - 2)] *= numpy.float32(0.75)
        results.append(total)
    return results


def assert_equal(results, cases):
    for of_rank in results:
        for mine, right, case in zip(of_rank, expected(cases), cases, strict=True):
            assert mine.tobytes() == right.tobytes(), case


@pytest.mark.parametrize("gathered_bytes", [0, 1 << 20], ids=["all-to-all", "all-gather"])
@pytest.mark.parametrize("shards", SHARD_COUNTS)
def test_sums_equal_the_reference_tree_sum_bitwise_on_any_number_of_ranks(shards, gathered_bytes, monkeypatch):
    monkeypatch.setattr(tree_sum, "GATHERED_BYTES", gathered_bytes)
    cases = [(shards, numel) for numel in (1, 2, 7, 1000)]
    for size in (*range(1, shards + 1), shards + 2):
        assert_equal(run_threads(size, sums, cases), cases)


CASES = [(shards, numel) for shards in SHARD_COUNTS for numel in (5, 9001)]
#: Cases for Horovod: fewer shards than ranks, equally many shards on all ranks, and one more shard on some ranks.
ON_HOROVOD = [(shards, numel) for shards, numel in CASES if shards in (1, 3, 4, 13)]


@worlds(("torch", 2), ("torch", 3), ("torch", 4), ("horovod", 2), ("horovod", 3), ("horovod", 4), ("shm", 2), ("shm", 3))
def test_sums_of_every_library_and_transport_equal_the_reference_tree_sum_bitwise(real):
    cases = ON_HOROVOD if real.name == "horovod" else CASES
    assert_equal(real(sums, cases), cases)


def rank_order(backend, cases):
    """Return the sums of an ordinary all-reduce, which adds in rank order."""
    results = []
    for shards, numel in cases:
        wire = torch.from_numpy(numbers(shards, numel))[backend.rank].clone()
        backend.start_allreduce(wire, ReduceOp.SUM, "sum").wait()
        wire[: max(0, numel - 2)] *= 0.75
        results.append(wire.numpy())
    return results


def test_a_sum_in_rank_order_has_different_bits():
    """Show that ``assert_equal`` detects a wrong order: the bits of a sum in rank order differ."""
    cases = [(4, 1000)]
    with pytest.raises(AssertionError):
        assert_equal(run_threads(4, rank_order, cases), cases)


@pytest.mark.parametrize("shards", SHARD_COUNTS)
def test_shards_are_split_evenly_and_a_rank_sends_few_partial_sums(shards):
    for size in range(1, shards + 3):
        order = SumOrder(shards, size)
        lengths = [len(part) for part in order.ranges]
        assert sum(lengths) == shards
        assert max(lengths) - min(lengths) <= 1
        assert sorted(shard for part in order.ranges for shard in part) == list(range(shards))
        assert order.buffers <= shards.bit_length()
        if shards % size == 0 and (shards // size).bit_count() == 1 and shards.bit_count() == 1:
            assert all(len(nodes) == 1 for nodes in order.owned)


def sum_while_torch_flushes_subnormals(backend):
    """Add four shards, of which the first two have a subnormal sum, after ``torch.set_flush_denormal(True)``.

    Return the bits of the sum. With one rank, ``add_shard`` adds these two; with two ranks, ``start`` adds them on rank 0.
    """
    order, tiny = sum_order(4, backend.size), torch.finfo(torch.float32).tiny
    rows = [torch.full((4,), 1.5 * tiny), torch.full((4,), -tiny), torch.zeros(4), torch.zeros(4)]
    wire = torch.zeros(4)
    shard_sums = ShardSums(backend, wire, order, halves)
    torch.set_flush_denormal(True)
    try:
        mine = order.ranges[backend.rank]
        for shard in mine[:-1]:
            shard_sums.add_shard(halves(rows[shard].clone()))
        wire.copy_(rows[mine[-1]])
        shard_sums.start("sum", 1.0, 0).wait()
    finally:
        torch.set_flush_denormal(False)
    return wire.view(torch.int32).tolist()


def test_sums_keep_subnormal_numbers_that_torch_would_flush_on_any_number_of_ranks():
    right = torch.full((4,), 0.5 * torch.finfo(torch.float32).tiny).view(torch.int32).tolist()
    for size in (1, 2):
        assert run_threads(size, sum_while_torch_flushes_subnormals) == [right] * size


def test_a_sum_order_without_shards_is_refused():
    with pytest.raises(ValueError, match="must be 1 or more, not 0"):
        SumOrder(0, 2)


def wrong_number_of_shards(backend):
    shard_sums = ShardSums(backend, torch.zeros(3), sum_order(4, backend.size), halves)
    with pytest.raises(RuntimeError, match="this rank has 2 shards in a step, and was given 1"):
        shard_sums.start("sum", 1.0, 0)
    shard_sums.add_shard(halves(torch.ones(3)))
    with pytest.raises(RuntimeError, match="2 shards in a step, and add_shard is for all of them but the last"):
        shard_sums.add_shard(halves(torch.ones(3)))


def test_a_rank_must_add_each_of_its_shards_once():
    run_threads(2, wrong_number_of_shards)
