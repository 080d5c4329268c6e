"""Functions that start whole jobs through real launchers, as a user does, and read the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.conftest import require_horovod
from tests.no_compiler import FOLDER, NO_COMPILER
from tests.pool import ROOT

BIN = Path(sys.executable).parent
MODULE = ("python", "-m", "dualtrain.main")
ENV = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
#: Value of PYTHONPATH with which the processes of a job do not import torch's compiler.
NO_COMPILER_PATH = f"{FOLDER}{os.pathsep}{ROOT}"
QUICK = {**ENV, "PYTHONPATH": NO_COMPILER_PATH}


def torchrun(ranks: int, *arguments: str) -> list[str]:
    return ["torchrun", f"--nproc_per_node={ranks}", "-m", "dualtrain.main", *arguments]


def horovodrun(ranks: int, *arguments: str, controller: str | None = None) -> list[str]:
    """Return a command of horovodrun; skip the test if Horovod is missing."""
    require_horovod()
    return ["horovodrun", *([controller] if controller else []), "-np", str(ranks), *MODULE, *arguments]


def run(command: list[str], timeout: float = 240, env: dict[str, str] = ENV) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)


def starter(*launcher: str) -> Callable[[Path, Path], subprocess.CompletedProcess[str]]:
    """Return a function ``start(script, folder)``, which runs the script under ``launcher`` with the folder as argument."""
    return lambda script, folder: run([*launcher, str(script), str(folder)])


def summary(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return found


def processes(mark: str) -> list[int]:
    """Return the ids of the other processes that have ``mark`` on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "cmdline").read_text(errors="replace"):
                found.append(int(entry.name))
        except OSError:
            pass  # the process has ended
    return [pid for pid in found if pid != os.getpid()]


def rank_of(pid: int) -> int | None:
    """Return the rank of a training process; None for a launcher, or if the process has ended."""
    try:
        pairs = (Path("/proc") / str(pid) / "environ").read_text(errors="replace").split("\0")
        if "python" not in (Path("/proc") / str(pid) / "exe").resolve().name:
            return None
    except OSError:
        return None
    env = dict(pair.partition("=")[::2] for pair in pairs)
    for name in ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"):
        if name in env:
            return int(env[name])
    return None


#: Program that trains on both backends in one launch, because most of the time is spent on the launch.
PROGRAM = f"""{NO_COMPILER}
from dualtrain.console import leave
from dualtrain.main import main

for backend in ("torch", "horovod"):
    status = main(["--backend", backend, "--max-steps", "5", "--run-dir", f"{{sys.argv[1]}}/{{backend}}"])
    if status:
        break
leave(status)
"""


def train_on_both(start: Callable[[Path, Path], subprocess.CompletedProcess[str]], folder: Path) -> None:
    """Start ranks with ``start(script, folder)``. They run the script, which trains on torch, then on Horovod."""
    require_horovod()
    script = folder / "train.py"
    script.write_text(PROGRAM)
    end = start(script, folder)
    assert end.returncode == 0, end.stderr


def check_results(folder: Path, launcher: str, weights: dict[int, str]) -> None:
    """Check what the ranks of :func:`train_on_both` have recorded. ``weights`` has the hash for each world size."""
    for backend in ("torch", "horovod"):
        result = summary(folder / backend)
        assert (result["backend"], result["launcher"]) == (backend, launcher)
        assert result["world_size"] == (1 if launcher == "none" else 2)
        assert result["weights_sha256"] == weights[result["world_size"]]
