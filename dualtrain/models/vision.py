"""torchvision, imported in one place, since one of its builds needs a hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def torchvision() -> Any:
    """The module torchvision.

    PyPI's wheel is the CUDA build. Beside a CPU build of torch its compiled operators do not load, and its import ends
    in ``operator torchvision::nms does not exist`` (seen with torchvision 0.28.0 and torch 2.13.0). Declaring the two
    operators that its Python code mentions lets models, datasets and transforms work; calling ``ops.nms`` still fails.
    """
    try:
        import torchvision as module
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision as module

        module._schemas = library  # the declarations live as long as this object
    return module
