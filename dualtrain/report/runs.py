"""Tables and curves from run folders. Lines of metrics.jsonl that cannot be read are left out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from dualtrain.errors import UserError
from dualtrain.files import or_nothing, parse_json, read_json, read_text
from dualtrain.run_folder.attempt_events import UNKNOWN, last_death, read_events
from dualtrain.run_table import NONE, as_text, is_finite, labelled, read_summary, run_table

COLORS = 8  # number of colours, which page.css defines as the classes c0, c1, …
LARGEST = 1e30  # larger values are not drawn, because browsers compute coordinates as 32-bit floats
#: Names of the facts in config.json and summary.json about a run's origin.
ORIGIN = ("command", "commit", "started", "hosts", "versions")
#: Names of the facts about the ranks: config.json has them under ``origin``; summary.json has them after the run has ended.
RANKS = ("backend", "transport", "launcher", "world_size", "device")
COMPARED = ("commit", "hosts", "versions")  # the facts that are compared between runs

#: For each field of a recovery, its column heading and its format.
RECOVERY = {
    "cause": ("cause", ""),
    "rank": ("rank", ""),
    "step": ("at step", ""),
    "steps_repeated": ("steps repeated", ""),
    "seconds": ("seconds", ".1f"),
}

Points = list[tuple[float, float]]  # (optimizer step, value)


@dataclass(frozen=True)
class Run:
    """The contents of a run's folder.

    Attributes:
        folder: the folder's path.
        label: the shortest text that identifies the run in the report.
        color: the CSS class of the run's colour in page.css.
        config: the settings, and facts about the machine.
        metrics: the lines of metrics.jsonl.
        summary: the contents of summary.json; empty if the run has not finished.
        origin: command, commit and other facts about the run's origin, as text.
        ranks: the facts that ``RANKS`` names, known from the start of a run.
        unreadable: number of lines of metrics.jsonl that are not metrics, not counting an incomplete last line.
        failure: what ended the newest attempt of the run, if a rank recorded it; else "".
    """

    folder: Path
    label: str
    color: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    origin: dict[str, Any]
    ranks: dict[str, Any]
    unreadable: int = 0
    failure: str = ""

    def curve(self, kind: str, key: str) -> tuple[Points, int]:
        """Return the points of ``key`` in lines of this ``kind``, and the number of values that cannot be drawn.

        Points are ordered by step. Values that are NaN, infinite, too large or not numbers cannot be drawn.
        """
        lines = [line for line in self._lines.get(kind, ()) if key in line]
        points = [(line["step"], line[key]) for line in lines if _is_drawable(line[key])]
        return sorted(points, key=lambda point: point[0]), len(lines) - len(points)

    @cached_property
    def _lines(self) -> dict[str, list[dict[str, Any]]]:
        """The lines that have a step, by kind."""
        found: dict[str, list[dict[str, Any]]] = {}
        for line in self.metrics:
            if _is_drawable(line.get("step")):
                found.setdefault(str(line.get("kind")), []).append(line)
        return found

    @property
    def facts(self) -> dict[str, Any]:
        """Values for the table of runs: from the summary, else from the latest metrics, else from the run's start."""
        settings: dict[str, Any] = {name: self.config[name] for name in ("backend", "device", "amp") if name in self.config}
        known = {key: value for line in self.metrics for key, value in line.items()}
        return {**settings, **self.ranks, **known, **self.summary, "finished": bool(self.summary)}

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """The failures after which the run continued, as listed in its summary."""
        found = self.summary.get("recoveries")
        return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _is_drawable(value: Any) -> bool:
    return is_finite(value) and abs(value) < LARGEST


def read_runs(folders: Sequence[str], *, require_metrics: bool = True) -> list[Run]:
    """Read the runs in these folders, without duplicates, and give each run a label and a colour.

    Args:
        folders: paths of the runs.
        require_metrics: true to raise an error if a folder holds no run or has an unreadable metrics.jsonl, or if no run
            has metrics.

    Raises:
        UserError: see ``require_metrics``.
    """
    runs = [
        _read_run(folder, label, f"c{number % COLORS}", require_metrics)
        for number, (folder, label) in enumerate(labelled(folders))
    ]
    if require_metrics and not any(run.metrics for run in runs):
        which = repr(str(runs[0].folder)) if len(runs) == 1 else f"each of the {len(runs)} runs"
        cure = "wait until its first steps are logged (--log-every), or leave the run out if it has ended"
        if len(runs) == 1 and runs[0].failure:
            raise UserError(f"{which} has no metrics, and has stopped: {runs[0].failure}")
        raise UserError(f"{which} has no metrics yet: {cure}")
    return runs


def _read_run(folder: Path, label: str, color: str, require_metrics: bool) -> Run:
    metrics, unreadable = _read_metrics(folder, require_metrics)
    summary = or_nothing(lambda: read_summary(folder))
    last = max((line["step"] for line in metrics if is_finite(line.get("step"))), default=0)
    if is_finite(summary.get("steps")) and last > summary["steps"]:
        summary = {}  # the summary was written before the run was resumed
    written = or_nothing(lambda: read_json(folder / "config.json"))
    found = written.pop("origin", None)
    origin = found if isinstance(found, dict) else {}
    ranks = {name: origin[name] for name in RANKS if name in origin}
    facts = _origin({**origin, **summary})
    return Run(folder, label, color, _flat(written), metrics, summary, facts, ranks, unreadable, _failure(folder))


def _failure(folder: Path) -> str:
    """Return what ended the newest attempt of a run; "" if the run still trains, has finished, or no cause was recorded."""
    with suppress(OSError):
        death = last_death(folder, read_events(folder))
        return death.describe() if death is not None and death.cause != UNKNOWN else ""
    return ""


def _read_metrics(folder: Path, require_metrics: bool) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of metrics.jsonl, and the number of lines that cannot be read.

    With ``require_metrics``, raises UserError if the folder holds no run, or has an unreadable metrics.jsonl.
    """
    try:
        text = read_text(folder / "metrics.jsonl", errors="replace")
    except OSError as error:
        if not require_metrics or (isinstance(error, FileNotFoundError) and (folder / "config.json").exists()):
            return [], 0
        raise UserError(f"{str(folder)!r} holds no run (no readable metrics.jsonl): name a run's folder") from error
    whole, _, rest = text.rpartition("\n")
    lines = [or_nothing(partial(parse_json, line)) for line in whole.split("\n") if line.strip()]
    last = or_nothing(lambda: parse_json(rest))  # the last line may be incomplete
    return [line for line in (*lines, last) if line], sum(not line for line in lines)


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings and, at the same level, the facts about the machine (``platform``)."""
    facts = config.get("platform")
    if not isinstance(facts, dict):
        return config
    settings = {name: value for name, value in config.items() if name != "platform"}
    return {**settings, **{name: value for name, value in facts.items() if name not in settings}}


def _origin(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts about a run's origin as text, by name."""
    found = {name: facts[name] for name in ORIGIN if facts.get(name)}
    versions, hosts = found.pop("versions", None), found.get("hosts")
    if isinstance(hosts, dict):
        found["hosts"] = ", ".join(f"{name} ({ranks} rank{'s' * (ranks != 1)})" for name, ranks in hosts.items())
    if isinstance(versions, dict):
        found["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return {name: str(value) for name, value in found.items()}


@dataclass(frozen=True)
class Table:
    """Rows of text, beginning with the header. ``names`` maps the (row, column) of each run's name to that run."""

    rows: list[list[str]]
    names: dict[tuple[int, int], Run]


def results(runs: Sequence[Run]) -> Table:
    """Return the table of results, one row per run."""
    rows = run_table((run.label, run.facts) for run in runs)
    return Table(rows, {(row, 0): run for row, run in enumerate(runs, 1)})


def differing_settings(runs: Sequence[Run]) -> Table | None:
    """Return a table of the settings and ``COMPARED`` facts that differ between the runs with a config.json.

    Return ``None`` if none differs. The run's folder, which always differs, is left out.
    """
    known = [run for run in runs if run.config]
    facts = [{**run.config, **{name: run.origin[name] for name in COMPARED if name in run.origin}} for run in known]
    names = [name for name in dict.fromkeys(name for one in facts for name in one) if name != "run_dir"]
    rows = [[name, *(as_text(one.get(name)) for one in facts)] for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    head = ["setting", *(run.label for run in known)]
    return Table([head, *rows], {(0, column): run for column, run in enumerate(known, 1)}) if rows else None


def recoveries(runs: Sequence[Run]) -> Table | None:
    """Return a table with a row for each failure after which a run continued; ``None`` if there was none."""
    rows, names = [["run", *(title for title, _ in RECOVERY.values())]], {}
    for run in runs:
        for one in run.recoveries:
            names[len(rows), 0] = run
            cells = (
                format(one[key], form) if is_finite(one.get(key)) else one.get(key) for key, (_, form) in RECOVERY.items()
            )
            rows.append([run.label, *map(as_text, cells)])
    return Table(rows, names) if len(rows) > 1 else None


def same_weights(runs: Sequence[Run]) -> str:
    """Return one sentence that compares the weights of the finished runs; "" for a single run."""
    hashes = [run.summary["weights_sha256"] for run in runs if "weights_sha256" in run.summary]
    if len(hashes) < 2:
        return "" if len(runs) == 1 else "Same weights: not known before two runs have finished."
    if len(set(hashes)) == 1:
        return f"Same weights: yes, the {len(hashes)} finished runs ended with the same model, bit for bit."
    return f"Same weights: no, the {len(hashes)} finished runs ended with {len(set(hashes))} different models."


def title(runs: Sequence[Run]) -> tuple[str, str]:
    """Return the report's title, and a line with the time, and the dataset and model if all runs share them."""
    shared = [{as_text(run.config.get(name)) for run in runs} for name in ("dataset", "model")]
    what = [values.pop() for values in shared if len(values) == 1]
    name = f"Training report: {runs[0].label if len(runs) == 1 else f'{len(runs)} runs' if runs else 'no run'}"
    return name, ", ".join([*(text for text in what if text != NONE), f"as of {time.strftime('%Y-%m-%d %H:%M')}"])
