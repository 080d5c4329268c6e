"""Runs with faults: a kill between the writes of two files, a full disk, bad files in the folder, a forged checkpoint."""

from __future__ import annotations

import copy
import errno
import inspect
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import dualtrain.training.loop as loop
from dualtrain import files
from dualtrain.backends import connect
from dualtrain.config import parse
from dualtrain.data.worker_waits import Waits
from dualtrain.doctor.probe import probe
from dualtrain.errors import NotSavedError, StoppedError, UserError
from dualtrain.launchers import detect_world
from dualtrain.models import build, classifiers
from dualtrain.run_folder import checkpoint, checkpoint_writer
from dualtrain.run_folder.attempt_events import append_events, read_events
from dualtrain.run_folder.folder_lock import FolderLock
from dualtrain.run_folder.run_dir import MetricsFile, step_of
from dualtrain.trainer.optimizer_state import check_state
from dualtrain.training import assemble, signals
from dualtrain.training.cursor import Cursor
from dualtrain.training.optimizers import optimizer_names
from dualtrain.training.resume import set_aside
from dualtrain.training.signals import note_early_requests
from tests.training.runs import KilledError, train_alone

#: Flags of a run with an evaluation after every two steps. Each evaluation is better than the one before.
FLAGS = ("--global-batch-size", "720", "--lr", "0.02", "--momentum", "0.9", "--log-every", "1")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "threads", lambda backend: 1)


def train(folder: Path, epochs: int, *flags: str) -> dict[str, Any]:
    return train_alone(*FLAGS, "--epochs", str(epochs), "--run-dir", str(folder), *flags)


def best_of(folder: Path) -> tuple[int | None, int | None]:
    """Return the step of the best checkpoint, and the step of the best weights; ``None`` for a missing file."""
    return checkpoint.step_in(folder / "checkpoints" / checkpoint.BEST), step_of(folder / "model-best.safetensors")


@pytest.mark.parametrize("place", ["keep_as_best", "write_weights"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_resume_writes_the_best_files_that_a_killed_run_did_not_write(tmp_path, monkeypatch, place, epochs):
    whole = train(tmp_path / "whole", epochs)
    if epochs == 2:
        train(tmp_path / "run", 1)
    flags = ("--resume",) if epochs == 2 else ()

    def killed(*args: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, place, killed)
        patch.setattr("threading.excepthook", lambda args: None)
        patch.setattr(loop.Run, "_conclude", killed)
        with pytest.raises(KilledError):
            train(tmp_path / "run", epochs, *flags)
    step = whole["best"]["step"]
    assert step == 2 * epochs  # the last evaluation is the best, and the run was killed before it had written both files
    assert best_of(tmp_path / "run") != (step, step)
    resumed = train(tmp_path / "run", epochs, "--resume")
    assert resumed["best"] == whole["best"]
    assert best_of(tmp_path / "run") == (step, step)
    for name in ("model-best.safetensors", "model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_resume_from_an_earlier_checkpoint_restores_its_best_evaluation(tmp_path, caplog):
    train(tmp_path, 3)
    assert best_of(tmp_path) == (6, 6)
    earlier = checkpoint.path_of(tmp_path / "checkpoints", 4)
    with pytest.raises(KeyboardInterrupt):
        interrupted_resume(tmp_path, earlier)
    assert best_of(tmp_path) == (4, 4)  # not step 6, which the resumed run has not reached
    assert (tmp_path / "checkpoints" / "step-00000006.safetensors.aside").exists()
    # Without a checkpoint of the best step, the run discards its best evaluation, and a later evaluation becomes the best.
    (tmp_path / "checkpoints" / checkpoint.BEST).unlink()
    state = checkpoint.load(earlier)
    state["cursor"]["best"] = {**state["cursor"]["best"], "step": 3}
    checkpoint.write(earlier, state)
    with pytest.raises(KeyboardInterrupt):
        interrupted_resume(tmp_path, earlier)
    assert "the best evaluation (step 3) is missing" in caplog.text
    resumed = train(tmp_path, 3, "--resume", str(earlier))
    assert resumed["best"]["step"] == 6
    assert best_of(tmp_path) == (6, 6)
    # The best weights may be missing, if the process was killed before it wrote them, or damaged by the disk.
    weights = tmp_path / "model-best.safetensors"
    whole = weights.read_bytes()
    for damaged in (None, whole[:-1] + bytes([whole[-1] ^ 1])):
        weights.unlink() if damaged is None else weights.write_bytes(damaged)
        train(tmp_path, 3, "--resume")
        assert weights.read_bytes() == whole


@pytest.fixture
def unreadable_best(tmp_path, monkeypatch):
    """Yield the folder of an ended run. During the test, its best checkpoint cannot be read (a stale NFS handle)."""
    open_regular = files.open_regular

    def stale(path: Any) -> Any:
        if Path(path).name == checkpoint.BEST and Path(path).exists():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return open_regular(path)

    train(tmp_path, 3)
    with monkeypatch.context() as patch:
        patch.setattr(files, "open_regular", stale)
        yield tmp_path


def test_a_best_checkpoint_that_cannot_be_read_now_is_not_given_up(unreadable_best):
    folder = unreadable_best / "checkpoints"
    same_step = folder / "step-00000006.safetensors"
    assert checkpoint.find_step([folder], 6)[0] == same_step
    same_step.unlink()
    with pytest.raises(UserError, match=r"\(step 6\), but cannot be read \(Stale file handle\): repair") as error:
        checkpoint.find_step([folder], 6)
    assert error.value.transient
    (folder / checkpoint.BEST).unlink()
    assert checkpoint.find_step([folder], 6) is None


@pytest.mark.parametrize("last_step", [4, 6])
@pytest.mark.parametrize("resume", ["--resume", "--resume=auto"])
def test_a_run_resumes_although_a_best_checkpoint_that_it_does_not_need_cannot_be_read(unreadable_best, resume, last_step):
    if last_step == 4:
        (unreadable_best / "checkpoints" / "step-00000006.safetensors").unlink()
    train(unreadable_best, 4, resume)
    assert step_of(unreadable_best / "model-best.safetensors") == 8


def interrupted_resume(folder: Path, path: Path) -> None:
    """Resume, and raise KeyboardInterrupt before the first step."""

    def interrupt(run: loop.Run, signals: Any) -> None:
        with run.records:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Run, "train", interrupt)
        train(folder, 3, "--resume", str(path))


def test_files_that_cannot_be_read_at_a_start_are_set_aside(tmp_path):
    """They may be of later steps, and readable again when a restart looks for the newest checkpoint."""
    (tmp_path / "checkpoints").mkdir()
    names = ("checkpoints/best.safetensors", "model-best.safetensors", "summary.json")
    for name in names:
        (tmp_path / name).touch()
    set_aside(tmp_path, Cursor(step=3, best={"step": 2}), FolderLock())  # the files of step 2 may be needed
    assert [(tmp_path / name).exists() for name in names] == [True, True, False]
    set_aside(tmp_path, Cursor(step=1), FolderLock())
    assert [(tmp_path / name).exists() for name in names] == [False] * 3
    assert all((tmp_path / f"{name}.aside").exists() for name in names)


def test_files_that_are_set_aside_replace_no_earlier_files(tmp_path):
    for content in (b"first", b"second"):
        (tmp_path / "step").write_bytes(content)
        os.link(tmp_path / "step", tmp_path / "best")
        for name in ("step", "best"):  # both names are links to one file, which is kept once
            checkpoint.put_aside(tmp_path / name, tmp_path / "step", FolderLock())
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert kept == {"step.aside": b"first", "step.aside-2": b"second"}


def test_a_resume_does_not_read_the_published_weights_again(tmp_path, monkeypatch):
    torch.manual_seed(3)
    torch.save(build("squeezenet1_1", (3, 32, 32), 1000).state_dict(), tmp_path / "published.pt")
    flags = ["--dataset", "synthetic", "--shape", "3,32,32", "--samples", "4", "--classes", "3", "--global-batch-size", "2"]
    flags += ["--model", "squeezenet1_1", "--pretrained", "--max-steps"]
    with monkeypatch.context() as patch:
        patch.setattr(assemble, "fetch", lambda name: tmp_path / "published.pt")
        patch.setattr(classifiers, "fetch", lambda name: tmp_path / "published.pt")
        train(tmp_path / "run", 1, *flags, "1")
    monkeypatch.setattr(torch.hub, "download_url_to_file", None)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "empty"))
    assert train(tmp_path / "run", 1, *flags, "2", "--resume")["steps"] == 2
    weights = str(tmp_path / "run" / "model.safetensors")
    assert train(tmp_path / "other", 1, *flags, "1", "--weights", weights)["steps"] == 1  # instead of the published weights


def fill_disk(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Simulate a full disk: until ``monkeypatch`` is undone, fsync fails for files with ``part`` in their paths."""
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if part in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", full)


def test_training_continues_on_a_full_disk_and_the_run_then_ends_with_an_error(tmp_path, monkeypatch, caplog):
    reference = train(tmp_path / "whole", 2)
    fill_disk(monkeypatch, ".safetensors")
    said = r"last checkpoint .*model.safetensors \(No space left on device\).*free space .*, then start again with the same"
    with pytest.raises(NotSavedError, match=said):
        train(tmp_path / "run", 2)
    assert caplog.text.count("could not be written (No space left on device): training continues") == 2
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert not (tmp_path / "run" / "summary.json").exists()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["val_loss"] == reference["val_loss"]


@pytest.mark.parametrize(
    ("part", "cure"), [("step", "start again with the same command"), ("step-00000003", "continue fr")]
)
def test_a_stopped_run_without_a_new_checkpoint_says_how_to_continue(tmp_path, monkeypatch, part, cure):
    step = loop.Run._step

    def signalled(run: loop.Run) -> list[float]:
        if run.cursor.step == 2:  # an epoch has 2 steps, and a checkpoint at its end
            os.kill(os.getpid(), signal.SIGTERM)
        return step(run)

    monkeypatch.setattr(loop.Run, "_step", signalled)
    fill_disk(monkeypatch, part)
    reason = (
        r"and its checkpoint could not be written \(No space left on device\): free space on the disk of the run folder"
    )
    with pytest.raises(StoppedError, match=f"SIGTERM ended the run after step 3 of 4, {reason}, then {cure}"):
        train(tmp_path, 2)


@pytest.mark.parametrize("stopped", [True, False])
def test_a_run_whose_folder_was_moved_says_how_to_continue(tmp_path, monkeypatch, stopped):
    step = loop.Run._step

    def moved(run: loop.Run) -> list[float]:
        if run.cursor.step == 2:
            run.writer.wait()  # for the checkpoint of step 2
            (tmp_path / "run").rename(tmp_path / "moved")
            if stopped:
                os.kill(os.getpid(), signal.SIGTERM)
        return step(run)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "_step", moved)
        cure = "the folder was moved or removed: move it back, then continue from the last saved checkpoint with the same"
        with pytest.raises((StoppedError, NotSavedError), match=rf"No such file or directory\).*: {cure} command"):
            train(tmp_path / "run", 2, "--resume", "auto")
    (tmp_path / "moved").rename(tmp_path / "run")
    resumed, whole = train(tmp_path / "run", 2, "--resume", "auto"), train(tmp_path / "whole", 2)
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def test_a_run_without_its_last_checkpoint_has_not_ended(tmp_path, monkeypatch, capsys):
    whole = train(tmp_path / "whole", 2)
    with monkeypatch.context() as patch:
        fill_disk(patch, "step-00000004")
        with pytest.raises(NotSavedError, match=r"the last checkpoint .* continue from the last saved checkpoint with"):
            train(tmp_path / "run", 2, "--resume", "auto")
    assert train(tmp_path / "run", 2, "--resume", "auto")["weights_sha256"] == whole["weights_sha256"]
    assert "resuming from step 2" in capsys.readouterr().out
    assert checkpoint.step_in(checkpoint.path_of(tmp_path / "run" / "checkpoints", 4)) == 4


def refuse_threads(patch: pytest.MonkeyPatch) -> None:
    """Make the start of every new thread fail as it does under a limit (``ulimit -u``)."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", refuse)


def test_the_error_of_a_thread_that_cannot_be_started_names_the_limit(tmp_path, monkeypatch):
    refuse_threads(monkeypatch)
    refusal = r"could not be started \(can't start new thread\): raise the limit.*ulimit -u"
    with pytest.raises(UserError, match=refusal):
        train(tmp_path / "run", 2)
    with pytest.raises(UserError, match=refusal):
        Waits(list, 1.0)
    assert re.search(refusal, probe("local", detect_world(), 1.0).error)


def test_best_weights_that_could_not_be_written_are_written_with_the_next_checkpoint(tmp_path):
    reports: list[str] = []
    (tmp_path / "checkpoints").mkdir()
    saver = checkpoint_writer.Writer(tmp_path, 1, reports.append, 10.0, FolderLock())
    weights = {"w": torch.ones(2)}
    with pytest.MonkeyPatch.context() as patch:
        fill_disk(patch, "model-best")
        saver.write(1, checkpoint.Packed({"cursor": {"step": 1}}), best=weights)
        saver.wait()
    assert saver.failed is None  # the checkpoint itself was written
    assert list(saver.unwritten()) == ["the files of the best evaluation"]
    with pytest.MonkeyPatch.context() as patch:
        fill_disk(patch, "step-00000002")
        saver.write(2, checkpoint.Packed({"cursor": {"step": 2}}), best=weights)
        saver.wait()
    best = "the files of the best evaluation (step 1)"
    assert [report.split(" could")[0] for report in reports] == [best, "the checkpoint of step 2"]
    saver.write(3, checkpoint.Packed({"cursor": {"step": 3}}))
    saver.wait()
    assert not saver.unwritten()
    assert best_of(tmp_path) == (2, 2)
    assert [path.name for path in checkpoint.found(tmp_path / "checkpoints")] == ["step-00000003.safetensors"]


def test_a_checkpoint_is_written_although_no_thread_can_be_started(tmp_path, monkeypatch):
    refuse_threads(monkeypatch)
    (tmp_path / "checkpoints").mkdir()
    saver = checkpoint_writer.Writer(tmp_path, 1, pytest.fail, 10.0, FolderLock())
    saver.write(1, checkpoint.Packed({"cursor": {"step": 1}}))
    saver.wait()
    assert [path.name for path in checkpoint.found(tmp_path / "checkpoints")] == ["step-00000001.safetensors"]


def test_old_checkpoints_that_cannot_be_removed_are_reported_and_the_run_ends_normally(tmp_path, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint_writer, "drop_old", refuse)
    assert train(tmp_path, 2)["steps"] == 4
    said = "old checkpoints could not be removed (Permission denied): training continues; repair the disk or the perm"
    assert caplog.text.count(said) == 2
    assert "could not be written" not in caplog.text


def test_a_resume_with_no_step_left_removes_the_old_checkpoints_that_a_killed_run_did_not_remove(tmp_path, monkeypatch):
    def killed(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "drop_old", lambda *_: None)
        patch.setattr(loop.Run, "_conclude", killed)
        with pytest.raises(KilledError):
            train(tmp_path, 2, "--keep", "1")
    assert len(checkpoint.found(tmp_path / "checkpoints")) == 2
    train(tmp_path, 2, "--keep", "1", "--resume")
    assert [path.name for path in checkpoint.found(tmp_path / "checkpoints")] == ["step-00000004.safetensors"]


def test_metrics_that_cannot_be_written_do_not_end_the_training(tmp_path, caplog):
    write = MetricsFile.write

    def full(self: MetricsFile, **values: Any) -> None:
        if values["step"] == 2:
            raise OSError(28, "No space left on device")
        write(self, **values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsFile, "write", full)
        assert train(tmp_path, 2)["steps"] == 4
    said = "metrics.jsonl: step 2 could not be written (No space left on device): training continues"
    assert caplog.text.count(said) == 2  # one warning for the step, one for the evaluation


def test_a_full_disk_at_the_last_tensorboard_events_only_causes_a_warning(tmp_path, monkeypatch, caplog):
    """TensorBoard's thread buffers events, and the last of them are written when the file is closed."""
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    writer = pytest.importorskip("tensorboard.summary.writer.record_writer").RecordWriter

    def full(self: object, *_: object) -> None:
        raise OSError(28, "No space left on device")

    def fill(run: loop.Run) -> None:
        monkeypatch.setattr(writer, "flush", full)

    monkeypatch.setattr(loop.Run, "_print_opening", fill)
    assert train(tmp_path, 1, "--tensorboard")["steps"] == 2
    said = "the end of TensorBoard's events could not be written (No space left on device); free space on the disk"
    assert said in caplog.text


def test_an_evaluation_that_a_resumed_run_repeats_has_one_line_of_metrics(tmp_path, monkeypatch):
    flags, save = ("--checkpoint-every", "2", "--checkpoint-epochs", "2"), loop.Run._save

    def killed_after_the_evaluation(run: loop.Run, *, best: bool) -> None:
        if best:
            raise KilledError
        save(run, best=best)
        run.writer.wait()

    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "_save", killed_after_the_evaluation)
        with pytest.raises(KilledError):
            train(tmp_path, 2, *flags)
    train(tmp_path, 2, *flags, "--resume")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [
        *(("step", 1), ("step", 2), ("epoch", 2)),
        *(("step", 3), ("step", 4), ("epoch", 4)),
    ]


def test_a_partly_written_metrics_line_is_removed_if_the_disk_is_full(tmp_path):
    file = MetricsFile(tmp_path, 0, print, FolderLock())
    file.write(step=1)
    raw = file._file

    class Short:
        def write(self, data: bytes) -> int:
            return raw.write(data[:5])

        truncate, close = raw.truncate, raw.close

    file._file = Short()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        file.write(step=2)
    file._file = raw
    file.write(step=3)
    file.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 3]


def test_a_single_line_that_is_not_a_metric_is_reported_in_the_singular(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nno metric\n')
    said: list[str] = []
    MetricsFile(tmp_path, 9, said.append, FolderLock()).close()
    assert ["metrics.jsonl has 1 line that is not a metric, " in line for line in said] == [True]


@pytest.mark.parametrize(
    ("end", "kept"), [("", [1]), ('{"step": 2', [1]), ('{"step": 2}', [1, 2]), ('{"step": 2}\n', [1, 2]), ("\n", [1])]
)
def test_a_last_line_without_newline_is_kept_if_it_is_complete(tmp_path, end, kept):
    path, said = tmp_path / "metrics.jsonl", []
    path.write_text('{"step": 1}\n' + end)
    file = MetricsFile(tmp_path, 9, said.append, FolderLock())
    file.write(step=3)
    file.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*kept, 3]
    assert not said


def test_events_can_be_read_after_an_incomplete_line(tmp_path):
    end = {"event": "end", "attempt": "a"}
    (tmp_path / "attempts.jsonl").write_text(json.dumps(end) + '\n{"event": "fai')
    append_events(tmp_path, FolderLock(), end)
    assert read_events(tmp_path) == [end, end]


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "free space on the disk of this folder"),
        (errno.EMFILE, "raise the limit of open files (ulimit -n)"),
        (errno.EROFS, "choose a folder that you may write"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_with_the_cure(tmp_path, monkeypatch, number, cure):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("dualtrain.run_folder.run_dir.write_json", fail)
    with pytest.raises(UserError, match=rf"cannot be written \({os.strerror(number)}\): {re.escape(cure)}") as error:
        train(tmp_path, 1)
    assert error.value.transient


def test_metrics_that_cannot_be_examined_now_are_not_replaced(tmp_path, monkeypatch):
    path, lstat = tmp_path / "metrics.jsonl", os.lstat
    path.write_text('{"step": 1}\n')

    def fail(file: Any, **options: Any) -> os.stat_result:
        if os.fspath(file) == str(path):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(file))
        return lstat(file, **options)

    monkeypatch.setattr(os, "lstat", fail)
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        MetricsFile(tmp_path, 1, print, FolderLock())
    assert path.read_text() == '{"step": 1}\n'


def test_each_damaged_metrics_file_is_kept_under_a_different_name(tmp_path):
    metrics, said = tmp_path / "metrics.jsonl", []
    for damage in ("one", "two", "three"):
        metrics.write_text(f'{{"step": 1}}\n{damage}\n')
        MetricsFile(tmp_path, 9, said.append, FolderLock()).close()
    kept = [tmp_path / f"metrics.jsonl.aside{number}" for number in ("", "-2", "-3")]
    assert [path.read_text().splitlines()[1] for path in kept] == ["one", "two", "three"]
    assert [line.rpartition(" ")[2] for line in said] == [path.name for path in kept]
    assert len(list(tmp_path.iterdir())) == 4


def test_bad_files_in_a_runs_folder_do_not_stop_a_resume(tmp_path, caplog):
    train(tmp_path, 1)
    metrics = tmp_path / "metrics.jsonl"
    good = metrics.read_text()
    metrics.write_bytes(good.encode() + b'not json\n[]\n{"step": "x"}\n\xff\xfe\n' + b"[" * 10**5 + b"\n{")
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step-latest.safetensors").write_bytes(b"")
    (checkpoints / "step-00000009.safetensors").symlink_to("step-00000009.safetensors")
    names = (f".{name}.{'0a' * 8}.tmp" for name in ("model-best.safetensors", "metrics.jsonl.aside", ".progress"))
    left = [checkpoints / ".step-00000001.safetensors.tmp", *(tmp_path / name for name in names)]
    for path in left:
        path.write_text("of a process that was killed")
    mine = tmp_path / ".notes.tmp"
    mine.write_text("not of a run")
    train(tmp_path, 2, "--resume")
    printed = caplog.text
    assert "metrics.jsonl has 5 lines that are not metrics" in printed
    assert "step-00000009.safetensors' cannot be read (Too many levels of symbolic links)" in printed
    assert metrics.read_text().startswith(good)
    assert all(isinstance(json.loads(line)["step"], int) for line in metrics.read_text().splitlines())
    assert "not json" in (tmp_path / "metrics.jsonl.aside").read_text(errors="replace")
    assert [path for path in left if path.exists()] == []
    assert mine.exists()


#: Changes of a checkpoint's tree, each of which must make a resume fail.
CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "cursor": lambda tree: tree["cursor"].update(step="2"),
    "cursor names": lambda tree: tree["cursor"].update(extra=1),
    "cursor sums": lambda tree: tree["cursor"].update(sums=[0.0]),
    "cursor nan": lambda tree: tree["cursor"]["sums"].__setitem__(0, float("nan")),
    "cursor best": lambda tree: tree["cursor"]["best"].update(step=float("nan")),
    "cursor missing": lambda tree: tree.pop("cursor"),
    "data": lambda tree: tree.update(data=[]),
    "data keys": lambda tree: tree.update(data={}),
    "data text": lambda tree: tree["data"].update(samples="x\n"),
    "data tensor": lambda tree: tree["data"].update(classes=torch.ones(3)),
    "trainer": lambda tree: tree["trainer"].pop("optimizer"),
    "model": lambda tree: tree["trainer"].update(model={"a": torch.ones(1)}),
    "ranks": lambda tree: tree["trainer"].update(ranks=[]),
    "random": lambda tree: tree["trainer"]["ranks"][0]["random"].update(torch=torch.ones(3)),
    "momentum": lambda tree: tree["trainer"]["optimizer"]["state"].update({0: {"momentum_buffer": torch.ones(1)}}),
    "groups": lambda tree: tree["trainer"]["optimizer"].update(param_groups=[]),
    "format": lambda tree: tree.update(format=[2]),
    "format tensor": lambda tree: tree.update(format=torch.ones(3)),
    "config tensor": lambda tree: tree["config"].update(model=torch.ones(3)),
    "config": lambda tree: tree.update(config=None),
    "threads text": lambda tree: tree["config"].update(threads="2"),
    "threads many": lambda tree: tree["config"].update(threads=10**6),
    "platform": lambda tree: tree.update(platform=[]),
    "platform tensor": lambda tree: tree.update(platform={"torch": torch.ones(3)}),
}


def forged(good_tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the forged tree of each case."""
    for name, change in CHANGES.items():
        tree = copy_containers(good_tree)
        change(tree)
        yield name, tree
    yield "list", [1]


def test_a_forged_checkpoint_with_a_valid_hash_is_refused_in_one_line(tmp_path):
    train(tmp_path, 1)
    path = checkpoint.found(tmp_path / "checkpoints")[0]
    good = checkpoint.load(path)
    for case, tree in forged(good):
        checkpoint.write(path, tree)
        with pytest.raises(UserError, match=r"checkpoint") as refusal:
            train(tmp_path, 2, "--resume", str(path))
        assert "\n" not in str(refusal.value), case
        assert len(str(refusal.value)) < 600, case
    checkpoint.write(path, good)
    assert train(tmp_path, 2, "--resume", str(path))["steps"] == 4


def optimizer_of(
    kind: Any, shapes: tuple[tuple[int, ...], ...] = ((4, 3), (6, 5)), **options: Any
) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind([nn.Parameter(torch.ones(shape)) for shape in shapes], lr=0.01, **options)
    return optimizer


def stepped(kind: Any, **options: Any) -> dict[str, Any]:
    """Return the state of an optimizer after a step."""
    optimizer = optimizer_of(kind, **options)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return copy.deepcopy(optimizer.state_dict())


def load_and_check(kind: Any, state: dict[str, Any], **options: Any) -> None:
    optimizer = optimizer_of(kind, **options)
    optimizer.load_state_dict(state)
    check_state(optimizer)


def test_loading_the_state_of_every_optimizer_leaves_the_random_state_unchanged():
    before = torch.get_rng_state()
    for kind in optimizer_names().values():
        for options in ({}, {"momentum": 0.9}, {"amsgrad": True}, {"centered": True}, {"foreach": True}, {"fused": True}):
            if options.keys() <= inspect.signature(kind).parameters.keys():
                load_and_check(kind, stepped(kind, **options), **options)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("forge", "part"),
    [
        (lambda state, group: state.pop("exp_avg"), "exp_avg is missing"),
        (lambda state, group: state.update(exp_avg=1), "exp_avg is missing, or has the wrong type"),
        (lambda state, group: state.update(exp_avg=torch.ones(())), r"exp_avg has the shape \(\) for a parameter of shape"),
        (lambda state, group: state.update(step=torch.ones(2)), r"step has the shape \(2,\)"),
        (lambda state, group: group.pop("betas"), "parameter group 0 has no usable value of betas: found no value"),
        (lambda state, group: group.update(betas=[0.9]), "no usable value of betas: found a value of type list"),
        (lambda state, group: group.update(eps="x"), "no usable value of eps: found a value of type str"),
    ],
)
def test_a_damaged_optimizer_state_is_refused_when_it_is_loaded(forge, part):
    saved = stepped(torch.optim.Adam)
    forge(saved["state"][1], saved["param_groups"][0])
    with pytest.raises(ValueError, match=part):
        load_and_check(torch.optim.Adam, saved)


def copy_containers(value: Any) -> Any:
    """Copy dictionaries and lists, but not the tensors in them."""
    if isinstance(value, dict):
        return {key: copy_containers(item) for key, item in value.items()}
    return [copy_containers(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    for part, per_class in (("train", 4), ("val", 1)):
        for number, kind in enumerate(("cat", "dog")):
            (folder / part / kind).mkdir(parents=True)
            for image in range(per_class):
                Image.new("RGB", (12, 12), (90 * number, 40 * image, 0)).save(folder / part / kind / f"{image}.png")
    return folder


def test_sigterm_saves_a_checkpoint_whether_workers_or_the_rank_get_it_first(images, tmp_path, capsys):
    flags = ["--dataset", "imagefolder", "--data-dir", str(images), "--image-size", "8", "--batch-size", "2", "--workers"]
    flags += ["1", "--model", "convnet", "--lr", "0.01", "--epochs", "2"]
    step = loop.Run._step
    # SIGTERM is sent to the helper processes before step ``helpers_at``, and to this process before step ``rank_at``.
    for helpers_at, rank_at in ((2, 3), (3, 2), (2, 2)):

        def signalled(run: loop.Run, helpers_at: int = helpers_at, rank_at: int = rank_at) -> list[float]:
            if run.cursor.step + 1 == helpers_at:
                for pid in helpers(run):
                    os.kill(pid, signal.SIGTERM)
            if run.cursor.step + 1 == rank_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(run)

        folder = tmp_path / f"{helpers_at}-{rank_at}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop.Run, "_step", signalled)
            said = rf"SIGTERM ended the run after step {rank_at} of 8, saved in .*; "
            said += "continue with the same command and --resume$"
            with pytest.raises(StoppedError, match=said) as stopped, connect("local") as backend:
                loop.train(parse([*flags, "--run-dir", str(folder)]), backend)
        assert stopped.value.number == signal.SIGTERM
        assert checkpoint.step_in(checkpoint.found(folder / "checkpoints")[0]) == rank_at


def helpers(run: loop.Run) -> list[int]:
    """Return the process ids of a run's workers, of the server that forks them, and of the resource tracker."""
    loaders = (run.task.train._loader, run.task.val._loader)  # type: ignore[attr-defined]
    workers = [worker.pid for loader in loaders if loader is not None for worker in loader._iterator._workers]
    assert workers
    return [*workers, forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid]


def test_sigusr1_before_the_first_step_saves_a_checkpoint_after_that_step(tmp_path):
    earlier = signal.getsignal(signal.SIGUSR1)
    note_early_requests()
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        with connect("local") as backend:
            loop.train(parse([*FLAGS, "--epochs", "1", "--keep", "9", "--run-dir", str(tmp_path)]), backend)
        os.kill(os.getpid(), signal.SIGUSR1)  # after the run: it neither ends this process nor causes a third checkpoint
    finally:
        signal.signal(signal.SIGUSR1, earlier)
        signals._early.clear()
    assert [path.stem for path in checkpoint.found(tmp_path / "checkpoints")] == ["step-00000002", "step-00000001"]


def test_a_structure_that_is_nested_too_deeply_is_refused(tmp_path):
    import hashlib

    depth = sys.getrecursionlimit()  # larger than usual if torch's compiler has run in this process
    for number, structure in enumerate(("[" * 10**5, '["list",[' * depth + "]" * 2 * depth)):
        header = {"structure": structure, "sha256": hashlib.sha256(structure.encode()).hexdigest()}
        path = tmp_path / f"step-0000000{number}.safetensors"
        path.write_bytes(safetensors.torch.save({}, metadata=header))
        with pytest.raises(UserError, match="its structure cannot be read"):
            checkpoint.load(path)


def test_sizes_that_do_not_fit_into_memory_cause_a_one_line_error(tmp_path, monkeypatch):
    for flags, part in (
        (["--recipe", "synthetic", "--samples", str(2**32 - 1)], "has 4294967295 samples"),
        (["--pad", str(2**32 - 1), "--augment", "crop-flip"], "too large for this machine"),
        (["--image-size", str(2**32 - 1)], "too large for this machine"),
        (["--model", "tests.models_for_tests:enormous"], "too large for this machine .*allocate"),
    ):
        with pytest.raises(UserError, match=part) as refusal, connect("local") as backend:
            loop.train(parse([*flags, "--run-dir", str(tmp_path)]), backend)
        assert "\n" not in str(refusal.value)


def test_an_optimizer_whose_lr_is_a_tensor_loads_a_state_whose_lr_is_a_number():
    optimizer = optimizer_of(torch.optim.Adam)
    optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] = torch.tensor(0.01)
    optimizer.load_state_dict(stepped(torch.optim.Adam))
    check_state(optimizer)
