"""What a step frees on the CPU is kept for the next one, as torch's own allocator does on a GPU.

Left to itself, glibc gives the free end of its heap back to the system after every step. The next one gets the memory of
its activations and gradients anew, page by page, each a fault, and zeroed first: some percent of a step's time, and more
with many ranks, whose kernels take turns at it.

Blocks from 32 MB on stay as they are, each mapped by itself: glibc before 2.38 fits them badly into a heap, which grew to
eight times of what was in use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_NEVER = -1
_MOST = 32 << 20  # bytes that glibc lets the other threshold have; by itself it comes to that too, step by step
#: Who sets one of these has made the choice.
_CHOICES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory(env: Mapping[str, str]) -> None:
    """Has this process never cut its heap, which blocks below 32 MB are in; what is freed is used again.

    Holds for the whole process from here on. Does nothing where ``env`` has a choice of its own, with a C library that
    is not glibc, and in threads but the main one, whose heaps are small.

    Source: mallopt(3), M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.
    """
    if any(name in env for name in _CHOICES) or "glibc.malloc." in env.get("GLIBC_TUNABLES", ""):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        # To set the one ends glibc's own adjustment of the other.
        library.mallopt(_TRIM_THRESHOLD, _NEVER)
        library.mallopt(_MMAP_THRESHOLD, _MOST)
