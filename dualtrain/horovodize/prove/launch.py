"""Run a script with the recorder under Horovod's launcher or torchrun, and end all processes of the run."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dualtrain.cores import usable_cores
from dualtrain.differences import ranks_in_words
from dualtrain.errors import UserError
from dualtrain.horovodize import recorder
from dualtrain.horovodize.prove.cleaner import END_SECONDS, MARK, POLL_SECONDS, end_marked
from dualtrain.horovodize.prove.reader import end_of, failure_in, read_record
from dualtrain.horovodize.prove.records import RankRecord, RunRecord
from dualtrain.horovodize.prove.workspace import Workspace
from dualtrain.processes import signal_at_parents_end

Side = Literal["Horovod", "dualtrain"]
COMPAT = "DUALTRAIN_HVD_COMPAT"
#: Tags with the rank, which launchers put before lines, and mpirun also between parts of a line.
_OF_LAUNCHER = re.compile(r"\[\d+(,\d+)?\]<std(out|err)>:?|^\[\d+\]")
#: Lines with exceptions or usage errors, or mpirun's and torchrun's messages about a process that a signal has ended.
_IS_ERROR = re.compile(r"\b\w*([Ee]rror|refused|not found)\b.*:|: error|exited on signal|SIG[A-Z]+")
#: Errors of ranks whose peer has failed or exited.
_OF_PEERS = re.compile(r"HorovodInternalError|PeerFailedError|Horovod has been shut down")
#: After a rank has recorded an error of the script, or all ranks have recorded its end, a run that takes no step for this
#: time is ended. With some errors, Horovod's ranks hang at exit; and horovodrun waits for processes that the script leaves
#: behind, if they may write to its output.
_EXIT_SECONDS = 15.0
#: Allow Open MPI to run as root and with more ranks than cores. Other MPI implementations ignore these variables.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


class RunError(Exception):
    """A run failed, hung, or took no step on some rank. The message is one line.

    Attributes:
        traceback: the traceback of the script's own exception; may be empty.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


@dataclass(frozen=True)
class Job:
    """Description of the runs on both sides.

    Attributes:
        program: the script and its arguments, as on the recorder's command line (``-m`` before a module).
        nproc: the number of ranks.
        steps: the number of optimizer steps.
        seed: rank r seeds torch, numpy and random with ``seed`` + r; ``None`` does not seed them.
        timeout: seconds without a step after which a run is ended.
        space: the folders of the runs, and the mark of their processes.
    """

    program: tuple[str, ...]
    nproc: int
    steps: int
    seed: int | None
    timeout: float
    space: Workspace

    def record(self, side: Side, name: str, *, compat: bool = False) -> RunRecord:
        """Run the script with the recorder on ``side``, and return the record, which is written to the folder ``name``.

        Args:
            side: the library.
            name: the name of a new folder in the workspace.
            compat: whether dualtrain reproduces Horovod's defects.

        Raises:
            UserError: the record cannot be read, or lacks a rank.
            RunError: no rank started; or the script failed, hung, was killed, or ended without a step on some rank.
        """
        folder = self.space.folder / name
        options = ["--record", str(folder), "--steps", str(self.steps)]
        options += [] if self.seed is None else ["--seed", str(self.seed)]
        program = [str(Path(recorder.__file__).resolve()), *options, *self.program]
        command = _horovod(self.nproc, program) if side == "Horovod" else _torchrun(self.nproc, program, folder)
        env = environment(self.nproc, side, compat, self.space)
        folder.mkdir(parents=True)
        launched = time.time()
        log = folder / "output.txt"
        status, hung = _run(command, env, folder, log, self.timeout, self.nproc)
        if not list(folder.glob("rank-*.jsonl")):
            raise RunError(f"{_start_failure(side, status, hung, self.timeout)}{_error_line(log)}")
        run = read_record(folder, launched)
        _check(run, side, status, self.timeout if hung else None, log)
        return run


def installed() -> bool:
    """Return whether Horovod is installed; unlike ``backends.horovod.installed``, without importing torch."""
    return importlib.util.find_spec("horovod") is not None


def require_horovod() -> None:
    """Raise UserError if Horovod or its launcher is missing."""
    if not installed():
        raise UserError(
            "Horovod is not installed here: record the script on a machine that has it (see --recorder in --help), and "
            "name its record with --against"
        )
    if _launcher() is None:
        raise UserError("neither horovodrun nor mpirun was found: put the launcher that starts Horovod on the PATH")


def _launcher() -> str | None:
    folder = Path(sys.executable).parent
    for name in ("horovodrun", "mpirun"):
        found = str(folder / name) if (folder / name).exists() else shutil.which(name)
        if found is not None:
            return found
    return None


def _horovod(nproc: int, program: Sequence[str]) -> list[str]:
    launcher = _launcher()
    assert launcher is not None
    return [launcher, "-np", str(nproc), sys.executable, *program]


def _torchrun(nproc: int, program: Sequence[str], folder: Path) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    torchrun.append(f"--log-dir={folder / 'torchrun'}")  # by default, torchrun leaves a folder in /tmp
    return [*torchrun, "-m", "dualtrain.horovodize", *program]


def environment(nproc: int, side: Side, compat: bool, space: Workspace) -> dict[str, str]:
    """Return the environment of the launcher, with the same number of threads on both sides."""
    env = {name: value for name, value in os.environ.items() if name not in (COMPAT, "DUALTRAIN_BACKEND")}
    env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // nproc)))
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
    # The launcher's processes must find this package even if this process found it in the current folder.
    root = str(Path(__file__).resolve().parents[3])
    env["PYTHONPATH"] = os.pathsep.join(part for part in (env.get("PYTHONPATH"), root) if part)
    env = {**space.variables, **env, MARK: space.mark}
    if side == "Horovod":
        return {**_OPEN_MPI, **env}
    env["DUALTRAIN_BACKEND"] = "torch"
    return {**env, COMPAT: "1"} if compat else env


# -- the processes ------------------------------------------------------------------------------------------------------


def _run(
    command: Sequence[str], env: Mapping[str, str], folder: Path, log: Path, timeout: float, nproc: int
) -> tuple[int, bool]:
    """Run ``command``. Return its exit status, and whether it was ended because no rank took a step for ``timeout`` s.

    If the script has failed on a rank, or has ended on all ``nproc`` ranks, end the command after only ``_EXIT_SECONDS``
    without a step. The status is 1 if this function ended the command. Before it returns or raises, it ends all processes
    of the run.
    """
    parent = os.getpid()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: signal_at_parents_end(signal.SIGTERM, parent),  # on SIGTERM, the launcher ends its ranks
        )
        try:
            written, since = _written(folder), time.monotonic()
            looked = False  # whether the ends of the ranks' records have been read since the last step
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                now, silent = _written(folder), time.monotonic() - since
                if now != written:
                    written, since, looked = now, time.monotonic(), False
                elif silent > timeout or (silent > _EXIT_SECONDS and not looked and _has_ended(folder, nproc)):
                    end_marked(env[MARK])  # by SIGKILL: a script that handles SIGTERM would record an ordinary end
                    return 1, silent > timeout
                elif silent > _EXIT_SECONDS:
                    looked = True
            return process.returncode, False
        finally:
            _end(process, env[MARK])


def _written(folder: Path) -> int:
    """Return the number of bytes that the ranks have recorded. Each step adds some."""
    return sum(path.stat().st_size for path in folder.glob("rank-*.jsonl"))


def _has_ended(folder: Path, nproc: int) -> bool:
    """Return whether a rank has recorded an error that a failed peer did not cause, or all ranks the end of the script."""
    ends = [end_of(path) for path in folder.glob("rank-*.jsonl")]
    failed = any(failure and not _OF_PEERS.search(failure) for failure in map(failure_in, ends))
    return failed or (len(ends) == nproc and all(ends))


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the launcher, and all processes that it has started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    end_marked(mark)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)


# -- errors of a run ----------------------------------------------------------------------------------------------------


def _check(run: RunRecord, side: Side, status: int, timeout: float | None, log: Path) -> None:
    """Raise RunError unless the script ended normally, with at least one step on every rank.

    ``timeout`` is the time without a step after which the run was ended; ``None`` if it was not ended for that reason.
    """
    ends = [(number, rank, rank.end) for number, rank in enumerate(run.ranks) if rank.end is not None]
    failed = [each for each in ends if each[2].reason == "error" or each[2].status]
    gone = [number for number, rank in enumerate(run.ranks) if rank.end is None]
    causes = [each for each in failed if not _OF_PEERS.search(each[2].error)]
    for number, rank, end in causes or ([] if gone else failed):
        what = end.error or f"exit status {end.status}"
        more = "" if end.error else _error_line(log)
        where = f"{side}: the script failed on rank {number}, {_when(rank)}"
        raise RunError(f"{where}: {what.splitlines()[-1]}{more}", end.traceback)
    if gone:
        ranks_at: dict[str, list[int]] = {}
        for number in gone:
            ranks_at.setdefault(_when(run.ranks[number]), []).append(number)
        where = "; ".join(f"{ranks_in_words(ranks)}, {when}" for when, ranks in ranks_at.items())
        if timeout is not None:
            raise RunError(
                f"{side}: {where}, took no step within {timeout:g} s: the script hangs, or needs a larger --timeout"
            )
        verb = "was" if len(gone) == 1 else "were"
        raise RunError(
            f"{side}: {where}, {verb} killed, or called os._exit (exit status of the launcher: {status}){_error_line(log)}"
        )
    if not run.steps:
        raise RunError(
            f"{side}: the script ended before an hvd.DistributedOptimizer had taken a step on every rank, and only the "
            "weights of such optimizers are compared: give the script arguments that make it train, and remove checkpoints "
            "of earlier runs from which it resumes"
        )


def _when(rank: RankRecord) -> str:
    return f"after step {rank.steps}" if rank.steps else "before the first step"


def _start_failure(side: Side, status: int, hung: bool, timeout: float) -> str:
    if hung:
        return f"{side}: no rank started within {timeout:g} s: check the launcher, or give a larger --timeout"
    return f"{side}: the launcher ended with status {status} before any rank started"


def _error_line(log: Path) -> str:
    """Return ": " and the first line of the output with an error, or else the last line with a letter or digit.

    Errors of ranks whose peer has failed are left out. Return "" if no line remains.
    """
    lines = [_OF_LAUNCHER.sub("", line).strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if not _OF_PEERS.search(line)]
    errors = [line for line in lines if _IS_ERROR.search(line)]
    shown = (errors or [line for line in lines if re.search(r"\w", line)] or [""])[0 if errors else -1]
    return f": {shown[:300]}" if shown else ""
