"""Start of a contender in fresh processes, and collection of its ranks' output.

To save the start-up time of launchers, the bench itself starts the ranks of Horovod over Gloo, and those that torchrun
could start. It sets the environment variables that horovodrun or torchrun would set. For Horovod over Open MPI, it runs the
mpirun command that horovodrun would run; with another MPI, it runs horovodrun itself. With --launch, the user's command
starts the ranks of all contenders. None of this changes the time of a step.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from dualtrain.bench.meet import free_port
from dualtrain.bench.plan import GLOO, MPI, OURS, TRAINER, Entry
from dualtrain.bench.virtual_nodes import INTERFACE, Node
from dualtrain.bench.worker import MARK
from dualtrain.launchers import World

TIMEOUT_SECONDS = 240.0
#: The options that horovodrun 0.28.1 gives to Open MPI's mpirun on one host.
OPEN_MPI = ["--allow-run-as-root", "-bind-to", "none", "-map-by", "slot", "-mca", "pml", "ob1", "-mca", "btl", "^openib"]


class LaunchError(Exception):
    """A contender could not be started, failed, or did not end in time. The message is the reason in one line."""


@dataclass(frozen=True)
class LaunchSpec:
    """Launch specification of the contenders.

    Attributes:
        ranks: number of ranks on this host, if ``prefix`` is empty.
        device: "cpu" or "auto".
        folder: working folder; ranks on several hosts must share it.
        prefix: the user's launch command; empty if the bench starts the ranks itself.
        threads: intra-op threads per rank.
        timeout: seconds after which the contender is stopped.
        nodes: virtual nodes, each of which runs an equal number of ranks; empty if all ranks run on this host itself.
    """

    ranks: int
    device: str
    folder: Path
    prefix: tuple[str, ...] = ()
    threads: int = 1
    timeout: float = TIMEOUT_SECONDS
    nodes: tuple[Node, ...] = ()


def run_entry(entry: Entry, jobs: Sequence[str], spec: LaunchSpec, step_fraction: float) -> list[dict[str, Any]]:
    """Run a contender and return the results of all its ranks, in any order. Blocks until its processes have ended.

    Raises:
        LaunchError: a process cannot be started or failed, the timeout expired, or the launcher has mixed the lines of
            several ranks.
    """
    program = [sys.executable, "-m", "dualtrain.bench.worker", entry.module, ",".join(jobs)]
    program += [f"--device={spec.device}", f"--folder={spec.folder.resolve()}", f"--launched={time.time()}"]
    program += [f"--step-fraction={step_fraction}"] + [f"--option={entry.option}"] * bool(entry.option)
    meet = entry.needs != "horovod" and entry.module not in (OURS, TRAINER)
    return results_in(run_program(program, entry.starter, replace(spec, ranks=entry.ranks or spec.ranks), meet=meet))


def run_program(program: Sequence[str], starter: str, spec: LaunchSpec, meet: bool = False) -> str:
    """Run ``program`` on all ranks and return their output. Blocks until the processes have ended.

    If ``meet`` is true and the user's command starts the ranks, ``program`` gets ``--meet`` (see ``worker.py``).

    Raises:
        LaunchError: a process cannot be started or failed, or the timeout expired.
    """
    if spec.prefix:
        flags = [f"--meet=meet-{secrets.token_hex(4)}"] if meet else []
        return _run_commands([([*spec.prefix, *program, *flags], {})], spec)
    if starter == MPI and _open_mpi():
        return _run_commands([([_program_path("mpirun"), *OPEN_MPI, "-H", f"localhost:{spec.ranks}", *program], {})], spec)
    if starter not in ("ranks", GLOO):
        command, *flags = starter.split()
        return _run_commands([([_program_path(command), *flags, "-np", str(spec.ranks), *program], {})], spec)
    with rank_environments(starter, spec) as environments:
        return _run_commands([(program, environment) for environment in environments], spec)


@contextmanager
def rank_environments(starter: str, spec: LaunchSpec) -> Iterator[list[dict[str, str]]]:
    """Yield each rank's environment variables: horovodrun's if ``starter`` is ``GLOO``, else torchrun's.

    Start the ranks and wait for them inside the ``with`` block: with ``GLOO``, Horovod's rendezvous server runs until the
    block ends.
    """
    worlds = _worlds(spec)
    address = spec.nodes[0].address if spec.nodes else "127.0.0.1"
    if starter != GLOO:
        shared: dict[str, object] = {"WORLD_SIZE": spec.ranks, "LOCAL_WORLD_SIZE": worlds[0].local_size}
        shared |= {"MASTER_ADDR": address, "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "bench"}
        shared |= {"GLOO_SOCKET_IFNAME": INTERFACE} if spec.nodes else {}
        ranks = [{"RANK": world.rank, "LOCAL_RANK": world.local_rank, "GROUP_RANK": world.cross_rank} for world in worlds]
        yield [_as_text({**shared, **each}) for each in ranks]
        return
    from dualtrain.backends.horovod_start import description
    from dualtrain.rendezvous.hosts import loopback
    from dualtrain.rendezvous.http_store import HttpStore

    listen = partial(HttpStore, address)
    with closing(spec.nodes[0].call_on_network(listen) if spec.nodes else listen()) as store:
        shared = {"NCCL_SOCKET_IFNAME": INTERFACE if spec.nodes else loopback()}
        shared |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": store.url_prefix, "HOROVOD_GLOO_RENDEZVOUS_PORT": store.port}
        shared |= {"HOROVOD_GLOO_IFACE": INTERFACE} if spec.nodes else {}
        names = [spec.nodes[world.cross_rank].name if spec.nodes else socket.gethostname() for world in worlds]
        yield [
            _as_text({**description(world), **shared, "HOROVOD_HOSTNAME": name})
            for world, name in zip(worlds, names, strict=True)
        ]


def _worlds(spec: LaunchSpec) -> list[World]:
    """Return each rank's world. Consecutive ranks are on one node, and each node has the same number of ranks."""
    nodes = max(1, len(spec.nodes))
    local_size = spec.ranks // nodes
    return [World(rank, spec.ranks, rank % local_size, local_size, rank // local_size, nodes) for rank in range(spec.ranks)]


def _as_text(values: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


@cache
def _open_mpi() -> bool:
    """Return whether this host's mpirun is Open MPI's."""
    try:
        done = subprocess.run(
            [_program_path("mpirun"), "--version"], capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "Open MPI" in done.stdout


def results_in(text: str) -> list[dict[str, Any]]:
    """Return the results in a launcher's output. Launchers may write a prefix before each line of a rank.

    Raises:
        LaunchError: the launcher has mixed the lines of several ranks.
    """
    try:
        found = [json.loads(line) for line in re.findall(rf"{re.escape(MARK)}(\{{.*\}})", text)]
    except ValueError:
        found = []
    if len(found) != text.count(MARK):
        raise LaunchError("its output has incomplete lines: its launcher has mixed the lines of several ranks")
    return found


def _run_commands(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], spec: LaunchSpec) -> str:
    """Run the commands at the same time until all have ended or one fails. Return their output.

    Raises:
        LaunchError: a command cannot be started or failed, or the timeout expired.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    common = {"OMP_NUM_THREADS": str(spec.threads), "PATH": path, "TOKENIZERS_PARALLELISM": "false"}
    # Let Python write bytecode for this package, so that a checkout starts as fast as an installed package.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with ExitStack() as stack:
        log: IO[str] = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for command, variables in commands:
                env = {**kept, **common, **variables}
                processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
            failed = failed_statuses(lambda: [process.poll() for process in processes], spec.timeout)
        except OSError as error:
            raise LaunchError(f"{commands[0][0][0]} cannot be started ({error.strerror or error})") from error
        finally:
            for process in processes:
                _end(process)
        log.seek(0)
        text = log.read()
    if failed:
        raise LaunchError(reason_in(text) or f"it ended with status {failed[0]}")
    return text


def failed_statuses(statuses: Callable[[], Sequence[int | None]], timeout: float) -> list[int]:
    """Wait until all processes of a contender have ended or one has failed; return the exit statuses of failed processes.

    ``statuses`` returns the exit status of each process, or ``None`` while the process runs.

    Raises:
        LaunchError: the timeout expired.
    """
    deadline = time.monotonic() + timeout
    while None in (found := statuses()) and not any(found):
        if time.monotonic() > deadline:
            raise LaunchError(f"it did not end within {timeout:.0f} s")
        time.sleep(0.02)
    return [status for status in found if status]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all processes of its process group, some of which may outlive it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):  # the group is empty
            deadline = time.monotonic() + 5.0
            os.killpg(process.pid, number)
            while time.monotonic() < deadline:
                process.poll()  # reap the process, so that it no longer counts as a member of its group
                os.killpg(process.pid, 0)
                time.sleep(0.02)


def reason_in(text: str) -> str:
    """Return the first line that looks like an error, or else the last line, or "" without lines; at most 300 characters.

    mpirun prints each of its messages between two lines of hyphens. Only the first line of such a message is considered.
    """
    text = re.sub(r"(?m)^-{9,}\n((?!Traceback )[^\n]+)\n(?:(?!-{9,}$|Traceback ).*\n)*-{9,}$", r"\1", text)
    lines = [line.strip() for line in text.splitlines() if line.strip() and MARK not in line]
    errors = [line for line in lines if re.search(r"(Error|error|refused|not found)\b.*:|: error", line)]
    return (errors or lines or [""])[0 if errors else -1][:300]


def _program_path(command: str) -> str:
    """Return the program's path in this Python environment, or else on the PATH, or else ``command``."""
    own = Path(sys.executable).parent / command
    return str(own) if own.exists() else shutil.which(command) or command
