"""One rank of one contender: joins the world, measures its list of jobs, and prints their times, a line each.

Started by ``start_contender.py``, never by hand. A raw script must not pay for what it does not use: heavy modules of
dualtrain are loaded before the first step only by the contender itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualtrain.bench.plan import EPOCH_BATCH, EPOCH_LR, SIZES, TRAINER_STEPS
from dualtrain.console import loading
from dualtrain.launchers import detect_world

if TYPE_CHECKING:
    import torch

    from dualtrain.bench.contenders import Contender

MARK = "@dualtrain.bench "


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("jobs", help="separated by commas")
    parser.add_argument("--option", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, help="where checkpoints may go, data lie, and ranks meet")
    parser.add_argument("--meet", help="the name of the file in which rank 0 tells where to meet")
    parser.add_argument("--launched", type=float, default=0.0, help="time.time() when the job was started")
    parser.add_argument("--effort", type=float, default=1.0, help="the share of each workload's steps")
    given = parser.parse_args()
    if given.meet:
        from dualtrain.bench.meet import meet

        meet(given.folder / given.meet)
    contender = _loaded(given)
    for job in given.jobs.split(","):
        for found in _JOBS.get(job, _steps)(contender, job, given):
            # In one write, so that the lines of several ranks do not mix.
            text = json.dumps({"rank": contender.rank, "size": contender.size, **found})
            os.write(sys.stdout.fileno(), f"{MARK}{text}\n".encode())
    contender.close()
    if "mpi4py" not in sys.modules:
        # Torch's Gloo may abort the process at its exit, when all is said ("terminate called without an active
        # exception", torch 2.13, after large allreduces), and taking the modules apart takes a second. Horovod has left
        # MPI by now; mpi4py does so in the ordinary way.
        os._exit(0)


def _loaded(given: Any) -> Contender:
    """The contender, when it has joined the world, with all that its first step loads."""
    with loading():
        contender: Contender = import_module(f"dualtrain.bench.contenders.{given.module}").start(
            given.option, _device(given.device)
        )
        import torch._dynamo  # noqa: F401  # private in torch 2.13: its optimizers import it in their first step

    return contender


def _device(wanted: str) -> torch.device:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # horovodrun's ranks are told nothing
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", detect_world().local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _steps(contender: Contender, job: str, given: Any) -> list[dict[str, Any]]:
    from dualtrain.bench.workloads import Task

    task = Task(job, contender.device, given.effort)
    model = contender.train(task)
    from dualtrain.state import weights_sha256  # after the first step: a raw script has no use for it

    found = {"job": job, "seconds": task.step_seconds(), "first": task.first_step_ended - given.launched}
    return [{**found, "sha256": weights_sha256(model) if contender.rank == 0 else None}]


def _sweep(contender: Contender, job: str, given: Any) -> list[dict[str, Any]]:
    import torch

    found = []
    for size in SIZES[job]:
        tensor = torch.ones(size // 4, device=contender.device)
        seconds = _allreduce_seconds(contender.allreduce, tensor)
        found.append({"job": "sweep", "bytes": size, "way": "tensor", "seconds": seconds})
        buffer = contender.buffer(size // 4)
        if buffer is not None:
            seconds = _allreduce_seconds(contender.allreduce_buffer, buffer)
        found.append({"job": "sweep", "bytes": size, "way": "buffer", "seconds": seconds})
    return found


def _allreduce_seconds(allreduce: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> float:
    size = tensor.numel() * tensor.element_size()
    repetitions = 20 if size <= 1 << 20 else 5 if size <= 16 << 20 else 2 if size <= 128 << 20 else 1
    taken = []
    for number in range(1 + repetitions):
        if number % 10 == 0:
            tensor.fill_(1)  # sums grow without end
        started = time.perf_counter()
        allreduce(tensor)
        if tensor.is_cuda:
            import torch

            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _trainer(contender: Contender, job: str, given: Any) -> list[dict[str, Any]]:
    return [{"job": job, **contender.trainer(TRAINER_STEPS)}]


def _stall(contender: Contender, job: str, given: Any) -> list[dict[str, Any]]:
    from dualtrain.bench.workloads import Task

    return [{"job": job, "seconds": contender.stall(Task("resnet18", contender.device, given.effort), given.folder)}]


def _feed(contender: Contender, job: str, given: Any) -> list[dict[str, Any]]:
    contender.feed(str(given.folder), EPOCH_BATCH)  # imports, and the files into the system's memory
    began = time.perf_counter()
    samples = contender.feed(str(given.folder), EPOCH_BATCH)
    return [{"job": job, "seconds": (time.perf_counter() - began) / samples}]


def _epoch(contender: Contender, job: str, given: Any) -> list[dict[str, Any]]:
    run: Any = contender
    return [{"job": job, **run.epoch(str(given.folder), EPOCH_BATCH, EPOCH_LR)}]


_JOBS = {"sweep": _sweep, "large": _sweep, "trainer": _trainer, "stall": _stall, "feed": _feed, "epoch": _epoch}

if __name__ == "__main__":
    main()
