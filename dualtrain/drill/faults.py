"""The faults of the drill: what is done to the processes and files of a job."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from dualtrain.drill.job import Job, send
from dualtrain.drill.small_disk import fill
from dualtrain.processes import is_stopped

_WRITE_SECONDS = 5.0  # longest wait for a write to begin, to fail, or to end


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: its name in the table.
        inject: injects the fault into a job; returns the target, or "" if there is no process or file to target now.
            Waits for up to ``_WRITE_SECONDS``.
    """

    name: str
    inject: Callable[[Job, random.Random], str]


def _signal_one_rank(number: signal.Signals) -> Callable[[Job, random.Random], str]:
    def inject(job: Job, generator: random.Random) -> str:
        ranks = job.ranks()
        if not ranks:
            return ""
        rank = generator.choice(sorted(ranks))
        send(ranks[rank], number)
        return f"rank {rank}"

    return inject


def _signal_all_ranks(number: signal.Signals) -> Callable[[Job, random.Random], str]:
    def inject(job: Job, generator: random.Random) -> str:
        ranks = job.ranks()
        for process in ranks.values():
            send(process, number)
        return f"{len(ranks)} rank{'s' * (len(ranks) != 1)}" if ranks else ""

    return inject


def _kill_launcher(job: Job, generator: random.Random) -> str:
    return f"process {job.launcher}" if job.kill_launcher() else ""


def _kill_rank_0_in_save(job: Job, generator: random.Random) -> str:
    """Kill rank 0 while a checkpoint's temporary file exists, or after some seconds without one."""
    deadline = time.monotonic() + _WRITE_SECONDS
    while not (writing := job.is_writing()) and time.monotonic() < deadline and job.status() is None:
        time.sleep(0.0005)
    process = job.ranks().get(0)
    if process is None:
        return ""
    send(process, signal.SIGKILL)
    return "rank 0, half-written" if writing else "rank 0, no checkpoint was written meanwhile"


def _damage_checkpoint(job: Job, generator: random.Random) -> str:
    """Stop all ranks, invert a random byte of the newest checkpoint, then kill the ranks."""
    ranks, newest = job.ranks(), job.checkpoints()[-1:]
    if not ranks or not newest:
        return ""
    for process in ranks.values():
        send(process, signal.SIGSTOP)
    # A process in a system call, such as a write, stops when the call returns.
    deadline = time.monotonic() + _WRITE_SECONDS
    while not all(map(is_stopped, ranks.values())) and time.monotonic() < deadline:
        time.sleep(0.001)
    path = job.checkpoints()[-1]
    # Write a new file: the best checkpoint may be a hard link to the old file, and must stay undamaged.
    content = bytearray(path.read_bytes())
    content[generator.randrange(len(content))] ^= 0xFF
    path.unlink()
    path.write_bytes(content)
    for process in ranks.values():
        send(process, signal.SIGKILL)
    return path.name


def _fill_file_system(job: Job, generator: random.Random) -> str:
    """Fill the file system, wait up to ``_WRITE_SECONDS`` for a failed write, kill a rank, and free the space."""
    ranks = job.ranks()
    if not ranks or not job.folder.exists():
        return ""
    rank, before = generator.choice(sorted(ranks)), job.failed_writes()
    filler = fill(job.folder)
    try:
        deadline = time.monotonic() + _WRITE_SECONDS
        while not (failed := job.failed_writes() > before) and time.monotonic() < deadline and job.status() is None:
            time.sleep(0.01)
        send(ranks[rank], signal.SIGKILL)
    finally:
        filler.unlink()
    return f"rank {rank}, {'after a write failed' if failed else 'no write failed meanwhile'}"


STOP_RANK = Fault("SIGSTOP of a rank", _signal_one_rank(signal.SIGSTOP))  # only other ranks detect it
FAULTS = (
    Fault("SIGKILL of a rank", _signal_one_rank(signal.SIGKILL)),
    Fault("SIGKILL of all ranks", _signal_all_ranks(signal.SIGKILL)),
    Fault("SIGKILL of the launcher", _kill_launcher),
    Fault("SIGTERM of a rank", _signal_one_rank(signal.SIGTERM)),
    Fault("SIGTERM of all ranks", _signal_all_ranks(signal.SIGTERM)),
    Fault("SIGKILL of rank 0 during a save", _kill_rank_0_in_save),
    Fault("newest checkpoint damaged", _damage_checkpoint),
    STOP_RANK,
)
#: This fault needs a run with its own small file system.
FULL_DISK = Fault("file system full", _fill_file_system)
