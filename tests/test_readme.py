"""What the README shows is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ALONE = [sys.executable]
TOGETHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


PROGRAMS = [text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "connect" in text]


@pytest.mark.parametrize("program", PROGRAMS, ids=["steps", "trainer"])
@pytest.mark.parametrize("launcher", [ALONE, pytest.param(TOGETHER, marks=pytest.mark.launch)], ids=["alone", "together"])
def test_the_library_examples_learn(tmp_path, launcher, program):
    script = tmp_path / "example.py"
    script.write_text(program)
    end = subprocess.run([*launcher, str(script)], capture_output=True, text=True, timeout=120)
    assert end.returncode == 0, end.stderr
    (loss,) = re.findall(r"loss (\S+)", end.stdout)
    assert float(loss) < 1e-6


@pytest.mark.parametrize("path", re.findall(r"`((?:launch|tests|backends|training)/[\w./-]+\w)`", README))
def test_the_files_that_are_named_exist(path):
    assert (ROOT / path).exists() or (ROOT / "dualtrain" / path).exists()
