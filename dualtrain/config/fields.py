"""How a field of the configuration is written: its default, its words of help, and the values that it takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """Which values a flag takes, in words and as a test."""

    words: str
    accepts: Callable[[Any], bool]


def one_of(*choices: str) -> Bounds:
    """Exactly these values."""
    return Bounds(f"one of {', '.join(choices)}", lambda value: value in choices)


def at_least(low: float) -> Bounds:
    """This number or more."""
    return Bounds(f"{low:g} or more", lambda value: math.isfinite(value) and value >= low)


def between(low: float, high: float) -> Bounds:
    """From ``low`` to ``high``."""
    return Bounds(f"from {low:g} to {high:g}", lambda value: low <= value <= high)


ABOVE_ZERO = Bounds("above 0", lambda value: math.isfinite(value) and value > 0)
UNIT = Bounds("from 0 to below 1", lambda value: 0 <= value < 1)


def option(default: Any, help: str, bounds: Bounds | None = None, *, group: str, fixed: bool = False) -> Any:
    """A field of the configuration that is a flag too; ``fixed`` where a run cannot change it when it goes on."""
    return dataclasses.field(default=default, metadata={"help": help, "bounds": bounds, "group": group, "fixed": fixed})


def section(group: str, *, fixed: bool = False) -> Callable[..., Any]:
    """:func:`option` for one heading of ``--help``."""
    return partial(option, group=group, fixed=fixed)
