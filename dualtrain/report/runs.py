"""Tables and curves from run folders. Missing values and incomplete lines are left out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dualtrain.errors import UserError
from dualtrain.files import or_nothing, parse_json, read_json, read_text
from dualtrain.run_table import NONE, as_text, is_finite, read_summary, run_table

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
        points = [(line["step"], line[key]) for line in lines if is_finite(line.get("step")) and is_finite(line.get(key))]
        return [step for step, _ in points], [value for _, value in points]

    @property
    def facts(self) -> dict[str, Any]:
        """What the table of runs shows: from the summary, or else from the last line that has it, or the settings."""
        settings: dict[str, Any] = {name: self.config[name] for name in ("backend", "device", "amp") if name in self.config}
        known = {key: value for line in self.metrics for key, value in line.items()}
        return {**settings, **known, **self.summary, "finished": bool(self.summary)}


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
    summary = or_nothing(lambda: read_summary(folder))
    last = max((line["step"] for line in metrics if is_finite(line.get("step"))), default=0)
    if is_finite(summary.get("steps")) and last > summary["steps"]:
        summary = {}  # it is from before the run was resumed
    config = _flat(or_nothing(lambda: read_json(folder / "config.json")))
    return Run(folder, label, color, config, metrics, summary)


def _read_metrics(folder: Path) -> list[dict[str, Any]]:
    try:
        text = read_text(folder / "metrics.jsonl", errors="replace")
    except OSError as error:
        raise UserError(f"{str(folder)!r} holds no run (no readable metrics.jsonl): name a run's folder") from error
    lines = [or_nothing(partial(parse_json, line)) for line in text.splitlines()]  # the last may be cut off
    if not any(lines):
        raise UserError(f"{str(folder)!r} has no metrics yet: wait until its first steps are logged (--log-every)")
    return [line for line in lines if line]


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, and the facts of the machine (``platform``) beside them."""
    facts = config.get("platform")
    if not isinstance(facts, dict):
        return config
    settings = {name: value for name, value in config.items() if name != "platform"}
    return {**settings, **{name: value for name, value in facts.items() if name not in settings}}


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
    rows = run_table((run.label, run.facts) for run in runs)
    return Table(rows, {(row, 0): run for row, run in enumerate(runs, 1)})


def differing_settings(runs: Sequence[Run]) -> Table | None:
    """Return a row for each setting that differs between the runs with a config.json; ``None`` if none differs."""
    known = [run for run in runs if run.config]
    names = [name for name in dict.fromkeys(name for run in known for name in run.config) if name != "run_dir"]
    rows = [[name, *(as_text(run.config.get(name)) for run in known)] for name in names]
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
    shared = [{as_text(run.config.get(name)) for run in runs} for name in ("dataset", "model")]
    what = [values.pop() for values in shared if len(values) == 1]
    name = f"Training report: {runs[0].label if len(runs) == 1 else f'{len(runs)} runs'}"
    return name, ", ".join([*(text for text in what if text != NONE), f"as of {time.strftime('%Y-%m-%d %H:%M')}"])
