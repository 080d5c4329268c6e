"""Facts about one process and its host, collected without communication."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from dualtrain.backends import horovod as horovod_backend
from dualtrain.backends import torch as torch_backend
from dualtrain.cores import cpu_quota, processor_name
from dualtrain.doctor.gpu import gpu_facts
from dualtrain.doctor.network import interfaces
from dualtrain.errors import UserError
from dualtrain.launchers import World, ignored
from dualtrain.rendezvous.hosts import OVERRIDES
from dualtrain.version import __version__

# Run this in a child process: a broken MPI may end the process that loads it, and the settings of mpi4py would also apply
# to the backends. Getting the version does not initialize MPI.
_MPI_VERSION = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""


def local_facts(world: World) -> dict[str, Any]:
    """Collect the facts of this process as values that JSON can represent. Not collective.

    Blocks for about a second, or for up to 20 s if loading the MPI library hangs.
    """
    built, unusable = _horovod()
    return {
        "rank": world.rank,
        "size": world.size,
        "local_rank": world.local_rank,
        "launcher": world.launcher,
        "evidence": dict(world.evidence),
        "ignored": ignored(world, os.environ),
        "host": socket.gethostname(),
        "cores": sorted(os.sched_getaffinity(0)),
        "host_cores": os.cpu_count() or 1,
        "bf16": has_bf16(),
        "quota": cpu_quota(),
        "cuda": torch.cuda.is_available(),
        "gpu": gpu_facts(),
        "devices": _devices(),
        "gpu_uuids": [str(gpu.uuid) for gpu in _gpus()],
        "interfaces": interfaces(),
        "overrides": {name: os.environ[name] for name in OVERRIDES if os.environ.get(name)},
        "versions": _versions(),
        "torch": torch_backend.build_facts(),
        "horovod": built,
        "horovod_error": unusable,
    }


def _horovod() -> tuple[dict[str, Any] | None, str | None]:
    """Return Horovod's build facts, or the reason why there are none."""
    try:
        return horovod_backend.build_facts(), None
    except Exception as error:  # a broken build may raise anything, and the doctor reports it
        return None, " ".join((str(error) if isinstance(error, UserError) else f"it cannot be loaded: {error}").split())


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "dualtrain": __version__,
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    for name in ("torchvision", "horovod", "mpi4py"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {**found, "MPI": _mpi() if found["mpi4py"] else None}


def _mpi() -> str:
    """Return the version of the MPI library, or a text if mpi4py cannot load it within 20 s. A child process loads it."""
    try:
        command = [sys.executable, "-c", _MPI_VERSION]
        output = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except subprocess.TimeoutExpired:
        output = ""
    return output.splitlines()[0].partition(", package")[0].strip("\0 ") if output else "cannot be loaded by mpi4py"


def _devices() -> list[str]:
    """Return the name and memory of each GPU that this process sees; without a GPU, the processor and the host's memory."""
    if gpus := _gpus():
        return [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus]
    return [f"{processor_name()}, {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"]


def _gpus() -> list[Any]:
    """Return the properties of each GPU that this process sees."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]


def has_bf16() -> bool | None:
    """Return whether the processor has bf16 instructions, which ``--amp bf16`` needs to be fast; ``None`` if unknown."""
    flags = re.search(r"^(?:flags|Features)\s*: (.*)", _cpuinfo(), re.MULTILINE)
    return None if flags is None else bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags[1].split()))


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
