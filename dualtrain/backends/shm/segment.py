"""Memory that the ranks of a host map together.

It has no name, so that none is left behind however a job ends: the host's first rank makes it (``memfd_create``), the
others open it by way of that process's descriptors, which the system grants to the same user. It needs no /dev/shm,
which containers keep small.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from dualtrain.backends.agreement import exchange_text

if TYPE_CHECKING:
    from dualtrain.backends.collectives import Backend

_NONCE_BYTES = 8
_REASON_BYTES = 128


class UnsharedError(Exception):
    """Some rank could not share memory with those of its host; the reason, on every rank."""


def map_together(
    backend: Backend, nbytes: int, prepare: Callable[[torch.Tensor], None] = lambda memory: None
) -> torch.Tensor:
    """``nbytes`` of zeros, uint8, that are the same memory for all ranks of a host.

    The host's first rank has ``prepare`` write into them before the others have them.

    Collective over ``backend``, in which each host has its own; blocks.

    Raises:
        UnsharedError: on every rank, if one of them cannot have it.
    """
    leader = backend.hosts.index(backend.hosts[backend.rank])
    nonce, descriptor, memory = secrets.randbits(62), -1, None
    problem = ""
    try:
        if backend.rank == leader:
            try:
                descriptor = os.memfd_create("dualtrain")
                # All of it now: what the system cannot give would else be a bus error later.
                os.posix_fallocate(descriptor, 0, nbytes + _NONCE_BYTES)
                os.pwrite(descriptor, nonce.to_bytes(_NONCE_BYTES, "little"), nbytes)
                made = _map(descriptor, nbytes)
                prepare(made)
                memory = made
            except Exception as error:  # the others wait for an answer, whatever it was
                problem = f"{nbytes} bytes of shared memory cannot be had: {_reason(error)}"
        row = [os.getpid(), descriptor, nonce, int(memory is not None)]
        pid, number, nonce, there = backend.exchange_short(row)[leader]
        if backend.rank != leader and there:
            try:
                memory = _open(pid, number, nonce, nbytes)
            except Exception as error:
                problem = f"the memory of process {pid} cannot be opened: {_reason(error)}"
        _agree(backend, memory is not None, problem)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    assert memory is not None
    return memory


def _open(pid: int, number: int, nonce: int, nbytes: int) -> torch.Tensor:
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # In a container of its own, another process has that number.
        if os.pread(descriptor, _NONCE_BYTES, nbytes) != nonce.to_bytes(_NONCE_BYTES, "little"):
            raise OSError("it is another process's here")
        return _map(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    # Not Python's mmap, which keeps a descriptor open for each.
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or " ".join(str(error).split())


def _agree(backend: Backend, there: bool, problem: str) -> None:
    if all(found for (found,) in backend.exchange_short([int(there)])):
        return
    said = exchange_text(backend, problem, _REASON_BYTES)
    rank = next(rank for rank, words in enumerate(said) if words)
    raise UnsharedError(f"rank {rank}: {said[rank]}")
