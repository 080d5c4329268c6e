"""Fixtures of the tests of whole jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import run_ranks
from tests.launch.jobs import ENV, processes, summary


@pytest.fixture(autouse=True, scope="module")
def _untraced() -> Iterator[None]:
    """Measure no coverage in the processes of whole jobs, because an import of torch would take a third longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a path for a run's folder. After the test, fail if a process of the test does not end within 10 seconds.

    Processes of the test are those whose command line contains ``tmp_path``.
    """
    yield tmp_path / "run"
    deadline = time.monotonic() + 10
    while (left := processes(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Train 5 steps in 1 and in 2 forked ranks, without a launcher; return the hash of the weights for each world size."""
    folder, found = tmp_path_factory.mktemp("reference"), dict[int, str]()
    for size in (1, 2):
        command = ("-m", "dualtrain.main", "--backend", "torch", "--max-steps", "5", "--run-dir", folder / str(size))
        for end in run_ranks(size, command, folder, env=ENV):
            assert end.returncode == 0, end
        found[size] = str(summary(folder / str(size))["weights_sha256"])
    return found
