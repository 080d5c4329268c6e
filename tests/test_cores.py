"""The cores that a process may use: CPU affinity, and CPU quotas of cgroups in simulated trees of /proc and /sys files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dualtrain.cores import cpu_quota, share_of, threads_per_rank, usable_cores

V2 = "31 23 0:28 {top} /sys/fs/cgroup rw,nosuid,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "33 30 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:10 - cgroup cgroup rw,cpu,cpuacct"
CPUSET = "36 30 0:32 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset"
ROOT_DISK = "23 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw"


def tree(root: Path, cgroup: str, mounts: str, quotas: dict[str, str]) -> Path:
    """Write proc/self/cgroup, proc/self/mountinfo, and the files with the quota of each folder in ``quotas``.

    The values of ``quotas`` are "quota period" for cgroup v2, and "quota/period" for v1.
    """
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup + "\n")
    (root / "proc/self/mountinfo").write_text(f"{ROOT_DISK}\n{mounts}\n")
    for folder, text in quotas.items():
        path = root / folder
        path.mkdir(parents=True, exist_ok=True)
        if "/" in text:
            quota, period = text.split("/")
            (path / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (path / "cpu.cfs_period_us").write_text(f"{period}\n")
        else:
            (path / "cpu.max").write_text(f"{text}\n")
    return root


G, C = "sys/fs/cgroup", "sys/fs/cgroup/cpu,cpuacct"
CASES = {
    "v2, own group": ("0::/job", V2.format(top="/"), {f"{G}/job": "200000 100000"}, 2.0),
    "v2, unlimited": ("0::/job", V2.format(top="/"), {f"{G}/job": "max 100000"}, None),
    "v2, another period": ("0::/job", V2.format(top="/"), {f"{G}/job": "30000 20000"}, 1.5),
    "v2, the parent has the smallest quota": (
        "0::/pods/pod/box",
        V2.format(top="/"),
        {f"{G}/pods": "800000 100000", f"{G}/pods/pod": "300000 100000", f"{G}/pods/pod/box": "max 100000"},
        3.0,
    ),
    "v2, the process's own group has the smallest quota": (
        "0::/pods/pod",
        V2.format(top="/"),
        {f"{G}/pods": "800000 100000", f"{G}/pods/pod": "50000 100000", f"{G}/pods/pod/other": "10000 100000"},
        0.5,
    ),
    "v2, a container with a namespace": ("0::/", V2.format(top="/"), {G: "400000 100000"}, 4.0),
    "v2, a container without a namespace": (
        "0::/docker/ab/inner",
        V2.format(top="/docker/ab"),
        {G: "400000 100000", f"{G}/inner": "100000 100000"},
        1.0,
    ),
    "v2, a namespace that sees the host's mount": ("0::/", V2.format(top="/../.."), {G: "700000 100000"}, 7.0),
    "v2, moved out of its namespace": ("0::/../b", V2.format(top="/.."), {f"{G}/b": "200000 100000"}, 2.0),
    "v2, moved out of namespace and mount": ("0::/../b", V2.format(top="/"), {"sys/fs/b": "200000 100000"}, None),
    "v2, another container's mount": ("0::/docker/ab", V2.format(top="/docker/cd"), {G: "100000 100000"}, None),
    "v2, a mount of a group beside the namespace": ("0::/", V2.format(top="/../b"), {G: "100000 100000"}, None),
    "v2, removed": ("0::/gone (deleted)", V2.format(top="/"), {G: "max 100000"}, None),
    "v2, a space in the path of the mount": (
        "0::/job",
        V2.format(top="/").replace("/sys/fs/cgroup", "/sys/c\\040g"),
        {"sys/c g/job": "200000 100000"},
        2.0,
    ),
    "v1, own group": ("4:cpu,cpuacct:/job\n3:cpuset:/", V1.format(top="/"), {f"{C}/job": "250000/100000"}, 2.5),
    "v1, unlimited": ("4:cpu,cpuacct:/job", V1.format(top="/"), {f"{C}/job": "-1/100000", C: "-1/100000"}, None),
    "v1, nested": (
        "4:cpu,cpuacct:/a/b",
        V1.format(top="/"),
        {C: "-1/100000", f"{C}/a": "100000/50000", f"{C}/a/b": "-1/100000"},
        2.0,
    ),
    "v1, a container": ("4:cpu,cpuacct:/docker/ab", V1.format(top="/docker/ab"), {C: "150000/100000"}, 1.5),
    "v1, only another controller": ("4:cpuset:/job", CPUSET, {"sys/fs/cgroup/cpuset/job": "100000/100000"}, None),
    "both, v1 has the controller": (
        "4:cpu:/job\n0::/job",
        "\n".join((V1.format(top="/"), V2.format(top="/").replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified "))),
        {f"{C}/job": "300000/100000", f"{G}/unified": "max 100000"},
        3.0,
    ),
    "not a number": ("0::/job", V2.format(top="/"), {f"{G}/job": "soon enough"}, None),
    "no period": ("0::/job", V2.format(top="/"), {f"{G}/job": "100000"}, None),
    "a period of 0": ("4:cpu,cpuacct:/job", V1.format(top="/"), {f"{C}/job": "100000/0"}, None),
    "no files": ("0::/job", V2.format(top="/"), {}, None),
    "malformed lines": ("nothing\n::\n", "nothing\n1 2 3\n4 5 6 - cgroup2", {}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cpu_quota_is_the_smallest_of_all_cgroups_up_to_the_root(tmp_path, name):
    cgroup, mounts, quotas, expected = CASES[name]
    assert cpu_quota(tree(tmp_path, cgroup, mounts, quotas)) == expected


def test_no_cpu_quota_applies_if_proc_cannot_be_read(tmp_path):
    assert cpu_quota(tmp_path) is None
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "affinity", "cores"), [("150000", 4, 1), ("50000", 4, 1), ("399999", 4, 3), ("900000", 4, 4), ("max", 4, 4)]
)
def test_quotas_are_rounded_down_to_at_least_one_core_and_limited_by_the_affinity(
    tmp_path, monkeypatch, quota, affinity, cores
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    root = tree(tmp_path, "0::/job", V2.format(top="/"), {f"{G}/job": f"{quota} 100000"})
    assert usable_cores(root) == cores


def test_ranks_share_the_cores_and_each_gets_at_least_one():
    assert [share_of(8, ranks) for ranks in (1, 3, 8, 9)] == [8, 2, 1, 1]


@pytest.mark.parametrize(
    ("ranks", "number"),
    [
        ([("a", range(8), None)] * 3, 2),  # not bound
        ([("a", range(8), None)] * 9, 1),
        ([("a", range(8 * n, 8 * n + 8), None) for n in range(4)], 8),  # as srun binds tasks with --cpus-per-task=8
        ([("a", range(16 * (n % 2), 16 * (n % 2) + 16), None) for n in range(4)], 8),  # two ranks on each socket
        ([("a", [0], None), ("a", [1, 2, 3], None)], 1),  # not more threads than cores of the rank
        ([("a", range(8), None)] * 2 + [("b", range(6), None)] * 2, 3),  # the smallest host
        ([("a", range(8), 4.5)] * 2, 2),
        ([("a", range(8), 0.5)] * 2, 1),
        ([("a", range(8), 3.0), ("a", range(8), 6.0)], 3),
        ([("a", range(8), 2.0), ("a", range(8), None)], 2),  # not more threads than the quota of the rank
    ],
)
def test_all_ranks_have_as_many_threads_as_the_smallest_share_of_cores_that_any_rank_has(ranks, number):
    assert threads_per_rank(ranks) == number


def test_the_cores_of_this_machine_can_be_read():
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
