"""The drill: its flags, its faults, its plan and its verdict. tests/launch/test_drill.py carries one out."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dualtrain.drill import __main__ as command
from dualtrain.drill.exercise import Exercise, Report, Row
from dualtrain.drill.faults import FAULTS
from dualtrain.drill.job import MARK, Job
from dualtrain.errors import UserError
from dualtrain.training import checkpoint


def exercise(tmp_path, seed=0):
    return Exercise(tmp_path, [], 2, horovod=False, seed=seed, limit=5.0, progress=lambda line: None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--run-dir", "x"], "--run-dir is the drill's own to set: leave it out"),
        (["--resume=x"], "--resume is the drill's own to set"),
        (["--faults", "0"], "--faults"),
        (["--lr", "-1"], "--lr must be a number above 0"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--out", "{folder}"], "is there already: name a new folder"),
    ],
)
def test_bad_flags_are_one_line(flags, message, tmp_path, capsys):
    assert command.main([flag.format(folder=tmp_path) for flag in flags]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert message in errors
    assert errors.count("\n") == 1


def test_a_plan_is_decided_by_the_seed_and_has_every_kind_of_fault(tmp_path):
    plans = [exercise(tmp_path, seed)._plan(20, 100) for seed in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]
    kinds = [fault.name for fault, _ in plans[0]]
    assert set(kinds) == {fault.name for fault in FAULTS}
    steps = [step for _, step in plans[0]]
    assert steps == sorted(steps)
    assert all(0 <= step < 99 for step in steps)


SUMMARY = {"weights_sha256": "a" * 64, "steps": 7, "val_loss": 0.5, "best": {"step": 3}}


def finished(folder, **changes):
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({**SUMMARY, **changes}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"weights_sha256": "b" * 64}, "weights_sha256 is a"),
        ({"best": {"step": 4}}, "best is {'step': 3} without faults, and {'step': 4} with them"),
        ({"samples_per_second": 1.0}, None),
    ],
)
def test_results_that_differ_are_named(changes, problem, tmp_path):
    drill = exercise(tmp_path)
    drill.report.undisturbed, drill.report.rows = SUMMARY, [Row("SIGKILL of a rank", "rank 1", "after step 3")]
    finished(tmp_path / "disturbed", **changes)
    drill._compare(Job(tmp_path / "disturbed", [], 2, horovod=False, restarts=0))
    assert [problem is not None] * len(drill.report.problems) == [True] * (problem is not None)
    assert all(str(problem) in found for found in drill.report.problems)


def test_a_run_that_did_not_end_is_a_problem(tmp_path):
    drill = exercise(tmp_path)
    drill.report.rows = [Row("SIGKILL of a rank", "rank 1", "after step 3")]
    (tmp_path / "disturbed.log").write_text("step 1\ndualtrain: error: no room\nelse\n")
    drill._compare(Job(tmp_path / "disturbed", [], 2, horovod=False, restarts=0))
    assert drill.report.problems == ["the run with faults did not end: dualtrain: error: no room"]


def test_a_drill_without_a_fault_proves_nothing(tmp_path):
    drill = exercise(tmp_path)
    drill.report.undisturbed = SUMMARY
    finished(tmp_path / "disturbed")
    drill._compare(Job(tmp_path / "disturbed", [], 2, horovod=False, restarts=0))
    assert drill.report.problems == ["no fault was carried out: the job ended too early; give it more steps"]


@pytest.mark.parametrize("problems", [[], ["weights differ"]])
def test_the_verdict_and_the_exit_status_follow_from_the_problems(problems, monkeypatch, tmp_path, capsys):
    report = Report([Row("SIGKILL of a rank", "rank 1", "after step 3", 0.5, 4.0, 2)], SUMMARY, SUMMARY, problems)
    monkeypatch.setattr(Exercise, "run", lambda self, faults: report)
    assert command.main(["--out", str(tmp_path / "a")]) == bool(problems)
    lines = capsys.readouterr().out.splitlines()
    assert "SIGKILL of a rank  rank 1  after step 3  0.5 s           4.0 s            2" in lines
    assert lines[-1].startswith("same result: no, weights differ" if problems else "same result: yes, 1 fault,")
    assert command.main(["--json", "--out", str(tmp_path / "b")]) == bool(problems)
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] is not problems
    assert found["rows"][0]["repeated"] == 2


def test_a_job_without_a_program_to_start_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    job = Job(tmp_path / "run", [], 2, horovod=True, restarts=0)
    with pytest.raises(UserError, match="horovodrun is not installed"):
        job.start()


def test_a_job_is_not_started_for_ever(tmp_path):
    job = Job(tmp_path / "run", [], 1, horovod=False, restarts=0)
    job._command = [sys.executable, "-c", "raise SystemExit(3)"]
    job.start()
    job._launcher.wait(20)
    with pytest.raises(UserError, match="started too often"):
        job.start()


RANK = "import sys, time; print('--resume auto: going on from step 46, since', flush=True); time.sleep(60)"


@pytest.fixture
def rank(tmp_path):
    """A job of one process that looks like rank 1."""
    job = Job(tmp_path / "run", [], 2, horovod=False, restarts=0)
    job._command = ["env", "RANK=1", sys.executable, "-c", RANK, "dualtrain.main"]
    job.start()
    while not job.starts():
        assert job.status() is None
    yield job
    job.end()


def test_the_ranks_of_a_job_are_found_by_its_mark(rank):
    assert rank.ranks() == {1: rank.launcher}
    assert rank.starts() == [46]
    other = Job(rank.folder, [], 2, horovod=False, restarts=0)
    assert other.ranks() == {}


def test_what_is_left_of_a_job_is_ended(rank):
    os.kill(rank.launcher, signal.SIGSTOP)
    assert rank.end() == []  # it was continued, and has ended by SIGTERM
    assert rank.ranks() == {}
    assert rank.status() == -signal.SIGTERM


@pytest.mark.parametrize("name", ["SIGKILL of a rank", "SIGKILL of all ranks", "SIGKILL of the launcher"])
def test_a_fault_ends_processes(name, rank):
    fault = next(fault for fault in FAULTS if fault.name == name)
    fault.strike(rank, random.Random(0))
    assert rank._launcher.wait(20) == -signal.SIGKILL


def test_a_damaged_checkpoint_is_noticed_and_the_best_one_stays(rank):
    folder = rank.folder / "checkpoints"
    folder.mkdir(parents=True)
    for step in (3, 7):
        checkpoint.write(checkpoint.path_of(folder, step), {"step": step})
    os.link(checkpoint.path_of(folder, 7), folder / "best.safetensors")
    fault = next(fault for fault in FAULTS if fault.name == "newest checkpoint damaged")
    assert fault.strike(rank, random.Random(0)) == "step-00000007.safetensors"
    with pytest.raises(UserError, match="damaged"):
        checkpoint.load(checkpoint.path_of(folder, 7))
    assert checkpoint.load(folder / "best.safetensors") == {"step": 7}
    assert rank._launcher.wait(20) == -signal.SIGKILL


def test_a_position_is_the_last_whole_line(tmp_path):
    job = Job(tmp_path, [], 2, horovod=False, restarts=0)
    assert job.position() == (0, 0)
    path = Path(tmp_path / "metrics.jsonl")
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert job.position() == (path.stat().st_ino, 2)


def test_no_process_of_another_job_is_touched(rank):
    env = {**os.environ, MARK: "another", "RANK": "1"}
    with subprocess.Popen([sys.executable, "-c", "input()", "dualtrain.main"], stdin=subprocess.PIPE, env=env) as other:
        rank.end()
        assert other.poll() is None
        other.communicate(b"\n")
        assert other.returncode == 0
