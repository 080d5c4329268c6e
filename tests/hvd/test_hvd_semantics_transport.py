"""dualtrain/hvd/README.md#transport-of-gradients: sums through shared memory and by Gloo, and when they make progress."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from dualtrain.backends.shm import segment
from dualtrain.hvd import engine
from tests.forked import wait_until
from tests.hvd.worlds import OURS, OURS_2, OURS_3, library

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
#: Dtypes of the parameters, and options of the optimizer.
CASES = {
    "average": (FLOATS, lambda hvd: {}),
    "sum": (FLOATS[:1], lambda hvd: {"op": hvd.Sum}),
    "predivide": (FLOATS[:3], lambda hvd: {"gradient_predivide_factor": 3.0}),
    "fp16": (FLOATS[:2], lambda hvd: {"compression": hvd.Compression.fp16}),
    "bf16": (FLOATS[:1], lambda hvd: {"compression": hvd.Compression.bf16}),
    "groups": (FLOATS[:2], lambda hvd: {"groups": 2}),
}


def wrapped(hvd, name, dtypes=(torch.float32,), **options):
    """Return parameters filled with zeros, and their optimizer.

    Each dtype has one parameter of more than 16 KiB and one of 3 elements.
    """
    params = [nn.Parameter(torch.zeros(count, dtype=dtype)) for dtype in dtypes for count in (9000, 3)]
    named = [(f"{name}.{i}", p) for i, p in enumerate(params)]
    return params, hvd.DistributedOptimizer(torch.optim.SGD(params, 1.0), named, **options)


def transports(hvd):
    """Return the transports of the optimizers' channels."""
    opened = hvd.mpi_ops._basics.engine().channels.gradients
    return {channel.transport for channel, _ in opened.values()}


def trained(backend, transport):
    """Return the weights after two steps of each case, and the transports."""
    weights = {}
    with library(backend, DUALTRAIN_TRANSPORT=transport) as hvd:
        generator = torch.Generator().manual_seed(hvd.rank())
        for title, (dtypes, options) in CASES.items():
            params, optimizer = wrapped(hvd, title, dtypes, **options(hvd))
            for _ in range(2):
                torch.autograd.backward(params, [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params])
                optimizer.step()
                optimizer.zero_grad()
            weights |= {(title, i): p.detach().clone() for i, p in enumerate(params)}
        return weights, transports(hvd)


def each_transport(backend):
    (native, with_native), (shared, with_shm), (default, with_default) = (
        trained(backend, name) for name in ("native", "shm", "")
    )
    assert (with_native, with_shm) == ({"gloo"}, {"shm"})
    assert with_default == ({"shm"} if backend.size == 2 else {"gloo"})
    assert all(torch.equal(default[key], p) for key, p in native.items())
    for key, p in shared.items():
        if backend.size == 2:
            assert torch.equal(native[key], p), key
        else:
            torch.testing.assert_close(native[key], p, rtol=0.05, atol=0.05, msg=str(key))
    return shared


@OURS
def test_with_two_ranks_shared_memory_gives_the_same_bits_as_gloo(real):
    first, *others = real(each_transport)
    assert all(torch.equal(p, weights[key]) for weights in others for key, p in first.items())


def in_rank_order(backend):
    """Sum numbers whose sum depends on the order: 1e8 + 1 - 1e8 is 0 in float32, and 1e8 - 1e8 + 1 is 1."""
    with library(backend, DUALTRAIN_TRANSPORT="shm") as hvd:
        (p, _), optimizer = wrapped(hvd, "order", op=hvd.Sum)
        for mine, total in ([(1e8, 1.0, -1e8), 0.0], [(1e8, -1e8, 1.0), 1.0]):
            p.backward(torch.full_like(p, mine[hvd.rank()]))
            optimizer.synchronize()
            assert p.grad.unique().tolist() == [total]
            optimizer.zero_grad()


@OURS_3
def test_shared_memory_adds_in_rank_order(real):
    real(in_rank_order)


def steps_while_rank_0_makes_no_call(backend, folder):
    """Let rank 0 make no call of ``hvd`` between its backward and the end of rank 1's step.

    A step has 12 sums, one for each parameter. Rank 0's engine thread must advance all of them in this time. From the
    second step on, rank 1 can send only one request ("progress") per step, because the test discards further requests.
    """
    marks, send = Path(folder), engine.Engine.send
    allowed = [math.inf]

    def send_if_allowed(self, message):
        if message["kind"] == "progress":
            allowed[0] -= 1
        if message["kind"] != "progress" or allowed[0] >= 0:
            send(self, message)

    limit = mock.patch.object(engine.Engine, "send", send_if_allowed)
    changes = {"_PROGRESS_SECONDS": 0.01, "_CHECKS": math.inf}
    with library(backend, HOROVOD_FUSION_THRESHOLD="0") as hvd, limit, mock.patch.multiple(engine, **changes):
        params, optimizer = wrapped(hvd, "away", (torch.float32,) * 6)
        for step in range(3):
            torch.autograd.backward(params, [torch.full_like(p, hvd.rank() + 1.0) for p in params])
            sent, stepped = marks / f"sent.{step}", marks / f"stepped.{step}"
            if hvd.rank() == 0:
                sent.touch()
                assert wait_until(stepped.exists)
            assert wait_until(sent.exists)
            optimizer.step()
            optimizer.zero_grad()
            stepped.touch()
            allowed[0] = 1
        assert transports(hvd) == {"shm"}
        assert params[0].unique().tolist() == [-4.5]


@OURS_2
def test_a_step_does_not_wait_for_the_other_ranks_step(real, tmp_path):
    real(steps_while_rank_0_makes_no_call, str(tmp_path))


def crossed(backend):
    """Let each rank wait for a sum while the other rank has not yet reduced its shard of that sum.

    The rank that sends its gradients last reduces its shard at once. The rank that sent first must reduce its shard
    later, while it waits in a different call.
    """
    with library(backend) as hvd, mock.patch.object(engine, "_PROGRESS_SECONDS", math.inf):
        pairs = [wrapped(hvd, f"crossed.{i}") for i in range(2)]

        def send(number):
            params, optimizer = pairs[number]
            optimizer.zero_grad()
            torch.autograd.backward(params, [torch.full_like(p, hvd.rank() + 1.0) for p in params])

        sends, steps = [partial(send, number) for number in range(2)], [optimizer.step for _, optimizer in pairs]
        log = partial(hvd.allreduce, torch.ones(1), name="log")
        of_rank_0 = [*sends, *steps]  # the first steps open the channels
        of_rank_0 += [sends[0], hvd.barrier, sends[1], steps[1], steps[0]]
        of_rank_0 += [sends[0], hvd.barrier, log, steps[0], sends[0], hvd.barrier, hvd.join]
        of_rank_1 = [*sends, *steps]
        of_rank_1 += [sends[1], hvd.barrier, sends[0], steps[0], steps[1]]
        of_rank_1 += [hvd.barrier, sends[0], steps[0], log, hvd.barrier, sends[0], steps[0], hvd.join]
        for call in of_rank_0 if hvd.rank() == 0 else of_rank_1:
            call()
        return pairs[0][0][0].unique().tolist()


@OURS_2
def test_a_rank_that_waits_continues_the_exchanges_of_all_optimizers(real):
    assert real(crossed) == [[-4.5], [-6.0]]  # rank 0 joins instead of taking its last step


def grown(backend, way):
    """Unfreeze a parameter before the third backward pass; add one parameter after the first pass, one after the fourth.

    The first parameter's gradient is larger than 64 KiB, so it is copied to its bucket as soon as it is ready. In the
    fourth step, rank 1 does not compute this gradient, so only rank 0 has sent it when the new parameter is added. If
    ``way`` is "calls", gradients are sent by a grouped allreduce, because the optimizer has the user's own compressor.
    """
    transport = "" if way == "calls" else way
    with library(backend, DUALTRAIN_TRANSPORT=transport, HOROVOD_FUSION_THRESHOLD="0") as hvd:
        params = [nn.Parameter(torch.zeros(count)) for count in (20000, 3, 3, 30000)]
        params[1].requires_grad_(False)
        named = [(f"grown.{way}.{i}", p) for i, p in enumerate(params[:2])]
        none = hvd.Compression.none
        options = {"compression": type("Own", (none,), {}) if way == "calls" else none}
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params[:2], 1.0), named, op=hvd.Sum, **options)
        for step in range(6):
            params[1].requires_grad_(step >= 2)
            lacking = {0} if (step, hvd.rank()) == (3, 1) else set()
            trained = [params[i] for i, first in enumerate((0, 2, 0, 3)) if step >= first and i not in lacking]
            torch.autograd.backward(trained, [torch.full_like(p, hvd.rank() + 1.0) for p in trained])
            hvd.barrier()  # let started sums make progress
            if step in (0, 3):
                optimizer.add_param_group({"params": [params[2 + step // 3]]})
            optimizer.step()
            optimizer.zero_grad()
        return [p.unique().tolist() for p in params]


@OURS_2
@pytest.mark.parametrize("way", ["native", "shm", "calls"])
def test_gradients_are_summed_once_in_the_step_in_which_parameters_are_added(real, way):
    assert real(grown, way) == [[[-16.0], [-12.0], [-18.0], [-9.0]]] * 2


def fails_to_map(backend):
    """Make the mapping of shared memory fail on rank 1."""
    problem = PermissionError(13, "Permission denied") if backend.rank else None
    with library(backend) as hvd, mock.patch.object(segment, "_open", side_effect=problem):
        params, optimizer = wrapped(hvd, "refused")
        torch.autograd.backward(params, [torch.ones_like(p) for p in params])
        optimizer.step()
        assert transports(hvd) == {"gloo"}
        assert params[0].unique().tolist() == [-1.0]


def different(backend):
    """Choose a different transport on each rank."""
    with library(backend, DUALTRAIN_TRANSPORT=("native", "shm")[backend.rank]) as hvd:
        params, optimizer = wrapped(hvd, "different")
        torch.autograd.backward(params, [torch.ones_like(p) for p in params])
        with pytest.raises(hvd.mpi_ops.HorovodInternalError, match="DUALTRAIN_TRANSPORT native on rank 0, shm on rank 1"):
            optimizer.step()


@OURS_2
def test_gloo_replaces_unusable_shared_memory_and_different_transports_are_refused(real):
    real(fails_to_map)
    real(different)


def keeps_views(backend, transport):
    """Keep views of the gradients of some steps, on rank 0 only."""
    with library(backend, DUALTRAIN_TRANSPORT=transport) as hvd:
        for title, (dtypes, options) in CASES.items():
            params, optimizer = wrapped(hvd, f"views.{title}", dtypes, **options(hvd))
            kept = []
            for step in range(5):
                torch.autograd.backward(params, [torch.full_like(p, hvd.rank() + 4.0 * step) for p in params])
                optimizer.step()
                if hvd.rank() == 0 and step in (1, 3):
                    kept += [(p.grad.clone(), p.grad.view(-1)) for p in params]
                optimizer.zero_grad()
            assert all(torch.equal(*pair) for pair in kept)
        return transports(hvd)


@OURS_3
@pytest.mark.parametrize("transport", ["native", "shm"])
def test_views_keep_their_values_with_each_transport(real, transport):
    assert real(keeps_views, transport) == [{transport if transport == "shm" else "gloo"}] * 3
