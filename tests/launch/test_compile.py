"""A compiled model. This test is in tests/launch because compilation takes as long as a launch."""

from __future__ import annotations

import shutil

import pytest

from tests.training.test_trainer import train_compiled_and_plain


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch warns when its compiler is imported
@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy:DeprecationWarning")  # compiler of torch 2.5 on Python 3.12
@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="needs a C++ compiler")
def test_a_compiled_model_trains_the_same(tmp_path):
    train_compiled_and_plain(tmp_path)
