"""The part of ``RayExecutor`` that uses Ray: a placement group, and an actor for each rank.

No other file of dualtrain imports ray.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dualtrain.errors import UserError
from dualtrain.functions.rank import prepare
from dualtrain.launchers import new_job, without_launchers
from dualtrain.ray.settings import Placement
from dualtrain.rendezvous.hosts import identity
from dualtrain.rendezvous.meeting_point import reserve

_POLL_SECONDS = 1.0


class Worker:
    """An actor that is one rank. It keeps the user's object between calls."""

    def __init__(self, rank: int, size: int) -> None:
        self._name = f"rank {rank} of {size}"
        self._executable: Any = None

    def __repr__(self) -> str:
        return self._name  # Ray writes this text before the actor's output and into its errors

    def place(self) -> tuple[int, list[str]]:
        """Return the identity of this host, and the ids of this actor's GPUs."""
        return identity(), [str(gpu) for gpu in ray.get_gpu_ids()]

    def reserve(self, single_host: bool) -> tuple[tuple[str, int], str]:
        """Listen on the port at which this rank will serve the job's store; return the address and a new secret."""
        return reserve(single_host)

    def set_variables(self, variables: Mapping[str, str]) -> None:
        """Set the environment variables that make this process a rank, and prepare it (see ``functions/rank.py``)."""
        # Ray's workers inherit the variables of the process that started Ray, which may have had a rank of its own.
        for name in set(os.environ) - set(without_launchers(os.environ)):
            del os.environ[name]
        os.environ.update(variables)
        prepare()

    def make(self, cls: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Create the object that ``execute`` passes to functions."""
        self._executable = None if cls is None else cls(*args, **kwargs)

    def execute(self, function: Callable[[Any], Any]) -> Any:
        """Call ``function`` with this rank's object, and return the result.

        If the function raises, leave the world of ``dualtrain.hvd``, if there is one, so that other ranks do not wait.
        """
        try:
            return function(self._executable)
        except BaseException:
            hvd = sys.modules.get("dualtrain.hvd")
            if hvd is not None:
                hvd.shutdown()
            raise


class Actors:
    """The actors of all ranks, in rank order, and their placement group.

    Raises:
        UserError: Ray is not initialized, or does not reserve a new placement group within ``seconds``.
    """

    def __init__(self, placement: Placement, seconds: float) -> None:
        require_ray()
        current = get_current_placement_group() if placement.current_group else None
        self._own_group = None if current is not None else _make_group(placement, seconds)
        worker, size = ray.remote(Worker), placement.num_workers
        job = new_job()
        self.workers: list[Any] = []
        try:
            for rank in range(size):
                options = worker.options(
                    name=f"dualtrain-{job}-rank-{rank}-of-{size}",  # Ray's error about a dead actor contains this name
                    num_cpus=placement.cpus,
                    num_gpus=placement.gpus,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=current or self._own_group,
                        placement_group_bundle_index=-1 if self._own_group is None else placement.bundle_of(rank),
                    ),
                )
                self.workers.append(options.remote(rank, size))
        except BaseException:
            self.end()
            raise

    def call(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Start a method on each actor, with that actor's arguments; return references to the results."""
        pairs = zip(self.workers, arguments, strict=True)
        return [getattr(worker, method).remote(*each) for worker, each in pairs]

    def end(self) -> None:
        """End the actors' processes, and remove the placement group that was made for them."""
        workers, group = self.workers, self._own_group
        self.workers, self._own_group = [], None
        if not ray.is_initialized():
            return  # ray.shutdown() has ended them, and the calls below would start a new Ray
        for worker in workers:
            with suppress(ray.exceptions.RayError, ValueError):  # an actor of an earlier Ray, which was shut down
                ray.kill(worker)
        if group is not None:
            remove_placement_group(group)


def require_ray() -> None:
    """Raise UserError if Ray is not initialized. Without this check, Ray's functions would start a new Ray on this host."""
    if not ray.is_initialized():
        raise UserError("Ray is not initialized: call ray.init() before start()")


def results(references: Sequence[Any], seconds: float | None, what: str) -> list[Any]:
    """Return the results of calls. Blocks until all calls have ended or one call has failed, for ``seconds`` at most.

    If ``seconds`` is ``None``, there is no limit.

    Raises:
        UserError: the calls take longer.
        RayError: a call failed.
    """
    try:
        return list(ray.get(list(references), timeout=seconds))
    except ray.exceptions.GetTimeoutError:
        raise UserError(
            f"{what} took longer than {seconds:g} s: look at the workers with `ray status`, or give a larger timeout_s"
        ) from None


def _make_group(placement: Placement, seconds: float) -> PlacementGroup:
    """Make a placement group. Blocks until Ray has reserved it. Raises UserError if this takes longer than ``seconds``."""
    bundles = placement.bundles
    group = placement_group(bundles, strategy="STRICT_SPREAD" if placement.num_hosts else "PACK")
    deadline, reserved = time.monotonic() + seconds, False
    try:
        while not reserved and (left := deadline - time.monotonic()) > 0:
            reserved = group.wait(min(left, _POLL_SECONDS))  # Ctrl-C has no effect before this call returns
    except BaseException:  # Ctrl-C, for example
        remove_placement_group(group)
        raise
    if not reserved:
        remove_placement_group(group)
        raise UserError(
            f"Ray could not reserve {len(bundles)} times {bundles[0]} within {seconds:g} s; Ray has only "
            f"{ray.available_resources()} available: give fewer workers, or a larger placement_group_timeout_s"
        )
    return group
