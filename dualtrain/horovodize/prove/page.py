"""The results as one self-contained HTML page."""

from __future__ import annotations

from dualtrain.horovodize.prove.verdict import Evidence, Verdict
from dualtrain.horovodize.prove.verdict import table as rows_of
from dualtrain.report.document import document, table, text


def page(script: str, evidence: Evidence, verdict: Verdict) -> str:
    """Return the HTML page with the verdict, the table and the details."""
    head, *rows = ([text(cell) for cell in row] for row in rows_of(evidence))
    parts = [
        f"<header><h1>{text(script)} without Horovod</h1>\n<p><b>{text(verdict.line)}</b></p></header>",
        table(head, rows, short=True),
        *(f"<p>{text(line)}</p>" for line in verdict.details),
    ]
    return document(f"{script} without Horovod", "\n".join(["<main>", *parts, "</main>"]))
