"""Declaration of one setting: its default, its help text, the values that it accepts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """The values that a flag accepts, in words and as a function that checks a value."""

    words: str
    accepts: Callable[[Any], bool]


def one_of(*choices: str) -> Bounds:
    """Return bounds that accept exactly these values."""
    return Bounds(f"one of {', '.join(choices)}", lambda value: value in choices)


def at_least(low: float) -> Bounds:
    """Return bounds that accept this number or more, but not infinity."""
    return Bounds(f"{low:g} or more", lambda value: low <= value < math.inf)


def between(low: float, high: float) -> Bounds:
    """Return bounds that accept numbers from ``low`` to ``high``."""
    return Bounds(f"from {low:.12g} to {high:.12g}", lambda value: low <= value <= high)


ABOVE_ZERO = Bounds("above 0", lambda value: 0 < value < math.inf)
ONE_LINE = Bounds("one line of text", lambda value: "\n" not in value)
UNIT = Bounds("from 0 to below 1", lambda value: 0 <= value < 1)


def _are_steps(text: str) -> bool:
    """Return whether a text is a list of whole numbers above 0, of at most ten digits each, separated by commas."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return bool(parts) and all(part.isascii() and part.isdecimal() and len(part) <= 10 and int(part) for part in parts)


STEPS = Bounds("steps above 0 as in 1000,2000", _are_steps)


def steps_in(text: str | None) -> list[int]:
    """Return the steps in a value that ``STEPS`` accepts; an empty list for ``None``."""
    return [int(part) for part in (text or "").split(",") if part.strip()]


def setting(
    default: Any,
    help: str,
    bounds: Bounds | None = None,
    *,
    flag: str = "",
    fixed: bool = False,
    resumed: bool = False,
) -> Any:
    """Declare a field of a section. A section is a dataclass in ``sections.py``; each of its fields is also a flag.

    Args:
        default: the value if neither a flag nor the recipe sets one.
        help: the text for ``--help``.
        bounds: the values that are accepted; by default, any value of the field's type.
        flag: the flag's name, with underscores, if it differs from the field's name.
        fixed: a resumed run must have the value with which the run was started.
        resumed: a resumed run takes the checkpoint's value if no value is given, and refuses a different value. If the
            checkpoint has no value, any value is accepted, or only the default if the setting is also ``fixed``.
    """
    metadata = {"help": help, "bounds": bounds, "flag": flag, "fixed": fixed, "resumed": resumed}
    return dataclasses.field(default=default, metadata=metadata)


fixed_setting = partial(setting, fixed=True)


@dataclass(frozen=True)
class Setting:
    """One setting of the command line, the recipes and the files of a run.

    Attributes:
        name: its name in ``config.json``; the flag has hyphens in place of the underscores.
        section: the name of its section, an attribute of ``Config``.
        attribute: its name in that section.
        kind: bool, int, float or str.
        default: its default; ``None`` if it has none.
        help: its text in ``--help``.
        bounds: the values that are accepted.
        fixed: a resumed run must have the value with which the run was started.
        resumed: a resumed run takes the checkpoint's value if none is given.
    """

    name: str
    section: str
    attribute: str
    kind: type
    default: Any
    help: str
    bounds: Bounds | None
    fixed: bool
    resumed: bool

    @property
    def flag(self) -> str:
        """The flag: ``--run-dir`` for ``run_dir``."""
        return "--" + self.name.replace("_", "-")

    def has_type(self, value: Any) -> bool:
        """Return whether a value that was read from a file has the setting's type. An int is accepted for a float."""
        return type(value) is self.kind or (self.kind is float and type(value) is int)

    def accepts(self, value: Any) -> bool:
        """Return whether a value that was read from a file has the setting's type and is within its bounds."""
        return self.has_type(value) and (self.bounds is None or self.bounds.accepts(value))


def settings_of(section: str, cls: Any) -> list[Setting]:
    """List the settings that the dataclass ``cls`` declares, in order."""
    kinds = {"bool": bool, "int": int, "float": float, "str": str}
    return [
        Setting(
            name=field.metadata["flag"] or field.name,
            section=section,
            attribute=field.name,
            kind=kinds[str(field.type).removesuffix(" | None")],
            default=field.default,
            help=field.metadata["help"],
            bounds=field.metadata["bounds"],
            fixed=field.metadata["fixed"],
            resumed=field.metadata["resumed"],
        )
        for field in dataclasses.fields(cls)
    ]
