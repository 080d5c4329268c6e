"""Start two ranks with each launcher, and one rank with plain python. Each job trains on torch, then on Horovod.

Without arguments, ``bash launch/test.sh`` runs only this file of tests/launch/. tests/launch/test_modes.py tests other
modes of these launchers.
"""

from __future__ import annotations

import shutil

import pytest

from tests.launch.jobs import check_results, run, starter, train_on_both

pytestmark = pytest.mark.xdist_group("smoke")  # test_modes.py is in this group too, so its launches never overlap these


def srun(script, folder):
    if not (shutil.which("srun") and shutil.which("munged")):
        pytest.skip("needs Slurm: apt install slurm-wlm munge")
    end = run(["bash", "tests/launch/slurm.sh", "srun", "--ntasks=2", "--nodes=1", "python", str(script), str(folder)])
    if end.returncode == 2 and "slurm.sh: error" in end.stderr:  # status 1 is a failure: an installed Slurm did not start
        pytest.skip(f"needs Slurm: {end.stderr.strip().splitlines()[-1].removeprefix('slurm.sh: error: ')}")
    return end


LAUNCHERS = {
    "none": starter("python"),
    "torchrun": starter("torchrun", "--standalone", "--nproc_per_node=2"),
    "horovodrun --gloo": starter("horovodrun", "--gloo", "-np", "2", "python"),
    "mpirun": starter("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2", "python"),
    "srun": srun,
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_ranks_that_train_on_both_backends(launcher, weights, tmp_path):
    train_on_both(LAUNCHERS[launcher], tmp_path)
    check_results(tmp_path, launcher, weights)
