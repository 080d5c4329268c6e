"""The table of runs, with one row per run, for ``compare`` and ``report``; and the reader of a run's summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dualtrain.errors import UserError
from dualtrain.files import read_json, real

NONE = "–"
Facts = Mapping[str, Any]  # a run's summary, or the known values of an unfinished run


def is_finite(value: Any) -> bool:
    """Return whether ``value`` is a number that is finite as a float."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that is too large for a float
        return False


def as_text(value: Any) -> str:
    """Return a value as text; a dash if it is ``None``."""
    return NONE if value is None else str(value)


def _number(name: str, form: str) -> Callable[[Facts], str]:
    return lambda facts: format(facts[name], form) if is_finite(facts.get(name)) else NONE


def _backend(facts: Facts) -> str:
    transport = facts.get("transport")
    return as_text(facts.get("backend")) + ("" if transport is None else f" ({transport})")


COLUMNS: dict[str, Callable[[Facts], str]] = {
    "state": lambda facts: "finished" if facts.get("finished") else "not finished",
    "backend": _backend,
    "launcher": lambda facts: as_text(facts.get("launcher")),
    "ranks": lambda facts: as_text(facts.get("world_size")),
    "device": lambda facts: as_text(facts.get("device")),
    "steps": lambda facts: as_text(facts.get("steps", facts.get("step"))),
    "train loss": _number("train_loss", ".4f"),
    "val loss": _number("val_loss", ".4f"),
    "accuracy": _number("val_accuracy", ".4f"),
    "precision": lambda facts: "fp32" if facts.get("amp", "off") == "off" else str(facts["amp"]),
    "samples/s": _number("samples_per_second", ".0f"),
    "seconds": _number("seconds", ".1f"),
    "weights": lambda facts: as_text(facts.get("weights_sha256"))[:16],
}

#: Types of the values that a usable summary must have, by name.
_KINDS: dict[str, Any] = dict.fromkeys(("backend", "transport", "launcher", "weights_sha256"), str)
_KINDS |= dict.fromkeys(("val_accuracy", "samples_per_second", "seconds", "world_size"), int | float)


def run_table(runs: Iterable[tuple[str, Facts]], columns: Sequence[str] = tuple(COLUMNS)) -> list[list[str]]:
    """Return the rows of the table, beginning with the header, from each run's label and facts."""
    return [["run", *columns], *([label, *(COLUMNS[name](facts) for name in columns)] for label, facts in runs)]


def _item(summary: Any, name: str) -> Any:
    return summary.get(name) if isinstance(summary, dict) else None


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the contents of a finished run's ``summary.json``.

    Raises:
        UserError: the folder has no usable summary.
    """
    shown = repr(str(folder))
    try:
        summary: dict[str, Any] = read_json(folder / "summary.json")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{shown} holds no finished run (no readable summary.json): name the folder of a finished run"
        ) from error
    wrong = [name for name, kinds in _KINDS.items() if not isinstance(_item(summary, name), kinds)]
    if wrong:
        raise UserError(f"{shown} has a summary.json without a usable {wrong[0]}: name the folder of a finished run")
    return summary


def labelled(folders: Iterable[str | Path]) -> list[tuple[Path, str]]:
    """Return the paths of the runs, with links resolved and without duplicates, each with its label.

    The label is the shortest end of the path that differs from the ends of all other paths.
    """
    paths = list(dict.fromkeys(real(folder) for folder in folders))

    def end(path: Path, parts: int) -> str:
        name = "/".join(path.parts[-parts:]).replace("\n", r"\n")
        return " ".join(name.encode(errors="replace").decode().split())

    def label(path: Path) -> str:
        alone = (
            parts for parts in range(1, len(path.parts)) if [end(p, parts) for p in paths].count(end(path, parts)) == 1
        )
        return end(path, next(alone, len(path.parts)))

    return [(path, label(path)) for path in paths]
