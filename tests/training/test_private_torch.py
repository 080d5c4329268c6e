"""Private parts of torch that the trainer and the bench use: a version without one of them is named here."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dualtrain.training.assemble import compile_errors


def test_torch_has_the_errors_of_compile():
    try:
        errors = compile_errors()
    except (ImportError, AttributeError) as error:
        pytest.fail(
            f"torch {torch.__version__} has no base class of torch.compile's errors where it was ({error}): name the new "
            "one in training/assemble.py, so that --compile fails in one line"
        )
    assert all(issubclass(kind, Exception) for kind in errors)


def test_torch_has_the_module_that_its_optimizers_import():
    assert importlib.util.find_spec("torch._dynamo"), (
        f"torch {torch.__version__} has no torch._dynamo: leave its import out of bench/worker.py, which does not time it"
    )
