"""The results as a picture: each ratio with its interval, and the time of an allreduce by size."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from dualtrain.bench.measure import Results
from dualtrain.bench.rows import BUFFERS, Row, sweep_of
from dualtrain.report.report_charts import load_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MET = {None: "#0b6fb8", True: "#2a9152", False: "#c2383c"}
LINE = 0.24  # inches


def picture(results: Results, rows: Sequence[Row]) -> bytes:
    """Draw the picture and return it as PNG.

    Raises:
        UserError: matplotlib is missing.
    """
    figure_class = load_figure()
    ratios = [row for row in rows if row.unit == "×"]
    groups = [(name, list(members)) for name, members in groupby(ratios, key=lambda row: row.group)]
    tall = LINE * (len(ratios) + 2 * len(groups)) + 1.2
    sweep = sweep_of(results)
    figure = figure_class(figsize=(12, tall + (5.0 if sweep else 0.0)), facecolor="white", layout="constrained")
    axes = figure.subplots(1 + bool(sweep), 1, squeeze=False, height_ratios=[tall, 5.0] if sweep else [1])[:, 0]
    _draw_ratios(axes[0], groups)
    if sweep:
        _draw_sweep(axes[1], sweep)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def _draw_ratios(axes: Axes, groups: Sequence[tuple[str, list[Row]]]) -> None:
    labels: list[str] = []
    ticks: list[float] = []
    y = 0.0
    for name, rows in groups:
        y += 1
        axes.text(0.005, y, name, transform=axes.get_yaxis_transform(), weight="bold", fontsize=9, va="center")
        for row in rows:
            y += 1
            ticks.append(y)
            labels.append(row.job)
            found, color = row.found, MET[row.met]
            axes.plot([found.low, found.high], [y, y], color=color, linewidth=2)
            axes.plot([found.value], [y], "o", color=color, markersize=5)
            if row.target is not None:
                axes.plot([row.target], [y], "|", color="#222222", markersize=11)
        y += 0.5
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.set_ylim(y + 0.5, 0)
    axes.set_xscale("log")
    marks = [mark for mark in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 100) if _inside(mark, groups)]
    axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    axes.minorticks_off()
    axes.axvline(1, color="#888888", linewidth=1)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("ratio of throughput, median and 95 % interval; a bar is the target: green met, red not met")


def _inside(mark: float, groups: Sequence[tuple[str, list[Row]]]) -> bool:
    ends = [end for _, rows in groups for row in rows for end in (row.found.low, row.found.high, row.target or 1.0)]
    return min([1.0, *ends]) * 0.9 <= mark <= max([1.0, *ends]) * 1.1


def _draw_sweep(axes: Axes, sweep: dict[str, dict[int, float]]) -> None:
    names = list(dict.fromkeys(title.removesuffix(BUFFERS) for title in sweep))
    for title, found in sweep.items():
        # One color per contender; the dashed line is for the library's own buffers.
        color, style = f"C{names.index(title.removesuffix(BUFFERS))}", "--" if title.endswith(BUFFERS) else "-"
        times = [1e3 * seconds for seconds in found.values()]
        axes.plot(list(found), times, style, color=color, marker="o", markersize=3, label=title)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("ms")
    axes.set_title("allreduce", loc="left", weight="bold", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
