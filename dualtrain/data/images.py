"""Reading image files: decoding, and the augmentation that needs the whole image, one sample at a time."""

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

_COMPARED_BYTES = 64 << 20


@dataclass(frozen=True)
class Geometry:
    """From an image of any size to one of ``size`` × ``size`` pixels.

    ``augment`` is "imagenet" (a random part of the image, scaled, flipped in half of the cases), "crop-flip" (scaled so
    that the shorter side has ``resize`` pixels, a random window of it with ``pad`` pixels of zeros around, flipped in half
    of the cases), or "none" (scaled likewise, the window from the centre).
    """

    size: int
    resize: int
    augment: str = "none"
    pad: int = 0
    interpolation: str = "bilinear"

    def check(self, image: Any) -> None:
        """Raise ValueError where ``image`` is so long and thin that scaling its shorter side would fill the memory."""
        from PIL import Image

        short, long = sorted(image.size)
        pixels = self.resize * self.resize * long // max(short, 1)
        if self.augment != "imagenet" and pixels > 2 * (Image.MAX_IMAGE_PIXELS or pixels):  # PIL's limit for a bomb
            raise ValueError(
                f"{image.size[0]} × {image.size[1]} pixels, which become {pixels} when scaled to {self.resize}"
            )

    def pipeline(self) -> Callable[[Any], torch.Tensor]:
        """From a PIL image to a uint8 tensor (3, size, size). Draws from torch's global random numbers."""
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
    """A :class:`~dualtrain.data.loader.Reader` of ``samples``: (path, class number) each.

    Holds nothing of torchvision until it reads, since its arrival in a worker may be what imports torchvision there.
    """

    samples: list[tuple[str, int]]
    geometry: Geometry

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, wanted: Wanted) -> Tensors | UserError:
        """Images uint8 (n, 3, size, size) and classes int64 (n,)."""
        numbers, seed = wanted
        images = torch.empty(len(numbers), 3, self.geometry.size, self.geometry.size, dtype=torch.uint8)
        for place, number in enumerate(numbers):
            path = self.samples[number][0]
            try:
                image = read_image(path).convert("RGB")
                self.geometry.check(image)
                with seeded(seed, number):
                    images[place] = self._pipeline(image)
            except UserError as error:
                return error
            except (OSError, ValueError, MemoryError) as error:  # of a size that cannot be cropped or scaled
                reason = (str(error) or type(error).__name__).partition("\n")[0]
                return UserError(f"the image {path!r} cannot be used ({reason}): mend or delete it")
        return images, torch.tensor([self.samples[number][1] for number in numbers], dtype=torch.int64)

    def contents(self, number: int) -> tuple[str, int, bytes]:
        """An image's place below the folder of its split, its class, and the file's bytes."""
        path, kind = self.samples[number]
        return "/".join(Path(path).parts[-2:]), kind, _bytes_of(path)

    @cached_property
    def _pipeline(self) -> Callable[[Any], torch.Tensor]:
        return self.geometry.pipeline()

    def __getstate__(self) -> dict[str, Any]:
        return {"samples": self.samples, "geometry": self.geometry}


def _bytes_of(path: str) -> bytes:
    """The content of a file; of a huge one its beginning. Raises OSError."""
    with open_regular(path) as file:
        return file.read(_COMPARED_BYTES)
