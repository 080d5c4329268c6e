"""Private parts of torch that the training code and the bench use: a failure names the part that is missing."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch

from dualtrain.training.assemble import compile_error


def test_torch_has_the_base_class_of_the_errors_of_compile():
    try:
        base = compile_error()
    except (ImportError, AttributeError) as error:
        pytest.fail(
            f"torch {torch.__version__}: the base class of torch.compile's errors has moved ({error}): name its new path "
            "in training/assemble.py, so that an error of --compile is printed in one line"
        )
    own = getattr(importlib.import_module("torch._inductor.exc"), "InductorError", base)  # exists since torch 2.7
    assert issubclass(own, base), f"torch {torch.__version__} has an InductorError of another base: catch both"


def test_torch_has_the_module_that_its_optimizers_import():
    assert importlib.util.find_spec("torch._dynamo"), (
        f"torch {torch.__version__} has no torch._dynamo: remove its (untimed) import from bench/worker.py"
    )


def test_torch_keeps_the_buffers_and_submodules_of_a_module_in_dicts():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    places = model, "_modules", "0", model[0]
    for module, name, key, value in [places, (model[0], "_buffers", "running_mean", model[0].running_mean)]:
        assert getattr(module, name, {}).get(key) is value, (
            f"torch {torch.__version__} has no Module.{name}: change common_buffers.py and averaged_weights.py in trainer/"
        )
