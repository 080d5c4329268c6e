"""Weights have the same bits with the torch and the Horovod backend, with torch's DDP, and with Horovod's own optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dualtrain import weights_sha256
from tests.conftest import REAL, SHARED, THREADS, Spmd
from tests.models_for_tests import (
    DEFAULT_BUCKETS,
    SMALL_BUCKETS,
    conv_net,
    image_loss,
    images,
    mean_gradients,
    small_buckets,
    wrap,
)

STEPS = 6  # only the weights after the last step are compared: a bit that differs in an earlier step changes them
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
    "adam": (torch.optim.Adam, {"lr": 3e-3}),
    "adamw": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1}),
}
CASES = [("sgd", SMALL_BUCKETS), ("adam", SMALL_BUCKETS), ("adamw", SMALL_BUCKETS), ("sgd", DEFAULT_BUCKETS)]
IDS = ["sgd", "adam", "adamw", "sgd-default-buckets"]
#: Key: whether there are more than two ranks. Value: pairs of a case and its id.
CASES_AT = {False: list(zip(CASES, IDS, strict=True)), True: [(CASES[1], IDS[1]), (CASES[3], IDS[3])]}
cases = pytest.mark.parametrize("case", CASES, ids=IDS)


def make_optimizer(name, model):
    kind, options = OPTIMIZERS[name]
    return kind(model.parameters(), **options)


def of_two_ranks(worlds):
    """Return the worlds of two ranks as test parameters. Two ranks' sums are the same in all libraries: a + b = b + a."""
    chosen = [(name, size) for name, size in worlds if size == 2]
    return {"argvalues": chosen, "ids": [f"{name}-{size}" for name, size in chosen]}


def fit(model, optimizer, rank, size):
    for step in range(STEPS):
        optimizer.zero_grad()
        image_loss(model, step * size + rank).backward()
        optimizer.step()


# -- test bodies --------------------------------------------------------------------------------------------------


def ours(backend, case):
    """Return the hash of the weights, and the number of buckets."""
    name, sizes = case
    with small_buckets(sizes):
        model = conv_net()
        optimizer = wrap(make_optimizer(name, model), model, backend)
        fit(model, optimizer, backend.rank, backend.size)
    return weights_sha256(model), len(optimizer.reducer.buckets)


def with_ddp(backend, case):
    model = conv_net()
    backend.make_default_group()
    fit(DistributedDataParallel(model), make_optimizer(case[0], model), backend.rank, backend.size)
    torch.distributed.destroy_process_group()
    return weights_sha256(model)


def with_horovods_optimizer(backend, case):
    import horovod.torch as hvd

    model = conv_net()
    optimizer = hvd.DistributedOptimizer(make_optimizer(case[0], model), model.named_parameters())
    fit(model, optimizer, backend.rank, backend.size)
    return weights_sha256(model)


def by_hand(case, size):
    """Return the hash of the weights of one process that averages the gradients of all ranks itself."""
    model = conv_net()
    optimizer = make_optimizer(case[0], model)
    for step in range(STEPS):
        losses = [lambda model, key=step * size + rank: image_loss(model, key) for rank in range(size)]
        for parameter, average in zip(model.parameters(), mean_gradients(model, losses), strict=True):
            parameter.grad = average
        optimizer.step()
    return weights_sha256(model)


def whole_batch(size, steps):
    """Return the weights of one process that trains on all ranks' samples."""
    model = conv_net()
    optimizer = make_optimizer("sgd", model)
    for step in range(steps):
        parts = [images(step * size + rank) for rank in range(size)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
        optimizer.step()
    return list(model.parameters())


def parts_of_a_batch(backend, steps):
    model = conv_net()
    optimizer = wrap(make_optimizer("sgd", model), model, backend)
    for step in range(steps):
        optimizer.zero_grad()
        image_loss(model, step * backend.size + backend.rank).backward()
        optimizer.step()
    for mine, alone in zip(model.parameters(), whole_batch(backend.size, steps), strict=True):
        torch.testing.assert_close(mine, alone, rtol=1e-5, atol=1e-6)


# -- tests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def hashes():
    """Weight hashes of dualtrain's finished runs: (world, size, case) → hash."""
    return {}


def our_hash(spmd, case, hashes):
    key = spmd.name, spmd.size, case
    if key not in hashes:
        results = spmd(ours, case)
        assert results == results[:1] * spmd.size
        digest, buckets = results[0]
        assert buckets >= 3 or case[1] == DEFAULT_BUCKETS
        hashes[key] = digest
    return hashes[key]


# With more than two ranks, the bits also depend on the order in which a library adds. Two cases suffice to detect a
# different order. The first has many small buckets, and uses Adam, whose weights show even the smallest difference
# between sums. The second has buckets of the default size.
@pytest.mark.parametrize(
    ("real", "case"),
    [
        pytest.param(world, case, id=f"{world[0]}-{world[1]}-{name}")
        for world in REAL
        for case, name in CASES_AT[world[1] > 2]
    ],
    indirect=["real"],
)
def test_torch_and_horovod_give_the_same_bits(real, case, hashes, pool):
    digest = our_hash(real, case, hashes)
    if real.name != "torch":  # torch's hash is usually in ``hashes``, because torch's worlds run first
        assert digest == our_hash(Spmd("torch", real.size, pool), case, hashes)


@pytest.mark.parametrize("many", **of_two_ranks(THREADS + REAL + SHARED), indirect=True)
@cases
def test_two_ranks_give_the_same_bits_as_ddp_and_horovod(many, case, hashes):
    digest = our_hash(many, case, hashes)
    if many.name == "threads":
        assert digest == by_hand(case, many.size)
    else:
        theirs = many({"torch": with_ddp, "shm": with_ddp, "horovod": with_horovods_optimizer}[many.name], case)
        assert theirs == [digest] * many.size


def test_ranks_on_parts_of_a_batch_train_like_one_process_on_the_whole_batch(spmd):
    spmd(parts_of_a_batch, 10)
