"""Models, by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from dualtrain.errors import UserError

Shape = tuple[int, int, int]


def build(name: str, shape: Shape, classes: int) -> nn.Module:
    """The model ``name`` for inputs of ``shape`` (channels, height, width). Random weights, from torch's global seed.

    Raises:
        UserError: an unknown name.
    """
    if name not in _BUILDERS:
        raise UserError(f"--model {name!r} is not known: choose one of {', '.join(sorted(_BUILDERS))}")
    return _BUILDERS[name](shape, classes)


def convnet(shape: Shape, classes: int) -> nn.Module:
    """Two 3×3 convolutions of 16 and 32 channels, a pooling, and two linear layers."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 2) * (width // 2), 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


_BUILDERS: dict[str, Callable[[Shape, int], nn.Module]] = {"convnet": convnet}
