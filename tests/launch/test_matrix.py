"""Every launcher with every backend: the default job reaches its accuracy, and two ranks end with the same weights."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.conftest import require_horovod
from tests.launch.test_launch import ENV, MODULE, ROOT, alone, horovodrun, run, summary, torchrun
from tests.pool import free_port

pytestmark = pytest.mark.launch
BACKENDS = ["torch", "horovod"]


def two_agents(backend, folder):
    """torchrun as on two hosts, which meet by c10d; each agent starts one rank."""
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=matrix"]
    command = ["torchrun", "--nnodes=2", "--nproc_per_node=1", *meeting, "-m", "dualtrain.main"]
    command += ["--backend", backend, "--run-dir", str(folder)]
    other = subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = run(command)
        assert other.wait(60) == 0
        return end
    finally:
        other.kill()
        other.wait()


def elastic(backend, folder):
    """horovodrun in its elastic mode, which asks a script for its hosts; alone on one, it must be told an interface."""
    hosts = folder.parent / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(0o755)
    options = ["--min-np", "2", "--max-np", "2", "--host-discovery-script", str(hosts), "--network-interfaces", "lo"]
    return run(["horovodrun", "--gloo", "-np", "2", *options, *MODULE, "--backend", backend, "--run-dir", str(folder)])


def mpirun(backend, folder):
    env = ENV | {"NPROC": "2"}
    command = ["bash", "launch/mpirun.sh", "--backend", backend, "--run-dir", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)


def srun(backend, folder):
    if not (shutil.which("srun") and shutil.which("munged")):
        pytest.skip("needs Slurm: apt install slurm-wlm munge")
    step = ["srun", "--ntasks=2", "--nodes=1", *MODULE, "--backend", backend, "--run-dir", str(folder)]
    end = run(["bash", "tests/launch/slurm.sh", *step])
    if "slurm.sh: error" in end.stderr:
        pytest.skip(end.stderr.strip().splitlines()[-1])
    return end


def by(start, *given, **more):
    return lambda backend, folder: run(start(*given, "--backend", backend, "--run-dir", str(folder), **more))


LAUNCHERS = {
    "torchrun": by(torchrun, 2),
    "torchrun, two agents": two_agents,
    "horovodrun --gloo": by(horovodrun, 2, controller="--gloo"),
    "horovodrun --mpi": by(horovodrun, 2, controller="--mpi"),
    "elastic horovodrun": elastic,
    "mpirun": mpirun,
    "srun": srun,
    "--nproc": by(alone, "--nproc", "2"),
}
SHOWN = {"torchrun, two agents": "torchrun", "horovodrun --mpi": "mpirun", "--nproc": "spawn"}
SHOWN["elastic horovodrun"] = "horovodrun --gloo"


@pytest.fixture(scope="module")
def weights():
    """The hashes found so far, by world size: the first of each is what the others are compared with."""
    return {}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("launcher", [*LAUNCHERS, "none"])
def test_every_launcher_with_every_backend(launcher, backend, weights, tmp_path):
    if backend == "horovod" or "horovodrun" in launcher:
        require_horovod()
    folder = tmp_path / "run"
    end = (LAUNCHERS | {"none": by(alone)})[launcher](backend, folder)
    assert end.returncode == 0, end.stderr
    result = summary(folder)
    assert result["val_accuracy"] >= 0.97
    assert (result["backend"], result["launcher"]) == (backend, SHOWN.get(launcher, launcher))
    assert result["world_size"] == (1 if launcher == "none" else 2)
    assert result["weights_sha256"] == weights.setdefault(result["world_size"], result["weights_sha256"])
