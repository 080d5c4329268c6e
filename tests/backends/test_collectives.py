"""Collective calls on every backend, compared with results that each rank computes from all ranks' inputs.

Inputs are a pure function of rank and seed. Most are small whole numbers, whose sums and products are exact in every dtype
and in any order.
"""

from __future__ import annotations

import math
import operator
import pickle
import threading
import time
import types
import warnings
from functools import partial, reduce
from unittest import mock

import pytest
import torch

from dualtrain import (
    BackendError,
    PeerFailedError,
    ReduceOp,
    UserError,
    average_buffers,
    broadcast_optimizer_state,
    broadcast_parameters,
    connect,
    functional,
)
from dualtrain.backends import objects
from dualtrain.backends.comparison import compare
from dualtrain.backends.inference import ordinary
from dualtrain.backends.sum_order import sum_order
from dualtrain.backends.wire import average_
from dualtrain.gradients import GradientReducer
from dualtrain.on_ranks import on_all_ranks
from dualtrain.user_code import enough_memory
from tests.conftest import require_horovod
from tests.threads import ThreadsBackend, run_threads

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64]
MOVABLE = [*DTYPES, torch.uint16, torch.uint32, torch.uint64, torch.complex128, torch.float8_e4m3fn]
#: Dtypes of calls on Horovod that do not reduce. A few are enough, because these calls send all tensors as bytes
#: (tests/threads.py asserts this).
AS_BYTES = [(dtype,) for dtype in (torch.bool, torch.float8_e4m3fn, torch.float32, torch.complex128)]
OPS = list(ReduceOp)
EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}


def data(rank, *shape, dtype=torch.float32, seed=0):
    """Return the input of ``rank``: whole numbers from -3 to 3 (from 0 to 3 for uint8, 0 and 1 for bool).

    The imaginary parts of complex numbers are from ``rank`` - 3 to ``rank`` + 3.
    """
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    low = 0 if dtype in (torch.uint8, torch.bool) else -3
    values = torch.randint(low, 2 if dtype is torch.bool else 4, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(values.float(), values.flip(-1).float() + rank).to(dtype)
    return values.to(dtype)


def noise(rank, *shape, dtype, seed=0):
    """Return random bits, including NaNs with payloads."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    width = torch.empty(0, dtype=dtype).element_size()
    top = 2 if dtype is torch.bool else 256
    octets = torch.randint(0, top, (*shape[:-1], shape[-1] * width), generator=generator, dtype=torch.uint8)
    return octets.view(dtype)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def reduced(tensors, op):
    """Return the expected reduction, computed in Python, element by element."""
    dtype, size = tensors[0].dtype, len(tensors)

    def one(*values):
        if dtype is torch.bool:
            return any(values) if op in (ReduceOp.SUM, ReduceOp.MAX) else all(values)
        if op is ReduceOp.MIN:
            return min(values)
        if op is ReduceOp.MAX:
            return max(values)
        if op is ReduceOp.PRODUCT:
            return math.prod(values)
        total = reduce(operator.add, values)
        if op is ReduceOp.SUM:
            return total
        return total / size if dtype in FLOATS or dtype.is_complex else math.trunc(total / size)

    columns = zip(*(tensor.reshape(-1).tolist() for tensor in tensors), strict=True)
    return torch.tensor([one(*column) for column in columns], dtype=dtype).reshape(tensors[0].shape)


def has_meaning(op, dtype):
    if dtype is torch.bool:
        return op is not ReduceOp.AVERAGE
    return not dtype.is_complex or op in (ReduceOp.SUM, ReduceOp.AVERAGE)


def check(actual, expected, **tolerance):
    torch.testing.assert_close(actual, expected, **tolerance)
    assert actual.is_contiguous()


# -- allreduce ----------------------------------------------------------------------------------------------------


def allreduce_all(backend, dtype):
    results = []
    for op in OPS:
        mine = data(backend.rank, 3, 5, dtype=dtype)
        before = mine.clone()
        if not has_meaning(op, dtype):
            for call in (backend.allreduce, backend.allreduce_, backend.reducescatter):
                with pytest.raises(ValueError, match="have no"):
                    call(mine, op)
            continue
        expected = reduced([data(rank, 3, 5, dtype=dtype) for rank in range(backend.size)], op)
        result = backend.allreduce(mine, op, "x")
        check(result, expected)
        check(mine, before, **EXACT)
        assert result.data_ptr() != mine.data_ptr()
        assert backend.allreduce_(mine, op) is mine
        check(mine, result, **EXACT)
        results.append((result, expected))
    for result, expected in results:  # later calls have not changed earlier results
        check(result, expected)


def test_allreduce_of_every_operation_in_and_out_of_place(typical):
    typical.each(allreduce_all, [(dtype,) for dtype in DTYPES])


def allreduce_defaults(backend):
    mine = data(backend.rank, 4)
    check(backend.allreduce(mine), reduced([data(rank, 4) for rank in range(backend.size)], ReduceOp.AVERAGE))
    check(backend.allreduce(mine, "MaX"), backend.allreduce(mine, ReduceOp.MAX))
    with pytest.raises(ValueError, match="no reduction is called 'mean': choose one of average, sum"):
        backend.allreduce(mine, "mean")


def test_allreduce_averages_by_default_and_accepts_names_of_operations(spmd):
    spmd(allreduce_defaults)


def layouts(rank):
    """Return tensors of several layouts, with values that depend on ``rank``. No two of them share memory."""

    def square():
        return data(rank, 4, 6)

    images = data(rank, 2, 3, 4, 5)
    return {
        "scalar": data(rank),
        "empty": data(rank, 0),
        "empty rows": data(rank, 0, 3),
        "empty columns": data(rank, 3, 0),
        "transposed": square().T,
        "strided": square()[::2, 1::3],
        "column": square()[:, 2],
        "channels last": images.contiguous(memory_format=torch.channels_last),
        "permuted": images.permute(3, 0, 2, 1),
        "offset": square().view(-1)[5:],
        "conjugate": torch.complex(square(), square() + rank).conj(),
        "negative": torch.complex(square(), square() + rank).conj().imag,
    }


def allreduce_layouts(backend):
    everyone = [layouts(rank) for rank in range(backend.size)]
    for kind, mine in layouts(backend.rank).items():
        expected = reduced([each[kind] for each in everyone], ReduceOp.SUM)
        check(backend.allreduce(mine, "sum", kind), expected)
        strides = mine.stride()
        assert backend.allreduce_(mine, "sum", kind) is mine
        assert mine.stride() == strides
        torch.testing.assert_close(mine, expected)
    # A lazily negated tensor of one element counts as contiguous, although its memory holds the opposite sign.
    negative = [torch.complex(torch.ones(1), torch.ones(1) + rank).conj().imag for rank in range(backend.size)]
    expected = reduced(negative, ReduceOp.MIN)
    torch.testing.assert_close(backend.allreduce_(negative[backend.rank], "min"), expected)


def test_allreduce_of_any_layout(spmd):
    spmd(allreduce_layouts)


def allreduce_inside_a_larger_tensor(backend):
    whole = data(backend.rank, 4, 6)
    untouched = whole[:, ::2].clone()
    backend.allreduce_(whole[:, 1::2], "max")
    check(whole[:, ::2].contiguous(), untouched, **EXACT)
    expected = reduced([data(rank, 4, 6)[:, 1::2] for rank in range(backend.size)], ReduceOp.MAX)
    torch.testing.assert_close(whole[:, 1::2], expected)


def test_allreduce_in_place_changes_only_the_view(spmd):
    spmd(allreduce_inside_a_larger_tensor)


def allreduce_expanded(backend):
    mine = data(backend.rank, 3, 1).expand(3, 4)
    check(backend.allreduce(mine, "sum"), reduced([data(r, 3, 1).expand(3, 4) for r in range(backend.size)], ReduceOp.SUM))
    check(mine.contiguous(), data(backend.rank, 3, 1).expand(3, 4).contiguous(), **EXACT)


def test_allreduce_of_an_expanded_input(spmd):
    spmd(allreduce_expanded)


def integer_averages(backend):
    for start in (-7, -1, 0, 6):
        values = [start + 3 * rank for rank in range(backend.size)]
        expected = math.trunc(sum(values) / backend.size)
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
            assert backend.allreduce(torch.tensor(values[backend.rank], dtype=dtype)).item() == expected


def test_integer_averages_are_truncated_toward_zero(spmd):
    spmd(integer_averages)


def wide_averages(backend):
    assert backend.allreduce(torch.tensor([60000.0], dtype=torch.float16)).item() == 60000
    assert backend.allreduce(torch.tensor([100], dtype=torch.int8)).item() == 100
    assert backend.allreduce(torch.tensor([-30000], dtype=torch.int16)).item() == -30000
    assert backend.reducescatter(torch.full((backend.size,), 250, dtype=torch.uint8)).item() == 250


def test_the_sum_behind_an_average_of_a_narrow_dtype_does_not_overflow(spmd):
    spmd(wide_averages)


def large_integers(backend):
    mine = torch.tensor([2**53 + 1 + 2 * backend.rank])
    assert backend.allreduce(mine, "max").item() == 2**53 + 1 + 2 * (backend.size - 1)
    assert backend.allreduce(mine, "sum").item() == sum(2**53 + 1 + 2 * rank for rank in range(backend.size))


def test_large_integers_are_reduced_exactly(spmd):
    spmd(large_integers)


def sums_of_nan(backend, dtype):
    mine = torch.ones(3, dtype=dtype)
    if backend.rank == backend.size - 1:
        mine[1] = math.nan
    for op in ("sum", "average"):
        assert backend.allreduce(mine, op).isnan().tolist() == [False, True, False]


def test_a_nan_of_one_rank_reaches_all_ranks(typical):
    typical.each(sums_of_nan, [(dtype,) for dtype in FLOATS])


def without_history(backend):
    mine = data(backend.rank, 2, 2).requires_grad_()
    calls = [backend.allreduce, backend.reducescatter, backend.broadcast, backend.allgather]
    assert not any(call(mine).requires_grad for call in calls)
    assert backend.allreduce_(mine, "sum") is mine
    assert mine.is_leaf
    assert mine.requires_grad


def test_results_have_no_autograd_history_and_leaf_tensors_may_be_reduced_in_place(spmd):
    spmd(without_history)


def same_bits_everywhere(backend):
    """Compare the results of ``allreduce`` between the ranks, and with those of the primitive ``start_allreduce``.

    With the torch backend, ``allreduce`` uses this primitive only for long tensors. Short tensors are sent in the messages
    that compare the ranks' calls.
    """
    mine = torch.randn(270_000, generator=torch.Generator().manual_seed(backend.rank))
    mine[7::50] = math.copysign(0.0, backend.rank - 1)
    mine[9::50] = math.nan if backend.rank == backend.size - 1 else 1.0
    for length in (0, 1, backend.size, 2 * backend.size + 1, 1025, 20_000, 140_000, 262_144, 270_000):
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
            raw = mine[:length].clone()
            result = backend.allreduce(raw, op)
            backend.start_allreduce(raw, op, "raw").wait()
            assert torch.equal(bits(result), bits(raw)), (length, op)
            everyone = backend.allgather(bits(result)[None])
            assert bool((everyone == everyone[0]).all())


def test_allreduce_gives_all_ranks_the_bits_of_start_allreduce(spmd):
    spmd(same_bits_everywhere)


def subnormal_numbers_with_a_flag_on_rank_0(backend, count):
    """Reduce subnormal numbers on all ranks, after only rank 0 has called ``torch.set_flush_denormal(True)``."""
    size, numbers = backend.size, torch.arange(1, count + 1, dtype=torch.int32)
    order = sum_order(size, size)
    torch.set_flush_denormal(backend.rank == 0)
    try:
        scaled = (6 * numbers).view(torch.float32)
        backend.start_sum(scaled, "sum", 1 / 3).wait()
        along_tree = (6 * numbers).view(torch.float32)
        backend.start_tree_sum(along_tree, [], order, "tree", 1 / 3).wait()
        found = [
            (size, backend.allreduce(numbers.view(torch.float32), "sum")),
            (1, backend.allreduce(numbers.view(torch.float32), "average")),
            (5, backend.allreduce((5 * numbers).view(torch.float32), "max")),
            (2 * size, scaled),
            (2 * size, along_tree),
        ]
    finally:
        torch.set_flush_denormal(False)
    # A subnormal number is n times the smallest one, and its bits, read as an integer, are n.
    for multiple, result in found:
        assert torch.equal(result.view(torch.int32), multiple * numbers)


def test_results_do_not_depend_on_a_ranks_handling_of_subnormal_numbers(many):
    many.each(subnormal_numbers_with_a_flag_on_rank_0, [(100,), (3000,), (20000,)])


# -- reducescatter ------------------------------------------------------------------------------------------------


def check_reducescatter(backend, rows, op, dtype=torch.float32):
    lengths = [rows // backend.size + (rank < rows % backend.size) for rank in range(backend.size)]
    start = sum(lengths[: backend.rank])
    mine = data(backend.rank, rows, 2, dtype=dtype)
    whole = reduced([data(rank, rows, 2, dtype=dtype) for rank in range(backend.size)], op)
    check(backend.reducescatter(mine, op), whole[start : start + lengths[backend.rank]])
    check(mine, data(backend.rank, rows, 2, dtype=dtype), **EXACT)


def reducescatter_rows(backend):
    for rows in (0, 1, backend.size - 1, backend.size, 2 * backend.size + 1, 3 * backend.size - 1):
        check_reducescatter(backend, rows, ReduceOp.AVERAGE)


def test_reducescatter_gives_remainder_rows_to_the_first_ranks(spmd):
    spmd(reducescatter_rows)


def reducescatter_all(backend, dtype):
    for op in OPS:
        if has_meaning(op, dtype):
            check_reducescatter(backend, 2 * backend.size + 1, op, dtype)


def test_reducescatter_of_every_operation(typical):
    typical.each(reducescatter_all, [(dtype,) for dtype in DTYPES], [(torch.float32,), (torch.bfloat16,), (torch.int8,)])


def reducescatter_layouts(backend):
    everyone = [layouts(rank) for rank in range(backend.size)]
    for kind, mine in layouts(backend.rank).items():
        if kind == "scalar":
            with pytest.raises(ValueError, match=r"reshape it to \(1,\)"):
                backend.reducescatter(mine)
            continue
        whole = reduced([each[kind] for each in everyone], ReduceOp.SUM)
        check(backend.reducescatter(mine, "sum"), whole.tensor_split(backend.size)[backend.rank])


def test_reducescatter_of_any_layout(spmd):
    spmd(reducescatter_layouts)


# -- broadcast ----------------------------------------------------------------------------------------------------


def broadcast_bits(backend, dtype):
    root = backend.size - 1
    mine = noise(backend.rank, 3, 5, dtype=dtype)
    result = backend.broadcast(mine, root, "x")
    check(bits(result), bits(noise(root, 3, 5, dtype=dtype)))
    check(bits(mine), bits(noise(backend.rank, 3, 5, dtype=dtype)))
    assert (result.dtype, result.shape) == (mine.dtype, mine.shape)
    assert backend.broadcast_(mine, root) is mine
    check(bits(mine), bits(result))


def test_broadcast_is_exact_to_the_bit(typical):
    typical.each(broadcast_bits, [(dtype,) for dtype in MOVABLE], AS_BYTES)


def broadcast_from_all(backend):
    for root in range(backend.size):
        mine = data(backend.rank, 4)
        check(backend.broadcast(mine, root), data(root, 4), **EXACT)
        assert backend.broadcast_(mine, root) is mine
        check(mine, data(root, 4), **EXACT)


def test_broadcast_from_every_root(spmd):
    spmd(broadcast_from_all)


def broadcast_layouts(backend):
    root = backend.size - 1
    for kind, mine in layouts(backend.rank).items():
        expected = layouts(root)[kind]
        check(backend.broadcast(mine, root), expected.resolve_conj().resolve_neg().contiguous(), **EXACT)
        assert backend.broadcast_(mine, root) is mine
        torch.testing.assert_close(mine, expected, **EXACT)


def test_broadcast_of_any_layout(spmd):
    spmd(broadcast_layouts)


def wrong_roots(backend):
    for root in (-1, backend.size):
        for call in (backend.broadcast, backend.broadcast_, backend.broadcast_object):
            with pytest.raises(ValueError, match=f"root {root} is not a rank"):
                call(torch.zeros(1), root)
        work = backend.broadcast_async(torch.zeros(1), root)
        with pytest.raises(ValueError, match=f"root {root} is not a rank"):
            work.wait()


def test_a_root_that_is_not_a_rank_is_refused(spmd):
    spmd(wrong_roots)


def test_quantized_and_nested_tensors_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are deprecated in torch 2.13, and nested ones are a prototype
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
        parts = [torch.ones(1), torch.ones(2)]
        nested = [torch.nested.nested_tensor(parts, layout=layout) for layout in (torch.strided, torch.jagged)]
    refused = [(quantized, r"a quantized tensor cannot be sent: convert it with dequantize\(\)")]
    refused += [
        (each, r"a nested tensor cannot be sent: convert it with torch\.nested\.to_padded_tensor\(\)") for each in nested
    ]
    with connect("local") as backend:
        for tensor, message in refused:
            for call in (backend.allreduce, backend.broadcast, backend.broadcast_, backend.allgather, backend.alltoall):
                with pytest.raises(ValueError, match=message):
                    call(tensor)


@pytest.mark.parametrize("name", ["uint64", "float4_e2m1fn_x2"])
def test_a_dtype_that_cannot_be_reduced_is_refused(name):
    if not hasattr(torch, name):
        pytest.skip(f"this version of torch has no {name}")
    tensor = torch.zeros(8, dtype=torch.uint8).view(getattr(torch, name))
    with connect("local") as backend:
        for call in (backend.allreduce, backend.allreduce_, backend.reducescatter):
            with pytest.raises(ValueError, match=f"torch.{name} tensors cannot be reduced"):
                call(tensor)


# -- allgather ----------------------------------------------------------------------------------------------------


def allgather_all(backend, dtype):
    for rows in ([3] * backend.size, [rank % 3 for rank in range(backend.size)], [0] * backend.size):
        everyone = [noise(rank, rows[rank], 2, dtype=dtype) for rank in range(backend.size)]
        mine = everyone[backend.rank].clone()
        result = backend.allgather(mine, "x")
        assert (result.dtype, tuple(result.shape)) == (dtype, (sum(rows), 2))
        check(bits(result), torch.cat([bits(each) for each in everyone]))


def test_allgather_of_equal_unequal_and_zero_row_counts(typical):
    typical.each(allgather_all, [(dtype,) for dtype in MOVABLE], AS_BYTES)


def allgather_layouts(backend):
    everyone = [layouts(rank) for rank in range(backend.size)]
    for kind, mine in layouts(backend.rank).items():
        expected = torch.cat([each[kind].reshape(1) if each[kind].dim() == 0 else each[kind] for each in everyone])
        check(backend.allgather(mine), expected.contiguous(), **EXACT)
    assert backend.allgather(torch.ones(4, dtype=torch.int64)[: 2 * backend.rank : 2]).tolist() == [1] * sum(
        min(rank, 2) for rank in range(backend.size)
    )


def test_allgather_of_any_layout_and_of_scalars(spmd):
    spmd(allgather_layouts)


# -- alltoall -----------------------------------------------------------------------------------------------------


def alltoall_equally(backend, dtype):
    everyone = [noise(rank, 2 * backend.size, 3, dtype=dtype) for rank in range(backend.size)]
    expected = torch.cat([bits(each.chunk(backend.size)[backend.rank]) for each in everyone])
    result = backend.alltoall(everyone[backend.rank].clone())
    check(bits(result), expected)
    assert tuple(result.shape) == (2 * backend.size, 3)


def test_alltoall_without_splits_sends_equally_many_rows_to_each_rank(typical):
    typical.each(alltoall_equally, [(dtype,) for dtype in MOVABLE], AS_BYTES)


def alltoall_by_splits(backend):
    splits = [[(source + target) % 3 for target in range(backend.size)] for source in range(backend.size)]
    for unsent in (0, 2):
        everyone = [data(rank, sum(splits[rank]) + unsent, 2) for rank in range(backend.size)]
        parts = [each[: sum(s)].split(s)[backend.rank] for each, s in zip(everyone, splits, strict=True)]
        mine = splits[backend.rank]
        for argument in (mine, tuple(mine), torch.tensor(mine), torch.tensor(mine, dtype=torch.int32)):
            rows, received = backend.alltoall(everyone[backend.rank], argument, "x")
            check(rows, torch.cat(parts))
            assert received.tolist() == [len(part) for part in parts]
            assert (received.dtype, received.device.type) == (torch.int32, "cpu")


def test_alltoall_with_splits_sends_only_their_rows_and_returns_the_received_counts(spmd):
    spmd(alltoall_by_splits)


def alltoall_of_nothing(backend):
    rows, received = backend.alltoall(torch.zeros(4, 3), [0] * backend.size)
    assert tuple(rows.shape) == (0, 3)
    assert received.tolist() == [0] * backend.size
    assert tuple(backend.alltoall(torch.zeros(0, 3)).shape) == (0, 3)
    assert tuple(backend.alltoall(torch.zeros(backend.size, 0)).shape) == (backend.size, 0)
    everyone = [data(rank, 3, 2 * backend.size).T for rank in range(backend.size)]
    expected = torch.cat([each.chunk(backend.size)[backend.rank] for each in everyone])
    check(backend.alltoall(everyone[backend.rank]), expected.contiguous())


def test_alltoall_of_no_rows_and_of_a_transposed_tensor(spmd):
    spmd(alltoall_of_nothing)


def alltoall_refusals(backend):
    rows = torch.zeros(2 * backend.size)
    with pytest.raises(ValueError, match=r"reshape it to \(1,\)"):
        backend.alltoall(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"reshape it to \(1,\)"):
        backend.alltoall_async(torch.tensor(1.0)).wait()
    if backend.size > 1:
        with pytest.raises(ValueError, match="pass splits"):
            backend.alltoall(torch.zeros(backend.size + 1))
    for splits in ([1] * (backend.size + 1), [-1] + [1] * (backend.size - 1), [3] * backend.size, []):
        with pytest.raises(ValueError, match="splits must be"):
            backend.alltoall(rows, splits)
    backend.barrier()


def test_alltoall_refuses_scalars_and_splits_that_do_not_fit_the_tensor(spmd):
    spmd(alltoall_refusals)


# -- barrier, groups ----------------------------------------------------------------------------------------------


def late(backend):
    if backend.rank == backend.size - 1:
        time.sleep(0.2)
    before = time.time()
    backend.barrier("here")
    return before, time.time()


def test_barrier_blocks_until_the_last_rank_has_called_it(spmd):
    times = spmd(late)
    assert min(after for _, after in times) >= max(before for before, _ in times)


def groups(backend):
    last = backend.size - 1
    for ranks in ([0], [last], list(range(backend.size)), list(range(backend.size))[::-1], [last, 0][: backend.size]):
        members = sorted(ranks)
        group = backend.group(ranks)
        assert (group is None) == (backend.rank not in members)
        if group is not None:
            assert (group.rank, group.size) == (members.index(backend.rank), len(members))
            assert (group.local_rank, group.local_size) == (group.rank, group.size)
            assert (group.name, group.device) == (backend.name, backend.device)
            assert group.transport == backend.transport.replace("shm", "gloo")
            check(group.allgather(torch.tensor(backend.rank)), torch.tensor(members))
            check(group.allreduce(torch.tensor([backend.rank]), "sum"), torch.tensor([sum(members)]))
            check(group.broadcast(torch.tensor([backend.rank]), group.size - 1), torch.tensor([members[-1]]))
            assert group.broadcast_object(backend.rank, 0) == members[0]
            assert group.alltoall(torch.full((group.size,), backend.rank)).tolist() == members
            group.barrier()
            with pytest.raises(ValueError, match="cannot be divided into groups"):
                group.group([0])
        backend.barrier()


def test_group_returns_a_backend_on_member_ranks_and_none_on_other_ranks(spmd):
    spmd(groups)


def disjoint_groups(backend):
    halves = list(range(backend.size))[::2], list(range(backend.size))[1::2]
    made = [backend.group(half) for half in halves if half]
    mine = next(group for group in made if group is not None)
    expected = halves[backend.rank % 2]
    for _ in range(3):
        assert mine.allgather(torch.tensor(backend.rank)).tolist() == expected


def test_disjoint_groups_work_side_by_side(spmd):
    spmd(disjoint_groups)


def equal_groups(backend):
    everyone = list(range(backend.size))
    members = everyone[: max(1, backend.size - 1)]
    made = [backend, backend.group(everyone), backend.group(members), backend.group(members)]
    mine = [group for group in made if group is not None]
    for _ in range(3):
        works = [group.allreduce_async(torch.full((2,), 1.0), "sum", "x") for group in mine]
        assert [work.wait().tolist() for work in works] == [[float(group.size)] * 2 for group in mine]


def test_operations_of_groups_with_the_same_ranks_are_not_mixed_up(spmd):
    spmd(equal_groups)


def channel_of_a_group(backend):
    last = backend.size - 1
    groups = [backend.group([0, last] if last else [0]), backend.group([last])]
    channels = [(group.members, group.channel().members) for group in groups if group is not None]
    assert channels == [(members, members) for members in ((0, last) if last else (0,), (last,)) if backend.rank in members]
    assert backend.channel().members == backend.members == tuple(range(backend.size))


def test_a_channel_of_a_group_has_the_members_of_the_group(spmd):
    spmd(channel_of_a_group)


def wrong_groups(backend):
    for ranks in ([], [0, 0], [-1], [backend.size]):
        with pytest.raises(ValueError, match="a group needs one or more different ranks"):
            backend.group(ranks)


def test_groups_with_no_ranks_repeated_ranks_or_unknown_ranks_are_refused(spmd):
    spmd(wrong_groups)


def errors_of_a_group(backend):
    """Cause errors in a group of ranks 1 and 3, which are ranks 0 and 1 of the group; return the messages of the errors.

    The ranks outside of the group return None.
    """
    group = backend.group([1, 3])
    if group is None:
        return None
    last, params = backend.rank == 3, [torch.nn.Parameter(torch.full((2,), float(number))) for number in range(2)]
    named = [(str(number), p) for number, p in enumerate(params[::-1] if last else params)]
    reducer = GradientReducer(named, group)

    calls = [
        lambda: group.barrier("b" if last else "a"),
        lambda: group.broadcast(torch.ones(1), root=int(last)),
        lambda: group.allgather_object(Unknown() if last else 1),
        lambda: sum(p.sum() for p in params).backward(),
        lambda: on_all_ranks(group, "task", partial(raising, UserError("no file")) if last else int),
        lambda: group.await_bounded("a sum", lambda seconds: raising(TimeoutError("late"))),
    ]
    messages = []
    for call in calls:
        with pytest.raises((BackendError, TypeError, UserError)) as caught:
            call()
        messages.append(str(caught.value))
    reducer.close()
    return messages


def raising(error):
    raise error


def test_errors_in_a_group_name_its_ranks_by_their_ranks_in_the_job():
    _, first, _, last = run_threads(4, errors_of_a_group)
    beginnings = [
        "the ranks do not agree on a collective call: rank 1: barrier of 'a'; rank 3: barrier of 'b'",
        "the ranks do not agree on a collective call: rank 1: broadcast from rank 1 (float32, 1); ",
        "rank 3 could not send an object: ",
        "ranks 1 and 3 have the same parameters in different orders",
        "rank 3: no file",
        "a sum failed on rank 1 of ranks 1, 3: late",
    ]
    assert [message[: len(expected)] for message, expected in zip(first, beginnings, strict=True)] == beginnings
    assert first[1].endswith("; rank 3: broadcast from rank 3 (float32, 1)")
    assert last[-1] == "a sum failed on rank 3 of ranks 1, 3: late"


# -- objects ------------------------------------------------------------------------------------------------------


class Unknown:
    pass


class Trap:
    def __reduce__(self):
        return print, ("code of a foreign pickle has run",)


def value(rank):
    return {
        "rank": rank,
        "nested": [None, True, 2**70, 1.5, complex(1, 2), "é" * rank, b"\x00\xff", (rank, {"a": {rank}})],
        "tensor": data(rank, rank, 2, dtype=torch.bfloat16),
        3: data(rank, 3, 4).T,
    }


def check_value(actual, rank):
    expected = value(rank)
    for key in ("tensor", 3):
        torch.testing.assert_close(actual.pop(key), expected.pop(key), **EXACT)
    assert actual == expected


def exchange_objects(backend):
    for root in range(backend.size):
        check_value(backend.broadcast_object(value(backend.rank) if backend.rank == root else None, root), root)
    everyone = backend.allgather_object(value(backend.rank), "x")
    assert len(everyone) == backend.size
    for rank, each in enumerate(everyone):
        check_value(each, rank)
    assert backend.allgather_object(None) == [None] * backend.size


def test_objects_arrive_as_they_were_sent(spmd):
    spmd(exchange_objects)


def exchange_views(backend):
    memory = torch.arange(1e6)
    conjugate = torch.complex(memory[:4], memory[4:8]).conj()
    sent = {"view": memory[10:12], "column": memory.view(-1, 10)[:3, 1], "imag": conjugate.imag[:2]}
    sent["leaf"] = torch.nn.Parameter(memory[20:22])
    for received in (backend.broadcast_object(sent if backend.rank == 0 else None), *backend.allgather_object(sent)):
        assert {name: each.tolist() for name, each in received.items()} == {name: t.tolist() for name, t in sent.items()}
        assert [name for name, each in received.items() if each.requires_grad] == ["leaf"]


def test_views_arrive_as_they_were_sent(spmd):
    spmd(exchange_views)


def test_a_view_is_sent_without_the_rest_of_its_memory():
    memory = torch.zeros(1_000_000)
    assert len(objects.encode([memory[:1], torch.nn.Parameter(memory[1:2])])) < 10_000
    first, second = objects.decode(objects.encode([memory, memory]))
    assert first.data_ptr() == second.data_ptr()  # tensors that share all of their memory still share it


def test_too_little_memory_for_an_object_is_reported_as_such():
    with mock.patch.object(torch, "save", side_effect=MemoryError), connect("local") as backend:
        with pytest.raises(TypeError, match=r"cannot be sent .* \(MemoryError\): there is not enough memory"):
            backend.broadcast_object([1])
        with pytest.raises(UserError, match=r"^too large for this machine .* not enough memory"), enough_memory("cure"):
            backend.broadcast_object([1])


def refuse_objects(backend):
    last = backend.size - 1
    for thing in (Unknown(), Trap(), refuse_objects, [{"deep": Unknown}], lambda: 0):
        expected = TypeError if backend.rank == last else BackendError
        where = "" if backend.rank == last else f"rank {last} could not send an object: "
        kind = type(thing).__name__
        message = rf"^{where}an object of type {kind} cannot be sent to other ranks \(.+\): send numbers.* of them$"
        with pytest.raises(expected, match=message):
            backend.broadcast_object(thing if backend.rank == last else None, last)
        with pytest.raises(expected, match=message):
            backend.allgather_object(thing if backend.rank == last else backend.rank)
    if backend.size > 1:  # two ranks refuse, each with its own reason
        expected = TypeError if backend.rank < 2 else BackendError
        with pytest.raises(
            expected, match="ranks 0, 1 could not .* type Un" if backend.rank > 1 else ["Un", "Tr"][backend.rank]
        ):
            backend.allgather_object((Unknown(), Trap(), 0)[min(backend.rank, 2)])
    assert backend.allgather_object(backend.rank) == list(range(backend.size))


def test_objects_with_code_are_refused_by_the_sender_and_the_backend_stays_usable(spmd, capfd):
    spmd(refuse_objects)
    assert "foreign" not in capfd.readouterr().out


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_in_a_forged_message_is_executed(protocol, tmp_path, capfd):
    saved = tmp_path / "forged"
    torch.save(Trap(), saved, pickle_protocol=protocol)
    for message in (saved.read_bytes(), pickle.dumps(Trap(), protocol)):
        with pytest.raises(Exception, match=r"(?i)weights.only|unsupported|invalid"):
            objects.decode(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    assert "foreign" not in capfd.readouterr().out


def other_default_device(backend):
    """Make calls while torch's default device is "meta", which stands for a GPU: calls must ignore this default."""
    weight = torch.nn.Parameter(torch.ones(2))
    mine = data(backend.rank, backend.size, 2).requires_grad_()
    with torch.device("meta"):
        assert backend.broadcast_object({"rank": backend.rank}, backend.size - 1) == {"rank": backend.size - 1}
        assert backend.allgather_object(backend.rank) == list(range(backend.size))
        backend.barrier()
        assert backend.alltoall(mine, [1] * backend.size)[1].is_cpu
        functional.allgather(mine, backend).sum().backward()
        reducer = GradientReducer([("weight", weight)], backend, unused="none", extra=1)
        (weight * (1 + backend.rank)).sum().backward()
        reducer.close()
    assert reducer.extra.is_cpu
    assert weight.grad.tolist() == [(1 + backend.size) / 2] * 2
    assert mine.grad.tolist() == [[backend.size] * 2] * backend.size


def test_the_default_device_of_torch_does_not_matter(spmd):
    spmd(other_default_device)


def test_connect_does_not_use_the_default_device_of_torch():
    with torch.device("meta"), connect("local") as backend:
        assert backend.size == 1


def contains(tensor, shape, value):
    return tensor.shape == shape and bool((tensor == value).all())


def calls_in_any_mode(backend, inference_tensor, mode):
    """Make collective calls in ``mode``, on short and long tensors, created in inference mode if ``inference_tensor``.

    The torch backend sends tensors of up to 1 MiB in the messages that compare the ranks' calls.
    """
    size = backend.size
    for count in (2 * size, 270_000 // size * size):
        with torch.inference_mode(inference_tensor):
            mine, narrow = torch.ones(count), torch.ones(count, dtype=torch.bfloat16)
            sent = torch.full((2, count), float(backend.rank)).t()
        shape, everywhere = (count,), (size * count,)
        with mode():
            assert contains(backend.allreduce(mine, "sum"), shape, size)
            assert contains(backend.allreduce(narrow, "sum"), shape, size)
            assert contains(backend.allreduce_async(mine, "sum").wait(), shape, size)
            assert contains(backend.allreduce_(narrow, "average"), shape, 1)
            assert contains(backend.allreduce_async_(narrow, "sum").wait(), shape, size)
            assert contains(backend.allreduce_async_(mine, "sum").wait(), shape, size)
            assert contains(narrow, shape, size)
            assert contains(mine, shape, size)
            assert contains(backend.reducescatter(mine, "sum"), (count // size,), size**2)
            assert contains(backend.broadcast(sent, size - 1), (count, 2), size - 1)
            assert contains(backend.broadcast_async_(sent).wait(), (count, 2), 0)
            assert contains(sent, (count, 2), 0)
            assert contains(backend.broadcast_(mine), shape, size)
            assert contains(backend.allgather(mine), everywhere, size)
            assert contains(backend.allgather_async(mine).wait(), everywhere, size)
            assert contains(backend.alltoall(mine), shape, size)
            assert all(contains(each, shape, size) for each in backend.allgather_object(mine))
            backend.barrier()
            backend.start_allreduce(mine, ReduceOp.SUM, "all").wait()
            backend.start_sum(mine, "sums", 1 / size, tail=1).wait()
            backend.start_tree_sum(mine, [], sum_order(size, size), "tree", 1 / size).wait()
        assert contains(mine[:-1], (count - 1,), size**2)
        assert mine[-1] == size**3
        assert backend.allreduce(mine, "max")[0].item() == size**2


def test_calls_in_every_grad_mode_accept_normal_and_inference_tensors(spmd):
    modes = (torch.inference_mode, torch.no_grad, torch.enable_grad)
    spmd.each(calls_in_any_mode, [(inference_tensor, mode) for inference_tensor in (False, True) for mode in modes])


def test_an_inference_tensor_is_replaced_by_an_ordinary_view():
    with torch.inference_mode():
        z = torch.complex(torch.arange(6.0), torch.ones(6)).view(2, 3)
        tensors = [z, z.t()[1:], z.conj(), z.conj().imag, z[0, 0], z[:0], torch.ones(3).to(torch.float8_e4m3fn)]
    for tensor in tensors:
        found = ordinary(tensor)
        assert (found.is_inference(), found.data_ptr(), found.dtype) == (False, tensor.data_ptr(), tensor.dtype)
        assert (found.shape, found.stride()) == (tensor.shape, tensor.stride())
        assert found.cfloat().tolist() == tensor.cfloat().tolist()
    tensor = torch.ones(3)
    assert ordinary(tensor) is tensor


def average_in_torchs_threads():
    """Average subnormal numbers. ``torch.full`` starts worker threads, which would flush such numbers to zero."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.set_flush_denormal(True)
    try:
        average = average_(torch.full((200_000,), 4, dtype=torch.int32).view(torch.float32), 2).view(torch.int32)
        return average.unique().tolist(), torch.get_num_threads()
    finally:
        torch.set_num_threads(before)  # otherwise Python threads that start later would inherit the number 2


def test_an_average_keeps_subnormal_numbers_that_torchs_worker_threads_would_flush_to_zero():
    # A new Python thread has no worker threads of torch yet, so the function starts them.
    thread, found = in_thread(average_in_torchs_threads)
    thread.join()
    assert found == [([2], 2)]


# -- several threads ----------------------------------------------------------------------------------------------


def in_thread(call):
    """Start ``call`` in a thread; return the thread, and a list that gets the result, or the message of a BackendError."""
    found = []

    def run():
        try:
            found.append(call())
        except BackendError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def calls_of_two_threads(backend):
    def one_call():
        thread, found = in_thread(backend.barrier)
        thread.join()
        return found

    (message,) = backend.whole_call(one_call)
    assert message.startswith(f"two threads call this backend at once on rank {backend.rank}: ")
    backend.barrier()


def test_a_call_during_a_call_of_another_thread_is_an_error(many):
    many(calls_of_two_threads)


class RootWithCalls:
    """A root that makes calls when it is read, like a signal handler or finalizer that runs during the broadcast."""

    def __init__(self, backend):
        self.backend, self.channel, self.messages = backend, backend.channel(), []

    def __index__(self):
        self.channel.barrier()
        with pytest.raises(BackendError) as caught:
            self.backend.barrier()
        self.messages.append(str(caught.value))
        return 0


def calls_during_a_call(backend):
    root = RootWithCalls(backend)
    tensor = torch.tensor(float(backend.rank + 1))
    assert backend.broadcast(tensor, root) == backend.broadcast_async(tensor, root).wait() == 1
    fact = f"a signal handler or finalizer calls this backend during another call of its thread on rank {backend.rank}: "
    assert [message.startswith(fact) for message in root.messages] == [True, True]
    backend.barrier()


def test_a_call_during_a_call_of_the_same_thread_is_an_error_unless_it_uses_a_channel(many):
    many(calls_during_a_call)


def call_of_a_thread_on_rank_0(backend):
    if backend.rank == 0:
        thread, found = in_thread(partial(backend.allreduce, torch.ones(2)))
        thread.join()
        (message,) = found
    else:
        with pytest.raises(BackendError) as caught:
            backend.allreduce(torch.ones(2))
        message = str(caught.value)
    assert "rank 0: average (float32, 2) in a second thread, which needs a channel()" in message
    backend.barrier()


def test_equal_calls_of_different_threads_are_not_matched(processes):
    processes(call_of_a_thread_on_rank_0)


def test_a_thread_that_reuses_the_id_of_the_first_thread_counts_as_a_second_thread():
    made, found = [], []
    first = threading.Thread(target=lambda: made.append(connect("local")))
    first.start()
    first.join()
    with made[0] as backend:
        compare = backend.exchange_call

        def exchange_call(*args):
            found.append(backend.in_second_thread)
            return compare(*args)

        with (
            mock.patch.object(backend, "exchange_call", exchange_call),
            mock.patch("threading.get_ident", return_value=first.ident),
        ):
            backend.barrier()
    assert found == [True]


def thread_with_a_channel(backend):
    channel = backend.channel()
    thread, found = in_thread(lambda: [channel.allreduce(torch.full((3,), n), "sum").tolist() for n in range(20)])
    mine = [backend.allreduce(torch.full((3,), n), "sum").tolist() for n in range(100, 120)]
    thread.join()
    size = backend.size
    assert mine == [[n * size] * 3 for n in range(100, 120)]
    assert found == [[[n * size] * 3 for n in range(20)]]


def test_a_thread_with_a_channel_works_beside_the_first_thread(many):
    many(thread_with_a_channel)


def sums_beside_calls(backend, count):
    """Start a sum, on rank 0 before a call and on other ranks after it. Repeat both with the call in a second thread."""
    buffer = backend.new_buffer(1000, torch.float32, torch.device("cpu"))
    for threads in (False, True):
        values, buffer = torch.ones(count), buffer.fill_(1.0)
        if backend.rank == 0:
            work = backend.start_sum(buffer, "gradients")
        if threads:
            thread, found = in_thread(partial(backend.allreduce, values, "sum"))
        else:
            found = [backend.allreduce(values, "sum")]
        if threads and backend.rank:
            thread.join()
        if backend.rank:
            work = backend.start_sum(buffer, "gradients")
        work.wait()
        if threads:
            thread.join()
        assert buffer.unique().tolist() == found[0].unique().tolist() == [backend.size]


def test_ranks_may_order_gradient_sums_and_other_calls_differently(many):
    many.each(sums_beside_calls, [(3,), (100_000,)])


# -- asynchronous calls -------------------------------------------------------------------------------------------


def await_done(work):
    deadline = time.monotonic() + 30
    while not work.done():
        assert time.monotonic() < deadline, "done() is still False"
        time.sleep(0.001)


def asynchronous(backend):
    everyone = [data(rank, 6, 2) for rank in range(backend.size)]
    mine = everyone[backend.rank].clone()
    total = reduced(everyone, ReduceOp.SUM)
    in_place = mine.clone(), mine.clone()
    works = [
        backend.allreduce_async(mine, "sum", "a"),
        backend.allreduce_async_(in_place[0], "sum"),
        backend.reducescatter_async(mine, "sum"),
        backend.broadcast_async(mine, backend.size - 1),
        backend.broadcast_async_(in_place[1], 0),
        backend.allgather_async(mine),
        backend.alltoall_async(mine, [1] * backend.size),
    ]
    # On every rank, a blocking call runs after all earlier asynchronous calls.
    check(backend.allreduce(mine, "sum"), total)
    assert all(work.done() for work in works)
    rows, received = works[6].wait()
    for work, expected in zip(
        works,
        [
            total,
            total,
            total.tensor_split(backend.size)[backend.rank],
            everyone[-1],
            everyone[0],
            torch.cat(everyone),
        ],
        strict=False,
    ):
        check(work.wait(), expected)
        assert work.wait() is work.wait()
    check(rows, torch.stack([each[backend.rank] for each in everyone]))
    assert received.tolist() == [1] * backend.size
    assert works[1].wait() is in_place[0]
    assert works[4].wait() is in_place[1]
    assert mine.equal(everyone[backend.rank])


def test_asynchronous_calls_give_the_results_of_blocking_calls(spmd):
    spmd(asynchronous)


def done_by_itself(backend):
    work = backend.allreduce_async(torch.ones(1000), "sum")
    await_done(work)
    check(work.wait(), torch.full((1000,), float(backend.size)))
    # Each rank waits for the calls in a different order.
    works = [backend.allreduce_async(torch.full((3,), float(n)), "sum") for n in range(8)]
    for n in sorted(range(8), key=lambda n: (n * (backend.rank + 3)) % 11):
        check(works[n].wait(), torch.full((3,), float(n * backend.size)))
    # A tree sum of a short tensor is one operation. Without shared memory, longer tensors need a second one, which only
    # ``wait`` starts.
    short = torch.ones(3)
    work = backend.start_tree_sum(short, [], sum_order(backend.size, backend.size), "tree")
    await_done(work)
    work.wait()
    check(short, torch.full((3,), float(backend.size)))


def test_asynchronous_calls_complete_without_a_wait_and_ranks_may_wait_in_any_order(spmd):
    spmd(done_by_itself)


def primitives(backend):
    tensors = [data(backend.rank, 5, seed=n) for n in range(4)]
    works = [backend.start_allreduce(tensor, ReduceOp.SUM, f"p{n}") for n, tensor in enumerate(tensors)]
    backend.barrier()  # the barrier does not wait for the primitives
    await_done(works[0])
    for n, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work.wait() is None
        assert work.wait() is None
        assert work.done()
        check(tensor, reduced([data(rank, 5, seed=n) for rank in range(backend.size)], ReduceOp.SUM))
    backend.drain()


def test_primitives_run_side_by_side_with_checked_calls(spmd):
    spmd(primitives)


def asynchronous_failure(backend):
    work = backend.allreduce_async(torch.zeros(2 + backend.rank % 2), "sum")
    after = backend.allreduce_async(torch.ones(1), "sum")
    for _ in range(2):
        with pytest.raises(BackendError, match="do not agree"):
            work.wait()
    assert work.done()
    assert after.wait().item() == backend.size


def test_an_asynchronous_mismatch_is_raised_by_wait_and_later_calls_work(many):
    many(asynchronous_failure)


# -- mismatches ---------------------------------------------------------------------------------------------------


def disagree(backend, what):
    odd = backend.rank == backend.size - 1
    calls = {
        "shape": (lambda: backend.allreduce(torch.zeros(4 if odd else 3), "sum", "x"), "sum of 'x' (float32, 3)", "4)"),
        "layout": (lambda: backend.allreduce(torch.zeros((1, 4) if odd else (4, 1))), "4×1)", "1×4)"),
        "columns": (lambda: backend.allgather(torch.zeros(1, 2 + odd)), "any×2)", "any×3)"),
        "dtype": (lambda: backend.allreduce(torch.zeros(3, dtype=torch.int32 if odd else None)), "float32", "int32"),
        "op": (lambda: backend.allreduce(torch.zeros(3), "max" if odd else "sum", "x"), "sum of 'x'", "max of 'x'"),
        "root": (lambda: backend.broadcast(torch.zeros(3), int(odd)), "from rank 0", "from rank 1"),
        "kind": (
            lambda: backend.broadcast(torch.zeros(3)) if odd else backend.allreduce(torch.zeros(3)),
            "average",
            "broadcast",
        ),
        "name": (lambda: backend.barrier("b" if odd else "a"), "barrier of 'a'", "barrier of 'b'"),
        "group": (lambda: backend.group([0] if odd else [0, 1]), "group (0×1)", "group (0)"),
        "object": (lambda: backend.barrier() if odd else backend.allgather_object(1), "allgather_object", "barrier"),
        "alltoall": (lambda: backend.alltoall(torch.zeros(backend.size, 1 + odd)), "any×1)", "any×2)"),
        "reducescatter": (lambda: backend.reducescatter(torch.zeros(5 + odd)), "average) (float32, 5)", "(float32, 6)"),
        # The device "meta" stands for a GPU: a tensor on it cannot be sent, so the error must be raised before sending.
        "device": (lambda: backend.allreduce(torch.zeros(3, device="meta" if odd else "cpu")), "32, 3)", "32, 3, meta)"),
    }
    call, expected_first, expected_second = calls[what]
    with pytest.raises(BackendError) as caught:
        call()
    first, _, second = str(caught.value).partition("; ")
    assert f"rank{'s' * (backend.size > 2)} {', '.join(map(str, range(backend.size - 1)))}: " in first
    assert expected_first in first
    assert second.startswith(f"rank {backend.size - 1}: ")
    assert expected_second in second
    assert backend.allreduce(torch.ones(1), "sum").item() == backend.size


MISMATCHES = ["shape", "layout", "columns", "dtype", "op", "root", "kind", "name", "group", "object", "alltoall"]
MISMATCHES += ["reducescatter", "device"]


def test_a_mismatch_is_raised_on_every_rank_and_names_the_calls_of_all_ranks(many):
    many.each(disagree, [(what,) for what in MISMATCHES])


def other_calls(backend):
    """Make one call on rank 0, and at the same time a different call on the other ranks, for every pair of calls.

    On Horovod, pair each call only with the next one in the list, because an exchange takes ten times as long as on the
    other backends. These pairs are enough, because the ranks detect the difference before they use Horovod's operations.
    """
    rows = torch.zeros(2 * backend.size)
    weight = torch.nn.Parameter(torch.ones(2))
    reducer = GradientReducer([("weight", weight)], backend)
    calls = {
        "allreduce": lambda: backend.allreduce(torch.ones(2)),
        "allreduce of a long tensor": lambda: backend.allreduce(torch.ones(270_000)),
        "reducescatter": lambda: backend.reducescatter(rows),
        "broadcast": lambda: backend.broadcast(rows),
        "allgather": lambda: backend.allgather(rows),
        "alltoall": lambda: backend.alltoall(rows),
        "alltoall with wrong splits": lambda: backend.alltoall(rows, [3] * backend.size),
        "broadcast from no rank": lambda: backend.broadcast(rows, backend.size),
        "barrier": backend.barrier,
        "broadcast_object": lambda: backend.broadcast_object(1),
        "allgather_object": lambda: backend.allgather_object(1),
        "allgather_object of an unknown class": lambda: backend.allgather_object(Unknown()),
        "group": lambda: backend.group([0]),
        "group of all ranks": lambda: backend.group(range(backend.size)),
        "channel": backend.channel,
        "compare": lambda: compare(backend, "settings", lambda: {"seed": backend.rank}),
        "broadcast_parameters": lambda: broadcast_parameters(torch.nn.Linear(1, 1), backend),
        "first backward": lambda: weight.sum().backward(),
    }
    names = list(calls)
    for number, one in enumerate(names):
        for other in names[number + 1 :][: 1 if backend.name == "horovod" else None]:
            if {one, other} == {"allgather_object", "allgather_object of an unknown class"}:
                continue  # all ranks make the same call, although some objects are refused
            with pytest.raises(BackendError, match="the ranks do not agree on a collective call"):
                calls[other if backend.rank else one]()
    reducer.close()
    assert backend.allreduce(torch.ones(1), "sum").item() == backend.size


def test_every_pair_of_different_calls_is_an_error_on_every_rank(many):
    many(other_calls)


def after_other_sums(backend):
    """Make a call on the device "meta", which stands for a GPU, as if each rank r had started r sums of gradients there.

    On a GPU, NCCL runs calls and sums of gradients in one group, so all ranks must start them in the same order.
    """
    backend.sums_among_calls = lambda device: backend.rank if device == "meta" else 0
    with pytest.raises(BackendError) as caught:
        backend.allreduce(torch.ones(2, device="meta"), "sum")
    assert backend.allreduce(torch.ones(2), "sum").tolist() == [backend.size] * 2
    return str(caught.value)


def test_a_call_after_different_numbers_of_sums_is_refused_on_every_rank():
    for message in run_threads(2, after_other_sums):
        assert message.endswith("rank 0: sum (float32, 2, meta); rank 1: sum (float32, 2, meta) after 1 sum of gradients")


def counted_sums(backend):
    """Choose the groups for a call and for a sum on a simulated GPU, and start a sum on the CPU.

    Return ``sums_among_calls`` of the GPU and of the CPU.
    """
    gpu = types.SimpleNamespace(is_cpu=False, is_cuda=True)
    backend._nccl, before = gpu, backend._nccl
    try:
        assert backend._group_of(gpu) is backend._group_of_sums(gpu) is gpu
        backend.start_sum(torch.ones(2), "x").wait()
        return backend.sums_among_calls("cuda"), backend.sums_among_calls("cpu")
    finally:
        backend._nccl, backend._nccl_sums = before, 0


def test_the_torch_backend_counts_the_sums_in_its_nccl_group(pool):
    pool.connect("torch", 2)
    assert pool.run(counted_sums) == [(1, 0)] * 2


def without_a_native_store(backend):
    """Ask for the store of NCCL while rank 0 cannot listen; return the error. The backend stays usable."""
    listen = mock.patch("dualtrain.backends.torch.listen", side_effect=OSError(24, "Too many open files"))
    with listen, pytest.raises(BackendError) as caught:
        backend._native_store()
    backend.barrier()
    return str(caught.value)


def test_every_rank_raises_if_rank_0_cannot_serve_the_store_of_nccl(pool):
    pool.connect("torch", 2)
    assert pool.run(without_a_native_store) == [
        "the start of NCCL failed on rank 0 of 2: [Errno 24] Too many open files",
        "the start of NCCL failed on rank 0: see its own message",
    ]


class OneGroup(ThreadsBackend):
    """Backend with one group for calls and sums of gradients, as NCCL has: all ranks must start them in the same order."""

    @property
    def gradient_path(self):
        return self


def sum_after_an_asynchronous_call(backend):
    """Start a sum after an asynchronous call. Rank 0 sends the data of this call late."""
    backend.__class__ = OneGroup
    weight, start, started = torch.nn.Parameter(torch.ones(2)), backend.start_allreduce, threading.Event()
    reducer = GradientReducer([("weight", weight)], backend)
    weight.sum().backward()  # the first backward pass makes calls of its own

    def start_late(tensor, op, name):
        if backend.rank == 0 and name == "late":
            time.sleep(0.2)
        work = start(tensor, op, name)
        started.set()
        return work

    backend.start_allreduce = start_late
    work, weight.grad = backend.allreduce_async(torch.ones(3), "sum", "late"), None
    if backend.rank:
        assert started.wait(20)
    (weight * (1 + backend.rank)).sum().backward()
    assert work.wait().tolist() == [2] * 3
    assert weight.grad.tolist() == [1.5] * 2
    reducer.close()


def test_a_sum_of_gradients_starts_after_earlier_asynchronous_calls():
    run_threads(2, sum_after_an_asynchronous_call)


def sends_from_other_devices(backend):
    tensor = torch.ones(2 * backend.size, device="meta")
    calls = [backend.allreduce, backend.broadcast, backend.allgather, backend.alltoall, backend.reducescatter]
    calls.append(lambda tensor: backend.start_sum(tensor, "sum"))
    with mock.patch.object(backend.watch, "wait_for_report", side_effect=AssertionError("no rank has failed")):
        for call in calls:
            with pytest.raises(BackendError, match="a tensor on the device 'meta' cannot be sent to other ranks: move it"):
                call(tensor)
    assert backend.allreduce(torch.ones(1), "sum").item() == backend.size


@pytest.mark.parametrize("name", ["torch", "shm", "horovod"])
def test_a_tensor_on_an_unsupported_device_is_refused_without_a_wait_for_a_failure_report(pool, name):
    if name == "horovod":
        require_horovod()
    pool.connect(name, 2)
    pool.run(sends_from_other_devices)


# -- local ranks --------------------------------------------------------------------------------------------------


def describe(backend):
    assert f"rank {backend.rank} of {backend.size}" in repr(backend)
    return backend.name, backend.rank, backend.local_rank, backend.local_size, backend.cross_rank, backend.cross_size


def test_local_and_cross_ranks_on_one_host(spmd):
    name = spmd.name.replace("shm", "torch")
    assert spmd(describe) == [(name, rank, rank, spmd.size, 0, 1) for rank in range(spmd.size)]


# -- invalid calls on some ranks ----------------------------------------------------------------------------------

INVALID_CALLS = {
    "no average of bool": lambda b: b.allreduce(torch.ones(2, dtype=torch.bool if b.rank else torch.float32)),
    "complex has no order": lambda b: b.allreduce(torch.ones(2, dtype=torch.cfloat if b.rank else torch.float32), "max"),
    "no such root": lambda b: b.broadcast(torch.ones(2), 0 if b.rank == 0 else b.size),
    "no rows": lambda b: b.reducescatter(torch.ones(2) if b.rank == 0 else torch.tensor(1.0)),
    "uneven rows": lambda b: b.alltoall(torch.ones(b.size + (b.rank > 0))),
    "splits with fractions": lambda b: b.alltoall(torch.ones(b.size), [1.5 if b.rank else 1] * b.size),
    "no such operation": lambda b: b.allreduce(torch.ones(2), "mean" if b.rank else "average"),
    "no such operation later": lambda b: b.allreduce_async_(torch.ones(2), "mean" if b.rank else "sum").wait(),
    "an argument that raises": lambda b: b.allreduce(torch.ones(1), Loud() if b.rank else "sum"),
    "sparse": lambda b: b.allreduce(torch.eye(2).to_sparse() if b.rank else torch.eye(2)),
    "sparse rows": lambda b: b.reducescatter(torch.eye(3).to_sparse() if b.rank else torch.eye(3)),
    "no tensor": lambda b: b.allgather(1.0 if b.rank else torch.ones(1)),
    "no tensor later": lambda b: b.broadcast_async(None if b.rank else torch.ones(1)).wait(),
    "elements that share memory": lambda b: b.allreduce_(torch.ones(1).expand(2) if b.rank else torch.ones(2)),
    "no members": lambda b: b.group([] if b.rank else [0]),
    "a name that is not a text": lambda b: b.barrier(["x"] if b.rank else "x"),
    "no gradient": lambda b: functional.allreduce(torch.ones(1), b, "max" if b.rank else "sum"),
    "no tensor with a gradient": lambda b: functional.allgather([1.0] if b.rank else torch.ones(1), b),
    "no parameters": lambda b: broadcast_parameters([None] if b.rank else [torch.ones(1)], b),
    "no model": lambda b: average_buffers(None if b.rank else torch.nn.BatchNorm1d(1), b),
    "a sparse parameter": lambda b: broadcast_parameters([torch.eye(2).to_sparse() if b.rank else torch.eye(2)], b),
    "no optimizer": lambda b: broadcast_optimizer_state(None if b.rank == 0 else torch.optim.SGD([torch.ones(1)]), b),
}


class Loud:
    """An argument whose ``str()`` raises an exception. The ``str()`` of this exception raises too."""

    def __str__(self):
        raise LoudError


class LoudError(Exception):
    __str__ = Loud.__str__


def invalid_call_on_some_ranks(backend, which):
    with pytest.raises(BackendError, match="refused since") as caught:
        INVALID_CALLS[which](backend)
    assert "rank 0: " in str(caught.value)
    assert backend.allreduce(torch.ones(1), "sum").item() == backend.size


def test_a_call_that_is_invalid_on_some_ranks_is_an_error_on_all_ranks(many):
    many.each(invalid_call_on_some_ranks, [(which,) for which in INVALID_CALLS])


def default_group_on_one_rank(backend):
    dist = torch.distributed
    if backend.rank:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(BackendError, match="rank 1: make_default_group, refused since torch"):
            backend.make_default_group()
        assert dist.is_initialized() == (backend.rank == 1)
    finally:
        if backend.rank:
            dist.destroy_process_group()


def test_a_default_group_that_already_exists_on_one_rank_is_an_error_on_all_ranks(pool):
    pool.connect("torch", 2)
    pool.run(default_group_on_one_rank)


def fails_after_the_comparison(backend):
    last = backend.rank == backend.size - 1
    if last:
        backend.start_allgather = mock.Mock(side_effect=MemoryError("no memory for the result"))
    with pytest.raises(
        MemoryError if last else PeerFailedError, match="no memory" if last else "interrupted by MemoryError"
    ):
        backend.allgather(torch.ones(5))
    with pytest.raises(BackendError, match="interrupted by MemoryError, so that the calls of rank 2 no longer match"):
        backend.barrier()


def test_an_error_after_the_comparison_is_reported_and_later_calls_are_refused():
    """Without the report, the other ranks would wait, or get the data of the next call."""
    run_threads(3, fails_after_the_comparison)


def broadcast_after_pending_calls(backend):
    # The last rank broadcasts late. With different orders of calls, its broadcast would be matched with an all-reduce.
    works = [backend.allreduce_async(torch.ones(1000), "sum") for _ in range(4)]
    if backend.rank == backend.size - 1:
        time.sleep(0.2)
    model = torch.nn.Linear(3, 3)
    broadcast_parameters(model, backend)
    return [work.wait()[0].item() for work in works]


def test_broadcast_parameters_runs_after_pending_asynchronous_calls(many):
    assert many(broadcast_after_pending_calls) == [[float(many.size)] * 4] * many.size
