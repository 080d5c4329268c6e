"""A run that version 0.1.0 wrote: resumed, compared, reported and used for predictions by this version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import dualtrain.training.loop as loop
from dualtrain import compare
from dualtrain.backends import connect
from dualtrain.config import SETTINGS, Config, parse
from dualtrain.predict import predict
from dualtrain.report.runs import read_runs
from dualtrain.run_folder import checkpoint

#: Folder of a run that trained mnist-net on the digits for 12 steps. It contains one checkpoint, that of step 6.
OLD = Path(__file__).parent / "run_of_0_1_0"
FLAGS = ["--max-steps", "12", "--epochs", "2", "--global-batch-size", "256", "--model", "mnist-net"]


@pytest.fixture(autouse=True)
def threads():
    """Restore the number of threads, which a resumed run sets."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


def test_the_old_config_equals_the_config_that_the_same_flags_give_now():
    old = json.loads((OLD / "config.json").read_text())
    assert old.keys() <= SETTINGS.keys()
    assert Config.of(old) == parse([*FLAGS, "--run-dir", "runs/old"])


def test_the_old_run_is_resumed_and_ends_as_before(tmp_path):
    folder = shutil.copytree(OLD, tmp_path / "run", ignore=shutil.ignore_patterns("summary.json", "model.safetensors"))
    with connect("local") as backend:
        summary = loop.train(parse([*FLAGS, "--run-dir", str(folder), "--resume"]), backend)
    old = json.loads((OLD / "summary.json").read_text())
    added = {"virtual_ranks", "planned", "settings", "global_batch", "checkpoints", "recoveries"}
    origin = {"command", "commit", "hosts", "versions", "started"}
    removed = {"train_top5"}
    assert summary.keys() == (old.keys() - removed) | added | origin
    assert summary["steps"] == old["steps"] == 12
    # A different processor may round differently.
    for name in ("train_loss", "val_loss"):
        assert summary[name] == pytest.approx(old[name], abs=1e-4)
    lines, kept = ((path / "metrics.jsonl").read_text().splitlines() for path in (folder, OLD))
    assert [json.loads(line)["step"] for line in lines] == [json.loads(line)["step"] for line in kept]
    assert lines[0] == kept[0]  # the line of step 6, from which the run resumes, is kept
    (newest, *_) = checkpoint.found(folder / "checkpoints")
    first = checkpoint.load(OLD / "checkpoints" / "step-00000006.safetensors")
    assert checkpoint.load(newest)["cursor"].keys() == first["cursor"].keys()


def test_the_old_run_is_accepted_by_compare_report_and_predict(tmp_path, capsys):
    assert compare.main([str(OLD), str(OLD)]) == 0
    assert "0.2444" in capsys.readouterr().out
    (run,) = read_runs([str(OLD)])
    points, undrawn = run.curve("epoch", "val_loss")
    assert ([step for step, _ in points], undrawn) == ([6, 12], 0)
    Image.new("L", (8, 8), 100).save(tmp_path / "image.png")
    ((best, *_),) = predict(str(OLD), [str(tmp_path / "image.png")])
    assert 0 < best[1] < 1


def test_the_old_checkpoint_has_a_trainers_state():
    state = checkpoint.load(OLD / "checkpoints" / "step-00000006.safetensors")
    assert {"model", "optimizer", "ranks"} <= state["trainer"].keys()
    assert all(isinstance(value, torch.Tensor) for value in state["trainer"]["model"].values())
