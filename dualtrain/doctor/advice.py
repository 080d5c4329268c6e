"""Derive problems and notes from the facts of all ranks: one line each, with the cure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dualtrain.cores import cores_together
from dualtrain.differences import ranks_in_words
from dualtrain.doctor.gpu import gpu_advice

#: The facts of one rank: the result of ``local_facts``, and what ``Examination`` adds to it.
Row = Mapping[str, Any]

_CURES = {
    "dualtrain": "install the same version on every host",
    "torch": "install the same version on every host",
    "horovod": "run launch/setup.sh with the same launch/versions.txt on every host",
}


def advise(rows: Sequence[Row], backend: str) -> tuple[list[str], list[str]]:
    """Return the problems that prevent a run on ``backend``, and notes on everything else."""
    problems, notes = _different_versions_or_launchers(rows, backend), _different_versions_of_other_packages(rows, backend)
    for name in ("torch", "horovod"):
        failures = _failures(rows, name)
        (problems if name == backend else notes).extend(failures)
    if mismatch := _built_for_other_torch(rows):
        broken = backend == "horovod" and bool(_failures(rows, "horovod"))
        (problems if broken else notes).append(mismatch)
    # One line per host, because the ranks of a host usually get the same advice.
    found = {row["host"]: line for row in reversed(rows) if (line := gpu_advice(row))}
    return problems, [*notes, *found.values(), *_too_many_ranks(rows), *_cpus(rows)]


def _grouped(rows: Sequence[Row], values: Sequence[Any]) -> dict[Any, list[int]]:
    """Group the ranks by value."""
    groups: dict[Any, list[int]] = {}
    for row, value in zip(rows, values, strict=True):
        groups.setdefault(value, []).append(row["rank"])
    return groups


def _failures(rows: Sequence[Row], name: str) -> list[str]:
    errors = _grouped(rows, [(row["probes"].get(name) or {}).get("error") for row in rows])
    errors.pop(None, None)
    single = len(rows) == 1
    return [f"{name}{'' if single else f' on {ranks_in_words(ranks)}'}: {error}" for error, ranks in errors.items()]


def _differing_versions(rows: Sequence[Row], name: str) -> str | None:
    """Return the versions of the package ``name`` as text, each with its ranks; ``None`` if all ranks have the same one."""
    groups = _grouped(rows, [row["versions"][name] for row in rows])
    if len(groups) == 1:
        return None
    return ", ".join(f"{version or 'none'} ({ranks_in_words(ranks)})" for version, ranks in groups.items())


def _different_versions_or_launchers(rows: Sequence[Row], backend: str) -> list[str]:
    lines = [_version_line(rows, name) for name in _needed(backend) if _differing_versions(rows, name)]
    launchers = _grouped(rows, [(row["launcher"], row["size"]) for row in rows])
    if len(launchers) > 1:
        found = ", ".join(f"{name} with {size} ({ranks_in_words(ranks)})" for (name, size), ranks in launchers.items())
        lines.append(
            f"the ranks were started by different launchers: {found}; start all ranks with one launcher, "
            "from a clean environment"
        )
    return lines


def _different_versions_of_other_packages(rows: Sequence[Row], backend: str) -> list[str]:
    needed = _needed(backend)
    return [
        _version_line(rows, name) for name in rows[0]["versions"] if name not in needed and _differing_versions(rows, name)
    ]


def _needed(backend: str) -> list[str]:
    """Return the packages that must have the same version on all ranks for a run on ``backend``."""
    return [name for name in _CURES if name in (backend, "dualtrain", "torch")]


def _version_line(rows: Sequence[Row], name: str) -> str:
    cure = _CURES.get(name, "make them the same")
    return f"the ranks have different versions of {name}: {_differing_versions(rows, name)}; {cure}"


def _built_for_other_torch(rows: Sequence[Row]) -> str | None:
    for row in rows:
        built = (row["horovod"] or {}).get("torch")
        if built and built != row["versions"]["torch"]:
            return (
                f"Horovod was built against torch {built}, but rank {row['rank']} has {row['versions']['torch']}: "
                "build it again with launch/setup.sh"
            )
    return None


def _too_many_ranks(rows: Sequence[Row]) -> list[str]:
    lines = []
    for host in dict.fromkeys(row["host"] for row in rows):
        here = [row for row in rows if row["host"] == host]
        # Each rank may see a different GPU, as with Slurm's --gpus-per-task.
        gpus = set().union(*(row["gpu_uuids"] for row in here))
        available, what = (len(gpus), "GPUs") if here[0]["cuda"] else (_cores(here), "cores")
        if len(here) > available:
            what = what.removesuffix("s") if available == 1 else what
            lines.append(f"{host} has {len(here)} ranks for {available} {what}: they slow each other down; start fewer")
    return lines


def _cpus(rows: Sequence[Row]) -> list[str]:
    """Return notes on what makes runs on CPUs slow: CPU quotas, mpirun's binding, missing bf16 instructions."""
    lines = []
    for host in dict.fromkeys(row["host"] for row in rows):
        here = [row for row in rows if row["host"] == host]
        first, cores = here[0], len(set().union(*(row["cores"] for row in here)))
        quotas = [row["quota"] for row in here if row["quota"] is not None]
        if quotas and max(quotas) < cores:
            limit = f"a CPU quota (docker --cpus, a pod's limit) allows {max(quotas):g} of {cores} cores"
            lines.append(
                f"{host}: {limit}, and slows down jobs that use more: lower --workers (--threads follows the quota)"
            )
        own = len(first["cores"])
        alike = len(here) > 1 and all(row["cores"] == first["cores"] for row in here)
        if first["launcher"] == "mpirun" and own < min(3, first["host_cores"]) and not alike:
            bound = f"mpirun binds each rank to {own} of {first['host_cores']} cores"
            lines.append(f"{host}: {bound}, which its threads and data workers share: give mpirun --bind-to none")
        if first["bf16"] is False and not first["cuda"]:
            lines.append(f"{host}: no bf16 instructions (avx512_bf16, amx_bf16): --amp bf16 is slower than fp32 here")
    return lines


def _cores(rows: Sequence[Row]) -> int:
    """Return how many cores the ranks of one host may use in total."""
    return cores_together([row["cores"] for row in rows], [row["quota"] for row in rows])
