"""Freezing of a model's backbone: only its head is trained."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from torch import nn

# Private in torch 2.5 to 2.15: the base class of BatchNorm1d, 2d and 3d, which has no public name.
from torch.nn.modules.batchnorm import _BatchNorm

from dualtrain.errors import UserError

Norm = TypeVar("Norm", bound=_BatchNorm)


class FrozenNorm(_BatchNorm):
    """BatchNorm that stays in evaluation mode, even after ``model.train()``: its running statistics do not change."""

    def train(self: Norm, mode: bool = True) -> Norm:
        """Set evaluation mode, whatever ``mode`` is."""
        return super().train(False)


class FrozenNorm1d(FrozenNorm, nn.BatchNorm1d):
    """See :class:`FrozenNorm`."""


class FrozenNorm2d(FrozenNorm, nn.BatchNorm2d):
    """See :class:`FrozenNorm`."""


class FrozenNorm3d(FrozenNorm, nn.BatchNorm3d):
    """See :class:`FrozenNorm`."""


_FROZEN: dict[type[_BatchNorm], type[FrozenNorm]] = {
    nn.BatchNorm1d: FrozenNorm1d,
    nn.BatchNorm2d: FrozenNorm2d,
    nn.BatchNorm3d: FrozenNorm3d,
}


@cache
def _frozen(kind: Any) -> Any:
    """Return the class of frozen layers for ``kind``, a class of BatchNorm layers. Create it if ``_FROZEN`` lacks it."""
    # pickle cannot import a class that is made here, so it calls _new(kind) instead.
    reduced = {"__reduce_ex__": lambda self, protocol: (_new, (kind,), vars(self))}
    return _FROZEN.get(kind) or type(f"Frozen{kind.__name__}", (FrozenNorm, kind), reduced)


def _new(kind: Any) -> Any:
    """Return a frozen layer without attributes, to which pickle or copy adds the attributes of another layer."""
    frozen = _frozen(kind)
    return frozen.__new__(frozen)


def freeze_backbone(model: nn.Module, head: str) -> None:
    """Freeze all modules except the module named ``head``, in place. Names and shapes of tensors do not change.

    Parameters outside of the head lose ``requires_grad``. BatchNorm layers outside of the head, including those of
    subclasses, keep their running statistics, even after ``model.train()`` and in copies of the model.

    Raises:
        UserError: the head shares parameters with the rest of the model.
    """
    own = set(map(id, model.get_submodule(head).parameters()))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own and not name.startswith(f"{head}."):
            raise UserError(
                f"--freeze-backbone does not work with this model, whose head {head!r} shares {name!r} with other layers: "
                "leave the flag out"
            )
    for name, module in model.named_modules():
        if name == head or name.startswith(f"{head}."):
            continue
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)
        if isinstance(module, _BatchNorm) and not isinstance(module, FrozenNorm):
            # Change the class of the object: a new object would leave references to the old layer behind.
            kind: Any = type(module)
            module.__class__ = _frozen(kind)
            module.train()


def find_head(model: nn.Module) -> str:
    """Return the name of the last Linear or Conv2d layer, which is the head of a classifier.

    Raises:
        UserError: the model has no such layer, or is itself one.
    """
    layers: list[str] = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    if not layers or not layers[-1]:
        raise UserError("--freeze-backbone needs a model that ends in a linear or convolutional layer: leave the flag out")
    return layers[-1]
