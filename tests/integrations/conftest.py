"""Fixtures for programs with ranks on Spark or Ray. Each program runs in a new process: Spark and Ray keep global state."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pool import ROOT

SECONDS = 240.0
INSTALL = "DUALTRAIN_WITH=integrations bash launch/setup.sh"


def require(module: str) -> None:
    """Skip the test if ``module`` is missing."""
    # Look for the package before its module: find_spec raises for a module of a missing package.
    if any(importlib.util.find_spec(name) is None for name in (module.partition(".")[0], module)):
        pytest.skip(f"needs {module}: {INSTALL}")


@pytest.fixture(scope="session")
def java() -> None:
    """Skip the test if Spark cannot run."""
    require("pyspark")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("needs a Java runtime for Spark: bash tests/extras.sh java")


@pytest.fixture(scope="session")
def ray() -> None:
    """Skip the test if Ray is missing."""
    require("ray.train")


Program = Callable[[str], list[str]]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Return a function that runs a program, and returns the printed lines that begin with ``> ``, without this prefix.

    The function fails the test if the program fails.
    """

    def run(source: str) -> list[str]:
        file = tmp_path / "program.py"
        file.write_text(textwrap.dedent(source))
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        env["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "180"  # enough on a busy machine
        env |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable, "PYTHONWARNINGS": "ignore"}
        # Ray's sockets need a shorter path than tmp_path.
        with tempfile.TemporaryDirectory(prefix="dt", dir="/tmp", ignore_cleanup_errors=True) as folder:
            env["RAY_FOLDER"] = folder
            done = subprocess.run(
                [sys.executable, file], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS
            )
        assert done.returncode == 0, done.stdout + done.stderr
        return [line[2:] for line in done.stdout.splitlines() if line.startswith("> ")]

    return run
