"""``dualtrain.run`` and ``horovod.run``: run a function on several ranks of this host."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dualtrain.console import open_closed_streams
from dualtrain.cores import share_of, too_many_ranks, usable_cores
from dualtrain.errors import UserError
from dualtrain.functions.children import run_children
from dualtrain.functions.outcome import results_of
from dualtrain.functions.payload import pickled_call
from dualtrain.horovodize.names import RUN_UNSUPPORTED, is_this_host
from dualtrain.launchers import detect_world, new_job, spawned, without_launchers
from dualtrain.rendezvous.store import store_for_children

T = TypeVar("T")


def run(
    function: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, nproc: int = 1
) -> list[T]:
    """Call ``function(*args, **kwargs)`` on ``nproc`` ranks, each a new process of this host.

    Blocks until all have ended, and returns the results in rank order. The function may be defined in a script or a
    notebook's cell if cloudpickle is installed; otherwise, it must be in a module that the ranks can import. In the
    function, ``connect()`` and ``hvd.init()`` (of ``dualtrain.hvd`` or ``horovod.torch``) join the world of these ranks.
    Functions and results are sent only between this process and its children, over socket pairs that the children inherit.

    Raises:
        RankFailedError: the function raised on a rank, its result cannot be pickled or unpickled, or the process of a rank
            ended before the function returned or with a status other than 0. The other ranks are ended. The function's
            exception is the ``__cause__``, if it is an ``Exception`` that can be pickled and unpickled.
        UserError: ``function`` cannot be called, ``nproc`` is not a whole number above 0 or is too large for this host, the
            function or its arguments cannot be pickled, the processes cannot be started or do not start in time, this
            process is itself one of several ranks, or DUALTRAIN_BACKEND is ``horovod``.
    """
    return run_with(function, args, kwargs, nproc, {}, None)


def run_with(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    nproc: int,
    variables: Mapping[str, str],
    executable: str | None,
) -> list[Any]:
    """Do the same as :func:`run`, but add ``variables`` to the ranks' environment, and use the Python ``executable``."""
    _check(function, nproc)
    payload = pickled_call(function, args, kwargs)
    # Otherwise a socket may get the file descriptor of a standard stream that is closed, and receive what a rank prints.
    open_closed_streams()
    with store_for_children(nproc) as (rendezvous, secret):
        env, job = rank_environment(nproc) | dict(variables), new_job()
        environments = [env | spawned(rank, nproc, rendezvous, secret, job) for rank in range(nproc)]
        results = run_children(range(nproc), nproc, environments, payload, executable)
    return results_of(results)


def rank_environment(local_size: int) -> dict[str, str]:
    """Return the environment for ranks that this process starts: a copy of its own, without the variables of launchers.

    If OMP_NUM_THREADS is not set, it becomes the number of usable cores divided by ``local_size``, at least 1.
    """
    threads = str(share_of(usable_cores(), local_size))
    return {"OMP_NUM_THREADS": threads} | without_launchers(os.environ)


def _check(function: object, nproc: int) -> None:
    if not callable(function):
        raise UserError(f"run() was given {function!r}, which cannot be called: give a function, and its arguments as args")
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise UserError(f"the number of ranks is {nproc!r}: give a whole number from 1")
    if (reason := too_many_ranks(nproc, usable_cores())) is not None:
        raise UserError(f"{nproc} ranks are too many for this host: {reason}")
    refuse_other_backend()
    world = detect_world()
    if world.size > 1:
        raise UserError(
            f"this process is rank {world.rank} of {world.size}, started by {world.launcher}, and run() would start "
            "more ranks on each rank: start the program without a launcher, or call the function itself"
        )


def refuse_other_backend() -> None:
    """Refuse DUALTRAIN_BACKEND=horovod, because ``dualtrain.hvd`` replaces Horovod on the ranks."""
    if os.environ.get("DUALTRAIN_BACKEND") == "horovod":
        raise UserError(
            "DUALTRAIN_BACKEND=horovod requests Horovod itself, which dualtrain replaces on these ranks: unset the "
            "variable, or use Horovod's own horovod.run"
        )


#: Arguments of horovod.run that are ignored, such as those for ssh and those that choose between Gloo and MPI.
_IGNORED = frozenset(
    ["start_timeout", "ssh_port", "ssh_identity_file", "disable_cache", "verbose", "use_gloo", "use_mpi", "mpi_args"]
)
#: All arguments of horovod.run.
ARGUMENTS = {"func", "args", "kwargs", "num_proc", "np", "executable", "network_interface", "network_interfaces"}
ARGUMENTS |= {*RUN_UNSUPPORTED, *_IGNORED}


def horovod_run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    executable: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    **others: Any,
) -> list[Any]:
    """``horovod.run`` on ranks of this host. See :func:`run` for the results and exceptions.

    Horovod's arguments for ssh, logging, the start timeout, and the choice of Gloo or MPI are ignored. Those that request
    other hosts, elastic training or output files are refused.

    Raises:
        TypeError: horovod.run has no such argument.
    """
    if np is not None:
        warnings.warn("np is deprecated, use num_proc instead", DeprecationWarning, stacklevel=2)
        num_proc = np
    for name, value in others.items():
        if name not in RUN_UNSUPPORTED and name not in _IGNORED:
            raise TypeError(f"run() got an unexpected keyword argument {name!r}")
        if name in RUN_UNSUPPORTED and value is not None and not (name == "hosts" and is_this_host(value)):
            raise UserError(
                f"horovod.run({name}={value!r}) is not supported: start the script with torchrun on each host, and call "
                "the function itself"
            )
    interfaces = network_interface or ",".join(network_interfaces or ())
    variables = {"GLOO_SOCKET_IFNAME": interfaces.partition(",")[0]} if interfaces else {}
    return run_with(func, args, kwargs, num_proc, variables, executable)
