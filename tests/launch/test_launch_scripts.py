"""launch/torchrun.sh, horovodrun.sh and mpirun.sh start the same training; tests/commands/ tests their options."""

from __future__ import annotations

import json

from tests.commands.test_launch_scripts import SCRIPTS, start
from tests.conftest import require_horovod
from tests.launch.jobs import NO_COMPILER_PATH


def test_all_scripts_give_the_same_weights(tmp_path):
    require_horovod()
    hashes = {}
    for name in SCRIPTS:
        run = tmp_path / name
        variables = {"NPROC": "1", "HOSTS": "localhost:2", "IFACE": "lo", "PYTHONPATH": NO_COMPILER_PATH}
        end = start(name, "--max-steps", "5", "--run-dir", str(run), **variables)
        assert end.returncode == 0, end.stderr
        summary = json.loads((run / "summary.json").read_text())
        assert summary["world_size"] == 2
        hashes[name] = summary["weights_sha256"]
    assert len(set(hashes.values())) == 1, hashes
