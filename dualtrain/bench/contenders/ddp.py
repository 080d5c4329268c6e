"""torch's DistributedDataParallel, with its defaults or tuned as its documentation advises for static models."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from dualtrain.bench.contenders import Contender, Steps
from dualtrain.bench.plan import STALL_STEPS
from dualtrain.bench.workloads import Task

OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "tuned": {"gradient_as_bucket_view": True, "static_graph": True}}


class Ddp(Contender):
    """Training loop with DistributedDataParallel."""

    def __init__(self, option: str, device: torch.device) -> None:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.options = {**OPTIONS[option], "device_ids": [device.index] if device.type == "cuda" else None}

    def train(self, task: Task) -> Steps:
        """See the base class."""
        model = DistributedDataParallel(task.model(), **self.options)
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
        for inputs, targets in task.batches(self.rank):
            optimizer.zero_grad()
            with task.autocast():
                loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            yield
        return model.module  # type: ignore[no-any-return]

    def allreduce(self, tensor: torch.Tensor) -> None:
        """See the base class."""
        dist.all_reduce(tensor)

    def barrier(self) -> None:
        """See the base class."""
        dist.barrier()

    def metric(self, value: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        total = value.clone()
        dist.all_reduce(total)
        return total / self.size

    def stall(self, task: Task, folder: Path) -> float:
        """See the base class. Rank 0 saves; the other ranks wait for rank 0 in the next step's allreduce."""
        model = DistributedDataParallel(task.model(), **self.options)
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
        batches = task.distinct_batches(self.rank)[:STALL_STEPS]

        def steps(save: bool) -> float:
            self.wait_for_gpu()  # kernels of other steps must not count as the checkpoint's time
            began = time.perf_counter()
            if save and self.rank == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, folder / "raw.pt")
            for inputs, targets in batches:
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            self.wait_for_gpu()
            return time.perf_counter() - began

        steps(save=False)
        return -steps(save=False) + steps(save=True)

    def close(self) -> None:
        """See the base class."""
        dist.destroy_process_group()


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``."""
    return Ddp(option, device)
