"""Fixtures of the tests of commands and scripts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.setups import Setup


@pytest.fixture(scope="session")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the fake interpreters keep the outputs of ``python -c``; see ``setups.ONCE``."""
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture
def setup(tmp_path: Path, outputs: Path) -> Iterator[Setup]:
    setup = Setup(tmp_path, outputs)
    yield setup
    setup.end()
