"""Ranks that ``--nproc`` or ``spawn`` starts: environment, exit status of the job, signals, end of all processes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dualtrain import UserError
from dualtrain.launchers import NOT_SAVED, TRY_AGAIN
from dualtrain.spawn import TRANSIENT, _next_wait, spawn
from tests.conftest import require_horovod
from tests.forked import ROOT, Forked, has_ended, run_ranks, wait_until

ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SECONDS = 120.0  # longest wait for a job on a busy machine

# Program that spawns ranks, each of which calls `function`: `body`, or a function that trains.
PROGRAM = """
import os, signal, sys, threading, time
import dualtrain.main
import dualtrain.spawn
from dualtrain.launchers import detect_world
from tests.afresh import AfreshContext

{settings}

def body(arguments):
    rank = int(os.environ["RANK"])
{body}

dualtrain.spawn.get_context = lambda method: AfreshContext()
sys.exit(dualtrain.spawn.spawn({function}, sys.argv[2:], int(sys.argv[1]), {restarts}))
"""
# Short sleeps: Python handles a signal that arrives just before a sleep only after that sleep.
WAIT = (
    "print(f'pid {rank} {os.getpid()};', flush=True)\n"
    f"end = time.monotonic() + {SECONDS}\nwhile time.monotonic() < end: time.sleep(0.1)\nreturn 0"
)
IGNORE_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
NOTE_SIGTERM = (
    "received = threading.Event()\nsignal.signal(signal.SIGTERM, lambda *_: received.set())\n"
    "print(f'pid {rank} {os.getpid()};', flush=True)\n"
)
QUICK = "dualtrain.spawn.GRACE_SECONDS = dualtrain.spawn.END_SECONDS = 0.5; dualtrain.spawn.REPEAT_SECONDS = 0.0"


class Job(Forked):
    """A running program that spawns ranks; ``pids`` are the process ids that the ranks have printed."""

    @property
    def pids(self) -> dict[int, int]:
        return {int(rank): int(pid) for rank, pid in re.findall(r"pid (\d+) (\d+);", self.output)}

    def await_ranks(self, count: int) -> None:
        assert wait_until(lambda: len(self.pids) == count), self.errors

    def send_and_wait(self, number: int) -> bool:
        """Send a signal; return whether the job ends within 2 s.

        Tests repeat the call, because this signal and an earlier one may arrive as one signal.
        """
        self.send_signal(number)
        return wait_until(lambda: self.poll() is not None, 2)


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts programs; kill them after the test, and check that all of their ranks have ended."""
    jobs: list[Job] = []

    def start(
        body: str | None,
        *arguments: str,
        nproc: int = 2,
        settings: str = "",
        function: str = "dualtrain.main.main",
        restarts: int = 0,
    ) -> Job:
        program = tmp_path / "program.py"
        text = textwrap.indent(body or "pass", "    ")
        function = "body" if body else function
        program.write_text(PROGRAM.format(settings=settings, body=text, function=function, restarts=restarts))
        jobs.append(Job((program, str(nproc), *arguments), tmp_path, env=ENV, cwd=tmp_path))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
        assert wait_until(lambda job=job: all(has_ended(pid) for pid in job.pids.values()))  # type: ignore[misc]


def test_every_rank_gets_its_rank_and_the_unchanged_arguments(start):
    # One write per rank: print() writes in parts, between which the other rank can write.
    body = "world = detect_world()\nparts = rank, world.launcher, world.size, world.job, *arguments\n"
    body += "os.write(1, (' '.join(map(str, parts)) + chr(10)).encode())\nreturn 0"
    job = start(body, "--lr", "a b")
    assert job.wait(SECONDS) == 0, job.errors
    [name] = {line.split()[3] for line in job.output.splitlines()}  # each job gets a new name
    assert sorted(job.output.splitlines()) == [f"0 spawn 2 {name} --lr a b", f"1 spawn 2 {name} --lr a b"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("if rank == 0: return 2", 2, ""),
        ("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 of 2 was ended by SIGKILL; the job stops"),
        ("if rank == 1: os.kill(os.getpid(), 40)", 168, "rank 1 of 2 was ended by signal 40; the job stops"),
        (IGNORE_SIGTERM + "if rank == 1: return 5", 5, ""),
    ],
    ids=["refuses", "is killed", "is ended by a signal without a name", "fails while another rank ignores SIGTERM"],
)
def test_a_rank_that_fails_ends_the_job_and_gives_its_status(start, body, status, said):
    job = start(f"{body}\n{WAIT}", settings=QUICK)
    assert job.wait(SECONDS) == status
    assert said in job.errors
    assert len(job.errors.splitlines()) == bool(said)


def test_a_status_other_than_1_takes_precedence_if_several_ranks_fail(start):
    settings = f"{QUICK}; dualtrain.spawn.REPORT_SECONDS = {SECONDS}"  # both ranks end within this time
    job = start(f"if rank == 1: return 1\ntime.sleep(0.1)\nreturn {TRY_AGAIN}", settings=settings)
    assert job.wait(SECONDS) == TRANSIENT[TRY_AGAIN] == 2


def test_an_error_of_a_rank_is_shown_without_tracebacks_of_multiprocessing(start):
    job = start("raise KeyError('lost key')", nproc=1)
    assert job.wait(SECONDS) == 1
    assert job.errors.count("Traceback") == 1
    assert job.errors.splitlines()[-1] == "KeyError: 'lost key'"
    assert "_bootstrap" not in job.errors


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_ranks_and_gives_the_status(start, number, status):
    job = start(WAIT, settings="signal.signal(signal.SIGHUP, signal.SIG_DFL)")  # the tests may run under nohup
    job.await_ranks(2)
    job.send_signal(number)
    assert job.wait(SECONDS) == status
    assert job.errors == ("dualtrain: error: interrupted\n" if number == signal.SIGINT else "")


def test_a_job_under_nohup_continues_after_a_hangup(start):
    wait = "print(f'pid {rank} {os.getpid()};', flush=True)\nreturn 0 if received.wait(60) else 1"
    note = "received = threading.Event()\nsignal.signal(signal.SIGUSR1, lambda *_: received.set())\n"
    job = start(note + wait, settings="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    job.await_ranks(2)
    job.send_signal(signal.SIGHUP)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(SECONDS) == 0


def test_a_job_that_gets_sigterm_has_unlimited_time_to_stop(start):
    slow = NOTE_SIGTERM + "received.wait(60)\n"
    slow += "if rank == 0:\n    time.sleep(1.5)\n    print('saved', flush=True)\nreturn 143"
    job = start(slow, settings=QUICK)
    job.await_ranks(2)
    job.send_signal(signal.SIGTERM)
    assert job.wait(SECONDS) == 143
    assert "saved" in job.output


def test_a_rank_that_hangs_is_ended_if_another_one_fails_after_sigterm(start):
    fails = NOTE_SIGTERM + "os.kill(os.getpid(), signal.SIGSTOP) if rank else received.wait(60)\nreturn 1"
    job = start(fails, settings=QUICK)
    job.await_ranks(2)
    job.send_signal(signal.SIGTERM)
    assert job.wait(SECONDS) == 143


def test_a_second_signal_ends_ranks_that_ignore_the_first(start):
    job = start(IGNORE_SIGTERM + WAIT, settings=QUICK)
    job.await_ranks(2)
    job.send_signal(signal.SIGTERM)
    assert not wait_until(lambda: job.poll() is not None, 0.3)
    assert wait_until(lambda: job.send_and_wait(signal.SIGTERM))
    assert job.wait(SECONDS) == 143


def test_sigusr1_is_passed_on_and_the_job_continues(start):
    note = "signal.signal(signal.SIGUSR1, lambda *_: received.set())\n"
    wait = "print(f'pid {rank} {os.getpid()};', flush=True)\nreturn 0 if received.wait(60) else 1"
    job = start(f"received = threading.Event()\n{note}{wait}")
    job.await_ranks(2)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(SECONDS) == 0


def test_a_sigusr1_before_the_first_rank_starts_is_passed_on(start):
    early = "from dualtrain.training import signals\nsignals.note_early_requests()\nos.kill(os.getpid(), signal.SIGUSR1)\n"
    wait = f"deadline = time.monotonic() + {SECONDS}\n"
    wait += "while not signals._early and time.monotonic() < deadline: time.sleep(0.01)\nreturn 0 if signals._early else 1"
    job = start(wait, settings=early)
    assert job.wait(SECONDS) == 0, job.errors


# Code that runs the program in a pseudo-terminal, and sends one Ctrl-C when both ranks have started.
TERMINAL = """
import pty
pid, terminal = pty.fork()
if pid:
    shown = b""
    while shown.count(b";") < 2:
        shown += os.read(terminal, 1024)
    os.write(terminal, b"\\x03")
    try:
        while more := os.read(terminal, 1024):
            shown += more
    except OSError:
        pass  # the terminal's processes have ended
    print(shown.decode())
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
"""


def test_each_rank_receives_a_terminals_ctrl_c_once(start):
    count = "came = []\nsignal.signal(signal.SIGINT, lambda *_: came.append(1))\n"
    count += "print(f'pid {rank} {os.getpid()};', flush=True)\nwhile not came: time.sleep(0.01)\n"
    count += "time.sleep(0.5)\nprint(f'came {len(came)};', flush=True)\nreturn 130"
    job = start(count, settings=TERMINAL)
    assert job.wait(SECONDS) == 130, job.errors
    assert job.output.count("came 1;") == 2


def test_a_rank_keeps_the_default_start_method_of_multiprocessing(start):
    job = start("import multiprocessing\nprint(multiprocessing.get_start_method())\nreturn 0", nproc=1)
    assert job.wait(SECONDS) == 0, job.errors
    assert job.output.strip() == multiprocessing.get_start_method()


def test_a_killed_parent_leaves_no_ranks_behind(start):
    job = start(IGNORE_SIGTERM + WAIT)
    job.await_ranks(2)
    job.kill()
    assert wait_until(lambda: all(has_ended(pid) for pid in job.pids.values()))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.EAGAIN, r"temporarily unavailable\): .*ulimit -u"),
        (errno.EMFILE, r"open files\): raise the limit of open files \(ulimit -n\)$"),
    ],
)
def test_a_failure_to_start_processes_is_reported_and_signal_handlers_are_restored(monkeypatch, code, said):
    def refuse() -> None:
        raise OSError(code, os.strerror(code))

    context = SimpleNamespace(Process=lambda **_: SimpleNamespace(start=refuse))
    monkeypatch.setattr("dualtrain.spawn.get_context", lambda method: context)
    earlier = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    with pytest.raises(UserError, match=rf"rank 0 of 2 could not be started .*{said}"):
        spawn(len, [], 2)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == earlier
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_too_many_ranks_for_the_cores_are_refused_before_the_first_one_is_started():
    with pytest.raises(UserError, match=r"--nproc 99999999 is too many for this host: .* give \d+ at most"):
        spawn(len, [], 99999999)


def test_the_number_of_usable_cores_limits_the_ranks(monkeypatch):
    monkeypatch.setattr("dualtrain.spawn.usable_cores", lambda: 1)
    with pytest.raises(UserError, match=r"--nproc 17 is too many .* each of its 1 cores .* give 16 at most"):
        spawn(len, [], 17)


@pytest.mark.parametrize(("number", "said"), [(signal.SIGTERM, ""), (signal.SIGINT, "dualtrain: error: interrupted\n")])
def test_no_rank_is_started_if_a_signal_has_arrived(monkeypatch, capsys, number, said):
    def make(method):
        os.kill(os.getpid(), number)
        return SimpleNamespace(Process=None)

    monkeypatch.setattr("dualtrain.spawn.get_context", make)
    assert spawn(len, [], 8) == 128 + number
    assert capsys.readouterr().err == said


def test_a_signal_that_arrives_while_handlers_are_installed_is_not_lost(monkeypatch):
    install, sent = signal.signal, []

    def install_and_kill(number: int, handler: object) -> object:
        earlier = install(number, handler)
        if number == signal.SIGTERM and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        return earlier

    monkeypatch.setattr("dualtrain.spawn.signal.signal", install_and_kill)
    monkeypatch.setattr("dualtrain.spawn.get_context", lambda method: SimpleNamespace(Process=None))
    assert spawn(len, [], 8) == 143


def test_after_a_signal_during_the_start_no_more_ranks_are_started(monkeypatch):
    started = []

    def start() -> None:
        started.append(1)
        os.kill(os.getpid(), signal.SIGTERM)

    context = SimpleNamespace(Process=lambda **_: SimpleNamespace(start=start, exitcode=143))
    monkeypatch.setattr("dualtrain.spawn.get_context", lambda method: context)
    assert spawn(len, [], 8) == 143
    assert len(started) == 1


@pytest.mark.parametrize(
    ("statuses", "restarts", "status"),
    [
        ([137, 1, 0], 5, 0),
        ([1, 1, 1], 2, 1),
        ([2], 5, 2),
        ([137, 2], 5, 2),
        ([1], 0, 1),
        ([137, TRY_AGAIN, TRY_AGAIN, TRY_AGAIN, 137, TRY_AGAIN, 0], 6, 0),
        ([137, TRY_AGAIN], 1, 2),
        ([TRY_AGAIN, NOT_SAVED, NOT_SAVED], 2, 1),
    ],
)
def test_restarts_are_limited_and_omitted_if_a_restart_would_fail_again(monkeypatch, caplog, statuses, restarts, status):
    """Simulate a job of one rank, which exits with the next of ``statuses`` at each start."""
    left, arguments = list(statuses), []
    monkeypatch.setattr("dualtrain.spawn.FIRST_WAIT_SECONDS", 0.01)

    def process(target, args, name):
        arguments.append(args[1])
        code = left.pop(0)
        return SimpleNamespace(start=lambda: None, exitcode=128 - code if code > 128 else code, pid=None)

    monkeypatch.setattr("dualtrain.spawn.get_context", lambda method: SimpleNamespace(Process=process))
    assert spawn(len, ["a"], 1, restarts) == status
    assert left == []
    assert arguments == [["a"]] * len(statuses)
    said = [line for line in caplog.messages if "restart" in line]
    wait, lines = 0.0, []
    for number, code in enumerate(statuses[:-1], 1):
        wait = (2 * wait or 0.01) if code in TRANSIENT else 0.0
        ended, when = TRANSIENT.get(code, code), f" in {wait:g} s" if wait else ""
        lines.append(f"the job has ended with status {ended}: restart {number} of {restarts}{when}")
    assert said == lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_the_wait_before_a_restart(monkeypatch, number):
    said = []

    def note(text, *values):
        text = text % values
        said.append(text)
        if "restart" in text:
            os.kill(os.getpid(), number)

    rank = SimpleNamespace(start=lambda: None, exitcode=TRY_AGAIN, pid=None)
    monkeypatch.setattr("dualtrain.spawn.get_context", lambda method: SimpleNamespace(Process=lambda **_: rank))
    monkeypatch.setattr("dualtrain.spawn.FIRST_WAIT_SECONDS", 600.0)
    monkeypatch.setattr("dualtrain.spawn.LONGEST_WAIT_SECONDS", 600.0)
    monkeypatch.setattr("dualtrain.spawn.print_error", note)
    monkeypatch.setattr("dualtrain.spawn.log.warning", note)
    assert spawn(len, [], 1, 5) == 128 + number
    line = "the job has ended with status 2: restart 1 of 5 in 600 s"
    assert said == ([line, "interrupted"] if number == signal.SIGINT else [line])


def test_a_checkpoint_request_before_a_restart_is_passed_to_the_restarted_ranks(monkeypatch):
    statuses, sent = [TRY_AGAIN, 0], []

    def process(**_):
        return SimpleNamespace(start=lambda: None, exitcode=statuses.pop(0), pid=None)

    def note(text, *values):
        os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr("dualtrain.spawn.get_context", lambda method: SimpleNamespace(Process=process))
    monkeypatch.setattr("dualtrain.spawn.FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr("dualtrain.spawn.log.warning", note)
    monkeypatch.setattr("dualtrain.spawn._Job._send", lambda job, number: sent.append((number, len(statuses))))
    assert spawn(len, [], 1, 1) == 0
    assert (signal.SIGUSR1, 0) in sent  # after the start of the second attempt


def test_restart_delays_double_up_to_a_limit_and_reset_after_a_long_attempt():
    waits = [0.0]
    for seconds in (1, 31, 1, 1, 1, 1, 1, 1, 31):
        waits.append(_next_wait(waits[-1], TRY_AGAIN, seconds))
    assert waits == [0, 1, 1, 2, 4, 8, 16, 30, 30, 1]
    assert _next_wait(30, 137, 1) == 0


def test_a_job_that_was_stopped_is_not_restarted(monkeypatch):
    started = []

    def start() -> None:
        started.append(1)
        os.kill(os.getpid(), signal.SIGTERM)

    context = SimpleNamespace(Process=lambda **_: SimpleNamespace(start=start, exitcode=143))
    monkeypatch.setattr("dualtrain.spawn.get_context", lambda method: context)
    assert spawn(len, [], 2, 5) == 143
    assert len(started) == 1


def test_a_job_is_not_restarted_if_a_rank_survives_sigkill(monkeypatch, capsys):
    for name in ("GRACE_SECONDS", "END_SECONDS", "REPORT_SECONDS"):
        monkeypatch.setattr(f"dualtrain.spawn.{name}", 0.01)
    processes, sent = [], []
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append(number))

    def start() -> None:
        if len(processes) % 2 == 0:
            processes[-2].exitcode = 1

    def process(name, **_):
        processes.append(SimpleNamespace(start=start, name=name, pid=7, exitcode=None, join=lambda seconds: None))
        return processes[-1]

    monkeypatch.setattr("dualtrain.spawn.get_context", lambda method: SimpleNamespace(Process=process))
    assert spawn(len, [], 2, 5) == 1
    assert [process.name for process in processes] == ["rank 0", "rank 1"]
    assert sent[:2] == [signal.SIGTERM, signal.SIGKILL]
    assert "rank 1 (process 7) did not end within 0.01 s of SIGKILL" in capsys.readouterr().err


class LateRank:
    """A rank whose exit status is None when the parent first checks for failed ranks, and 5 in all later reads."""

    pid, reads = None, 0

    def start(self) -> None:
        """Do nothing."""

    @property
    def exitcode(self) -> int | None:
        self.reads += 1
        return None if self.reads == 1 else 5


def test_a_rank_that_fails_just_after_the_last_check_gives_its_status(monkeypatch):
    context = SimpleNamespace(Process=lambda **_: LateRank())
    monkeypatch.setattr("dualtrain.spawn.get_context", lambda method: context)
    assert spawn(len, [], 1) == 5


# -- whole jobs ---------------------------------------------------------------------------------------------------


SHOW_PIDS = """
def shown(arguments):
    print(f"pid {os.environ['RANK']} {os.getpid()};", flush=True)
    return dualtrain.main.main(arguments)
"""


@pytest.mark.parametrize("backend", ["torch", "horovod"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_by_the_others_and_gives_the_status(start, tmp_path, backend, victim):
    if backend == "horovod":
        require_horovod()
    flags = ("--backend", backend, "--epochs", "5000", "--run-dir", str(tmp_path / "run"))
    restarts = int(backend == "torch" and victim == 1)
    job = start(None, *flags, settings=SHOW_PIDS, function="shown", restarts=restarts)
    assert wait_until(lambda: "epoch 2/" in job.output), job.errors
    os.kill(job.pids[victim], signal.SIGKILL)
    if restarts:
        recovered = f"recovered: rank {victim} died: its process ended without a report, after step "
        assert wait_until(lambda: recovered in job.output), job.errors
        os.kill(job.pids[victim], signal.SIGKILL)
    assert job.wait(SECONDS) == 137
    assert job.errors.count(f"stopping, since rank {victim} died") == 1 + restarts
    assert "Traceback" not in job.errors
    assert "resource_tracker" not in job.errors


def test_spawned_ranks_give_the_weights_of_launched_ranks_on_both_backends(start, tmp_path):
    require_horovod()
    runs = {name: tmp_path / name for name in ("launcher", "torch", "horovod")}
    flags = ("--backend", "torch", "--max-steps", "5", "--run-dir", runs["launcher"])
    for end in run_ranks(2, ("-m", "dualtrain.main", *flags), tmp_path / "ranks", env=ENV):
        assert end.returncode == 0, end
    for backend in ("torch", "horovod"):
        job = start(None, "--backend", backend, "--max-steps", "5", "--run-dir", str(runs[backend]))
        assert job.wait(SECONDS) == 0, job.errors
    found = {name: json.loads((folder / "summary.json").read_text()) for name, folder in runs.items()}
    assert [(found[name]["backend"], found[name]["launcher"]) for name in ("torch", "horovod")] == [
        ("torch", "spawn"),
        ("horovod", "spawn"),
    ]
    assert len({result["weights_sha256"] for result in found.values()}) == 1
    assert {result["world_size"] for result in found.values()} == {2}


def test_a_refusal_is_printed_once(start):
    job = start(None, "--data-dir", "missing")
    assert job.wait(SECONDS) == 2
    (line,) = job.errors.splitlines()
    assert "--data-dir 'missing'" in line
