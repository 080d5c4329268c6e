"""``hvd.elastic``: training that continues in the same processes after a failed collective or a change of hosts.

Commits exist only in the workers' memory, and torchrun restarts all workers when one worker fails: write checkpoints too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from dualtrain.hvd.basics import announce_end_at_exit, await_rejoin, engine, is_initialized
from dualtrain.hvd.elastic.common import ObjectState, State, run_fn
from dualtrain.hvd.elastic.sampler import ElasticSampler
from dualtrain.hvd.elastic.state import TorchState
from dualtrain.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from dualtrain.hvd.mpi_ops import init, shutdown
from dualtrain.hvd.rejoin import NEEDS_ALL

P = ParamSpec("P")
R = TypeVar("R")

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]


def run(func: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``train(state, ...)``: call ``state.sync()``, which copies the root's state to all ranks, then ``train``.

    After a HorovodInternalError in either call, the state of the last commit or sync is restored; after a
    HostsUpdatedInterrupt the state does not change. In both cases Horovod is shut down and initialized again, the reset
    callbacks run, and then ``state.sync()`` and ``train`` are called again. If hosts were only removed, ``state.sync()`` is
    skipped. Other exceptions are raised to the caller. If another rank has failed, or its process has ended normally,
    HorovodInternalError is raised to the caller too, because that rank's process cannot join the world again.

    Call no collective between ``init`` and ``train``: a process that joins the job later would call it while the other
    ranks call ``state.sync()``.
    """

    @functools.wraps(func)
    def train(*args: P.args, **kwargs: P.kwargs) -> R:
        announce_end_at_exit()
        return func(*args, **kwargs)

    return run_fn(train, _reset)


def _reset() -> None:
    failed = engine().failed_peer() if is_initialized() else None
    shutdown()
    if failed is not None:
        raise HorovodInternalError(f"{failed}\n{NEEDS_ALL}")
    await_rejoin()
    init()
