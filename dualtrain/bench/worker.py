"""One rank of one contender: join the world, measure the jobs, and print each result as one line.

``start_contender.py`` runs this module as a program, and ``forked_ranks.py`` calls :func:`main`. The module imports as
little of dualtrain as possible before the first step: the time from launch to first step includes these imports.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualtrain.bench.plan import EPOCH_BATCH, EPOCH_LR, SIDE_STEPS, SIZES, TRAINER_STEPS
from dualtrain.console import loading
from dualtrain.launchers import detect_world

if TYPE_CHECKING:
    import torch

    from dualtrain.bench.contenders import Contender

MARK = "@dualtrain.bench "


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the jobs on this rank, print their results, and end the process with status 0; with mpi4py, return instead."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("jobs", help="separated by commas")
    parser.add_argument("--option", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, help="folder of checkpoints, data and the rendezvous file")
    parser.add_argument("--meet", help="name of the rendezvous file, for launchers without a rendezvous")
    parser.add_argument("--launched", type=float, default=0.0, help="time.time() when the ranks were launched")
    parser.add_argument("--step-fraction", type=float, default=1.0, help="fraction of each workload's steps to run")
    given = parser.parse_args(arguments)
    if given.meet:
        from dualtrain.bench.meet import meet

        meet(given.folder / given.meet)
    contender = _start_contender(given)
    for job in given.jobs.split(","):
        for found in _JOBS.get(job, _steps)(contender, job, given):
            # One write call, so that the lines of several ranks do not mix.
            text = json.dumps({"rank": contender.rank, "size": contender.size, **found})
            os.write(sys.stdout.fileno(), f"{MARK}{text}\n".encode())
    contender.close()
    if "mpi4py" not in sys.modules:
        # Skip the interpreter's shutdown: it takes a second, and torch's Gloo may abort the process during the shutdown
        # ("terminate called without an active exception", torch 2.13, after large allreduces). With mpi4py, the shutdown
        # is needed, because it finalizes the MPI that mpi4py has initialized. Horovod has already finalized its own MPI.
        os._exit(0)


def _start_contender(given: Any) -> Contender:
    """Start the contender, which joins the world, and import a module that its first step needs.

    Sets ``given.start`` to the seconds from the launch until the contender has joined.
    """
    with loading():
        from dualtrain.bench.contenders import started

        contender = started(given.module, given.option, _device(given.device))
        given.start = time.time() - given.launched
        import torch._dynamo  # noqa: F401  # private in torch 2.5 to 2.15; optimizers import it in their first step

    return contender


def _device(kind: str) -> torch.device:
    """Return this rank's device. Also set the number of threads and, on a GPU, torch's current device."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # horovodrun does not set the number of threads
    if kind == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", detect_world().local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _steps(contender: Contender, job: str, given: Any) -> list[dict[str, Any]]:
    from dualtrain.bench.timed_steps import TimedSteps, run_steps
    from dualtrain.bench.workloads import Task

    contenders = contender.side_by_side()
    fraction = given.step_fraction * (SIDE_STEPS if len(contenders) > 1 else 1)
    parts = {name: TimedSteps(part, Task(job, contender.device, fraction)) for name, part in contenders.items()}
    run_steps([*parts.values()])
    from dualtrain.state import weights_sha256  # imported after the first step, whose time is measured from the launch

    found = []
    for name, steps in parts.items():
        sha256 = weights_sha256(steps.finish()) if contender.rank == 0 else None
        first = steps.first_step_ended - given.launched
        found.append({"part": name, "job": job, "seconds": steps.seconds(), "first": first, "sha256": sha256})
    return found


def _sweep(contender: Contender, job: str, given: Any) -> list[dict[str, Any]]:
    import torch

    found = []
    for size in SIZES[job]:
        tensor = torch.ones(size // 4, device=contender.device)
        seconds = _allreduce_seconds(contender.allreduce, tensor)
        found.append({"job": "sweep", "bytes": size, "way": "tensor", "seconds": seconds})
        # If the contender has no buffers of its own, record its time for plain tensors as its time for buffers.
        buffer = contender.buffer(size // 4)
        if buffer is not None:
            seconds = _allreduce_seconds(contender.allreduce_buffer, buffer)
        found.append({"job": "sweep", "bytes": size, "way": "buffer", "seconds": seconds})
    return found


def _allreduce_seconds(allreduce: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> float:
    size = tensor.numel() * tensor.element_size()
    repetitions = 20 if size <= 1 << 20 else 5 if size <= 16 << 20 else 2 if size <= 128 << 20 else 1
    times = []
    for number in range(1 + repetitions):
        if number % 10 == 0:
            tensor.fill_(1)  # repeated sums would overflow
        started = time.perf_counter()
        allreduce(tensor)
        if tensor.is_cuda:
            import torch

            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _trainer(contender: Contender, job: str, given: Any) -> list[dict[str, Any]]:
    return [{"job": job, **contender.trainer(TRAINER_STEPS)}]


def _stall(contender: Contender, job: str, given: Any) -> list[dict[str, Any]]:
    from dualtrain.bench.workloads import Task

    return [{"job": job, "seconds": contender.stall(Task("resnet18", contender.device, given.step_fraction), given.folder)}]


def _feed(contender: Contender, job: str, given: Any) -> list[dict[str, Any]]:
    contender.feed(str(given.folder), EPOCH_BATCH)  # imports modules and fills the page cache
    began = time.perf_counter()
    samples = contender.feed(str(given.folder), EPOCH_BATCH)
    return [{"job": job, "seconds": (time.perf_counter() - began) / samples}]


def _epoch(contender: Contender, job: str, given: Any) -> list[dict[str, Any]]:
    run: Any = contender
    return [{"job": job, **run.epoch(str(given.folder), EPOCH_BATCH, EPOCH_LR)}]


def _scale(contender: Contender, job: str, given: Any) -> list[dict[str, Any]]:
    import torch

    from dualtrain.bench.scale_plan import SHORT_BYTES, repetitions

    tensor, value = torch.ones(SHORT_BYTES // 4, device=contender.device), torch.ones((), device=contender.device)
    calls: dict[str, Callable[[], object]] = {
        "barrier": contender.barrier,
        "allreduce": lambda: contender.allreduce(tensor.fill_(1)),
        "metric": lambda: contender.metric(value),
    }
    found = {"start": given.start}
    for name, call in calls.items():
        times = []
        for _ in range(2 + repetitions(contender.size)):
            started = time.perf_counter()
            call()
            contender.wait_for_gpu()
            times.append(time.perf_counter() - started)
        found[name] = statistics.median(times[2:])
    return [{"job": name, "seconds": seconds} for name, seconds in found.items()]


#: The jobs that are not workloads. The job of a workload runs its steps (:func:`_steps`).
_JOBS = {
    "scale": _scale,
    "sweep": _sweep,
    "large": _sweep,
    "trainer": _trainer,
    "stall": _stall,
    "feed": _feed,
    "epoch": _epoch,
}

if __name__ == "__main__":
    main()
