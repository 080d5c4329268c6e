"""Type checks of the pages' examples, among the launches because mypy takes a minute to read all of torch."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile

import pytest

from tests.pool import ROOT
from tests.test_package import HOROVOD_SCRIPT, built  # noqa: F401 - a fixture
from tests.test_readme import EXAMPLES

pytestmark = pytest.mark.xdist_group("package")  # built once


def test_strict_type_checks_of_the_pages_examples_pass(built, tmp_path):  # noqa: F811
    """The examples are checked against the installed wheel: without its py.typed, mypy would not read its types."""
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(tmp_path / "site")
    programs = {**EXAMPLES, "horovod": HOROVOD_SCRIPT}
    for name, text in programs.items():
        (tmp_path / f"{name.replace('-', '_')}.py").write_text(text)
    files = [f"{name.replace('-', '_')}.py" for name in programs]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache" / "examples"), *files]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
