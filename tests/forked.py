"""Processes forked from a server that has imported torch, so that they start in milliseconds instead of seconds.

Use them in tests that start ranks, unless the launcher itself is tested. :func:`run` replaces ``subprocess.run`` for Python
programs; :class:`Forked` is a running process.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from dualtrain.processes import JOB_SIGNALS, start_forkserver

ROOT = Path(__file__).resolve().parent.parent
_PR_SET_PDEATHSIG = 1
#: Modules that the server imports.
PRELOADED = ["tests.warm"]


@cache
def server() -> ForkServerContext:
    """Return multiprocessing's context for processes that are forked from the server. The first call starts the server."""
    # A process can have only one fork server, and training in a test's own process forks its data workers from that server.
    # So start the server as training does: with the job's signals blocked.
    start_forkserver(PRELOADED)
    return multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Completed:
    """Result of a process that has ended: exit status (-N if signal N ended it), output and rank."""

    returncode: int
    stdout: str
    stderr: str
    rank: str


class Forked:
    """A running process, equivalent to ``python COMMAND`` in ``env`` and ``cwd``.

    ``command`` is ``("-m", module)``, ``("-c", source)`` or ``(script,)``, followed by arguments. The output is written to
    files below ``folder``.
    """

    def __init__(
        self, command: Sequence[str | Path], folder: Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in folder.glob("*.out"))
        self._files = folder / f"{number}.out", folder / f"{number}.err"
        for file in self._files:
            file.touch()
        settings = list(map(str, command)), dict(os.environ if env is None else env), str(cwd), *map(str, self._files)
        self.rank = settings[1].get("RANK", "0")
        self.process = server().Process(target=_become, args=settings)
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def output(self) -> str:
        return self._files[0].read_text()

    @property
    def errors(self) -> str:
        return self._files[1].read_text()

    def send_signal(self, number: int) -> None:
        if self.process.exitcode is None:
            with suppress(ProcessLookupError):  # the process has exited, and the server has reaped it
                os.kill(self.pid, number)

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, seconds: float) -> int:
        """Wait until the process ends and return its exit status. Raises AssertionError after ``seconds``."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, (
            f"rank {self.rank} (process {self.pid}) still runs after {seconds} s:\n{self.output}\n{self.errors}"
        )
        return self.process.exitcode

    def wait_and_kill(self, seconds: float) -> Completed:
        """Wait until the process ends, and return its result; then kill what is left of its process group.

        Raises AssertionError after ``seconds``.
        """
        try:
            return Completed(self.wait(seconds), self.output, self.errors, self.rank)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the process and the other processes of its group; wait up to 10 s for the end of the process."""
        self.send_signal(signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.join(10)


def run(command: Sequence[str | Path], folder: Path, seconds: float = 120, **settings: Any) -> Completed:
    """Run a program until it ends. Raises AssertionError after ``seconds``."""
    return Forked(command, folder, **settings).wait_and_kill(seconds)


def run_ranks(
    ranks: int | Sequence[Mapping[str, str]],
    command: Sequence[str | Path],
    folder: Path,
    seconds: float = 120,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> list[Completed]:
    """Run ``command`` on loopback ranks; return each rank's exit status and output, in rank order.

    ``ranks`` is the number of ranks, or the launcher variables of each rank. Waits up to ``seconds`` for each rank, one
    after another; if one still runs then, kills all ranks and raises AssertionError.
    """
    variables = rank_variables(ranks) if isinstance(ranks, int) else ranks
    running = [Forked(command, folder, env={**(os.environ if env is None else env), **each}, cwd=cwd) for each in variables]
    try:
        return [rank.wait_and_kill(seconds) for rank in running]
    finally:
        for rank in running:
            rank.kill()


def rank_variables(size: int, **variables: str) -> list[dict[str, str]]:
    """Return the launcher variables of each rank of a world of ``size`` on loopback, with ``variables`` added."""
    from tests.pool import free_port

    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size), **variables}
    return [{"RANK": str(rank), **shared} for rank in range(size)]


@contextmanager
def torchrun_variables(size: int) -> Iterator[list[dict[str, str]]]:
    """Yield torchrun's variables for each rank of a world of ``size`` on loopback, while the agent's store is running."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(size), "ROLE_WORLD_SIZE": str(size), "ROLE_NAME": "default"}
    elastic = {"MAX_RESTARTS": "0", "RESTART_COUNT": "0", "RUN_ID": "forked", "USE_AGENT_STORE": "True"}
    shared = group | {f"TORCHELASTIC_{name}": value for name, value in elastic.items()}
    shared["MASTER_PORT"] = str(store.port)
    ranks = rank_variables(size, **shared)
    yield [variables | {"LOCAL_RANK": variables["RANK"], "ROLE_RANK": variables["RANK"]} for variables in ranks]


def in_child(function: Callable[[], object]) -> int:
    """Call ``function`` in a child that is forked from this process; return the child's exit status (0: no error)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and newer warn if other threads run
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)  # kill the child if it hangs
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> bool:
    """Wait up to ``seconds`` until ``condition`` holds, and return whether it holds."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def has_ended(pid: int) -> bool:
    """Return whether a process has ended. A zombie has ended."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def _become(command: list[str], env: dict[str, str], cwd: str, out: str, err: str) -> None:
    """Turn this forked process into one that runs ``command``."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # end when the server ends, at the end of the tests
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.current_process()._config.pop("tempdir", None)  # do not use the test process's temporary folder
    status = _run(command)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    atexit._run_exitfuncs()  # os._exit does not run the exit handlers
    os._exit(status)


def _run(command: list[str]) -> int:
    kind, *rest = command
    try:
        if kind == "-m":
            sys.argv = rest
            sys.path.insert(0, os.getcwd())
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path.insert(0, os.getcwd())
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = command
            sys.path.insert(0, str(Path(kind).parent))
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # as Python does: a backend's hook reports the exception to the other ranks
        return 130 if sys.exc_info()[0] is KeyboardInterrupt else 1
    return 0
