"""The report as lines of text, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dualtrain.doctor.gpu import gpu_line
from dualtrain.doctor.probe import SIZES

_UNITS = ((1 << 20, "MB"), (1 << 10, "KB"), (1, "B"))


def page(report: Mapping[str, Any]) -> str:
    """What ``report`` (the object that ``--json`` prints) says, its verdict last."""
    lines = [f"{label:<11} {text}".rstrip() for label, text in _facts(report)]
    lines += ["", *_table(report["allreduce"])]
    lines += [f"note: {line}" for line in report["notes"]] + [f"problem: {line}" for line in report["problems"]]
    verdict = "would work" if report["works"] else "would not work; mend the problems above"
    return "\n".join([*lines, f"a run with --backend {report['chosen']} {verdict}"])


def _facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    first = report["ranks"][0]
    yield "launcher", f"{first['launcher']} ({_pairs(first['evidence']) or 'no launcher variable decided'})"
    yield "ignored", _pairs(first["ignored"]) or "no other launcher's variables are set"
    hosts = list(dict.fromkeys(row["host"] for row in report["ranks"]))
    told = "" if len(report["ranks"]) == first["size"] else f", of which {len(report['ranks'])} reported"
    yield "world", f"{first['size']} rank{'s' * (first['size'] > 1)}{told}; hosts: {', '.join(hosts)}"
    yield "versions", ", ".join(f"{_title(name)} {version or '-'}" for name, version in first["versions"].items())
    yield "torch", ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in first["torch"].items())
    yield "CUDA", gpu_line(first["gpu"])
    yield "Horovod", _horovod(first)
    for row in report["ranks"]:
        if row["local_rank"] == 0:
            found = (f"{name} {' '.join(addresses) or '-'}" for name, addresses in row["interfaces"].items())
            yield f"on {row['host']}", f"{'; '.join(found)}; used: {report['interface']}"
    for row in report["ranks"]:
        yield (
            f"rank {row['rank']}",
            f"{row['host']}, local rank {row['local_rank']}, {len(row['cores'])} cores, sees {'; '.join(row['devices'])}",
        )


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
    """One line for each size; times are the slowest rank's."""
    tested = {name: found for name, found in results.items() if found["sizes"]}
    if not tested:
        return
    heads = [f"{name} ({found['transport']}, {found['device']})" for name, found in tested.items()]
    yield f"{'allreduce':<11} " + "".join(f"{head:<28}" for head in heads).rstrip()
    for place, size in enumerate(SIZES):
        cells = (found["sizes"][place] for found in tested.values())
        shown = (f"{cell['seconds'] * 1e3:9.3f} ms {cell['bus_bandwidth'] / 1e9:8.3f} GB/s" for cell in cells)
        yield f"{_bytes(size):<11} " + "".join(f"{text:<28}" for text in shown).rstrip()
    yield ""


def _bytes(size: int) -> str:
    unit, name = next((unit, name) for unit, name in _UNITS if size >= unit)
    return f"{size // unit} {name}"
