"""Settings for the memory of tensors on the CPU: reuse the memory that the previous step has freed, and use huge pages.

By default, glibc returns the free end of its heap to the system after every step. The next step allocates the memory of
its activations and gradients again, with a page fault and zeroing for each page: a few percent of a step's time, and more
with many ranks.

Blocks of 32 MB or more are still mapped one by one, as by default. If they were in the heap, glibc before 2.38 would reuse
them badly: in a measurement, the heap grew to eight times the memory in use. With huge pages, such blocks cause few
page faults.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, MutableMapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_NEVER = -1
_MMAP_BYTES = 32 << 20  # the largest threshold that glibc accepts; glibc's own adjustment stops there too
#: Variables of glibc's own settings. If the user has set one, ``keep_freed_memory`` changes nothing.
_GLIBC_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory(env: Mapping[str, str] | None = None) -> None:
    """Disable heap trimming (M_TRIM_THRESHOLD) for this process, so that freed blocks below 32 MB are reused.

    Call this function once, at the start of a program that trains on the CPU. The setting lasts as long as the process. It
    applies to glibc's main heap, which the main thread uses; the arenas of other threads may still return freed memory.
    Does nothing with a C library other than glibc, or if the user has set one of glibc's variables MALLOC_MMAP_MAX_,
    MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_, or a ``glibc.malloc`` option in GLIBC_TUNABLES.

    Args:
        env: the environment variables; ``None`` for this process's.

    Source: mallopt(3), M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.
    """
    env = os.environ if env is None else env
    if any(name in env for name in _GLIBC_VARIABLES) or "glibc.malloc." in env.get("GLIBC_TUNABLES", ""):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        # Setting the first option disables glibc's own adjustment of the second, so set the second too.
        library.mallopt(_TRIM_THRESHOLD, _NEVER)
        library.mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)


def use_huge_pages(env: MutableMapping[str, str] | None = None) -> None:
    """Make torch request huge pages (MADV_HUGEPAGE) for CPU tensors of 2 MB or more: set THP_MEM_ALLOC_ENABLE if unset.

    Call this before the first tensor is created: torch reads the variable then. Child processes inherit it.
    Linux grants the request if /sys/kernel/mm/transparent_hugepage/enabled is "madvise" or "always".

    Args:
        env: the environment variables; ``None`` for this process's.
    """
    (os.environ if env is None else env).setdefault("THP_MEM_ALLOC_ENABLE", "1")
