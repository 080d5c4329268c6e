"""Memory that all ranks of a host map.

The memory has no name, so Linux frees it when the ranks have ended, even if they were killed. The host's first rank
creates it (``memfd_create``). The other ranks open it through the first rank's descriptors in /proc. Linux permits this to
processes of the same user. /dev/shm, which is small in containers, is not used.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Sequence

import torch

from dualtrain.backends.agreement import Exchange, exchange_text
from dualtrain.errors import one_line

_MAYMOVE, _FIXED = 1, 2  # flags of mremap; Python's mmap module does not have them
_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = _C.mremap.restype = ctypes.c_void_p
_NONCE_BYTES = 8
_REASON_BYTES = 128


class UnsharedError(Exception):
    """Shared memory cannot be used.

    A rank cannot map it, too little memory was reserved for the buffers, or the hosts do not have equally many ranks.
    Raised on every rank, with the same reason.
    """


def map_on_host(
    exchange: Exchange,
    hosts: Sequence[int],
    rank: int,
    nbytes: int,
    prepare: Callable[[torch.Tensor], None],
) -> torch.Tensor:
    """Map ``nbytes`` bytes that all ranks of a host share, as a uint8 tensor. Collective over all ranks; blocks.

    Args:
        exchange: gathers integers over all ranks.
        hosts: the index of each rank's host, in rank order.
        rank: this process's rank.
        nbytes: size of the memory.
        prepare: writes into the memory on the host's first rank, before the others map it. All other bytes are 0.

    Raises:
        UnsharedError: on every rank, if one of them cannot map the memory.
    """
    leader = hosts.index(hosts[rank])
    nonce, descriptor, memory = secrets.randbits(62), -1, None
    problem = ""
    try:
        if rank == leader:
            try:
                descriptor = os.memfd_create("dualtrain")
                # Allocate all pages now: otherwise a page that cannot be allocated causes SIGBUS later.
                os.posix_fallocate(descriptor, 0, nbytes + _NONCE_BYTES)
                os.pwrite(descriptor, nonce.to_bytes(_NONCE_BYTES, "little"), nbytes)
                new_memory = _map(descriptor, nbytes)
                prepare(new_memory)
                memory = new_memory
            except Exception as error:  # any exception: this rank must still call exchange, for which the others wait
                problem = f"cannot allocate {nbytes} bytes of shared memory: {_reason(error)}"
        mine = [os.getpid(), descriptor, nonce, int(memory is not None)]
        pid, number, nonce, exists = exchange(mine)[leader]
        if rank != leader and exists:
            try:
                memory = _open(pid, number, nonce, nbytes)
            except Exception as error:
                problem = f"cannot open the memory of process {pid}: {_reason(error)}"
        _raise_if_unshared(exchange, memory is not None, problem)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    assert memory is not None
    return memory


class SecondMapping:
    """Second mapping of the shared pages of ``first``, so that the first mapping can get pages of its own.

    Attributes:
        memory: uint8 tensor with the pages that ``first`` had at construction.

    Raises:
        OSError: there is not enough memory, or too many mappings.
    """

    def __init__(self, first: torch.Tensor) -> None:
        self._first, nbytes = first, first.numel()
        # With an old size of 0, mremap makes a second mapping of the same shared pages, and keeps the first.
        self.memory = _as_tensor(_mremap(first.data_ptr(), 0, nbytes, _MAYMOVE, 0), nbytes)
        self._copy: int | None = _map_private(nbytes)

    def separate(self) -> None:
        """Replace the pages of the first mapping by a private copy. Repeat this call if an interrupt has stopped it."""
        address, nbytes = self._first.data_ptr(), self._first.numel()
        if self._copy is None:
            self._copy = _map_private(nbytes)
        ctypes.memmove(self._copy, address, nbytes)
        copy, self._copy = self._copy, None  # ``mremap`` unmaps the copy's address: a repeated call must not write there
        _mremap(copy, nbytes, nbytes, _MAYMOVE | _FIXED, address)


def _map_private(nbytes: int) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return _checked(_C.mmap(None, ctypes.c_size_t(nbytes), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0)))


def _as_tensor(address: int, nbytes: int) -> torch.Tensor:
    mapping = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(mapping, _C.munmap, ctypes.c_void_p(address), ctypes.c_size_t(nbytes)).atexit = False
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _mremap(old: int, old_size: int, size: int, flags: int, new: int) -> int:
    sizes = ctypes.c_size_t(old_size), ctypes.c_size_t(size)
    return _checked(_C.mremap(ctypes.c_void_p(old), *sizes, flags, ctypes.c_void_p(new)))


def _checked(address: int) -> int:
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def _open(pid: int, number: int, nonce: int, nbytes: int) -> torch.Tensor:
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # If the host's first rank runs in a different container, its PID may belong to another process in this container.
        if os.pread(descriptor, _NONCE_BYTES, nbytes) != nonce.to_bytes(_NONCE_BYTES, "little"):
            raise OSError("its PID belongs to another process in this container")
        return _map(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    # Don't use Python's mmap: it keeps one descriptor open per mapping.
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or one_line(error)


def _raise_if_unshared(exchange: Exchange, mapped: bool, problem: str) -> None:
    """Raise UnsharedError on every rank if one of them has not mapped the memory. Collective; blocks."""
    if all(theirs for (theirs,) in exchange([int(mapped)])):
        return
    problems = exchange_text(exchange, problem, _REASON_BYTES)
    rank = next(rank for rank, text in enumerate(problems) if text)
    raise UnsharedError(f"rank {rank} {problems[rank]}")
