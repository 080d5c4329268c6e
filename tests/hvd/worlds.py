"""Run the same test bodies on Horovod itself and on ``dualtrain.hvd``, in worlds of worker processes (tests/pool.py)."""

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
    """Run a test once in each of these worlds. The test's argument ``real`` or ``fresh`` runs a body in the world."""
    return pytest.mark.parametrize("real", chosen, ids=[f"{name}-{size}" for name, size in chosen], indirect=True)


#: Worlds of ``dualtrain.hvd`` alone (OURS), of both libraries (EVERY, PAIR), and of Horovod itself alone (THEIRS).
OURS = worlds(("torch", 2), ("torch", 3))
OURS_2 = worlds(("torch", 2))
OURS_3 = worlds(("torch", 3))
EVERY = worlds(("torch", 2), ("torch", 3), ("horovod", 2))
PAIR = worlds(("torch", 2), ("horovod", 2))
THEIRS = worlds(("horovod", 2))


def ours() -> Any:
    """Return ``dualtrain.hvd`` on torch, even if this process has used another backend before."""
    # patch.dict also restores the variables that the import changes, such as HOROVOD_RANK.
    with mock.patch.dict(os.environ, {"DUALTRAIN_BACKEND": "torch"}):
        return importlib.import_module("dualtrain.hvd")


@contextmanager
def library(backend: Any, **env: str) -> Iterator[Any]:
    """Yield Horovod's API for the world of ``backend``: Horovod itself, or ``dualtrain.hvd`` in torch's worlds.

    In torch's worlds, call ``init`` on entry, with dynamic process sets and the variables ``env``, and ``shutdown`` on
    exit. Horovod's worlds are initialized already, and ``env`` has no effect there.
    """
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
    """Return whether ``hvd`` is Horovod itself."""
    return bool(hvd.__name__.startswith("horovod"))


def plain(value: Any) -> Any:
    """Convert tensors to lists: lists can be compared with ``==``, and the pool can return them."""
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of ``call``, or the name of the exception that it raises."""
    try:
        return plain(call())
    except Exception as error:
        return type(error).__name__


def check(hvd: Any, *rows: tuple[str, Callable[[], Any], Any, Any]) -> None:
    """Check rows of (title, call, outcome with Horovod, outcome with ``dualtrain.hvd``)."""
    wrong = []
    for title, call, theirs, our in rows:
        found, wanted = outcome(call), theirs if is_horovod(hvd) else our
        if found != wanted:
            wrong.append(f"{title}: {found}, not {wanted}")
    assert not wrong, "\n".join(wrong)


def same(*row: Any) -> tuple[str, Callable[[], Any], Any, Any]:
    """Return a row of :func:`check` with the same outcome for both libraries."""
    title, call, wanted = row
    return title, call, wanted, wanted


def mean_of_ranks(size: int) -> float:
    """Return the mean of 1, 2, …, size: the average over ranks, if rank r has the value r + 1."""
    return (size + 1) / 2


def sum_of_ranks(size: int) -> int:
    """Return 1 + 2 + … + size: the sum over ranks, if rank r has the value r + 1."""
    return math.comb(size + 1, 2)
