"""Functions for differences between torch versions: their results, and whether the oldest supported torch needs them."""

from __future__ import annotations

import configparser
import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from dualtrain import torch_versions
from tests.pool import ROOT


def oldest(package):
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    (line,) = [line for line in config["options"]["install_requires"].split() if line.startswith(f"{package}>=")]
    return Version(line.partition(">=")[2])


ENTRIES = [value for _, value in inspect.getmembers(torch_versions, inspect.isfunction)]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_the_oldest_supported_torch_needs_every_compatibility_function(entry):
    (version,) = re.findall(r"^ *Not needed from torch (\d+\.\d+) on: ", entry.__doc__, re.MULTILINE)
    assert Version(version) > oldest("torch"), (
        f"{entry.__name__} can be removed: setup.cfg requires torch {oldest('torch')}"
    )


def test_the_installed_torch_is_supported():
    assert Version(torch.__version__) >= oldest("torch")


def test_shut_down_calls_the_public_or_the_private_method():
    for name in ("_shutdown", "shutdown"):
        ended = []
        torch_versions.shut_down(SimpleNamespace(**{name: lambda ended=ended: ended.append(True)}))
        assert ended == [True]


def test_async_op_is_set_only_on_options_that_have_this_field():
    assert torch_versions.asynchronous(SimpleNamespace(asyncOp=False)).asyncOp is True
    assert vars(torch_versions.asynchronous(SimpleNamespace(timeout=1))) == {"timeout": 1}
