"""Whole jobs through real launchers, as a user starts them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import require_horovod
from tests.launch.jobs import ENV, NO_COMPILER_PATH, QUICK, horovodrun, processes, rank_of, summary, torchrun
from tests.pool import ROOT

#: Launchers, each with the rank to kill and the command. tests/commands/test_spawn.py tests every pair of a killed rank and
#: a backend, without a launcher.
LONG_JOBS = {
    "torchrun": (0, lambda *a: torchrun(3, "--backend", "torch", *a)),
    "torchrun-horovod": (2, lambda *a: torchrun(3, "--backend", "horovod", *a)),
    "horovodrun-gloo": (0, lambda *a: horovodrun(3, *a, controller="--gloo")),
    "horovodrun-mpi": (2, lambda *a: horovodrun(3, *a, controller="--mpi")),
}


@pytest.mark.parametrize("job", LONG_JOBS)
def test_a_killed_rank_is_named_and_its_job_ends(job, folder, tmp_path):
    require_horovod()
    victim, launch = LONG_JOBS[job]
    command = launch("--epochs", "5000", "--run-dir", str(folder))
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=QUICK, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 120
        while "epoch 2/" not in log.read_text() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        # rank_of() is None for launchers and their shells.
        pids = [pid for pid in processes(str(folder)) if rank_of(pid) == victim]
        assert pids, log.read_text()
        (pid,) = pids
        os.kill(pid, signal.SIGKILL)
        status = process.wait(timeout=60)
    finally:
        for pid in [process.pid, *processes(str(folder))]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(timeout=60)
    assert status != 0
    assert f"stopping, since rank {victim} died" in log.read_text()


def script(folder: Path, name: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of a launch script with a stub of setup.sh, because setup.sh would change the virtual environment."""
    (folder / "launch").mkdir()
    shutil.copy(ROOT / "launch" / name, folder / "launch")
    (folder / "launch" / "setup.sh").write_text('echo "with $DUALTRAIN_WITH"\n')
    env = {**ENV, "PYTHONPATH": str(ROOT), "RUNS": str(folder / "runs"), "DUALTRAIN_VENV": sys.prefix, **variables}
    command = ["bash", str(folder / "launch" / name), *flags]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


def test_the_demo_ends_with_the_line_same_weights_yes(tmp_path):
    require_horovod()
    end = script(tmp_path, "demo.sh", "--epochs", "1")
    assert end.returncode == 0, end.stderr
    assert end.stdout.splitlines()[0] == "with tree"  # demo.sh sets DUALTRAIN_WITH=tree by default
    assert end.stdout.splitlines()[-1].startswith("same weights: yes")
    assert {"horovod", "torch"} == {path.name for path in (tmp_path / "runs").iterdir()}


def test_the_default_job_has_the_same_result_on_four_ranks_and_one_rank(tmp_path):
    require_horovod()
    ways = {"RANKS": "4", "WAYS": "torchrun-native horovodrun-gloo"}
    end = script(tmp_path, "one_result.sh", "--epochs", "12", **ways, PYTHONPATH=NO_COMPILER_PATH)
    assert end.returncode == 0, end.stdout + end.stderr
    assert end.stdout.splitlines()[-1] == "3 runs, 1 hash"
    for name, launcher in (("torchrun-native-4", "torchrun"), ("horovodrun-gloo-4", "horovodrun --gloo")):
        result = summary(tmp_path / "runs" / name)
        assert (result["world_size"], result["launcher"]) == (4, launcher)
        assert result["val_accuracy"] >= 0.97
        assert (tmp_path / "runs" / f"{name}.log").read_text().count("epoch 1/") == 1  # only rank 0 prints
