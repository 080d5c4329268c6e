"""The drill's job under its launcher: its processes, its progress, and its restarts."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dualtrain.errors import UserError

#: The environment variable by which the processes of a drill's job are found.
MARK = "DUALTRAIN_DRILL"
#: Matches the line that a run with ``--resume auto`` prints when it starts.
_START = re.compile(rb"--resume auto: (?:resuming from|beginning at) step (\d+)")
_RANK_VARIABLES = (b"RANK", b"HOROVOD_RANK", b"OMPI_COMM_WORLD_RANK")
END_SECONDS = 20.0  # from SIGTERM to SIGKILL of the processes that are left


class Job:
    """A training job of ``nproc`` ranks under a launcher. :meth:`start` starts it.

    torchrun's agent restarts the ranks; horovodrun restarts nothing. If the launcher fails, :meth:`restart_if_failed`
    restarts the launcher.

    Args:
        folder: the run's folder; the job's output goes to a file beside it.
        flags: the flags of ``dualtrain.main``.
        nproc: the number of ranks.
        horovod: whether horovodrun starts the job, instead of torchrun.
        restarts: how often torchrun may restart the ranks, and how often the drill may restart the launcher.
    """

    def __init__(self, folder: Path, flags: Sequence[str], nproc: int, *, horovod: bool, restarts: int) -> None:
        self.folder = folder
        self.log = folder.with_suffix(".log")
        self._token = secrets.token_hex(8)
        program = ["-m", "dualtrain.main", *flags, "--run-dir", str(folder), "--resume", "auto"]
        if horovod:
            self._command = ["horovodrun", "--gloo", "-np", str(nproc), sys.executable, *program]
        else:
            agent = ["--standalone", f"--nproc_per_node={nproc}", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
            self._command = [sys.executable, "-m", "torch.distributed.run", *agent, *program]
        self._launches_left = restarts + 1
        self._launcher: subprocess.Popen[bytes] | None = None
        # The number of bytes read from the output, and what was found in them.
        self._read, self._starts, self._failed_writes = 0, list[int](), 0

    # -- processes --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the launcher, for the first time or after it has ended.

        Raises:
            UserError: the launcher is not installed, or was started too often.
        """
        if not self._launches_left:
            raise UserError(f"the job was started too often without finishing: see {self.log}")
        self._launches_left -= 1
        # If OMP_NUM_THREADS is not set, torchrun sets it and prints five lines about it.
        env = {"OMP_NUM_THREADS": "1", **os.environ, MARK: self._token}
        with self.log.open("ab") as output:
            try:
                self._launcher = subprocess.Popen(
                    self._command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
            except FileNotFoundError:
                raise UserError(f"{self._command[0]} is not installed: bash launch/setup.sh, or --backend torch") from None

    def status(self) -> int | None:
        """Return the launcher's exit status; ``None`` while it runs."""
        assert self._launcher is not None
        return self._launcher.poll()

    def restart_if_failed(self) -> bool:
        """Start the launcher again if it has failed; return whether the launcher has ended with success.

        Raises:
            UserError: see :meth:`start`.
        """
        if self.status() not in (None, 0):
            self.start()
        return self.status() == 0

    @property
    def launcher(self) -> int:
        """The launcher's process id."""
        assert self._launcher is not None
        return self._launcher.pid

    def kill_launcher(self) -> bool:
        """Kill the launcher; return whether it was running."""
        assert self._launcher is not None
        running = self._launcher.poll() is None
        self._launcher.kill()  # does nothing if the launcher has ended
        return running

    def ranks(self) -> dict[int, int]:
        """Return the process ids of the running ranks, by rank."""
        found: dict[int, int] = {}
        for process, rank in self._processes():
            if rank is not None:
                found[rank] = process
        return found

    def end(self) -> list[int]:
        """End all processes of the job; return the ids of those that still ran ``END_SECONDS`` after SIGTERM.

        Those get SIGKILL. Blocks for at most twice ``END_SECONDS``.
        """
        deadline = time.monotonic() + END_SECONDS
        found = {process for process, _ in self._processes()}
        if self._launcher is not None and self.status() is None:
            found.add(self._launcher.pid)  # just after the start, the launcher's environment cannot be read yet
        for process in found:
            send(process, signal.SIGCONT)
            send(process, signal.SIGTERM)
        while (left := [process for process, _ in self._processes()]) and time.monotonic() < deadline:
            time.sleep(0.1)
            self.status()
        for process in left:
            send(process, signal.SIGKILL)
        if self._launcher is not None:
            with suppress(subprocess.TimeoutExpired):  # the launcher hangs in the kernel; ``left`` has its id
                self._launcher.wait(END_SECONDS)
        return left

    def _processes(self) -> list[tuple[int, int | None]]:
        """Return the ids of all processes of the job, each with its rank, or ``None`` if it is not a rank."""
        found = []
        mark = f"{MARK}={self._token}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                if mark not in variables:
                    continue
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words == [b""]:
                    continue  # a zombie
                rank = _rank(variables) if b"dualtrain.main" in words and b"torch.distributed.run" not in words else None
                found.append((int(entry.name), rank))
        return found

    # -- progress ---------------------------------------------------------------------------------------------------

    def position(self) -> tuple[int, int]:
        """Return the metrics file's inode, which differs after a resume, and its last step.

        The step is 0 if the file has none; both are 0 without a file.
        """
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                inode, size = os.fstat(file.fileno()).st_ino, os.fstat(file.fileno()).st_size
                file.seek(max(0, size - 2000))
                lines = file.read().split(b"\n")[:-1]
        except OSError:
            return 0, 0
        for line in reversed(lines):
            with suppress(ValueError, TypeError, KeyError):
                return inode, int(json.loads(line)["step"])
        return inode, 0

    def starts(self) -> list[int]:
        """Return the step at which each start of the run began, according to the output."""
        self._read_output()
        return self._starts

    def failed_writes(self) -> int:
        """Return the number of failed writes that the job's output reports."""
        self._read_output()
        return self._failed_writes

    def _read_output(self) -> None:
        """Read the complete lines that the job has printed since the last call."""
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
            lines = new[: new.rfind(b"\n") + 1]
            self._read += len(lines)
            self._starts += [int(found[1]) for found in _START.finditer(lines)]
            self._failed_writes += lines.count(b"could not be written")

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints, oldest first, without ``best.safetensors``."""
        return sorted((self.folder / "checkpoints").glob("step-*.safetensors"))

    def is_writing(self) -> bool:
        """Return whether a checkpoint's temporary file exists: it is being written, or its writer was killed."""
        try:
            return any(name.endswith(".tmp") for name in os.listdir(self.folder / "checkpoints"))
        except OSError:
            return False

    def last_error(self) -> str:
        """Return the last line of the job's output that reports an error; if there is none, the output's last line."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        errors = [line for line in lines if "dualtrain: error" in line]
        return (errors or lines or ["it printed nothing"])[-1].strip()


def _rank(variables: Sequence[bytes]) -> int | None:
    values = dict(variable.partition(b"=")[::2] for variable in variables)
    for name in _RANK_VARIABLES:
        if values.get(name, b"").isdigit():
            return int(values[name])
    return None


def send(process: int, number: int) -> None:
    """Send a signal to a process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(process, number)
