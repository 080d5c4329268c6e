"""The doctor's report as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dualtrain.console import size_in_words
from dualtrain.doctor.gpu import gpu_line
from dualtrain.doctor.probe import SIZES


def page(report: Mapping[str, Any]) -> str:
    """Format ``report``, the object that ``--json`` prints, as text; the last line is the verdict."""
    lines = [f"{label:<11} {text}".rstrip() for label, text in _facts(report)]
    lines.append("")
    lines += _table(report["allreduce"])
    lines += [f"note: {line}" for line in report["notes"]] + [f"problem: {line}" for line in report["problems"]]
    verdict = "would work" if report["works"] else "would not work; fix the problems above"
    return "\n".join([*lines, f"a run with --backend {report['chosen']} {verdict}"])


def _facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    first = report["ranks"][0]
    yield "launcher", f"{_launcher(first)} ({_pairs(first['evidence']) or 'no launcher variables are set'})"
    yield "ignored", _pairs(first["ignored"]) or "nothing: no other launcher's variables are set"
    hosts = list(dict.fromkeys(row["host"] for row in report["ranks"]))
    missing = "" if len(report["ranks"]) == first["size"] else f", of which {len(report['ranks'])} reported"
    yield "world", f"{first['size']} rank{'s' * (first['size'] > 1)}{missing}; hosts: {', '.join(hosts)}"
    yield "versions", ", ".join(f"{_title(name)} {version or '-'}" for name, version in first["versions"].items())
    yield "torch", ", ".join(f"{name} {'yes' if available else 'no'}" for name, available in first["torch"].items())
    yield "CUDA", gpu_line(first["gpu"])
    yield "Horovod", _horovod(first)
    for row in report["ranks"]:
        if row["local_rank"] == 0:
            found = (f"{name} {' '.join(addresses) or '-'}" for name, addresses in row["interfaces"].items())
            yield f"on {row['host']}", f"{'; '.join(found)}; used: {row['interface']}"
    for row in report["ranks"]:
        yield (
            f"rank {row['rank']}",
            f"{row['host']}, local rank {row['local_rank']}, {_cores(row)}, sees {'; '.join(row['devices'])}",
        )
    yield "threads", f"{report['threads']} intra-op for each rank; dualtrain train --threads sets another number"


#: Explanations of launchers whose names are not commands.
_LAUNCHERS = {
    "environment": "an unknown program, or the user, has set these variables",
    "ray": "each rank is a Ray actor, started by dualtrain.ray or Ray Train",
    "spark": "each rank is a child process of a Spark barrier task, started by dualtrain.spark",
    "spawn": "each rank is a child process, started by dualtrain itself",
}


def _launcher(row: Mapping[str, Any]) -> str:
    name = str(row["launcher"])
    return f"{name}: {_LAUNCHERS[name]}" if name in _LAUNCHERS else name


def _cores(row: Mapping[str, Any]) -> str:
    quota = "" if row["quota"] is None else f" (CPU quota {row['quota']:g})"
    number = len(row["cores"])
    return f"{number} core{'s' * (number != 1)}{quota}"


def _pairs(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _title(name: str) -> str:
    return "Horovod" if name == "horovod" else name


def _horovod(row: Mapping[str, Any]) -> str:
    built = row["horovod"]
    if built is None:
        return "not usable"
    parts = (f"{label} {', '.join(built[label]) or 'none'}" for label in ("frameworks", "controllers", "operations"))
    return f"{'; '.join(parts)}; built against torch {built['torch'] or 'unknown'}"


def _table(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a heading, one line per size with the slowest rank's times, and an empty line; nothing without measurements."""
    tested = {name: found for name, found in results.items() if found["sizes"]}
    if not tested:
        return
    heads = [f"{name} ({found['transport']}, {found['device']})" for name, found in tested.items()]
    yield f"{'allreduce':<11} " + "".join(f"{head:<28}" for head in heads).rstrip()
    for index, size in enumerate(SIZES):
        cells = (found["sizes"][index] for found in tested.values())
        shown = (f"{cell['seconds'] * 1e3:9.3f} ms {cell['bus_bandwidth'] / 1e9:8.3f} GB/s" for cell in cells)
        yield f"{size_in_words(size):<11} " + "".join(f"{text:<28}" for text in shown).rstrip()
    yield ""
