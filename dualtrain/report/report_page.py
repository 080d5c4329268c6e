"""The report as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from dualtrain.report.document import asset, document, facts, table, text
from dualtrain.report.report_charts import charts
from dualtrain.report.runs import RANKS, Run, Table, differing_settings, recoveries, results, same_weights, title
from dualtrain.run_table import as_text


def page(runs: Sequence[Run], *, refresh: bool = False) -> str:
    """Return the report as self-contained HTML. With ``refresh``, the page reloads itself while it is open."""
    name, details = title(runs)
    parts = [f"<header><h1>{text(name)}</h1>\n<p>{text(details)}</p></header>", *_sections(runs)]
    live = '\n<p id="live" role="status"></p>' if refresh else ""
    body = "\n".join(["<main>", *parts, "</main>"])
    return document(name, body + live, asset("charts.js"), refresh)


def _sections(runs: Sequence[Run]) -> list[str]:
    if not runs:
        return ["<p>There is no run to show.</p>"]
    differing, recovered, weights = differing_settings(runs), recoveries(runs), same_weights(runs)
    waiting = [run for run in runs if not run.metrics]
    parts = [f"<h2>Results</h2>\n{_table(results(runs), short=True)}", f"<p>{text(weights)}</p>" if weights else ""]
    parts += [f"<p>{text(run.label)} has stopped: {text(run.failure)}.</p>" for run in runs if run.failure]
    parts += [f"<p>No metrics yet: {text(run.label)} has not logged its first steps.</p>" for run in waiting]
    parts += [f"<p>{text(run.label)}: {_unreadable(run.unreadable)}.</p>" for run in runs if run.unreadable]
    if len(waiting) < len(runs):
        parts.append(f"<h2>Charts</h2>\n{charts(runs)}")
    if recovered:
        parts.append(f"<h2>Recoveries</h2>\n{_table(recovered)}")
    if differing:
        parts.append(f"<h2>Settings that differ</h2>\n{_table(differing)}")
    if len(runs) == 1:
        return [*parts, *_about(runs[0])]
    return [*parts, "<h2>Each run</h2>", *(_folded(number, run) for number, run in enumerate(runs))]


def _unreadable(lines: int) -> str:
    if lines == 1:
        return "1 line of metrics.jsonl cannot be read and is left out"
    return f"{lines} lines of metrics.jsonl cannot be read and are left out"


def _about(run: Run) -> list[str]:
    """Return the sections with a run's origin and settings."""
    origin = [("folder", str(run.folder)), *run.origin.items()]
    parts = [f"<h2>Origin</h2>\n{facts(origin, 'origin')}"]
    if run.config:
        settings = facts([(name, _setting(run, name)) for name in run.config], "settings")
        parts.append(f"<h2>Settings</h2>\n{settings}")
    return parts


def _setting(run: Run, name: str) -> str:
    """Format a setting's value. If a setting in ``RANKS`` (backend, …) is "auto", also show the value that was chosen."""
    value, chosen = as_text(run.config[name]), run.facts.get(name)
    return f"auto: {chosen}" if value == "auto" and name in RANKS and chosen not in (None, "auto") else value


def _folded(number: int, run: Run) -> str:
    head = f'<summary><i class="{run.color}"></i>{text(run.label)}</summary>'
    return "\n".join([f'<details id="run-{number}">{head}', *_about(run), "</details>"])


def _table(data: Table, *, short: bool = False) -> str:
    def cell(row: int, column: int, content: str) -> str:
        run = data.names.get((row, column))
        return f'<i class="{run.color}"></i>{text(content)}' if run else text(content)

    head, *rows = [[cell(row, column, each) for column, each in enumerate(cells)] for row, cells in enumerate(data.rows)]
    return table(head, rows, short=short)
