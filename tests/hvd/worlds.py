"""The same test body on Horovod itself and on ``dualtrain.hvd``, in the pool's worlds."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch


def worlds(*chosen: tuple[str, int]) -> pytest.MarkDecorator:
    """Runs a test in these worlds: its argument ``real`` runs a body there."""
    return pytest.mark.parametrize("real", chosen, ids=[f"{name}-{size}" for name, size in chosen], indirect=True)


OURS = worlds(("torch", 2), ("torch", 3))
OURS_2 = worlds(("torch", 2))
OURS_3 = worlds(("torch", 3))
EVERY = worlds(("torch", 2), ("torch", 3), ("horovod", 2))
PAIR = worlds(("torch", 2), ("horovod", 2))
THEIRS = worlds(("horovod", 2))


def ours() -> Any:
    """``dualtrain.hvd`` on torch, whatever world this process was in before."""
    with mock.patch.dict(
        os.environ, {"DUALTRAIN_BACKEND": "torch"}
    ):  # the import sets HOROVOD_RANK and the like: undo that
        return importlib.import_module("dualtrain.hvd")


@contextmanager
def library(backend: Any, **env: str) -> Iterator[Any]:
    """Horovod's API in the world of ``backend``: Horovod itself in its own worlds, ours in torch's."""
    if backend.name == "horovod":
        import horovod.torch as theirs

        yield theirs
        return
    hvd = ours()
    with mock.patch.dict(os.environ, {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HOROVOD_FUSION_THRESHOLD": "", **env}):
        hvd.init(comm=backend)
    try:
        yield hvd
    finally:
        hvd.shutdown()


def is_horovod(hvd: Any) -> bool:
    """Whether this is the real library."""
    return bool(hvd.__name__.startswith("horovod"))


def plain(value: Any) -> Any:
    """Tensors as lists, so that they can be compared, and returned by the pool."""
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def outcome(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, or the name of what it raises."""
    try:
        return plain(call())
    except Exception as error:
        return type(error).__name__


def check(hvd: Any, *rows: tuple[str, Callable[[], Any], Any, Any]) -> None:
    """Check rows: a title, a call, its outcome with Horovod, its outcome with ours."""
    wrong = []
    for title, call, theirs, our in rows:
        found, wanted = outcome(call), theirs if is_horovod(hvd) else our
        if found != wanted:
            wrong.append(f"{title}: {found}, not {wanted}")
    assert not wrong, "\n".join(wrong)


def same(*row: Any) -> tuple[str, Callable[[], Any], Any, Any]:
    """A row of :func:`check` with one expectation for both libraries."""
    title, call, wanted = row
    return title, call, wanted, wanted


def mean_of_ranks(size: int) -> float:
    """The mean of 1, 2, …, size."""
    return (size + 1) / 2


def sum_of_ranks(size: int) -> int:
    """1 + 2 + … + size."""
    return math.comb(size + 1, 2)
