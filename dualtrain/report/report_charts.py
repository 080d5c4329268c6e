"""The report's charts: curves of all runs as inline SVG, in the units of the data.

The coordinates of a curve's path are steps and values. A nested SVG element scales them to the size of the chart: its
viewBox is the visible range. charts.js shows the values under the pointer. It also draws the axes, because their ticks
depend on the width of the page and on the visible runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dualtrain.report.document import text
from dualtrain.report.runs import Points, Run

MOST_POINTS = 600  # largest number of points of a drawn curve, about one per pixel
MOST_DOTS = 50  # largest number of points of a curve with dots; more dots touch each other, and hide the other curves
WIDER = 4.0  # largest difference in width between curves with the same points, in pixels
STEP, MEAN, TRAIN, VAL = "logged steps", "mean so far", "training, epochs", "validation"
#: CSS class of each kind of curve.
KINDS = {STEP: "step", MEAN: "mean", TRAIN: "train", VAL: "val"}


@dataclass(frozen=True)
class Panel:
    """One chart: its title and its curves, given as (kind of curve, kind of line in metrics.jsonl, key).

    ``zero``: whether the axis of values contains 0.
    """

    title: str
    curves: Sequence[tuple[str, str, str]]
    zero: bool = False


PANELS = (
    Panel("Loss", ((STEP, "step", "loss"), (TRAIN, "epoch", "train_loss"), (VAL, "epoch", "val_loss"))),
    Panel("Accuracy", ((STEP, "step", "accuracy"), (TRAIN, "epoch", "train_accuracy"), (VAL, "epoch", "val_accuracy"))),
    Panel("Learning rate", ((STEP, "step", "lr"),), zero=True),
    Panel(
        "Throughput (samples/s)",
        ((STEP, "step", "samples_per_second"), (MEAN, "epoch", "samples_per_second")),
        zero=True,
    ),
)


def charts(runs: Sequence[Run]) -> str:
    """Return all charts as HTML, below a legend if there are several runs."""
    figures = "\n".join(_figure(panel, runs) for panel in PANELS)
    return (
        f"{_legend(runs)}\n"
        "<noscript><p>Axes, values under the pointer and the legend's switches need JavaScript.</p></noscript>\n"
        f'<div class="charts">\n{figures}\n</div>'
    )


def _legend(runs: Sequence[Run]) -> str:
    if len(runs) < 2:
        return ""
    buttons = "\n".join(
        f'<button type="button" class="{run.color}" aria-pressed="true" data-run="{number}" title="{text(run.folder)}">'
        f"<i></i>{text(run.label)}</button>"
        for number, run in enumerate(runs)
    )
    hint = "Click a run to switch it off or on, double-click to see it alone."
    return f'<div class="legend" role="group" aria-label="Runs">\n{buttons}\n</div>\n<p class="hint">{hint}</p>'


@dataclass(frozen=True)
class _Curve:
    run_number: int
    kind: str
    points: Points
    left_out: int


def _figure(panel: Panel, runs: Sequence[Run]) -> str:
    curves = [_curve(number, run, *which) for number, run in enumerate(runs) for which in panel.curves]
    drawn = [curve for curve in curves if curve.points]
    title, note = text(panel.title), _left_out(curves, runs)
    if not drawn:
        return f'<figure class="chart empty"><figcaption>{title}</figcaption><p>nothing recorded</p>{note}</figure>'
    groups = "\n".join(_group(number, runs, drawn) for number in range(len(runs)))
    zero = " data-zero" if panel.zero else ""
    return (
        f'<figure class="chart"><figcaption>{title}{_kinds(panel, {curve.kind for curve in drawn})}</figcaption>\n'
        f'<svg role="img" tabindex="0" aria-label="{title} by optimizer step"{zero}><g class="axes"></g>'
        f'<svg class="plot" preserveAspectRatio="none" viewBox="{_view(panel, drawn)}">\n{groups}\n</svg>'
        f'<g class="cursor"></g></svg>\n<div class="tip" hidden></div>{note}</figure>'
    )


def _curve(number: int, run: Run, kind: str, line: str, key: str) -> _Curve:
    points, left_out = run.curve(line, key)
    return _Curve(number, kind, thinned(points), left_out)


def _group(number: int, runs: Sequence[Run], drawn: Sequence[_Curve]) -> str:
    """Return the curves of one run."""
    run = runs[number]
    names = f'class="{run.color}" data-run="{number}" data-label="{text(run.label)}"'
    paths = (path for curve in drawn if curve.run_number == number for path in _paths(curve, drawn))
    return f"<g {names}>{''.join(paths)}</g>"


def _extra_width(curve: _Curve, drawn: Sequence[_Curve]) -> float:
    """Return the additional width of a curve in pixels: later curves with the same points must not hide it."""
    equal = [other.run_number for other in drawn if (other.kind, other.points) == (curve.kind, curve.points)]
    above = sum(number > curve.run_number for number in equal)
    return min(3.0, WIDER / max(1, len(equal) - 1)) * above


def _kinds(panel: Panel, used: set[str]) -> str:
    """Return the switches for the kinds of curves, if a chart has several kinds."""
    if len(used) < 2:
        return ""
    buttons = (
        f'<button type="button" aria-pressed="true" data-kind="{KINDS[kind]}">'
        f'<svg class="key" viewBox="0 0 28 10"><path class="line {KINDS[kind]}" d="M1,5 27,5"/>'
        f'<path class="dots {KINDS[kind]}" d="M14,5h0"/></svg>{kind}</button>'
        for kind in dict.fromkeys(kind for kind, _, _ in panel.curves)
        if kind in used
    )
    return f'<span class="kinds" role="group" aria-label="Kinds of curves">{"".join(buttons)}</span>'


def _paths(curve: _Curve, drawn: Sequence[_Curve]) -> Iterator[str]:
    """Yield the line of a curve. If it has one point, or few points that are not logged steps, also yield dots.

    In SVG, y grows downward: negate the values.
    """
    places = [f"{step:.9g},{-value:.6g}" for step, value in curve.points]
    style = KINDS[curve.kind]
    extra = _extra_width(curve, drawn)
    width = f' style="--wider:{extra:.2g}px"' if extra else ""
    yield f'<path class="line {style}"{width} data-kind="{style}" data-name="{curve.kind}" d="M{" ".join(places)}"/>'
    if len(places) == 1 or (curve.kind != STEP and len(places) <= MOST_DOTS):
        # A line of length 0 looks like a dot, because only its line caps are drawn. Scaling does not change their shape.
        yield f'<path class="dots {style}" data-kind="{style}" d="{"".join(f"M{place}h0" for place in places)}"/>'


def _view(panel: Panel, drawn: Sequence[_Curve]) -> str:
    """Return the viewBox that contains all curves of a chart, for browsers without JavaScript."""
    steps, values = zip(*(point for curve in drawn for point in curve.points), strict=True)
    low, high = min(0.0, *values) if panel.zero else min(values), max(values)
    height = (high - low) or abs(high) or 1.0
    width = (max(steps) - min(steps)) or 1
    return f"{min(steps):.9g} {-high - 0.05 * height:.6g} {width:.9g} {1.1 * height:.6g}"


def thinned(points: Points) -> Points:
    """Return at most ``MOST_POINTS`` points: both ends of a curve, and the minimum and maximum of each part of it."""
    if len(points) <= MOST_POINTS:
        return points
    inner, parts = points[1:-1], MOST_POINTS // 2 - 1
    kept = [points[0]]
    for part in range(parts):
        piece = inner[part * len(inner) // parts : (part + 1) * len(inner) // parts]
        low_at, high_at = (choose(range(len(piece)), key=lambda at: piece[at][1]) for choose in (min, max))
        kept += [piece[at] for at in sorted({low_at, high_at})]
    return [*kept, points[-1]]


def _left_out(curves: Sequence[_Curve], runs: Sequence[Run]) -> str:
    """Return a note about the values that are not drawn, if any."""
    counts = [sum(curve.left_out for curve in curves if curve.run_number == number) for number in range(len(runs))]
    parts = [f"{count} of {text(run.label)}" for run, count in zip(runs, counts, strict=True) if count]
    return f'<p class="hint">Values not drawn (too large or not a finite number): {", ".join(parts)}.</p>' if parts else ""
