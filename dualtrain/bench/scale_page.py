"""Results of ``bench --scale`` as text and as a page: times and ratios by number of ranks, and one chart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise

from dualtrain.bench.scale_plan import COMPARED, CONTENDERS, MEASURES, Layout, ScaleResults, is_shown
from dualtrain.bench.statistics import Estimate, estimate, rounds_of
from dualtrain.bench.svg import LogAxis, svg_file
from dualtrain.bench.table import milliseconds
from dualtrain.report.document import document, facts, table
from dualtrain.report.document import text as escaped

WIDTH, COLUMNS, HEIGHT = 900, 3, 250  # the chart's width, panels per row, height of a panel; in pixels
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 34, 34  # margins of a panel
OFFSET = 3  # distance in pixels between two contenders' intervals, so that they do not cover each other
LABEL = 22  # smallest distance between the x coordinates of two labels of the horizontal axis, in pixels
EXPLANATION = (
    "each time is the median, over the rounds, of the slowest rank's time. All ranks are forked from a process that has "
    "imported the libraries. A ratio is the first contender's time divided by the second's: below 1, the first is faster. "
    "The interval of a ratio follows the ratio; if the interval contains 1 and is wide, the ratio is not shown. If there "
    "are more ranks than cores, times are an upper bound of those on a host with enough cores. 2 × 4 ranks are 4 ranks on "
    "each of 2 virtual nodes. Virtual nodes are network namespaces of this machine, joined by a bridge"
)

Rows = list[list[str]]  # the first row is the heading; a row of one cell is the heading of the rows below it


def rows_of(results: ScaleResults) -> Rows:
    """Return the table: for each measure, the contenders' milliseconds and the ratios, by layout."""
    rows = [["", *(layout.title for layout in results.layouts)]]
    for measure, title in MEASURES.items():
        rows.append([f"{title}, ms"])
        for name, entry in CONTENDERS.items():
            times = [results.seconds(measure, name, layout) for layout in results.layouts]
            if any(times):
                rows.append([entry.title, *("–" if time is None else milliseconds(time.value) for time in times)])
        for first, second in COMPARED:
            ratios = [results.ratio(measure, first, second, layout) for layout in results.layouts]
            if any(ratios):
                named = f"{CONTENDERS[first].title} / {CONTENDERS[second].title}"
                rows.append([named, *map(_ratio, ratios)])
    return rows


def _ratio(ratio: Estimate | None) -> str:
    if ratio is None or ratio.pairs == 1:
        return "–" if ratio is None else f"× {ratio.value:.2f}"
    interval = f"({ratio.low:.2f}–{ratio.high:.2f})"
    return f"× {ratio.value:.2f} {interval}" if is_shown(ratio) else f"not shown {interval}"


def ratios_of(results: ScaleResults) -> dict[str, dict[str, dict[str, dict[str, object]]]]:
    """Return each ratio and its interval, by measure, then by pair of contenders, then by layout."""
    found: dict[str, dict[str, dict[str, dict[str, object]]]] = {}
    for measure in MEASURES:
        for first, second in COMPARED:
            for layout in results.layouts:
                ratio = results.ratio(measure, first, second, layout)
                if ratio is not None:
                    values = {**asdict(ratio), "shown": is_shown(ratio)}
                    found.setdefault(measure, {}).setdefault(f"{first} / {second}", {})[str(layout)] = values
    return found


def milliseconds_of(results: ScaleResults) -> dict[str, dict[str, dict[str, float | str]]]:
    """Return the milliseconds by measure, contender and layout.

    Without a time, the value is the reason for the failure, or "" if the contender has not failed.
    """
    found: dict[str, dict[str, dict[str, float | str]]] = {}
    for measure in MEASURES:
        for layout, name in [*results.rounds, *results.failures]:
            seconds = results.seconds(measure, name, layout)
            value = results.failures.get((layout, name), "") if seconds is None else 1e3 * seconds.value
            found.setdefault(measure, {}).setdefault(name, {})[str(layout)] = value
    return found


def remarks(results: ScaleResults) -> Iterator[str]:
    """Yield remarks on the results: the method, the intervals' confidence level, what was left out, and failures."""
    yield EXPLANATION
    levels = {len(times): estimate(range(len(times))).level for times in results.rounds.values() if len(times) > 1}
    if levels:
        likely = ", ".join(
            f"{100 * level:.1f} % ({rounds_of(count)})" for count, level in sorted(levels.items(), reverse=True)
        )
        yield f"intervals contain the true median with a probability of {likely}"
    yield from (f"{CONTENDERS[name].title}: not measured: {reason}" for name, reason in results.missing.items())
    yield from (f"{layout.title}: not measured: {reason}" for layout, reason in results.unavailable.items())
    for (layout, name), reason in results.failures.items():
        yield f"{CONTENDERS[name].title} with {layout.title}: failed: {reason}"


def text(results: ScaleResults, machine: Mapping[str, str]) -> str:
    """Return the results as text."""
    rows = rows_of(results)
    title_width = max(len(row[0]) for row in rows) + 2
    lines = [f"{name}: {value}" for name, value in machine.items()] + [""]
    for row in rows:
        title, *cells = row
        lines.append(f"{'  ' if cells else ''}{title}".ljust(title_width) + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join([*(line.rstrip() for line in lines), "", *remarks(results)])


def page(results: ScaleResults, machine: Mapping[str, str]) -> str:
    """Return the page as self-contained HTML."""
    head, *rows = [[escaped(cell) for cell in row] for row in rows_of(results)]
    parts = [
        "<header><h1>How costs grow with the number of ranks</h1></header>",
        *([chart(results)] if charted_layouts(results) else []),
        *(f'<p class="hint">{escaped(line)}</p>' for line in remarks(results)),
        f"<h2>Times and ratios</h2>\n{table(head, rows, short=True)}",
        f"<h2>Machine</h2>\n{facts(list(machine.items()))}",
    ]
    return document("dualtrain bench --scale", "\n".join(["<main>", *parts, "</main>"]))


def picture(results: ScaleResults) -> str:
    """Return the content of an SVG file: the chart with a style sheet."""
    return svg_file(chart(results))


def charted_layouts(results: ScaleResults) -> list[Layout]:
    """Return the layouts of the chart: those without virtual nodes, if any of them was measured."""
    found = [layout for layout in results.layouts if layout.nodes == 1]
    return found if any(layout in found for layout, _ in results.rounds) else []


def chart(results: ScaleResults) -> str:
    """Return one SVG element with a panel per measure: milliseconds by number of ranks, both axes logarithmic.

    Shows the layouts without virtual nodes, at least one of which must have been measured.
    """
    layouts = charted_layouts(results)
    measured = [name for name in CONTENDERS if any((layout, name) in results.rounds for layout in layouts)]
    parts = []
    for number, name in enumerate(measured):
        x = RIGHT + number * WIDTH / len(CONTENDERS)
        parts.append(f'<g class="{_style(name)}"><circle cx="{x:g}" cy="16" r="4.5"/>')
        parts.append(f'<text x="{x + 10:g}" y="20">{escaped(CONTENDERS[name].title)}</text></g>')
    for number, measure in enumerate(MEASURES):
        row, column = divmod(number, COLUMNS)
        parts += _panel(results, measure, layouts, measured, (column * WIDTH / COLUMNS, 28 + row * HEIGHT))
    height = 28 + HEIGHT * math.ceil(len(MEASURES) / COLUMNS)
    return (
        f'<svg class="bars" role="img" width="{WIDTH}" viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg" '
        f'aria-label="Milliseconds by number of ranks">\n<rect class="back" width="{WIDTH}" height="{height}"/>'
        + "\n".join(parts)
        + "\n</svg>"
    )


def _style(name: str) -> str:
    return f"c{list(CONTENDERS).index(name)}"


def _panel(
    results: ScaleResults, measure: str, layouts: Sequence[Layout], names: Sequence[str], corner: tuple[float, float]
) -> Iterator[str]:
    """Yield the SVG elements of one measure's panel, whose upper left corner is ``corner``."""
    lines = {
        name: [(each.ranks, seconds) for each in layouts if (seconds := results.seconds(measure, name, each))]
        for name in names
    }
    values = [1e3 * value for points in lines.values() for _, time in points for value in (time.low, time.high)]
    if not values:
        return
    left, top = corner[0] + LEFT, corner[1] + TOP
    right, bottom = corner[0] + WIDTH / COLUMNS - RIGHT, corner[1] + HEIGHT - BOTTOM
    fewest, most = layouts[0].ranks, layouts[-1].ranks
    x_axis = LogAxis(fewest, max(most, 2 * fewest), left + 8, right - 8)
    low = math.floor(math.log10(min(values)))
    high = max(math.ceil(math.log10(max(values))), low + 1)
    y_axis = LogAxis(10**low, 10**high, bottom, top)
    yield f'<text class="job" x="{left:g}" y="{top - 12:g}">{escaped(MEASURES[measure])}</text>'
    for power in range(low, high + 1):
        y = y_axis(10**power)
        yield f'<line class="tick" x1="{left:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        label = f"{10**power:g} ms" if power < 3 else f"{10 ** (power - 3):g} s"
        yield f'<text class="number" x="{left - 28:g}" y="{y + 4:.1f}">{label}</text>'
    yield f'<text class="unit" x="{left - 40:g}" y="{bottom + 18:g}">ranks</text>'
    yield from _numbers_of_ranks([(layout.ranks, x_axis(layout.ranks)) for layout in layouts], bottom + 18)
    for number, (name, points) in enumerate(lines.items()):
        offset = OFFSET * (number - (len(lines) - 1) / 2)
        yield f'<g class="{_style(name)}">'
        for count, time in points:
            x, bottom_end, top_end = x_axis(count) + offset, y_axis(1e3 * time.low), y_axis(1e3 * time.high)
            yield f'<line x1="{x:.1f}" y1="{bottom_end:.1f}" x2="{x:.1f}" y2="{top_end:.1f}"/>'
        yield from _line(
            name, [(x_axis(count) + offset, y_axis(1e3 * time.value), _tip(count, time)) for count, time in points]
        )
        yield "</g>"


def _numbers_of_ranks(positions: Sequence[tuple[int, float]], y: float) -> Iterator[str]:
    """Yield the labels of the horizontal axis; leave out a label that would cover the label before it."""
    drawn = -math.inf
    for count, x in positions:
        if x - drawn > LABEL:
            drawn = x
            yield f'<text class="number" x="{x:.1f}" y="{y:g}">{count}</text>'


def _tip(count: int, seconds: Estimate) -> str:
    value, low, high = map(milliseconds, (seconds.value, seconds.low, seconds.high))
    return f"{count} ranks: {value} ms" + (f" ({low}–{high})" if seconds.pairs > 1 else "")


def _line(name: str, points: Sequence[tuple[float, float, str]]) -> Iterator[str]:
    for (x1, y1, _), (x2, y2, _) in pairwise(points):
        yield f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
    for x, y, tip in points:
        title = escaped(f"{CONTENDERS[name].title}, {tip}")
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{title}</title></circle>'
