"""Whole jobs of two ranks with a launcher's variables: their output and their exit statuses."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest

from tests.conftest import require_horovod
from tests.forked import Forked, rank_variables, run_ranks, wait_until
from tests.pool import ROOT

ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
MAIN = ("-m", "dualtrain.main")


@pytest.fixture(params=["torch", "horovod"])
def backend(request):
    if request.param == "horovod":
        require_horovod()
    return request.param


def test_the_default_job_learns_and_only_rank_0_prints(tmp_path):
    first, second = run_ranks(2, (*MAIN, "--run-dir", tmp_path / "run"), tmp_path, env=ENV)
    assert (first.returncode, first.stderr) == (0, "")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["val_accuracy"] >= 0.97
    assert (summary["backend"], summary["world_size"]) == ("torch", 2)
    assert first.stdout.count("epoch 1/") == 1


def test_a_killed_rank_is_named_and_the_other_stops(backend, tmp_path):
    victim = {"torch": 0, "horovod": 1}[backend]  # test_spawn.py kills each rank with each backend
    command = (*MAIN, "--backend", backend, "--epochs", "5000", "--run-dir", tmp_path / "run")
    ranks = [Forked(command, tmp_path, env=ENV | variables) for variables in rank_variables(2)]
    try:
        assert wait_until(lambda: "epoch 2/" in ranks[0].output or ranks[0].poll() is not None)
        assert ranks[0].poll() is None, ranks[0].errors
        ranks[victim].send_signal(signal.SIGKILL)
        assert ranks[1 - victim].wait(60) == 1
        assert f"(rank {1 - victim} of 2): stopping, since rank {victim} died" in ranks[1 - victim].errors
    finally:
        for rank in ranks:
            rank.kill()


KILLED_EARLY = """
import os, signal, sys, time
import dualtrain.main as main

train = main._train
def train_later(config, backend):
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    backend.watch.wait_for_report(60)
    return train(config, backend)

main._train = train_later
sys.exit(main.main([]))
"""


def test_a_rank_that_is_killed_before_the_training_is_named_once(tmp_path):
    first, second = run_ranks(2, ("-c", KILLED_EARLY), tmp_path, env=ENV)
    assert (first.returncode, second.returncode) == (1, -signal.SIGKILL)
    assert first.stderr.count("(rank 0 of 2): stopping, since rank 1 died") == 1


# A model whose construction is interrupted on the ranks that the environment variable INTERRUPTED lists.
INTERRUPTED = """
import os, signal, time
def model():
    if os.environ["RANK"] in os.environ["INTERRUPTED"]:
        signal.raise_signal(signal.SIGINT)
    time.sleep(float(os.environ["SECONDS"]))  # without this sleep, rank 0 waits in a collective operation
"""


@pytest.mark.parametrize(
    ("ranks", "seconds", "expected"),
    [
        ("01", "60", ["dualtrain: error (rank 0 of 2): interrupted\n", ""]),
        ("1", "60", ["dualtrain: error (rank 0 of 2): stopping, since rank 1 stopped: interrupted\n", ""]),
        ("1", "0", ["dualtrain: error (rank 0 of 2): stopping, since rank 1 stopped: interrupted\n", ""]),
    ],
    ids=["all", "one", "one, while rank 0 waits"],
)
def test_a_ctrl_c_before_the_training_prints_one_line_for_the_job(tmp_path, ranks, seconds, expected):
    (tmp_path / "mine.py").write_text(INTERRUPTED)
    env = ENV | {"INTERRUPTED": ranks, "SECONDS": seconds}
    command = (*MAIN, "--model", "mine:model")
    job = [Forked(command, tmp_path / "output", env | variables, tmp_path) for variables in rank_variables(2)]
    try:
        assert wait_until(lambda: [rank.errors for rank in job] == expected), [rank.errors for rank in job]
        assert {job[int(rank)].wait(30) for rank in ranks} == {130}
        assert [rank.errors for rank in job] == expected
    finally:
        for rank in job:
            rank.kill()


def test_a_stopped_rank_is_named_with_the_step_and_the_operation(backend, tmp_path):
    command = (*MAIN, "--backend", backend, "--epochs", "5000", "--run-dir", tmp_path / "run", "--timeout", "6")
    ranks = [Forked(command, tmp_path, env=ENV | variables) for variables in rank_variables(2)]
    try:
        assert wait_until(lambda: "epoch 2/" in ranks[0].output or ranks[0].poll() is not None)
        ranks[1].send_signal(signal.SIGSTOP)
        assert ranks[0].wait(60) == 1
        # The timeout of 6 s starts with rank 0's next operation. With Horovod, Gloo's own timeout of 9 s starts when
        # rank 1 stops. If rank 0 computes for 3 s before that operation, Gloo's timeout expires first, and the message has
        # no " 6 s".
        line = r"error \(rank 0 of 2\): after step [0-9]+: .* failed on rank 0 of 2: waited( 6 s)? for rank 1, which has "
        assert re.search(line, ranks[0].errors), ranks[0].errors
    finally:
        for rank in ranks:
            rank.kill()


RAISING = """
import sys
import dualtrain.training.loop as loop
from dualtrain.main import main

step = loop.Run._step
def failing_step(self):
    if self.backend.rank == 1 and self.cursor.step == 5:
        raise RuntimeError("a bug on one rank")
    return step(self)
loop.Run._step = failing_step
sys.exit(main(sys.argv[1:]))
"""


def test_a_rank_that_raises_is_named_with_its_traceback(backend, tmp_path):
    command = ("-c", RAISING, "--backend", backend, "--run-dir", tmp_path / "run")
    ends = run_ranks(2, command, tmp_path, env=ENV)
    assert [end.returncode for end in ends] == [1, 1]
    lines = [line for line in ends[0].stderr.splitlines() if "rank 0 of 2" in line]
    assert "rank 1 stopped: RuntimeError: a bug on one rank" in lines[0]
    for end in ends:
        assert "failing_step" in end.stderr  # the traceback


# All cases run one after another in the same processes. Rank 1 waits before it reports a wrong flag: skip this wait.
REFUSED = """
import sys
from types import SimpleNamespace
import dualtrain.console
from dualtrain.main import main

dualtrain.console.time = SimpleNamespace(sleep=lambda seconds: None)
flags = ["--backend", sys.argv[1], "--run-dir", sys.argv[2]]
cases = ["--lr", "-1"], ["--backend", "local"], ["--data-dir", "missing"], ["--lr", "1e9"]
print([main([*flags, *case]) for case in cases])
"""


def test_errors_before_the_ranks_connect_are_printed_by_every_rank_and_later_errors_only_by_rank_0(backend, tmp_path):
    first, second = run_ranks(2, ("-c", REFUSED, backend, tmp_path / "run"), tmp_path, env=ENV)
    for end in (first, second):
        assert end.returncode == 0, end.stderr
        assert end.stdout.splitlines()[-1] == "[2, 2, 2, 1]"
    lr, local, data, diverged = first.stderr.splitlines()
    assert "--lr must be" in lr
    assert "the local backend is rank 0 of 1" in local
    assert "--data-dir 'missing'" in data
    assert "infinite or not a number in step" in diverged
    # No launcher stops rank 1 here, so rank 1 also prints the errors that occur before the ranks connect.
    lr, local = second.stderr.splitlines()
    assert "(rank 1 of 2): --lr must be" in lr
    assert "the local backend is rank 0 of 1" in local
