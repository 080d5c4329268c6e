"""Attempts of a run: recoveries, causes of failures, and refusals of restarts that would fail again."""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dualtrain.training.loop as loop
from dualtrain.backends import Backend, connect
from dualtrain.backends.watch import Watch
from dualtrain.config import OutputSection, parse
from dualtrain.errors import (
    BackendError,
    DivergedError,
    NotSavedError,
    PeerFailedError,
    PeerFailure,
    StoppedError,
    UserError,
)
from dualtrain.run_folder import attempt_events, last_step, restarts
from dualtrain.run_folder.attempt_events import Death
from dualtrain.run_folder.attempts import Attempt
from dualtrain.run_folder.folder_lock import FolderLock
from tests.training.runs import KilledError

#: Flags of a run with four steps and an evaluation after every two steps.
FLAGS = ("--global-batch-size", "720", "--lr", "0.02", "--threads", "1", "--workers", "0", "--epochs", "2")
FLAGS += ("--checkpoint-every", "1")


def train(backend, folder: Path, *flags: str) -> dict[str, Any]:
    return loop.train(parse([*FLAGS, "--run-dir", str(folder), *flags]), backend)


def train_or_resume(folder: Path, *flags: str) -> dict[str, Any]:
    with connect("local") as backend:
        return train(backend, folder, "--resume", "auto", *flags)


def end_with(folder: Path, error: BaseException, step: int, *flags: str) -> None:
    """Make a run end with ``error`` after ``step``, or before its first step if ``step`` is 0.

    A run that a ``KilledError`` ends does not record its failure, like a run that SIGKILL ends.
    """
    original = loop.Run._step

    def failing(run: loop.Run) -> list[float]:
        if run.cursor.step < step:
            return original(run)
        run.writer.wait()
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Run, "_step", failing)
        if isinstance(error, KilledError):
            patch.setattr(Attempt, "fail", lambda *_, **__: None)
        with pytest.raises(type(error)):
            train_or_resume(folder, *flags)


def test_every_recovery_is_printed_and_listed_in_the_summary(tmp_path, capsys):
    whole = train_or_resume(tmp_path / "whole")
    assert whole["recoveries"] == []
    folder = tmp_path / "run"
    end_with(folder, KilledError(), 2)
    end_with(folder, ValueError("a bad sample\nand more"), 3)
    end_with(folder, StoppedError("saved", 15), 3)  # resumes after step 3, and stops before another step
    capsys.readouterr()
    summary = train_or_resume(folder)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("recovered")]
    assert len(lines) == 2
    assert lines[0].startswith("recovered: rank 0 stopped: ValueError: a bad sample, after step 3; 0 steps repeated, ")
    assert lines[1].startswith("recovered: SIGTERM stopped all ranks, after step 3; 0 steps repeated, ")
    assert re.search(r", the next step \(4\) ended \d+\.\d s after the failure$", lines[1])
    found = [(one["cause"], one["rank"], one["step"]) for one in summary["recoveries"]]
    assert found == [
        ("not known", None, 2),
        ("stopped: ValueError: a bad sample", 0, 3),
        ("SIGTERM stopped all ranks", None, 3),
    ]
    assert [set(one) for one in summary["recoveries"]] == [{"cause", "rank", "step", "steps_repeated", "seconds"}] * 3
    assert all(0 <= one["seconds"] < 600 for one in summary["recoveries"])
    assert summary["weights_sha256"] == whole["weights_sha256"]
    assert json.loads((folder / "summary.json").read_text())["recoveries"] == summary["recoveries"]
    # The run has ended: no further attempt.
    assert train_or_resume(folder) == json.loads((folder / "summary.json").read_text())


def test_repeated_steps_are_counted(tmp_path, capsys):
    end_with(tmp_path, KilledError(), 3)
    (tmp_path / "checkpoints" / "step-00000003.safetensors").unlink()
    (tmp_path / "checkpoints" / "step-00000002.safetensors").write_bytes(b"damaged")
    end_with(tmp_path, KilledError(), 1)  # resumes after step 1, and dies before another step
    summary = train_or_resume(tmp_path)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("recovered")]
    assert said[0].startswith("recovered: a failure of unknown cause, after step 3; 2 steps repeated, ")
    assert [(one["step"], one["steps_repeated"]) for one in summary["recoveries"]] == [(3, 2), (1, 0)]


def test_a_recovery_without_a_step_left_to_train_is_printed_with_the_time_until_the_run_ended(tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Run, "_conclude", lambda run: (_ for _ in ()).throw(ValueError("an error")))
        with pytest.raises(ValueError, match="an error"):
            train_or_resume(tmp_path)
    train_or_resume(tmp_path)
    said = r"recovered: rank 0 stopped: ValueError: an error, after step 4; 0 steps repeated, the run ended \d+\.\d s after"
    assert re.search(said, capsys.readouterr().out)


def test_a_process_of_an_earlier_attempt_changes_nothing(tmp_path):
    with connect("local") as backend:
        old, new = Attempt(FolderLock()), Attempt(FolderLock())
        old.begin(tmp_path, 0, backend)
        old.train()
        new.begin(tmp_path, 0, backend)
        new.train()
        files = [tmp_path / attempt_events.NAME, tmp_path / last_step.PROGRESS]
        before = [path.read_bytes() for path in files]
        assert not old.is_newest
        assert new.is_newest
        old.step(7)
        old.fail("stopped", 0)
        old.end()
        with pytest.raises(DivergedError), restarts.recorded(old, {}, backend):
            raise DivergedError("inf")
        assert [path.read_bytes() for path in files] == before
        assert not (tmp_path / restarts.NAME).exists()
        new.close()


def test_the_number_of_each_step_is_recorded_before_the_next_step(tmp_path):
    with connect("local") as backend:
        attempt = Attempt(FolderLock())
        attempt.begin(tmp_path, 0, backend)
        attempt.train()
        name = attempt_events.read_events(tmp_path)[-1]["attempt"]
        for step in range(1, 5):
            attempt.step(step)
            assert last_step.last_step_of(tmp_path, name)[0] == step
        attempt.close()


class Superseded(FolderLock):
    """A lock on a folder that another process has taken over."""

    def is_mine(self) -> bool:
        return False


@pytest.mark.parametrize("call", ["begin", "train", "step", "fail", "refuse", "end", "forbid", "deaths"])
def test_nothing_is_recorded_once_another_process_owns_the_folder(tmp_path, call):
    calls = {
        "train": lambda: attempt.train(),
        "step": lambda: attempt.step(3),
        "fail": lambda: attempt.fail("stopped", 0),
        "refuse": lambda: attempt.refuse("bad data"),
        "end": lambda: attempt.end(),
        "forbid": lambda: diverge(attempt, backend),
        "begin": lambda: Attempt(attempt.lock).begin(tmp_path, 2, backend),
        "deaths": lambda: restarts.check_restart(OutputSection(run_dir=str(tmp_path), resume="auto"), {}, attempt.lock),
    }
    with connect("local") as backend:
        die_twice(tmp_path, backend)
        attempt = Attempt(FolderLock())
        attempt.begin(tmp_path, 2, backend)
        if call not in ("train", "begin"):
            attempt.train()
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        attempt.lock.__class__ = Superseded
        with suppress(UserError, DivergedError):
            calls[call]()
        attempt.close()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_only_the_process_that_owns_the_folder_adds_events(tmp_path):
    with pytest.raises(UserError, match="took over"):
        attempt_events.append_events(tmp_path, Superseded(), {"event": "refusal", "reason": "bad data"})
    assert list(tmp_path.iterdir()) == []


def die_twice(folder: Path, backend: Backend) -> None:
    """Make two attempts die after step 2. A third death after step 2 would forbid a restart."""
    for _ in range(2):
        attempt = Attempt(FolderLock())
        attempt.begin(folder, 2, backend)
        attempt.train()
        attempt.close()


def diverge(attempt: Attempt, backend: Backend) -> None:
    with restarts.recorded(attempt, {}, backend):
        raise DivergedError("inf")


@pytest.mark.parametrize("fields", [{}, {"step": 8}, {"step": 6}, {"step": "8"}])
def test_the_step_of_a_death_is_the_later_of_the_steps_in_the_event_and_in_the_progress_file(tmp_path, fields):
    start = {"event": "start", "attempt": "a", "time": 1.0, "step": 2}
    failure = {"event": "failure", "attempt": "a", "time": 2.0, "cause": "died", "rank": 0, "requested": False, **fields}
    (tmp_path / attempt_events.NAME).write_text(f"{json.dumps(start)}\n{json.dumps(failure)}\n")
    (tmp_path / last_step.PROGRESS).write_text("a 7 1.5\n")
    events = attempt_events.read_events(tmp_path)
    death = attempt_events.new_death(tmp_path, events)
    assert death is not None
    assert len(events) == 1 + (fields != {"step": "8"})
    assert death.step == (8 if fields == {"step": 8} else 7)


@pytest.mark.parametrize("known_before", [False, True])
@pytest.mark.parametrize(("rank", "failed", "recorded"), [(0, 3, True), (1, 3, False), (1, 0, True), (2, 0, False)])
def test_the_failure_of_another_rank_is_recorded_as_the_cause_by_one_rank(tmp_path, rank, failed, recorded, known_before):
    reports: list[PeerFailure] = []
    watch = Watch.__new__(Watch)
    watch.start(rank, [])
    watch.add_callback(reports.append)
    message = asdict(PeerFailure(failed, "died: without a report"))
    attempt = Attempt(FolderLock())
    with connect("local") as backend:
        attempt.begin(tmp_path, 5, backend)

    def body() -> None:
        if known_before:
            watch.note(message)
        with attempt.noting(SimpleNamespace(rank=rank, watch=watch)):
            if not known_before:
                watch.note(message)
            raise BackendError("the sum failed")

    with pytest.raises(BackendError):
        body()
    assert [failure.rank for failure in reports] == [failed]
    death = attempt_events.new_death(tmp_path, attempt_events.read_events(tmp_path))
    assert death is not None
    if not recorded:
        assert (death.cause, death.rank) == ("not known", None)
        return
    assert (death.cause, death.rank, death.trained, death.step) == ("died: without a report", failed, False, 5)
    assert death.describe() == f"rank {failed} died: without a report, while the run started"


@pytest.mark.parametrize(
    "error", [BackendError("the sum failed"), PeerFailedError("the sum failed", PeerFailure(1, "died"))]
)
def test_the_error_of_a_failed_collective_names_the_last_step(tmp_path, capsys, error):
    end_with(tmp_path, error, 3)
    assert str(error) == "after step 3: the sum failed"
    summary = train_or_resume(tmp_path)
    assert "recovered: the sum failed, after step 3; 0 steps repeated, " in capsys.readouterr().out
    assert [(one["cause"], one["step"]) for one in summary["recoveries"]] == [("after step 3: the sum failed", 3)]


def test_invalid_lines_of_the_event_file_are_ignored(tmp_path):
    good = {"event": "start", "attempt": "a", "time": 1.0, "step": 2}
    bad = [[], {"event": []}, {"event": "start"}, {**good, "step": "2"}, {**good, "time": float("nan")}, {"event": "x"}]
    bad += [{**good, "time": 10**400}]
    text = "\n".join(json.dumps(value) for value in [*bad, good])
    (tmp_path / attempt_events.NAME).write_bytes(b"\xff\n" + text.encode() + b'\n{"event"')
    assert attempt_events.read_events(tmp_path) == [good]
    (tmp_path / last_step.PROGRESS).write_text("a x y")
    death = attempt_events.new_death(tmp_path, [good])
    assert death == Death("a", 1.0, "not known", None, False, 2, False)


# -- restarts that would end in the same way --------------------------------------------------------------------------


def test_a_run_that_died_three_times_after_the_same_step_is_not_restarted(tmp_path, capsys):
    end_with(tmp_path, KilledError(), 1)
    end_with(tmp_path, KilledError(), 2)
    end_with(tmp_path, StoppedError("saved", 15), 2)  # a stop by a signal is not a death
    end_with(tmp_path, ValueError("a bad sample"), 2)
    end_with(tmp_path, KilledError(), 2)
    before = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    said = r"the run has died 3 times in a row after step 2, in step 3 .*unknown cause.*; the run would"
    for _ in range(2):
        with pytest.raises(UserError, match=said) as refusal:
            train_or_resume(tmp_path)
        assert refusal.value.shared
        assert not refusal.value.transient
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == before
    (tmp_path / restarts.NAME).unlink()  # the cure that the message names
    end_with(tmp_path, KilledError(), 2)
    assert train_or_resume(tmp_path)["steps"] == 4  # deaths are counted from 0 again
    assert not (tmp_path / restarts.NAME).exists()


def test_deaths_with_other_settings_do_not_forbid_a_start(tmp_path):
    for _ in range(3):
        end_with(tmp_path, KilledError(), 2)
    end_with(tmp_path, KilledError(), 2, "--timeout", "60")
    end_with(tmp_path, KilledError(), 2)  # the count of deaths in a row begins at 1 again
    assert train_or_resume(tmp_path)["steps"] == 4


def test_deaths_without_a_record_of_their_settings_count(tmp_path):
    for _ in range(3):
        end_with(tmp_path, KilledError(), 2)
    path = tmp_path / attempt_events.NAME
    path.write_text(re.sub(r', "settings": "[0-9a-f]{64}"', "", path.read_text()))  # as older versions wrote the file
    with pytest.raises(UserError, match="died 3 times in a row"):
        train_or_resume(tmp_path, "--timeout", "60")


@pytest.mark.parametrize(
    # A death: its step, whether the attempt trained, and whether the error was transient (default: False). The last deaths
    # in training that are all after the same step count. A restart is refused if 3 of these are not transient, or if there
    # are 30 in all. ``step`` is the step after which they died; None if a restart is not refused.
    ("deaths", "step"),
    [
        ([(5, True)] * 3, 5),
        ([(5, True)] * 2, None),
        ([(5, True, True)] * 29, None),
        ([(5, True, True)] * 30, 5),
        ([(4, True, True), *[(5, True, True)] * 29], None),
        ([*[(5, True)] * 2, *[(5, True, True)] * 3], None),
        ([*[(5, True, True)] * 3, *[(5, True)] * 3], 5),
        ([(5, True), (6, True), (5, True), (5, True)], None),
        ([(4, True), (5, True), (5, True), (5, False), (5, True)], 5),
        ([(0, True)] * 3, 0),
        ([(0, False)] * 5, None),
    ],
)
def test_only_deaths_in_training_after_the_same_step_count_towards_the_limit(deaths, step):
    found = restarts.repeated_deaths([Death("", 0.0, "", None, False, *each) for each in deaths])
    assert {death.step for death in found} == ({step} - {None})
    assert restarts.repeated_deaths([Death("", 0.0, "", None, True, *each) for each in deaths]) == []


@pytest.mark.parametrize("error", [UserError("the disk hangs", transient=True), NotSavedError("the disk is full")])
def test_a_run_that_died_three_times_by_a_transient_error_after_the_same_step_is_restarted(tmp_path, error):
    for _ in range(3):
        end_with(tmp_path, error, 2)
    assert train_or_resume(tmp_path)["steps"] == 4
    assert not (tmp_path / restarts.NAME).exists()


def test_one_transient_record_of_a_failure_makes_the_death_transient(tmp_path):
    start = {"event": "start", "attempt": "a", "time": 1.0, "step": 2}
    failure = {"event": "failure", "attempt": "a", "time": 2.0, "cause": "stopped", "rank": 1, "requested": False}
    lines = [start, failure, {**failure, "cause": "later", "transient": True}, {**failure, "transient": 7}]
    (tmp_path / attempt_events.NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = attempt_events.read_events(tmp_path)
    death = attempt_events.new_death(tmp_path, events)
    assert (len(events), death.cause, death.transient) == (3, "stopped", True)
    attempt_events.append_events(tmp_path, FolderLock(), attempt_events.as_event(death))
    assert attempt_events.deaths_of(attempt_events.read_events(tmp_path)) == [death]


DIVERGING = ("--lr", "1e30")


def test_a_diverged_run_is_not_trained_again_with_the_same_settings(tmp_path, monkeypatch):
    with pytest.raises(DivergedError) as end:
        train_or_resume(tmp_path, *DIVERGING)
    trained: list[int] = []
    step = loop.Run._step
    monkeypatch.setattr(loop.Run, "_step", lambda run: (trained.append(run.cursor.step), step(run))[1])
    # A different path of the same folder is not a change of the settings.
    for folder in (tmp_path, tmp_path, Path(os.path.relpath(tmp_path))):
        with pytest.raises(UserError) as refusal:
            train_or_resume(folder, *DIVERGING)
        assert str(refusal.value).startswith(f"{end.value}; the run would end in the same way again: ")
        assert f"remove {folder.absolute() / restarts.NAME}, or change the settings" in str(refusal.value)
    assert not trained
    # The user can train again: with other settings, with an explicit --resume, or after removing the file.
    checkpoint = max((tmp_path / "checkpoints").glob("step-*.safetensors"))
    for flags in (("--timeout", "60"), ("--resume",), ("--resume", str(checkpoint))):
        with pytest.raises(DivergedError):
            train_or_resume(tmp_path, *DIVERGING, *flags)
        assert trained, flags
        trained.clear()
    (tmp_path / restarts.NAME).unlink()
    with pytest.raises(DivergedError):
        train_or_resume(tmp_path, *DIVERGING)


def test_a_run_that_diverged_before_its_first_checkpoint_is_not_started_again(tmp_path):
    flags = (*DIVERGING, "--checkpoint-every", "100")
    with connect("local") as backend:
        with pytest.raises(DivergedError):
            train(backend, tmp_path, *flags)
        with pytest.raises(UserError, match="the run would end in the same way again"):
            train(backend, tmp_path, *flags)


@pytest.mark.parametrize(("transient", "kept"), [(False, True), (True, False)])
def test_a_user_error_in_a_step_forbids_a_restart_unless_it_is_transient(tmp_path, transient, kept):
    end_with(tmp_path, UserError("the image cat.jpg is not an image", transient=transient), 1)
    assert (tmp_path / restarts.NAME).exists() is kept
    if kept:
        with pytest.raises(UserError, match=r"the image cat.jpg is not an image; the run would end in the same way"):
            train_or_resume(tmp_path)
    else:
        cause = train_or_resume(tmp_path)["recoveries"][0]["cause"]
        assert cause == "stopped: UserError: the image cat.jpg is not an image"


def test_records_that_do_not_fit_on_the_disk_do_not_end_a_run(tmp_path, monkeypatch):
    def full(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    with connect("local") as backend:
        attempt = Attempt(FolderLock())
        attempt.begin(tmp_path, 0, backend)
        attempt.train()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            patch.setattr(os, "pwrite", full)
            attempt.step(1)
            attempt.fail("stopped", 0)
            attempt.close()
    death = attempt_events.new_death(tmp_path, attempt_events.read_events(tmp_path))
    assert death is not None
    assert (death.cause, death.step) == ("not known", 0)
    assert abs(death.time - time.time()) < 600


def test_a_record_after_an_incomplete_line_begins_a_new_line(tmp_path):
    with connect("local") as backend:
        attempt = Attempt(FolderLock())
        attempt.begin(tmp_path, 0, backend)
        with (tmp_path / attempt_events.NAME).open("ab") as file:
            file.write(b'{"event": "recovery", "att')  # the disk was full
        attempt.end()
        attempt.close()
    assert [event["event"] for event in attempt_events.read_events(tmp_path)] == ["start", "end"]


def test_a_death_has_the_last_step_of_its_own_attempt_and_is_recorded_once(tmp_path):
    last_step.LastStep(tmp_path, "earlier", 7, FolderLock()).close()
    start = {"event": "start", "attempt": "newest", "time": 1.0, "step": 3}
    death = attempt_events.new_death(tmp_path, [start])
    assert death is not None
    assert (death.step, death.trained) == (3, False)
    assert attempt_events.new_death(tmp_path, [start, attempt_events.as_event(death)]) is None
