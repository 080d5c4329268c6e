"""Options of the datasets: the data section of the configuration, checked."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from dualtrain.config.sections import AUGMENTATIONS, DataSection
from dualtrain.data.transforms import IMAGENET, Statistics
from dualtrain.errors import UserError

#: A dataset must have fewer samples. A synthetic sample must have fewer values, because ``SyntheticSource`` keeps at least
#: as many random numbers in memory.
LIMIT = 2**31


@dataclass(frozen=True)
class Options(DataSection):
    """The data section of the configuration. A dataset ignores the fields of other datasets.

    Attributes:
        model: the model whose transforms ``augment="weights"`` uses.

    Raises:
        UserError: ``augment`` or ``normalize`` has no valid value.
    """

    model: str | None = None

    def __post_init__(self) -> None:
        if self.augment is not None and self.augment not in AUGMENTATIONS:
            raise UserError(f"--augment must be one of {', '.join(AUGMENTATIONS)}, not {self.augment!r}")
        self.statistics(IMAGENET)

    def statistics(self, of_dataset: Statistics) -> Statistics | None:
        """Return the mean and standard deviation that normalize each channel; ``None`` for no normalization.

        Raises:
            UserError: ``normalize`` is not in one of the forms that ``--help`` lists.
        """
        known = {None: None, "none": None, "dataset": of_dataset, "imagenet": IMAGENET}
        if self.normalize in known:
            return known[self.normalize]
        parts = [[_number(text) for text in part.split(",")] for part in str(self.normalize).split("/")]
        if len(parts) != 2 or len(parts[0]) != len(parts[1]) or not all(value > 0 for value in parts[1]):
            raise _bad_normalize(self.normalize)
        if not all(math.isfinite(value) for part in parts for value in part):
            raise _bad_normalize(self.normalize)
        return tuple(parts[0]), tuple(parts[1])

    def statistics_for(self, channels: int, of_dataset: Statistics) -> Statistics | None:
        """Return :meth:`statistics`. Also raise UserError if the number of means is neither 1 nor ``channels``."""
        found = self.statistics(of_dataset)
        if found is not None and len(found[0]) not in (1, channels):
            raise UserError(
                f"--normalize has {len(found[0])} channels and {self.dataset} has {channels}: give one mean for each"
            )
        return found

    def largest_crop(self, side: int) -> int:
        """Return the side, after padding, of images whose side is ``side`` pixels."""
        return side + 2 * self.pad * (self.augment == "crop-flip")

    def check_crop(self, size: int, side: int) -> None:
        """Raise UserError if a crop of ``size`` pixels is larger than padded images of ``side`` pixels."""
        if size > self.largest_crop(side):
            raise UserError(
                f"--image-size {size} is larger than images after --resize {self.resize} and --pad: leave --resize out"
            )

    def input_shape(self, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``shape`` as integers, or ``default`` if it is not set. Raises UserError if it is invalid or too large."""
        if self.shape is None:
            return default
        try:
            sizes = tuple(int(size) for size in self.shape.split(","))
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
