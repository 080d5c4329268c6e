"""The bench's chart as SVG: for each workload, the contenders' steps per second relative to a reference contender."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dualtrain.bench.measure import Results
from dualtrain.bench.plan import AGAIN, ENTRIES, LENGTHS, OURS, TRAINER, TUNED
from dualtrain.bench.statistics import Estimate, estimate, rounds_of
from dualtrain.bench.svg import LogAxis, svg_file
from dualtrain.report.document import text

WIDE, NARROW = 760, 360  # widths of the chart in pixels; the narrow chart has the names above the intervals
REFERENCES = ("hvd-gloo", "hvd-mpi", TUNED, "plain")  # the reference is the first of these that was measured
LEFT_OUT = {AGAIN, "alone"}  # contenders that are left out: tuned DDP's second run, and the loop without communication
SKIPPED = ("empty",)  # workloads that are left out: the empty model is not realistic
TICKS = (1, 2, 0.5, 1.5, 3, 5, 10, 0.75, 0.25, 0.1, 30, 100)  # ratios on the axis, the most important first
LABELS, VALUES, EDGE = 250, 130, 12  # smallest width of the names, width of the values, width of the margin
LETTER = 7.2  # mean width of a letter in bold
ROW, HEAD, AXIS = 20, 30, 26  # heights of a row, of a workload's heading, and of the axis


@dataclass(frozen=True)
class ChartRow:
    """One row of the chart: one contender on one workload.

    Attributes:
        label: name of the contender.
        is_dualtrain: whether the contender is dualtrain.
        found: the contender's steps per second divided by those of the reference.
        tip: the tooltip.
    """

    label: str
    is_dualtrain: bool
    found: Estimate
    tip: str


Groups = dict[str, list[ChartRow]]  # by workload


def chart_groups(results: Results) -> tuple[str, Groups]:
    """Return the reference's title, and the rows of the chart by workload, dualtrain's first.

    Return ``("", {})`` if there are no rows.
    """
    reference = next((name for name in REFERENCES if results.count(name)), "")
    groups: Groups = {}
    for job in (job for job in LENGTHS if job not in SKIPPED and reference):
        for name in results.samples:
            if name != reference and name not in LEFT_OUT and ENTRIES[name].ranks == ENTRIES[reference].ranks:
                row = _chart_row(results, name, reference, job)
                if row is not None:
                    groups.setdefault(job, []).append(row)
    ordered = {job: sorted(rows, key=lambda row: not row.is_dualtrain) for job, rows in groups.items()}
    return (ENTRIES[reference].title if groups else ""), ordered


def _chart_row(results: Results, name: str, reference: str, job: str) -> ChartRow | None:
    pairs = [(a, b) for a, b in results.pairs(name, reference) if job in a.seconds and job in b.seconds]
    if not pairs:
        return None
    found = estimate([b.seconds[job] / a.seconds[job] for a, b in pairs])
    here, there = (1e3 * estimate([sample.seconds[job] for sample in side]).value for side in zip(*pairs, strict=True))
    entry = ENTRIES[name]
    tip = (
        f"{entry.title}, {job}: {found.value:.2f} times the steps per second of {ENTRIES[reference].title}, "
        f"{found.low:.2f} to {found.high:.2f} ({rounds_of(found.pairs)}); {here:.2f} ms against {there:.2f} ms"
    )
    return ChartRow(entry.title, entry.module in (OURS, TRAINER), found, tip)


def chart(reference: str, groups: Groups, width: int) -> str:
    """Return the chart as a scalable SVG element of this width."""
    row_height = ROW if width == WIDE else 2 * ROW
    axis = _axis(groups, width)
    parts: list[str] = []
    y = 6.0
    for job, rows in groups.items():
        parts.append(f'<text class="job" x="{EDGE}" y="{y + 20:g}">{text(job)}</text>')
        y += HEAD
        for row in rows:
            parts.append(_svg_row(row, axis, y, width))
            y += row_height
        y += 8
    ticks = list(_ticks(axis, y))
    unit = f'<text class="unit" x="{axis.begin:g}" y="{y + AXIS + 16:g}">1 = {text(reference)}; more is faster</text>'
    height = y + AXIS + 28
    return (
        f'<svg class="bars" role="img" viewBox="0 0 {width} {height:g}" xmlns="http://www.w3.org/2000/svg" '
        f'aria-label="Steps per second relative to {text(reference)}">\n'
        + "\n".join([f'<rect class="back" width="{width}" height="{height:g}"/>', *ticks, *parts, unit])
        + "\n</svg>"
    )


def picture(reference: str, groups: Groups) -> str:
    """Return the content of an SVG file: the chart with a style sheet."""
    return svg_file(chart(reference, groups, WIDE).replace('class="bars"', f'class="bars" width="{WIDE}"', 1))


def _axis(groups: Groups, width: int) -> LogAxis:
    """Return the axis of the ratios; it contains all intervals and the ratio 1."""
    ends = [end for rows in groups.values() for row in rows for end in (row.found.low, row.found.high)]
    longest = max(len(row.label) for rows in groups.values() for row in rows)
    left = EDGE + (max(LABELS, LETTER * longest) if width == WIDE else 4)
    return LogAxis(min(1.0, *ends) / 1.08, max(1.0, *ends) * 1.08, left, width - VALUES)


def _ticks(axis: LogAxis, bottom: float) -> Iterator[str]:
    """Yield vertical lines with their labels; skip lines that are too close to a more important line."""
    drawn: list[float] = []
    for ratio in TICKS:
        x = axis(ratio)
        if axis.low <= ratio <= axis.high and all(abs(x - other) > 34 for other in drawn):
            drawn.append(x)
            kind = "tick one" if ratio == 1 else "tick"
            yield f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{bottom:g}"/>'
            yield f'<text class="number" x="{x:.1f}" y="{bottom + 16:g}">{ratio:g}</text>'


def _svg_row(row: ChartRow, axis: LogAxis, y: float, width: int) -> str:
    found, at = row.found, y + ROW / 2 + 4.5
    below = at if width == WIDE else at + ROW - 4
    middle = below - 4.5
    x, low, high = (axis(ratio) for ratio in (found.value, found.low, found.high))
    values = f"<tspan>{found.value:.2f}</tspan> ({found.low:.2f}–{found.high:.2f})"
    return (
        f'<g class="{"own" if row.is_dualtrain else "peer"}"><title>{text(row.tip)}</title>'
        f'<rect class="hit" x="0" y="{y:g}" width="{width}" height="{ROW if width == WIDE else 2 * ROW}"/>'
        f'<text x="{EDGE}" y="{at:g}">{text(row.label)}</text>'
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle:g}" y2="{middle:g}"/>'
        f'<circle cx="{x:.1f}" cy="{middle:g}" r="4.5"/>'
        f'<text class="value" x="{width - EDGE}" y="{below:g}">{values}</text></g>'
    )
