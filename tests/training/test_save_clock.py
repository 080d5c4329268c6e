"""``--checkpoint-seconds``: rank 0 decides, all ranks save after the same step, and results do not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dualtrain.training.loop as loop
from dualtrain.backends import connect
from dualtrain.config import parse
from dualtrain.run_folder import checkpoint, save_clock
from dualtrain.run_folder.checkpoint_writer import Writer
from dualtrain.run_folder.save_clock import SaveClock

FLAGS = ("--max-steps", "8", "--threads", "1", "--workers", "0", "--keep", "9", "--global-batch-size", "24")


class Time:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_a_save_is_due_after_the_interval_and_the_time_of_saves_is_summed(monkeypatch):
    clock = Time()
    monkeypatch.setattr(save_clock, "time", clock)
    saves, never = SaveClock(60.0), SaveClock(0.0)
    assert not saves.due
    clock.now += 60
    assert saves.due
    assert not never.due
    with saves.saving():
        clock.now += 20
    assert not saves.due
    clock.now += 40  # 60 s after the last save began
    assert saves.due
    assert saves.costs() == {"saves": 1, "seconds": 20.0, "fraction": 20 / 120}
    assert never.costs()["fraction"] == 0


def saved_steps(backend, folder: str, due: list[bool], flags: list[str]) -> dict[str, Any]:
    """Train with a fixed value of ``SaveClock.due``: ``due[0]`` on rank 0, and ``due[1]`` on the other ranks.

    ``Writer.busy`` is patched to be false, because a run skips saves by time while the checkpoint writer is busy.
    """
    saved: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SaveClock, "due", due[min(backend.rank, 1)])
        save = loop.Run._save
        patch.setattr(Writer, "busy", property(lambda writer: False))
        patch.setattr(loop.Run, "_save", lambda run, **options: (saved.append(run.cursor.step), save(run, **options)))
        summary = loop.train(parse([*FLAGS, *flags, "--run-dir", folder]), backend)
    return {"saved": saved, "weights": summary["weights_sha256"], "costs": summary["checkpoints"]}


@pytest.mark.parametrize("flags", [["--model", "tests.models_for_tests:dropout_net"], ["--virtual-ranks", "2"]])
def test_all_ranks_save_by_time_at_the_same_steps_without_changing_the_weights(processes, tmp_path, flags):
    # On torch, ``processes`` has three ranks. With two virtual ranks, one of the ranks computes nothing, and a separate
    # all-reduce sums the control flags.
    without = processes(saved_steps, str(tmp_path / "without"), [False, False], flags)
    by_time = processes(saved_steps, str(tmp_path / "by time"), [True, False], flags)
    others = processes(saved_steps, str(tmp_path / "others"), [False, True], flags)
    assert [one["saved"] for one in without] == [[8]] * len(without)
    assert [one["saved"] for one in by_time] == [[1, 2, 3, 4, 5, 6, 7, 8]] * len(without)
    assert [one["saved"] for one in others] == [[8]] * len(without)  # only rank 0's clock matters
    assert len({one["weights"] for one in [*without, *by_time]}) == 1
    assert by_time[0]["costs"]["saves"] == 8
    assert by_time[0]["costs"]["seconds"] > 0
    assert 0 < by_time[0]["costs"]["fraction"] < 1
    assert len(checkpoint.found(tmp_path / "by time" / "checkpoints")) == 8
    written = json.loads((tmp_path / "by time" / "summary.json").read_text())
    assert written["checkpoints"] == by_time[0]["costs"]


def test_no_save_by_time_begins_while_an_earlier_checkpoint_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(SaveClock, "due", True)
    monkeypatch.setattr(Writer, "busy", property(lambda writer: writer.thread is not None))
    assert steps_of(tmp_path) == [1, 8]


def test_by_default_a_run_saves_once_a_minute(tmp_path, monkeypatch):
    clock = Time()
    monkeypatch.setattr(save_clock, "time", clock)
    monkeypatch.setattr(Writer, "busy", property(lambda writer: False))
    step = loop.Run._step

    def slow(run: loop.Run) -> list[float]:
        clock.now += 25
        return step(run)

    monkeypatch.setattr(loop.Run, "_step", slow)
    assert steps_of(tmp_path) == [3, 6, 8]  # at 75 s and 150 s, and at the end


def steps_of(folder: Path) -> list[int]:
    with connect("local") as backend:
        loop.train(parse([*FLAGS, "--run-dir", str(folder)]), backend)
    return sorted(checkpoint.step_of_name(path) for path in checkpoint.found(folder / "checkpoints"))
