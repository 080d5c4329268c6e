"""The results as one self-contained HTML page."""

from __future__ import annotations

import os
import time

from dualtrain.cores import usable_cores
from dualtrain.horovodize.prove.evidence import Evidence
from dualtrain.horovodize.prove.records import RunRecord
from dualtrain.horovodize.prove.results import table as rows_of
from dualtrain.horovodize.prove.verdict import Verdict
from dualtrain.report.document import document, facts, table, text


def page(script: str, evidence: Evidence, verdict: Verdict) -> str:
    """Return the HTML page with the verdict, the table, the details and the machine."""
    # One column per side: a table with one row per side would be too wide for a phone.
    head, *rows = ([text(cell) for cell in cells] for cells in zip(*rows_of(evidence), strict=True))
    parts = [
        f'<header><h1>{text(script)} without Horovod</h1>\n<p class="answer"><b>{text(verdict.line)}</b></p></header>',
        table(head, rows, short=True),
        *(f"<p>{text(line)}</p>" for line in verdict.details),
        f"<h2>Machine</h2>\n{facts(_machine(evidence))}",
    ]
    return document(f"{script} without Horovod", "\n".join(["<main>", *parts, "</main>"]))


def _machine(evidence: Evidence) -> list[tuple[str, str]]:
    """Return facts (name, text) about this machine, and about the machine on which --against's record was made."""
    recorded = evidence.horovod[:1] if evidence.recorded else []
    runs = [run for run in (*evidence.horovod, *evidence.dualtrain, evidence.compat) if run and run not in recorded]
    found = [(f"record of {run.library}", f"{_date(run)}: {_platform(run)}") for run in recorded]
    if runs:
        first, last = (_date(pick(runs, key=lambda run: run.launched)) for pick in (min, max))
        found += [
            ("measured", first if first == last else f"{first} to {last}"),
            ("processor", _platform(runs[0])),
            ("cores", f"{usable_cores()} usable here"),
            ("load", "{:.2f}, {:.2f} and {:.2f} at the end (averages over 1, 5 and 15 minutes)".format(*os.getloadavg())),
        ]
    return found


def _date(run: RunRecord) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(run.launched))


def _platform(run: RunRecord) -> str:
    """Format the processor and the other facts on which the bits of a result may depend."""
    known = run.platform
    threads = f"{known['threads']} thread{'s' * (known['threads'] != 1)} per rank"
    device = [known["device"]] if known["device"] else []
    return ", ".join([str(known["processor"]), *device, f"torch {known['torch']}", threads])
