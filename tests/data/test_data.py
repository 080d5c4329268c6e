"""Datasets and the order of samples."""

from __future__ import annotations

import struct

import pytest
import torch

from dualtrain.data import Batch, load_data
from dualtrain.data.sampler import Sampler, part_of_rank
from dualtrain.errors import UserError


@pytest.mark.parametrize("batch", [1, 7, 64, 100, 1000])
def test_an_epoch_has_every_sample_once(batch):
    sampler = Sampler(100, batch, seed=3)
    seen = torch.cat([sampler.batch(2, number) for number in range(sampler.batches)])
    assert sorted(seen.tolist()) == list(range(100))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_a_global_batch_is_split_among_the_ranks_in_order_and_evenly(size):
    batch = Sampler(50, 22, seed=0).batch(0, 1)
    parts = [part_of_rank(batch, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat(parts), batch)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_order_depends_on_seed_and_epoch_alone():
    def order(seed, epoch):
        return Sampler(100, 100, seed).batch(epoch, 0).tolist()

    torch.manual_seed(1)
    first = order(0, 0)
    torch.manual_seed(2)
    assert order(0, 0) == first
    assert order(0, 1) != first
    assert order(1, 0) != first


def write_idx(path, array: torch.Tensor) -> None:
    header = struct.pack(">HBB", 0, 8, array.dim()) + b"".join(struct.pack(">I", n) for n in array.shape)
    path.write_bytes(header + bytes(array.flatten().tolist()))


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_mnist_and_fashion_mnist_are_read_from_their_files(tmp_path, name, folder):
    raw = tmp_path / folder / "raw"
    raw.mkdir(parents=True)
    images = torch.randint(0, 256, (5, 28, 28), dtype=torch.uint8)
    for part in ("train", "t10k"):
        write_idx(raw / f"{part}-images-idx3-ubyte", images)
        write_idx(raw / f"{part}-labels-idx1-ubyte", torch.arange(5, dtype=torch.uint8))
    task = load_data(name, str(tmp_path))
    assert task.shape == (1, 28, 28)
    for part in (task.train, task.val):
        inputs, targets = next(part.stream([Batch(torch.arange(5))], torch.device("cpu")))
        assert torch.allclose(inputs[:, 0], images.float() / 255)
        assert targets.tolist() == list(range(5))


@pytest.mark.parametrize(
    ("name", "folder", "part"),
    [
        ("moons", None, "cifar10, digits, fashion-mnist"),
        ("mnist", None, "--data-dir"),
        ("mnist", ".", "MNIST/raw"),
        ("digits", "missing", "No such file"),
    ],
)
def test_a_dataset_that_cannot_be_loaded_is_refused_in_one_line(tmp_path, monkeypatch, name, folder, part):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refusal:
        load_data(name, folder)
    assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)
