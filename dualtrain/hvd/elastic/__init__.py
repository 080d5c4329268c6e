"""``hvd.elastic``: training that survives a failed collective or a change of hosts in processes that go on.

torchrun restarts all workers when one fails, and what is committed here is in their memory: write checkpoints too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from dualtrain.hvd.elastic.common import ObjectState, State, run_fn
from dualtrain.hvd.elastic.sampler import ElasticSampler
from dualtrain.hvd.elastic.state import TorchState
from dualtrain.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from dualtrain.hvd.mpi_ops import init, shutdown

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
    """Decorate ``train(state, ...)``: the state is synced from the root, then ``train`` runs.

    After a HorovodInternalError in either, the state goes back to its last commit; after a HostsUpdatedInterrupt it
    stays as it is. Both times Horovod is shut down and initialised again, the state's reset callbacks run, and it
    starts over. Any other exception goes through.

    ``train`` must not begin with a collective: ranks that start over may still be syncing.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
