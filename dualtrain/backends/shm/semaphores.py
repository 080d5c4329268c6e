"""Semaphores with which the processes of a host order their accesses to shared memory.

A process whose wait consumes a post sees everything that the posting process wrote before the post. This holds on every
kind of processor: POSIX semaphores "synchronize memory with respect to other threads" (POSIX.1-2017, 4.12), which includes
threads of other processes. Semaphores are used because Python has no atomics. Each ordered pair of ranks has one semaphore
per kind of signal. If several ranks posted to the same semaphore, a second post of a fast rank would be mistaken for the
first post of a slow rank.
"""

from __future__ import annotations

import ctypes
import time

import torch

CACHE_LINE = 64  # bytes; glibc's sem_t has 32
_SPINS = 200  # sem_trywait calls before a wait sleeps: some tens of microseconds


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphores:
    """Semaphores of ``size`` ranks at the beginning of ``memory``; this process is rank ``rank``.

    Args:
        memory: shared by the ranks, of :meth:`bytes_for` bytes, prepared by :meth:`initialise`.
        kinds: number of kinds of signals.
        size: number of ranks.
        rank: this process's rank.
        spin: whether waits spin before they sleep.
    """

    def __init__(self, memory: torch.Tensor, kinds: int, size: int, rank: int, *, spin: bool) -> None:
        self._memory = memory  # this reference keeps the memory mapped
        self.others = [other for other in range(size) if other != rank]
        self._spins = _SPINS if spin else 1
        first = memory.data_ptr()

        def address(kind: int, source: int, target: int) -> ctypes.c_void_p:
            return ctypes.c_void_p(first + ((kind * size + source) * size + target) * CACHE_LINE)

        self._to = [[address(kind, rank, other) for other in self.others] for kind in range(kinds)]
        self._from = [[address(kind, other, rank) for other in range(size)] for kind in range(kinds)]
        #: For each kind and rank, the result of the C call in ``timed_wait``. If it is 0, the call has consumed a post,
        #: which the next ``try_wait`` reports.
        self._received: list[list[list[int]]] = [[[] for _ in range(size)] for _ in range(kinds)]
        # Calls that do not block keep the GIL, which is faster; calls that block release it.
        with_gil, without_gil = ctypes.PyDLL(None), ctypes.CDLL(None)
        self._sem_post, self._sem_trywait = with_gil.sem_post, with_gil.sem_trywait
        # Use the monotonic clock if the C library supports it (glibc 2.30 or newer): the real-time clock may be set during
        # a wait.
        self._sem_clockwait = getattr(without_gil, "sem_clockwait", None)
        self._sem_timedwait = without_gil.sem_timedwait

    @staticmethod
    def bytes_for(kinds: int, size: int) -> int:
        """Return how much memory the semaphores need."""
        return kinds * size * size * CACHE_LINE

    @staticmethod
    def initialise(memory: torch.Tensor) -> None:
        """Initialise all semaphores in ``memory``; called on one rank before any other rank uses them.

        Raises:
            OSError: the system has no semaphores that processes can share.
        """
        initialise = ctypes.CDLL(None).sem_init
        for offset in range(0, memory.numel(), CACHE_LINE):
            if initialise(ctypes.c_void_p(memory.data_ptr() + offset), 1, 0):
                raise OSError("no semaphores that processes can share")

    def post(self, kind: int) -> None:
        """Post the signal ``kind`` to every other rank. Does not block."""
        for each in self._to[kind]:
            self._sem_post(each)

    def try_wait(self, kind: int, source: int, *, spin: bool) -> bool:
        """Consume a post of rank ``source`` and return True, or return False.

        If ``spin`` is true here and in the constructor, try for some tens of microseconds, else once.
        """
        received = self._received[kind][source]
        if 0 in received:
            received.clear()
            return True
        at = self._from[kind][source]
        return any(self._sem_trywait(at) == 0 for _ in range(self._spins if spin else 1))

    def timed_wait(self, kind: int, source: int, seconds: float) -> bool:
        """Sleep until there is a post of rank ``source``, at most for ``seconds``. Return whether there is one.

        The post stays available for the next :meth:`try_wait`, even if a signal handler raises an exception meanwhile.
        """
        received = self._received[kind][source]
        if 0 in received:
            return True
        received.clear()
        at = self._from[kind][source]
        # Signal handlers run between two bytecode instructions. ``extend`` waits and records the result in one instruction,
        # so an exception of a handler cannot lose a post.
        if self._sem_clockwait is not None:
            clock = time.CLOCK_MONOTONIC
            received.extend(map(self._sem_clockwait, (at,), (clock,), (_until(clock, seconds),)))
        else:
            received.extend(map(self._sem_timedwait, (at,), (_until(time.CLOCK_REALTIME, seconds),)))
        return 0 in received


def _until(clock: int, seconds: float) -> object:
    whole, nanoseconds = divmod(time.clock_gettime_ns(clock) + int(seconds * 1e9), 10**9)
    return ctypes.byref(_Timespec(whole, nanoseconds))
