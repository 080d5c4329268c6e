"""Runs of the scripts in launch/ and tests/ with fake programs. ``Setup`` runs ``launch/setup.sh``.

The fakes of ``Setup`` are the interpreter, pip, nvidia-smi, nvcc and Horovod. With them, a set-up takes a second, needs no
network and compiles nothing. The fakes print the contents of files that a test has written, except pip, which runs
its file as shell code. The fakes of pip and nvcc record their arguments.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.forked import ROOT, wait_until

SECONDS = 60.0

# The fake interpreter. `-m venv` copies it to bin/python; `-m pip` runs the file "pip" as shell code. For setup.sh's
# checks of torch and of Horovod, it prints the files "torch" and "horovod". The real Python runs everything else. Each
# program given with -c runs only once: later calls print the kept output (see ONCE). When pip builds Horovod's wheel,
# pip's environment variables are written to the file "build". pip also copies the file given by --constraint to
# "constraints". When pip installs a package of nvcc, it copies the folder "toolkit" into the folder given by --target.
PYTHON = """#!/bin/bash
here={folder}
{once}
case "$1 $2" in
  "-m venv")
    mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip")
    shift 2
    echo "$*" >>"$here/calls"
    command=$1 previous=''
    for each; do
      case $previous in
        --constraint) cp "$each" "$here/constraints" ;;
        --wheel-dir | --target) place=$each ;;
      esac
      previous=$each
    done
    if [ -e "$here/pip" ]; then . "$here/pip"; fi
    if [ "$command" = wheel ]; then env >"$here/build"; echo >"$place/horovod-0-cp-linux.whl"; fi
    case "$*" in *nvidia-cuda-nvcc*) mkdir -p "$place/nvidia"; cp -r "$here/toolkit" "$place/nvidia/cu13" ;; esac ;;
  "-c "*torch/version.py*) cat "$here/torch" ;;
  "-c "*--check-build*) cat "$here/horovod" ;;
  "-c "*) once "$@" ;;
  *) exec {real} -S "$@" ;;
esac
"""
# Shell function of fake interpreters. If an earlier call with the same arguments succeeded, it prints that call's output
# again. Otherwise it calls Python, and keeps and prints the output; if Python fails, the fake exits with its status.
ONCE = """
once() {{
  local name=$*
  name={outputs}/${{name//[^a-z0-9]/_}}
  [ -e "$name" ] || {{ {real} -S "$@" >"$name.$$" || exit; mv "$name.$$" "$name"; }}
  cat "$name"
}}
"""
SMI = """#!/bin/sh
if [ ! -s {folder}/gpus ]; then exit 9; fi
case "$1" in
  -L) while read -r gpu; do echo "GPU $gpu"; done <{folder}/gpus ;;
  *) cat {folder}/gpus ;;
esac
"""
NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {version}, V{version}.1" ;;
  *) echo "$*" >>{folder}/compiled; if [ -e {folder}/nvcc ]; then cat {folder}/nvcc >&2; exit 1; fi ;;
esac
"""


def once(outputs: Path) -> str:
    """Return the shell function ``ONCE``, which keeps Python's outputs in the folder ``outputs``."""
    return ONCE.format(outputs=outputs, real=sys.executable)


class Runs:
    """Runs of a script whose programs are fakes. The fakes read and write files in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def set(self, **programs: str) -> None:
        """Set what programs do: shell code, in which $* are the arguments and $here is ``folder``.

        In :class:`Setup`, only ``pip`` runs such code.
        """
        for name, script in programs.items():
            (self.folder / name).write_text(script)

    def calls(self) -> list[str]:
        """Return the arguments of pip's calls since the previous call of this method."""
        file = self.folder / "calls"
        found = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return found

    def popen(self, command: list[str], env: dict[str, str], errors: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """Start a command in its own session. ``errors`` is the target of standard error."""
        process = subprocess.Popen(
            command, env=env, text=True, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        """Kill the processes that a failed test has left."""
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=SECONDS)


class Setup(Runs):
    """Runs of setup.sh that make an environment in ``folder``. Python's outputs are kept in the folder ``outputs``."""

    def __init__(self, folder: Path, outputs: Path) -> None:
        super().__init__(folder)
        self.venv = folder / "venv"
        self.cache = folder / "cache"
        self.root = ROOT
        python = folder / "python"
        python.write_text(PYTHON.format(folder=folder, real=sys.executable, once=once(outputs)))
        python.chmod(0o755)
        self._program("bin/nvidia-smi", SMI.format(folder=folder))
        self.horovod("PyTorch", "MPI", "Gloo")
        self.torch("2.13.0+cpu")
        foreign = ("DUALTRAIN_", "CUDA_", "HOROVOD_", "NVCC_")
        names = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        settings = {"DUALTRAIN_VENV": self.venv, "DUALTRAIN_CACHE": self.cache, "PYTHON": python, "CXX": "true"}
        path = f"{folder / 'bin'}:{names['PATH']}"
        self.env = {**names, **{name: str(value) for name, value in settings.items()}, "DUALTRAIN_GPU": "cpu", "PATH": path}

    def _program(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def horovod(self, *parts: str) -> None:
        """Set the parts that `horovodrun --check-build` shows."""
        (self.folder / "horovod").write_text("".join(f"[X] {part}\n" for part in parts))

    def torch(self, build: str, cuda: str = "none", architectures: str = "80,90", abi: int = 1) -> None:
        """Set the build of torch in the environment. A CUDA build brings headers, libcudart and NCCL."""
        packages = self.folder / "packages"
        (self.folder / "torch").write_text(f"cpython-311-x86_64 {build} {cuda} {abi} {architectures} {packages}\n")
        if cuda == "none":
            return
        for file in ("nccl/include/nccl.h", "nccl/lib/libnccl.so.2"):
            self._program(f"packages/nvidia/{file}", "")
        for file in ("include/cusparse.h", "lib/libcudart.so.13"):
            self._program(f"packages/nvidia/cu{cuda.partition('.')[0]}/{file}", "")

    def gpus(self, *capabilities: str) -> None:
        """Set the compute capabilities of the GPUs that nvidia-smi finds, such as "8.0"."""
        (self.folder / "gpus").write_text("".join(f"{each}\n" for each in capabilities))

    def toolkit(self, version: str, *, complete: bool = True) -> Path:
        """Make a CUDA toolkit, complete or with nvcc alone.

        If the test writes a file "nvcc", nvcc prints the content of this file when it compiles, and fails.
        """
        self._program("toolkit/bin/nvcc", NVCC.format(folder=self.folder, version=version))
        for file in ("include/cuda_runtime.h", "include/cublas_v2.h", "include/cusparse.h", "lib64/libcudart.so"):
            if complete:
                self._program(f"toolkit/{file}", "")
        (self.folder / "toolkit" / "include").mkdir(exist_ok=True)
        return self.folder / "toolkit"

    def build(self) -> dict[str, str]:
        """Return the environment variables of the last build of Horovod."""
        lines = (self.folder / "build").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def start(self, *prefix: str, **env: str) -> subprocess.Popen[str]:
        command = [*prefix, "bash", str(self.root / "launch" / "setup.sh")]
        return self.popen(command, self.env | env)

    def run(self, *prefix: str, **env: str) -> tuple[int, str, str]:
        """Run setup.sh; return the exit status, standard output and standard error."""
        process = self.start(*prefix, **env)
        output, errors = process.communicate(timeout=SECONDS)
        return process.returncode, output, errors


def until(condition: Callable[[], bool]) -> None:
    assert wait_until(condition, SECONDS)
