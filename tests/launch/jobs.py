"""Start of whole jobs through real launchers, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import require_horovod
from tests.pool import ROOT

BIN = Path(sys.executable).parent
MODULE = ("python", "-m", "dualtrain.main")
ENV = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def torchrun(ranks: int, *arguments: str) -> list[str]:
    return ["torchrun", f"--nproc_per_node={ranks}", "-m", "dualtrain.main", *arguments]


def horovodrun(ranks: int, *arguments: str, controller: str | None = None) -> list[str]:
    require_horovod()
    return ["horovodrun", *([controller] if controller else []), "-np", str(ranks), *MODULE, *arguments]


def alone(*arguments: str) -> list[str]:
    return [*MODULE, *arguments]


def run(command: list[str], timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=timeout)


def summary(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return found


def processes(mark: str) -> list[int]:
    """Return the processes with ``mark`` on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            pass  # the process has ended
    return [pid for pid in found if pid != os.getpid()]


def rank_of(pid: int) -> int | None:
    """Return the rank of a training process, None for a launcher."""
    try:
        pairs = (Path("/proc") / str(pid) / "environ").read_text().split("\0")
        if "python" not in (Path("/proc") / str(pid) / "exe").resolve().name:
            return None
    except OSError:
        return None
    env = dict(pair.partition("=")[::2] for pair in pairs)
    for name in ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"):
        if name in env:
            return int(env[name])
    return None
