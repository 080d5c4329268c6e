"""``dualtrain doctor`` in healthy and in broken worlds: each problem is reported with its cure."""

from __future__ import annotations

import json
import os
import re
from types import SimpleNamespace

import pytest

from dualtrain.cores import usable_cores
from dualtrain.doctor import examine, network
from dualtrain.doctor.__main__ import main
from dualtrain.doctor.advice import advise
from dualtrain.doctor.doctor_text import page
from dualtrain.doctor.facts import has_bf16, ignored
from dualtrain.doctor.probe import MARGIN_SECONDS, Probe, bus_bandwidth
from dualtrain.launchers import World, detect_world, spawned
from dualtrain.rendezvous import hosts
from tests.conftest import require_horovod
from tests.forked import run, run_ranks, torchrun_variables
from tests.pool import ROOT, free_port

DOCTOR = ("-m", "dualtrain.doctor")
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
# Program in which Horovod cannot be imported.
WITHOUT_HOROVOD = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "horovod":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
from dualtrain.doctor.__main__ import main
sys.exit(main())
"""


def row(rank=0, **changes):
    """Return the facts about a rank without problems; the facts in ``changes`` replace some of them."""
    versions = {"dualtrain": "1", "Python": "3.11", "torch": "2.13", "horovod": "0.28.1"}
    healthy = {"rank": rank, "size": 2, "launcher": "torchrun", "ignored": {}, "versions": versions, "horovod": None}
    fine = {"torch": {"error": None}, "horovod": {"error": None}}
    gpu = {"cuda": None, "nccl": None, "driver": None, "driver_cuda": None}
    here = {
        "host": "host-a",
        "cuda": False,
        "gpu": gpu,
        "cores": [0, 1],
        "quota": None,
        "devices": ["cpu"],
        "gpu_uuids": [],
    }
    here |= {"host_cores": 2, "bf16": True}
    return {**healthy, "probes": fine, **here, **changes}


@pytest.mark.parametrize(("backend", "probes"), [("torch", 1), ("all", 2)])
def test_an_unconnected_rank_waits_until_rank_0_has_tried_all_backends(backend, probes, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(examine, "probe", lambda name, *_: Probe(name, error="no answer"))
    monkeypatch.setattr(examine, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=waits.append))
    examination = examine.Examination(backend, World(1, 2, launcher="mpirun"), 60.0)
    examination.end()
    assert waits == [3.0 + probes * (60.0 + MARGIN_SECONDS)]


def test_the_report_of_one_rank_as_text_and_as_json(tmp_path):
    end = run((*DOCTOR, "--json"), tmp_path, env=ENV)
    assert end.returncode == 0, end.stderr
    report = json.loads(end.stdout)
    assert report["works"]
    assert report["chosen"] == "local"
    assert report["problems"] == []
    assert report["allreduce"] == {}  # a single rank measures no all-reduce
    assert report["threads"] == usable_cores()
    text = page(report)
    assert "launcher    none" in text
    assert f"\nthreads     {usable_cores()} intra-op for each rank; " in text
    assert "64 MB" not in text
    assert text.endswith("a run with --backend local would work")
    (first,) = report["ranks"]
    report["ranks"].append(
        {**first, "rank": 1, "host": "there", "interface": "eth7 (other hosts reach this host at 10.0.0.7)"}
    )
    assert re.search(r"^on there .*; used: eth7 \(other hosts reach this host at 10.0.0.7\)$", page(report), re.MULTILINE)
    assert f"used: {first['interface']}\n" in page(report)


def assert_that_both_work(said, chosen):
    """Assert that both backends work on two ranks, and that a run would use ``chosen``."""
    assert f"a run with --backend {chosen} would work" in said
    assert said.count("a run with") == 1
    assert "torch (shm, cpu)" in said  # the transport that a run would use
    assert re.search(r"^(\[[\d,]+\]<stdout>:)?64 MB +\d+\.\d+ ms", said, re.MULTILINE)  # a launcher may prefix lines
    assert "horovod (" in said
    assert all(f"rank {rank} " in said for rank in (0, 1))
    assert "problem:" not in said


def test_the_reported_interface_is_the_one_on_the_route_to_rank_0(monkeypatch):
    monkeypatch.setattr(hosts, "_resolved", lambda name: "10.0.0.2")
    monkeypatch.setattr(hosts, "_route", lambda host: "10.1.0.2" if host == "node0" else "10.0.0.2")
    found = {"eth0": ["10.0.0.2"], "eth1": ["10.1.0.2"]}
    world = World(2, 4, 0, 2, 1, 2, rendezvous=("node0", 29500))
    assert network.used_interface(found, {}, world) == "eth1 (other hosts reach this host at 10.1.0.2)"
    assert network.used_interface(found, {}, World(2, 4, 0, 2, 1, 2)) == "eth0 (other hosts reach this host at 10.0.0.2)"
    assert network.used_interface(found, {}, World(0, 2, 0, 2)) == "lo (all ranks are on this host)"
    assert network.used_interface(found, {"GLOO_SOCKET_IFNAME": "eth2"}, world) == "GLOO_SOCKET_IFNAME=eth2"


def test_two_ranks_reach_each_other_on_both_backends(tmp_path):
    require_horovod()
    with torchrun_variables(2) as ranks:
        first, second = run_ranks(ranks, DOCTOR, tmp_path, env=ENV)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert_that_both_work(first.stdout, "torch")
    assert second.stdout == ""


def test_an_incomplete_set_of_launcher_variables_is_a_problem(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--backend", "torch"]) == 2
    said = capsys.readouterr().err
    assert "RANK is not set, but WORLD_SIZE is: the process has only a part of its environment" in said


def test_a_rendezvous_without_a_server_fails_within_the_timeout(tmp_path):
    port = str(free_port())
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    end = run((*DOCTOR, "--timeout", "1"), tmp_path, env=ENV | variables)
    assert end.returncode == 2
    assert end.stdout == ""  # only rank 0 prints the report
    (said,) = end.stderr.splitlines()
    assert f"(rank 1 of 2): torch: rank 1 could not meet the others at 127.0.0.1:{port} within 1 s" in said


@pytest.mark.parametrize(("backend", "status", "kind"), [("all", 0, "note"), ("horovod", 2, "problem")])
def test_a_missing_horovod_is_a_problem_only_if_it_is_requested(backend, status, kind, tmp_path):
    end = run(("-c", WITHOUT_HOROVOD, "--backend", backend), tmp_path, env=ENV)
    assert end.returncode == status, end.stderr
    assert f"{kind}: horovod: Horovod is not installed" in end.stdout
    assert "bash launch/setup.sh" in end.stdout


@pytest.mark.parametrize("flags", [["--backend", "nccl"], ["--timeout", "0"], ["--timeout", "soon"], ["more"]])
def test_bad_flags_are_refused_in_one_line(flags, capsys):
    assert main(flags) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("dualtrain: error: ")


def test_a_missing_launcher_variable_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert main([]) == 2
    assert "LOCAL_RANK is not set" in capsys.readouterr().err


def test_variables_of_another_launcher_are_shown_as_ignored():
    env = {"PMI_RANK": "1", "PMI_SIZE": "2", "RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "SLURM_JOB_ID": "7"}
    assert ignored(detect_world(env), env) == {"OMPI_COMM_WORLD_SIZE": "4", "RANK": "0"}
    assert ignored(World(), {"WORLD_SIZE": "2", "HOME": "/"}) == {"WORLD_SIZE": "2"}


def test_healthy_ranks_have_no_problem():
    assert advise([row(0), row(1)], "torch") == ([], [])


def test_ranks_with_different_versions_of_dualtrain_or_python_are_named():
    other = {**row()["versions"], "dualtrain": "2", "Python": "3.12"}
    problems, notes = advise([row(0), row(1, versions=other), row(2, host="host-b")], "torch")
    assert problems == [
        "the ranks have different versions of dualtrain: 1 (ranks 0, 2), 2 (rank 1); install the same version on every host"
    ]
    assert notes == ["the ranks have different versions of Python: 3.11 (ranks 0, 2), 3.12 (rank 1); make them the same"]


def test_different_versions_of_horovod_are_a_problem_if_it_is_the_chosen_backend():
    rows = [row(0), row(1, versions={**row()["versions"], "horovod": None})]
    (line,), notes = advise(rows, "horovod")
    assert line.startswith("the ranks have different versions of horovod: ")
    assert notes == []
    assert advise(rows, "torch") == ([], [line])


def test_a_backend_that_fails_is_a_problem_if_it_is_the_chosen_one():
    failed = {"torch": {"error": None}, "horovod": {"error": "no"}}
    rows = [row(0), row(1, probes=failed)]
    assert advise(rows, "torch") == ([], ["horovod on rank 1: no"])
    assert advise(rows, "horovod") == (["horovod on rank 1: no"], [])


def test_a_torch_that_horovod_was_not_built_against_is_reported():
    _, notes = advise([row(0, horovod={"torch": "2.12"})], "torch")
    assert notes == ["Horovod was built against torch 2.12, but rank 0 has 2.13: build it again with launch/setup.sh"]


def test_more_ranks_than_cores_are_noted():
    _, notes = advise([row(rank) for rank in range(3)], "torch")
    assert notes == ["host-a has 3 ranks for 2 cores: they slow each other down; start fewer"]


def test_more_ranks_than_gpus_are_noted_if_two_ranks_see_the_same_gpu():
    ranks = [row(rank, cuda=True, devices=["H200"], gpu_uuids=[uuid]) for rank, uuid in enumerate("aba")]
    assert advise(ranks[:2], "torch") == ([], [])
    note = "host-a has 2 ranks for 1 GPU: they slow each other down; start fewer"
    assert advise([ranks[0], {**ranks[2], "rank": 1}], "torch") == ([], [note])


def test_a_cpu_quota_limits_the_number_of_counted_cores():
    four = [row(rank, cores=[0, 1, 2, 3], quota=2.5) for rank in range(4)]
    _, notes = advise(four, "torch")
    limit = (
        "host-a: a CPU quota (docker --cpus, a pod's limit) allows 2.5 of 4 cores, and slows down jobs that use more: "
        "lower --workers (--threads follows the quota)"
    )
    assert notes == ["host-a has 4 ranks for 2 cores: they slow each other down; start fewer", limit]
    assert advise(four[:2], "torch") == ([], [limit])
    assert advise([row(0, quota=2.0)], "torch") == ([], [])


def test_ranks_that_mpirun_binds_to_one_core_each_are_noted():
    bound = [row(rank, cores=[rank], host_cores=8, launcher="mpirun") for rank in range(2)]
    share = "which its threads and data workers share: give mpirun --bind-to none"
    assert advise(bound, "horovod") == ([], [f"host-a: mpirun binds each rank to 1 of 8 cores, {share}"])
    free = [{**one, "cores": [0, 1]} for one in bound]  # as in a container with two cores
    assert advise(free, "horovod") == ([], [])


def test_a_processor_without_bf16_is_noted_unless_there_is_a_gpu():
    _, notes = advise([row(0, bf16=False)], "torch")
    assert notes == ["host-a: no bf16 instructions (avx512_bf16, amx_bf16): --amp bf16 is slower than fp32 here"]
    assert advise([row(0, bf16=None)], "torch") == ([], [])
    assert advise([row(0, bf16=False, cuda=True, gpu_uuids=["a"])], "torch") == ([], [])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags : fpu avx2\n", False),
        ("Features\t: fp asimd bf16\n", True),
        ("no flags here", None),
    ],
)
def test_bf16_instructions_are_found_in_the_processors_description(monkeypatch, text, found):
    monkeypatch.setattr("dualtrain.doctor.facts._cpuinfo", lambda: text)
    assert has_bf16() is found


def test_ranks_bound_to_one_core_each_do_not_outnumber_the_cores():
    assert advise([row(rank, cores=[rank]) for rank in range(2)], "horovod") == ([], [])


# Program in which only rank 1 cannot import Horovod.
ONE_WITHOUT = WITHOUT_HOROVOD.replace(
    "sys.meta_path.insert", "import os\nif os.environ['RANK'] == '1': sys.meta_path.insert"
)


@pytest.mark.parametrize(("backend", "seconds", "statuses"), [("all", "60", [0, 0]), ("horovod", "1", [2, 2])])
def test_a_rank_that_cannot_import_horovod_is_named(backend, seconds, statuses, tmp_path):
    require_horovod()
    command = ("-c", ONE_WITHOUT, "--backend", backend, "--timeout", seconds)
    with torchrun_variables(2) as ranks:
        first, second = run_ranks(ranks, command, tmp_path, env=ENV)
    assert [first.returncode, second.returncode] == statuses
    if backend == "all":
        assert "Horovod is not installed" in first.stdout
        assert "note: horovod on rank 0: not tried: rank 1 cannot use it" in first.stdout
    else:
        assert "Horovod is not installed" in second.stderr
        assert "problem: horovod: rank 1 of 2 did not join within 1 s" in first.stdout


def test_bus_bandwidth_is_computed_as_in_nccl_tests():
    assert bus_bandwidth(100, 2.0, 4) == 75.0
    assert bus_bandwidth(100, 2.0, 1) == 0.0


@pytest.mark.parametrize("starter", ["spark", "ray", "1"])
def test_a_launcher_that_is_not_a_shell_command_is_explained(tmp_path, starter):
    variables = spawned(0, 1, ("127.0.0.1", free_port()), "s", "j", starter=starter)
    end = run((*DOCTOR, "--json", "--backend", "torch"), tmp_path, env={**ENV, **variables})
    assert end.returncode == 0, end.stdout + end.stderr
    first, *_ = page(json.loads(end.stdout)).splitlines()
    shown = {
        "spark": "spark: each rank is a child process of a Spark barrier task, started by dualtrain.spark (LOCAL_RANK=0 ",
        "ray": "ray: each rank is a Ray actor, started by dualtrain.ray or Ray Train (LOCAL_RANK=0 ",
        "1": "spawn: each rank is a child process, started by dualtrain itself (LOCAL_RANK=0 ",
    }
    assert first.startswith(f"launcher    {shown[starter]}")
