"""Freed memory is reused without page faults after ``keep_freed_memory``, unless the user has tuned glibc."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dualtrain import heap
from tests.pool import ROOT

#: Page faults of two steps that take 64 MB and free them, and the growth of the memory in use in MB, after four such
#: steps, and five with a block of 96 to 100 MB between others that stay.
STEPS = """
import ctypes, resource, dualtrain
{setup}
heap = ctypes.CDLL(None)
heap.malloc.restype, heap.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def usage():
    return resource.getrusage(resource.RUSAGE_SELF)
def step():
    blocks = [heap.malloc(16 << 20) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 16 << 20)
    for block in blocks:
        heap.free(block)
before, kept = usage().ru_maxrss, []
for number in range(4):
    if number == 2:
        started = usage().ru_minflt
    step()
faults = usage().ru_minflt - started
for number in range(5):
    block = heap.malloc((96 + number) << 20)  # does not fit into the memory of the one before
    ctypes.memset(block, 1, 96 << 20)
    kept.append(heap.malloc(110 << 20))  # behind it, and never written, so that it takes no memory itself
    heap.free(block)
print(faults, (usage().ru_maxrss - before) >> 10)
"""
KEPT = "dualtrain.keep_freed_memory()"
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def measured(setup=KEPT, **env):
    """Faults, and MB."""
    others = ("MALLOC_", "GLIBC_", "LD_PRELOAD")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    command = [sys.executable, "-c", STEPS.format(setup=setup)]
    done = subprocess.run(command, env={**plain, **env}, cwd=ROOT, capture_output=True, text=True, check=True)
    faults, growth = done.stdout.split()
    return int(faults), int(growth)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="needs glibc")
@pytest.mark.skipif(
    HUGE.exists() and "[always]" in HUGE.read_text(), reason="needs small pages: with huge ones there are few faults"
)
def test_memory_that_was_freed_is_had_again_without_faults_and_without_growth():
    plain_faults, _ = measured("pass")
    tuned_elsewhere = "glibc.rtld.optional_static_tls=512"  # does not concern the heap
    for faults, growth in (measured(), measured(GLIBC_TUNABLES=tuned_elsewhere)):
        assert faults < plain_faults / 10
        assert growth < 200  # MB: 64 that stay, and 96


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_MMAP_MAX_", "65536"),
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=65536"),
    ],
)
def test_the_users_own_choice_stands(name, value, monkeypatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: pytest.fail("the heap was to be left alone"))
    heap.keep_freed_memory({name: value})


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())  # without mallopt, a call would raise
    heap.keep_freed_memory({})
