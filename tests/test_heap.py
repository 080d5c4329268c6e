"""What a process frees after ``connect`` is its own again without a fault, unless its user wants it otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dualtrain.backends import heap
from tests.pool import ROOT

#: Pages that are faulted in when a block as large as a step's gradients is had again: one that glibc would map by itself
#: (96 MB), and smaller ones. The first times are the heap's growth.
FAULTS = """
import resource, torch, dualtrain
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
{connect}
pages = []
for numel in (24 << 20, 6 << 20, 1 << 20):
    for number in range(13):
        if number == 10:
            before = faults()
        torch.ones(numel)
    pages.append(faults() - before)
print(*pages)
"""
CONNECTED = "backend = dualtrain.connect('local', device='cpu')"


def pages(connect=CONNECTED, **env):
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(connect=connect)],
        env={**plain, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(number) for number in done.stdout.split()]


def test_memory_that_was_freed_is_had_again_without_faults():
    assert sum(pages()) < 300
    assert pages("pass")[0] > 3 * (96 << 20) // 4096 * 0.9  # glibc's own way, or there is nothing to show


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
    assert not heap.keep_freed_memory({name: value})


def test_tunables_of_other_parts_are_no_choice():
    assert sum(pages(GLIBC_TUNABLES="glibc.rtld.optional_static_tls=512")) < 300


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    assert not heap.keep_freed_memory({})
