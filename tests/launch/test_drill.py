"""One drill of a job under torchrun: faults are injected, and the result is that of an undisturbed run."""

from __future__ import annotations

import json
import sys

import pytest

from tests.launch.jobs import QUICK, run


@pytest.mark.timeout(600)  # for five starts on a busy machine: two runs, and a restart after each of three faults
def test_a_job_survives_a_drill(tmp_path):
    out = tmp_path / "drill"
    flags = ["--faults", "3", "--seed", "4", "--epochs", "50", "--backend", "torch"]
    end = run([sys.executable, "-m", "dualtrain.drill", "--json", "--out", str(out), *flags], timeout=560, env=QUICK)
    assert end.returncode == 0, end.stdout + end.stderr
    report = json.loads(end.stdout)
    assert report["holds"]
    assert len(report["rows"]) == 3
    assert report["undisturbed"]["weights_sha256"] == report["disturbed"]["weights_sha256"]
