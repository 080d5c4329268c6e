"""Fixtures of the tests of whole jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.jobs import processes


@pytest.fixture(autouse=True, scope="module")
def _untraced() -> Iterator[None]:
    """Measure no coverage in the processes of whole jobs, because an import of torch would take a third longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a run's folder; fail if a process with this folder in its command line is left."""
    yield tmp_path / "run"
    deadline = time.monotonic() + 10
    while (left := processes(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
