"""Progress lines without a terminal: one every --log-seconds, even if a step takes longer."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest
import torch
from torch import nn

import dualtrain.training.loop as loop
from dualtrain import backends
from dualtrain.console import show
from dualtrain.main import main
from dualtrain.training.progress import Progress, Waiting, duration

PAUSE = 0.15  # several times --log-seconds


def slowed(function):
    def slow(*args, **options):
        time.sleep(PAUSE)
        return function(*args, **options)

    return slow


class Slow(nn.Flatten):
    def forward(self, inputs):
        time.sleep(PAUSE)
        return super().forward(inputs)


def slow_model():
    time.sleep(PAUSE)
    return nn.Sequential(Slow(), nn.Linear(4, 2))


class SlowSamples:
    num_classes = 2

    def __init__(self, count, pause):
        self.count, self.pause = count, pause

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        time.sleep(self.pause)
        return torch.ones(1, 2, 2), number % 2


def slow_data():
    time.sleep(PAUSE)
    return SlowSamples(8, PAUSE / 4), SlowSamples(2, PAUSE)


def test_progress_lines_name_the_phase_during_start_steps_and_evaluation(tmp_path, capsys, monkeypatch):
    for name in ("start_of", "make_optimizer", "claim"):
        monkeypatch.setattr(loop, name, slowed(getattr(loop, name)))
    task = ["--model", f"{__name__}:slow_model", "--dataset", f"{__name__}:slow_data", "--workers", "0", "--threads", "1"]
    flags = ["--batch-size", "4", "--epochs", "2", "--log-seconds", "0.02", "--log-every", "1", "--run-dir", str(tmp_path)]
    monkeypatch.setattr(backends, "connect", slowed(backends.connect))
    assert main([*task, *flags]) == 0
    said = capsys.readouterr().out
    for line in (
        r"connecting the ranks for 0 s",
        r"looking for the run's checkpoints for 0 s",
        r"loading the data for 0 s",
        r"making the model for 0 s",
        r"reading and computing one sample for 0 s",
        r"preparing the trainer for 0 s",
        r"opening the run's folder for 0 s",
        r"step 0/4: waiting for data for 0 s",
        r"step 0/4: computing a step for 0 s",
        r"step 2/4: evaluating for 0 s",
        r"step 2/4: evaluating for 0 s, batch 1 of 1",
        r"step [123]/4  loss \d\.\d{4}  \d+ samples/s(  0 s left)?",
    ):
        assert re.search(f"^{line}$", said, re.MULTILINE), said
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    times = [datetime.fromisoformat(line["time"]) for line in lines]
    assert times == sorted(times)
    assert timedelta() <= datetime.now(UTC) - times[-1] < timedelta(minutes=5)
    assert [line["epoch"] for line in lines] == [1, 1, 1, 2, 2, 2]
    assert json.loads((tmp_path / "summary.json").read_text())["best"]["epoch"] in (1, 2)


def test_evaluation_lines_show_the_batch_and_the_remaining_time(capsys):
    with Progress(9, 0, shown=True, launcher="none", seconds=0.01) as progress:
        progress.phase("evaluating", 3)
        for _ in progress.counted(range(3)):
            time.sleep(0.1)
    assert "step 0/9: evaluating for 0 s, batch 2 of 3, 0 s left\n" in capsys.readouterr().out


def test_short_phases_do_not_delay_the_next_progress_line(capsys):
    with Waiting("one", 60.0, shown=True) as one:
        pass
    with Waiting("two", 60.0, shown=True) as two:
        pass
    with Waiting("three", 1e-3, shown=True) as three:
        while not capsys.readouterr().out:
            time.sleep(0.001)
    assert one.printed == two.printed < three.printed


def test_no_progress_lines_appear_without_log_seconds_or_on_ranks_other_than_0(capsys):
    for shown, seconds in ((True, 0.0), (False, 0.001)):
        with Progress(9, 0, shown=shown, launcher="none", seconds=seconds):
            time.sleep(0.05)
    assert capsys.readouterr().out == ""


def test_the_remaining_time_is_estimated_without_the_first_step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("dualtrain.training.progress.time.monotonic", lambda: now[0])
    progress = Progress(1000, 100, shown=False, launcher="none", seconds=0)
    values = {"loss": 0.5, "accuracy": 1.0, "lr": 0.1}
    now[0] = 100.0  # a slow first step, as with a compiler
    progress.step(64, values)
    assert progress._line() == "step 101/1000  loss 0.5000  1 samples/s"
    now[0] = 104.0
    progress.step(64, values)
    progress.step(64, values)
    assert progress._line() == "step 103/1000  loss 0.5000  32 samples/s  29 min 54 s left"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (61, "1 min 1 s"), (3600 * 3 + 300, "3 h 5 min"), (86400 * 2 + 3600 * 4 + 59, "2 d 4 h")],
)
def test_durations_show_at_most_two_units(seconds, text):
    assert duration(seconds) == text


class Writes(io.TextIOWrapper):
    """File that records each write separately, as a launcher receives the writes if PYTHONUNBUFFERED is set."""

    def __init__(self):
        self.parts = []
        super().__init__(io.BytesIO())

    def write(self, text):
        self.parts += [text] if text else []
        return len(text)


def test_each_message_is_written_in_one_call(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Writes())
    show("two\nlines")
    Progress(1, 0, shown=True, launcher="mpirun", seconds=0).print("one")
    assert sys.stdout.parts == ["two\nlines\n", "one\n"]
