"""Joining the world with each backend in turn, and what an allreduce takes there."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from dualtrain.backends import Backend, ReduceOp, connect
from dualtrain.errors import BackendError, UserError
from dualtrain.launchers import World

SIZES = (4, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
_MARGIN_SECONDS = 5.0  # the library's own message comes at its timeout, and says more than ours


@dataclass
class Probe:
    """How one backend did on this rank: a ``backend``, left open, or an ``error``. ``seconds`` are those of ``SIZES``."""

    name: str
    backend: Backend | None = None
    error: str | None = None
    seconds: list[float] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Plain values, to be sent to rank 0."""
        transport = self.backend.transport if self.backend else None
        device = str(self.backend.device) if self.backend else None
        return {"error": self.error, "transport": transport, "device": device, "seconds": self.seconds}


def probe(name: str, world: World, timeout: float) -> Probe:
    """Joins the world and measures. Collective; no wait lasts much longer than ``timeout`` seconds. Raises nothing."""
    found = Probe(name)
    joining = threading.Thread(target=_join, args=(found, world, timeout), name=f"doctor-{name}", daemon=True)
    joining.start()
    joining.join(timeout + _MARGIN_SECONDS)
    if joining.is_alive():
        # Horovod over MPI waits without a bound; what becomes of the thread no longer matters.
        late = Probe(name)
        late.error = (
            f"{name} did not start on rank {world.rank} within {timeout:g} s: another rank has not come, or cannot be "
            "reached; look for its message, and check that all processes were started"
        )
        return late
    if found.backend is not None:
        try:
            found.seconds = [_measure(found.backend, size) for size in SIZES]
        except (BackendError, RuntimeError) as error:
            found.error = " ".join(str(error).split())
    return found


def _join(found: Probe, world: World, timeout: float) -> None:
    try:
        found.backend = connect(found.name, world=world, timeout=timeout, groups=False, transport="native")
    except Exception as error:  # whatever a library throws: this is what the doctor is there to report
        known = isinstance(error, UserError | BackendError)
        found.error = " ".join((str(error) if known else f"{type(error).__name__}: {error}").split())


def _measure(backend: Backend, size: int) -> float:
    """The median seconds of an allreduce of ``size`` bytes, through the primitive that gradients take.

    Raises:
        BackendError: it failed, or its sum is wrong.
    """
    values = torch.ones(size // 4, device=backend.device)
    backend.barrier()
    taken = []
    for repetition in range(21 if size <= 1 << 20 else 6):
        began = time.perf_counter()
        backend.start_allreduce(values, ReduceOp.SUM, f"doctor.{size}").wait()
        if values.is_cuda:
            torch.cuda.synchronize(values.device)
        taken.append(time.perf_counter() - began)
        if repetition == 0:
            if not bool((values == backend.size).all()):
                raise BackendError(f"the sum of {size} bytes is wrong on rank {backend.rank}: this build cannot be used")
            values.zero_()  # the numbers would grow without end
    return statistics.median(taken[1:])


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes per second through each rank's link, as nccl-tests counts them: 2 (n - 1) / n times the algorithm's."""
    return 2 * (ranks - 1) / ranks * size / seconds if seconds else 0.0
