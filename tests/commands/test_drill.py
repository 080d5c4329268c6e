"""The drill, which injects faults into a job and compares the result with that of a run without faults.

These tests check its flags, faults, plan and verdict. tests/launch/test_drill.py runs a whole drill.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dualtrain.drill import __main__ as command
from dualtrain.drill import exercise as exercises
from dualtrain.drill.exercise import Exercise, Report, Row
from dualtrain.drill.faults import FAULTS, FULL_DISK
from dualtrain.drill.job import MARK, Job
from dualtrain.errors import UserError
from dualtrain.run_folder import checkpoint
from dualtrain.run_folder.restarts import DEATHS
from tests.forked import ROOT, run, wait_until


def exercise(tmp_path, seed=0):
    return Exercise(tmp_path, [], 2, horovod=False, seed=seed, limit=5.0, progress=lambda line: None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--run-dir", "x"], "--run-dir is set by the drill: use --out"),
        (["--resume=x"], "--resume is set by the drill"),
        (["--max-restarts", "3"], "--max-restarts is set by the drill"),
        (["--nproc", "9999"], "9999 ranks are too many for this host"),
        (["--faults", "0"], "--faults"),
        (["--lr", "-1"], "--lr must be a number above 0"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--out", "{folder}"], "exists already: name a new folder"),
    ],
)
def test_bad_flags_are_refused_in_one_line(flags, message, tmp_path, capsys):
    assert command.main([flag.format(folder=tmp_path) for flag in flags]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert message in errors
    assert errors.count("\n") == 1


def test_the_drill_refuses_to_run_as_a_rank(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert command.main([]) == 2
    assert "run it once, without a launcher" in capsys.readouterr().err


def test_a_plan_is_decided_by_the_seed_and_has_every_kind_of_fault(tmp_path):
    plans = [exercise(tmp_path, seed)._plan(20, 100, FAULTS) for seed in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]
    kinds = [fault.name for fault, _ in plans[0]]
    assert set(kinds) == {fault.name for fault in FAULTS}
    steps = [step for _, step in plans[0]]
    assert steps == sorted(steps)
    assert all(0 <= step < 99 for step in steps)


def test_a_job_of_one_rank_gets_no_fault_that_only_another_rank_would_detect(tmp_path):
    said: list[str] = []
    one = Exercise(tmp_path, [], 1, horovod=False, seed=0, limit=5.0, progress=said.append)
    missing = {fault.name for fault in FAULTS} - {fault.name for fault in one._kinds()}
    assert missing == {"SIGSTOP of a rank"}
    assert said == [
        "without the fault 'SIGSTOP of a rank': only another rank would detect it, and the job has one rank",
    ]
    assert exercise(tmp_path)._kinds() == list(FAULTS)


SUMMARY = {"weights_sha256": "a" * 64, "steps": 7, "val_loss": 0.5, "best": {"step": 3}}


def write_summary(folder, **changes):
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({**SUMMARY, **changes}))


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({}, []),
        ({"weights_sha256": "b"}, [f"weights_sha256 is {'a' * 64} without faults, and b with them"]),
        ({"best": {"step": 4}}, ["best is {'step': 3} without faults, and {'step': 4} with them"]),
        ({"samples_per_second": 1.0}, []),
    ],
)
def test_results_that_differ_are_named(changes, problems, tmp_path):
    drill = exercise(tmp_path)
    drill.report.undisturbed, drill.report.rows = SUMMARY, [Row("SIGKILL of a rank", "rank 1", "after step 3")]
    write_summary(tmp_path / "disturbed", **changes)
    drill._compare(Job(tmp_path / "disturbed", [], 2, horovod=False, restarts=0))
    assert drill.report.problems == problems


def test_a_run_without_a_summary_is_a_problem(tmp_path):
    drill = exercise(tmp_path)
    drill.report.rows = [Row("SIGKILL of a rank", "rank 1", "after step 3")]
    (tmp_path / "disturbed.log").write_text("step 1\ndualtrain: error: no room\nelse\n")
    drill._compare(Job(tmp_path / "disturbed", [], 2, horovod=False, restarts=0))
    assert drill.report.problems == ["the run with faults did not finish its training: dualtrain: error: no room"]


def test_a_drill_that_injected_no_fault_is_a_problem(tmp_path):
    drill = exercise(tmp_path)
    drill.report.undisturbed = SUMMARY
    write_summary(tmp_path / "disturbed")
    drill._compare(Job(tmp_path / "disturbed", [], 2, horovod=False, restarts=0))
    assert drill.report.problems == ["no fault was carried out: the job ended too early; give it more steps"]


@pytest.mark.parametrize(
    ("pids", "problem"), [([7], "1 process was left behind"), ([7, 8], "2 processes were left behind")]
)
def test_processes_that_outlive_the_job_are_a_problem(pids, problem, monkeypatch, tmp_path):
    monkeypatch.setattr(Job, "start", lambda job: None)
    monkeypatch.setattr(Job, "status", lambda job: 0)
    monkeypatch.setattr(Job, "end", lambda job: pids)
    drill = exercise(tmp_path)
    drill._disturb(0, 7, FAULTS)
    assert drill.report.problems[0] == problem


@pytest.mark.parametrize("problems", [[], ["weights differ"]])
def test_the_verdict_and_the_exit_status_follow_from_the_problems(problems, monkeypatch, tmp_path, capsys):
    report = Report([Row("SIGKILL of a rank", "rank 1", "after step 3", 0.5, 4.0, 2)], SUMMARY, SUMMARY, problems)
    monkeypatch.setattr(Exercise, "run", lambda self, faults: report)
    assert command.main(["--out", str(tmp_path / "a")]) == bool(problems)
    lines = capsys.readouterr().out.splitlines()
    assert "SIGKILL of a rank  rank 1  after step 3  0.5 s           4.0 s            2" in lines
    assert lines[-1].startswith("same result: no, weights differ" if problems else "same result: yes, 1 fault,")
    assert command.main(["--json", "--out", str(tmp_path / "b")]) == bool(problems)
    output = json.loads(capsys.readouterr().out)
    assert output["holds"] is (not problems)
    assert output["rows"][0]["repeated"] == 2


def test_a_job_whose_launcher_is_not_installed_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    job = Job(tmp_path / "run", [], 2, horovod=True, restarts=0)
    with pytest.raises(UserError, match="horovodrun is not installed"):
        job.start()


def test_the_number_of_starts_of_a_job_is_limited(tmp_path):
    job = Job(tmp_path / "run", [], 1, horovod=False, restarts=0)
    job._command = [sys.executable, "-c", "raise SystemExit(3)"]
    job.start()
    job._launcher.wait(20)
    with pytest.raises(UserError, match="started too often"):
        job.start()


RANK_PROGRAM = "import sys, time; print('--resume auto: resuming from step 46, since', flush=True); time.sleep(60)"


@pytest.fixture
def running_job(tmp_path):
    """Yield a running job. Its only process looks like rank 1."""
    job = Job(tmp_path / "run", [], 2, horovod=False, restarts=0)
    job._command = ["env", "RANK=1", sys.executable, "-c", RANK_PROGRAM, "dualtrain.main"]
    job.start()
    try:
        assert wait_until(lambda: bool(job.starts()) or job.status() is not None)
        assert job.status() is None
        yield job
    finally:
        job.end()


def test_the_ranks_of_a_job_are_found_by_its_mark(running_job):
    assert running_job.ranks() == {1: running_job.launcher}
    assert running_job.starts() == [46]
    other = Job(running_job.folder, [], 2, horovod=False, restarts=0)
    assert other.ranks() == {}


def test_remaining_processes_of_a_job_are_ended(running_job):
    os.kill(running_job.launcher, signal.SIGSTOP)
    assert running_job.end() == []  # SIGTERM has ended the process after SIGCONT; no SIGKILL was needed
    assert running_job.ranks() == {}
    assert running_job.status() == -signal.SIGTERM


def test_a_signal_to_the_drill_ends_the_job(tmp_path, monkeypatch, capsys):
    jobs = []

    class Sleeping(Job):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            self._command = ["sleep", "60"]
            jobs.append(self)

    def wait(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(exercises, "Job", Sleeping)
    monkeypatch.setattr(Exercise, "_wait", wait)
    with pytest.raises(SystemExit) as end:
        command.main(["--out", str(tmp_path / "drill")])
    assert end.value.code == 128 + signal.SIGTERM
    assert jobs[0].status() == -signal.SIGTERM
    assert capsys.readouterr().err == (
        "dualtrain: error: ended by SIGTERM; the drill's job is ended, and nothing was compared\n"
    )


def test_ending_a_job_returns_the_pid_of_a_launcher_that_survives_sigkill(tmp_path, monkeypatch):
    """Simulate the launcher, because a test cannot make a process that survives SIGKILL."""
    job = Job(tmp_path / "run", [], 2, horovod=False, restarts=0)

    def wait(seconds):
        raise subprocess.TimeoutExpired("torchrun", seconds)

    job._launcher = SimpleNamespace(pid=7, poll=lambda: None, wait=wait)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(job, "_processes", lambda: [(7, None)])
    monkeypatch.setattr("dualtrain.drill.job.send", lambda process, number: sent.append((process, number)))
    monkeypatch.setattr("dualtrain.drill.job.END_SECONDS", 0.0)
    assert job.end() == [7]
    assert sent[-1] == (7, signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("SIGKILL of a rank", "rank 1"),
        ("SIGKILL of all ranks", "1 rank"),
        ("SIGKILL of the launcher", "process {launcher}"),
    ],
)
def test_a_sigkill_fault_kills_its_process(name, target, running_job):
    fault = next(fault for fault in FAULTS if fault.name == name)
    assert fault.inject(running_job, random.Random(0)) == target.format(launcher=running_job.launcher)
    assert running_job._launcher.wait(20) == -signal.SIGKILL


def test_the_fault_damages_the_newest_checkpoint_but_not_the_best_one(running_job):
    folder = running_job.folder / "checkpoints"
    folder.mkdir(parents=True)
    for step in (3, 7):
        checkpoint.write(checkpoint.path_of(folder, step), {"step": step})
    os.link(checkpoint.path_of(folder, 7), folder / "best.safetensors")
    fault = next(fault for fault in FAULTS if fault.name == "newest checkpoint damaged")
    assert fault.inject(running_job, random.Random(0)) == "step-00000007.safetensors"
    with pytest.raises(UserError, match="damaged"):
        checkpoint.load(checkpoint.path_of(folder, 7))
    assert checkpoint.load(folder / "best.safetensors") == {"step": 7}
    assert running_job._launcher.wait(20) == -signal.SIGKILL


#: Program that mounts a small file system, fills it by injecting the fault FULL_DISK, and prints the effects.
IN_SMALL_DISK = """
import os, random, signal, sys, threading, time
from pathlib import Path
from dualtrain.drill.faults import FULL_DISK
from dualtrain.drill.small_disk import SmallDisk, fill
top = Path(sys.argv[1])
try:
    disk = SmallDisk(top / "run", top / "like", 2)
except OSError as error:
    print("cannot mount", error)
    sys.exit()
size = os.statvfs(top / "run").f_blocks * os.statvfs(top / "run").f_bsize
(top / "run" / "file").write_text("kept")
class Job:
    folder, written, killed = top / "run", 0, 0
    def ranks(self): return {3: os.getpid()}
    def status(self): return None
    def failed_writes(self):
        self.written += 1
        try:
            (top / "run" / f"next {self.written}").write_bytes(bytes(5000))
        except OSError as error:
            return 1
        return 0
signal.signal(signal.SIGUSR1, lambda *_: print("killed when full:", os.statvfs(top / "run").f_bavail == 0))
import dualtrain.drill.faults as faults
faults.send = lambda process, number: os.kill(process, signal.SIGUSR1)
print(FULL_DISK.inject(Job(), random.Random(0)))
print("freed:", os.statvfs(top / "run").f_bavail > 0, "like:", size >= 2 * 5_000_000)
disk.close()
print((top / "run" / "file").read_text(), os.path.ismount(top / "run"))
"""


def test_the_drill_fills_only_its_own_file_system_and_keeps_the_files(tmp_path):
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "checkpoint").write_bytes(bytes(5_000_000))
    end = run(("-c", IN_SMALL_DISK, tmp_path), tmp_path / "output", env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert end.returncode == 0, end
    if end.stdout.startswith("cannot mount"):
        assert not (tmp_path / "run").exists()
        pytest.skip(f"needs root, and a system that allows mounts: {end.stdout}")
    lines = end.stdout.splitlines()
    assert lines[0] == "killed when full: True"
    assert lines[1] == "rank 3, after a write failed"
    assert lines[2:] == ["freed: True like: True", "kept False"]
    assert [path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith("next")] == ["file"]


def test_a_drill_that_cannot_mount_leaves_out_the_full_disk_fault(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    said: list[str] = []
    monkeypatch.setattr(exercises, "SmallDisk", refuse)
    drill = Exercise(tmp_path, [], 2, horovod=False, seed=0, limit=5.0, progress=said.append)
    assert drill._small_disk(3) is None
    assert said == [f"without the fault {FULL_DISK.name!r}: no file system can be mounted (Operation not permitted)"]


def test_a_run_folder_that_does_not_fit_on_the_disk_is_reported_as_one_problem(tmp_path):
    class Full:
        def close(self) -> None:
            raise shutil.Error([("a", "b", "[Errno 28] No space left on device: 'a' -> 'b'"), ("c", "d", "no space")])

    drill = exercise(tmp_path)
    drill._keep_folder(Full())
    problem = "the folder of the run with faults could not be kept ([Errno 28] No space left on device: 'a' -> 'b')"
    assert drill.report.problems == [problem]


def test_repeated_kills_at_the_same_step_stay_below_the_restart_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(exercises, "_BY_TIME", 0.0)

    class Slow:
        step = 7

        def status(self) -> None:
            return None

        def position(self) -> tuple[int, int]:
            return 0, self.step

        def restart_if_failed(self) -> bool:
            self.step = 8  # called only while the drill waits for another step
            return False

    drill, job = exercise(tmp_path), Slow()
    assert [drill._await_moment(job, 7) for _ in range(3)] == ["after step 7", "after step 7", "after step 8"]
    assert drill._steps == [7, 7, 8]
    assert exercises._REPEATS < DEATHS


def test_the_position_of_a_job_is_read_from_the_last_complete_line(tmp_path):
    job = Job(tmp_path, [], 2, horovod=False, restarts=0)
    assert job.position() == (0, 0)
    path = Path(tmp_path / "metrics.jsonl")
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert job.position() == (path.stat().st_ino, 2)


def test_no_line_of_a_jobs_output_is_read_twice(tmp_path):
    job = Job(tmp_path / "run", [], 2, horovod=False, restarts=0)
    assert (job.failed_writes(), job.starts()) == (0, [])
    lines = "the checkpoint of step 2 could not be written\n--resume auto: beginning at step 0\n"
    job.log.write_text(f"{lines}--resume auto: resuming from st")
    assert (job.failed_writes(), job.starts()) == (1, [0])
    job.log.write_text(f"{' ' * len(lines)}--resume auto: resuming from step 7\nit could not be written\n")
    assert (job.failed_writes(), job.starts()) == (2, [0, 7])


def test_no_process_of_another_job_is_ended(running_job):
    env = {**os.environ, MARK: "another", "RANK": "1"}
    with subprocess.Popen([sys.executable, "-c", "input()", "dualtrain.main"], stdin=subprocess.PIPE, env=env) as other:
        running_job.end()
        assert other.poll() is None
        other.communicate(b"\n")
        assert other.returncode == 0
