"""``keep_freed_memory`` and ``use_huge_pages`` take effect, unless the user has chosen these settings."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dualtrain import heap
from dualtrain.heap import use_huge_pages
from tests.pool import ROOT

#: Program that prints two numbers. Each of its four steps allocates and frees 64 MB. Then it allocates and frees
#: five larger blocks (96 to 100 MB), one after another. Before it frees a block, it allocates memory at a higher address.
#: The first number is the number of page faults in the third and fourth step. The second number is the growth of the
#: process's peak resident memory, in MB.
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
    block = heap.malloc((96 + number) << 20)  # does not fit into the memory of the previous block
    ctypes.memset(block, 1, 96 << 20)
    kept.append(heap.malloc(110 << 20))  # at a higher address; never written, so not resident
    heap.free(block)
print(faults, (usage().ru_maxrss - before) >> 10)
"""
SETUP = "dualtrain.keep_freed_memory()"
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def measured(setup=SETUP, **env):
    """Return the number of page faults, and the growth of the peak resident memory in MB."""
    prefixes = ("MALLOC_", "GLIBC_", "LD_PRELOAD")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    command = [sys.executable, "-c", STEPS.format(setup=setup)]
    done = subprocess.run(command, env={**plain, **env}, cwd=ROOT, capture_output=True, text=True, check=True)
    faults, growth = done.stdout.split()
    return int(faults), int(growth)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="needs glibc")
@pytest.mark.skipif(
    HUGE.exists() and "[always]" in HUGE.read_text(), reason="needs small pages: with huge pages there are few faults"
)
def test_freed_memory_is_reused_with_few_faults_and_little_growth():
    plain_faults, _ = measured("pass")
    tuned_elsewhere = "glibc.rtld.optional_static_tls=512"  # a setting that does not concern the heap
    for faults, growth in (measured(), measured(GLIBC_TUNABLES=tuned_elsewhere)):
        assert faults < plain_faults / 10
        assert growth < 200  # MB: enough for the 64 MB of a step, which the heap keeps, and one larger block


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_MMAP_MAX_", "65536"),
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=65536"),
    ],
)
def test_the_users_own_glibc_settings_are_not_changed(name, value, monkeypatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: pytest.fail("the heap must not be changed"))
    heap.keep_freed_memory({name: value})


def test_a_c_library_without_mallopt_is_not_changed(monkeypatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())  # without mallopt, so that a call of it would raise
    heap.keep_freed_memory({})


def test_the_users_own_choice_of_huge_pages_is_kept():
    env: dict[str, str] = {}
    use_huge_pages(env)
    assert env == {"THP_MEM_ALLOC_ENABLE": "1"}
    env = {"THP_MEM_ALLOC_ENABLE": "0"}
    use_huge_pages(env)
    assert env == {"THP_MEM_ALLOC_ENABLE": "0"}


def test_torch_aligns_large_tensors_to_pages_for_huge_pages():
    # Use a new interpreter, because torch reads the variable only once. Without the variable, the tensor would begin after
    # malloc's header, and not at the beginning of a page.
    imports = "from dualtrain.heap import use_huge_pages; use_huge_pages(); import torch"
    program = f"{imports}; print(torch.empty(9 << 20).data_ptr() % 4096)"
    env = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=env, check=True)
    assert result.stdout.strip() == "0", "torch does not read THP_MEM_ALLOC_ENABLE: change use_huge_pages in heap.py"
