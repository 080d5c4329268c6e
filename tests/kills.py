"""Jobs of which a rank is killed in each phase, and which are restarted until they complete (:func:`survive`)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.forked import ROOT, Completed, Forked, rank_variables

ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SECONDS = 120.0  # limit of each wait, enough on a busy machine
#: Flags of a job: four steps per epoch, a checkpoint after each step, and dropout, which draws random numbers.
FLAGS = ("--model", "tests.models_for_tests:dropout_net", "--global-batch-size", "360", "--lr", "0.02", "--momentum", "0.9")
FLAGS += ("--epochs", "7", "--checkpoint-every", "1", "--threads", "1", "--workers", "0", "--log-every", "1")
#: The phases in which a run is killed, one after another. If a run dies three times in a row after the same
#: step, ``restarts.py`` refuses the next restart. In this order, that does not happen.
PHASES = ("start-up", "connect", "forward", "evaluation", "backward", "copy", "all-reduce", "write", "rename", "end")
#: The phases that occur once in a run. There, a rank is killed in the first call of the phase's function; in the other
#: phases, in the second call.
ONCE = ("start-up", "connect", "end")
#: The phases that only rank 0 has.
OF_RANK_0 = ("copy", "write", "rename", "end")
#: Program with the arguments RANK PHASE NUMBER, and then the arguments of ``train``. Rank RANK kills its own process at the
#: start (PHASE ``start-up``), or at call NUMBER of a function that is called in PHASE: before the call, but after it in the
#: PHASE ``all-reduce``.
PROGRAM = """
import os, signal, sys
victim, phase, number, *arguments = sys.argv[1:]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

if victim != os.environ["RANK"]:
    phase = ""
if phase == "start-up":
    die()

from pathlib import Path
import torch
import dualtrain.files, dualtrain.main
from dualtrain.backends import collectives, factory, shm
from dualtrain.run_folder import checkpoint
from dualtrain.trainer import objective, trainer
from dualtrain.training import results

calls = 0

def at(owner, name, counts=lambda *_: True, after=False):
    original = getattr(owner, name)
    def call(*arguments, **named):
        global calls
        calls += counts(*arguments)
        due = calls == int(number)
        if due and not after:
            die()
        result = original(*arguments, **named)
        if due:
            die()
        return result
    setattr(owner, name, call)

def of_a_step(path, *_):
    return "step-" in (os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path.name)

if phase == "connect":
    at(factory, "Watch")
if phase == "forward":
    at(objective.CrossEntropy, "__call__")
if phase == "backward":
    at(torch.Tensor, "backward")
if phase == "all-reduce":
    for kind in (collectives.Backend, shm.SharedMemoryBackend):
        for name in {"start_sum", "start_tree_sum"} & kind.__dict__.keys():
            at(kind, name, after=True)
if phase == "evaluation":
    at(trainer.Trainer, "evaluate")
if phase == "copy":
    at(checkpoint.Packed, "__init__")
if phase == "write":
    at(dualtrain.files.os, "fsync", of_a_step)
if phase == "rename":
    at(Path, "replace", of_a_step)
if phase == "end":
    at(results, "write_json", lambda path, *_: path.name == "summary.json")
sys.argv[1:] = arguments
sys.exit(dualtrain.main.main())
"""


def kills(first_rank: int) -> list[tuple[int, str, int]]:
    """Return one kill (rank, phase, call) per phase. Ranks alternate from ``first_rank`` on, except in ``OF_RANK_0``."""
    ranks = [0 if phase in OF_RANK_0 else (first_rank + number) % 2 for number, phase in enumerate(PHASES)]
    return [(rank, phase, 1 if phase in ONCE else 2) for rank, phase in zip(ranks, PHASES, strict=True)]


def job(folder: Path, kill: tuple[int, str, int], *flags: str) -> list[Completed]:
    """Run two ranks, and kill the rank that ``kill`` names (-1: kill none)."""
    arguments = (*FLAGS, *flags, "--run-dir", str(folder), "--resume", "auto")
    command, output = ("-c", PROGRAM, *map(str, kill), *arguments), folder.with_name("output")
    ranks = [Forked(command, output, env={**ENV, **variables}) for variables in rank_variables(2)]
    try:
        victim = kill[0]
        if kill[1] in ONCE:
            # Before the watch (backends/watch.py) has started, ranks cannot detect a failed rank: send the signal that a
            # launcher would send. In the phase "end" the signal is not needed: the watch reports the failed rank.
            ranks[victim].wait(SECONDS)
            ranks[1 - victim].send_signal(signal.SIGTERM)
        return [rank.wait_and_kill(SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def survive(folder: Path, kills: Sequence[tuple[int, str, int]], *flags: str) -> None:
    """Run a job without kills and a job with ``kills`` (rank, phase, call); assert that their results are equal."""
    no_kill = (-1, "", 0)
    assert [end.returncode for end in job(folder / "whole", no_kill, *flags)] == [0, 0]
    for kill in kills:
        ends = job(folder / "killed", kill, *flags)
        assert ends[kill[0]].returncode == -signal.SIGKILL, (kill, ends)
        assert ends[1 - kill[0]].returncode != 0, (kill, ends)
    last = job(folder / "killed", no_kill, *flags)
    assert [end.returncode for end in last] == [0, 0], last
    whole, killed = (json.loads((folder / name / "summary.json").read_text()) for name in ("whole", "killed"))
    for name in ("weights_sha256", "steps", "epochs", "val_loss", "val_accuracy", "train_loss", "best"):
        assert killed[name] == whole[name], name
    began = [kill for kill in kills if kill[1] not in ("start-up", "connect")]
    assert [one["rank"] for one in killed["recoveries"]] == [rank for rank, _, _ in began]
    assert {one["cause"] for one in killed["recoveries"]} == {"died: its process ended without a report"}
    left = [path.name for path in (folder / "killed").rglob("*.tmp")]
    assert not left
