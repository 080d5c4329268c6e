"""Training and evaluation mode of a model. Its modules may have different modes, for example if some layers are frozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(*parts: object) -> Iterator[None]:
    """Set the modules among ``parts`` to evaluation mode for the block, and restore each module's own mode after it."""
    # A loss that does not call ``nn.Module.__init__`` has no attribute ``training``.
    modules = (part for part in parts if isinstance(part, nn.Module) and hasattr(part, "training"))
    roots = {id(part): (part, part.training) for part in modules}.values()
    before = [(module, module.training) for root, _ in roots for module in root.modules()]
    for root, _ in roots:
        root.eval()
    try:
        yield
    finally:
        for root, training in roots:
            root.train(training)  # the user's own train() may do more than set the mode
        for module, mode in before:
            if module.training != mode:
                module.training = mode


def training_mode(model: nn.Module) -> None:
    """Call ``model.train()``. If the model was in training mode already, modules in evaluation mode keep that mode."""
    in_evaluation = [module for module in model.modules() if not module.training] if model.training else []
    model.train()  # needed in training mode too: the user's own train() may freeze layers, as is common with BatchNorm
    for module in in_evaluation:
        module.training = False
