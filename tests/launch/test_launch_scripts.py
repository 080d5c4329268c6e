"""launch/torchrun.sh, horovodrun.sh and mpirun.sh: the same variables, the same flags, the same model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import require_horovod
from tests.pool import ROOT

SCRIPTS = ["torchrun", "horovodrun", "mpirun"]
FLAGS = ["--max-steps", "5", "--run-dir"]


def start(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # The environment of this very interpreter, wherever the scripts would look for one.
    env = {**os.environ, "DUALTRAIN_VENV": str(Path(sys.executable).parent.parent), **variables}
    command = ["bash", str(ROOT / "launch" / f"{name}.sh"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_the_head_comment(name):
    end = start(name, "--help")
    assert end.returncode == 0, end.stderr
    variables = [line.split()[0] for line in end.stdout.splitlines() if line[:1].isupper() and line.split()[0].isupper()]
    assert [variable for variable in variables if variable != "PORT"] == ["NPROC", "HOSTS", "IFACE"]
    assert "set -e" not in end.stdout


def test_several_hosts_of_torchrun_need_a_port():
    end = start("torchrun", HOSTS="one,two:3", PORT="")
    assert end.returncode == 2
    assert "PORT is not set, and 2 hosts must meet at one: set it to a free port of one" in end.stderr


@pytest.mark.launch
def test_all_give_the_same_weights(tmp_path):
    require_horovod()
    hashes = {}
    for name in SCRIPTS:
        end = start(name, *FLAGS, str(tmp_path / name), HOSTS="", NPROC="2")
        assert end.returncode == 0, end.stderr
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["world_size"] == 2
        hashes[name] = summary["weights_sha256"]
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.launch
@pytest.mark.parametrize("name", SCRIPTS)
def test_slots_and_an_interface_may_be_named(name, tmp_path):
    require_horovod()
    end = start(name, *FLAGS, str(tmp_path / "run"), HOSTS="localhost:3", IFACE="lo")
    assert end.returncode == 0, end.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 3
