"""Transforms of a batch of images on the device: resizing, random crops and flips, normalization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from dualtrain.data import draws
from dualtrain.torchvision_shim import with_torchvision_shim

# (images (n, c, h, w), uint8 or float; sample indices (n,); seed) → inputs (n, c, new h, new w), float32 (one exception:
# see ImageTransform)
Transform = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel
IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@cache
def v2() -> Any:
    """Import and return the module torchvision.transforms.v2."""
    return with_torchvision_shim(lambda: import_module("torchvision.transforms.v2"))


@dataclass(frozen=True)
class ImageTransform:
    """A :data:`Transform` that resizes, crops and normalizes. Values become float32, integers scaled to [0, 1].

    With all arguments left out, images of floating-point values are returned unchanged, in their own dtype.

    Args:
        size: side of the crop in pixels. ``None``: the images' width before ``pad``, or, without ``augment``, no crop.
        resize: length of the shorter side in pixels before the crop; ``None`` for no resizing.
        augment: take the crop at a random position and flip it with probability 0.5; otherwise take a centre crop.
        pad: pixels of zeros on each side before a random crop.
        statistics: mean and standard deviation that normalize each channel; ``None`` for no normalization.
    """

    size: int | None = None
    resize: int | None = None
    augment: bool = False
    pad: int = 0
    statistics: Statistics | None = None

    def __call__(self, images: torch.Tensor, numbers: torch.Tensor, seed: int) -> torch.Tensor:
        """Transform the images; see :data:`Transform`."""
        if self == ImageTransform() and images.is_floating_point():
            return images
        functional = v2().functional
        if self.resize is not None and len(images):
            images = functional.resize(images, [self.resize], antialias=True)
        if self.augment:
            size = self.size or images.shape[-1]
            images = crop_and_flip(functional.pad(images, [self.pad]), size, draws.bits(seed, numbers, 3))
        elif self.size is not None:
            images = functional.center_crop(images, [self.size])
        return to_float(images, self.statistics)


@dataclass(frozen=True)
class WeightsTransform:
    """A :data:`Transform` by ``preset``, the transform published with a model's weights. Grey images become RGB."""

    preset: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, images: torch.Tensor, numbers: torch.Tensor, seed: int) -> torch.Tensor:
        """Transform the images; see :data:`Transform`."""
        if not len(images):
            images = images.new_zeros(1, *images.shape[1:])
        transformed = self.preset(images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images)
        return transformed[: len(numbers)]


def to_float(images: torch.Tensor, statistics: Statistics | None) -> torch.Tensor:
    """Convert images (n, c, h, w) to float32, integers scaled to [0, 1], and normalize them if ``statistics`` are given."""
    functional = v2().functional
    images = functional.to_dtype(images, torch.float32, scale=True)
    if statistics is not None:
        images = functional.normalize(images, *map(list, statistics))
    return images


def crop_and_flip(images: torch.Tensor, size: int, random: torch.Tensor) -> torch.Tensor:
    """Crop each image (n, c, h, w) to ``size`` × ``size`` at its own random position, and flip it with probability 0.5.

    ``random``, int64 (n, 3), holds random bits for the row, the column and the flip.
    """
    channels, height, width = images.shape[1:]
    step = torch.arange(size, device=images.device)
    top = draws.below(random[:, 0], height - size + 1)
    left = draws.below(random[:, 1], width - size + 1)
    flipped = draws.below(random[:, 2], 2).bool()
    rows = top[:, None] + step
    columns = left[:, None] + torch.where(flipped[:, None], step.flip(0), step)
    which = torch.arange(len(images), device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[None, :, None, None]
    return images[which, channel, rows[:, None, :, None], columns[:, None, None, :]]
