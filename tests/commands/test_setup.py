"""launch/setup.sh: what it installs for each value of DUALTRAIN_WITH, and the repair of an interrupted set-up.

A fake interpreter makes the environment, so a set-up takes a second and needs no network. The fake records pip's arguments,
and a test may write shell code that runs in place of pip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands.setups import SECONDS, until
from tests.pool import ROOT


def test_the_set_up_for_integrations_includes_dev_which_includes_tree(setup):
    status, output, errors = setup.run(DUALTRAIN_WITH="tree")
    assert status == 0, errors
    assert "during the next steps" in output
    assert output.splitlines()[-1] == f"setup: ready: source {setup.venv}/bin/activate"
    calls = setup.calls()
    assert sum(call.startswith("wheel ") for call in calls) == 1
    assert not [call for call in calls if "[dev]" in call]
    assert [call for call in calls if call.endswith(f"--editable {ROOT}")]
    assert not list(setup.venv.glob("build.*"))
    # The next call adds the tools for tests, and takes the wheel of Horovod from the cache.
    (setup.venv / "installed").touch()
    status, output, _ = setup.run()
    assert (status, "was built before" in output) == (0, True)
    assert [call for call in setup.calls() if call.endswith(f"--editable {ROOT}[dev]")]
    assert (setup.venv / "installed").exists()
    status, output, _ = setup.run(DUALTRAIN_WITH="integrations")
    assert [call for call in setup.calls() if call.endswith(f"--editable {ROOT}[dev,functions,ray,spark]")]
    for purpose in ("integrations", "dev", "tree"):
        status, output, _ = setup.run(DUALTRAIN_WITH=purpose)
        assert (status, output.endswith("to set up again)\n"), setup.calls()) == (0, True, [])


def test_a_changed_tree_is_copied_again(setup, tmp_path):
    setup.root = tmp_path / "tree"
    shutil.copytree(ROOT / "launch", setup.root / "launch")
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, setup.root)
    module = setup.root / "dualtrain" / "a module.py"
    module.parent.mkdir()
    installed = []
    for text in ("one", "one", "two", None, "three"):
        if text is None:
            module.parent.rename(tmp_path / "elsewhere")  # as in a Docker image that has no source tree
        else:
            module.parent.mkdir(exist_ok=True)
            module.write_text(text)
        assert setup.run(DUALTRAIN_WITH="run")[0] == 0
        installed.append(any(call.endswith(f"{setup.root}[summary,tensorboard]") for call in setup.calls()))
    assert installed == [True, False, True, False, True]


def test_files_of_a_killed_set_up_are_removed_after_its_commands_have_ended(setup, tmp_path):
    # The set-up is killed while pip installs torch; pip continues for a moment.
    setup.set(pip='case "$*" in *torch*) touch "$here/began"; while [ ! -e "$here/go" ]; do sleep 0.02; done ;; esac')
    first = setup.start()
    until((tmp_path / "began").exists)
    first.kill()
    first.wait(SECONDS)
    (setup.venv / "half").touch()
    second = setup.start()
    assert second.stdout
    line = second.stdout.readline()
    assert f"another set-up of {setup.venv} is running (process {first.pid}); waiting for it to end" in line
    (tmp_path / "pip").unlink()
    (tmp_path / "go").touch()
    output, errors = second.communicate(timeout=SECONDS)
    assert second.returncode == 0, errors
    assert "an earlier set-up was interrupted: removing its files" in output
    assert not (setup.venv / "half").exists()


def test_a_second_call_waits_and_uses_the_environment_of_the_first(setup, tmp_path):
    setup.set(pip='touch "$here/began"; while [ ! -e "$here/go" ]; do sleep 0.02; done')
    first = setup.start()
    until((tmp_path / "began").exists)
    second = setup.start()
    assert second.stdout
    assert f"(process {first.pid}); waiting" in second.stdout.readline()
    (tmp_path / "go").touch()
    assert (first.wait(SECONDS), second.wait(SECONDS)) == (0, 0)
    assert second.stdout.read() == f"setup: {setup.venv} is ready (delete {setup.venv}/setup.done to set up again)\n"
    first.communicate()
    second.communicate()
    assert sum(call.startswith("wheel ") for call in setup.calls()) == 1


def test_a_failed_build_is_reported_with_its_last_lines_and_the_next_call_builds_again(setup):
    setup.set(pip='if [ "$1" = wheel ]; then echo "x.cc:1: error: no"; exit 1; fi')
    status, _, errors = setup.run()
    assert status == 1
    assert 'setup: error: "Horovod\'s build" failed. Last lines of' in errors
    assert "    x.cc:1: error: no" in errors
    assert "setup: cure: look for the first 'error:'" in errors
    setup.set(pip="")
    assert setup.run()[0] == 0


def test_relative_paths_start_at_the_current_folder_of_the_caller(setup, tmp_path, monkeypatch):
    # pip builds Horovod in a temporary folder, in which relative paths of the compiler and of CMake do not exist.
    monkeypatch.chdir(tmp_path)
    setup.set(
        pip='case "$1" in wheel) for each in "$CXX" "$HOROVOD_CMAKE"; do [ "${each:0:1}" = / ] || exit 1; done ;; esac'
    )
    status, output, errors = setup.run(DUALTRAIN_VENV="venv", DUALTRAIN_CACHE="cache", DUALTRAIN_WITH="none")
    assert status == 0, errors
    assert output.splitlines()[-1] == f"setup: ready: source {setup.venv}/bin/activate"


@pytest.mark.parametrize("space", ["with an argument", "in its path"])
def test_the_compiler_may_have_arguments_or_a_path_with_a_space(setup, tmp_path, space):
    program = tmp_path / "my compiler"
    program.write_text('#!/bin/sh\necho "first $@"\n')
    program.chmod(0o755)
    setup.env["CXX"] = str(program) if space == "in its path" else "echo first"
    setup.set(pip='case "$1" in wheel) "$CXX" -g -std=c++14 "x y.cc" >"$here/compiled" ;; esac')
    status, _, errors = setup.run(DUALTRAIN_WITH="none")
    assert status == 0, errors
    first, *_, standard, file = (tmp_path / "compiled").read_text().split(maxsplit=3)
    assert (first, standard, file) == ("first", "-std=gnu++20", "x y.cc\n")


def test_a_symbolic_link_to_the_environments_folder_is_resolved(setup, tmp_path):
    link, folder = tmp_path / "link", tmp_path / "large disk"
    link.symlink_to(folder)
    status, output, errors = setup.run(DUALTRAIN_VENV=str(link), DUALTRAIN_WITH="none")
    assert status == 0, errors
    assert output.splitlines()[-1] == f"setup: ready: source {folder}/bin/activate"
    assert (folder / "setup.done").exists()


def test_a_wheel_that_a_different_build_script_made_is_not_used(setup, tmp_path):
    setup.root = tmp_path / "tree"
    shutil.copytree(ROOT / "launch", setup.root / "launch")
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, setup.root)
    outputs = []
    for line in ("", "", "# another build"):
        with (setup.root / "launch" / "build_horovod.sh").open("a") as file:
            file.write(line)
        (setup.venv / "setup.done").unlink(missing_ok=True)
        status, output, errors = setup.run(DUALTRAIN_WITH="none")
        assert status == 0, errors
        outputs.append(output)
    assert ["was built before" in output for output in outputs] == [False, True, False]
    assert len(list((setup.cache / "wheels").iterdir())) == 2


def test_a_failed_step_stops_the_background_build_of_horovod(setup, tmp_path):
    build = 'echo $$ >"$here/pid"; exec sleep 600'
    setup.set(
        pip=f'case "$*" in wheel*) {build} ;; *torchvision*) until [ -s "$here/pid" ]; do sleep 0.02; done; exit 1 ;; esac'
    )
    status, _, errors = setup.run()
    assert (status, '"torchvision' in errors) == (1, True)
    state = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    until(lambda: not state.exists() or ") Z " in state.read_text())


# In the first case, the installation of torch fails. In the second, it succeeds in spite of the full disk, and Horovod's
# build fails.
@pytest.mark.parametrize(("rest", "step"), [("|| exit 1", "torch "), ("", "Horovod's build")])
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a small file system")
def test_a_full_disk_is_reported_in_one_line_and_the_next_call_repairs_the_environment(rest, step, setup):
    setup.venv.mkdir()

    def on_a_disk_of(size: str) -> list[str]:
        script = f'mount -t tmpfs -o size={size} none {setup.venv} && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, "sh"]

    if subprocess.run([*on_a_disk_of("1m"), "true"], capture_output=True, timeout=SECONDS).returncode != 0:
        pytest.skip("needs a mount namespace, which root cannot make here")
    # Append: truncating the file would free space, with which the build in the background might succeed.
    setup.set(pip=f'case "$*" in *torch*) head -c 200000 /dev/zero >>{setup.venv}/half {rest} ;; esac')
    # Call setup.sh twice in one mount namespace, because the disk exists only there. Enlarge the disk between the calls.
    script = f'"$@"; mount -o remount,size=9m {setup.venv}; exec "$@"'
    status, output, errors = setup.run(*on_a_disk_of("64k"), "sh", "-c", script, "sh")
    assert status == 0, errors
    assert len(errors.splitlines()) == 1
    assert errors.startswith(f'setup: error: "{step}')
    assert f"failed: no space left on device (free: 0 MB on {setup.venv}" in errors
    assert "make room" in errors
    assert "an earlier set-up was interrupted: removing its files" in output
    assert output.splitlines()[-1].startswith("setup: ready")


@pytest.mark.parametrize(
    ("env", "part"),
    [
        ({"PYTHON": "no-such-python"}, "no interpreter 'no-such-python' found"),
        ({"DUALTRAIN_VENV": "/dev/null/venv"}, "cannot write /dev/null/venv (Not a directory)"),
        ({"DUALTRAIN_VENV": str(ROOT / "tests")}, "holds files that launch/setup.sh has not made"),
        ({"DUALTRAIN_VENV": str(ROOT)}, "holds files that launch/setup.sh has not made"),
        ({"DUALTRAIN_WITH": "all"}, "set it to dev, integrations, tree, run or none"),
    ],
)
def test_setup_refuses_bad_variables_in_one_line(setup, env, part):
    status, _, errors = setup.run(**env)
    assert (status, len(errors.splitlines())) == (2, 1), errors
    assert part in errors
