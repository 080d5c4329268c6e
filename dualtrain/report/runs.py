"""Tables and curves from run folders. Missing values and incomplete lines are left out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dualtrain.compare import read
from dualtrain.errors import UserError
from dualtrain.files import parse_json, read_json, read_text

NONE = "–"
COLORS = ("#0b6fb8", "#e07b00", "#2a9152", "#c2383c", "#7a56b3", "#8a5a48", "#d4579f", "#6f6f6f", "#98981d", "#149aa8")


@dataclass(frozen=True)
class Run:
    """The contents of a run's folder. ``summary`` is empty if the run has not finished."""

    folder: Path
    label: str
    color: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]

    def curve(self, kind: str, key: str) -> tuple[list[float], list[float]]:
        """Return the optimizer steps and the finite values of ``key`` in the lines of a ``kind``."""
        lines = [line for line in self.metrics if line.get("kind") == kind]
        points = [(line["step"], line[key]) for line in lines if _finite(line.get("step")) and _finite(line.get(key))]
        return [step for step, _ in points], [value for _, value in points]

    def last(self, key: str) -> Any:
        """Return the value of ``key`` in the summary, or else in the last line that has it."""
        values = (line[key] for line in reversed(self.metrics) if key in line)
        return self.summary[key] if key in self.summary else next(values, None)


def _number(form: str) -> Callable[[Any], str]:
    return lambda value: format(value, form) if _finite(value) else NONE


def _text(value: Any) -> str:
    return NONE if value is None else str(value)


_COLUMNS: dict[str, Callable[[Run], str]] = {
    "state": lambda run: "finished" if run.summary else "not finished",
    "backend": lambda run: _text(run.summary.get("backend", run.config.get("backend"))),
    "transport": lambda run: _text(run.last("transport")),
    "launcher": lambda run: _text(run.last("launcher")),
    "ranks": lambda run: _text(run.last("world_size")),
    "device": lambda run: _text(run.summary.get("device", run.config.get("device"))),
    "steps": lambda run: _text(run.summary.get("steps", run.last("step"))),
    "train loss": lambda run: _number(".4f")(run.last("train_loss")),
    "val loss": lambda run: _number(".4f")(run.last("val_loss")),
    "val accuracy": lambda run: _number(".4f")(run.last("val_accuracy")),
    "samples/s": lambda run: _number(".0f")(run.last("samples_per_second")),
    "seconds": lambda run: _number(".1f")(run.last("seconds")),
    "weights": lambda run: _text(run.last("weights_sha256"))[:16],
}


def read_runs(folders: Sequence[str]) -> list[Run]:
    """Read the runs in these folders, each once, and give each a label and a colour.

    Raises:
        UserError: a folder holds no metrics.
    """
    paths = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    colors = (COLORS[number % len(COLORS)] for number in range(len(paths)))
    return [_read_run(*run) for run in zip(paths, _labels(paths), colors, strict=True)]


def _read_run(folder: Path, label: str, color: str) -> Run:
    metrics = _read_metrics(folder)
    summary = _or_nothing(lambda: read(str(folder)))
    last = max((line["step"] for line in metrics if _finite(line.get("step"))), default=0)
    if _finite(summary.get("steps")) and last > summary["steps"]:
        summary = {}  # it is from before the run was resumed
    config = _flat(_or_nothing(lambda: read_json(folder / "config.json")))
    return Run(folder, label, color, config, metrics, summary)


def _read_metrics(folder: Path) -> list[dict[str, Any]]:
    try:
        text = read_text(folder / "metrics.jsonl", errors="replace")
    except OSError as error:
        raise UserError(f"{str(folder)!r} holds no run (no readable metrics.jsonl): name a run's folder") from error
    lines = [_or_nothing(partial(parse_json, line)) for line in text.splitlines()]  # the last may be cut off
    if not any(lines):
        raise UserError(f"{str(folder)!r} has no metrics yet: wait until its first steps are logged (--log-every)")
    return [line for line in lines if line]


def _or_nothing(get: Callable[[], Any]) -> dict[str, Any]:
    try:
        value = get()
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, and the facts of the machine (``platform``) beside them."""
    facts = config.get("platform")
    if not isinstance(facts, dict):
        return config
    settings = {name: value for name, value in config.items() if name != "platform"}
    return {**settings, **{name: value for name, value in facts.items() if name not in settings}}


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _labels(paths: Sequence[Path]) -> list[str]:
    """Return for each folder the shortest end of its path that no other folder has."""

    def end(path: Path, parts: int) -> str:
        return " ".join("/".join(path.parts[-parts:]).encode(errors="replace").decode().split())

    def label(path: Path) -> str:
        alone = (
            parts for parts in range(1, len(path.parts)) if [end(p, parts) for p in paths].count(end(path, parts)) == 1
        )
        return end(path, next(alone, len(path.parts)))

    return [label(path) for path in paths]


@dataclass(frozen=True)
class Table:
    """Rows of text, the header first. ``names`` maps (row, column) of a cell to the run that it names."""

    rows: list[list[str]]
    names: dict[tuple[int, int], Run]


def results(runs: Sequence[Run]) -> Table:
    """Return the table of results, one row per run."""
    rows = [[run.label, *(cell(run) for cell in _COLUMNS.values())] for run in runs]
    return Table([["run", *_COLUMNS], *rows], {(row, 0): run for row, run in enumerate(runs, 1)})


def differing_settings(runs: Sequence[Run]) -> Table | None:
    """Return a row for each setting that differs between the runs with a config.json; ``None`` if none differs."""
    known = [run for run in runs if run.config]
    names = [name for name in dict.fromkeys(name for run in known for name in run.config) if name != "run_dir"]
    rows = [[name, *(_text(run.config.get(name)) for run in known)] for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    head = ["setting", *(run.label for run in known)]
    return Table([head, *rows], {(0, column): run for column, run in enumerate(known, 1)}) if rows else None


def same_weights(runs: Sequence[Run]) -> str:
    """Return one sentence that compares the weights of the finished runs."""
    hashes = [run.summary["weights_sha256"] for run in runs if "weights_sha256" in run.summary]
    if len(hashes) < 2:
        return "" if len(runs) == 1 else "Same weights: not known before two runs have finished."
    if len(set(hashes)) == 1:
        return f"Same weights: yes, the {len(hashes)} finished runs ended with the same model, bit for bit."
    return f"Same weights: no, the {len(hashes)} finished runs ended with {len(set(hashes))} different models."


def title(runs: Sequence[Run]) -> tuple[str, str]:
    """Return the report's title, and a line with what all runs have in common."""
    shared = [{_text(run.config.get(name)) for run in runs} for name in ("dataset", "model")]
    what = [values.pop() for values in shared if len(values) == 1]
    name = f"Training report: {runs[0].label if len(runs) == 1 else f'{len(runs)} runs'}"
    return name, ", ".join([*(text for text in what if text != NONE), f"as of {time.strftime('%Y-%m-%d %H:%M')}"])
