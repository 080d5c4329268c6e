"""The position of a run and its results so far: plain numbers, kept in checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from dualtrain.trainer.objective import NAMES, added, training_metrics


@dataclass
class Cursor:
    """The position of a run between two steps, and its results so far.

    Attributes:
        step: optimizer steps done.
        epoch: epochs done.
        batch: global batches of this epoch that are done.
        seconds: time spent in steps.
        samples: samples trained on, over all ranks.
        sums: the sums that ``objective.NAMES`` lists, over this epoch so far.
        last: the last evaluation, including training metrics.
        best: the best evaluation so far, with its step and its epoch. In a cursor and in checkpoints, epochs count from 0.
        stale: the number of evaluations since the best one.
        evaluated_step: the step of the last evaluation.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0
    samples: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0] * len(NAMES))
    last: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    stale: int = 0
    evaluated_step: int = 0

    def count(self, sums: Sequence[float], samples: int, seconds: float) -> None:
        """Advance by one step."""
        self.step, self.batch, self.samples = self.step + 1, self.batch + 1, self.samples + samples
        self.seconds += seconds
        self.sums = added(self.sums, sums)

    def update_best(self, evaluation: dict[str, float], measure: str) -> bool:
        """Record an evaluation; return whether its ``measure`` is the best so far: lowest loss, or highest accuracy."""
        self.last = {**training_metrics(self.sums, "train_"), **evaluation}
        self.evaluated_step = self.step
        sign = -1 if measure.endswith("loss") else 1
        better = not self.best or sign * evaluation[measure] > sign * self.best[measure]
        self.stale = 0 if better else self.stale + 1
        if better:
            self.best = {"step": self.step, "epoch": self.epoch, **evaluation}
        return better

    def next_epoch(self) -> None:
        """Advance to the next epoch."""
        self.epoch, self.batch, self.sums = self.epoch + 1, 0, [0.0] * len(NAMES)

    @property
    def speed(self) -> float:
        """Samples per second, over all ranks and steps."""
        return self.samples / max(self.seconds, 1e-9)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Self:
        """Restore a cursor from the values that :meth:`plain` returned.

        Raises:
            ValueError: the values are not those of a cursor.
        """
        names = {_STORED.get(field.name, field.name): field.name for field in dataclasses.fields(cls)}
        if plain.keys() != names.keys():
            raise ValueError(f"its position has {', '.join(map(str, plain))}, not {', '.join(names)}")
        default = cls()
        for name, value in plain.items():
            if not _has_same_kind(value, getattr(default, names[name])):
                raise ValueError(f"its position has {name} = {value!r}")
        for name in ("step", "epoch") if plain["best"] else ():
            if type(plain["best"].get(name)) is not int:
                raise ValueError(f"its best evaluation has no {name}")
        return cls(**{names[name]: value for name, value in plain.items()})

    def plain(self) -> dict[str, Any]:
        """Return the values for a checkpoint."""
        return {_STORED.get(name, name): value for name, value in vars(self).items()}


#: Fields that have another name in checkpoints: the name that they had in version 0.1.0.
_STORED = {"evaluated_step": "judged"}


def _has_same_kind(value: Any, default: Any) -> bool:
    """Return whether ``value`` is of the same kind as ``default``.

    Counts and seconds must not be negative; other numbers may be. Sums are finite, since a loss that is not finite ends
    the run.
    """
    if isinstance(default, dict):
        return isinstance(value, dict) and all(_is_number(part) for part in value.values())
    if isinstance(default, list):
        return isinstance(value, list) and len(value) == len(default) and all(map(_is_finite, value))
    if isinstance(default, int):
        return type(value) is int and 0 <= value < 2**63
    return _is_number(value) and 0 <= value < math.inf


def _is_finite(value: Any) -> bool:
    return _is_number(value) and abs(value) < math.inf


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
