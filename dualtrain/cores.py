"""Number of cores that this process may use, by its CPU affinity and the CPU quotas of its cgroups.

A quota (``docker run --cpus``, a pod's CPU limit, systemd's CPUQuota) leaves all cores visible, but limits the CPU time in
each period. When the processes of a cgroup have used this time, the kernel stops them until the next period. If a
process has more threads than its quota has cores, the threads wait for one another most of the time.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection, Hashable, Iterator, Sequence
from pathlib import Path, PurePosixPath

RANKS_PER_CORE = 16  # largest number of ranks per usable core that dualtrain starts on this host


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use, at least 1. A quota is rounded down: 1.5 cores count as 1.

    Args:
        root: the folder that contains ``proc`` and ``sys``.
    """
    return cores_together([os.sched_getaffinity(0)], [cpu_quota(root)])


def too_many_ranks(number: int, cores: int) -> str | None:
    """Return why a command must not start ``number`` ranks on a host with ``cores`` usable cores, or ``None``."""
    most = RANKS_PER_CORE * cores
    if number <= most:
        return None
    return f"more than {RANKS_PER_CORE} ranks for each of its {cores} cores take too long to start; give {most} at most"


def processor_name() -> str:
    """Return the name of this host's processor, or its architecture if Linux reports no name."""
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(errors="replace"))
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def share_of(cores: int, ranks: int) -> int:
    """Return how many of ``cores`` each of ``ranks`` processes may use, at least 1."""
    return max(1, cores // ranks)


def cores_together(affinities: Sequence[Collection[int]], quotas: Sequence[float | None]) -> int:
    """Return how many cores the ranks of one host may use in total, from each rank's CPU affinity and CPU quota."""
    cores = len(set().union(*affinities))  # a launcher may bind each rank to different cores
    # Ranks of one host usually share a cgroup and its quota. If their quotas differ, use the largest, and none
    # if a rank has no quota.
    largest = max((quota for quota in quotas if quota is not None), default=0.0)
    return cores if None in quotas else min(cores, max(1, int(largest)))


def threads_per_rank(ranks: Sequence[tuple[Hashable, Collection[int], float | None]]) -> int:
    """Return how many threads each of ``ranks`` may have: their smallest share of a host's cores, at least 1.

    A rank's share is at most the number of cores that it may use alone, since a launcher may bind it to a few cores.

    Args:
        ranks: the host, the CPU affinity and the CPU quota of each rank.
    """
    shares = []
    for host in {host for host, _, _ in ranks}:
        here = [(affinity, quota) for other, affinity, quota in ranks if other == host]
        alone = [cores_together([affinity], [quota]) for affinity, quota in here]
        shares.append(min(share_of(cores_together(*zip(*here, strict=True)), len(here)), *alone))
    return min(shares)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the smallest CPU quota, in cores, of this process's cgroup and its ancestors; ``None`` without a quota.

    Reads both versions of cgroups, since a host may use both. A file that cannot be read counts as no quota.

    Args:
        root: the folder that contains ``proc`` and ``sys``.
    """
    found = [_quota(folder) for folder in _folders(root)]
    return min((quota for quota in found if quota is not None), default=None)


def _folders(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroups that may have a CPU quota, and of their ancestors."""
    cgroups = dict(_cgroups(_text(root / "proc/self/cgroup")))
    for version, top, folder in _mounts(_text(root / "proc/self/mountinfo")):
        inside = _below(cgroups.get(version), top)
        if inside is not None:
            mounted = root / folder.lstrip("/")
            yield from (mounted / part for part in (inside, *inside.parents))


def _cgroups(text: str) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield the version and the path of each cgroup in ``/proc/self/cgroup`` that may have a CPU quota."""
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (number, controllers) == ("0", ""):
            yield 2, PurePosixPath(path)
        elif "cpu" in controllers.split(","):
            yield 1, PurePosixPath(path)


def _mounts(text: str) -> Iterator[tuple[int, PurePosixPath, str]]:
    """Yield the version, the top cgroup and the folder of each mount in ``/proc/self/mountinfo`` that may have quotas."""
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        mount, system = left.split(" "), right.split(" ")
        if len(mount) < 5 or len(system) < 3:
            continue
        if system[0] == "cgroup2":
            yield 2, PurePosixPath(_unescaped(mount[3])), _unescaped(mount[4])
        elif system[0] == "cgroup" and "cpu" in system[2].split(","):
            yield 1, PurePosixPath(_unescaped(mount[3])), _unescaped(mount[4])


def _below(cgroup: PurePosixPath | None, top: PurePosixPath) -> PurePosixPath | None:
    """Return the path of ``cgroup`` below ``top``, the cgroup at which a mount begins; ``None`` if it is not below."""
    if cgroup is None:
        return None
    if cgroup.is_relative_to(top):
        inside = cgroup.relative_to(top)
        return inside if ".." not in inside.parts else None
    # The mount's top cgroup may be above the root of this process's cgroup namespace. Its path in ``mountinfo`` is relative
    # to this root: "/../..", for example. The names of the cgroups in between are hidden, so only the quota of the mount's
    # top cgroup can be read.
    return PurePosixPath() if set(top.parts[1:]) == {".."} else None


def _quota(folder: Path) -> float | None:
    """Return the CPU quota of one cgroup in cores, or ``None``."""
    limit, _, period = _text(folder / "cpu.max").partition(" ")  # version 2: "150000 100000", or "max 100000"
    if not limit:
        limit, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")  # -1: none
    try:
        quota = int(limit) / int(period)
    except (ValueError, ArithmeticError):
        return None
    return quota if quota > 0 else None


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _unescaped(text: str) -> str:
    """Decode the octal numbers that encode spaces and similar characters in ``mountinfo``."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
