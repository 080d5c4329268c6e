"""The name of the job that a world is of."""

from __future__ import annotations

from dualtrain.launchers import World


def job_of(world: World, timeout: float) -> str:
    """Name of the job, which its restarts have too and no other job; empty where its launcher has none.

    Not collective. Under torchrun it is in the agents' store, and blocks for ``timeout`` seconds at most.

    Raises:
        UserError: that store cannot be reached.
    """
    if world.job or not world.job_key:
        return world.job
    from dualtrain.backends.torch import job_in_store

    return job_in_store(world, timeout)
