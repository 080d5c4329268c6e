"""launch/setup.sh: what it refuses before it changes anything."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.pool import ROOT


def setup(**env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "launch" / "setup.sh")], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("env", "part"),
    [
        ({"PYTHON": "no-such-python"}, "no-such-python"),
        ({"DUALTRAIN_VENV": "/dev/null/venv"}, "DUALTRAIN_VENV"),
    ],
)
def test_setup_refuses_in_one_line(env, part):
    end = setup(**env)
    assert end.returncode == 2
    assert part in end.stderr.strip().splitlines()[-1]
