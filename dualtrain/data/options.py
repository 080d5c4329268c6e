"""Options of the datasets, beside ``--dataset`` and ``--data-dir``."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from dualtrain.data.transforms import IMAGENET, Statistics
from dualtrain.errors import UserError

LIMIT = 2**31  # of the values in a sample, and of the samples: random positions are below it
AUGMENTATIONS = ("none", "crop-flip", "imagenet", "weights")


@dataclass(frozen=True)
class Options:
    """Options of all datasets. A dataset ignores those of others; ``None`` stands for its own default."""

    augment: str | None = None  # none, crop-flip, imagenet (files only), or weights: the transforms of model's weights
    image_size: int | None = None  # pixels: the side of the model's input
    resize: int | None = None  # pixels: the length of the shorter side before the crop
    pad: int = 0  # pixels of zeros on each side of an image before the random crop of crop-flip
    normalize: str | None = None  # none, dataset, imagenet, or MEANS/DEVIATIONS as in 0.5,0.5,0.5/0.2,0.2,0.2
    model: str | None = None  # the model whose transforms augment="weights" uses
    classes: int | None = None  # number of classes of synthetic data and of the user's own
    shape: str | tuple[int, ...] | None = None  # of one synthetic input: 3,224,224
    samples: int = 1280  # synthetic training samples; for evaluation a fifth of that number
    text_file: str | None = None  # UTF-8
    sequence_length: int = 64  # tokens
    vocabulary: int = 4096  # tokens, four special ones among them
    workers: int = 2  # processes that read files; 0: none
    download: bool = False  # download missing files; only one rank of a host may set it

    def __post_init__(self) -> None:
        if self.augment is not None and self.augment not in AUGMENTATIONS:
            raise UserError(f"--augment must be one of {', '.join(AUGMENTATIONS)}, not {self.augment!r}")
        self.statistics(IMAGENET)

    def statistics(self, of_dataset: Statistics) -> Statistics | None:
        """Return the mean and standard deviation of each channel to normalize with; ``None`` for no normalization."""
        known = {None: None, "none": None, "dataset": of_dataset, "imagenet": IMAGENET}
        if self.normalize in known:
            return known[self.normalize]
        parts = [[_number(text) for text in part.split(",")] for part in str(self.normalize).split("/")]
        if len(parts) != 2 or len(parts[0]) != len(parts[1]) or not all(value > 0 for value in parts[1]):
            raise _bad_normalize(self.normalize)
        if not all(math.isfinite(value) for part in parts for value in part):
            raise _bad_normalize(self.normalize)
        return tuple(parts[0]), tuple(parts[1])

    def input_shape(self, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``shape`` as integers, or ``default`` if it is not set."""
        if self.shape is None:
            return default
        try:
            sizes = tuple(int(size) for size in (self.shape.split(",") if isinstance(self.shape, str) else self.shape))
        except ValueError:
            sizes = ()
        if not sizes or min(sizes) < 1:
            raise UserError(f"--shape must be whole numbers above 0 as in 3,224,224, not {self.shape!r}")
        if math.prod(sizes) >= LIMIT:
            raise UserError(f"--shape {str(self.shape)[:80]} has too many values for one sample: stay below {LIMIT}")
        return sizes


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _bad_normalize(text: str | None) -> UserError:
    return UserError(
        f"--normalize must be none, dataset, imagenet or MEANS/DEVIATIONS with one of each per channel "
        f"(0.5,0.5,0.5/0.2,0.2,0.2), not {text!r}"
    )


NAMES = tuple(field.name for field in dataclasses.fields(Options))
