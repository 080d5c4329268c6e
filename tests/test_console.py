"""Printed output: escaped control characters, log messages, closed pipes and closed streams."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys

import pytest

from dualtrain import compare, main
from dualtrain.console import logging_to_stderr, print_error, printable, show, show_progress, size_in_words
from dualtrain.horovodize.__main__ import main as horovodize
from tests.forked import ROOT, run
from tests.no_compiler import NO_COMPILER


def test_control_characters_are_escaped_and_text_is_kept():
    hostile = "\x1b[2Jcat\x07 \x9b31m \r\x7f\u202eexe.gpj\u2028\udcff"
    escaped = printable(hostile)
    assert escaped == r"\x1b[2Jcat\x07 \x9b31m \r\x7f\u202eexe.gpj\u2028\udcff"
    assert printable(escaped) == escaped
    plain = "naïve × 日本語 – ✓\n\tsecond line"
    assert printable(plain) == plain


def test_sizes_are_rounded_down():
    assert [size_in_words(size) for size in (0, 1023, 1024, 3 << 20)] == ["0 B", "1023 B", "1 KB", "3 MB"]


def test_control_characters_in_errors_and_output_are_printed_escaped(capsys):
    print_error("the image cat\x1b]0;owned\x07.jpg cannot be read", rank=1, size=2)
    show("class \x1b[31mred")
    show("to stderr \x08", sys.stderr)
    printed = capsys.readouterr()
    assert printed.out == "class \\x1b[31mred\n"
    assert printed.err.splitlines() == [
        r"dualtrain: error (rank 1 of 2): the image cat\x1b]0;owned\x07.jpg cannot be read",
        r"to stderr \x08",
    ]


def test_a_command_prints_log_messages_from_level_warning_on(capsys):
    log = logging.getLogger("dualtrain.some.part")
    with logging_to_stderr():
        log.warning("memory cannot be shared (%s): continuing", "\x1b[31m")
        log.info("a detail")
    log.warning("after the command")
    assert capsys.readouterr().err.splitlines() == [r"dualtrain: warning: memory cannot be shared (\x1b[31m): continuing"]


@pytest.fixture
def closed_pipe():
    """The write end of a pipe whose read end is closed, as after the end of ``| head``."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def test_output_to_a_closed_pipe_is_discarded(monkeypatch, closed_pipe):
    with open(os.dup(closed_pipe), "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        show("one")
        show("two")


@pytest.mark.parametrize("command", ["compare --help", "train --epochs 1 --run-dir run --resume auto"])
def test_a_closed_pipe_does_not_change_how_a_command_ends(tmp_path, closed_pipe, command):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
    options = {"stdout": closed_pipe, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path, "env": env, "timeout": 300}
    program = f"{NO_COMPILER}import runpy\nrunpy.run_module('dualtrain', run_name='__main__', alter_sys=True)"
    end = subprocess.run([sys.executable, "-c", program, *command.split()], **options, check=False)
    assert (end.returncode, end.stderr) == (0, "")
    assert (tmp_path / "run" / "summary.json").exists() == ("run" in command)


@pytest.fixture
def full_disk():
    """A file on a full disk. Closing it fails if its buffer still holds text."""
    with open("/dev/full", "w") as stream:
        yield stream


FULL = "standard output cannot be written (No space left on device): free space, or redirect it elsewhere"


@pytest.mark.parametrize(
    "command",
    [
        lambda script: compare.main(["--help"]),
        lambda script: main.main(["--recipe", "list"]),
        lambda script: horovodize(["--help"]),
        lambda script: horovodize(["--recorder"]),
        lambda script: horovodize(["--check", script]),
        lambda script: horovodize(["--fix", script]),
        lambda script: horovodize(["--fix", "--diff", script]),
    ],
)
def test_a_command_whose_output_cannot_be_written_ends_with_one_line(tmp_path, monkeypatch, capsys, full_disk, command):
    monkeypatch.setattr(sys, "stdout", full_disk)
    script = tmp_path / "script.py"
    script.write_text("import torch\nimport horovod.torch as hvd\nhvd.init()\n")
    assert command(str(script)) == 2
    assert capsys.readouterr().err == f"dualtrain: error: {FULL}\n"


def test_a_run_whose_output_cannot_be_written_continues_and_warns_once(monkeypatch, caplog, full_disk):
    monkeypatch.setattr(sys, "stdout", full_disk)
    monkeypatch.setattr("dualtrain.console._warned", False)
    show_progress("step 1")
    show_progress("step 2")
    assert caplog.messages == [f"{FULL}; the run continues"]


def test_errors_that_cannot_be_written_are_discarded(monkeypatch, full_disk):
    monkeypatch.setattr(sys, "stderr", full_disk)
    print_error("lost")


@pytest.mark.parametrize(("encoding", "printed"), [("ascii", b"2 ? cpu ?\n"), ("latin-1", b"2 \xd7 cpu ?\n")])
def test_characters_that_the_encoding_of_the_output_lacks_become_question_marks(monkeypatch, encoding, printed):
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding=encoding))
    show("2 × cpu –")
    assert file.getvalue() == printed


def test_no_other_file_gets_the_descriptor_of_a_closed_standard_stream(tmp_path):
    source = (
        "from dualtrain.console import open_closed_streams, show\n"
        "import os, sys\n"
        "open_closed_streams()\n"
        f"file = open({str(tmp_path / 'file')!r}, 'w')\n"
        "show('lost'), show('lost', sys.stderr)\n"
        "os.system('echo lost; echo lost >&2')\n"
        "file.write(str(file.fileno() > 2))\n"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, source]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == 0
    assert (tmp_path / "file").read_text() == "True"


def test_an_object_that_the_program_assigned_to_sys_stdin_is_kept():
    source = (
        "import io, os, sys\n"
        "from dualtrain.console import open_closed_streams\n"
        "os.close(0)\n"
        "sys.stdin = io.StringIO('kept')\n"
        "open_closed_streams()\n"
        "os.fstat(0)\n"
        "print(sys.stdin.read())\n"
    )
    command = [sys.executable, "-c", source]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=True, capture_output=True).stdout == b"kept\n"


def test_an_unknown_argument_with_a_newline_is_refused_in_one_line(capsys):
    assert main.main(["--early-=a\nb"]) == 2
    assert capsys.readouterr().err.startswith(r"dualtrain: error: unrecognized arguments: --early-=a\nb (did you mean")


@pytest.mark.parametrize("module", ["dualtrain", "dualtrain.main"])
def test_a_run_without_standard_streams_trains(tmp_path, module):
    train = [*(["train"] if module == "dualtrain" else []), "--max-steps", "1", "--run-dir", str(tmp_path / "run")]
    source = (
        "import os, runpy, sys\n"
        "sys.stdin = sys.stdout = sys.stderr = None\n"
        "os.closerange(0, 3)\n"
        f"sys.argv = {['', *train]}\n"
        f"runpy.run_module({module!r}, run_name='__main__')\n"
    )
    end = run(("-c", source), tmp_path)
    assert (end.returncode, end.stdout, end.stderr) == (0, "", "")
    assert (tmp_path / "run" / "summary.json").exists()
