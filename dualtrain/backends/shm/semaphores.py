"""Words between the processes of a host that order their accesses to the memory they share.

A process that writes and then tells a word is seen to have written by the process that takes it: POSIX semaphores
"synchronize memory with respect to other threads and processes" (POSIX.1-2017, 4.12), on x86-64, AArch64 and every other
processor. Python has no atomics of its own. Each ordered pair of ranks has a semaphore for each kind of word, so that a
quick rank's next word is never taken for a slow one's last.
"""

from __future__ import annotations

import ctypes
import time

import torch

LINE = 64  # bytes that processors exchange at once; glibc's sem_t has 32
_SPINS = 200  # looks at a word before the wait goes to sleep: some tens of microseconds


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphores:
    """The words of ``size`` ranks, as rank ``rank`` tells and takes them; they lie at the beginning of ``memory``."""

    def __init__(self, memory: torch.Tensor, kinds: int, size: int, rank: int, *, spin: bool) -> None:
        self._memory = memory  # stays mapped while it is held
        self.others = [other for other in range(size) if other != rank]
        self._spins = _SPINS if spin else 1
        first = memory.data_ptr()

        def at(kind: int, source: int, target: int) -> ctypes.c_void_p:
            return ctypes.c_void_p(first + ((kind * size + source) * size + target) * LINE)

        self._to = [[at(kind, rank, other) for other in self.others] for kind in range(kinds)]
        self._from = [[at(kind, other, rank) for other in range(size)] for kind in range(kinds)]
        # What does not wait keeps the interpreter's lock, which is quicker; what does wait lets other threads run.
        quick, slow = ctypes.PyDLL(None), ctypes.CDLL(None)
        self._post, self._try = quick.sem_post, quick.sem_trywait
        # By a clock that nobody sets, where the C library has that (glibc 2.30).
        self._by_clock = getattr(slow, "sem_clockwait", None)
        self._by_time = slow.sem_timedwait

    @staticmethod
    def bytes_for(kinds: int, size: int) -> int:
        """How much memory they take."""
        return kinds * size * size * LINE

    @staticmethod
    def initialise(memory: torch.Tensor) -> None:
        """By one rank, before any other uses them. Raises OSError if the system has none that processes can share."""
        initialise = ctypes.CDLL(None).sem_init
        for offset in range(0, memory.numel(), LINE):
            if initialise(ctypes.c_void_p(memory.data_ptr() + offset), 1, 0):
                raise OSError("no semaphores that processes can share")

    def tell(self, kind: int) -> None:
        """Tells every other rank this word. Does not block."""
        for each in self._to[kind]:
            self._post(each)

    def taken(self, kind: int, source: int, *, patient: bool) -> bool:
        """Takes a word of ``source`` if it is there, or, ``patient``, comes in a moment. Does not sleep."""
        at = self._from[kind][source]
        return any(self._try(at) == 0 for _ in range(self._spins if patient else 1))

    def taken_within(self, kind: int, source: int, seconds: float) -> bool:
        """Takes a word of ``source``; sleeps until it is there or the time is up."""
        at = self._from[kind][source]
        if self._by_clock is not None:
            return bool(self._by_clock(at, time.CLOCK_MONOTONIC, _until(time.CLOCK_MONOTONIC, seconds)) == 0)
        return bool(self._by_time(at, _until(time.CLOCK_REALTIME, seconds)) == 0)


def _until(clock: int, seconds: float) -> object:
    whole, nanoseconds = divmod(time.clock_gettime_ns(clock) + int(seconds * 1e9), 10**9)
    return ctypes.byref(_Timespec(whole, nanoseconds))
