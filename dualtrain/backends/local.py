"""Backend of a single process, which sends nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dualtrain.backends.base import Done, ReduceOp, Work
from dualtrain.backends.collectives import Backend
from dualtrain.launchers import World


class LocalBackend(Backend):
    """Backend for a world of one process: the result of every reduction is the process's own value."""

    name = "local"
    transport = "none"

    def start_allreduce(self, tensor: torch.Tensor, op: ReduceOp, name: str) -> Work[None]:
        return Done()

    def start_broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Work[None]:
        return Done()

    def start_allgather(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Work[None]:
        output.copy_(tensor)
        return Done()

    def start_alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], name: str
    ) -> Work[None]:
        output.copy_(tensor)
        return Done()

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers)]

    def subset(self, ranks: Sequence[int], world: World | None) -> LocalBackend | None:
        return LocalBackend(world, self.device, self.timeout) if world else None

    def disconnect(self) -> None:
        """Do nothing: no connection was opened."""
