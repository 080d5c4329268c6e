"""Whole jobs through real launchers, as a user starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import require_horovod
from tests.launch.jobs import ENV, horovodrun, processes, rank_of, run, summary, torchrun
from tests.pool import ROOT

DEFAULT_JOBS = {
    "horovodrun-4": lambda *a: horovodrun(4, *a),
    "torchrun-4": lambda *a: torchrun(4, "--backend", "torch", *a),
}


@pytest.mark.parametrize("job", DEFAULT_JOBS)
def test_the_default_job(job, folder):
    end = run(DEFAULT_JOBS[job]("--run-dir", str(folder)))
    assert end.returncode == 0, end.stderr
    result = summary(folder)
    assert result["val_accuracy"] >= 0.97
    assert result["world_size"] == 4
    # Rank 0 alone speaks: each line of the run is there once.
    assert end.stdout.count("epoch 1/") == 1


LONG_JOBS = {
    "torchrun": lambda *a: torchrun(3, "--backend", "torch", *a),
    "torchrun-horovod": lambda *a: torchrun(3, "--backend", "horovod", *a),
    "horovodrun-gloo": lambda *a: horovodrun(3, *a, controller="--gloo"),
    "horovodrun-mpi": lambda *a: horovodrun(3, *a, controller="--mpi"),
}


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("job", LONG_JOBS)
def test_a_killed_rank_is_named_and_all_others_stop(job, victim, folder, tmp_path):
    command = LONG_JOBS[job]("--epochs", "5000", "--run-dir", str(folder))
    log = tmp_path / "log"
    with log.open("w") as output, subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=output, stderr=output) as process:
        deadline = time.monotonic() + 120
        while "epoch 2/" not in log.read_text() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        pids = [pid for pid in processes(str(folder)) if rank_of(pid) == victim]
        os.kill(max(pids), signal.SIGKILL)  # the youngest: horovodrun keeps a shell with the same environment above it
        status = process.wait(timeout=10)
    assert status != 0
    assert f"stopping, since rank {victim} died" in log.read_text()


RAISING = """
import sys
import dualtrain.training.loop as loop
from dualtrain.main import main

step = loop.Run._step
def failing_step(self):
    if self.backend.rank == 1 and self.cursor.step == 5:
        raise RuntimeError("a bug on one rank")
    return step(self)
loop.Run._step = failing_step
sys.exit(main())
"""


@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun"])
def test_a_rank_that_raises_is_named_with_its_traceback(launcher, folder, tmp_path):
    script = tmp_path / "raising.py"
    script.write_text(RAISING)
    flags = ["--run-dir", str(folder)]
    if launcher == "torchrun":
        command = ["torchrun", "--nproc_per_node=3", str(script), *flags]
    else:
        require_horovod()
        command = ["horovodrun", "--gloo", "-np", "3", "python", str(script), *flags]
    end = run(command)
    assert end.returncode != 0
    said = [line for line in end.stderr.splitlines() if "rank 0 of 3" in line]
    assert "rank 1 stopped: RuntimeError: a bug on one rank" in said[0]
    assert "failing_step" in end.stderr  # the traceback


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--lr", "-1"], "--lr must be"),
        (["--data-dir", "missing"], "--data-dir 'missing'"),
        (["--backend", "local"], "the local backend is rank 0 of 1"),
        (["--lr", "1e9"], "infinite or not a number in step"),
    ],
)
@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun"])
def test_a_refusal_is_said_under_a_launcher_too(launcher, arguments, part, folder):
    flags = [*arguments, "--run-dir", str(folder)]
    end = run(torchrun(2, *flags) if launcher == "torchrun" else horovodrun(2, *flags, controller="--gloo"))
    assert end.returncode != 0
    assert part in end.stderr
    assert str(ROOT / "dualtrain") not in end.stderr  # no frame of ours: the launchers' own tracebacks are theirs


def test_the_demo_ends_with_a_table(tmp_path):
    require_horovod()
    env = {**ENV, "RUNS": str(tmp_path / "demo"), "DUALTRAIN_VENV": sys.prefix}
    end = subprocess.run(
        ["bash", str(ROOT / "launch" / "demo.sh"), "--epochs", "2"], env=env, capture_output=True, text=True, timeout=600
    )
    assert end.returncode == 0, end.stderr
    assert end.stdout.splitlines()[-1].startswith("same weights: yes")
    assert {"horovod", "torch"} == {path.name for path in (tmp_path / "demo").iterdir()}


def setup(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "launch" / "setup.sh")], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("env", "part"),
    [
        ({"PYTHON": "no-such-python"}, "no-such-python"),
        ({"DUALTRAIN_VENV": "/dev/null/venv"}, "DUALTRAIN_VENV"),
    ],
)
def test_setup_refuses_in_one_line(tmp_path, env, part):
    end = setup(tmp_path, **env)
    assert end.returncode == 2
    assert part in end.stderr.strip().splitlines()[-1]


def test_setup_names_the_step_that_failed_its_last_lines_and_the_cure(tmp_path):
    end = setup(tmp_path, DUALTRAIN_VENV=str(tmp_path / "venv"), PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert end.returncode == 1
    assert '"build tools" failed' in end.stderr
    assert "    ERROR: " in end.stderr  # pip's own words
    assert "cure:" in end.stderr
    assert "ERROR: " in (tmp_path / "venv" / "setup.log").read_text()
