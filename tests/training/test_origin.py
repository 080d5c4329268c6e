"""Origin of a run: its commit, hosts, command and versions, in config.json and summary.json."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dualtrain.backends import connect
from dualtrain.config import parse
from dualtrain.training import loop, origin
from dualtrain.version import __version__
from tests.threads import run_threads


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a Git work tree with one commit, and change to its folder."""
    if shutil.which("git") is None:
        pytest.skip("needs git, which the Docker image of the tests does not have")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    inside = tmp_path / "tree" / "inside"
    inside.mkdir(parents=True)
    (inside / "code.py").write_text("1")
    monkeypatch.chdir(inside)
    git("init", "--quiet")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message=c")
    return inside


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def test_the_recorded_commit_is_marked_dirty_if_tracked_files_changed(tree, monkeypatch):
    head = git("rev-parse", "HEAD")
    git("-c", "user.name=a", "-c", "user.email=a@b", "tag", "v1", "--annotate", "--message=t")
    assert origin.commit(Path()) == head
    (tree / "new.txt").write_text("not tracked")
    assert origin.commit(Path()) == head
    (tree / "code.py").write_text("2")
    assert origin.commit(Path()) == f"{head}-dirty"
    lock = tree / ".git" / "index.lock"
    lock.touch()  # as if another process were committing
    assert origin.commit(Path()) == f"{head}-dirty"
    monkeypatch.chdir(tree.parent.parent)
    assert origin.commit(Path()) is None


def test_without_an_answer_from_git_there_is_no_commit(tree, monkeypatch, tmp_path):
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nsleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(origin, "_GIT_SECONDS", 0.2)
    for path in (str(slow.parent) + os.pathsep + os.environ["PATH"], str(tmp_path)):
        monkeypatch.setenv("PATH", path)
        assert origin.commit(Path()) is None


def origin_on_rank(backend) -> dict[str, Any]:
    return origin.origin_of(backend, Path())


def test_every_rank_gets_rank_0s_origin_with_the_hosts_of_all_ranks(monkeypatch):
    names = iter(["alpha", "beta", "alpha"])
    monkeypatch.setattr(origin, "socket", SimpleNamespace(gethostname=lambda: next(names)))
    first, *others = run_threads(3, origin_on_rank)
    assert all(other == first for other in others)
    assert first["hosts"] == {"alpha": 2, "beta": 1}


def test_a_run_records_its_origin_when_it_starts_and_in_its_summary(tree):
    with connect("local") as backend:
        summary = loop.train(parse(["--max-steps", "1", "--run-dir", "run", "--threads", "1"]), backend)
    config, written = (json.loads((tree / "run" / name).read_text()) for name in ("config.json", "summary.json"))
    assert config["origin"].items() <= written.items()
    assert written.items() == summary.items()
    assert written["commit"] == git("rev-parse", "HEAD")
    assert written["versions"]["torch"] == str(torch.__version__)
    assert written["versions"]["dualtrain"] == __version__
    assert written["command"] == shlex.join(sys.orig_argv)
    assert sum(written["hosts"].values()) == 1
