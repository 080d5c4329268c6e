"""Horovod's own Adasum, which needs MPI: its results equal the reference of tests/hvd/. Its optimizer ignores clipping."""

from __future__ import annotations

import json
import subprocess

import numpy as np

from tests.conftest import require_horovod
from tests.hvd.test_hvd_semantics_adasum import KINDS, reference, vectors
from tests.launch.jobs import ENV, ROOT

OVER_MPI = """
import json, sys
import torch
import horovod.torch as hvd
from tests.hvd.test_hvd_semantics_adasum import KINDS, clipped_step, vectors
hvd.init()
found = {"clipped step": clipped_step(hvd)}
for kind in KINDS:
    x = torch.tensor(vectors(hvd.size(), kind)[hvd.rank()])
    found[kind] = hvd.allreduce(x, name=kind, op=hvd.Adasum).tolist()
    found[kind + " 32"] = hvd.allreduce(x.float(), name=kind + "32", op=hvd.Adasum).tolist()
if hvd.rank() == 0:
    print("FOUND" + json.dumps(found), flush=True)
hvd.shutdown()
"""


def test_horovods_adasum_over_mpi_equals_the_reference_and_ignores_clipping(tmp_path):
    require_horovod()
    size = 4  # with four ranks, Adasum also combines the results of two pairs of ranks
    script = tmp_path / "adasum.py"
    script.write_text(OVER_MPI)
    env = {**ENV, "PYTHONPATH": str(ROOT), "HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
    env["OMPI_MCA_mpi_yield_when_idle"] = "1"  # ranks that wait leave the cores to the others
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(size), "python", str(script)]
    end = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert end.returncode == 0, end.stderr
    found = json.loads(end.stdout.partition("FOUND")[2].splitlines()[0])
    assert found.pop("clipped step") == [-3.0, -4.0]
    for kind in KINDS:
        wanted = reference(vectors(size, kind))
        np.testing.assert_allclose(found[kind], wanted, atol=1e-12, err_msg=kind)
        np.testing.assert_allclose(found[kind + " 32"], wanted, atol=1e-6, err_msg=kind)
