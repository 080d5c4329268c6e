"""The results of ``--prove``: the rows of the table, and the values of the JSON file."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

from dualtrain.console import size_in_words
from dualtrain.horovodize.prove.evidence import Evidence
from dualtrain.horovodize.prove.records import RunRecord, median_of
from dualtrain.horovodize.prove.verdict import Verdict, ratios

HEAD = ["", "library", "ranks", "steps", "steps/s", "start-up", "memory", "weights"]


def table(evidence: Evidence) -> list[list[str]]:
    """Return the rows of the table, beginning with its head."""
    rows = [HEAD]
    sides = [("Horovod", evidence.horovod), ("dualtrain", evidence.dualtrain)]
    if evidence.compat is not None:
        sides.append(("with Horovod's defects", [evidence.compat]))
    for name, runs in sides:
        if runs:
            rows.append([name, *_cells(runs, with_start_up=not (evidence.recorded and name == "Horovod"))])
    return rows


def _cells(runs: Sequence[RunRecord], with_start_up: bool) -> list[str]:
    first = runs[0]
    memory = size_in_words(max(run.memory for run in runs))
    gpu = max(run.gpu_memory for run in runs)
    return [
        first.library,
        str(first.size),
        str(first.steps),
        _interval(median_of(runs, lambda run: run.steps_per_second)),
        _interval(median_of(runs, lambda run: run.start_up), " s") if with_start_up else "–",
        memory + (f", GPU {size_in_words(gpu)}" if gpu else ""),
        weights_hash(first)[:16],
    ]


def _interval(median_and_range: tuple[float, float, float] | None, unit: str = "") -> str:
    if median_and_range is None:
        return "–"
    value, low, high = (f"{each:.3g}" for each in median_and_range)
    return f"{value}{unit}" if low == high else f"{value} ({low}–{high}){unit}"


def weights_hash(run: RunRecord) -> str:
    """Return a hash of the last summarized weights of all optimizers on rank 0, made from their tensors' hashes."""
    digest = hashlib.sha256()
    for optimizer in run.ranks[0].optimizers:
        if optimizer.weights:
            for tensor in optimizer.weights[max(optimizer.weights)].tensors:
                digest.update(tensor.sha256.encode())
    return digest.hexdigest()


def facts(evidence: Evidence, verdict: Verdict) -> dict[str, Any]:
    """Return all results as values for a JSON file."""
    sides = {"horovod": evidence.horovod, "dualtrain": evidence.dualtrain}
    sides["compat"] = [evidence.compat] if evidence.compat else []
    difference = verdict.difference
    return {
        "verdict": verdict.line,
        "status": verdict.status,
        "details": verdict.details,
        "difference": difference
        and {
            "step": difference.step,
            "optimizer": difference.optimizer,
            "rank": difference.rank,
            "tensors": list(difference.names),
            "relative": difference.relative if math.isfinite(difference.relative or 0.0) else None,
            "measured_at_step": difference.measured,
        },
        "speed": ratios(evidence),
        "runs": {side: [_facts_of(run) for run in runs] for side, runs in sides.items()},
    }


def _facts_of(run: RunRecord) -> dict[str, Any]:
    return {
        "library": run.library,
        "ranks": run.size,
        "steps": run.steps,
        "steps_per_second": run.steps_per_second,
        "start_up_seconds": run.start_up,
        "memory_bytes": run.memory,
        "gpu_memory_bytes": run.gpu_memory,
        "weights_sha256": weights_hash(run),
        "platform": run.platform,
        "defects": [list(each) for each in run.defects],
    }
