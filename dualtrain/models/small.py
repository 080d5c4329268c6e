"""Small convolutional networks: the default job's, and the two of the tutorials that people compare.

Pooling comes before the ReLU behind a convolution, and not after it as in the tutorials: the largest number above 0 is the
same either way, and so is the way back to it, to the bit; but there is a fourth of the numbers left to compare with 0.
"""

from __future__ import annotations

from torch import nn


def convnet(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Two 3×3 convolutions of 16 and 32 channels, a pooling, and two linear layers."""
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
    """Two 3×3 convolutions of 10 channels, each with a pooling, and one linear layer (490 → 10 on MNIST)."""
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
    """Two 5×5 convolutions of 16 and 32 channels with BatchNorm and pooling, one linear layer (1568 → 10 on MNIST)."""
    channels, height, width = shape
    return nn.Sequential(
        *_block(channels, 16),
        *_block(16, 32),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), classes),
    )


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 5, padding=2), nn.BatchNorm2d(outputs), nn.MaxPool2d(2), nn.ReLU()]
