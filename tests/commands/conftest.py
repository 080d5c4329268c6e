"""Fixtures of the tests of commands and scripts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.setups import Setup


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a cache. In these tests, the command ``python`` is a script. For ``python -c``, it runs the real
    Python once for each list of arguments, and stores its output in this folder.
    """
    return tmp_path_factory.mktemp("answers")


@pytest.fixture
def setup(tmp_path: Path, answers: Path) -> Iterator[Setup]:
    setup = Setup(tmp_path, answers)
    yield setup
    setup.end()
