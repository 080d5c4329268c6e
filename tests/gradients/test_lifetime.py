"""Lifetime of reducers, and the parameters that they accept."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dualtrain import BackendError, DistributedOptimizer, Trainer, broadcast_optimizer_state, broadcast_parameters
from dualtrain.backends.local import LocalBackend
from dualtrain.gradients import GradientReducer
from dualtrain.gradients.buckets import Bucket
from dualtrain.launchers import World
from tests.hvd.worlds import OURS_2, library
from tests.models_for_tests import perceptron, sgd, sgd_of, small_buckets, vector_loss
from tests.threads import run_threads


@pytest.fixture
def alone():
    return LocalBackend(World(0, 1, 0, 1), torch.device("cpu"), 10.0)


# -- reducers are freed with their owner --------------------------------------------------------------------------


def trainer(model, backend):
    made = Trainer(model, sgd_of(model), lambda y, _: y.square().mean(), backend=backend)
    made.step([(torch.ones(2, 4), torch.zeros(2))], 2)
    return made


def optimizer(model, backend):
    made = sgd(model, backend)
    vector_loss(model, 0).backward()
    made.step()
    return made


def reducer(model, backend):
    made = GradientReducer(model.named_parameters(), backend)
    vector_loss(model, 0).backward()
    return made


MAKERS = pytest.mark.parametrize("make", [reducer, optimizer, trainer])


@MAKERS
def test_a_reducer_without_references_is_freed_and_its_model_cannot_train(alone, make):
    refs = []
    for _ in range(3):
        model = perceptron()
        refs += [weakref.ref(make(model, alone)), weakref.ref(model)]
    gc.collect()
    assert [ref() for ref in refs] == [None] * 5 + [model]
    with pytest.raises(RuntimeError, match=r"gradient of '2\.bias' is no longer averaged.*or call its close\(\)"):
        vector_loss(model, 0).backward()
    # With a new reducer, the model can train again. Parameters and modules may be replaced before the reducer is made, and
    # unfrozen after it is made.
    model[0] = nn.Linear(4, 6)
    model[2].bias = nn.Parameter(torch.zeros(3))
    model[2].requires_grad_(False)
    again = sgd(model, alone)
    model[2].requires_grad_(True)
    vector_loss(model, 0).backward()
    again.close()


def freed(backend):
    with library(backend) as hvd:
        refs = []
        for _ in range(3):
            model = perceptron()
            made = hvd.DistributedOptimizer(sgd_of(model), named_parameters=model.named_parameters())
            vector_loss(model, 0).backward()
            made.step()
            refs += [weakref.ref(made), weakref.ref(made.reducer), weakref.ref(model)]
        del made, model
        gc.collect()
        return sum(ref() is not None for ref in refs)


@OURS_2
def test_an_optimizer_of_hvd_without_references_is_freed(real):
    assert real(freed) == [0, 0]


def added_after_freed(backend):
    with library(backend) as hvd:
        model = perceptron()
        for begin in (0, 2):  # the optimizer of all layers is freed, then one of the last layer is made
            made = None
            gc.collect()
            model[:begin].requires_grad_(False)
            made = hvd.DistributedOptimizer(sgd_of(model[begin:]), named_parameters=model.named_parameters())
            vector_loss(model, hvd.rank()).backward()
            made.step()
        model[0].requires_grad_(True)
        made.add_param_group({"params": model[0].parameters()})
        made.zero_grad()
        vector_loss(model, hvd.rank()).backward()
        made.step()
        return [p.tolist() for p in model.parameters()]


@OURS_2
def test_hvd_combines_the_gradients_of_an_added_group_whose_first_optimizer_was_freed(real):
    first, second = real(added_after_freed)
    assert first == second


@MAKERS
def test_gradients_are_not_averaged_after_close(alone, make):
    model = perceptron()
    made = make(model, alone)
    made.close()
    made.close()
    old = {reducer: lambda: made, optimizer: lambda: made.reducer, trainer: lambda: made.optimizer.reducer}[make]()
    old.renew()
    with pytest.raises(RuntimeError, match="closed"):
        old.reduce()
    vector_loss(model, 0).backward()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


# -- hooks in several threads -------------------------------------------------------------------------------------


class RecordingBackend(LocalBackend):
    """Backend that records the order in which buckets are sent."""

    def start_sum(self, tensor, name, factor=1.0, tail=0):
        self.sent.append(int(name.rpartition(".")[2]))
        return super().start_sum(tensor, name, factor, tail)


def test_hooks_in_two_threads_send_the_buckets_in_order(monkeypatch):
    backend = RecordingBackend(World(0, 1, 0, 1), torch.device("cpu"), 10.0)
    backend.sent = []
    pack, filling = Bucket.pack, threading.Event()

    def slow_pack(bucket):
        if bucket.name.endswith("0"):
            filling.set()
            time.sleep(1e-4)  # let the other thread run
        pack(bucket)

    monkeypatch.setattr(Bucket, "pack", slow_pack)
    params = [nn.Parameter(torch.zeros(2)) for _ in range(8)]
    with small_buckets((1, 1)):
        reducer = GradientReducer([(str(i), p) for i, p in enumerate(params)], backend)
        sum(p.sum() for p in params).backward()
    assert reducer.hooks.lock is None
    reducer.hooks.lock = threading.RLock()  # as if the parameters were on two devices
    hooks = [next(iter(p._post_accumulate_grad_hooks.values())) for p in reversed(params)]
    rounds, begun, ended = 1000, threading.Barrier(2), threading.Barrier(2)
    monkeypatch.setattr("dualtrain.gradients.reducer.at_end_of_pass", lambda call: None)
    wrong = []

    def start_over():
        backend.sent.clear()
        filling.clear()
        reducer._start_over(reduced=False)
        reducer._ending, reducer._seen = (lambda: True), 1  # as if one backward pass were running

    def run_hooks_of_device(number):
        for _ in range(rounds):
            begun.wait(10)
            assert number == 0 or filling.wait(10)
            for k in range(number, len(params), 2):
                hooks[k](params[-1 - k])
            ended.wait(10)
            if number == 0:
                wrong.extend([list(backend.sent)] * (backend.sent != list(range(8))))
                for bucket in reducer.buckets:
                    bucket.finish()
                start_over()

    start_over()
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(run_hooks_of_device, number) for number in range(2)]:
            done.result(60)
    assert not wrong, f"wrong order in {len(wrong)} of {rounds} rounds, first {wrong[0]}"
    reducer.close()


def test_hooks_of_parameters_on_two_devices_use_a_lock(alone):
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))]
    reducer = GradientReducer([(str(i), p) for i, p in enumerate(params)], alone)
    assert reducer.hooks.lock is not None
    reducer.close()


# -- refused parameters -------------------------------------------------------------------------------------------


def lazy():
    return nn.LazyLinear(2).weight


def flat():
    p = nn.Parameter(torch.zeros(2))
    p._fsdp_flattened = True
    return p


def sharded():
    p = nn.Parameter(torch.zeros(2))
    p._fsdp_orig_uid = 0
    return p


OWN_DTYPE = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="needs torch 2.10, the first with grad_dtype"
)


def any_dtype():
    p = nn.Parameter(torch.zeros(2))
    p.grad_dtype = None
    return p


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lazy, "is not initialized"),
        (flat, "FullyShardedDataParallel"),
        (sharded, "was replaced in its module by a DTensor"),
        pytest.param(any_dtype, "has grad_dtype=None", marks=OWN_DTYPE),
    ],
)
def test_parameters_that_cannot_be_averaged_are_refused(alone, make, text):
    fine = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=rf"^parameter 'odd' .*{text}"):
        GradientReducer([("fine", fine), ("odd", make())], alone)
    assert not fine._post_accumulate_grad_hooks


def test_a_group_with_a_refused_parameter_is_not_added(alone):
    model = perceptron()
    optimizer = sgd(model, alone)
    with pytest.raises(ValueError, match=r"^parameter 'group 1 parameter 0' .*FullyShardedDataParallel"):
        optimizer.add_param_group({"params": [flat()]})
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert len(optimizer.param_groups) == 1
    optimizer.close()


def test_a_distributed_tensor_is_refused(alone):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        p = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()], run_check=False))
        with pytest.raises(ValueError, match="parameter 'p' is a DTensor"):
            DistributedOptimizer(torch.optim.SGD([p], 0.1), [("p", p)], backend=alone)
        for call in alone.allreduce, alone.allgather, alone.broadcast, alone.broadcast_, alone.alltoall:
            with pytest.raises(ValueError, match=r"a DTensor cannot be sent: pass its to_local\(\) or full_tensor\(\)"):
                call(p)
        with pytest.raises(ValueError, match="'p' cannot be broadcast: a DTensor"):
            broadcast_parameters([("p", p)], alone)
        adam = torch.optim.Adam([p])
        adam.state[p] = {"exp_avg": p.detach()}
        with pytest.raises(TypeError, match="it contains a DTensor, of which each rank has another shard"):
            broadcast_optimizer_state(adam, alone)
    finally:
        dist.destroy_process_group()


def test_a_model_in_ddp_causes_a_warning_but_a_submodule_named_module_does_not(alone):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(perceptron())
    finally:
        dist.destroy_process_group()
    similar = nn.Module()
    similar.module = perceptron()  # nn.DataParallel has this attribute too
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sgd(similar, alone).close()
        Trainer(similar, sgd_of(similar), backend=alone).close()
        Trainer(wrapped, sgd_of(wrapped), backend=alone).close()
    assert [str(each.message)[:40] for each in caught] == ["the model is in DistributedDataParallel:"]
    assert caught[0].filename == __file__


def wide_gradients(backend):
    p = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    p.grad_dtype = torch.float32
    reducer = GradientReducer([("p", p)], backend, passes=2)
    for _ in range(2):
        p.grad = None
        for part in (1, 2**-12 * (backend.rank + 1)):  # bfloat16 would round their sum
            (p * part).sum().backward()
        assert p.grad.dtype is torch.float32
        assert p.grad.tolist() == [1 + 2**-12 * (backend.size + 1) / 2] * 3
        reducer.renew()
    reducer.close()


@OWN_DTYPE
def test_gradients_may_have_another_dtype_than_their_parameter():
    run_threads(2, wide_gradients)


# -- gradients are freed after a failure --------------------------------------------------------------------------


def refused(backend):
    """Cause an exchange that is refused; return whether each of two gradients was freed.

    The program keeps a reference to one of the gradients during the exchange.
    """
    params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    made = DistributedOptimizer(torch.optim.SGD(params, 1.0), backend=backend)
    for added in ([], [nn.Parameter(torch.zeros(2))] * backend.rank):
        made.zero_grad()
        made.param_groups[0]["params"] += added
        with made.no_sync():
            sum(p.sum() for p in params).backward()
        kept, gradients = params[0].grad, [weakref.ref(p.grad) for p in params]
        try:
            made.synchronize()
        except BackendError:
            failed = True
        else:
            failed = False
        del kept
    assert failed
    return [ref() is None for ref in gradients]


def test_a_refused_exchange_keeps_no_reference_to_gradients():
    assert run_threads(2, refused) == [[True, True]] * 2
