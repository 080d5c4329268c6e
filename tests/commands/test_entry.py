"""``dualtrain COMMAND`` and ``python -m dualtrain COMMAND``."""

from __future__ import annotations

import configparser
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from dualtrain import __main__ as entry
from dualtrain import console
from dualtrain.launchers import without_launchers
from dualtrain.version import __version__
from tests.forked import run
from tests.pool import ROOT

ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def restore_sigint_handler():
    earlier = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, earlier)


def test_the_console_script_dualtrain_calls_entry_main():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    name, _, target = setup["options.entry_points"]["console_scripts"].strip().partition(" = ")
    module, _, function = target.partition(":")
    assert (name, getattr(importlib.import_module(module), function)) == ("dualtrain", entry.main)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_arguments_and_with_help_every_command_is_listed(monkeypatch, capsys, arguments):
    monkeypatch.setattr("sys.argv", ["/env/bin/dualtrain", *arguments])
    assert entry.main() == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: dualtrain COMMAND")
    assert re.findall(r"^  (\w+) +\w.*$", said, re.MULTILINE) == list(entry.COMMANDS)
    assert list(entry.COMMANDS) == [*("train", "compare", "report", "predict", "doctor", "bench", "drill", "horovodize")]


def test_dualtrain_prints_its_version_and_refuses_a_mistyped_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["__main__.py", "--version"])
    assert entry.main() == 0
    assert capsys.readouterr().out == f"dualtrain {__version__}\n"
    monkeypatch.setattr("sys.argv", ["__main__.py", "trian"])
    assert entry.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dualtrain: error: 'trian' is not a command: choose one of train, compare")


@pytest.mark.parametrize("name", entry.COMMANDS)
def test_each_command_shows_its_own_help(monkeypatch, capsys, name):
    monkeypatch.setattr("sys.argv", ["/env/bin/dualtrain", name, "--help"])
    monkeypatch.setattr(console, "started_as", "")
    monkeypatch.setattr("dualtrain.training.signals.note_early_requests", lambda: None)
    monkeypatch.setattr("dualtrain.training.signals.end_on_early_interrupt", lambda: None)
    module = entry.COMMANDS[name][0]
    monkeypatch.setattr("runpy.run_module", lambda found, **_: importlib.import_module(_main_of(found)).main(["--help"]))
    if name == "horovodize":
        entry.main()
    else:
        with pytest.raises(SystemExit) as end:
            entry.main()
        assert end.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: dualtrain {name} " if module != "horovodize" else "Run an unmodified Horovod script")


def _main_of(module: str) -> str:
    return module if (ROOT / f"{module.replace('.', '/')}.py").exists() else f"{module}.__main__"


#: ``python -m dualtrain`` with forked ranks, which start faster than new interpreters.
PROGRAM = """
import runpy, dualtrain.spawn
from tests.afresh import AfreshContext
dualtrain.spawn.get_context = lambda method: AfreshContext()
runpy.run_module("dualtrain", run_name="__main__", alter_sys=True)
"""


def test_the_train_command_starts_a_run_and_refuses_mistyped_flags(tmp_path):
    flags = ("--nproc", "2", "--max-steps", "2", "--log-seconds", "0", "--run-dir", "run")
    end = run(("-c", PROGRAM, "train", *flags), tmp_path, env=ENV, cwd=tmp_path)
    assert (end.returncode, end.stderr) == (0, "")
    first, *_, last = end.stdout.splitlines()
    assert first.startswith("digits-convnet on 2 × cpu, 1 thread each, torch backend over shm, started by spawn: ")
    assert last.startswith("done: ")
    end = run(("-m", "dualtrain", "train", "--lrr", "1"), tmp_path / "refused", env=ENV, cwd=tmp_path)
    assert (end.returncode, end.stdout) == (2, "")
    assert end.stderr.endswith("(did you mean --lr?); see python -m dualtrain train --help\n")


def test_the_installed_command_finds_the_users_modules_in_the_current_folder(tmp_path):
    """Python puts the script's folder into ``sys.path``. ``main`` replaces that folder by the current one, in ranks too."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "dualtrain"
    # In the forked process, sys.orig_argv is the command of its parent: set the command that a new interpreter would have.
    own = "sys.orig_argv = [sys.executable, *sys.argv]"
    script.write_text(f"import sys\n{own}\nfrom dualtrain.__main__ import main\nsys.exit(main())\n")
    model = "torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))"
    (tmp_path / "mine.py").write_text(f"import torch\n\n\ndef model():\n    return {model}\n")
    flags = ["--model", "mine:model", "--max-steps", "2", "--log-seconds", "0", "--run-dir", "run", "--nproc", "1"]
    end = run((script, "train", *flags), tmp_path / "output", env=ENV, cwd=tmp_path)
    assert (end.returncode, end.stderr) == (0, "")
    assert "started by spawn: " in end.stdout
    assert "model: mine:model, 650 parameters" in end.stdout
    origin = json.loads((tmp_path / "run" / "config.json").read_text())["origin"]
    assert origin["command"] == shlex.join([sys.executable, str(script), "train", *flags])  # not a rank's command


# A module that interrupts its rank, or the rank's parent, during the import. It turns an interrupt of its own process into
# a different exception, as modules written in C may do.
INTERRUPTED = """
import os, pathlib, signal, time
try:
    if os.environ["RANK"] == "{rank}":
        while "OUTPUT" in os.environ and "loading" not in pathlib.Path(os.environ["OUTPUT"]).read_text():
            time.sleep(0.02)
        time.sleep(0.5)
        os.kill(os.{process}(), signal.SIGINT)
    time.sleep(30)
except KeyboardInterrupt:
    raise ImportError("initialization failed")
"""


@pytest.mark.parametrize("rank", ["0", "1", None], ids=["rank 0", "rank 1", "parent"])
@pytest.mark.parametrize("command", [["dualtrain.main"], ["dualtrain", "train"]])
def test_imports_show_progress_and_a_ctrl_c_prints_one_line_for_the_job(tmp_path, command, rank):
    values = {"rank": "1", "process": "getppid"} if rank is None else {"rank": rank, "process": "getpid"}
    (tmp_path / "torch.py").write_text(INTERRUPTED.format(**values))
    rank_variables = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
    rank_variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    if rank is None:  # rank 1 interrupts its parent: the command that starts the ranks
        rank_variables, command = {}, [*command, "--nproc", "2"]
    env = {**without_launchers(os.environ), **rank_variables, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    output = tmp_path / "output"
    if rank != "1":  # interrupt rank 0 or the parent only after its first line, however busy the machine is
        env["OUTPUT"] = str(output)
    command = [sys.executable, "-m", *command, "--log-seconds", "0.02"]
    with output.open("w") as file:
        end = subprocess.run(
            command, cwd=tmp_path, env=env, stdout=file, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert end.returncode == 130
    lines = output.read_text().splitlines()
    assert bool(lines) == (rank != "1")
    assert all(re.fullmatch(r"loading torch for \d+ s", line) for line in lines)
    assert end.stderr == ("" if rank == "1" else "dualtrain: error: interrupted\n")


def test_a_ctrl_c_while_predict_imports_torch_prints_one_line(tmp_path):
    (tmp_path / "torch.py").write_text(INTERRUPTED.format(rank="0", process="getpid"))
    for name, content in {"config": {}, "task": {"kind": "classes", "shape": [1, 8, 8], "classes": 10}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").touch()
    rank_variables = {"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "dualtrain", "predict", str(tmp_path), "image.png"]
    env = {**without_launchers(os.environ), **rank_variables}
    end = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (end.returncode, end.stdout, end.stderr) == (130, "", "dualtrain: error: interrupted\n")


@pytest.mark.parametrize("command", ["report", "doctor"])
def test_a_ctrl_c_ends_report_and_doctor_with_one_line(monkeypatch, capsys, command):
    def interrupt(*_, **__):
        signals.append(signal.getsignal(signal.SIGINT))
        raise KeyboardInterrupt

    earlier, signals = signal.getsignal(signal.SIGINT), []
    monkeypatch.setattr("sys.argv", ["/env/bin/dualtrain", command])
    monkeypatch.setattr(console, "started_as", "")
    monkeypatch.setattr(console, "open_closed_streams", lambda: signals.append(signal.getsignal(signal.SIGINT)))
    monkeypatch.setattr("runpy.run_module", interrupt)
    assert entry.main() == 130
    before, inside = signals
    assert before is not earlier  # a Ctrl-C before the command starts prints one line too
    assert inside is earlier
    assert capsys.readouterr().err == "dualtrain: error: interrupted\n"
