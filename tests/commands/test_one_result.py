"""``compare --one-result``, and what ``launch/one_result.sh`` and ``launch/ways.sh`` refuse and start.

tests/launch/test_launch.py runs one_result.sh with real jobs.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from dualtrain import main as train
from dualtrain import predict
from dualtrain.compare import main, one_result
from dualtrain.doctor.__main__ import main as doctor
from dualtrain.report import __main__ as report
from tests.pool import ROOT

SUMMARY = {
    "backend": "torch",
    "transport": "shm",
    "launcher": "torchrun",
    "world_size": 2,
    "steps": 46,
    "val_accuracy": 0.75,
    "val_loss": 1.0455258414563207,
    "train_loss": 2.0,
    "samples_per_second": 1.0,
    "seconds": 1.0,
    "weights_sha256": "ab" * 32,
}
TORCHRUN = "torchrun --standalone --local-addr=localhost --nproc_per_node"
MISSING = "it was not started, or failed before it made the folder"


def write(folder: Path, **changes: object) -> str:
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(SUMMARY | changes))
    return str(folder)


def test_equal_runs_have_one_hash(tmp_path, capsys):
    folders = [write(tmp_path / "a"), write(tmp_path / "b", world_size=4, backend="horovod", seconds=2.0)]
    assert main(["--one-result", *folders]) == 0
    head, _, first, second, _, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "ranks", "backend", "launcher", "val", "loss", "accuracy", "weights"]
    assert first.split()[:4] == ["a", "2", "torch", "(shm)"]
    assert second.split() == ["b", "4", "horovod", "(shm)", "torchrun", "1.0455", "0.7500", "ab" * 8]
    assert last == "2 runs, 1 hash"


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({"weights_sha256": "cd" * 32}, "2 runs, 2 hashes: b differs from a in weights_sha256"),
        ({"val_loss": 1.0455258414563205}, "2 runs, 1 hash: b differs from a in val_loss"),
        ({"train_loss": 2.5, "steps": 45}, "2 runs, 1 hash: b differs from a in steps, train_loss"),
        ({"val_top5": 1.0}, "2 runs, 1 hash: b differs from a in val_top5"),
    ],
)
def test_a_run_that_differs_is_named(changes, last, tmp_path, capsys):
    assert main([write(tmp_path / "a"), write(tmp_path / "b", **changes), "--one-result"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_a_run_that_has_not_ended_is_named(tmp_path, capsys):
    (tmp_path / "b").mkdir()
    missing = str(tmp_path / "c")
    assert main(["--one-result", write(tmp_path / "a"), str(tmp_path / "b"), missing]) == 1
    found = capsys.readouterr().out.splitlines()[-1]
    assert found == f"3 runs, 1 hash: b has not ended; c has no folder {missing!r}: {MISSING}"
    shown, same = one_result([], ["a has not ended", "b has not ended"])
    assert (shown.splitlines()[-1], same) == ("2 runs, 0 hashes: a has not ended; b has not ended", False)


@pytest.mark.parametrize("flags", [[], ["--one-result"]])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "holds no finished run (no readable summary.json)"),
        ("[1]", "has a summary.json without a usable backend"),
        (json.dumps({**SUMMARY, "weights_sha256": None}), "has a summary.json without a usable weights_sha256"),
    ],
)
def test_a_summary_that_cannot_be_used_is_an_error(flags, content, reason, tmp_path, capsys):
    damaged = write(tmp_path / "b")
    (tmp_path / "b" / "summary.json").write_text(content)
    assert main([*flags, write(tmp_path / "a"), damaged]) == 2
    assert f"{damaged!r} {reason}: name the folder of a finished run" in capsys.readouterr().err


def test_a_relative_path_in_a_removed_folder_is_an_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for command in (main, report.main):
        assert command(["x", "y"]) == 2
        assert capsys.readouterr().err.startswith("dualtrain: error: 'x' holds no ")
    for command_with_torch, arguments in ((train.main, []), (predict.main, ["x", "y"]), (doctor, [])):
        assert command_with_torch(arguments) == 2
        assert capsys.readouterr().err.startswith("dualtrain: error: the current folder has been removed: change to")


def test_runs_with_equal_names_are_shown_with_their_parent_folders(tmp_path, capsys):
    for parent in "ab":
        (tmp_path / parent).mkdir()
    folders = [write(tmp_path / "a" / "run", weights_sha256="cd" * 32), write(tmp_path / "b" / "run")]
    assert main(folders) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("ended with 2 models: a/run; b/run")
    assert main(["--one-result", *folders]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("b/run differs from a/run in weights_sha256")


def test_a_run_is_not_compared_with_itself(tmp_path, capsys):
    folder = write(tmp_path / "run")
    (tmp_path / "link").symlink_to(folder)
    folders = [folder, f"{folder}/", f"{tmp_path}/link"]
    assert main(["--one-result", *folders]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 run, 1 hash: there is no second run to compare"
    assert main(folders) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("same weights: not known")


# -- the script ---------------------------------------------------------------------------------------------------

#: Fake of python, torchrun, horovodrun and mpirun. It logs its command line, and writes the summary and empty
#: checkpoints of a run. For dualtrain.compare it calls the real Python, and for dualtrain.report it does nothing. If
#: the folder bin has a file status-RUN, the run RUN fails with the exit status in this file. If bin has a file no-MODULE,
#: MODULE counts as missing.
PROGRAM = """#!/bin/bash
case "$*" in
  "-m dualtrain.compare"*) exec {python} "$@" ;;
  "-m dualtrain.report"*) exit ;;
  "-c "*) [ -e "{bin}/no-$3" ]; exit ;;
esac
echo "${{0##*/}} $*" >>{log}
while [ $# -gt 1 ]; do if [ "$1" = --run-dir ]; then run=$2; fi; shift; done
if [ -e "{bin}/status-${{run##*/}}" ]; then echo "no luck"; exit "$(cat "{bin}/status-${{run##*/}}")"; fi
mkdir -p "$run/checkpoints"
touch "$run/checkpoints/step-0000000"{{3,6,9}}.safetensors
echo 'done: val accuracy 0.7500, 1 samples/s, weights abab'
cp {summary} "$run"
"""


class Script:
    """Environment for a script of launch/ (default: one_result.sh), with fakes of setup.sh, python and the launchers."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder, self.bin, self.log = folder, folder / "bin", folder / "log"
        self.bin.mkdir()
        self.log.touch()
        (folder / "launch").mkdir()
        for name in ("one_result.sh", "ways.sh"):
            shutil.copy(ROOT / "launch" / name, folder / "launch")
        (folder / "launch" / "setup.sh").write_text('echo "with $DUALTRAIN_WITH"\n')
        self.tools = folder / "tools"  # the machine's programs, without its mpirun
        self.tools.mkdir()
        for name in ("bash", "cat", "cp", "date", "dirname", "grep", "id", "mkdir", "sed", "tail", "touch"):
            (self.tools / name).symlink_to(shutil.which(name) or name)
        (self.bin / "activate").write_text(f'PATH="{self.bin}:{self.tools}"\n')
        (folder / "summary.json").write_text(json.dumps(SUMMARY))
        program = PROGRAM.format(python=python, bin=self.bin, log=self.log, summary=folder / "summary.json")
        for name in ("python", "torchrun", "horovodrun", "mpirun"):
            (self.bin / name).write_text(program)
            (self.bin / name).chmod(stat.S_IRWXU)

    def run(self, *flags: str, name: str = "one_result", **variables: str) -> subprocess.CompletedProcess[str]:
        defaults = {"DUALTRAIN_VENV": str(self.folder), "RUNS": str(self.folder / "runs"), "PYTHONPATH": str(ROOT)}
        command = ["bash", str(self.folder / "launch" / f"{name}.sh"), *flags]
        return subprocess.run(
            command, env={**os.environ, **defaults, **variables}, capture_output=True, text=True, timeout=60
        )

    def started(self) -> list[str]:
        return [line.replace(str(self.folder / "runs"), "RUNS") for line in self.log.read_text().splitlines()]


@pytest.fixture
def script(tmp_path):
    return Script(tmp_path, os.path.realpath(shutil.which("python") or "python3"))


def test_help_prints_the_comment_at_the_top_of_the_script(script):
    end = script.run("--help")
    assert (end.returncode, end.stderr, script.started()) == (0, "", [])
    assert [line.split()[0] for line in end.stdout.splitlines() if line.split(" ")[0].isupper()] == [
        "V", "RANKS", "WAYS", "RUNS",
    ]  # fmt: skip
    assert "set -e" not in end.stdout


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        ((), {"V": "0"}, "V is '0', but must be a number of virtual ranks, such as V=4"),
        ((), {"RANKS": "1 two"}, "RANKS has 'two', but must be numbers of ranks"),
        ((), {"WAYS": "chain slurm"}, "WAYS has 'slurm', but each entry must be one of nproc-shm"),
        (("--virtual-ranks=8",), {}, "--virtual-ranks is set by the script: use V"),
        (("--epochs", "1", "--run-dir", "x"), {}, "--run-dir is set by the script: use RUNS"),
        (("--backend", "torch"), {}, "--backend is set by the script: use WAYS and RANKS"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_started(flags, variables, message, script):
    end = script.run(*flags, **variables)
    assert (end.returncode, end.stdout, script.started()) == (2, "", [])
    assert end.stderr.startswith(f"one_result.sh: error: {message}")
    assert end.stderr.count("\n") == 1


def test_every_way_is_started_and_the_chain_resumes_from_checkpoints(script):
    end = script.run("--lr", "1", V="8", RANKS="5")
    assert end.returncode == 0, end.stdout + end.stderr
    job = "-m dualtrain.main --virtual-ranks 8 --lr 1"
    folders = "--run-dir RUNS"
    options = f"--oversubscribe --bind-to none{' --allow-run-as-root' * (os.getuid() == 0)}"
    chained = "--checkpoint-every 3 --keep 100"
    names = ["one-process", *(f"chain-{way}" for way in ("1-torchrun-shm-4", "2-alone-1"))]
    assert script.started() == [
        f"python {job} --backend local {folders}/{names[0]}",
        f"python {job} --nproc 5 --backend torch --transport shm {folders}/nproc-shm-5",
        f"python {job} --nproc 5 --backend torch --transport native {folders}/nproc-native-5",
        f"{TORCHRUN}=5 {job} --backend torch --transport shm {folders}/torchrun-shm-5",
        f"{TORCHRUN}=5 {job} --backend torch --transport native {folders}/torchrun-native-5",
        f"horovodrun --gloo -np 5 python {job} --backend horovod {folders}/horovodrun-gloo-5",
        f"horovodrun --mpi -np 5 python {job} --backend horovod {folders}/horovodrun-mpi-5",
        f"mpirun {options} -np 5 python {job} --backend torch {folders}/mpirun-torch-5",
        f"mpirun {options} -np 5 python {job} --backend horovod {folders}/mpirun-horovod-5",
        f"{TORCHRUN}=4 {job} --backend torch --transport shm {chained} {folders}/{names[1]}",
        f"python {job} --backend local {chained} --resume RUNS/{names[1]}/checkpoints/step-00000003.safetensors "
        f"{folders}/{names[2]}",
        f"horovodrun --gloo -np 3 python {job} --backend horovod {chained} "
        f"--resume RUNS/{names[2]}/checkpoints/step-00000006.safetensors {folders}/chain-3-horovodrun-gloo-3",
        f"mpirun {options} -np 2 python {job} --backend torch {chained} "
        f"--resume RUNS/chain-3-horovodrun-gloo-3/checkpoints/step-00000009.safetensors {folders}/chain-4-mpirun-torch-2",
    ]
    assert end.stdout.splitlines()[0] == "with tree"
    assert end.stdout.splitlines()[-1] == "13 runs, 1 hash"


def test_by_default_each_number_of_ranks_runs_on_each_backend(script):
    end = script.run()
    assert end.stdout.splitlines()[-1] == "15 runs, 1 hash"
    assert all("--virtual-ranks 4 --epochs 2" in line for line in script.started())
    for backend in ("torch", "horovod"):
        names = [line.rpartition("/")[2] for line in script.started() if f"--backend {backend}" in line]
        assert {name[-1] for name in names} == {"2", "3", "4"}


def test_a_run_that_fails_is_named_and_the_other_runs_are_started(script):
    (script.bin / "status-torchrun-shm-2").write_text("1")
    end = script.run(WAYS="torchrun-shm nproc-shm", RANKS="2")
    assert end.returncode == 1
    assert "failed with exit status 1; the end of" in end.stdout
    assert "no luck" in end.stdout
    missing = str(script.folder / "runs" / "torchrun-shm-2")
    last = f"3 runs, 1 hash: torchrun-shm-2 has no folder {missing!r}: {MISSING}"
    assert end.stdout.splitlines()[-1] == last


def test_the_variables_ranks_and_ways_may_have_several_lines(script):
    end = script.run(RANKS="2\n3", WAYS="nproc-shm\nnproc-native")
    assert end.stdout.splitlines()[-1] == "5 runs, 1 hash"


def test_wrong_flags_of_the_job_end_the_script_at_once(script):
    (script.bin / "status-one-process").write_text("2")
    end = script.run("--lr", "fast")
    assert (end.returncode, len(script.started())) == (2, 1)
    assert "no luck" in end.stdout


def test_ways_that_cannot_run_here_are_left_out_with_the_reason(script):
    (script.bin / "mpirun").unlink()
    (script.bin / "no-horovod").touch()
    end = script.run()
    assert end.returncode == 0
    assert [line for line in end.stdout.splitlines() if line.startswith("left out")] == [
        "left out: horovodrun-gloo: horovod is not installed; bash launch/setup.sh installs it",
        "left out: horovodrun-mpi: horovod is not installed; bash launch/setup.sh installs it",
        "left out: mpirun-torch: there is no mpirun here; bash launch/setup.sh installs it",
        "left out: mpirun-horovod: there is no mpirun here; bash launch/setup.sh installs it",
    ]
    assert end.stdout.splitlines()[-1] == "11 runs, 1 hash"
    names = [line.rpartition("/")[2] for line in script.started()]
    assert names[-4:] == [
        "chain-1-torchrun-shm-4",
        "chain-2-alone-1",
        "chain-3-nproc-native-3",
        "chain-4-torchrun-native-2",
    ]


def test_a_short_job_ends_the_chain_early(script):
    (script.bin / "python").write_text((script.bin / "python").read_text().replace("{3,6,9}", "3"))
    end = script.run(WAYS="chain")
    assert end.returncode == 0
    assert "left out: the rest of the chain: the job has fewer than 6 steps" in end.stdout
    assert end.stdout.splitlines()[-1] == "3 runs, 1 hash"


def test_the_comparison_of_ways_refuses_a_wrong_number_of_ranks(script):
    end = script.run(name="ways", NPROC="two")
    assert (end.returncode, end.stdout, script.started()) == (2, "", [])
    assert end.stderr.startswith("ways.sh: error: NPROC=two is not a number of ranks: set it")


@pytest.mark.parametrize(("way", "status", "starts"), [("one-process", 2, 1), ("torchrun", 130, 4)])
def test_the_comparison_of_ways_ends_after_ctrl_c_or_if_the_first_way_refuses_the_flags(way, status, starts, script):
    (script.bin / f"status-{way}").write_text(str(status))
    end = script.run("--lr", "1", name="ways")
    assert len([line for line in script.started() if "dualtrain.main" in line]) == starts
    assert end.returncode == status
    assert "failed, see above" not in end.stdout


def test_the_comparison_of_ways_continues_after_a_failure_of_a_later_way(script):
    (script.bin / "status-torchrun").write_text("2")
    end = script.run("--lr", "1", name="ways")
    assert len([line for line in script.started() if "dualtrain.main" in line]) == 7
    assert end.returncode == 0
    assert "(torchrun: failed, see above)" in end.stdout
