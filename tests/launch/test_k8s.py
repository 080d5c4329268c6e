"""launch/k8s: the pods' commands run in the environment that the operators set."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from tests.commands.test_k8s import pod_command, replicas
from tests.conftest import require_horovod
from tests.launch.jobs import BIN, NO_COMPILER_PATH
from tests.pool import ROOT, free_port


def start(container: dict[str, Any], run: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a container's command for two epochs, with the variables of the container and of the operator."""
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": NO_COMPILER_PATH}
    env |= {each["name"]: each["value"] for each in container["env"] if "value" in each}
    env |= {"RUN": str(run), "HOME": str(run.parent), "DUALTRAIN_SECRET": "0" * 64, **variables}
    # Kubernetes replaces $(NAME) in commands by the variable's value.
    command = [re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], word) for word in pod_command(container)]
    return subprocess.Popen([*command, "--epochs", "2"], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)


def test_the_pods_of_a_pytorchjob_train_together(tmp_path):
    variables = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
    }
    container = replicas("PyTorchJob")["Master"]["template"]["spec"]["containers"][0]
    started = [start(container, tmp_path / "run", PET_NODE_RANK=str(rank), **variables) for rank in range(2)]
    for process in started:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 2


def test_the_launcher_of_an_mpijob_trains_and_a_second_start_resumes(tmp_path):
    require_horovod()
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    variables = {"OMPI_MCA_orte_default_hostfile": str(tmp_path / "hosts"), "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    container = replicas("MPIJob")["Launcher"]["template"]["spec"]["containers"][0]
    for _ in range(2):
        process = start(container, tmp_path / "run", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", **variables)
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["backend"], summary["world_size"]) == ("horovod", 2)
