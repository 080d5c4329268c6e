"""Starts a contender in fresh processes and collects what its ranks say.

Torch's contenders get the variables that torchrun sets, Horovod's over Gloo those that horovodrun sets, and over MPI the
mpirun that it would call, without the seconds that these launchers take themselves; with --launch, the user's own command
starts all. Which it is makes no difference to a step.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from dualtrain.bench.plan import GLOO, MPI, OURS, Entry
from dualtrain.bench.worker import MARK
from dualtrain.launchers import World

PATIENCE_SECONDS = 240.0
#: How horovodrun 0.28.1 has Open MPI's mpirun place and connect the ranks of one host.
OPEN_MPI = ["--allow-run-as-root", "-bind-to", "none", "-map-by", "slot", "-mca", "pml", "ob1", "-mca", "btl", "^openib"]


class LaunchError(Exception):
    """A contender did not run: the reason in one line."""


@dataclass(frozen=True)
class Place:
    """Where contenders run: so many ranks on this host, or what ``prefix`` starts; and for how many seconds at most."""

    ranks: int
    device: str
    folder: Path
    prefix: tuple[str, ...] = ()
    threads: int = 1
    patience: float = PATIENCE_SECONDS


def run_entry(entry: Entry, jobs: Sequence[str], place: Place, effort: float) -> list[dict[str, Any]]:
    """What every rank of a contender found, in no order. Blocks until its processes have ended.

    Raises:
        LaunchError: they failed, or took too long.
    """
    program = [sys.executable, "-m", "dualtrain.bench.worker", entry.module, ",".join(jobs)]
    program += [f"--device={place.device}", f"--folder={place.folder.resolve()}", f"--launched={time.time()}"]
    program += [f"--effort={effort}"] + [f"--option={entry.option}"] * bool(entry.option)
    return found_in(run_program(program, entry.starter, place, meet=entry.needs != "horovod" and entry.module != OURS))


def run_program(program: Sequence[str], starter: str, place: Place, meet: bool = False) -> str:
    """What the ranks of ``program`` wrote.

    Raises:
        LaunchError: they failed, or took too long.
    """
    if place.prefix:
        told = [f"--meet=meet-{secrets.token_hex(4)}"] if meet else []
        return _watched([([*place.prefix, *program, *told], {})], place)
    if starter == GLOO:
        return _by_gloo(program, place)
    if starter == MPI and _open_mpi():
        return _watched([([_beside("mpirun"), *OPEN_MPI, "-H", f"localhost:{place.ranks}", *program], {})], place)
    if starter != "ranks":
        command, *flags = starter.split()
        return _watched([([_beside(command), *flags, "-np", str(place.ranks), *program], {})], place)
    shared: dict[str, object] = {"WORLD_SIZE": place.ranks, "LOCAL_WORLD_SIZE": place.ranks, "GROUP_RANK": 0}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "TORCHELASTIC_RUN_ID": "bench"}
    ranks = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(place.ranks)]
    return _watched([(program, one) for one in ranks], place)


@cache
def _open_mpi() -> bool:
    """Whether the mpirun of this host is Open MPI's."""
    try:
        said = subprocess.run([_beside("mpirun"), "--version"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "Open MPI" in said.stdout


def _by_gloo(program: Sequence[str], place: Place) -> str:
    """Horovod's ranks, with the variables that horovodrun sets for those of one host."""
    from dualtrain.backends.horovod import description
    from dualtrain.rendezvous.hosts import loopback
    from dualtrain.rendezvous.http_store import HttpStore

    worlds = [World(rank, place.ranks, rank, place.ranks) for rank in range(place.ranks)]
    shared: dict[str, object] = {"NCCL_SOCKET_IFNAME": loopback()}
    with closing(HttpStore("127.0.0.1")) as store:
        shared |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": store.url_prefix, "HOROVOD_GLOO_RENDEZVOUS_PORT": store.port}
        return _watched([(program, {**description(world), **shared}) for world in worlds], place)


def found_in(text: str) -> list[dict[str, Any]]:
    """The results in what a launcher passed on of its ranks' output."""
    return [json.loads(line) for line in re.findall(rf"{re.escape(MARK)}(\{{.*\}})", text)]


def _watched(commands: Sequence[tuple[Sequence[str], Mapping[str, object]]], place: Place) -> str:
    """Runs the commands side by side until all have ended or one fails; gives what they wrote."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    quiet = {"OMP_NUM_THREADS": str(place.threads), "PATH": path, "TOKENIZERS_PARALLELISM": "false"}
    starts = [(command, {name: str(value) for name, value in more.items()}) for command, more in commands]
    # An installed package is compiled, as torch is: a checkout is to be so too, after its first start.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with ExitStack() as stack:
        log: IO[str] = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        jobs = [
            subprocess.Popen(command, env={**kept, **quiet, **more}, stdout=log, stderr=log, start_new_session=True)
            for command, more in starts
        ]
        try:
            deadline = time.monotonic() + place.patience
            while any(job.poll() is None for job in jobs) and not any(job.poll() for job in jobs):
                if time.monotonic() > deadline:
                    raise LaunchError(f"it did not end within {place.patience:.0f} s")
                time.sleep(0.02)
        finally:
            for job in jobs:
                _end(job)
        log.seek(0)
        text = log.read()
    if any(job.returncode for job in jobs):
        raise LaunchError(_reason(text) or f"it ended with status {next(job.returncode for job in jobs if job.returncode)}")
    return text


def _end(job: subprocess.Popen[bytes]) -> None:
    """Ends a job's processes, those that it started too."""
    for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        if job.poll() is None:
            os.killpg(job.pid, number)
            try:
                job.wait(seconds)
            except subprocess.TimeoutExpired:
                pass


def _reason(text: str) -> str:
    """The line of an output that says most: the first error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and MARK not in line]
    errors = [line for line in lines if re.search(r"(Error|error|refused|not found)\b.*:|: error", line)]
    return (errors or lines or [""])[0 if errors else -1][:300]


def _beside(command: str) -> str:
    """The program of this environment, else that of the PATH."""
    own = Path(sys.executable).parent / command
    return str(own) if own.exists() else shutil.which(command) or command


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
