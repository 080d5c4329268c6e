"""The results as one self-contained HTML page: the answer, a chart, the workloads, the machine, and all tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from dualtrain.bench.bench_charts import NARROW, WIDE, chart, chart_groups
from dualtrain.bench.measure import Results
from dualtrain.bench.plan import ABOUT
from dualtrain.bench.rows import Row
from dualtrain.bench.table import answer, cells, head, remarks, sweep_table
from dualtrain.report.document import document, facts, table, text


def page(results: Results, rows: Sequence[Row], machine: Mapping[str, str], *, targets: bool) -> str:
    """Return the page as self-contained HTML.

    Args:
        results: all samples.
        rows: the rows of the table.
        machine: facts about the machine and the measurement, by name.
        targets: whether to show the developers' targets.
    """
    parts = [
        f'<header><h1>Which is faster here?</h1>\n<p class="answer">{text(answer(results, rows))}</p></header>',
        *_chart(results),
        f"<h2>Workloads</h2>\n{facts(_workloads(results), 'workloads')}",
        f"<h2>Machine and method</h2>\n{facts(list(machine.items()))}",
        *(f'<p class="hint">{text(line)}</p>' for line in remarks(results, rows, targets)),
        f"<h2>All comparisons</h2>\n{_rows(rows, targets)}",
    ]
    sweep = sweep_table(results)
    if sweep:
        first, *others = [[text(cell) for cell in row] for row in sweep]
        parts.append(f"<h2>All-reduce by size, ms</h2>\n{table(first, others, short=True)}")
    return document("dualtrain bench", "\n".join(["<main>", *parts, "</main>"]))


def _chart(results: Results) -> list[str]:
    reference, groups = chart_groups(results)
    if not groups:
        return []
    wide, narrow = (
        chart(reference, groups, width).replace('class="bars"', f'class="bars {kind}"', 1)
        for width, kind in ((WIDE, "wide-only"), (NARROW, "narrow-only"))
    )
    return [f"<h2>Steps per second, relative to {text(reference)}</h2>", wide, narrow]


def _workloads(results: Results) -> list[tuple[str, str]]:
    """Return the name and the description of each measured job, in the order of the plan."""
    starts = [sample for column in results.samples.values() for sample in column if sample]
    keys = {key for start in starts for sample in (start, *start.parts.values()) for key in sample.seconds}
    sweep = {"sweep" for key in keys if key.startswith("sweep/")}
    return [(name, what) for name, what in ABOUT.items() if name in keys | sweep]


def _rows(rows: Sequence[Row], targets: bool) -> str:
    lines = []
    columns = head(targets)
    for group, members in groupby(rows, key=lambda row: row.group):
        lines.append([text(group)])
        lines += [[text(cell) for cell in cells(row, targets)] for row in members]
    return table(columns, lines, short=True)
