"""The programs in the README work, and the files that it names exist."""

from __future__ import annotations

import os
import re

import pytest

from tests.forked import ROOT, run_ranks, torchrun

ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
README = (ROOT / "README.md").read_text()
PROGRAMS = [text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "connect" in text]


@pytest.mark.parametrize("program", PROGRAMS, ids=["steps", "trainer"])
@pytest.mark.parametrize("ranks", [1, 2], ids=["alone", "together"])
def test_the_library_examples_learn(tmp_path, ranks, program):
    script = tmp_path / "example.py"
    script.write_text(program)
    with torchrun(ranks) as places:
        ends = run_ranks(places if ranks > 1 else [{}], (script,), tmp_path / "printed", env=ENV)
    assert [end.returncode for end in ends] == [0] * ranks, ends[0].stderr
    (loss,) = re.findall(r"loss (\S+)", "".join(end.stdout for end in ends))
    assert float(loss) < 1e-6


@pytest.mark.parametrize("path", re.findall(r"`((?:launch|tests|backends|training)/[\w./-]+\w)`", README))
def test_the_files_that_it_names_exist(path):
    assert (ROOT / path).exists() or (ROOT / "dualtrain" / path).exists()
