"""The name of a job: restarts of the job resume without a flag, and other jobs need ``--resume`` to use its folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import dualtrain.training.loop as loop
from dualtrain.backends import connect, job_of
from dualtrain.config import parse
from dualtrain.errors import UserError
from dualtrain.files import read_json
from dualtrain.launchers import World, detect_world
from dualtrain.run_folder import checkpoint
from dualtrain.training import start
from tests import forked

FLAGS = ("--global-batch-size", "720", "--lr", "0.02", "--threads", "1", "--workers", "0", "--log-seconds", "0")


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_runs", type(start._runs)())


def train(job: str, epochs: int, *flags: str, in_new_process: bool = True) -> dict[str, Any]:
    """Train as a new process of ``job``, or, without ``in_new_process``, as the process of the last call."""
    if in_new_process:
        start._runs.clear()
    with connect("local", world=World(job=job)) as backend:
        return loop.train(parse([*FLAGS, "--epochs", str(epochs), *flags]), backend)


def interrupted(job: str, epochs: int, steps: int, *flags: str) -> None:
    """Train, and interrupt the run after ``steps`` steps of this start."""
    step, done = loop.Run._step, 0

    def count(run: loop.Run) -> list[float]:
        nonlocal done
        if done == steps:
            run.writer.wait()
            raise KeyboardInterrupt
        done += 1
        return step(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Run, "_step", count)
        with pytest.raises(KeyboardInterrupt):
            train(job, epochs, *flags)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def first_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[0]


def test_a_restart_of_the_same_job_resumes_without_a_flag(tmp_path, capsys):
    whole, folder = train("", 3, "--run-dir", str(tmp_path / "whole")), tmp_path / "run"
    flags = "--run-dir", str(folder)
    interrupted("one", 3, 0, *flags)  # the run has no checkpoint yet
    interrupted("one", 3, 3, *flags)
    capsys.readouterr()
    interrupted("one", 3, 3, *flags)
    path = folder / "checkpoints" / "step-00000002.safetensors"
    assert first_line(capsys) == f"restart of job one: resuming from step 2, since {path} is the newest good checkpoint"
    assert train("one", 3, *flags)["weights_sha256"] == whole["weights_sha256"]
    capsys.readouterr()
    train("one", 3, *flags)
    assert first_line(capsys) == f"restart of job one: the run in {folder} has ended after step 6: nothing is left to train"
    with pytest.raises(UserError, match="--seed 0, and this run has --seed 1: give --seed 0, or another --run-dir"):
        train("one", 3, *flags, "--seed", "1")


@pytest.mark.parametrize("job", ["", "two"])
def test_another_job_is_refused_and_changes_nothing(tmp_path, job):
    interrupted("one", 3, 3, "--run-dir", str(tmp_path))
    before = content(tmp_path)
    for _ in range(2):  # a restart of the refused job is refused too
        with pytest.raises(UserError, match="holds another run: choose a new folder, or resume that run"):
            train(job, 3, "--run-dir", str(tmp_path))
        assert content(tmp_path) == before


def test_a_resumed_run_belongs_to_the_job_that_resumed_it(tmp_path, capsys):
    flags = "--run-dir", str(tmp_path)
    interrupted("one", 3, 3, *flags)
    interrupted("two", 3, 2, *flags, "--resume", "auto")
    with pytest.raises(UserError, match="holds another run"):
        train("one", 3, *flags)
    capsys.readouterr()
    interrupted("two", 3, 1, *flags)
    assert first_line(capsys).startswith("restart of job two: resuming from step 4, since ")
    train("", 3, *flags, "--resume", "auto")


def test_a_run_without_a_generation_file_is_resumed_only_with_the_resume_flag(tmp_path):
    train("", 1, "--run-dir", str(tmp_path))
    (tmp_path / "generation-1").unlink()
    with pytest.raises(UserError, match="holds another run"):
        train("one", 2, "--run-dir", str(tmp_path))
    assert train("one", 2, "--run-dir", str(tmp_path), "--resume")["steps"] == 4


def test_without_run_dir_the_folder_has_the_jobs_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    interrupted("one", 2, 3)
    assert os.listdir("runs") == ["digits-convnet-one"]
    train("one", 2)
    assert "restart of job one: resuming from step 2" in capsys.readouterr().out
    train("two", 1)
    # The second run of a process gets the name one.2, so that it is not a restart of the first run.
    interrupted("one", 3, 1)
    train("one", 1, "--seed", "1", in_new_process=False)
    assert sorted(os.listdir("runs")) == [f"digits-convnet-{name}" for name in ("one", "one.2", "two")]


@pytest.mark.parametrize("same_folder", [True, False])
def test_a_restarted_job_prefers_checkpoints_of_its_run_to_the_file_that_resume_names(tmp_path, capsys, same_folder):
    earlier = tmp_path / "earlier"
    train("", 3, "--run-dir", str(earlier))
    file = checkpoint.path_of(earlier / "checkpoints", 2)
    folder = earlier if same_folder else tmp_path / "run"
    flags = "--run-dir", str(folder), "--resume", str(file)

    def interrupt(run: loop.Run, run_start: start.Start) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Run, "open", interrupt)  # before the folder is ready
        with pytest.raises(KeyboardInterrupt):
            train("one", 3, *flags)
    interrupted("one", 3, 0, *flags)
    capsys.readouterr()
    interrupted("one", 3, 2, *flags)  # resumes from the file again: the folder has no newer checkpoint
    said = capsys.readouterr().out
    assert ("restart of job one: resuming from step 2" in said) == same_folder
    interrupted("one", 3, 1, *flags)
    assert first_line(capsys).startswith("restart of job one: resuming from step 4, since ")
    if not same_folder:
        for path in checkpoint.found(folder / "checkpoints"):
            path.write_bytes(b"damaged")
        shutil.rmtree(earlier)
        (folder / "checkpoints" / checkpoint.BEST).unlink()
        with pytest.raises(UserError, match="a run that did not begin at step 0, but no good checkpoint to resume from"):
            train("one", 3, *flags)


def test_the_store_of_torchruns_agent_keeps_the_jobs_name(tmp_path):
    def name(variables: dict[str, str]) -> str:
        return job_of(detect_world(variables), 20.0)

    with forked.torchrun_variables(2) as ranks, forked.torchrun_variables(1) as [other]:
        names = [name(variables) for variables in (*ranks, *ranks)]
        assert len(set(names)) == 1
        assert names[0]
        assert name({**ranks[0], "TORCHELASTIC_RUN_ID": "other"}) != names[0]
        assert name(other) != names[0]
        assert name({**ranks[0], "TORCHELASTIC_USE_AGENT_STORE": "False"}) == ""
        assert name({**ranks[0], "DUALTRAIN_JOB": "mine"}) == "mine"
    with pytest.raises(UserError, match=r"the store of torchrun's agents at 127\.0\.0\.1:.* does not answer"):
        job_of(detect_world(other), 0.2)


#: Program that trains. After the first epoch, if there is no file ``died``, rank 0 makes it and kills itself. Other ranks
#: kill themselves too, unless they find the file.
PROGRAM = """
import os, signal, sys
import dualtrain.training.loop as loop
from dualtrain.main import main
end = loop.Run._end_epoch
def end_and_die(run):
    end(run)
    run.writer.wait()
    if run.cursor.epoch == 1 and not os.path.exists("died"):
        if run.backend.rank == 0:
            open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
loop.Run._end_epoch = end_and_die
sys.exit(main())
"""


def test_ranks_that_torchrun_restarts_resume_without_a_flag(tmp_path):
    (tmp_path / "killed").mkdir()
    (tmp_path / "whole").mkdir()
    command = "-c", PROGRAM, *FLAGS, "--epochs", "2"
    (tmp_path / "whole" / "died").touch()
    for name in ("whole", "killed"):
        with forked.torchrun_variables(2) as ranks:
            for _ in range(1 if name == "whole" else 2):
                ends = forked.run_ranks(ranks, command, tmp_path / "output" / name, cwd=tmp_path / name)
        assert [end.returncode for end in ends] == [0, 0], ends[0].stderr
    assert "restart of job" in ends[0].stdout
    [one], [other] = ([*(tmp_path / name / "runs").iterdir()] for name in ("whole", "killed"))
    assert read_json(one / "summary.json")["weights_sha256"] == read_json(other / "summary.json")["weights_sha256"]
