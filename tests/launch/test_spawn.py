"""Ranks that the command line starts itself: their place, the job's status, signals, and that none is left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dualtrain import UserError
from dualtrain.spawn import spawn
from tests.conftest import require_horovod
from tests.pool import ROOT

ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SECONDS = 120.0  # a job on a crowded machine

# A program that gives `dualtrain.main.main` another body, on every rank.
PROGRAM = """
import os, signal, sys, threading, time
import dualtrain.main
import dualtrain.spawn
from dualtrain.launchers import detect_world

{settings}

def body(arguments):
    rank = int(os.environ["RANK"])
{body}

{replace}
if __name__ == "__main__":
    sys.exit(dualtrain.spawn.spawn(sys.argv[2:], int(sys.argv[1])))
"""
REPLACE = "dualtrain.main.main = body"
WAIT = f"print(f'pid {{rank}} {{os.getpid()}};', flush=True)\ntime.sleep({SECONDS})\nreturn 0"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
QUICK = "dualtrain.spawn.GRACE_SECONDS = dualtrain.spawn.END_SECONDS = 0.5; dualtrain.spawn.IMPATIENT_SECONDS = 0.0"


class Job:
    """A running program of ranks; ``pids`` are those that they have printed."""

    def __init__(self, process: subprocess.Popen[str], output: Path, errors: Path) -> None:
        self.process = process
        self._output, self._errors = output, errors

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    @property
    def pids(self) -> dict[int, int]:
        return {int(rank): int(pid) for rank, pid in re.findall(r"pid (\d+) (\d+);", self.output)}

    def await_ranks(self, count: int) -> None:
        assert holds(lambda: len(self.pids) == count), self.errors

    def end(self) -> int:
        return self.process.wait(SECONDS)


def holds(condition: Callable[[], bool]) -> bool:
    """Waits until it does, within bounds."""
    deadline = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def ended_by(job: Job, number: int) -> bool:
    """Whether this signal ends the job soon. Two of a kind that come before the first is handled are one: ask again."""
    job.process.send_signal(number)
    try:
        return job.process.wait(10) is not None
    except subprocess.TimeoutExpired:
        return False


def gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts programs; whatever a test did, none of their ranks outlives it."""
    jobs: list[Job] = []

    def start(body: str | None, *arguments: str, nproc: int = 2, settings: str = "", before: tuple[str, ...] = ()) -> Job:
        program = tmp_path / "program.py"
        text = textwrap.indent(body or "pass", "    ")
        program.write_text(PROGRAM.format(settings=settings, body=text, replace=REPLACE if body else ""))
        output, errors = tmp_path / "output", tmp_path / "errors"
        command = [sys.executable, *before, str(program), str(nproc), *arguments]
        with output.open("w") as out, errors.open("w") as err:
            process = subprocess.Popen(
                command, cwd=tmp_path, env=ENV, stdin=subprocess.PIPE, stdout=out, stderr=err, text=True
            )
        jobs.append(Job(process, output, errors))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.kill()
        job.process.communicate(timeout=SECONDS)
        assert holds(lambda job=job: all(gone(pid) for pid in job.pids.values()))  # type: ignore[misc]


def test_every_rank_has_its_place_and_the_arguments_as_they_were(start):
    job = start(
        "print(rank, detect_world().launcher, detect_world().size, *arguments, flush=True)\nreturn 0", "--lr", "a b"
    )
    assert job.end() == 0, job.errors
    assert sorted(job.output.splitlines()) == ["0 spawn 2 --lr a b", "1 spawn 2 --lr a b"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        pytest.param("if rank == 0: return 2", 2, "", marks=pytest.mark.launch),
        ("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 of 2 was ended by SIGKILL; the job stops"),
        pytest.param(DEAF + "if rank == 1: return 5", 5, "", marks=pytest.mark.launch),
    ],
    ids=["refuses", "is killed", "fails beside one that is deaf"],
)
def test_the_first_rank_that_fails_ends_the_job_and_gives_its_status(start, body, status, said):
    job = start(f"{body}\n{WAIT}", settings=QUICK)
    assert job.end() == status
    assert said in job.errors
    assert len(job.errors.splitlines()) == bool(said)


@pytest.mark.launch
def test_an_error_of_a_rank_is_shown_without_the_machinery_around_it(start):
    job = start("raise KeyError('lost key')", nproc=1)
    assert job.end() == 1
    assert job.errors.count("Traceback") == 1
    assert job.errors.splitlines()[-1] == "KeyError: 'lost key'"
    assert "_bootstrap" not in job.errors


@pytest.mark.launch
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_ranks_and_is_the_status(start, number, status):
    job = start(WAIT)
    job.await_ranks(2)
    job.process.send_signal(number)
    assert job.end() == status
    assert job.errors == ""


@pytest.mark.launch
def test_a_job_that_is_told_to_stop_has_the_time_that_it_needs(start):
    slow = "told = threading.Event()\nsignal.signal(signal.SIGTERM, lambda *_: told.set())\n"
    slow += "print(f'pid {rank} {os.getpid()};', flush=True)\ntold.wait(60)\n"
    slow += "if rank == 0:\n    time.sleep(2)\n    print('saved', flush=True)\nreturn 143"
    job = start(slow, settings=QUICK)
    job.await_ranks(2)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 143
    assert "saved" in job.output


@pytest.mark.launch
def test_a_second_signal_ends_those_that_do_not_hear_the_first(start):
    job = start(DEAF + WAIT, settings=QUICK)
    job.await_ranks(2)
    job.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert holds(lambda: ended_by(job, signal.SIGTERM))
    assert job.end() == 143


@pytest.mark.launch
def test_sigusr1_is_passed_on_and_the_job_goes_on(start):
    note = "signal.signal(signal.SIGUSR1, lambda *_: told.set())\n"
    wait = "print(f'pid {rank} {os.getpid()};', flush=True)\nreturn 0 if told.wait(60) else 1"
    job = start(f"told = threading.Event()\n{note}{wait}")
    job.await_ranks(2)
    job.process.send_signal(signal.SIGUSR1)
    assert job.end() == 0


TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn([sys.executable, *sys.argv[1:]])))"


@pytest.mark.launch
def test_a_terminals_ctrl_c_comes_once(start):
    count = "came = []\nsignal.signal(signal.SIGINT, lambda *_: came.append(1))\n"
    count += "print(f'pid {rank} {os.getpid()};', flush=True)\nwhile not came: time.sleep(0.01)\n"
    count += "time.sleep(1)\nprint(f'came {len(came)};', flush=True)\nreturn 130"
    job = start(count, before=("-c", TERMINAL))
    job.await_ranks(2)
    assert job.process.stdin is not None
    job.process.stdin.write("\x03")
    job.process.stdin.flush()
    assert job.end() == 130
    assert job.output.count("came 1;") == 2


@pytest.mark.launch
def test_the_workers_of_a_rank_start_as_those_of_any_process(start):
    job = start("import multiprocessing\nprint(multiprocessing.get_start_method())\nreturn 0", nproc=1)
    assert job.end() == 0, job.errors
    assert job.output.strip() == multiprocessing.get_start_method()


def test_a_killed_parent_leaves_no_ranks_behind(start):
    job = start(DEAF + WAIT)
    job.await_ranks(2)
    job.process.kill()
    assert holds(lambda: all(gone(pid) for pid in job.pids.values()))


def test_a_system_that_starts_no_more_processes_is_named_and_the_signals_are_given_back(monkeypatch):
    def refuse() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    context = SimpleNamespace(Process=lambda **_: SimpleNamespace(start=refuse))
    monkeypatch.setattr("torch.multiprocessing.get_context", lambda method: context)
    earlier = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    with pytest.raises(UserError, match=r"rank 0 of 2 could not be started .*temporarily unavailable.* smaller --nproc"):
        spawn([], 2)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == earlier
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_more_ranks_than_the_cores_can_start_are_refused_before_the_first_one_is_started():
    with pytest.raises(UserError, match=r"--nproc 99999999 is too many for this host: .* give \d+ at most"):
        spawn([], 99999999)


def test_a_signal_that_comes_while_ranks_are_started_keeps_back_the_others(monkeypatch):
    started = []

    def start() -> None:
        started.append(1)
        os.kill(os.getpid(), signal.SIGTERM)

    context = SimpleNamespace(Process=lambda **_: SimpleNamespace(start=start, exitcode=143))
    monkeypatch.setattr("torch.multiprocessing.get_context", lambda method: context)
    assert spawn([], 8) == 143
    assert len(started) == 1


# -- whole jobs ---------------------------------------------------------------------------------------------------


def weights(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["weights_sha256"])


@pytest.mark.launch
def test_the_weights_are_those_of_torchrun_on_both_backends(start, tmp_path):
    require_horovod()
    flags = ["--max-steps", "5", "--run-dir"]
    for backend in ("torch", "horovod"):
        job = start(None, "--backend", backend, *flags, str(tmp_path / backend))
        assert job.end() == 0, job.errors
        assert "started by spawn" in job.output
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "dualtrain.main"]
    command = [*torchrun, "--backend", "torch", *flags, str(tmp_path / "torchrun")]
    subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, timeout=240, check=True)
    assert len({weights(tmp_path / name) for name in ("torch", "horovod", "torchrun")}) == 1


@pytest.mark.launch
@pytest.mark.parametrize("backend", ["torch", "horovod"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_by_the_others_and_is_the_status(start, tmp_path, backend, victim):
    if backend == "horovod":
        require_horovod()
    say = "print(f'pid {os.environ[\"RANK\"]} {os.getpid()};', flush=True) if 'RANK' in os.environ else None"
    job = start(None, "--backend", backend, "--epochs", "5000", "--run-dir", str(tmp_path / "run"), settings=say)
    assert holds(lambda: "epoch 2/" in job.output), job.errors
    os.kill(job.pids[victim], signal.SIGKILL)
    assert job.end() == 137
    assert f"stopping, since rank {victim} died" in job.errors
    assert "Traceback" not in job.errors
    assert "resource_tracker" not in job.errors


@pytest.mark.launch
def test_a_refusal_is_said_once(start):
    job = start(None, "--data-dir", "missing")
    assert job.end() == 2
    (line,) = job.errors.splitlines()
    assert "--data-dir 'missing'" in line
