"""The embedded digits: they equal scikit-learn's copy, their split is fixed, and their license is included."""

from __future__ import annotations

import hashlib
from importlib import resources

import numpy
import pytest
import torch

from dualtrain.data import Task, load_data
from dualtrain.data.digits import read_digits
from tests.data.test_data_sources import epoch


@pytest.fixture(scope="module")
def task() -> Task:
    return load_data("digits")


def test_the_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn: pip install scikit-learn")
    theirs = datasets.load_digits()
    with resources.files("dualtrain.data").joinpath("digits.npz").open("rb") as file:
        ours = numpy.load(file, allow_pickle=False)
        assert sorted(ours) == ["classes", "images"]
        assert numpy.array_equal(ours["images"], theirs.images)
        assert numpy.array_equal(ours["classes"], theirs.target)
        assert {ours[name].dtype for name in ours} == {numpy.dtype("uint8")}


def test_the_digits_and_their_order_have_a_fixed_hash():
    digest = hashlib.sha256()
    for inputs, targets in read_digits():
        digest.update(inputs.numpy().tobytes() + targets.numpy().tobytes())
    assert digest.hexdigest() == "65d3af19cc08c145c02f8d6bf1342be6294b72ccf59c2d30ff959839d0f064f0"


def test_the_split_of_the_digits_is_fixed(task):
    (inputs, targets), (val_inputs, val_targets) = epoch(task.train, 0, 64), epoch(task.val, 0, 64)
    assert (len(targets), len(val_targets)) == (1437, 360)
    assert (task.shape, task.classes) == ((1, 8, 8), 10)
    assert (inputs.dtype, float(inputs.min()), float(inputs.max())) == (torch.float32, 0, 1)
    images = torch.cat([inputs, val_inputs]).flatten(1)
    assert len(images.unique(dim=0)) == len(images)  # no sample is in both parts
    assert set(val_targets.tolist()) == set(range(task.classes))
    for one, other in zip(epoch(load_data("digits").train, 0, 64), (inputs, targets), strict=True):
        assert torch.equal(one, other)


def test_source_and_license_are_stored_beside_the_data():
    notice = resources.files("dualtrain.data").joinpath("digits.LICENSE").read_text(encoding="utf-8")
    for part in (
        "Alpaydin",
        "Kaynak",
        "UCI",
        "10.24432/C50P49",
        "CC BY 4.0",
        "creativecommons.org/licenses/by/4.0",
        "Changes",
    ):
        assert part in notice
