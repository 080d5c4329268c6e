"""Every launcher with every backend: each launcher starts two ranks, which train on one backend, then on the other.

The default test command runs this file and no other launch.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.conftest import require_horovod
from tests.forked import run_ranks
from tests.launch.jobs import ENV, run, summary
from tests.pool import ROOT, free_port

pytestmark = pytest.mark.xdist_group("smoke")  # so that the reference is computed once

BACKENDS = ["torch", "horovod"]
# Both backends in one launch, because the launch takes most of the time.
PROGRAM = """
import sys
from dualtrain.console import leave
from dualtrain.main import main

for backend in ("torch", "horovod"):
    status = main(["--backend", backend, "--max-steps", "5", "--run-dir", f"{sys.argv[1]}/{backend}"])
    if status:
        break
leave(status)
"""


def two_agents(*program):
    """Run torchrun twice, as on two hosts with c10d rendezvous; each agent starts one rank."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=matrix"]
    command = ["torchrun", "--nnodes=2", "--nproc_per_node=1", *rendezvous, *program]
    other = subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = run(command)
        assert other.wait(60) == 0
        return end
    finally:
        other.kill()
        other.wait()


def elastic(script, folder):
    """Run horovodrun in its elastic mode, with a host discovery script. On one host, this needs --network-interfaces."""
    hosts = folder / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(0o755)
    options = ["--min-np", "2", "--max-np", "2", "--host-discovery-script", str(hosts), "--network-interfaces", "lo"]
    return run(["horovodrun", "--gloo", "-np", "2", *options, "python", str(script), str(folder)])


def mpirun(script, folder):
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return run(["mpirun", *options, "-np", "2", "python", str(script), str(folder)])


def srun(script, folder):
    if not (shutil.which("srun") and shutil.which("munged")):
        pytest.skip("needs Slurm: apt install slurm-wlm munge")
    end = run(["bash", "tests/launch/slurm.sh", "srun", "--ntasks=2", "--nodes=1", "python", str(script), str(folder)])
    if "slurm.sh: error" in end.stderr:
        pytest.skip(f"needs {end.stderr.strip().splitlines()[-1]}")
    return end


def by(*launcher):
    return lambda script, folder: run([*launcher, str(script), str(folder)])


LAUNCHERS = {
    "none": by("python"),
    "torchrun": by("torchrun", "--standalone", "--nproc_per_node=2"),
    "torchrun, two agents": lambda script, folder: two_agents(str(script), str(folder)),
    "horovodrun --gloo": by("horovodrun", "--gloo", "-np", "2", "python"),
    "horovodrun --mpi": by("horovodrun", "--mpi", "-np", "2", "python"),
    "elastic horovodrun": elastic,
    "mpirun": mpirun,
    "srun": srun,
}
SHOWN = {"torchrun, two agents": "torchrun", "horovodrun --mpi": "mpirun", "elastic horovodrun": "horovodrun --gloo"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Return the hash of the weights for each world size, from forked ranks without a launcher."""
    folder, found = tmp_path_factory.mktemp("reference"), {}
    for size in (1, 2):
        command = ("-m", "dualtrain.main", "--backend", "torch", "--max-steps", "5", "--run-dir", folder / str(size))
        for end in run_ranks(size, command, folder, env=ENV):
            assert end.returncode == 0, end
        found[size] = summary(folder / str(size))["weights_sha256"]
    return found


def check(folder, launcher, backend, weights):
    result = summary(folder)
    assert (result["backend"], result["launcher"]) == (backend, SHOWN.get(launcher, launcher))
    assert result["world_size"] == (1 if launcher == "none" else 2)
    assert result["weights_sha256"] == weights[result["world_size"]]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_ranks_that_train_on_both_backends(launcher, weights, tmp_path):
    require_horovod()
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    end = LAUNCHERS[launcher](script, tmp_path)
    assert end.returncode == 0, end.stderr
    for backend in BACKENDS:
        check(tmp_path / backend, launcher, backend, weights)
