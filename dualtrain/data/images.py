"""Reader of image files: decodes an image and augments it, one sample at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dualtrain.data.decode import read_image
from dualtrain.data.loader import Wanted
from dualtrain.data.seeding import seeded
from dualtrain.data.sources import Tensors
from dualtrain.data.transforms import v2
from dualtrain.errors import UserError
from dualtrain.files import open_regular

_COMPARED_BYTES = 64 << 20  # ``ImageFiles.contents`` returns at most this many bytes; the ranks compare them


@dataclass(frozen=True)
class Geometry:
    """Resizing and cropping of an image of any size to ``size`` × ``size`` pixels.

    ``augment`` is one of:

    - "imagenet": a random resized crop, flipped with probability 0.5.
    - "crop-flip": the shorter side is resized to ``resize`` pixels, and each border is padded with ``pad`` zero pixels, or
      with more if the image is smaller than the crop; then a random crop, flipped with probability 0.5.
    - "none": the shorter side is resized to ``resize`` pixels; then a centre crop.
    """

    size: int
    resize: int
    augment: str = "none"
    pad: int = 0
    interpolation: str = "bilinear"

    def check(self, image: Any) -> None:
        """Raise an error if ``image``, with its shorter side scaled to ``resize``, would exceed PIL's pixel limit.

        With "imagenet", which does not scale the whole image, never raise an error.

        Raises:
            UserError: ``resize`` is too large for any image.
            ValueError: the image is too long and thin.
        """
        from PIL import Image

        short, long = sorted(image.size)
        pixels = self.resize * self.resize * long // max(short, 1)
        limit = 2 * (Image.MAX_IMAGE_PIXELS or pixels)  # PIL refuses to open images with more pixels than this
        if self.augment == "imagenet" or pixels <= limit:
            return
        if self.resize * self.resize > limit:
            raise UserError(
                f"images cannot be scaled to {self.resize} pixels (an image may have up to {limit} pixels in all): give a "
                "smaller --resize or --image-size"
            )
        raise ValueError(
            f"{image.size[0]} × {image.size[1]} pixels, which become {pixels} pixels if the shorter side is scaled to "
            f"{self.resize}; the limit is {limit}"
        )

    def pipeline(self) -> Callable[[Any], torch.Tensor]:
        """Build a function that converts a PIL image to uint8 (3, size, size) and draws from torch's global generator."""
        t = v2()
        how = {"interpolation": t.InterpolationMode(self.interpolation), "antialias": True}
        if self.augment == "imagenet":
            steps = [t.RandomResizedCrop(self.size, **how), t.RandomHorizontalFlip()]
        elif self.augment == "crop-flip":
            crop = t.RandomCrop(self.size, padding=self.pad, pad_if_needed=True)
            steps = [t.Resize(self.resize, **how), crop, t.RandomHorizontalFlip()]
        else:
            steps = [t.Resize(self.resize, **how), t.CenterCrop(self.size)]
        composed: Callable[[Any], torch.Tensor] = t.Compose([*steps, t.PILToTensor()])
        return composed


@dataclass(frozen=True)
class ImageFiles:
    """A :class:`~dualtrain.data.loader.Reader` of ``samples``: (path, class index) each.

    torchvision is imported at the first read only, by :func:`~dualtrain.data.transforms.v2`: unpickling this object in a
    worker process then needs no torchvision shim.
    """

    samples: list[tuple[str, int]]
    geometry: Geometry

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, wanted: Wanted) -> Tensors | UserError:
        """Read the images, uint8 (n, 3, size, size), and their classes, int64 (n,); or return the error of an image."""
        numbers, seed = wanted
        images = torch.empty(len(numbers), 3, self.geometry.size, self.geometry.size, dtype=torch.uint8)
        for index, number in enumerate(numbers):
            path = self.samples[number][0]
            try:
                image = read_image(path).convert("RGB")
                self.geometry.check(image)
                with seeded(seed, number):
                    images[index] = self._pipeline(image)
            except UserError as error:
                return error
            except (OSError, ValueError, MemoryError) as error:  # the image is too small or too large for a transform
                reason = (str(error) or type(error).__name__).partition("\n")[0]
                return UserError(f"the image {path!r} cannot be used ({reason}): fix or delete it")
        return images, torch.tensor([self.samples[number][1] for number in numbers], dtype=torch.int64)

    def contents(self, number: int) -> tuple[str, int, bytes]:
        """Return the path's last two parts (usually CLASS/FILE), the class index, and the first 64 MiB of an image file."""
        path, label = self.samples[number]
        return "/".join(Path(path).parts[-2:]), label, _bytes_of(path)

    @cached_property
    def _pipeline(self) -> Callable[[Any], torch.Tensor]:
        return self.geometry.pipeline()

    def __getstate__(self) -> dict[str, Any]:
        return {"samples": self.samples, "geometry": self.geometry}


def _bytes_of(path: str) -> bytes:
    """Return the file's first 64 MiB, usually the whole file. Raises OSError."""
    with open_regular(path) as file:
        return file.read(_COMPARED_BYTES)
