"""The report's picture: charts with the curves of all runs, below the tables."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dualtrain.errors import UserError
from dualtrain.report.runs import Run, Table, differing_settings, results, same_weights, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, MARGIN, HEAD, ROW, CHARTS = 15.0, 0.4, 0.95, 0.29, 9.2  # sizes of the picture and its parts, in inches
LETTERS = 175  # characters that fit into one row of the picture's tables
STEP, EPOCH, TRAIN, VAL = "logged steps", "mean so far", "training, epochs", "validation"
KINDS: dict[str, dict[str, Any]] = {
    STEP: {"linestyle": "-"},
    EPOCH: {"linestyle": "-", "marker": "o", "markersize": 4},
    TRAIN: {"linestyle": "-", "marker": "o", "markersize": 4},
    VAL: {"linestyle": "--", "marker": "s", "markersize": 4},
}
PANELS: dict[str, list[tuple[str, str, str]]] = {  # curves: (style, kind of line in metrics.jsonl, key)
    "Loss": [(STEP, "step", "loss"), (TRAIN, "epoch", "train_loss"), (VAL, "epoch", "val_loss")],
    "Accuracy": [(STEP, "step", "accuracy"), (TRAIN, "epoch", "train_accuracy"), (VAL, "epoch", "val_accuracy")],
    "Learning rate": [(STEP, "step", "lr")],
    "Throughput (samples/s)": [(STEP, "step", "samples_per_second"), (EPOCH, "epoch", "samples_per_second")],
}


def load_figure() -> type[Figure]:
    """Import matplotlib and return its class Figure.

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"the charts need matplotlib ({error}): pip install matplotlib") from error
    return Figure


def picture(runs: Sequence[Run], *, tables: bool) -> bytes:
    """Draw the charts, with ``tables`` also the title and the tables above them, and return a PNG.

    Raises:
        UserError: matplotlib is missing.
    """
    figure_class = load_figure()
    shown = [table for table in (results(runs), differing_settings(runs)) if table is not None and tables]
    head = HEAD + sum(ROW * (len(table.rows) + 1) for table in shown) if tables else 0.0
    figure = figure_class(figsize=(WIDTH, head + _legend_rows(runs) * ROW + CHARTS), facecolor="white")
    if tables:
        _draw_head(figure, runs, shown)
    _draw_charts(figure, runs, head)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # characters that the font lacks are drawn as boxes
        figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _draw_head(figure: Figure, runs: Sequence[Run], tables: Sequence[Table]) -> None:
    height, left = figure.get_figheight(), MARGIN / WIDTH
    name, details = title(runs)
    line: dict[str, Any] = {"parse_math": False, "va": "top"}
    figure.text(left, 1 - 0.2 / height, _shortened(name, 90), fontsize=18, weight="bold", **line)
    figure.text(left, 1 - 0.6 / height, f"{details}   {same_weights(runs)}", fontsize=11, color="#444444", **line)
    top = HEAD
    for table in tables:
        tall = ROW * len(table.rows)
        _draw_table(figure.add_axes((left, 1 - (top + tall) / height, 1 - 2 * left, tall / height)), table)
        top += tall + ROW


def _draw_table(axes: Axes, table: Table) -> None:
    from matplotlib.transforms import Bbox

    axes.set_axis_off()
    widest = [max(map(len, column)) + 2 for column in zip(*table.rows, strict=True)]
    room = max(12, LETTERS // len(widest), min(50, LETTERS - sum(sorted(widest)[:-1])))
    widths = [min(width, room) for width in widest]
    cells = [[_shortened(cell, room - 2) for cell in row] for row in table.rows]
    share = 1 / max(LETTERS, sum(widths))
    whole = Bbox.from_bounds(0, 0, share * sum(widths), 1)
    drawn = axes.table(cells, colWidths=[w * share for w in widths], bbox=whole, cellLoc="left", edges="B")
    drawn.auto_set_font_size(False)
    size = 9 * min(1, LETTERS / sum(widths))
    for (row, column), cell in drawn.get_celld().items():
        run = table.names.get((row, column))
        cell.PAD = 0.0
        cell.set_edgecolor("#cccccc")
        weight = "bold" if run or row == 0 else "normal"
        cell.get_text().set(parse_math=False, fontsize=size, color=run.color if run else "#222222", fontweight=weight)


def _legend_rows(runs: Sequence[Run]) -> int:
    return math.ceil(len(runs) / _legend_columns(runs))


def _legend_columns(runs: Sequence[Run]) -> int:
    return max(1, LETTERS // (8 + max(len(_shortened(run.label, 80)) for run in runs)))


def _draw_charts(figure: Figure, runs: Sequence[Run], below: float) -> None:
    from matplotlib.lines import Line2D

    height = figure.get_figheight()
    keys = [Line2D([], [], color=run.color, linewidth=3) for run in runs]
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.3 / WIDTH, 1 - below / height), "frameon": False}
    names = [_shortened(run.label, 80) for run in runs]
    # Set the names afterwards: matplotlib would interpret $ and a leading _ in labels.
    legend = figure.legend(keys, ["x"] * len(keys), ncols=_legend_columns(runs), fontsize=10, **place)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set(parse_math=False, text=name)
    top = 1 - (below + (_legend_rows(runs) + 1.6) * ROW) / height
    grid = figure.add_gridspec(2, 2, left=0.055, right=0.98, bottom=0.6 / height, top=top, hspace=0.3, wspace=0.14)
    for number, (name, curves) in enumerate(PANELS.items()):
        _draw_panel(figure.add_subplot(grid[divmod(number, 2)]), name, curves, runs)


def _draw_panel(axes: Axes, name: str, curves: list[tuple[str, str, str]], runs: Sequence[Run]) -> None:
    from matplotlib.lines import Line2D

    drawn = set()
    for number, run in enumerate(runs):
        # Curves of equal runs coincide: draw earlier runs wider, so that they show on both sides of later ones.
        width = 1.4 + 3.0 * (len(runs) - 1 - number) / max(1, len(runs) - 1)
        for how, kind, key in curves:
            steps, values = run.curve(kind, key)
            if steps:
                drawn.add(how)
                color = _paler(run.color) if how == STEP and len(curves) > 1 else run.color
                alone = {"marker": "."} if len(steps) == 1 else {}
                axes.plot(steps, values, color=color, linewidth=width, **{**alone, **KINDS[how]})
    axes.set_title(name, loc="left", weight="bold", fontsize=12)
    axes.set_xlabel("optimizer step")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(drawn) > 1:
        kinds = [how for how in KINDS if how in drawn]
        keys = [Line2D([], [], color="#bbbbbb" if how == STEP else "#333333", **KINDS[how]) for how in kinds]
        axes.legend(keys, kinds, fontsize=9)
    if not drawn:
        axes.text(0.5, 0.5, "nothing recorded", ha="center", color="#777777", transform=axes.transAxes)


def _paler(color: str) -> str:
    """Mix a colour with white. Transparency would mix the colours of lines that cross."""
    parts = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{(part + 2 * 255) // 3:02x}" for part in parts)


def _shortened(text: str, room: int) -> str:
    """Shorten a text to ``room`` characters by cutting out its middle."""
    half = (room - 1) // 2
    return text if len(text) <= room else f"{text[:half]}…{text[-half:]}"
