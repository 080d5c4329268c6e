"""Other modes of the launchers of tests/launch/test_smoke.py: ranks train on one backend, then on the other."""

from __future__ import annotations

import subprocess

import pytest

from tests.launch.jobs import ENV, check_results, run, starter, train_on_both
from tests.pool import ROOT, free_port

pytestmark = pytest.mark.xdist_group("smoke")  # so that these launches and test_smoke.py's never overlap


def two_agents(script, folder):
    """Run torchrun twice, as on two hosts with c10d rendezvous; each agent starts one rank."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=matrix"]
    command = ["torchrun", "--nnodes=2", "--nproc_per_node=1", *rendezvous, str(script), str(folder)]
    other = subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = run(command)
        assert other.wait(60) == 0
        return end
    finally:
        other.kill()
        other.wait()


def elastic(script, folder):
    """Run horovodrun in its elastic mode, with a host discovery script. On one host, it needs --network-interfaces."""
    hosts = folder / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(0o755)
    options = ["--min-np", "2", "--max-np", "2", "--host-discovery-script", str(hosts), "--network-interfaces", "lo"]
    return run(["horovodrun", "--gloo", "-np", "2", *options, "python", str(script), str(folder)])


#: For each mode: the function that starts the ranks; the launcher that the ranks detect.
MODES = {
    "torchrun, two agents": (two_agents, "torchrun"),
    "horovodrun --mpi": (starter("horovodrun", "--mpi", "-np", "2", "python"), "mpirun"),
    "elastic horovodrun": (elastic, "horovodrun --gloo"),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_starts_ranks_that_train_on_both_backends(mode, weights, tmp_path):
    start, launcher = MODES[mode]
    train_on_both(start, tmp_path)
    check_results(tmp_path, launcher, weights)
