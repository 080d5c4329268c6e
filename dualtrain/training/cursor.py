"""How far a run has come: plain numbers, kept in checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from dualtrain.training.objective import NAMES, added, metrics


@dataclass
class Cursor:
    """The place of a run between two steps."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # global batches of this epoch that are done
    seconds: float = 0.0
    samples: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0] * len(NAMES))  # over this epoch so far
    last: dict[str, float] = field(default_factory=dict)  # what the last evaluation came to
    best: dict[str, float] = field(default_factory=dict)  # the best evaluation so far, and its step and epoch
    stale: int = 0  # evaluations since then
    judged: int = 0  # the step of the last evaluation

    def count(self, sums: Sequence[float], samples: int, seconds: float) -> None:
        """One more step is done."""
        self.step, self.batch, self.samples = self.step + 1, self.batch + 1, self.samples + samples
        self.seconds += seconds
        self.sums = added(self.sums, sums)

    def judge(self, evaluation: dict[str, float], measure: str) -> bool:
        """Notes an evaluation; gives whether it is the best so far: the lowest loss, or the highest accuracy."""
        self.last = {**metrics(self.sums, "train_"), **evaluation}
        self.judged = self.step
        sign = -1 if measure.endswith("loss") else 1
        better = not self.best or sign * evaluation[measure] > sign * self.best[measure]
        self.stale = 0 if better else self.stale + 1
        if better:
            self.best = {"step": self.step, "epoch": self.epoch, **evaluation}
        return better

    def next_epoch(self) -> None:
        """The epoch is over."""
        self.epoch, self.batch, self.sums = self.epoch + 1, 0, [0.0] * len(NAMES)

    @property
    def speed(self) -> float:
        """Samples a second, over all ranks and steps."""
        return self.samples / max(self.seconds, 1e-9)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Self:
        """The cursor that :meth:`plain` gave these values of.

        Raises:
            ValueError: they are no values of one.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if plain.keys() != fields.keys():
            raise ValueError(f"its position has {', '.join(map(str, plain))}, not {', '.join(fields)}")
        default = cls()
        for name, value in plain.items():
            if not _alike(value, getattr(default, name)):
                raise ValueError(f"its position has {name} = {value!r}")
        if plain["best"] and type(plain["best"].get("step")) is not int:
            raise ValueError("its best evaluation has no step")
        return cls(**plain)

    def plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**vars(self)}


def _alike(value: Any, default: Any) -> bool:
    """Whether ``value`` is of the kind of ``default``: counts and sums are not negative, measures are any numbers."""
    if isinstance(default, dict):
        return isinstance(value, dict) and all(_number(part) for part in value.values())
    if isinstance(default, list):
        return isinstance(value, list) and len(value) == len(default) and all(map(_number, value))
    if isinstance(default, int):
        return type(value) is int and 0 <= value < 2**63
    return _number(value) and 0 <= value < math.inf


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
