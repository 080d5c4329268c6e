"""Probe of one backend: join the world and time allreduces, over the transport that a run would use."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from dualtrain.backends import Backend, connect
from dualtrain.errors import BackendError, UserError, one_line
from dualtrain.launchers import World
from dualtrain.processes import start_thread

SIZES = (4, 64 << 10, 1 << 20, 16 << 20, 64 << 20)  # in bytes
MARGIN_SECONDS = 5.0  # added to the timeout, so that the timeout error of the backend, which says more, comes first


@dataclass
class Probe:
    """Result of probing one backend on this rank.

    Attributes:
        name: the backend's name.
        backend: the backend, left open; ``None`` if it could not join.
        error: why the probe failed, or ``None``.
        seconds: median time of an allreduce, for each of ``SIZES``; empty if the probe failed.
    """

    name: str
    backend: Backend | None = None
    error: str | None = None
    seconds: list[float] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Return the result as plain values."""
        transport = self.backend.transport if self.backend else None
        device = str(self.backend.device) if self.backend else None
        return {"error": self.error, "transport": transport, "device": device, "seconds": self.seconds}


def probe(name: str, world: World, timeout: float) -> Probe:
    """Join the world and time allreduces. Collective; no wait is much longer than ``timeout`` seconds. Raises nothing."""
    result = Probe(name)
    try:
        joining = start_thread(_join, f"doctor-{name}", (result, world, timeout))
    except UserError as error:
        result.error = str(error)
        return result
    joining.join(timeout + MARGIN_SECONDS)
    if joining.is_alive():
        # Horovod over MPI may wait forever: abandon the daemon thread. It may still change ``result``, so do not return it.
        late = Probe(name)
        late.error = (
            f"{name} did not start on rank {world.rank} within {timeout:g} s: another rank is missing or cannot be "
            "reached; look for its message, and check that all processes were started"
        )
        return late
    if result.backend is not None:
        try:
            result.seconds = [_measure(result.backend, size) for size in SIZES]
        except (BackendError, RuntimeError) as error:
            result.error = one_line(error)
    return result


def _join(result: Probe, world: World, timeout: float) -> None:
    try:
        result.backend = connect(result.name, world=world, timeout=timeout, groups=False)
    except Exception as error:  # a library may raise anything, and the doctor reports it
        known = isinstance(error, UserError | BackendError)
        result.error = one_line(error) if known else f"{type(error).__name__}: {one_line(error)}"


def _measure(backend: Backend, size: int) -> float:
    """Return the median seconds of an allreduce of ``size`` bytes, with the same buffers and primitive as gradients.

    Collective. The first allreduce is checked, not timed.

    Raises:
        BackendError: the allreduce failed, or its sum is wrong.
        RuntimeError: torch failed, for lack of GPU memory, for example.
    """
    values = backend.new_buffer(size // 4, torch.float32, backend.device).fill_(1)
    backend.barrier()
    times = []
    for repetition in range(21 if size <= 1 << 20 else 6):
        began = time.perf_counter()
        backend.start_sum(values, f"doctor.{size}").wait()
        if values.is_cuda:
            torch.cuda.synchronize(values.device)
        times.append(time.perf_counter() - began)
        if repetition == 0:
            if not bool((values == backend.size).all()):
                raise BackendError(
                    f"the sum of {size} bytes is wrong on rank {backend.rank}: do not train with this build of the library"
                )
            values.zero_()  # otherwise repeated sums would overflow
    return statistics.median(times[1:])


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth in bytes per second as nccl-tests defines it: 2 (ranks - 1) / ranks × size / seconds.

    Return 0 if ``seconds`` is 0.
    """
    return 2 * (ranks - 1) / ranks * size / seconds if seconds else 0.0
