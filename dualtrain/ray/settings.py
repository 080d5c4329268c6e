"""Settings of ``RayExecutor``, and the resources that Ray reserves for it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from dualtrain.errors import UserError


@dataclass(frozen=True)
class Settings:
    """Time limits and network interfaces. Horovod's settings objects have the same attributes, and are accepted too.

    Attributes:
        timeout_s: seconds that each step of the start of the actors may take.
        placement_group_timeout_s: seconds for Ray to reserve resources for all actors.
        nics: network interfaces; only the first one is used.
    """

    timeout_s: float = 300.0
    placement_group_timeout_s: float = 100.0
    nics: Iterable[str] | None = None


@dataclass(frozen=True)
class Placement:
    """Number of actors, and the resources of each.

    Attributes:
        num_workers: number of ranks.
        num_hosts: number of hosts, with the same number of ranks on each; with ``None``, Ray uses as few hosts as it can.
            If the placement group of the calling task is used, this number has no effect.
        cpus: CPUs of each rank.
        gpus: GPUs of each rank.
        current_group: true to use the placement group of the calling task, if there is one.
    """

    num_workers: int
    num_hosts: int | None
    cpus: float
    gpus: float
    current_group: bool

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Resources that Ray reserves, unless it uses the current group.

        With ``num_hosts``, there is one bundle for each host, else one for each rank.
        """
        ranks = self.num_workers // self.num_hosts if self.num_hosts else 1
        bundle = {"CPU": self.cpus * ranks} | ({"GPU": self.gpus * ranks} if self.gpus else {})
        return [dict(bundle) for _ in range(self.num_hosts or self.num_workers)]

    def bundle_of(self, rank: int) -> int:
        """Return the index of the bundle in which the actor of ``rank`` runs."""
        return rank * len(self.bundles) // self.num_workers


def placement(
    num_workers: int | None,
    num_hosts: int | None,
    num_workers_per_host: int,
    cpus_per_worker: float,
    use_gpu: bool,
    gpus_per_worker: float | None,
    use_current_placement_group: bool,
) -> Placement:
    """Return the placement that the arguments of ``RayExecutor`` describe.

    Raises:
        UserError: both or neither of ``num_workers`` and ``num_hosts`` are given; the number of ranks, hosts or ranks per
            host is not a whole number above 0; ``gpus_per_worker`` is given (and not 0) without ``use_gpu``; or a rank's
            number of CPUs or GPUs is negative or not finite, or both numbers are 0.
    """
    if (num_workers is None) == (num_hosts is None):
        raise UserError(
            f"RayExecutor got num_workers={num_workers} and num_hosts={num_hosts}: give one of them, and with num_hosts "
            "also num_workers_per_host"
        )
    counts: dict[str, Any] = (
        {"ranks": num_workers} if num_hosts is None else {"hosts": num_hosts, "ranks per host": num_workers_per_host}
    )
    for what, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UserError(f"RayExecutor cannot have {count!r} {what}: give a whole number from 1")
    size = math.prod(counts.values())
    if gpus_per_worker and not use_gpu:
        raise UserError("gpus_per_worker is given without use_gpu=True: add use_gpu=True, or leave gpus_per_worker out")
    gpus = (gpus_per_worker or 1) if use_gpu else 0
    for name, value in (("cpus_per_worker", cpus_per_worker), ("gpus_per_worker", gpus)):
        if not isinstance(value, Real) or not 0 <= value < math.inf:
            raise UserError(f"RayExecutor({name}={value!r}) is not a finite number from 0: correct it, or leave it out")
    if not cpus_per_worker and not gpus:
        raise UserError("RayExecutor(cpus_per_worker=0) reserves nothing for a rank: give a number above 0, such as 0.5")
    return Placement(size, num_hosts, cpus_per_worker, gpus, use_current_placement_group)
