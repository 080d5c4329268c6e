"""The results as one self-contained HTML page."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from itertools import groupby

from dualtrain.bench.measure import Results
from dualtrain.bench.rows import Row
from dualtrain.bench.table import HEAD, answer, cells, remarks
from dualtrain.report.report_page import STYLE


def page(results: Results, rows: Sequence[Row], world: str, png: bytes) -> str:
    """Return the HTML page with the answer, the table and the picture."""
    lines = [f"<tr>{''.join(f'<th>{html.escape(name)}</th>' for name in HEAD)}</tr>"]
    for group, members in groupby(rows, key=lambda row: row.group):
        lines.append(f'<tr><th colspan="{len(HEAD)}">{html.escape(group)}</th></tr>')
        lines += [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells(row))}</tr>" for row in members]
    table = "\n".join(lines)
    shown = base64.b64encode(png).decode()
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>dualtrain.bench</title>',
            f"<style>{STYLE}</style></head><body>",
            f"<h1>Which is faster here?</h1>\n<p>{html.escape(world)}</p>",
            f"<p><b>{html.escape(answer(results, rows))}</b></p>",
            f'<div class="wide"><table>\n{table}\n</table></div>',
            *(f"<p>{html.escape(line)}</p>" for line in remarks(results, rows)),
            f'<img alt="ratios and allreduce times" src="data:image/png;base64,{shown}">',
            "</body></html>\n",
        ]
    )
