"""What the tests of whole jobs have in common."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.jobs import processes


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run's folder; its name is on every command line, so that no process of the run can be left unseen."""
    yield tmp_path / "run"
    deadline = time.monotonic() + 10
    while (left := processes(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
