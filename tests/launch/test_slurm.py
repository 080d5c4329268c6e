"""Jobs under a private Slurm of two nodes (tests/launch/slurm.sh), and launch/slurm.sbatch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import require_horovod
from tests.launch.jobs import NO_COMPILER_PATH
from tests.pool import ROOT

pytestmark = pytest.mark.xdist_group("machine")  # one private Slurm at a time

BIN = Path(sys.executable).parent
ENV = {
    **os.environ,
    "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": NO_COMPILER_PATH,
    "OMP_NUM_THREADS": "1",
    "DUALTRAIN_VENV": str(BIN.parent),
}
SBATCH = str(ROOT / "launch" / "slurm.sbatch")
FLAGS = ["--epochs", "6"]
SECONDS = 240.0  # for a job on a busy machine


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**ENV, **variables}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS)


def weights(folder: Path) -> str:
    found = json.loads((folder / "summary.json").read_text())
    assert found["world_size"] == 2
    return str(found["weights_sha256"])


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the SLURM_CONF of a private Slurm, which ends when the pipe to slurm.sh closes, even if tests are killed."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    for program in ("slurmctld", "munged"):
        if shutil.which(program, path=path) is None:
            pytest.skip(f"needs {program}, of Debian's packages slurm-wlm and munge: bash tests/extras.sh")
    if os.geteuid() != 0:
        pytest.skip("needs root, for Slurm's daemons")
    log = tmp_path_factory.mktemp("slurm") / "log"
    command = ["bash", str(ROOT / "tests" / "launch" / "slurm.sh"), "sh", "-c", 'echo "$SLURM_CONF"; read -r _']
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdin
        assert process.stdout
        conf = process.stdout.readline().strip()  # this wait is bounded, because the script's own waits have timeouts
        if not conf and process.wait(SECONDS) == 2:
            pytest.skip(f"needs a private Slurm: {log.read_text().strip()}")
        assert conf, log.read_text()
        yield conf
        process.stdin.close()
        process.wait(SECONDS)
    assert not Path(conf).parent.exists()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the hash of the weights after a run with ``FLAGS`` on two ranks under torchrun."""
    folder = tmp_path_factory.mktemp("torchrun") / "run"
    end = run("torchrun", "--nproc_per_node=2", "-m", "dualtrain.main", *FLAGS, "--run-dir", str(folder))
    assert end.returncode == 0, end.stderr
    return weights(folder)


@pytest.mark.parametrize("backend", ["torch", "horovod"])
def test_srun_gives_the_same_weights_as_torchrun(backend, slurm, expected, tmp_path):
    if backend == "horovod":
        require_horovod()
    flags = [*FLAGS, "--backend", backend, "--run-dir", str(tmp_path / "run")]
    secret = os.urandom(32).hex()
    command = ["srun", "--ntasks=2", "--time=10", "python", "-m", "dualtrain.main"]
    end = run(*command, *flags, SLURM_CONF=slurm, DUALTRAIN_SECRET=secret)
    assert end.returncode == 0, end.stderr
    assert end.stdout.count("epoch 1/") == 1
    assert weights(tmp_path / "run") == expected
    assert secret not in end.stdout + end.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def until(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)


def submit(slurm: str, *arguments: str) -> tuple[str, Callable[..., bool]]:
    """Submit a job; return its number, and a function that returns whether ``scontrol show job`` prints all given words."""
    job = run("sbatch", "--parsable", *arguments, SLURM_CONF=slurm)
    assert job.returncode == 0, job.stderr
    number = job.stdout.strip()

    def job_is(*words: str) -> bool:
        shown = run("scontrol", "show", "job", number, SLURM_CONF=slurm).stdout.split()
        return all(word in shown for word in words)

    return number, job_is


def test_a_job_of_two_nodes_is_requeued_before_its_time_limit_and_ends_with_the_same_weights(slurm, expected, tmp_path):
    output, folder = tmp_path / "output", tmp_path / "run"
    output.touch()
    flags = [*FLAGS, "--run-dir", str(folder)]
    number, job_is = submit(slurm, f"--output={output}", "--nodes=2", "--ntasks-per-node=1", SBATCH, *flags)
    until(lambda: "epoch 1/" in output.read_text(), output)
    run("scancel", "--batch", "--signal=USR1", number, SLURM_CONF=slurm)  # as Slurm does before the time limit
    until(lambda: job_is("Restarts=1", "JobState=PENDING"), output)
    # Slurm delays a requeued job by two minutes. In the first second after the job's end, the nodes refuse to start it.
    time.sleep(2.0)
    run("scontrol", "update", f"job={number}", "StartTime=now", SLURM_CONF=slurm)
    until(lambda: job_is("Restarts=1", "JobState=COMPLETED"), output)
    said = output.read_text()
    assert "SIGTERM ended the run after step" in said
    assert f"saved; job {number} is requeued" in said
    assert said.count("epoch 6/6") == 1
    assert said.count("epoch 1/6") == 1  # the second start resumed
    assert weights(folder) == expected


def test_the_job_has_the_exit_status_of_a_refusal(slurm, tmp_path):
    output = tmp_path / "output"
    output.touch()
    _, job_is = submit(slurm, f"--output={output}", SBATCH, "--lr", "-1")
    until(lambda: job_is("JobState=FAILED", "ExitCode=2:0"), output)  # sooner than sbatch --wait, which waits ten seconds
    # srun does not end a rank if the other rank fails: both report the same error.
    said = [line for line in output.read_text().splitlines() if "--lr must be" in line]
    assert [line.partition(")")[0] for line in said] == [f"dualtrain: error (rank {rank} of 2" for rank in (0, 1)]


def script(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the batch script without Slurm, with an srun that prints the length of the secret, and its arguments."""
    stub = tmp_path / "srun"
    stub.write_text('#!/bin/sh\necho "secret of ${#DUALTRAIN_SECRET}: $*"\n')
    stub.chmod(0o755)
    return run("bash", SBATCH, *arguments, **{"PATH": f"{tmp_path}:{ENV['PATH']}", **variables})


def test_the_script_forwards_flags_and_a_new_secret(tmp_path):
    end = script(tmp_path, "--lr", "0.1", SLURM_JOB_ID="7")
    assert end.stdout == (
        "secret of 64: --kill-on-bad-exit=0 python -m dualtrain.main --lr 0.1 --run-dir runs/slurm-7 --resume auto\n"
    ), end.stderr
    assert "secret of 3:" in script(tmp_path, SLURM_JOB_ID="7", DUALTRAIN_SECRET="abc").stdout
    end = script(tmp_path, SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="2", NPROC="3")
    assert "--ntasks-per-node=3 --ntasks=6" in end.stdout


@pytest.mark.parametrize("flag", ["--run-dir {}", "--run-dir={}"])
def test_a_requeued_job_has_the_same_flags(flag, tmp_path):
    flags = flag.format(tmp_path).split()
    first = script(tmp_path, *flags, SLURM_JOB_ID="7").stdout
    assert first.endswith(f"{flags[-1]} --resume auto\n")
    assert script(tmp_path, *flags, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1").stdout == first


@pytest.mark.parametrize("flag", ["--resume", "--resume earlier", "--resume=earlier"])
def test_a_requeued_job_with_resume_resumes_from_its_own_checkpoints_if_it_has_any(flag, tmp_path):
    flags = ["--run-dir", str(tmp_path), *flag.split()]
    variables = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    assert script(tmp_path, *flags, **variables).stdout.endswith(f"{flag}\n")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000001.safetensors").touch()
    assert script(tmp_path, *flags, SLURM_JOB_ID="7").stdout.endswith(f"{flag}\n")
    assert script(tmp_path, *flags, **variables).stdout.endswith(f"{flag} --resume auto\n")


@pytest.mark.parametrize(
    ("array", "job"), [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "7_2")], ids=["job", "array"]
)
def test_a_job_is_requeued_without_the_other_tasks_of_its_array(array, job, tmp_path):
    # The last task of an array has the array's own id, which scancel and scontrol apply to all tasks.
    calls = tmp_path / "calls"
    stubs = dict.fromkeys(("scancel", "scontrol"), f'echo "$*" >>{calls}')
    stubs["srun"] = f"kill -USR1 $PPID; until [ -s {calls} ]; do sleep 0.1; done; exit 143"
    for name, line in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    end = run("bash", SBATCH, **array, SLURM_JOB_ID="7", PATH=f"{tmp_path}:{ENV['PATH']}")
    assert end.returncode == 143, end.stderr
    assert calls.read_text().splitlines() == [f"--signal=TERM {job}", f"requeue {job}"]
    assert end.stdout == f"slurm.sbatch: saved; job {job} is requeued\n"


def test_the_scripts_help_is_its_head_comment():
    end = run("bash", SBATCH, "--help")
    assert end.returncode == 0, end.stderr
    assert "NPROC" in end.stdout
    assert "IFACE" in end.stdout
    assert "#SBATCH" not in end.stdout
    assert "SBATCH --" not in end.stdout


def test_the_script_must_be_started_by_slurm():
    end = run("bash", SBATCH)
    assert end.returncode == 2
    assert "SLURM_JOB_ID is not set" in end.stderr
    assert len(end.stderr.splitlines()) == 1


def test_an_incomplete_set_of_slurms_variables_is_refused_in_one_line():
    end = run("python", "-m", "dualtrain.main", SLURM_PROCID="0", SLURM_STEP_ID="0")
    assert end.returncode == 2
    assert "SLURM_NTASKS is not set" in end.stderr
    assert len(end.stderr.splitlines()) == 1


@pytest.mark.parametrize(("command", "part"), [([], "no command"), (["true"], "apt install slurm-wlm munge")])
def test_slurm_sh_says_what_is_missing(command, part):
    end = run("/bin/bash", str(ROOT / "tests" / "launch" / "slurm.sh"), *command, PATH="/nowhere")
    assert end.returncode == 2
    assert part in end.stderr
    assert len(end.stderr.splitlines()) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_slurm_sh_has_status_1_and_leaves_nothing_behind_if_slurm_does_not_start(tmp_path):
    # Stubs of the programs: munge always fails, and sleep returns at once, so that the 300 attempts take a second.
    stubs = dict.fromkeys(("munged", "slurmctld", "slurmd", "srun", "setpriv", "chown", "sleep", "squeue"), "true")
    for name, line in (stubs | {"munge": "false", "scancel": f'echo "$SLURM_CONF" >{tmp_path}/cancelled'}).items():
        stub = tmp_path / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(f"#!/bin/sh\n{line}\n")
        stub.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    variables = {"PATH": f"{tmp_path}/bin:{ENV['PATH']}", "TMPDIR": str(tmp_path / "tmp")}
    end = run("bash", str(ROOT / "tests" / "launch" / "slurm.sh"), "true", **variables)
    if "cannot make a mount namespace" in end.stderr:
        pytest.skip("needs a mount namespace, which root cannot make here")
    assert end.returncode == 1, end.stderr
    assert "slurm.sh: error: munged was not ready within 30 s" in end.stderr
    assert list((tmp_path / "tmp").iterdir()) == []
    # scancel ends the jobs of this Slurm only, not those of the machine's own cluster.
    assert (tmp_path / "cancelled").read_text().startswith(f"{tmp_path}/tmp/")
