"""Real runs of the bench: several contenders, and ranks started by the user's launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.commands.test_bench import TUNED
from tests.conftest import require_horovod
from tests.pool import ROOT


def test_a_small_run_writes_its_files_and_all_contenders_end_with_the_same_weights(tmp_path):
    require_horovod()
    contenders = f"{TUNED},native,beside-alone,hvd-gloo,ours-mpi,fabric,import"
    command = [sys.executable, "-m", "dualtrain.bench", "--quick", "--pairs", "1", "--jobs", "tiny,small,import"]
    end = subprocess.run(
        [*command, "--contenders", contenders, "--out", str(tmp_path / "out")],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert end.returncode == 0, end.stderr
    report = json.loads((tmp_path / "out" / "bench.json").read_text())
    measured = {name for name, column in report["samples"].items() if column[0] is not None}
    assert measured | {"fabric"} == set(contenders.split(",")), end.stderr  # Lightning Fabric may not be installed
    compared = [r for r in report["rows"] if r["job"] in ("tiny", "small")]
    assert len(compared) >= 2 * 3
    separate = [r for r in compared if not r["group"].endswith("in the same processes")]
    assert {r["weights"] for r in separate} == {"same"}
    assert {r["other"] for r in compared if r not in separate} == {"alone", "one-number"}  # neither reduces gradients
    assert {r["found"]["pairs"] for r in report["rows"]} == {1}
    assert end.stdout.splitlines()[-1] == report["answer"]
    assert report["answer"].startswith("Should we move from Horovod to torch? ")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["bench.html", "bench.json", "bench.svg"]
    assert (tmp_path / "out" / "bench.svg").read_text().startswith("<svg ")


def test_the_users_launch_command_starts_the_contenders(tmp_path):
    torchrun = Path(sys.executable).with_name("torchrun")
    prefix = f"{torchrun} --standalone --nproc_per_node=2 --no-python"
    flags = ["--contenders", f"{TUNED},native,hvd-mpi", "--launch", prefix, "--out", str(tmp_path)]
    end = subprocess.run(
        [sys.executable, "-m", "dualtrain.bench", "--quick", "--pairs", "1", "--jobs", "tiny", *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert end.returncode == 0, end.stderr
    report = json.loads((tmp_path / "bench.json").read_text())
    assert set(report["samples"]) == {TUNED, "native"}, end.stderr
    assert "cannot start it" in report["missing"]["hvd-mpi"] or "not installed" in report["missing"]["hvd-mpi"]
    assert report["machine"]["ranks"].startswith("2, started by ")
