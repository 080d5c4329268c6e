"""tests/versions.sh: refused versions, environments that are made once, and the table of results.

A fake interpreter makes the environments, so a run takes a second and needs no network. The fake records pip's arguments.
A test writes shell code into files named pip, pytest and torchrun; this code runs in place of these programs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.setups import SECONDS, Runs, once, until
from tests.forked import ROOT, has_ended

INDEX = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.6.0, 2.5.1"

# Fake interpreter: `-m venv` copies it to bin/python and bin/torchrun. For pip, pytest and torchrun, it runs the test's
# file of that name. The query of package versions prints fixed values. All other calls go to Python. If such a call's first
# argument begins with "-", and it has succeeded, later calls with the same arguments only print its saved output.
PYTHON = """#!/bin/bash
here={folder}
{once}
case "${{0##*/}} $1 $2" in
  torchrun*) shift; . "$here/torchrun" ;;
  *" -m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/torchrun" ;;
  *" -m pip") shift 2; echo "$*" >>"$here/calls"; . "$here/pip" ;;
  *" -m pytest") shift 2; . "$here/pytest" ;;
  *metadata*) printf '%s\\n' Python=3.11.7 torch=2.6.0+cpu torchvision=0.21.0 ;;
  "python -"*) once "$@" ;;
  *) exec {real} -S "$@" ;;
esac
"""
PIP = 'case "$*" in "index versions torch") echo "{index}" ;; *) {install} ;; esac'
CASES = {
    "passed": '<testcase classname="tests.a" name="one"/>',
    "failed": '<testcase classname="tests.a" name="two"><failure message="no"/></testcase>',
    "skipped": '<testcase classname="tests.a" name="three"><skipped message="needs Horovod"/></testcase>',
}
RESULTS = (
    'while [ "$1" != --junitxml ]; do shift; done; echo \'<testsuites><testsuite>{cases}</testsuite></testsuites>\' >"$2"'
)
JOB = 'while [ "$1" != --run-dir ]; do shift; done; mkdir -p "$2"; echo \'{summary}\' >"$2/summary.json"'


class Versions(Runs):
    """Runs of ``tests/versions.sh`` in the tree ``root``, with fakes and environments in ``folder``."""

    def __init__(self, folder: Path, root: Path, outputs: Path) -> None:
        super().__init__(folder)
        self.into, self.temporary, self.root = folder / "the user's folder", folder / "tmp", root
        self.temporary.mkdir()
        python = folder / "python"
        python.write_text(PYTHON.format(folder=folder, real=sys.executable, once=once(outputs)))
        python.chmod(0o755)
        self.env = {**os.environ, "PYTHON": str(python), "TMPDIR": str(self.temporary)}
        self.set(pip=PIP.format(index=INDEX, install="true"))
        self.set(pytest=RESULTS.format(cases=CASES["passed"] + CASES["skipped"]))
        self.set(torchrun=JOB.format(summary=json.dumps({"val_accuracy": 0.98888, "weights_sha256": "70e9172c" * 8})))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = ["bash", str(self.root / "tests" / "versions.sh"), "--into", str(self.into), *arguments]
        return self.popen(command, self.env)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run the script; return its exit status, output and errors. Assert that no temporary files remain."""
        process = self.start(*arguments)
        output, errors = process.communicate(timeout=SECONDS)
        assert list(self.temporary.iterdir()) == []
        return process.returncode, output, errors


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tree of only the files that the script itself reads, because each run copies the whole tree."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("setup.cfg", "launch/versions.txt", "tests/versions.py", "tests/versions.sh"):
        (tree / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    return tree


@pytest.fixture
def versions(tmp_path: Path, tree: Path, outputs: Path) -> Iterator[Versions]:
    versions = Versions(tmp_path, tree, outputs)
    yield versions
    versions.end()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no version of torch was given"),
        (["new"], "'new' is not a version of torch"),
        (["2.4.1"], "torch 2.4.1 is older than 2.5, the oldest that setup.cfg allows"),
        (["--all"], "there is no option --all"),
        (["2.15.0", "2.99.0"], "the package index has no torch 2.99.0 for Python 3"),
    ],
)
def test_wrong_versions_and_options_are_refused_in_one_line_before_an_installation(versions, arguments, message):
    status, output, errors = versions.run(*arguments)
    assert (status, output) == (2, "")
    assert errors.startswith(f"versions.sh: error: {message}")
    assert errors.count("\n") == 1
    assert not [call for call in versions.calls() if call.startswith("install")]


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (
            'echo "ERROR: Could not connect to the proxy"; exit 1',
            "the package index does not answer (ERROR: Could not connect",
        ),
        (
            'echo "WARNING: Retrying (Retry(total=0)) after connection broken by ProxyError"; '
            + PIP.format(index=INDEX.replace("2.6.0, ", ""), install="true"),
            "the package index does not answer (WARNING: Retrying",
        ),
        (
            PIP.format(index=INDEX, install='echo "[Errno 28] No space left on device"; exit 1'),
            "no space left on device for",
        ),
        (
            PIP.format(index=INDEX, install='echo "ERROR: no such wheel"; exit 1'),
            "torch 2.6.0 could not be installed (ERROR: no",
        ),
    ],
    ids=["no network", "no network, wheels in a folder", "no space", "no wheel"],
)
def test_a_failed_installation_is_reported_in_one_line_and_leaves_no_partial_environment(versions, pip, message):
    versions.set(pip=pip)
    status, _, errors = versions.run("2.6.0")
    assert (status, errors.count("\n")) == (2, 1)
    assert errors.startswith(f"versions.sh: error: {message}")
    assert not list(versions.into.glob("torch-*"))
    versions.set(pip=PIP.format(index=INDEX, install="true"))
    assert versions.run("2.6.0")[0] == 0


def test_a_full_disk_is_named_even_if_no_tool_reports_it(versions):
    # If the disk is full, the child process of ensurepip reports only an exit status.
    versions.set(df="#!/bin/bash\necho Avail; echo 52; echo 90000", pip=PIP.format(index=INDEX, install="exit 1"))
    (versions.folder / "df").chmod(0o755)
    versions.env["PATH"] = f"{versions.folder}:{os.environ['PATH']}"
    status, _, errors = versions.run("2.6.0")
    assert (status, errors.count("\n")) == (2, 1)
    assert errors.startswith("versions.sh: error: no space left on device for torch 2.6.0 in ")


def test_a_failure_without_a_reason_gives_the_last_line_of_the_output(versions):
    versions.set(pip=PIP.format(index=INDEX, install='echo "killed by a signal"; exit 9'))
    status, _, errors = versions.run("2.6.0")
    assert (status, errors.count("\n")) == (2, 1)
    assert errors.startswith("versions.sh: error: torch 2.6.0 could not be installed (killed by a signal); ")


def test_environments_are_made_once_and_the_table_has_a_row_for_each(versions):
    status, output, errors = versions.run("2.6.0", "2.15.0")
    assert (status, errors) == (0, "")
    # The first call installs the CPU build of torch, and torchvision. The second installs the tools and pins torch.
    calls = [call for call in versions.calls() if "torch==2.6.0" in call]
    assert "torch==2.6.0+cpu" in calls[0]
    assert "torchvision>=" in calls[0]
    assert "pytest-xdist" in calls[1]
    assert "horovod" not in calls[1]
    table = output[output.index("torch      ") :].splitlines()
    assert table[2].split() == ["2.6.0+cpu", "0.21.0", "3.11.7", "1", "0", "1", "0.9889", "70e9172c70e9172c", "passed"]
    assert len(table) > 4
    assert "skipped under torch 2.6.0: 1, needs Horovod" in table
    assert table[-1].startswith("same weights: yes")
    assert {path.name.rpartition("-cpython")[0] for path in versions.into.iterdir()} == {"torch-2.6.0", "torch-2.15.0"}
    status, output, _ = versions.run("2.6.0", "2.6.0")
    assert (status, versions.calls(), output.count("done in")) == (0, [], 1)
    assert f"{versions.into}/torch-2.6.0" in output
    assert "is ready" in output


def test_an_interpreter_that_does_not_run_is_refused_in_one_line(versions):
    (versions.folder / "python").write_text("#!/bin/bash\necho 'not installed' >&2; exit 127")
    status, output, errors = versions.run("2.6.0")
    assert (status, output, errors.count("\n")) == (2, "", 1)
    assert "does not run; install Python 3.11 or newer" in errors


def test_the_tests_run_on_a_copy_of_the_tracked_files_and_folders_of_the_root(versions):
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files"], check=True, capture_output=True, text=True).stdout.split()
    versions.root = ROOT
    versions.set(pytest='ls -A >"$here/names"')
    versions.run("2.6.0")
    assert set((versions.folder / "names").read_text().split()) == {name.partition("/")[0] for name in tracked}


@pytest.mark.parametrize(
    ("script", "result"),
    [
        ({"pytest": RESULTS.format(cases=CASES["passed"] + CASES["failed"]) + "; exit 1"}, "tests failed"),
        ({"pytest": RESULTS.format(cases=CASES["skipped"])}, "no test passed"),
        ({"pytest": "exit 3"}, "tests did not end"),
        ({"torchrun": "exit 1"}, "job failed"),
    ],
    ids=["a failed test", "no tests", "a crash", "a failed job"],
)
def test_a_version_whose_tests_or_job_fail_is_named_and_the_status_is_1(versions, script, result):
    versions.set(**script)
    status, output, errors = versions.run("2.6.0")
    assert (status, errors) == (1, "")
    (row,) = [line for line in output.splitlines() if line.startswith("2.6.0+cpu")]
    assert row.endswith(result)
    assert ("the tests ended with exit status 3" in output) == (result == "tests did not end")
    assert ("failed under torch 2.6.0: tests.a::two" in output) == (result == "tests failed")


def test_sigterm_ends_the_current_step_and_removes_the_files(versions):
    versions.set(pytest='echo $$ >"$here/pid"; exec sleep 600')
    process = versions.start("2.6.0")
    pid = versions.folder / "pid"
    until(lambda: pid.exists() and pid.read_text().strip() != "")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 143
    assert list(versions.temporary.iterdir()) == []
    assert has_ended(int(pid.read_text()))


def test_a_second_run_in_the_same_folder_is_refused(versions):
    # The fake flock removes the lock file once. An earlier run can do this at its end, after this run has opened the file.
    ended, real = versions.folder / "ended", shutil.which("flock")
    flock = f'#!/bin/bash\n[ -e {ended} ] || {{ touch {ended}; rm "{versions.into}/lock"; }}\nexec {real} "$@"'
    versions.set(pytest='echo $$ >"$here/pid"; exec sleep 600', flock=flock)
    (versions.folder / "flock").chmod(0o755)
    versions.env["PATH"] = f"{versions.folder}:{os.environ['PATH']}"
    process = versions.start("2.6.0")
    until((versions.folder / "pid").exists)
    assert (versions.into / "lock").exists()
    second = versions.start("2.6.0")
    _, errors = second.communicate(timeout=SECONDS)
    assert (second.returncode, "another run of this script uses" in errors) == (2, True)
    process.terminate()
    process.communicate(timeout=SECONDS)
