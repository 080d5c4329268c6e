"""Small convolutional networks: the model of the default job, and the models of two tutorials.

Max pooling comes before ReLU, and not after it as in the tutorials, so that this ReLU processes a quarter of the elements.
Outputs and gradients are the same, bit for bit, because ReLU is monotonic.
"""

from __future__ import annotations

from torch import nn


def convnet(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build two 3×3 convolutions of 16 and 32 channels, max pooling, and two linear layers."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (height // 2) * (width // 2), 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


def mnist_net(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build two 3×3 convolutions of 10 channels, each with max pooling, and one linear layer (490 → 10 on MNIST)."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 10, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 10, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(10 * (height // 4) * (width // 4), classes),
    )


def mnist_convnet(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build two 5×5 convolutions (16 and 32 channels), each with BatchNorm and max pooling, and a linear layer.

    On MNIST, the linear layer has 1568 inputs and 10 outputs.
    """
    channels, height, width = shape
    return nn.Sequential(
        *_block(channels, 16),
        *_block(16, 32),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), classes),
    )


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 5, padding=2), nn.BatchNorm2d(outputs), nn.MaxPool2d(2), nn.ReLU()]
