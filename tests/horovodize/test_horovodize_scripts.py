"""Complete training scripts, similar to Horovod's examples. Each script runs under horovodize on one or two ranks."""

from __future__ import annotations

import json

import pytest

from tests.forked import ROOT, run_ranks, torchrun_variables
from tests.horovodize.test_horovodize import CLEAN_ENV

ENV = {**CLEAN_ENV, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

# Source of helpers.py, a module in the script's folder.
HELPERS = r"""
import hashlib
import json
import sys
import torch
import horovod.torch as hvd

def report(model, losses, **values):
    weights = b"".join(p.detach().numpy().tobytes() for _, p in sorted(model.named_parameters()))
    values.update(rank=hvd.rank(), size=hvd.size(), losses=losses, weights=hashlib.sha256(weights).hexdigest())
    sys.stdout.write(f"report {json.dumps(values)}\n")

def shapes(count):
    # There are four classes. Each image is its class's pattern with added noise.
    generator = torch.Generator().manual_seed(5)
    patterns = torch.randn(4, 1, 8, 8, generator=generator)
    labels = torch.arange(count) % 4
    images = patterns[labels] + 0.5 * torch.randn(count, 1, 8, 8, generator=generator)
    return torch.utils.data.TensorDataset(images, labels)

def network():
    from torch import nn
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(288, 4)
    )

class Mean:
    def __init__(self, name):
        self.name, self.sum, self.count = name, torch.tensor(0.0), 0

    def add(self, value):
        self.sum += hvd.allreduce(value.detach(), name=self.name)
        self.count += 1

    def value(self):
        return (self.sum / self.count).item()
"""


def start(folder, script, *arguments, ranks=2):
    """Run the script; return the ranks' reports in rank order, and the other printed lines."""
    (folder / "helpers.py").write_text(HELPERS)
    (folder / "script.py").write_text(script)
    command = ("-m", "dualtrain.horovodize", folder / "script.py", *arguments)
    with torchrun_variables(ranks) as variables:
        ends = run_ranks(variables if ranks > 1 else [{}], command, folder / "printed", env=ENV, cwd=folder)
    for end in ends:
        assert end.returncode == 0, end.stderr
    lines = [line for end in ends for line in end.stdout.splitlines()]
    reports = [json.loads(line.removeprefix("report ")) for line in lines if line.startswith("report ")]
    assert [(report["rank"], report["size"]) for report in reports] == [(rank, ranks) for rank in range(ranks)]
    return reports, [line for line in lines if not line.startswith("report ")]


def learned(reports):
    """Assert that ranks have equal weights and the loss fell by over 30 %; return the weights and rank 0's losses."""
    assert len({report["weights"] for report in reports}) == 1
    losses = reports[0]["losses"]
    assert losses[-1] < 0.7 * losses[0]
    return reports[0]["weights"], losses


IMAGES = r"""
import argparse
import time
import torch
import torch.nn.functional as F
from torch.utils.data.distributed import DistributedSampler
import horovod.torch as hvd
from helpers import network, report, shapes

def averaged(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()

def main(options):
    hvd.init()
    torch.manual_seed(3 + hvd.rank())
    torch.set_num_threads(1)
    train, test = shapes(192), shapes(64)
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    batches = torch.utils.data.DataLoader(train, batch_size=16, sampler=sampler)
    test_sampler = DistributedSampler(test, num_replicas=hvd.size(), rank=hvd.rank())
    test_batches = torch.utils.data.DataLoader(test, batch_size=32, sampler=test_sampler)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16 else hvd.Compression.none,
        op=hvd.Adasum if options.adasum else hvd.Average,
        gradient_predivide_factor=options.predivide,
    )
    losses = []
    for epoch in range(3):
        began = time.perf_counter()
        model.train()
        sampler.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        slowest = hvd.allreduce(torch.tensor(time.perf_counter() - began), op=hvd.Max, name="seconds")
        model.eval()
        loss = right = 0.0
        with torch.no_grad():
            for images, labels in test_batches:
                scores = model(images)
                loss += F.cross_entropy(scores, labels, reduction="sum").item()
                right += (scores.argmax(1) == labels).float().sum().item()
        losses.append(averaged(loss / len(test_sampler), "loss"))
        accuracy = averaged(right / len(test_sampler), "accuracy")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.2f}, {slowest.item():.2f} s")
    report(model, losses, accuracy=accuracy)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--adasum", action="store_true")
    parser.add_argument("--predivide", type=float, default=1.0)
    main(parser.parse_args())
"""


@pytest.mark.parametrize("options", [(), ("--fp16", "--predivide", "2.0"), ("--adasum",)], ids=" ".join)
def test_image_classification_learns(options, tmp_path):
    reports, lines = start(tmp_path, IMAGES, *options)
    learned(reports)
    assert reports[0]["losses"] == reports[1]["losses"]
    assert reports[0]["accuracy"] == reports[1]["accuracy"] > 0.9
    assert [line.partition(":")[0] for line in lines] == ["epoch 0", "epoch 1", "epoch 2"]


def test_image_classification_learns_on_one_rank(tmp_path):
    reports, _ = start(tmp_path, IMAGES, ranks=1)
    learned(reports)


RESUMED = r"""
import argparse
import math
import os
import torch
import torch.nn.functional as F
from tqdm import tqdm
import horovod.torch as hvd
from helpers import Mean, network, report, shapes

PASSES, SMALL, WARM_UP, LR = 2, 8, 2, 0.02

def set_lr(epoch, progress):
    fraction = min(1.0, (epoch + progress) / WARM_UP)
    for group in optimizer.param_groups:
        group["lr"] = LR * PASSES * (1 + fraction * (hvd.size() - 1))

def train(epoch):
    model.train()
    sampler.set_epoch(epoch)
    loss, accuracy = Mean("train.loss"), Mean("train.accuracy")
    with tqdm(total=len(batches), disable=hvd.rank() != 0) as bar:
        for number, (images, labels) in enumerate(batches):
            set_lr(epoch, number / len(batches))
            optimizer.zero_grad()
            parts = math.ceil(len(images) / SMALL)
            for first in range(0, len(images), SMALL):
                scores = model(images[first : first + SMALL])
                part = F.cross_entropy(scores, labels[first : first + SMALL])
                # Metrics are averaged while gradients are being accumulated.
                accuracy.add((scores.argmax(1) == labels[first : first + SMALL]).float().mean())
                loss.add(part)
                part.div_(parts)
                part.backward()
            optimizer.step()
            bar.set_postfix(loss=loss.value(), accuracy=accuracy.value())
            bar.update(1)
    return loss.value()

def save(epoch):
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, options.format.format(epoch=epoch + 1))

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--format")
options = parser.parse_args()

hvd.init()
torch.manual_seed(7)
found = 0
if hvd.rank() == 0:  # the folder need not exist on the other ranks
    found = max((n for n in range(1, options.epochs) if os.path.exists(options.format.format(epoch=n))), default=0)
found = hvd.broadcast(torch.tensor(found), root_rank=0, name="found").item()

train_set = shapes(128)
sampler = torch.utils.data.distributed.DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
batches = torch.utils.data.DataLoader(train_set, batch_size=PASSES * SMALL, sampler=sampler)
model = network()
model[4].p = 0.0  # checkpoints do not contain the generator state that dropout needs
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=5e-5)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=PASSES, op=hvd.Average
)
if found and hvd.rank() == 0:
    state = torch.load(options.format.format(epoch=found))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
losses = []
for epoch in range(found, options.epochs):
    losses.append(train(epoch))
    save(epoch)
report(model, losses, found=found, lr=optimizer.param_groups[0]["lr"])
"""


def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path):
    def run(name, epochs):
        (tmp_path / name).mkdir(exist_ok=True)
        return start(tmp_path, RESUMED, "--epochs", epochs, "--format", tmp_path / name / "at-{epoch}.pt")[0]

    uninterrupted = run("uninterrupted", 4)
    first, second = run("interrupted", 2), run("interrupted", 4)
    assert [report["found"] for report in (*first, *second)] == [0, 0, 2, 2]
    assert second[0]["lr"] == second[1]["lr"] == 0.02 * 2 * 2
    weights, losses = learned(uninterrupted)
    assert first[0]["losses"] + second[0]["losses"] == losses
    assert [report["weights"] for report in second] == [weights, weights]


BENCHMARK = r"""
import argparse
import timeit
import numpy as np
import torch
import torch.nn.functional as F
from torchvision import models
import horovod.torch as hvd
from helpers import report

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="resnet18")
parser.add_argument("--fp16", action="store_true")
options = parser.parse_args()
hvd.init()
torch.manual_seed(hvd.rank())
model = getattr(models, options.model)(norm_layer=hvd.SyncBatchNorm)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if options.fp16 else hvd.Compression.none,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
images, labels = torch.randn(4, 3, 32, 32), torch.randint(1000, (4,))
losses = []

def step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

timeit.timeit(step, number=2)
speeds = [len(images) * 3 / timeit.timeit(step, number=3) for _ in range(2)]
if hvd.rank() == 0:
    print(f"images/s on {hvd.size()}: {hvd.size() * np.mean(speeds):.1f} +- {1.96 * np.std(speeds):.1f}")
statistics = hvd.allgather(model.bn1.running_mean[None], name="statistics")
report(model, losses, same_statistics=bool((statistics == statistics[0]).all()))
"""


def test_a_torchvision_benchmark_runs_with_sync_batch_norm(tmp_path):
    reports, lines = start(tmp_path, BENCHMARK, "--fp16")
    learned(reports)
    assert [report["same_statistics"] for report in reports] == [True, True]
    assert len(lines) == 1
    assert lines[0].startswith("images/s on 2: ")


ELASTIC = r"""
import torch
import torch.nn.functional as F
import horovod.torch as hvd
from helpers import network, report, shapes

BATCH, EPOCHS = 16, 3
hvd.init()
torch.manual_seed(hvd.rank())
data = shapes(128)
sampler = hvd.elastic.ElasticSampler(data)
batches = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
resets, attempts, seen = [], [], []

@hvd.elastic.run
def train(state):
    attempts.append((state.epoch, state.batch))
    while state.epoch < EPOCHS:
        total, first = 0.0, state.batch
        for number, (images, labels) in enumerate(batches):
            state.batch = first + number
            if state.batch % 2 == 0:
                state.commit()
            else:
                state.check_host_updates()
            if (state.epoch, state.batch) == (1, 3) and not resets:
                # Raise this as if another rank had failed in a collective. In this test, no rank fails.
                raise hvd.HorovodInternalError("lost")
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            state.sampler.record_batch(number, BATCH)
            optimizer.step()
            total += loss.item()
        state.losses.append(hvd.allreduce(torch.tensor(total / (number + 1)), name="loss").item())
        seen.append(state.sampler.processed_num)
        state.epoch += 1
        state.batch = 0
        state.sampler.set_epoch(state.epoch)
        state.commit()
    return "finished"

def on_reset():
    resets.append(hvd.size())
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * hvd.size()

state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0, losses=[])
state.register_reset_callbacks([on_reset])
result = train(state)
report(model, state.losses, result=result, resets=resets, attempts=attempts, seen=seen, epoch=state.epoch)
"""


def test_elastic_training_continues_from_the_last_commit(tmp_path):
    reports, _ = start(tmp_path, ELASTIC)
    learned(reports)
    for report in reports:
        assert (report["result"], report["epoch"], report["resets"]) == ("finished", 3, [2])
        assert report["attempts"] == [[0, 0], [1, 2]]
        assert report["seen"] == [128, 128, 128]
        assert report["losses"] == reports[0]["losses"]
        assert len(report["losses"]) == 3
