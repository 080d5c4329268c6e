"""launch/test.sh: the type check during the tests, the exit status, and Ctrl-C. All programs are fakes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.setups import SECONDS, Runs, until
from tests.pool import ROOT

# Fake of all programs of the environment. It prints its name and arguments, and runs the shell code that a test has set.
# `python -c`, with which test.sh looks for pyspark and Ray, only fails.
PROGRAM = """#!/bin/bash
here={folder}
name=${{0##*/}}
case "$*" in
  *"-m pytest"*) name=pytest ;;
  "-c "*) exit 1 ;;
esac
echo "$name $*"
if [ -e "$here/$name" ]; then . "$here/$name"; fi
"""
# Shell code of the program `name`: it ends only after the program `other`, which also runs this code, has begun.
CONCURRENT = 'touch "$here/{name}-began"; until [ -e "$here/{other}-began" ]; do sleep 0.02; done; echo "{name} ends"'


class Script(Runs):
    """Runs of test.sh in a small source tree, in which setup.sh is an empty file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.temporary = folder / "tmp"
        for name in ("launch", "tests/gradients", "tests/launch", "bin", "tmp"):
            (folder / name).mkdir(parents=True)
        shutil.copy(ROOT / "launch" / "test.sh", folder / "launch")
        (folder / "launch" / "setup.sh").touch()
        for name in ("python", "ruff", "mypy", "coverage", "docker"):
            (folder / "bin" / name).write_text(PROGRAM.format(folder=folder))
            (folder / "bin" / name).chmod(0o755)
        (folder / "bin" / "activate").write_text(f'PATH="{folder / "bin"}:$PATH"\n')

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = ["bash", str(self.folder / "launch" / "test.sh"), *arguments]
        env = {**os.environ, "DUALTRAIN_VENV": str(self.folder), "TMPDIR": str(self.temporary)}
        # A background job of a shell ignores SIGINT, and so do its child processes. If this test runs in such a job, the
        # script must still react to SIGINT.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return self.popen(command, env, subprocess.STDOUT)
        finally:
            signal.signal(signal.SIGINT, before)

    def run(self, *arguments: str) -> tuple[int, list[str]]:
        """Run the script; return its exit status and the lines that it printed. Assert that no temporary files remain."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=SECONDS)
        assert list(self.temporary.iterdir()) == []
        return process.returncode, output.splitlines()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    script = Script(tmp_path)
    yield script
    script.end()


def first_words(lines: list[str]) -> list[str]:
    """Return the first word of each line, such as "not" of "not run: …". Leave out the lines about skipped tests."""
    return [line.split()[0] for line in lines if not line.startswith("skipped: tests of ")]


@pytest.mark.parametrize(
    ("arguments", "tests", "last"),
    [
        ([], ["pytest", "pytest"], ["not", "not"]),
        (["--all"], ["coverage", "pytest", "pytest", "coverage", "coverage"], ["not"]),
    ],
    ids=["default", "all"],
)
def test_mypy_runs_during_the_tests_and_its_output_follows_their_output(arguments, tests, last, script):
    script.set(mypy=CONCURRENT.format(name="mypy", other="pytest"), pytest=CONCURRENT.format(name="pytest", other="mypy"))
    status, lines = script.run(*arguments)
    assert status == 0, lines
    assert first_words(lines) == ["python", "ruff", "ruff", *tests, "mypy", "mypy", *last]


def test_the_default_command_runs_no_test_of_tests_launch_but_the_smoke_test(script):
    (script.folder / "tests" / "test_files.py").touch()
    (command,) = (line for line in script.run()[1] if line.startswith("pytest "))
    assert command.split()[-3:] == ["tests/gradients", "tests/test_files.py", "tests/launch/test_smoke.py"]


@pytest.mark.parametrize("arguments", [[], ["--all"]], ids=["default", "all"])
@pytest.mark.parametrize(
    ("failed", "status"),
    [
        ({"mypy": "echo 'x.py:1: error: no'; exit 3"}, 3),
        ({"pytest": "exit 4"}, 4),
        ({"mypy": "exit 3", "pytest": "exit 4"}, 4),
    ],
    ids=["types", "tests", "both"],
)
def test_a_failure_sets_the_exit_status_and_mypy_failures_are_reported_after_the_tests(failed, status, arguments, script):
    script.set(**failed)
    ended, lines = script.run(*arguments)
    assert ended == status
    said = first_words(lines)
    assert ("test.sh:" in said) == ("mypy" in failed)
    if "mypy" in failed:
        assert "test.sh: error: mypy failed with exit status 3; its output is above" in lines
        assert said.index("pytest") < said.index("mypy") < said.index("test.sh:") < said.index("not")


def test_mypys_output_is_printed_even_if_there_is_no_coverage_to_report(script):
    script.set(mypy="echo 'x.py:1: error: no'; exit 3", coverage='[ "$1" != combine ] || exit 7')
    status, lines = script.run("--all")
    assert (status, first_words(lines).count("x.py:1:"), first_words(lines)[-1]) == (1, 1, "not")


def test_a_failure_of_ruff_ends_the_script_before_the_tests(script):
    script.set(ruff='[ "$1" = format ] || exit 5')
    status, lines = script.run()
    assert (status, first_words(lines)) == (5, ["python", "ruff", "ruff"])


def test_tests_run_even_if_the_package_cannot_be_compiled(script):
    script.set(python="exit 1")  # as if no file can be written into the folder of the package
    status, lines = script.run("tests/gradients")
    assert (status, first_words(lines)) == (0, ["python", "pytest"])


def test_selected_tests_run_without_the_checks(script):
    script.set(pytest="exit 6")
    assert script.run("tests/gradients", "-k", "sparse")[0] == 6
    script.set(pytest="")
    status, lines = script.run("tests/gradients", "-k", "sparse")
    assert (status, first_words(lines)) == (0, ["python", "pytest"])
    assert lines[-1].endswith(" tests/gradients -k sparse")


@pytest.mark.parametrize("arguments", [[], ["--all"]], ids=["default", "all"])
def test_ctrl_c_ends_the_tests_and_the_checks(arguments, script):
    script.set(
        mypy='echo $$ >"$here/pid"; exec sleep 600',
        pytest="""trap 'echo "2 passed"; exit 2' INT; touch "$here/began"; while :; do sleep 0.02; done""",
    )
    process = script.start(*arguments)
    until((script.folder / "began").exists)
    until(lambda: (script.folder / "pid").exists() and (script.folder / "pid").read_text() != "")
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert output.splitlines()[-1] == "2 passed"
    state = Path("/proc") / (script.folder / "pid").read_text().strip() / "stat"
    until(lambda: not state.exists() or ") Z " in state.read_text())
    assert list(script.temporary.iterdir()) == []
