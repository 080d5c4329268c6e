"""Functions that Spark, Ray and ``horovod.run`` run. The training function is written for Horovod."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

SLEEP_SECONDS = 120.0


def train(steps: int, lr: float = 0.1) -> dict[str, Any]:
    """Train a linear model as Horovod's examples do; return ranks and sizes, the library's name and the weights."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(3.0) + hvd.rank() - step).square().mean().backward()
        optimizer.step()
    place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
    weights = [round(value, 5) for value in model.weight.flatten().tolist()]
    name = hvd.allreduce.__module__.partition(".")[0]
    hvd.shutdown()
    return {"place": place, "library": name, "weights": weights}


def launcher() -> str:
    """Return the name of the launcher that started this rank."""
    from dualtrain.launchers import detect_world

    return detect_world().launcher


def fails() -> None:
    """Raise on rank 1, while rank 0 waits for it in ``init``."""
    import horovod.torch as hvd

    if os.environ["RANK"] == "1":
        raise ValueError("no such thing")
    hvd.init()


def dies() -> None:
    """Kill the process of rank 1, while rank 0 sleeps."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(SLEEP_SECONDS)


def fails_while_rank_0_sleeps(file: str) -> None:
    """Raise on rank 1 when rank 0 has written its process id to ``file``. Rank 0 then sleeps, outside of any collective."""
    if os.environ["RANK"] == "0":
        with open(f"{file}.new", "w") as new:
            new.write(str(os.getpid()))
        os.rename(f"{file}.new", file)
        time.sleep(SLEEP_SECONDS)
    while not os.path.exists(file):
        time.sleep(0.05)
    raise ValueError("no such thing")
