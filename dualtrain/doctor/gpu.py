"""Versions of CUDA, NCCL and the NVIDIA driver, and whether they are compatible."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

# The oldest driver for each major version of CUDA; it also supports the later minor versions.
_DRIVERS = {11: "450", 12: "525", 13: "580"}
_BUILD = "DUALTRAIN_GPU=nccl bash launch/setup.sh"


def gpu_facts(version_file: Path = Path("/proc/driver/nvidia/version"), library: str = "libcuda.so.1") -> dict[str, Any]:
    """Return four versions: torch's CUDA, torch's NCCL, the driver, and the newest CUDA that the driver supports.

    A version is text, or ``None`` if the component is missing or does not load. No GPU is initialized.
    """
    return {
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        "driver": _driver(version_file),
        "driver_cuda": _driver_cuda(library),
    }


def _nccl() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return None  # a build of torch without NCCL


def _driver(version_file: Path) -> str | None:
    try:
        found = re.search(r"NVRM version:.*?\s(\d{3,}\.[\d.]+)", version_file.read_text())
    except OSError:
        return None
    return found[1] if found else "of unknown version"


def _driver_cuda(library: str) -> str | None:
    version = ctypes.c_int()
    try:
        if ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def too_old(gpu: Mapping[str, Any]) -> bool:
    """Return whether the driver, by these ``gpu_facts``, supports only CUDA of a lower major version than torch's.

    False if one of the two versions is unknown.
    """
    return bool(gpu["cuda"] and gpu["driver_cuda"] and _major(gpu["driver_cuda"]) < _major(gpu["cuda"]))


def gpu_line(gpu: Mapping[str, Any]) -> str:
    """Return one rank's ``gpu_facts`` as text for the report."""
    in_torch = f"{gpu['cuda']} in torch" if gpu["cuda"] else "none in torch (a CPU build)"
    parts = [in_torch + (f", NCCL {gpu['nccl']}" if gpu["nccl"] else "")]
    if gpu["driver"] is None and gpu["driver_cuda"] is None:
        return f"{parts[0]}; no NVIDIA driver: runs use the CPU"
    parts.append(
        f"NVIDIA driver {gpu['driver'] or 'of unknown version'} for CUDA {gpu['driver_cuda'] or 'of unknown version'}"
    )
    if gpu["cuda"] and gpu["driver_cuda"]:
        parts.append("too old" if too_old(gpu) else "new enough")
    return "; ".join(parts)


def gpu_advice(row: Mapping[str, Any]) -> str | None:
    """Return why a rank on a host with an NVIDIA driver cannot use GPUs, or NCCL in Horovod, with the cure; or ``None``."""
    gpu, host, build = row["gpu"], row["host"], row["versions"]["torch"]
    if gpu["driver"] is None and gpu["driver_cuda"] is None:
        return None
    if gpu["cuda"] is None:
        return f"{host} has an NVIDIA driver, but torch {build} is a CPU build: {_BUILD} installs one for CUDA"
    if gpu["driver_cuda"] is None:
        return (
            f"{host} has NVIDIA driver {gpu['driver']}, but libcuda.so.1 cannot be loaded, and ranks use the CPU: start "
            "the container with GPUs (docker run --gpus all), or install the driver's libraries"
        )
    if too_old(gpu):
        oldest = _DRIVERS.get(_major(gpu["cuda"]), f"for CUDA {gpu['cuda']}")
        return (
            f"the NVIDIA driver of {host} ({gpu['driver'] or 'of unknown version'}, for CUDA {gpu['driver_cuda']}) is too "
            f"old for torch {build}, and ranks use the CPU: install driver {oldest} or newer, or a torch for CUDA "
            f"{_major(gpu['driver_cuda'])} (DUALTRAIN_TORCH=VERSION bash launch/setup.sh)"
        )
    if not row["cuda"]:
        return (
            f"{host} has an NVIDIA driver that is new enough, but torch finds no GPU, and ranks use the CPU: "
            "see `nvidia-smi -L`, and CUDA_VISIBLE_DEVICES"
        )
    if row["horovod"] and "NCCL" not in row["horovod"]["operations"]:
        return f"Horovod on {host} has no NCCL, and moves tensors of GPUs through the CPU: {_BUILD} builds it with NCCL"
    return None
