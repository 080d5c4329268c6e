"""Differences between the versions of torch that dualtrain supports (2.5 and newer), in one place.

Each function's docstring ends with the first version of torch that does not need the function ("Not needed from torch 2.8
on"). When setup.cfg requires that version or a newer version, a test fails until the function is removed.
``bash tests/versions.sh`` runs the tests with other versions.
"""

from __future__ import annotations

from typing import Any

import torch


def asynchronous(options: Any) -> Any:
    """Set ``options`` of a collective operation so that it is asynchronous, and return them.

    Before 2.8 the options of all-reduce, all-gather and all-to-all have no ``asyncOp``; these operations are then always
    asynchronous.

    Not needed from torch 2.8 on: set ``asyncOp`` directly.
    """
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


def shut_down(nccl: Any) -> None:
    """End an NCCL process group and its threads. Does not wait for the other ranks.

    Up to 2.6 the method is private.

    Not needed from torch 2.7 on: call ``nccl.shutdown()``.
    """
    end = getattr(nccl, "shutdown", None) or nccl._shutdown
    end()


def grad_dtype(p: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that the gradient of ``p`` must have; None if any dtype is allowed.

    Before 2.10 torch has no attribute ``grad_dtype``, and the gradient must have the dtype of ``p``.

    Not needed from torch 2.10 on: use ``p.grad_dtype``.
    """
    if not hasattr(torch.Tensor, "grad_dtype"):
        return p.dtype
    dtype: torch.dtype | None = p.grad_dtype
    return dtype
