"""Detection of the launcher that started this process, and of the process's rank in the world.

Other modules get a :class:`World`, and do not read the launchers' variables for rank and size.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path

from dualtrain.errors import UserError

_LARGEST_SIZE = 2**31 - 1  # sockets and torch's stores take numbers of 32 bits


@dataclass(frozen=True)
class World:
    """Rank and size of one process's world, as its launcher describes them.

    Attributes:
        rank, size: this process's rank in the world, and the number of the world's processes.
        local_rank, local_size: this process's rank among the processes on this host, and the number of these processes.
        cross_rank, cross_size: this host's rank among the hosts that have a process with this local rank, and the number of
            these hosts.
        launcher: name of the launcher; "none" for a process that was started without a launcher.
        rendezvous: (host, port) at which the ranks meet, if the launcher provides an address.
        ports: number of consecutive ports, from the port of ``rendezvous`` on, that rank 0 may try. More than 1 if the
            launcher does not reserve a port.
        secret: text that only the processes of this job know, if the launcher or the user has given them a secret.
        evidence: (name, value) of the variables that ranks, sizes and ``rendezvous`` come from, for messages and reports.
        name: name of a world that has only some of the job's processes; empty for the world of all processes.
        job: the job's name, the same after a restart and different for every job; empty if the launcher gives none.
        job_key: key under which torchrun's store keeps the job's name over restarts; empty without such a store.
        served: true if the parent process of a rank serves the ranks' store. All worlds of the job then share this store.

    Raises:
        UserError: ``rank`` is not a whole number from 0 to ``size`` - 1, or ``size`` is not a whole number below 2³¹; or
            ``size`` is above 1, and ``rendezvous`` is neither ``None`` nor an address.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    launcher: str = "none"
    rendezvous: tuple[str, int] | None = None
    ports: int = 1
    secret: str = field(default="", repr=False)
    evidence: tuple[tuple[str, str], ...] = ()
    name: str = ""
    job: str = ""
    job_key: str = ""
    served: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.rank, Integral) and isinstance(self.size, Integral)):
            raise UserError(
                f"rank {self.rank!r} and size {self.size!r} are not two whole numbers: give World whole numbers, such as "
                "int(os.environ['RANK'])"
            )
        if not 0 <= self.rank < self.size <= _LARGEST_SIZE:
            valid = "ranks go from 0 to the size minus 1" if self.size <= _LARGEST_SIZE else "no job has so many ranks"
            given = f"rank {self.rank} in a world of {self.size}"
            if self.launcher == "none":
                raise UserError(f"{given} does not exist: {valid}; give World the rank and the size of this process")
            raise UserError(
                f"{self.launcher} gave {given} ({self.because()}): "
                f"{valid}; start all processes with one launcher, from a clean environment"
            )
        # Messages between the ranks contain these numbers as JSON, which cannot encode numpy's integers.
        object.__setattr__(self, "rank", int(self.rank))
        object.__setattr__(self, "size", int(self.size))
        match self.rendezvous:
            case (str() as host, Integral() as port) if 0 < port < 65536 and _can_be_host(host):
                object.__setattr__(self, "rendezvous", (host, int(port)))
            case _ if self.rendezvous is not None and self.size > 1:  # a single rank needs no address
                raise UserError(
                    f"rendezvous={self.rendezvous!r} is not an address: give World the host of rank 0 as text, and a port "
                    'from 1 to 65535 as a number, such as ("127.0.0.1", 29500)'
                )

    def because(self) -> str:
        """Return ``evidence`` as text for messages."""
        return " ".join(f"{name}={value}" for name, value in self.evidence) or "no launcher variable is set"

    def placed(self, rank: int, hosts: Sequence[Hashable]) -> World:
        """Return the world of ``rank``. Sizes, local and cross ranks follow from ``hosts``, the host of each rank."""
        host = hosts[rank]
        local_rank = hosts[:rank].count(host)
        # The hosts that have a process with this local rank, in the order of their first rank.
        across = [other for other in dict.fromkeys(hosts) if hosts.count(other) > local_rank]
        return replace(
            self,
            rank=rank,
            size=len(hosts),
            local_rank=local_rank,
            local_size=hosts.count(host),
            cross_rank=across.index(host),
            cross_size=len(across),
        )

    @property
    def single_host(self) -> bool:
        """Return whether every rank is on this host."""
        return self.local_size == self.size


#: Environment variable of ranks that dualtrain has started: "1", or "spark" or "ray" if it used that system.
SPAWNED = "DUALTRAIN_SPAWNED"
#: Environment variable of the job's shared secret; the user or a launch script sets it if the launcher has none.
SECRET = "DUALTRAIN_SECRET"
#: Environment variable of the job's name; the user or a launch script may set it if the launcher gives none.
JOB = "DUALTRAIN_JOB"
#: Exit statuses of a rank of the launcher "spawn" after an error that a restart may avoid: a transient UserError, or a
#: NotSavedError. If no restart follows, the job's status is 2 or 1 instead.
TRY_AGAIN, NOT_SAVED = os.EX_TEMPFAIL, os.EX_IOERR
_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # the name is a part of folders' names
_SRUN_PORTS = 16


def _can_be_host(text: str) -> bool:
    """Return whether the socket functions accept ``text`` as a host. They raise UnicodeError for a text such as "a..b"."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return True


class _Variables:
    """A launcher's environment variables; :meth:`text` records those that it reads, as evidence.

    Invalid values raise UserError, and so do missing ones, except in :meth:`text` and where there is a default.
    """

    def __init__(self, launcher: str, env: Mapping[str, str]) -> None:
        self.launcher = launcher
        self.env = env
        self.seen: list[tuple[str, str]] = []

    def text(self, name: str) -> str | None:
        value = self.env.get(name)
        if value is not None:
            self.seen.append((name, value))
        return value

    def number(self, name: str, default: int | None = None) -> int:
        if default is not None and name not in self.env:
            return default
        return self.parse_number(name, self.require(name))

    def require(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            found = [other for other in sorted(self.env) if re.fullmatch(_VARIABLES[self.launcher], other)]
            raise UserError(
                f"{name} is not set, but {', '.join(found)} {'is' if len(found) == 1 else 'are'}: the process has only "
                "a part of its environment, and would train alone; pass on all of the launcher's variables, or none"
            )
        return value

    def parse_number(self, name: str, value: str) -> int:
        try:
            return int(value)
        except ValueError:
            by_hand = self.launcher == "environment"  # the user's own script, or an unknown program
            cure = "correct or unset it" if by_hand else f"{self.launcher} sets it, so do not override it"
            raise UserError(f"{name}={self.env[name]!r} is not a whole number: {cure}") from None

    def rendezvous(self) -> tuple[str, int] | None:
        """Return (MASTER_ADDR, MASTER_PORT), or None if MASTER_ADDR is not set."""
        host = self.text("MASTER_ADDR")
        if host is None:
            return None
        if not _can_be_host(host):
            raise UserError(
                f"MASTER_ADDR={host!r} is not the name or the address of a host: set it to rank 0's, the same on all ranks"
            )
        port = self.number("MASTER_PORT")
        if not 0 < port < 65536:
            raise UserError(
                f"MASTER_PORT={port} is not a port: set it to a free one from 1 to 65535, the same on all ranks"
            )
        return host, port

    def world(
        self, rank: int, size: int, local_rank: int, local_size: int, rendezvous: tuple[str, int] | None = None
    ) -> World:
        """Make the world, assuming that ranks fill the hosts in order; ``connect`` finds out the actual hosts later."""
        return World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            cross_rank=rank // max(local_size, 1),
            cross_size=max(1, -(-size // max(local_size, 1))),
            launcher=self.launcher,
            rendezvous=rendezvous,
            secret=self.env.get(SECRET, ""),
            evidence=tuple(self.seen),
            job=given_job(self.env),
        )


def _torch_variables(v: _Variables) -> World:
    local = v.number("LOCAL_RANK"), v.number("LOCAL_WORLD_SIZE")
    return v.world(v.number("RANK"), v.number("WORLD_SIZE"), *local, v.rendezvous())


def _torchrun(v: _Variables) -> World:
    world = _torch_variables(v)
    # The run id alone does not identify a job: with --rdzv-endpoint and no --rdzv-id, it is "none". Only the agents' store
    # can keep a name over restarts.
    kept = v.env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return replace(world, job_key=f"dualtrain/job/{v.env['TORCHELASTIC_RUN_ID']}" if kept else "")


def _spawn(v: _Variables) -> World:
    return replace(_torch_variables(v), served=True)


def _horovodrun(v: _Variables) -> World:
    local = v.number("HOROVOD_LOCAL_RANK"), v.number("HOROVOD_LOCAL_SIZE")
    v.require("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    v.number("HOROVOD_GLOO_RENDEZVOUS_PORT")
    return v.world(v.number("HOROVOD_RANK"), v.number("HOROVOD_SIZE"), *local)


def _open_mpi(v: _Variables) -> World:
    local = v.number("OMPI_COMM_WORLD_LOCAL_RANK"), v.number("OMPI_COMM_WORLD_LOCAL_SIZE")
    return v.world(v.number("OMPI_COMM_WORLD_RANK"), v.number("OMPI_COMM_WORLD_SIZE"), *local)


def _pmi(v: _Variables) -> World:
    # MPICH, Intel MPI and MVAPICH: Hydra sets PMI_*, and the local rank and size in MPI_LOCAL*.
    size = v.number("PMI_SIZE")
    return v.world(v.number("PMI_RANK"), size, v.number("MPI_LOCALRANKID", 0), v.number("MPI_LOCALNRANKS", size))


# Slurm reserves this step number and greater ones, for example for batch scripts and shells of salloc: they are not ranks.
_SLURM_RESERVED_STEPS = 0xFFFF_FFF0


def _in_a_step(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in env and step.isdecimal() and int(step) < _SLURM_RESERVED_STEPS


def _srun(v: _Variables) -> World:
    size = v.number("SLURM_NTASKS")
    per_node = v.text("SLURM_STEP_TASKS_PER_NODE") or str(size)  # such as 4(x2),3
    on_first_host = v.parse_number("SLURM_STEP_TASKS_PER_NODE", per_node.partition("(")[0].partition(",")[0])
    ranks = v.number("SLURM_PROCID"), size, v.number("SLURM_LOCALID", 0), on_first_host
    chosen = v.rendezvous()
    step = f"{v.env.get('SLURM_JOB_ID')}.{v.env.get('SLURM_STEP_ID')}"
    world = v.world(*ranks, chosen or _srun_rendezvous(v, single_host=on_first_host == size))
    # Derive a job name in batch jobs only: they are requeued with the same job id. A step of salloc may be a shell in
    # which several runs are started.
    if not world.job and v.env.get("ENVIRONMENT") == "BATCH" and "SLURM_JOB_ID" in v.env:
        cluster = "".join(re.findall(r"[A-Za-z0-9._-]", v.env.get("SLURM_CLUSTER_NAME", "")))
        world = replace(world, job=f"slurm-{cluster}-{step}".replace("--", "-")[:100])
    if chosen is not None:
        return world
    # Other steps may try the same ports: the secret contains the step, so that ranks of different steps do not connect.
    return replace(world, ports=_SRUN_PORTS, secret=f"{step} {world.secret}")


def _srun_rendezvous(v: _Variables, *, single_host: bool) -> tuple[str, int] | None:
    """Return the step's first host (127.0.0.1 if it is the only one), and the first port to try.

    Return ``None`` if there are several hosts, and their names are not in the environment.

    The port is computed from the ids of the job and the step, since srun gives the ranks no way to exchange a free port.
    """
    hosts = v.text("SLURM_STEP_NODELIST") or v.text("SLURM_NODELIST")  # such as gpu[01-03,07],login
    if not single_host and hosts is None:
        return None
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts or "")[0])  # type: ignore[index]
    number = v.number("SLURM_JOB_ID", 0) * 97 + v.number("SLURM_STEP_ID", 0)
    return "127.0.0.1" if single_host else first, 15000 + number * _SRUN_PORTS % 15000


def _by_pmi(env: Mapping[str, str]) -> bool:
    # srun may set PMI_* too (--mpi=pmi2), with the values of its own variables. If the values differ, an mpiexec inside the
    # step has set PMI_*.
    same = env.get("PMI_RANK") == env.get("SLURM_PROCID") and env.get("PMI_SIZE") == env.get("SLURM_NTASKS")
    return "PMI_RANK" in env and not (_in_a_step(env) and same)


def _by_ray(env: Mapping[str, str]) -> bool:
    # dualtrain.ray sets SPAWNED. Ray Train's workers have RAY_RAYLET_PID and torch's variables instead. Ranks that such a
    # worker starts inherit these, so SPAWNED has precedence.
    train = all(name in env for name in ("RAY_RAYLET_PID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return env.get(SPAWNED, "ray" if train else "") == "ray"


def _environment(v: _Variables) -> World:
    rank, size = v.number("RANK"), v.number("WORLD_SIZE")
    return v.world(rank, size, v.number("LOCAL_RANK", 0), v.number("LOCAL_WORLD_SIZE", size), v.rendezvous())


def new_job() -> str:
    """Return a name for a job that starts now."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def given_job(env: Mapping[str, str] | None = None) -> str:
    """Return the job's name from the environment; empty if it is not set.

    Raises:
        UserError: the name cannot be a part of a folder's name.
    """
    name = (os.environ if env is None else env).get(JOB, "")
    if name and not _JOB_NAME.fullmatch(name):
        raise UserError(
            f"{JOB}={name!r} cannot name a job: give it up to 100 letters, digits, dots, underscores and hyphens, "
            "beginning with a letter or a digit"
        )
    return name


def spawned(
    rank: int,
    size: int,
    rendezvous: tuple[str, int],
    secret: str,
    job: str,
    local_rank_and_size: tuple[int, int] | None = None,
    starter: str = "1",
) -> dict[str, str]:
    """Return the environment variables of rank ``rank`` for a job whose ``size`` ranks dualtrain starts.

    After a restart, the ranks must get the same ``job``. Without ``local_rank_and_size``, all ranks are on this host.
    ``starter`` is what starts the ranks: ``"spark"``, ``"ray"``, or ``"1"`` for this process.
    """
    host, port = rendezvous
    local_rank, local_size = (rank, size) if local_rank_and_size is None else local_rank_and_size
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    texts = {SPAWNED: starter, "MASTER_ADDR": host, "MASTER_PORT": str(port), SECRET: secret, JOB: job}
    return texts | {name: str(value) for name, value in numbers.items()}


def without_launchers(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` without the variables that define ranks, worlds and jobs, for a process that gets other values."""
    pattern = "|".join((*_VARIABLES.values(), "TORCHELASTIC_.*", SECRET, JOB))
    return {name: value for name, value in env.items() if not re.fullmatch(pattern, name)}


# The first launcher that is recognised is used. The order is usually from the innermost launcher to the outermost: torchrun
# inside an srun step counts as torchrun. A batch script inside Slurm has no launcher. horovodrun over MPI calls mpirun and
# counts as mpirun.
#
# A spawned rank may start torchrun, horovodrun, mpirun or mpiexec. Their ranks inherit SPAWNED, so "spawn" comes later.
_LAUNCHERS: tuple[tuple[str, Callable[[Mapping[str, str]], bool], Callable[[_Variables], World]], ...] = (
    ("torchrun", lambda env: "TORCHELASTIC_RUN_ID" in env, _torchrun),
    # HOROVOD_RANK alone is not enough: dualtrain.hvd sets it for scripts that read it.
    ("horovodrun --gloo", lambda env: "HOROVOD_GLOO_RENDEZVOUS_ADDR" in env and "HOROVOD_RANK" in env, _horovodrun),
    ("mpirun", lambda env: "OMPI_COMM_WORLD_RANK" in env, _open_mpi),
    ("mpiexec", _by_pmi, _pmi),
    ("spark", lambda env: env.get(SPAWNED) == "spark", _spawn),
    ("ray", _by_ray, _torch_variables),
    ("spawn", lambda env: SPAWNED in env, _spawn),
    ("srun", _in_a_step, _srun),
    ("environment", lambda env: "RANK" in env and "WORLD_SIZE" in env, _environment),
)


# If no launcher is recognised but one of these variables is set, the environment is incomplete, and the process must
# not train alone.
_REMNANTS = {
    "horovodrun --gloo": ("HOROVOD_GLOO_RENDEZVOUS_ADDR",),
    "mpirun": ("OMPI_COMM_WORLD_SIZE",),
    "mpiexec": ("PMI_SIZE",),
    "environment": ("RANK", "WORLD_SIZE"),
}


def detect_world(env: Mapping[str, str] | None = None) -> World:
    """Detect this process's launcher, and return the world that it describes. Without a launcher, the size is 1.

    Raises:
        UserError: the variables of a launcher are incomplete or invalid, or ``DUALTRAIN_JOB`` is invalid.
    """
    env = os.environ if env is None else env
    for name, recognises, read in _LAUNCHERS:
        if recognises(env):
            return read(_Variables(name, env))
    for name, _, read in _LAUNCHERS:
        if any(variable in env for variable in _REMNANTS.get(name, ())):
            read(_Variables(name, env))  # raises: the rank or the size is missing
    return World(job=given_job(env))


# The variables that define a process's rank and world, by the launcher that sets them.
_ENVIRONMENT = r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
_VARIABLES = {
    "torchrun": rf"{_ENVIRONMENT}|TORCHELASTIC_RUN_ID",
    "horovodrun --gloo": r"HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|GLOO_RENDEZVOUS_(ADDR|PORT))",
    "mpirun": r"OMPI_COMM_WORLD_(LOCAL_)?(RANK|SIZE)",
    "mpiexec": r"PMI_(RANK|SIZE)|MPI_LOCAL(RANKID|NRANKS)",
    "spark": rf"{_ENVIRONMENT}|{SPAWNED}",
    "ray": rf"{_ENVIRONMENT}|{SPAWNED}",  # not RAY_RAYLET_PID: every process that Ray starts has it
    "spawn": rf"{_ENVIRONMENT}|{SPAWNED}",
    "srun": r"SLURM_(PROCID|LOCALID|NTASKS|STEP_ID)",
    "environment": _ENVIRONMENT,
}


def refuse_launcher(command: str, processes: str) -> None:
    """Raise UserError if a launcher has started this process, because ``command`` starts processes itself.

    ``processes`` describes these processes in the message: "its contenders", for example.
    """
    world = detect_world()
    if world.launcher != "none":
        raise UserError(
            f"{world.launcher} started this process, but {command} starts {processes} itself: run it once, without a "
            f"launcher ({world.because()})"
        )


def ignored(world: World, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of other launchers in ``env`` that did not determine ``world``."""
    own_pattern, pattern = _VARIABLES.get(world.launcher, ""), "|".join(_VARIABLES.values())
    used = {name for name, _ in world.evidence}
    names = (name for name in sorted(env) if re.fullmatch(pattern, name) and not re.fullmatch(own_pattern, name))
    return {name: env[name] for name in names if name not in used}


def torchrun_is_parent() -> bool:
    """Return whether this process's parent is torchrun's agent.

    The agent sets torchrun's variables for its workers, but does not have them itself.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            return b"TORCHELASTIC_RUN_ID=" not in file.read()
    except OSError:
        return False


def torchrun_error_file() -> Path | None:
    """Return the file in which torchrun's agent looks for the reason why this process failed; ``None`` without an agent."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file) if file else None
