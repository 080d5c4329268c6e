"""Name of the job that a world belongs to."""

from __future__ import annotations

from dualtrain.launchers import World


def job_of(world: World, timeout: float) -> str:
    """Return the job's name; empty if the launcher gives none. Restarts keep the name, and no other job has it.

    Not collective. Under torchrun, reads the name from the agents' store and blocks for ``timeout`` seconds at most.

    Raises:
        UserError: the agents' store cannot be reached.
    """
    if world.job or not world.job_key:
        return world.job
    from dualtrain.backends.torch import job_in_store

    return job_in_store(world, timeout)
