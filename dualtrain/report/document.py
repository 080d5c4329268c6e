"""Common parts of the pages of ``report`` and ``bench``: the self-contained HTML document, its style, its tables."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from functools import cache
from importlib import resources

#: Security policy: the page loads no other files, and only its own script runs, even if a text were not escaped.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
)


def document(title: str, body: str, script: str = "", refresh: bool = False) -> str:
    """Return a self-contained HTML page. Bytes of file names that are not UTF-8 are shown as "?".

    Args:
        title: plain text.
        body: HTML.
        script: JavaScript that the page runs.
        refresh: whether the script loads the page again from its server.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"{_POLICY}; script-src 'sha256-{digest}'" if script else _POLICY
    page = "\n".join(
        [
            f'<!DOCTYPE html>\n<html lang="en"{" data-refresh" * refresh}>\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">',
            '<link rel="icon" href="data:,">',
            f"<title>{html.escape(title)}</title>\n<style>\n{asset('page.css')}</style>\n</head>\n<body>",
            f"{body}\n{f'<script>{script}</script>' if script else ''}\n</body>\n</html>\n",
        ]
    )
    return page.encode(errors="replace").decode()


@cache
def asset(name: str) -> str:
    """Return the text of a file in the folder of this module."""
    return (resources.files("dualtrain") / "report" / name).read_text(encoding="utf-8")


def text(value: object) -> str:
    """Escape plain text for HTML."""
    return html.escape(str(value))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, short: bool = False) -> str:
    """Return a table of HTML cells, which scrolls if it is too wide for the page.

    Args:
        head: the column headings.
        rows: the other rows; if ``head`` has several cells, a row of one cell is a heading for the rows after it.
        short: whether to keep each cell on one line; the first cell of a row may still wrap.
    """

    def line(cells: Sequence[str], tag: str) -> str:
        if len(cells) == 1 < len(head):
            return f'<tr><td class="group" colspan="{len(head)}"><span>{cells[0]}</span></td></tr>'
        return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"

    lines = [f"<thead>{line(head, 'th')}</thead>", "<tbody>", *(line(cells, "td") for cells in rows), "</tbody>"]
    return "\n".join([f'<div class="wide" tabindex="0"><table{" class=short" * short}>', *lines, "</table></div>"])


def facts(values: Sequence[tuple[str, str]], style: str = "") -> str:
    """Return an HTML list of names with their values, which are given as plain text."""
    items = "\n".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in values)
    return f'<dl class="{style}">\n{items}\n</dl>' if style else f"<dl>\n{items}\n</dl>"
