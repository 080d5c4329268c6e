"""dualtrain on the backend and with the transport that ``option`` names: "torch/shm", for example."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import torch
from torch.nn import functional

import dualtrain
from dualtrain.backends import Backend
from dualtrain.bench.contenders import Contender, Steps
from dualtrain.bench.plan import STALL_STEPS
from dualtrain.bench.workloads import Task, Tensors
from dualtrain.errors import UserError


class Ours(Contender):
    """Training loop with dualtrain's public interface, as in the README."""

    def __init__(self, option: str, device: torch.device) -> None:
        name, _, transport = option.partition("/")
        self.backend = connected(name, transport, device)
        self.rank, self.size, self.device = self.backend.rank, self.backend.size, self.backend.device

    def train(self, task: Task) -> Steps:
        """See the base class."""
        model = task.model()
        dualtrain.broadcast_parameters(model, self.backend)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
        optimizer = dualtrain.DistributedOptimizer(optimizer, model.named_parameters(), backend=self.backend)
        for inputs, targets in task.batches(self.rank):
            optimizer.zero_grad()
            with task.autocast():
                loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            yield
        return model

    def allreduce(self, tensor: torch.Tensor) -> None:
        """See the base class."""
        self.backend.allreduce_(tensor, "sum")

    def barrier(self) -> None:
        """See the base class."""
        self.backend.barrier()

    def metric(self, value: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return self.backend.allreduce(value, name="loss")

    def allreduce_buffer(self, tensor: torch.Tensor) -> None:
        """See the base class. Uses the primitive that gradients use."""
        self.backend.start_sum(tensor, "sweep").wait()

    def buffer(self, numbers: int) -> torch.Tensor | None:
        """See the base class. Allocates the memory that gradient buckets use."""
        return self.backend.new_buffer(numbers, torch.float32, self.device)

    def feed(self, folder: str, batch: int) -> int:
        """See the base class."""
        from dualtrain.data import Batch, load_data
        from dualtrain.data.sampler import Sampler, part_of_rank

        train = load_data("mnist", folder).train
        sampler = Sampler(len(train), batch * self.size, 0, False)
        batches = (Batch(part_of_rank(sampler.batch(0, n), self.rank, self.size), 0) for n in range(sampler.batches))
        return sum(len(targets) for _, targets in train.stream(batches, self.device))

    def stall(self, task: Task, folder: Path) -> float:
        """See the base class. The loop waits for the copy of the state; a thread writes the file."""
        from dualtrain.run_folder.checkpoint import Packed
        from dualtrain.run_folder.checkpoint_writer import Writer
        from dualtrain.run_folder.folder_lock import FolderLock

        model = task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
        trainer = dualtrain.Trainer(model, optimizer, backend=self.backend)
        (folder / "checkpoints").mkdir(exist_ok=True)
        writer = Writer(folder, 1, print, 60.0, FolderLock())
        batches = task.distinct_batches(self.rank)[:STALL_STEPS]
        expected = len(batches[0][1]) * self.size

        def steps(save: int) -> float:
            """Return how long the steps take, in seconds; if ``save`` is not 0, first start checkpoint ``save``."""
            self.wait_for_gpu()  # kernels of other steps must not count as the checkpoint's time
            began = time.perf_counter()
            if save:
                state = trainer.state_dict()
                if self.rank == 0:
                    writer.write(save, Packed(state))
            for batch in batches:
                trainer.step([batch], expected)
            self.wait_for_gpu()
            return time.perf_counter() - began

        steps(save=0)  # warm-up
        baseline = steps(save=0)
        stalled = steps(save=1) - baseline
        writer.wait()
        return stalled

    def trainer(self, steps: int) -> dict[str, float]:
        """See the base class. Both loops run in one process, because processes differ in speed.

        The loops alternate in blocks of a fifth of ``steps``. The first block of each loop is a warm-up.
        """
        batch = torch.ones(1, 1, device=self.device), torch.zeros(1, dtype=torch.int64, device=self.device)
        ways = {"by hand": _by_hand(self.backend), "trainer": _by_trainer(self.backend)}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for name in islice(cycle(ways), 2 * 6):
            for _ in range(steps // 5):
                started = time.perf_counter()
                ways[name](batch)
                times[name].append(time.perf_counter() - started)
        return {name: statistics.median(seconds[steps // 5 :]) for name, seconds in times.items()}

    def close(self) -> None:
        """See the base class."""
        self.backend.close()


def _by_hand(backend: Backend) -> Callable[[Tensors], object]:
    model = torch.nn.Linear(1, 2, bias=False).to(backend.device)
    optimizer = dualtrain.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), backend=backend)

    def step(batch: Tensors) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def _by_trainer(backend: Backend) -> Callable[[Tensors], object]:
    model = torch.nn.Linear(1, 2, bias=False).to(backend.device)
    trainer = dualtrain.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), backend=backend)
    return lambda batch: trainer.step([batch], backend.size)


def connected(name: str, transport: str, device: torch.device) -> Backend:
    """Connect to the other ranks; on the CPU, also call ``keep_freed_memory``. Collective.

    Raises:
        UserError: ``transport`` requests shared memory, which these ranks or this device cannot use.
    """
    backend = dualtrain.connect(name, device=device, groups=False, transport=transport)
    if device.type == "cpu":
        dualtrain.keep_freed_memory()
    if transport == "shm" and not backend.transport.startswith("shm"):
        raise UserError(f"there is no shared memory for these ranks and device: dualtrain runs over {backend.transport}")
    return backend


def start(option: str, device: torch.device) -> Contender:
    """Join the world and return the contender; see ``contenders``."""
    return Ours(option, device)
