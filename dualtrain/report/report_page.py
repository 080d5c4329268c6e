"""The report as one self-contained HTML page."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from dualtrain.report.report_charts import PANELS, picture
from dualtrain.report.runs import Run, Table, differing_settings, results, same_weights, title

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1500px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15em; margin: 1.6em 0 .4em; }
p { margin: .2em 0; color: #444; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9em; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .35em .8em .35em 0; border-bottom: 1px solid #ddd; }
td, th { max-width: 16em; overflow-wrap: break-word; }
td:first-child { min-width: 9em; }
i { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .45em; }
small { display: block; color: #777; }
img { width: 100%; height: auto; }
"""


def page(runs: Sequence[Run]) -> str:
    """Return the report as self-contained HTML.

    Raises:
        UserError: matplotlib is missing.
    """
    name, details = map(html.escape, title(runs))
    charts = base64.b64encode(picture(runs, tables=False)).decode()
    differing = differing_settings(runs)
    return "\n".join(
        [
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>',
            f"<style>{STYLE}</style></head><body>",
            f"<h1>{name}</h1>\n<p>{details}</p>",
            f"<h2>Results</h2>\n{_table(results(runs))}\n<p>{same_weights(runs)}</p>",
            f"<h2>Settings that differ</h2>\n{_table(differing)}" if differing else "",
            f'<h2>Course</h2>\n<img alt="{", ".join(PANELS)}" src="data:image/png;base64,{charts}">',
            "</body></html>\n",
        ]
    )


def _table(table: Table) -> str:
    def cell(row: int, column: int, text: str) -> str:
        run, tag = table.names.get((row, column)), "td" if row else "th"
        mark = f'<i style="background:{run.color}"></i>' if run else ""
        path = f"<small>{html.escape(str(run.folder))}</small>" if run and row else ""
        return f"<{tag}>{mark}{html.escape(text)}{path}</{tag}>"

    lines = ["".join(cell(row, column, text) for column, text in enumerate(cells)) for row, cells in enumerate(table.rows)]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>\n{body}\n</table></div>'
