"""Import of torchvision, even if its compiled operators cannot be loaded with a CPU build of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@cache
def torchvision() -> Any:
    """Return the module torchvision."""
    return with_torchvision_shim(lambda: import_module("torchvision"))


def with_torchvision_shim(load: Callable[[], T]) -> T:
    """Return ``load()``, which imports torchvision. If operators are missing, declare them and call ``load`` again.

    PyPI's wheel is the CUDA build. With a CPU build of torch, the wheel's operators cannot be loaded, and its import ends
    in ``operator torchvision::nms does not exist`` (seen with torchvision 0.28.0 and torch 2.13.0). The import needs only
    the declarations of two operators. With them, models, datasets and transforms work; calling ``ops.nms`` still fails.
    """
    try:
        return load()
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    _declare_operators()
    return load()


@cache
def _declare_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library  # the declarations exist as long as this object, which the cache keeps
