"""Jobs that cannot come about: one clear line from the ranks concerned, status 2, in the time that the message names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import require_horovod
from tests.launch.jobs import ENV
from tests.pool import ROOT, free_port

pytestmark = pytest.mark.launch

SECONDS = 6
BACKENDS = ["torch", "horovod"]
ELSEWHERE = "192.0.2.1"  # RFC 5737: no host has it


def start(variables, backend, place=ROOT):
    """One rank with these variables: its status, and what it says."""
    command = [sys.executable, "-m", "dualtrain.main", "--backend", backend, "--timeout", str(SECONDS)]
    env = {**ENV, **variables, "PYTHONPATH": str(place)}
    began = time.monotonic()
    end = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=120)
    assert time.monotonic() - began < SECONDS + 60  # a guard against hanging, with room for a start on a busy machine
    lines = [line for line in end.stderr.splitlines() if "Warning" not in line]
    assert len(lines) == 1, end.stderr
    return end.returncode, lines[0].removeprefix("dualtrain: error ")


def rank(number, size=2, **others):
    return {"RANK": str(number), "WORLD_SIZE": str(size), **{name: str(value) for name, value in others.items()}}


def meeting():
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}


def ends(ranks, backend):
    """What each of these ranks, started together, ends with."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        found = list(pool.map(lambda variables: start(variables, backend), ranks))
    assert {status for status, _ in found} == {2}
    return [said for _, said in found]


ALONE = {
    "a variable is missing": (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        "MASTER_PORT is not set, but MASTER_ADDR, RANK, WORLD_SIZE are: ",
    ),
    "torchrun's variable is missing": (
        {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        "WORLD_SIZE is not set, but LOCAL_RANK, LOCAL_WORLD_SIZE, RANK, TORCHELASTIC_RUN_ID are: the process has only",
    ),
    "Slurm's variable is missing": (
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
        "SLURM_NTASKS is not set, but ",
    ),
    "a number is none": ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK='first' is not a whole number"),
    "the rank is outside": (
        rank(5, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=29500),
        "environment gave rank 5 in a world of 2 (RANK=5 WORLD_SIZE=2",
    ),
    "the port is none": (rank(0, MASTER_ADDR="127.0.0.1", MASTER_PORT=99999), "MASTER_PORT=99999 is no port: "),
    "there is no address": (rank(0), "the torch backend has no address to meet the other 1 processes at: "),
    "nobody serves": (
        rank(1, MASTER_ADDR="127.0.0.1", MASTER_PORT=9),
        f"rank 1 could not meet the others at 127.0.0.1:9 within {SECONDS} s (Connection refused): ",
    ),
    "the host is unknown": (
        rank(1, MASTER_ADDR="no-such-host.invalid", MASTER_PORT=29500),
        f"rank 1 could not meet the others at no-such-host.invalid:29500 within {SECONDS} s (",
    ),
    "the host cannot be reached": (
        rank(1, MASTER_ADDR=ELSEWHERE, MASTER_PORT=29500),
        f"rank 1 could not meet the others at {ELSEWHERE}:29500 within {SECONDS} s (",
    ),
    "rank 0 is not there": (
        rank(0, MASTER_ADDR=ELSEWHERE, MASTER_PORT=29500),
        f"rank 0 cannot listen at {ELSEWHERE}:29500 (Cannot assign requested address): MASTER_ADDR must be",
    ),
    "the other one never comes": (
        rank(0, MASTER_ADDR="127.0.0.1", MASTER_PORT=0) | {"MASTER_PORT": "free"},
        f"rank 1 of 2 did not come within {SECONDS} s: check that all processes were started",
    ),
}


@pytest.mark.parametrize("fault", ALONE)
def test_a_rank_that_cannot_join_says_why(fault):
    variables, said = ALONE[fault]
    if variables.get("MASTER_PORT") == "free":
        variables = variables | {"MASTER_PORT": str(free_port())}
    [found] = ends([variables], "torch")
    assert said in found


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_processes_with_one_rank(backend):
    require_horovod()
    place = meeting()
    found = ends([rank(number, 3, **place) for number in (0, 1, 1)], backend)
    for said in found:
        assert "two processes are rank 1 (process " in said
        assert "give each of the 3 its own rank, from 0 to 2" in said


def test_two_processes_with_rank_0():
    place = meeting()
    found = ends([rank(number, 2, **place) for number in (0, 0)], "torch")
    port = place["MASTER_PORT"]
    assert any(f"port {port} on 127.0.0.1 is in use by another program, or by another rank 0" in said for said in found)
    assert any("rank 1 of 2 did not come within" in said for said in found)


def test_another_jobs_secret():
    place = meeting()
    ranks = [rank(number, 2, DUALTRAIN_SECRET=f"job {number}", **place) for number in (0, 1)]
    found = ends(ranks, "torch")
    assert "rank 1 of 2 did not come" in found[0]
    assert "what listens there is not of this job: DUALTRAIN_SECRET must be the same" in found[1]
    assert "job 1" not in found[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_hosts_with_other_versions(backend, tmp_path):
    require_horovod()
    shutil.copytree(ROOT / "dualtrain", tmp_path / "dualtrain", ignore=shutil.ignore_patterns("__pycache__"))
    version = Path(tmp_path, "dualtrain/version.py")
    version.write_text(version.read_text().replace("__version__ = ", "__version__ = '9.' + "))
    place = meeting()
    with ThreadPoolExecutor(2) as pool:
        places = [(rank(0, 2, **place), backend, ROOT), (rank(1, 2, **place), backend, tmp_path)]
        found = list(pool.map(lambda each: start(*each), places))
    for status, said in found:
        assert status == 2
        assert "rank 0 runs dualtrain 0." in said
        assert "and rank 1 dualtrain 9.0." in said


def listening(pids):
    """The addresses (as in /proc/net/tcp: hexadecimal) that these processes listen at."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(entry))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_on_one_host_listens_on_the_loopback_interface_alone(backend, tmp_path):
    require_horovod()
    arguments = ["--backend", backend, "--nproc", "2", "--epochs", "10000", "--run-dir", str(tmp_path / "run")]
    command = [sys.executable, "-m", "dualtrain.main", *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as job:
        try:
            assert any("epoch 1/" in line for line in job.stdout)  # ends with the line, or with the job
            children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
            assert len(children) >= 2
            # The ranks' libraries listen to each other; the process that has served the store does not any more.
            found = set(listening(children))
            assert found <= {"0100007F"}
            assert found or backend == "horovod"  # whose ports are closed again
            assert listening([job.pid]) == []
        finally:
            job.terminate()
            job.stdout.read()


HVD = """
import torch
import dualtrain.hvd as hvd
hvd.init()
print("sum", hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum).item(), flush=True)
hvd.shutdown()
"""


def test_horovods_api_meets_by_variables_set_by_hand():
    place = meeting()
    ranks = [{**ENV, **rank(number, 2, **place)} for number in (0, 1)]
    jobs = [
        subprocess.Popen([sys.executable, "-c", HVD], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) for env in ranks
    ]
    try:
        assert [job.communicate(timeout=120)[0] for job in jobs] == ["sum 3.0\n"] * 2
    finally:
        for job in jobs:
            job.kill()
