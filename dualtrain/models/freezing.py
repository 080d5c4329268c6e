"""A backbone that stays as it is while the head learns."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dualtrain.errors import UserError

Norm = TypeVar("Norm", bound=_BatchNorm)


class FrozenNorm(_BatchNorm):
    """BatchNorm that stays in evaluation mode: ``model.train()`` would let it drift after the new data."""

    def train(self: Norm, mode: bool = True) -> Norm:
        """Evaluation mode, whatever is asked for."""
        return super().train(False)


class FrozenNorm1d(FrozenNorm, nn.BatchNorm1d):
    """See :class:`FrozenNorm`."""


class FrozenNorm2d(FrozenNorm, nn.BatchNorm2d):
    """See :class:`FrozenNorm`."""


class FrozenNorm3d(FrozenNorm, nn.BatchNorm3d):
    """See :class:`FrozenNorm`."""


_FROZEN = {nn.BatchNorm1d: FrozenNorm1d, nn.BatchNorm2d: FrozenNorm2d, nn.BatchNorm3d: FrozenNorm3d}


def freeze_backbone(model: nn.Module, head: str) -> None:
    """Leaves only the module named ``head`` to train, in place. Names and shapes of all tensors stay.

    Parameters outside it lose ``requires_grad``, and their BatchNorm keeps its running statistics, also after
    ``model.train()`` and in copies of the model.
    """
    for name, module in model.named_modules():
        if name == head or name.startswith(f"{head}."):
            continue
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)
        if type(module) in _FROZEN:
            # The class changes and not the object, so that what refers to the layer still does.
            module.__class__ = _FROZEN[type(module)]
            module.train()


def find_head(model: nn.Module) -> str:
    """The name of the last linear or convolutional layer, which in a classifier gives the classes.

    Raises:
        UserError: there is none with parameters of its own.
    """
    layers: list[str] = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    if not layers or not layers[-1]:
        raise UserError("--freeze-backbone needs a model that ends in a linear or convolutional layer: leave it out")
    return layers[-1]
