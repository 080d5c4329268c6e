"""The training and evaluation modes of a model's modules, which may differ: layers may be frozen in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode for the block, and restore each module's own mode after it."""
    before = [(module, module.training) for module in model.modules()]
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)  # a method of the user's own may do more than set the mode
        for module, mode in before:
            module.training = mode


def training_mode(model: nn.Module) -> None:
    """Set training mode, unless the model is in it: modules in evaluation mode then stay in it."""
    if not model.training:
        model.train()
