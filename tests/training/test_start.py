"""``--resume auto``: one command line for the start, the restarts and the end of a run, on shared or separate disks."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualtrain.training.loop as loop
from dualtrain import Trainer
from dualtrain.backends import connect
from dualtrain.config import parse
from dualtrain.errors import UserError
from dualtrain.run_folder import checkpoint, run_dir
from dualtrain.training import start
from tests.hvd.worlds import worlds

#: With this batch size, an epoch has two steps. Each epoch ends with an evaluation. ``--log-seconds 0`` switches progress
#: lines off, because they depend on time, and the tests compare the printed lines.
FLAGS = (
    *("--global-batch-size", "720", "--lr", "0.02", "--threads", "1", "--workers", "0"),
    *("--log-every", "1", "--log-seconds", "0"),
)


def train(backend, *arguments: str) -> dict[str, Any]:
    return loop.train(parse([*FLAGS, *arguments]), backend)


def train_alone(folder: Path, epochs: int, *flags: str) -> dict[str, Any]:
    with connect("local") as backend:
        return train(backend, "--epochs", str(epochs), "--run-dir", str(folder), *flags)


def train_or_resume(folder: Path, epochs: int, *flags: str) -> dict[str, Any]:
    return train_alone(folder, epochs, "--resume", "auto", *flags)


def first_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[0]


def steps_trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the number of each step that is trained from now on is added."""
    trained: list[int] = []
    step = loop.Run._step

    def counted(run: loop.Run) -> list[float]:
        trained.append(run.cursor.step + 1)
        return step(run)

    monkeypatch.setattr(loop.Run, "_step", counted)
    return trained


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.match("generation-*")]


def test_resume_auto_begins_a_run_or_resumes_it_or_reports_its_end(tmp_path, capsys, monkeypatch):
    whole, folder = train_alone(tmp_path / "whole", 3), tmp_path / "run"
    trained = steps_trained(monkeypatch)
    capsys.readouterr()
    train_or_resume(folder, 2)
    assert first_line(capsys) == f"--resume auto: beginning at step 0, since {folder} holds no checkpoint"
    ended = train_or_resume(folder, 3)
    path = folder / "checkpoints" / "step-00000004.safetensors"
    assert first_line(capsys) == f"--resume auto: resuming from step 4, since {path} is the newest good checkpoint"
    assert trained == [1, 2, 3, 4, 5, 6]
    assert ended["weights_sha256"] == whole["weights_sha256"]
    files = {path: path.stat().st_mtime_ns for path in files_of(folder)}
    assert train_or_resume(folder, 3) == ended
    assert trained == [1, 2, 3, 4, 5, 6]
    assert {path: path.stat().st_mtime_ns for path in files_of(folder)} == files
    ends, done = capsys.readouterr().out.splitlines()[-2:]
    assert ends == f"--resume auto: the run in {folder} has ended after step 6: nothing is left to train"
    assert done.startswith("done: val accuracy")
    assert ended["weights_sha256"][:16] in done


@pytest.mark.parametrize("name", ["model.safetensors", "summary.json"])
def test_a_run_whose_model_is_not_that_of_its_summary_has_not_ended(tmp_path, name):
    ended, _ = train_alone(tmp_path / "run", 1), train_alone(tmp_path / "other", 1, "--seed", "1")
    shutil.copy(tmp_path / "other" / name, tmp_path / "run" / name)
    assert train_or_resume(tmp_path / "run", 1)["weights_sha256"] == ended["weights_sha256"]
    files = [path / "model.safetensors" for path in (tmp_path / "run", tmp_path / "other")]
    assert run_dir.has_weights(files[0], ended["steps"], ended["weights_sha256"])
    assert not run_dir.has_weights(files[1], ended["steps"], ended["weights_sha256"])


def test_a_damaged_checkpoint_is_skipped(tmp_path, capsys, caplog):
    whole = train_alone(tmp_path, 2)
    newest = checkpoint.path_of(tmp_path / "checkpoints", 4)
    newest.write_bytes(newest.read_bytes()[:-1])
    (tmp_path / "summary.json").unlink()
    capsys.readouterr()
    assert train_or_resume(tmp_path, 2)["weights_sha256"] == whole["weights_sha256"]
    assert "resuming from step 2" in first_line(capsys)
    assert [line.startswith("skipped: ") and str(newest) in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("resume", ["auto", "run-dir"])
def test_checkpoints_in_a_folder_that_cannot_be_read_are_not_ignored(tmp_path, monkeypatch, resume):
    train_alone(tmp_path, 1)
    before = {path: path.read_bytes() for path in files_of(tmp_path)}
    listdir = os.listdir

    def without_permission(folder: Path) -> list[str]:
        if Path(folder).name == "checkpoints":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", without_permission)
    flags = ["--resume", "auto"] if resume == "auto" else ["--resume"]
    with pytest.raises(UserError, match=r"/checkpoints' cannot be read \(Permission denied\): repair") as error:
        train_alone(tmp_path, 2, *flags)
    assert error.value.transient  # the same command may succeed later
    assert {path: path.read_bytes() for path in files_of(tmp_path)} == before


@pytest.mark.parametrize("resume", [("--resume", "auto"), ("--resume",)])
def test_a_checkpoint_whose_name_has_another_step_is_skipped(tmp_path, capsys, caplog, monkeypatch, resume):
    whole = train_alone(tmp_path, 2)
    older, renamed = (checkpoint.path_of(tmp_path / "checkpoints", step) for step in (2, 99))
    older.rename(renamed)
    (tmp_path / "summary.json").unlink()
    capsys.readouterr()
    trained = steps_trained(monkeypatch)
    assert train_alone(tmp_path, 2, *resume)["weights_sha256"] == whole["weights_sha256"]
    assert trained == []  # the run resumes from step 4, its last
    if "auto" in resume:
        assert "resuming from step 4" in first_line(capsys)
    assert caplog.messages == [f"skipped: checkpoint {str(renamed)!r} holds step 2, unlike its name: remove it"]


def test_resume_auto_begins_at_step_0_if_all_checkpoints_are_damaged(tmp_path, capsys):
    whole = train_alone(tmp_path, 1)
    path = checkpoint.path_of(tmp_path / "checkpoints", 2)
    path.write_bytes(b"damaged")
    (tmp_path / "summary.json").unlink()
    capsys.readouterr()
    assert train_or_resume(tmp_path, 1)["weights_sha256"] == whole["weights_sha256"]
    assert first_line(capsys) == f"--resume auto: beginning at step 0, since {tmp_path} holds no good checkpoint"
    assert path.with_name(f"{path.name}.aside").read_bytes() == b"damaged"


def test_a_result_without_checkpoints_is_not_overwritten_by_a_new_training(tmp_path):
    train_alone(tmp_path, 1)
    shutil.rmtree(tmp_path / "checkpoints")
    before = {path: path.read_bytes() for path in files_of(tmp_path)}
    with pytest.raises(UserError, match="holds the summary of a run, but no good checkpoint to resume from"):
        train_or_resume(tmp_path, 2)
    assert {path: path.read_bytes() for path in files_of(tmp_path)} == before


@pytest.mark.parametrize(
    ("file", "flags", "reason"),
    [
        ("checkpoints/best.safetensors", (), "holds another run: choose a new folder, or resume that run"),
        ("metrics.jsonl", (), r"holds metrics\.jsonl, but no config\.json of a run: choose a new folder, or move these"),
        ("model.safetensors", ("--resume", "auto"), r"holds model\.safetensors, but no config\.json of a run"),
    ],
)
def test_a_folder_with_files_of_another_run_or_program_is_refused(tmp_path, file, flags, reason):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / file).write_text('{"step": 7}\n')
    with pytest.raises(UserError, match=reason):
        train_alone(tmp_path, 1, *flags)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / file]


def test_a_checkpoint_that_cannot_be_read_at_the_moment_is_not_skipped(tmp_path, monkeypatch):
    train_alone(tmp_path, 1)
    before = {path: path.read_bytes() for path in files_of(tmp_path)}

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoint, "readable_path", fail)
    with pytest.raises(UserError, match=r"cannot be read \(Input/output error\): repair the cause"):
        train_or_resume(tmp_path, 2)
    assert {path: path.read_bytes() for path in files_of(tmp_path)} == before


@pytest.mark.parametrize("resume", ["--resume", "--resume=auto"])
def test_the_best_checkpoint_is_used_if_it_is_newer_than_other_good_ones(tmp_path, monkeypatch, resume):
    train_alone(tmp_path, 2)
    path = checkpoint.path_of(tmp_path / "checkpoints", 4)
    assert path.samefile(path.with_name(checkpoint.BEST))
    path.unlink()
    path.write_bytes(b"damaged")
    trained = steps_trained(monkeypatch)
    best = train_alone(tmp_path, 3, resume)["best"]
    assert trained == [5, 6]
    assert checkpoint.step_in(path.with_name(checkpoint.BEST)) == best["step"]


def test_a_checkpoint_beyond_the_last_step_of_this_run_is_refused(tmp_path):
    train_alone(tmp_path, 2)
    with pytest.raises(UserError, match="the checkpoint is of step 4, and this run would end after step 2"):
        train_or_resume(tmp_path, 1)


@pytest.mark.parametrize("removed_folder", ["", "checkpoints"])
def test_resume_auto_with_other_settings_is_refused_and_changes_no_file(tmp_path, removed_folder):
    train_alone(tmp_path, 1)
    if removed_folder:
        shutil.rmtree(tmp_path / removed_folder)
    before = {path: path.read_bytes() for path in files_of(tmp_path)}
    with pytest.raises(UserError, match="--seed 0, and this run has --seed 1: give --seed 0, or another --run-dir"):
        train_or_resume(tmp_path, 1, "--seed", "1")
    with pytest.raises(UserError, match="--global-batch-size 720" if not removed_folder else "holds"):
        train_or_resume(tmp_path, 1, "--global-batch-size", "360", *(("--optimizer", "adam") if removed_folder else ()))
    assert {path: path.read_bytes() for path in files_of(tmp_path)} == before


def test_settings_are_compared_with_the_checkpoint_if_there_is_no_config_file(tmp_path):
    train_alone(tmp_path, 1)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="the checkpoint was made with --seed 0"):
        train_or_resume(tmp_path, 1, "--seed", "1")


@pytest.mark.parametrize("defect", ["summary.json", "model.safetensors", "flipped bit in model.safetensors"])
def test_missing_or_damaged_result_files_of_an_ended_run_are_written_without_training(tmp_path, monkeypatch, defect):
    whole = train_alone(tmp_path, 1)
    before = (tmp_path / "model.safetensors").read_bytes()
    if (tmp_path / defect).exists():
        (tmp_path / defect).unlink()
    else:
        (tmp_path / "model.safetensors").write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    trained = steps_trained(monkeypatch)
    assert train_or_resume(tmp_path, 1)["weights_sha256"] == whole["weights_sha256"]
    assert not trained
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2


def test_the_summary_of_a_shorter_run_does_not_end_a_longer_run(tmp_path, monkeypatch):
    train_alone(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "_step", lambda run: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train_or_resume(tmp_path, 2)  # config.json has the new length, and summary.json the old one
    assert train_or_resume(tmp_path, 2)["steps"] == 4


def test_resume_takes_a_path_that_ends_in_auto_as_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="auto' does not exist"):
        train_alone(tmp_path / "run", 1, "--resume", "./auto")


def test_the_checkpoint_of_the_newer_generation_is_used_if_two_have_the_same_step(monkeypatch):
    """Each rank has a run folder of its own, with its own generation numbers (see ``FolderLock``).

    Generation 1 of rank 0's folder and generation 2 of rank 1's folder each wrote a checkpoint of step 4.
    """
    owners: list[int] = []

    def send(folder: Path, name: str, owner: int, backend: Any) -> tuple[dict[str, Any], str]:
        owners.append(owner)
        return {"cursor": {"step": 4}}, ""

    monkeypatch.setattr(start, "_send", send)
    monkeypatch.setattr(start, "compare_with_checkpoint", lambda *_: None)
    name = "step-00000004.safetensors"
    files = [start._File(4, rank, name, generation, "", [rank]) for rank, generation in ((0, 1), (1, 2))]
    with connect("local") as backend:
        _, copies = start._newest(Path("run"), files, {}, backend, "--resume auto", "")
    assert owners == [1]
    assert list(copies) == [name]


def train_on_own_disk(backend, folder: str, epochs: str) -> tuple[dict[str, Any], list[str]]:
    """Train with a different folder on each rank; return the summary and this rank's warnings."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dualtrain").addHandler(handler)
    try:
        own = f"{folder}/{backend.rank}"
        return train(backend, "--epochs", epochs, "--run-dir", own, "--resume", "auto"), said
    finally:
        logging.getLogger("dualtrain").removeHandler(handler)


@worlds(("torch", 3))
def test_the_rank_that_has_the_newest_checkpoint_sends_it(real, tmp_path):
    whole = real(train, "--epochs", "3", "--run-dir", str(tmp_path / "whole"))[0]
    real(train_on_own_disk, str(tmp_path), "1")
    rank_0, rank_1 = tmp_path / "0", tmp_path / "1"
    shutil.copytree(rank_0, rank_1)
    with connect("local") as backend:  # a job of one rank continues rank 1's copy, and adds the checkpoint of step 4
        train(backend, "--epochs", "2", "--run-dir", str(rank_1), "--resume")
    (rank_1 / "summary.json").unlink()
    shutil.rmtree(rank_0)
    found = real(train_on_own_disk, str(tmp_path), "3")
    assert {one["steps"] for one, _ in found} == {6}
    assert found[0][0]["best"]["step"] == whole["best"]["step"]
    assert found[0][0]["val_accuracy"] == pytest.approx(whole["val_accuracy"], abs=0.02)
    warnings = [[text for text in said if "contains the run only on rank" in text] for _, said in found]
    assert [len(texts) for texts in warnings] == [1, *[0] * (len(found) - 1)]
    assert checkpoint.step_in(rank_0 / "checkpoints" / "step-00000004.safetensors") == 4
    assert not list(rank_1.glob("summary.json"))
    # Now the folders of ranks 0 and 1 have checkpoints, and rank 0's has a summary, so no rank trains.
    lines = (rank_0 / "metrics.jsonl").read_bytes()
    assert {one["steps"] for one, _ in real(train_on_own_disk, str(tmp_path), "3")} == {6}
    assert (rank_0 / "metrics.jsonl").read_bytes() == lines


def other_run_on_a_disk(backend, folder: str) -> str:
    with pytest.raises(UserError) as caught:
        train_on_own_disk(backend, folder, "1")
    return str(caught.value)


def test_a_rank_whose_folder_holds_another_run_is_named(processes, tmp_path):
    train_alone(tmp_path / "1", 1, "--seed", "5")
    for text in processes(other_run_on_a_disk, str(tmp_path)):
        assert "on rank 1 of" in text
        assert "it holds a run with --seed 5, and this run has --seed 0" in text


def test_a_checkpoint_that_a_trainer_saved_in_a_runs_folder_is_refused(tmp_path):
    train_alone(tmp_path, 1)
    with connect("local") as backend:
        model = nn.Linear(2, 2)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), backend=backend)
        trainer.save(tmp_path / "checkpoints" / "step-99999999.safetensors")
    (tmp_path / "summary.json").unlink()
    with pytest.raises(UserError, match="not written by dualtrain train"):
        train_or_resume(tmp_path, 1)
