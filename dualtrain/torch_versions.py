"""Differences between the versions of torch that dualtrain supports (2.5 and newer), in one place.

Each function's docstring ends with the version of torch in which it can go: once setup.cfg requires that version, a test
fails until the function is gone. ``bash tests/versions.sh`` runs the tests with any versions.
"""

from __future__ import annotations

from typing import Any

import torch


def asynchronous(options: Any) -> Any:
    """``options`` of a collective operation, set so that the caller waits for the operation by its handle.

    Before 2.8 the options of all-reduce, all-gather and all-to-all have no such setting: they always wait by the handle.

    Can go in torch 2.8: set ``asyncOp`` directly.
    """
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


def shut_down(nccl: Any) -> None:
    """End an NCCL process group and its threads. Does not wait for the other ranks.

    Up to 2.6 the method is private.

    Can go in torch 2.7: call ``nccl.shutdown()``.
    """
    end = getattr(nccl, "shutdown", None) or nccl._shutdown
    end()


def grad_dtype(p: torch.Tensor) -> torch.dtype | None:
    """The dtype that the gradient of ``p`` must have; None if it may have any.

    Before 2.10 it is that of ``p`` itself: an attribute ``grad_dtype`` would be the program's own, without an effect.

    Can go in torch 2.10: use ``p.grad_dtype``.
    """
    if not hasattr(torch.Tensor, "grad_dtype"):
        return p.dtype
    found: torch.dtype | None = p.grad_dtype
    return found
