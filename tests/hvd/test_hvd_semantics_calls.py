"""dualtrain/hvd/README.md#calls: results and errors of calls, on Horovod itself and on ``dualtrain.hvd``."""

from __future__ import annotations

import warnings
from math import inf, nan

import numpy
import pytest
import torch

from dualtrain.hvd.arithmetic import Average, finished, scaled
from tests.hvd.worlds import EVERY, OURS_2, PAIR, check, library, mean_of_ranks, same, sum_of_ranks

# Dtypes that Horovod reduces (REDUCED), that its other calls send (MOVED), and that it refuses (ONLY_OURS).
FLOATS = [torch.float16, torch.float32, torch.float64]
REDUCED = [torch.int32, torch.int64, *FLOATS]
MOVED = [*REDUCED, torch.uint8, torch.int8, torch.int16]
ONLY_OURS = [torch.bool, torch.bfloat16, torch.complex64, torch.complex128]


def defaults(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        mean, total = mean_of_ranks(size), sum_of_ranks(size)
        x = torch.tensor([me + 1.0])
        kept = x.clone()
        y = hvd.allreduce(x, name="average")
        assert (y.item(), x.item()) == (mean, me + 1)
        assert y.data_ptr() != x.data_ptr()
        assert hvd.broadcast(x, 0, name="root").item() == 1
        assert torch.equal(x, kept)
        assert hvd.allreduce(x, name="sum", op=hvd.Sum).item() == total
        assert hvd.allreduce(x, False, "deprecated").item() == total  # positional arguments are in Horovod's order
        handle = hvd.allreduce_async(x, True, "positions", None, 2.0, 3.0)
        assert hvd.synchronize(handle).item() == 6 * mean
        assert hvd.allreduce_(x, name="in place").data_ptr() == x.data_ptr()
        assert x.item() == mean
        z = torch.tensor([float(me)])
        assert hvd.broadcast_(z, size - 1, name="in place").data_ptr() == z.data_ptr()
        assert z.item() == size - 1
        leaf = torch.full((1,), me + 1.0, requires_grad=True)
        hvd.allreduce_(leaf, name="leaf", op=hvd.Sum)
        assert leaf.item() == total
        assert leaf.requires_grad
        assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [0, 1, 2, 3, 4, 5]
        pairs = zip([hvd.Min, hvd.Max, hvd.Product], [1, size, [1, 2, 6][size - 1]], strict=True)
        for op, wanted in pairs:
            assert hvd.allreduce(kept, name=f"op {op}", op=op).item() == wanted
        # All ranks are on one host, so local ranks equal ranks.
        found = [hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.mpi_ops.is_homogeneous()]
        assert found == [me, size, 0, 1, True]
        assert hvd.gloo_built()
        assert hvd.gloo_enabled()


def integers(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()

        def allreduced(*values, dtype=torch.int64, **options):
            name = f"{values} {dtype} {options}"
            return lambda: hvd.allreduce(torch.tensor([values[me % len(values)]], dtype=dtype), name=name, **options)

        def wanted(*values):
            total = sum(values[r % len(values)] for r in range(size))
            return [abs(total) // size * (1 if total >= 0 else -1)]

        def total(*values):
            return [sum(values[r % len(values)] for r in range(size))]

        big = 2**60 + 1
        rows = [
            same(f"{v} {d}", allreduced(*v, dtype=d), wanted(*v)) for v in [(3, 4), (-3, -4), (7, -8)] for d in REDUCED[:2]
        ]
        check(
            hvd,
            *rows,
            # Horovod computes averages in doubles, which have only 53 significant bits.
            ("large", allreduced(big, big), [2**60], [big]),
            ("large and negative", allreduced(-big, -big), [-(2**60)], [-big]),
            same("each rank truncates before the sum", allreduced(3, op=hvd.Sum, prescale_factor=0.5), [size]),
            same("after the sum", allreduced(3, 4, op=hvd.Sum, postscale_factor=0.5), [total(3, 4)[0] // 2]),
            same("negative", allreduced(-3, op=hvd.Sum, prescale_factor=0.5), [-size]),
            same("32 bits", allreduced(-3, dtype=torch.int32, op=hvd.Sum, prescale_factor=2.5), [-7 * size]),
        )


@EVERY
def test_allreduce_broadcast_and_rank_functions_behave_as_in_horovod(real):
    real(defaults)


@EVERY
def test_integer_averages_and_factors_round_toward_zero_as_in_horovod(real):
    real(integers)


def test_integer_averages_are_exact_at_world_sizes_where_horovods_are_not():
    def horovods_average(total, size):
        return int((1 / size) * total)

    k = torch.arange(1, 1001)
    assert sum(horovods_average(49 * int(n), 49) != n for n in k) == 603
    for size in (3, 49, 98, 103, 107, 161, 187, 196, 197):
        assert torch.equal(finished(k * size, Average, size, 1.0), k)
        assert torch.equal(finished(-k * size, Average, size, 1.0), -k)
    large = torch.tensor([2**62, -(2**62), 2**62 + 2])
    assert finished(large.clone(), Average, 4, 1.0).tolist() == [2**60, -(2**60), 2**60]
    assert scaled(large, 0.5).tolist() == [2**61, -(2**61), 2**61 + 1]
    assert scaled(torch.tensor([3, -3], dtype=torch.int8), 0.5).tolist() == [1, -1]


def test_integer_averages_with_a_factor_are_exact():
    k = torch.arange(1, 1001)
    for size in (3, 7, 49, 98, 103):
        assert torch.equal(finished(k * size, Average, size, 0.5), k // 2)
        assert torch.equal(finished(k * size, Average, size, 2.0), k * 2)
        for divisor in (3, 10):  # as a float, 1/3 is less than a third, and 1/10 more than a tenth
            assert torch.equal(finished(k * size, Average, size, 1 / divisor), k // divisor)
            assert torch.equal(finished(-k * size, Average, size, 1 / divisor), -(k // divisor))
    large = torch.tensor([3 * 2**55, -3 * 2**55])
    assert scaled(large, 1 / 3).tolist() == [2**55, -(2**55)]
    assert scaled(torch.tensor([-(2**63)]), 1 / 3).tolist() == [-(2**63 // 3)]  # its absolute value does not fit into int64
    for factor in (2.5, 1e30, -1e19, inf, nan):  # the products do not fit into the dtype, but no error is raised
        for values in (torch.tensor([-(2**63), 2**62]), torch.tensor([3, -(2**31)], dtype=torch.int32)):
            assert scaled(values, factor).shape == finished(values, Average, 2, factor).shape == (2,)


def without_a_dimension(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        x = torch.tensor(me + 1.0)
        check(
            hvd,
            same("allreduce", lambda: hvd.allreduce(x, name="0"), mean_of_ranks(size)),
            same("broadcast", lambda: hvd.broadcast(x, 1, name="0"), 2.0),
            ("allgather", lambda: hvd.allgather(x, name="0"), "IndexError", [r + 1.0 for r in range(size)]),
            same("reducescatter", lambda: hvd.reducescatter(x, name="0"), "ValueError"),
        )
        if backend.name != "horovod":  # Horovod's alltoall ends the process with a segmentation fault
            check(hvd, ("alltoall", lambda: hvd.alltoall(x), None, "ValueError"))
            check(hvd, ("alltoall", lambda: hvd.alltoall(x, [1] * size), None, "ValueError"))
        assert hvd.allreduce(torch.ones(0), name="empty").shape == (0,)


@EVERY
def test_tensors_without_dimensions_behave_as_in_horovod_except_in_allgather_and_alltoall(real):
    real(without_a_dimension)


def dtypes(backend):
    with library(backend) as hvd:
        size = hvd.size()
        rows = []
        for dtype in [*MOVED, *ONLY_OURS]:
            logical = dtype == torch.bool
            x = torch.ones(size, 2).to(dtype)
            one, many = (True, True) if logical else (1, size)
            d = str(dtype)
            total = lambda x=x, d=d: hvd.allreduce(x, name=d, op=hvd.Sum)[0, 0]  # noqa: E731
            rows.append(("sum " + d, total, many if dtype in REDUCED else "ValueError", many))
            scatter = lambda x=x, d=d: hvd.reducescatter(x, name=d, op=hvd.Sum)[0, 0]  # noqa: E731
            rows.append(("scatter " + d, scatter, many if dtype in REDUCED else "ValueError", many))
            for kind, args in [("allgather", ()), ("broadcast", (0,)), ("alltoall", ())]:
                move = lambda x=x, k=kind, a=args, d=d: getattr(hvd, k)(x, *a, name=d)[0, 0]  # noqa: E731
                rows.append((f"{kind} {d}", move, one if dtype in MOVED else "ValueError", one))
        mask = torch.tensor([True, False])
        for op in ("Sum", "Max"):
            half = lambda op=op: hvd.allreduce(mask, name=op, op=getattr(hvd, op), postscale_factor=0.5)  # noqa: E731
            rows.append((f"half of bool {op}", half, "ValueError", [True, False]))
        check(hvd, *rows)


@EVERY
def test_every_dtype_is_accepted_including_those_that_horovod_refuses(real):
    real(dtypes)


def layouts(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        image = torch.full((1, 2, 2, 2), me + 1.0).contiguous(memory_format=torch.channels_last)
        row = torch.full((2,), me + 1.0)
        mean = mean_of_ranks(size)
        wide = row.expand(2, 2)
        check(
            hvd,
            ("channels_last", lambda: hvd.allreduce(image, name="image").flatten()[0], "ValueError", mean),
            ("transposed", lambda: hvd.allreduce(image.mT, name="t").flatten()[0], "ValueError", mean),
            ("expanded", lambda: hvd.allreduce(wide, name="wide"), "ValueError", [[mean] * 2] * 2),
            ("strided", lambda: hvd.allgather(image[..., 0], name="cut").numel(), "ValueError", 4 * size),
            ("in place", lambda: hvd.allreduce_(image, name="in place").flatten()[0], "ValueError", mean),
        )
        if backend.name != "horovod":
            assert image.is_contiguous(memory_format=torch.channels_last)
            assert (image == mean).all()


@EVERY
def test_every_memory_layout_is_accepted_including_those_that_horovod_refuses(real):
    real(layouts)


def halves(backend):
    with library(backend) as hvd:
        size = hvd.size()
        f16, f32 = torch.tensor([60000.0]).half(), torch.tensor([2e38])
        allreduced = lambda x, name, **options: lambda: hvd.allreduce(x, name=name, **options)  # noqa: E731
        split = {"op": hvd.Sum, "prescale_factor": 1 / size, "postscale_factor": 1.0}
        check(
            hvd,
            # Horovod sums in 16 bits. dualtrain sums in 32 bits, and rounds once.
            ("fp16", allreduced(f16, "a"), [inf], [60000.0]),
            ("compressed", allreduced(f16.float(), "b", compression=hvd.Compression.fp16), [inf], [60000.0]),
            same("sums overflow", allreduced(f16, "c", op=hvd.Sum), [inf]),
            same("fp32", allreduced(f32, "d"), [inf]),
            same("divided before", allreduced(torch.tensor([49152.0]).half(), "e", **split), [49152.0]),
            same(
                "both factors",
                allreduced(f16[:1] * 0 + 3, "f", op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
                [6.0 * size],
            ),
        )


@PAIR
def test_16_bit_averages_overflow_only_on_horovod(real):
    real(halves)


def handles(backend):
    with library(backend) as hvd:
        x = torch.ones(2)
        handle = hvd.allreduce_async(x, name="a", op=hvd.Sum)
        assert isinstance(handle, int)
        first, second = hvd.synchronize(handle), hvd.synchronize(handle)
        assert first.tolist() == [hvd.size()] * 2
        assert second is None
        check(
            hvd,
            same("poll", lambda: hvd.poll(10**6), "ValueError"),
            same("poll again", lambda: hvd.poll(handle), "ValueError"),
            same("synchronize", lambda: hvd.synchronize(10**6), None),
            same("both", lambda: hvd.allreduce(x, average=True, op=hvd.Sum, name="b"), "ValueError"),
            ("a number", lambda: hvd.allreduce(1.0, name="c"), "AttributeError", "ValueError"),
            ("8 bits", lambda: hvd.allreduce(x.byte(), name="e", op=hvd.Sum), "ValueError", [hvd.size()] * 2),
            ("no set", lambda: hvd.allreduce(x, name="d", process_set=hvd.ProcessSet([0])), "TypeError", "ValueError"),
        )
        f32, f64 = hvd.grouped_allreduce([x, x.double()], name="mixed", op=hvd.Sum)
        assert (f32.dtype, f64.dtype) == (torch.float32, torch.float64)
        assert f32.tolist() == f64.tolist() == [hvd.size()] * 2
        unnamed = [hvd.allreduce_async(torch.tensor([float(i)]), name="") for i in range(3)]
        assert [hvd.synchronize(handle).item() for handle in unnamed] == [0, 1, 2]
        # The handle must keep its tensors alive, as with Horovod: the caller has no reference to this tensor.
        handle = hvd.allreduce_async(torch.full((1000,), 2.0), name="alive", op=hvd.Sum)
        assert (hvd.synchronize(handle) == 2.0 * hvd.size()).all()


class Subclass(torch.Tensor):
    """A subclass of Tensor, such as libraries define."""


def in_inference_mode(backend):
    with library(backend) as hvd, torch.inference_mode():
        for x in (torch.ones(2), torch.ones(2).as_subclass(Subclass)):
            hvd.allreduce_(x, name="a", op=hvd.Sum)
            hvd.broadcast_(x, 0, name="b")
            assert x.tolist() == [hvd.size()] * 2


@PAIR
def test_calls_in_place_work_in_inference_mode(real):
    real(in_inference_mode)


@EVERY
def test_handles_are_integers_that_can_be_synchronized_once(real):
    real(handles)


def integers_of_numpy(backend):
    with library(backend) as hvd:
        summed = hvd.allreduce(torch.ones(1), op=numpy.int64(hvd.Sum))
        return hvd.broadcast(summed, numpy.int64(0)).tolist()


def test_op_and_root_may_be_integers_of_numpy(real):
    assert real(integers_of_numpy) == [[float(real.size)]] * real.size


def nested_tensors(backend):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype in torch
        tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with library(backend) as hvd:
        for call in (hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast_(x, 0)):
            with pytest.raises(ValueError, match="a nested tensor cannot be sent"):
                call(tensor)


@OURS_2
def test_nested_tensors_are_refused(real):
    real(nested_tensors)


def wrong_arguments(backend):
    """Make calls with wrong tensors and options; the world stays usable."""
    with library(backend) as hvd:
        for tensor in (torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
            for call in (hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast_(x, 0)):
                with pytest.raises(ValueError, match="tensor cannot be sent"):
                    call(tensor)
        with pytest.raises(ValueError, match="elements of the tensor share memory"):
            hvd.allreduce_(torch.ones(1).expand(3))
        for option in ({"compression": "fp16"}, {"process_set": [0, 1]}, {"op": "sum"}):
            with pytest.raises(ValueError, match=f"{next(iter(option))}=.* is not a "):
                hvd.allreduce(torch.ones(1), **option)
        for broadcast in (hvd.broadcast, hvd.broadcast_object):
            with pytest.raises(ValueError, match="root_rank '0' is not in"):
                broadcast(torch.ones(1), "0")
        # Arguments in the wrong positions: the last one is taken as ``name``.
        world = hvd.global_process_set
        for call, *arguments in (
            (hvd.allreduce, None, hvd.Sum),
            (hvd.broadcast, 0, world),
            (hvd.broadcast_object, 0, world),
            (hvd.allgather_object, world),
        ):
            with pytest.raises(ValueError, match="is not a string"):
                call(torch.ones(1), *arguments)
        return hvd.allreduce(torch.ones(1).expand(3), op=hvd.Sum).tolist()


@OURS_2
def test_calls_with_wrong_arguments_raise_value_error_and_later_calls_work(real):
    assert real(wrong_arguments) == [[2.0] * 3] * 2
