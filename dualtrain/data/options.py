"""How a dataset is to be read: what ``--dataset`` and ``--data-dir`` leave open."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from dualtrain.data.transforms import IMAGENET, Statistics
from dualtrain.errors import UserError

LIMIT = 2**31  # values of a sample, and samples: positions are drawn below it
AUGMENTATIONS = ("none", "crop-flip", "imagenet", "weights")


@dataclass(frozen=True)
class Options:
    """Each dataset reads those that concern it; ``None`` stands for the dataset's own default."""

    augment: str | None = None  # none, crop-flip, imagenet (files only), or weights: the transforms of model's weights
    image_size: int | None = None  # pixels, the side of what the model gets
    resize: int | None = None  # pixels, what the shorter side is scaled to before
    pad: int = 0  # pixels of zeros around an image before crop-flip takes its window
    normalize: str | None = None  # none, dataset, imagenet, or MEANS/DEVIATIONS as in 0.5,0.5,0.5/0.2,0.2,0.2
    model: str | None = None  # whose weights augment="weights" follows
    classes: int | None = None  # of synthetic data and the user's own
    shape: str | tuple[int, ...] | None = None  # of one synthetic input: 3,224,224
    samples: int = 1280  # synthetic ones; a fifth as many for evaluation
    text_file: str | None = None  # UTF-8
    sequence_length: int = 64  # tokens
    vocabulary: int = 4096  # tokens, four special ones among them
    workers: int = 2  # processes that read files; 0: none
    download: bool = False  # fetch what is missing; for one rank a host

    def __post_init__(self) -> None:
        if self.augment is not None and self.augment not in AUGMENTATIONS:
            raise UserError(f"--augment must be one of {', '.join(AUGMENTATIONS)}, not {self.augment!r}")
        self.statistics(IMAGENET)

    def statistics(self, of_dataset: Statistics) -> Statistics | None:
        """Means and standard deviations to normalize with, one each for a channel; ``None`` for none."""
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
        """``shape`` as numbers."""
        if self.shape is None:
            return default
        try:
            sizes = tuple(int(size) for size in (self.shape.split(",") if isinstance(self.shape, str) else self.shape))
        except ValueError:
            sizes = ()
        if not sizes or min(sizes) < 1:
            raise UserError(f"--shape must be whole numbers above 0 as in 3,224,224, not {self.shape!r}")
        if math.prod(sizes) >= LIMIT:
            raise UserError(f"--shape {str(self.shape)[:80]} is of more values than a sample can have: below {LIMIT}")
        return sizes


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _bad_normalize(text: str | None) -> UserError:
    return UserError(
        f"--normalize must be none, dataset, imagenet or MEANS/DEVIATIONS with one of each for a channel "
        f"(0.5,0.5,0.5/0.2,0.2,0.2), not {text!r}"
    )


NAMES = tuple(field.name for field in dataclasses.fields(Options))
