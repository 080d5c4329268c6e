"""The command ``dualtrain.main``, mostly with a single rank: its exit status, messages and reaction to signals."""

from __future__ import annotations

import os
import pty
import re
import signal
from contextlib import suppress
from dataclasses import replace
from tempfile import TemporaryDirectory

import pytest
import torch

from dualtrain import connect
from dualtrain import main as command
from dualtrain.config import parse
from dualtrain.console import refuse_on_all
from dualtrain.errors import DivergedError, NotSavedError, RanksDifferError, UserError
from dualtrain.launchers import NOT_SAVED, TRY_AGAIN, World
from dualtrain.training.signals import STOP_SIGNALS
from tests.forked import Forked, run
from tests.pool import ROOT, free_port
from tests.threads import run_threads

MAIN = ("-m", "dualtrain.main")
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_a_run_ends_with_status_0_and_prints_its_results(tmp_path):
    end = run((*MAIN, "--max-steps", "3"), tmp_path, env=ENV, cwd=tmp_path)
    assert (end.returncode, end.stderr) == (0, "")
    assert "val accuracy" in end.stdout.splitlines()[-1]
    assert "\r" not in end.stdout  # no progress bar without a terminal


def test_a_terminal_gets_a_progress_bar(tmp_path):
    ours, theirs = pty.openpty()
    program = "import os, sys, dualtrain.main\nterminal = os.open(sys.argv.pop(1), os.O_WRONLY)\n"
    program += "for each in (1, 2): os.dup2(terminal, each)\nsys.exit(dualtrain.main.main())"
    process = Forked(("-c", program, os.ttyname(theirs), "--max-steps", "3"), tmp_path, env=ENV, cwd=tmp_path)
    shown = b""
    try:
        assert process.wait(120) == 0
        os.set_blocking(ours, False)
        while data := os.read(ours, 65536):
            shown += data
    except BlockingIOError:
        pass  # end of the terminal's output
    finally:
        process.kill()
        os.close(theirs)
        os.close(ours)
    assert "3/3" in shown.decode()
    assert "█" in shown.decode()


def converted(shape, classes):
    """Interrupt this process, and convert the KeyboardInterrupt to ImportError, as the import of a C extension may do."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("initialization failed") from None


def lost(shape, classes):
    """Interrupt this process, suppress the KeyboardInterrupt, and build a model."""
    with suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))


@pytest.mark.parametrize(
    ("model", "line"), [("converted", "interrupted"), ("lost", "SIGINT ended the run after step 1 of .*, saved in .*")]
)
def test_an_interrupt_that_becomes_another_error_or_is_lost_ends_the_run(model, line, tmp_path, capsys):
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    flags = ["--model", f"{__name__}:{model}", "--classes", "10", "--threads", "1", "--run-dir", str(tmp_path)]
    assert command.main(flags) == 130
    assert re.fullmatch(f"dualtrain: error: {line}\n", capsys.readouterr().err)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers


@pytest.mark.parametrize(
    ("arguments", "env", "part"),
    [
        (["--lr", "x"], {}, "--lr"),
        (["--data-dir", "missing"], {}, "--data-dir"),
        (["--device", "cuda:99"], {}, "device"),
        (["--backend", "local"], {"RANK": "0", "WORLD_SIZE": "2"}, "rank 0 of 2"),
        (["--backend", "torch"], {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ([], {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "rank 2"),
    ],
)
def test_an_error_that_a_user_can_fix_gives_one_line_and_status_2(tmp_path, monkeypatch, capsys, arguments, env, part):
    monkeypatch.chdir(tmp_path)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert command.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dualtrain: error")
    assert part in line
    assert not (tmp_path / "runs").exists()


def test_the_wait_for_a_missing_peer_at_the_start_is_bounded(monkeypatch, capsys):
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    assert command.main(["--backend", "torch", "--timeout", "1"]) == 2
    assert "within 1 s" in capsys.readouterr().err


def test_a_refusal_gives_the_process_status_2(tmp_path):
    end = run((*MAIN, "--lr", "x"), tmp_path, env=ENV)
    assert (end.returncode, end.stdout, len(end.stderr.splitlines())) == (2, "", 1)


def test_a_missing_horovod_is_reported_with_its_cure(tmp_path):
    (tmp_path / "horovod.py").write_text("raise ImportError('No module named horovod')")
    end = run((*MAIN, "--backend", "horovod"), tmp_path, env=ENV, cwd=tmp_path)
    assert end.returncode == 2
    (line,) = end.stderr.splitlines()
    assert "launch/setup.sh" in line
    assert "horovodrun" in line


def test_an_unexpected_error_keeps_its_traceback(tmp_path, monkeypatch, capsys):
    def broken(*_: object) -> None:
        raise KeyError("lost key")

    monkeypatch.setattr("dualtrain.training.loop.train", broken)
    assert command.main(["--run-dir", str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "lost key" in shown.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UserError("fix it", shared=True), 2),
        (UserError("fix it"), 2),
        (DivergedError("inf"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_the_exit_status_depends_on_the_kind_of_error(tmp_path, monkeypatch, capsys, error, status):
    def ending(*_: object) -> None:
        raise error

    monkeypatch.setattr("dualtrain.training.loop.train", ending)
    assert command.main(["--run-dir", str(tmp_path)]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert ("do not restart" in line) is isinstance(error, DivergedError)


@pytest.mark.parametrize(
    ("error", "launcher", "do_not_restart", "status"),
    [
        (UserError("fix it"), "torchrun", True, 2),
        (RanksDifferError("another seed"), "torchrun", True, 2),
        (UserError("fix it"), "spawn", False, 2),
        (UserError("the disk is full", transient=True), "torchrun", False, 2),
        (UserError("the disk is full", transient=True), "spawn", False, TRY_AGAIN),
        (UserError("a bad sample", forbids_restart=True), "spawn", True, 2),
        (NotSavedError("the disk is full"), "torchrun", False, 1),
        (NotSavedError("the disk is full"), "spawn", False, NOT_SAVED),
        (DivergedError("inf"), "spawn", True, 1),
    ],
)
def test_the_error_says_do_not_restart_if_a_restart_would_repeat_it(capsys, error, launcher, do_not_restart, status):
    """torchrun restarts after any error. Under torchrun, every error that a restart would repeat says "do not restart".

    Under other launchers, an error says this only if the run's folder refuses later starts.
    """
    with connect("local") as backend:
        backend.world = replace(backend.world, launcher=launcher)
        assert command._give_up(error, backend) == status
    said = f"dualtrain: error: {'do not restart: ' if do_not_restart else ''}{error}\n"
    assert capsys.readouterr().err == said


def test_a_do_not_restart_file_in_the_run_folder_forbids_a_restart(tmp_path, capsys):
    """The error begins with "do not restart" when the run fails while it trains, and in each restart."""
    flags = ["--max-steps", "4", "--threads", "1", "--run-dir", str(tmp_path), "--resume", "auto"]
    assert [command.main([*flags, "--lr", "1e30"]) for _ in range(2)] == [1, 2]
    first, again = capsys.readouterr().err.splitlines()
    assert first.startswith("dualtrain: error: do not restart: the loss became infinite")
    assert again.startswith(f"{first}; the run would end in the same way again")
    (tmp_path / "do-not-restart.json").unlink()
    assert command.main([*flags, "--epochs", "nothing"]) == 2
    assert command.main([*flags, "--model", "mlp"]) == 2  # refused before the run trains
    assert "do not restart" not in capsys.readouterr().err


def give_up(backend) -> int:
    errors = RanksDifferError("another seed"), UserError("the disk is full", shared=True, transient=True)
    return command._give_up(errors[backend.size - 2], backend)


def test_only_rank_0_prints_an_error_unless_the_ranks_differ(capsys):
    assert run_threads(2, give_up) == [2, 2]
    lines = sorted(capsys.readouterr().err.splitlines())
    assert lines == [f"dualtrain: error (rank {rank} of 2): another seed" for rank in range(2)]
    assert run_threads(3, give_up) == [2, 2, 2]
    assert capsys.readouterr().err.splitlines() == ["dualtrain: error (rank 0 of 3): the disk is full"]


def test_ranks_other_than_0_wait_before_they_report_a_mistyped_flag(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    silent: list[str] = []
    monkeypatch.setattr("time.sleep", lambda seconds: silent.append(capsys.readouterr().err))
    assert command.main(["--lr", "x"]) == 2
    assert silent == [""]
    assert capsys.readouterr().err.startswith("dualtrain: error (rank 1 of 2): --lr must be a number")
    with pytest.raises(UserError):
        parse(["--lr", "x"])


def test_the_error_says_do_not_restart_only_if_the_launcher_restarts_ranks(capsys):
    for launcher, said in (("torchrun", "do not restart: no such flag"), ("environment", "no such flag")):
        assert refuse_on_all(UserError("no such flag"), World(launcher=launcher)) == 2
        assert capsys.readouterr().err == f"dualtrain: error: {said}\n"


# Program whose training raises StoppedError, as after a signal. The signal arrives twice more before the program exits.
STOPPED_TWICE = """
import os, signal, sys
import dualtrain.main, dualtrain.training.loop
from dualtrain.errors import StoppedError
number = int(sys.argv.pop())
def train(config, backend):
    close = backend.close
    def close_late():
        os.kill(os.getpid(), number)
        close()
    backend.close = close_late
    try:
        raise StoppedError("saved in step 3", number)
    finally:
        os.kill(os.getpid(), number)
dualtrain.training.loop.train = train
sys.exit(dualtrain.main.main())
"""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_second_signal_does_not_suppress_the_message_of_the_first(tmp_path, number):
    end = run(("-c", STOPPED_TWICE, str(int(number))), tmp_path, env=ENV)
    assert (end.returncode, end.stderr) == (128 + number, "dualtrain: error: saved in step 3\n")


# Program that starts the fork server of data workers, but no worker, and gets a signal.
ENDED = """
import os, signal, sys, tempfile
import dualtrain.main, dualtrain.training.loop
from dualtrain.processes import start_forkserver
number = int(sys.argv.pop())
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
def train(config, backend):
    tempfile.tempdir = os.getcwd()
    start_forkserver([])
    print(len(os.listdir()), flush=True)
    os.kill(os.getpid(), number)
dualtrain.training.loop.train = train
dualtrain.main.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_rank_that_a_signal_ends_leaves_no_temporary_folder(tmp_path, number):
    with TemporaryDirectory() as folder:  # the path of ``tmp_path`` may be too long for the fork server's socket
        end = run(("-c", ENDED, str(int(number))), tmp_path, env=ENV, cwd=folder)
        assert (end.returncode, end.stdout, end.stderr) == (128 + number, "1\n", "")
        assert not os.listdir(folder)


# Program that sends itself SIGUSR1 while main imports its modules, and prints the exit status and whether SIGUSR1 is then
# ignored.
SIGUSR1_DURING_IMPORTS = """
import os, runpy, signal, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "dualtrain"]:
    del sys.modules[name]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "dualtrain.config":
            os.kill(os.getpid(), signal.SIGUSR1)
sys.meta_path.insert(0, Finder())
import dualtrain.console
dualtrain.console.leave = lambda status: print(status, signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN)
sys.argv = ["dualtrain.main", "--lr", "x"]
runpy.run_module("dualtrain.main", run_name="__main__", alter_sys=True)
"""


def test_a_sigusr1_during_the_imports_or_at_exit_does_not_kill_the_command(tmp_path):
    end = run(("-c", SIGUSR1_DURING_IMPORTS), tmp_path, env=ENV)
    assert (end.returncode, end.stdout) == (0, "2 True\n"), end.stderr
