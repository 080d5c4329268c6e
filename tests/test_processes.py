"""Helper processes: they survive the job's signals and exit with the job."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from dualtrain.processes import hide_lost_starts, signal_at_parents_end
from tests.pool import ROOT

# Program that starts the helper processes: the fork server, the resource tracker, and two workers one after the other. It
# sends the job's signals to all except the second worker, and prints multiprocessing's temporary folder and the helpers'
# process ids. After a line on standard input, it exits with status 3.
PROGRAM = """
import multiprocessing, os, signal, sys, time
from multiprocessing import forkserver, resource_tracker, util
from dualtrain.console import leave
from dualtrain.processes import JOB_SIGNALS, begin_worker, start_forkserver

def work(ready):
    begin_worker()
    ready.send(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    if "PARENT_FOLDER" in os.environ:  # as in a child of multiprocessing, which uses its parent's temporary folder
        multiprocessing.current_process()._config["tempdir"] = os.environ["PARENT_FOLDER"]
    if "USES_MULTIPROCESSING" in os.environ:  # as in a program that has used multiprocessing itself
        util.get_temp_dir()
    start_forkserver([])
    helpers = [forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid]
    for number in JOB_SIGNALS:
        for pid in helpers:
            os.kill(pid, number)  # while they start
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    kept = context.Semaphore()
    worker = context.Process(target=work, args=(theirs,), daemon=True)
    worker.start()
    for number in JOB_SIGNALS:
        os.kill(worker.pid, number)  # while it starts
    helpers.append(ours.recv())
    for number in JOB_SIGNALS:
        for pid in helpers:
            os.kill(pid, number)
    another = context.Process(target=work, args=(theirs,), daemon=True)
    another.start()
    helpers.append(ours.recv())
    print(util.get_temp_dir(), kept._semlock.name, *helpers, flush=True)
    sys.stdin.readline()
    leave(3)
"""


@contextmanager
def started(tmp_path: Path, **variables: str) -> Iterator[tuple[subprocess.Popen[str], list[Path], list[int]]]:
    """Start ``PROGRAM`` as the leader of a process group; kill it at the end of the context.

    Yields:
        The process, the paths of its temporary folder and of its semaphore, and the ids of its helpers.
    """
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT), **variables}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=pipe, stdout=pipe, stderr=pipe, env=env, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            folder, semaphore, *helpers = process.stdout.readline().split()
            yield process, [Path(folder), Path(f"/dev/shm/sem.{semaphore[1:]}")], [int(pid) for pid in helpers]
        finally:
            process.kill()


def gone(helpers: list[int], paths: Sequence[Path] = ()) -> bool:
    """Wait up to 60 s until no helper runs and none of ``paths`` exists; return whether this has happened."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not any(path.exists() for path in paths) and not any(Path("/proc", str(pid)).exists() for pid in helpers):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("kill", "variables"),
    [(None, {}), (os.kill, {}), (os.killpg, {}), (os.killpg, {"USES_MULTIPROCESSING": "1"})],
    ids=["fails", "kill", "killpg", "killpg-multiprocessing"],
)
def test_helpers_survive_signals_and_exit_with_a_job_that_fails_or_is_killed(tmp_path, kill, variables):
    with started(tmp_path, **variables) as (process, paths, helpers):
        assert len(helpers) == 4
        assert paths[0].parent == tmp_path
        assert paths[1].exists()
        # Only the tracker leaves the job's process group, and so outlives a SIGKILL to the group. The workers, and programs
        # that they start, get the group's signals.
        assert [pid for pid in helpers if os.getpgid(pid) != process.pid] == [helpers[1]]
        if kill is not None:
            kill(process.pid, signal.SIGKILL)  # mpirun and horovodrun kill the group
        output, errors = process.communicate("\n" if kill is None else "", timeout=60)
        assert (output, errors) == ("", "")  # not even a warning about a leaked semaphore
        assert process.returncode == (3 if kill is None else -signal.SIGKILL)
        assert gone(helpers, paths)


# Program that begins as a worker that has inherited an ignored SIGHUP, as under nohup. It starts a program, which prints
# whether it ignores SIGHUP and SIGTERM.
IGNORED = """
import signal, subprocess, sys
from dualtrain.processes import begin_worker
signal.signal(signal.SIGHUP, signal.SIG_IGN)
begin_worker()
program = "import signal; print([signal.getsignal(n) == signal.SIG_IGN for n in (signal.SIGHUP, signal.SIGTERM)])"
subprocess.run([sys.executable, "-c", program], check=True)
"""


def test_programs_that_a_worker_starts_ignore_a_hangup_under_nohup():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    end = subprocess.run([sys.executable, "-c", IGNORED], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert end.stdout == "[True, False]\n"


# Program that begins as a worker and reads from a pipe in C code. A thread sends SIGTERM to the reader, and then writes.
READING = """
import ctypes, os, signal, threading, time
from dualtrain.processes import begin_worker

def interrupt(reader):
    time.sleep(0.3)
    signal.pthread_kill(reader, signal.SIGTERM)
    time.sleep(0.3)
    os.write(theirs, b"x")

begin_worker()
ours, theirs = os.pipe()
threading.Thread(target=interrupt, args=(threading.get_ident(),)).start()
print(ctypes.CDLL(None).read(ours, ctypes.create_string_buffer(1), 1))
"""


def test_a_signal_does_not_interrupt_a_workers_reads_in_c_code():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    end = subprocess.run([sys.executable, "-c", READING], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert end.stdout == "1\n"


# Program that is interrupted while it starts a worker process. The start sends more bytes than a pipe holds, so it blocks
# until the worker reads them. The fork server imports a slow module before it forks the worker.
STARTING = """
import multiprocessing, signal, sys
from dualtrain.console import leave
from dualtrain.processes import start_forkserver

def interrupt(*_):
    raise KeyboardInterrupt

if __name__ == "__main__":
    start_forkserver(["slow"])
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        multiprocessing.get_context("forkserver").Process(target=len, args=(b"x" * 1_000_000,)).start()
    except KeyboardInterrupt:
        leave(3)
"""


def test_a_worker_whose_start_was_interrupted_prints_no_traceback(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(2)\n")
    (tmp_path / "program.py").write_text(STARTING)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, str(tmp_path / "program.py")]
    end = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (end.returncode, end.stdout, end.stderr) == (3, "", "")


@pytest.mark.parametrize("content", ["b'x' * 1_000_000", "Unreadable()"])
def test_a_worker_whose_rank_was_killed_prints_only_tracebacks_of_other_errors(content, tmp_path):
    """Start a worker with ``content``, and kill the rank; it blocks in the start, as in STARTING."""
    program = """
import multiprocessing, os, signal, threading
from dualtrain.processes import start_forkserver

def fail():
    raise EOFError("from the user's code")

class Unreadable:
    def __reduce__(self):
        return fail, ()

if __name__ == "__main__":
    start_forkserver(["dualtrain.data.preload"])
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGKILL]).start()
    multiprocessing.get_context("forkserver").Process(target=len, args=(CONTENT,)).start()
"""
    (tmp_path / "program.py").write_text(program.replace("CONTENT", content))
    env, command = {**os.environ, "PYTHONPATH": str(ROOT)}, [sys.executable, str(tmp_path / "program.py")]
    end = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert end.returncode == -signal.SIGKILL
    last = end.stderr.splitlines()[-1:]
    assert last == (["EOFError: from the user's code"] if content == "Unreadable()" else [])


def test_a_fork_server_prints_an_error_that_has_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    hide_lost_starts()
    sys.excepthook(EOFError, EOFError("here"), None)  # as the user's code may call it
    assert capsys.readouterr().err == "EOFError: here\n"


def test_a_temporary_folder_of_the_parent_program_is_not_removed(tmp_path):
    parent_folder = tmp_path / "parent"
    parent_folder.mkdir()
    with started(tmp_path, PARENT_FOLDER=str(parent_folder)) as (process, paths, helpers):
        assert paths[0] == parent_folder
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert gone(helpers)
    assert parent_folder.exists()


#: Program that starts a child and waits. Arguments: the child's program; the value of TORCHELASTIC_RUN_ID, or "" for none;
#: the shell that starts the child, or "" for none.
AGENT = """
import os, subprocess, sys
program, run_id, shell = sys.argv[1:]
command = [sys.executable, "-c", program]
if shell:
    command = [shell, "-c", '"$@"; exit 1', "-", *command]
child = subprocess.Popen(command, env={**os.environ, **({"TORCHELASTIC_RUN_ID": run_id} if run_id else {})})
child.wait()
"""
#: Program of the child: a rank, which gets SIGTERM when its parent ends if the parent is torchrun's agent.
RANK = """
import os, signal, time
from dualtrain.launchers import torchrun_is_parent
from dualtrain.processes import signal_at_parents_end
if torchrun_is_parent():
    signal_at_parents_end(signal.SIGTERM, os.getppid())
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), os._exit(143)))
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_signal_at_parents_end_sends_at_once_if_the_parent_has_already_ended():
    received: list[int] = []
    handler = signal.signal(signal.SIGUSR2, lambda number, _: received.append(number))
    try:
        signal_at_parents_end(signal.SIGUSR2, os.getppid())
        assert received == []
        signal_at_parents_end(signal.SIGUSR2, os.getppid() + 1)
        assert received == [signal.SIGUSR2]
    finally:
        signal_at_parents_end(0, os.getppid())  # withdraw the setting: no signal will be sent
        signal.signal(signal.SIGUSR2, handler)


@pytest.mark.parametrize(("run_id", "shell", "ends"), [("none", "", True), ("", "", False), ("none", "/bin/sh", False)])
def test_a_rank_ends_with_its_parent_only_if_the_parent_is_torchruns_agent(run_id, shell, ends):
    command = [sys.executable, "-c", AGENT, RANK, run_id, shell]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as agent:
        assert agent.stdout is not None
        rank = int(agent.stdout.readline())
        agent.kill()
        agent.wait()
        if not ends:
            os.kill(rank, 0)  # the process still runs, although its parent has ended
            assert not select.select([agent.stdout], [], [], 0.3)[0]
            os.kill(rank, signal.SIGTERM)
        assert agent.stdout.read() == "saved\n"
