"""What a step frees on the CPU is kept for the next one, as torch's own allocator does on a GPU.

Left to itself, glibc gives large blocks back to the system as soon as they are free. Every step then gets the memory of
its activations and gradients anew, page by page, each a fault, and zeroed first: a tenth of the time of a step whose
gradients are large, and more with many ranks, whose kernels take turns at it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of <malloc.h>
_MOST_KEPT = 2**31 - 1  # bytes at the heap's end, as many as mallopt's int can say
#: Who sets one of these has made the choice.
_CHOICES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory(env: Mapping[str, str]) -> bool:
    """Has this process keep what it frees: nothing is mapped block by block, and the heap is not cut below 2 GB.

    Holds for the whole process from here on, threads included. Gives whether it was done: not where ``env`` has a choice
    of its own, and not with a C library that is not glibc.

    Source: mallopt(3), M_MMAP_MAX and M_TRIM_THRESHOLD.
    """
    if any(name in env for name in _CHOICES) or "glibc.malloc." in env.get("GLIBC_TUNABLES", ""):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, _MOST_KEPT))
