"""Checkpoints: exact values, atomic writes, detection of damage, and no code in a file."""

from __future__ import annotations

import json
import os
import random
from collections import Counter, namedtuple
from unittest import mock

import numpy
import pytest
import safetensors
import torch

from dualtrain.errors import UserError
from dualtrain.run_folder import checkpoint, structure
from dualtrain.run_folder.checkpoint_writer import Writer
from dualtrain.run_folder.folder_lock import FolderLock
from dualtrain.trainer.rank_state import random_state, restore_random_state

TREE = {
    "weights": {"a": torch.randn(3, 4), "b": torch.zeros(0), "c": torch.tensor(2.5, dtype=torch.float64)},
    "strided": torch.arange(12.0).view(3, 4).t(),
    "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
    "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
    "betas": (0.9, 0.1 + 0.2),
    "list": [1, None, True, "text", float("inf")],
}


def save(folder, step, tree):
    """Write a checkpoint, and delete all except the three newest; return its path."""
    path = checkpoint.path_of(folder, step)
    checkpoint.write(path, tree)
    checkpoint.drop_old(folder, 3, FolderLock())
    return path


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_loading_returns_the_saved_values(tmp_path):
    path = save(tmp_path, 7, TREE)
    assert same(checkpoint.load(path), TREE)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]  # no temporary file is left


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Cannot allocate memory (os error 12)"),
        RuntimeError("unable to mmap 240000288 bytes from file </proc/self/fd/3>: Cannot allocate memory (12)"),
    ],
    ids=["safetensors", "torch"],
)
def test_a_checkpoint_that_does_not_fit_into_memory_does_not_count_as_damaged(error, tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step, {"cursor": {"step": step}})
    monkeypatch.setattr(safetensors, "safe_open", mock.Mock(side_effect=error))
    with pytest.raises(type(error), match="allocate memory"):
        checkpoint.newest_good(tmp_path)
    with pytest.raises(UserError, match="may be the checkpoint of the best evaluation") as refused:
        checkpoint.find_step([tmp_path], 2)
    assert refused.value.transient


def test_too_little_memory_is_not_reported_as_a_state_of_another_model():
    with pytest.raises(torch.OutOfMemoryError), checkpoint.fitting("the state"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_the_newest_checkpoints_are_kept(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step, {"step": step})
    steps = [checkpoint.load(path)["step"] for path in checkpoint.found(tmp_path)]
    assert steps == [7, 6, 5]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(tmp_path, damage):
    save(tmp_path, 1, {"x": torch.ones(5)})
    newest = save(tmp_path, 2, {"x": torch.zeros(5)})
    data = newest.read_bytes()
    changed = {"cut": data[:-3], "flip": data[:-1] + b"\x01", "empty": b"", "text": b"not a checkpoint at all"}
    newest.write_bytes(changed[damage])
    with pytest.raises(UserError, match="damaged") as refusal:
        checkpoint.load(newest)
    assert newest.name in str(refusal.value)
    tree, problems = checkpoint.newest_good(tmp_path)
    assert torch.equal(tree["x"], torch.ones(5))
    assert newest.name in problems[0]


def test_a_folder_without_a_good_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no good checkpoint to resume from: give --resume auto"):
        checkpoint.newest_good(tmp_path)
    with pytest.raises(UserError, match="does not exist: name an existing file, or resume a run with --run-dir"):
        checkpoint.load(tmp_path / "step-1.safetensors")


def test_a_full_disk_leaves_the_old_checkpoints_whole(tmp_path, monkeypatch):
    old = save(tmp_path, 1, TREE)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2, TREE)
    assert [file.name for file in tmp_path.iterdir()] == [old.name]
    assert same(checkpoint.load(old), TREE)


def test_torch_sizes_and_dtypes_and_namedtuples_and_counters_and_tuple_keys_are_loaded_as_equal_values(tmp_path):
    pair = namedtuple("pair", "a b")
    tree = {
        "size": torch.ones(2, 3).shape,
        "type": torch.bfloat16,
        "pair": pair(1, (2,)),
        "keys": {(1, (2, "x")): torch.ones(1), 3: None},
    }
    loaded = checkpoint.load(save(tmp_path, 1, tree | {"counts": Counter({(1, 2): 3})}))
    assert loaded.pop("counts") == Counter({(1, 2): 3})
    assert loaded == tree
    assert type(loaded["size"]) is type(loaded["pair"]) is tuple
    # Versions up to 0.2.0 wrote the name of a tuple's class.
    old = json.dumps(["dict", [["size", ["Size", [["value", 2], ["value", 3]]]]]])
    assert structure.rebuild(json.loads(old), {}) == {"size": (2, 3)}


@pytest.mark.filterwarnings("ignore:The epoch parameter in .scheduler.step:UserWarning")  # SequentialLR of torch 2.5
def test_a_schedule_with_milestones_continues_from_its_saved_state(tmp_path):
    def make():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
        decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3], gamma=0.1)
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [2])

    (optimizer, schedule), (other, loaded) = make(), make()
    for steps in (1, 6):
        loaded.load_state_dict(checkpoint.load(save(tmp_path, steps, schedule.state_dict())))
        for _ in range(steps):
            for one in (optimizer, schedule, other, loaded):
                one.step()
            assert loaded.get_last_lr() == schedule.get_last_lr()


def test_loaded_tensors_have_the_strides_of_the_saved_ones(tmp_path):
    """The bits of an optimizer's later steps depend on the strides of its state, in matrix products for example."""
    columns = torch.linalg.eigh(torch.eye(3)).eigenvectors
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tree = {"columns": columns, "image": image, "gaps": torch.randn(4, 6)[:, ::2].t(), "plain": torch.ones(2, 3)}
    loaded = checkpoint.load(save(tmp_path, 1, tree))
    assert same(loaded, tree)
    assert {name: loaded[name].stride() for name in tree} == {
        "columns": (1, 3),
        "image": (60, 1, 15, 3),
        "gaps": (1, 3),
        "plain": (3, 1),
    }


@pytest.mark.parametrize("strides", [[1], [0, 1]])
def test_strides_that_do_not_fit_the_shape_are_refused(tmp_path, monkeypatch, strides):
    monkeypatch.setattr(structure, "dense_strides", lambda _: strides)
    path = save(tmp_path, 1, {"columns": torch.ones(2, 3).t()})
    with pytest.raises(UserError, match="its structure cannot be read"):
        checkpoint.load(path)


def test_loaded_tensors_are_on_the_cpu_with_any_default_device(tmp_path):
    path = save(tmp_path, 1, {"columns": torch.arange(6.0).view(2, 3).t(), "plain": torch.ones(2, 3)})
    with torch.device("meta"):
        loaded = checkpoint.load(path)
    assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}


def test_saving_a_function_in_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(TypeError, match="plain values and tensors"):
        save(tmp_path, 1, {"function": print})


def test_packed_tensors_do_not_change_with_the_originals(tmp_path):
    tree = {"weight": torch.ones(3), "view": torch.ones(2, 3)[0]}
    packed = checkpoint.Packed(tree)
    for tensor in tree.values():
        tensor.zero_()
    packed.write(tmp_path / "file")
    assert same(checkpoint.load(tmp_path / "file"), {"weight": torch.ones(3), "view": torch.ones(3)})


def test_every_random_generator_resumes_from_its_saved_state(tmp_path):
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), float(numpy.random.standard_normal()), random.random()

    device = torch.device("cpu")
    draw()
    checkpoint.write(tmp_path / "file", random_state(device))
    drawn = draw()
    draw()
    restore_random_state(checkpoint.load(tmp_path / "file"), device)
    assert draw() == drawn


def test_exactly_the_checkpoints_after_a_step_are_set_aside(tmp_path):
    for step in (1, 2, 3):
        checkpoint.write(checkpoint.path_of(tmp_path, step), {"cursor": {"step": step}})
    checkpoint.write(tmp_path / checkpoint.BEST, {"cursor": {"step": 3}, "best": True})
    before = checkpoint.with_best(tmp_path)
    checkpoint.put_later_aside(tmp_path, 3, FolderLock(), has_best=False)
    assert checkpoint.with_best(tmp_path) == before
    checkpoint.put_later_aside(tmp_path, 2, FolderLock(), has_best=True)
    assert sorted(checkpoint.with_best(tmp_path).values()) == [1, 2]
    assert {path.name for path in tmp_path.glob("*.aside*")} == {
        "step-00000003.safetensors.aside",
        "step-00000003.safetensors.aside-2",
    }


def test_an_unexpected_error_of_the_writing_thread_is_raised_by_the_next_write(tmp_path, monkeypatch):
    writer = Writer(tmp_path, 1, pytest.fail, 60.0, FolderLock())
    monkeypatch.setattr(checkpoint.Packed, "write", lambda *_: 1 // 0)
    writer.write(1, checkpoint.Packed({}))
    with pytest.raises(ZeroDivisionError):
        writer.write(2, checkpoint.Packed({}))
