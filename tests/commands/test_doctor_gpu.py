"""The doctor's report on CUDA, NCCL and the driver, with fakes of the driver's files."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from dualtrain.doctor.advice import advise
from dualtrain.doctor.gpu import gpu_facts, gpu_line
from tests.commands.test_doctor import row

NVRM = "NVRM version: NVIDIA UNIX {}x86_64 Kernel Module  {}  Sun Aug  3 20:11:51 UTC 2025\nGCC version: gcc 12\n"
WITHOUT_NCCL = {"torch": "2.13", "operations": ["MPI", "Gloo"]}


def gpus(driver="580.65.06", driver_cuda="13.0", cuda="13.2", nccl="2.30.7"):
    return {"cuda": cuda, "nccl": nccl, "driver": driver, "driver_cuda": driver_cuda}


@pytest.mark.parametrize(
    ("gpu", "line"),
    [
        (gpus(), "13.2 in torch, NCCL 2.30.7; NVIDIA driver 580.65.06 for CUDA 13.0; new enough"),
        (gpus("535.183.01", "12.2"), "13.2 in torch, NCCL 2.30.7; NVIDIA driver 535.183.01 for CUDA 12.2; too old"),
        (gpus(None, None), "13.2 in torch, NCCL 2.30.7; no NVIDIA driver: runs use the CPU"),
        (gpus(None, None, None, None), "none in torch (a CPU build); no NVIDIA driver: runs use the CPU"),
    ],
)
def test_the_report_shows_the_versions_of_cuda_and_the_driver(gpu, line):
    assert gpu_line(gpu) == line


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"gpu": gpus(cuda=None)}, "torch 2.13 is a CPU build: DUALTRAIN_GPU=nccl bash launch/setup.sh"),
        ({"gpu": gpus(driver_cuda=None)}, "has NVIDIA driver 580.65.06, but libcuda.so.1 cannot be loaded"),
        (
            {"gpu": gpus("535.1", "12.2")},
            "(535.1, for CUDA 12.2) is too old for torch 2.13, and ranks use the CPU: install driver 580",
        ),
        ({"gpu": gpus()}, "but torch finds no GPU"),
        (
            {"gpu": gpus(), "cuda": True, "devices": ["H200"] * 2, "gpu_uuids": ["a", "b"], "horovod": WITHOUT_NCCL},
            "has no NCCL",
        ),
    ],
)
def test_the_reason_why_ranks_cannot_use_the_gpu_is_noted_once_per_host(facts, part):
    problems, notes = advise([row(0, **facts), row(1, **facts)], "torch")
    assert problems == []
    (note,) = notes
    assert part in note


def test_gpus_that_can_be_used_need_no_note():
    facts = {
        "gpu": gpus(),
        "cuda": True,
        "devices": ["H200"] * 2,
        "gpu_uuids": ["a", "b"],
        "horovod": {**WITHOUT_NCCL, "operations": ["NCCL"]},
    }
    assert advise([row(0, **facts), row(1, **facts)], "horovod") == ([], [])
    # Minor versions of CUDA are compatible: a driver for 13.0 runs a build for 13.2.
    assert "new enough" in gpu_line(gpus())


@pytest.mark.parametrize(("text", "version"), [("", "580.65.06"), ("Open Kernel Module for ", "570.1.2")])
def test_the_drivers_version_is_read(text, version, tmp_path):
    file = tmp_path / "version"
    file.write_text(NVRM.format(text, version))
    assert gpu_facts(file, "no-such-library.so")["driver"] == version
    assert gpu_facts(file, "no-such-library.so")["driver_cuda"] is None
    assert gpu_facts(tmp_path / "none", "no-such-library.so")["driver"] is None


@pytest.mark.parametrize(("code", "answer"), [("*version = 12020; return 0;", "12.2"), ("return 35;", None)])
def test_the_cuda_version_of_a_driver_comes_from_its_library(code, answer, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler: apt install gcc")
    library = tmp_path / "libcuda.so"
    source = f"int cuDriverGetVersion(int *version) {{ {code} }}"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=source, text=True, check=True, timeout=60
    )
    assert gpu_facts(tmp_path / "none", str(library))["driver_cuda"] == answer
