"""``--prove`` without launchers: the recorder, its records, their comparison and the verdict."""

from __future__ import annotations

import ast
import errno
import gc
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import types
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from dualtrain.console import ending_by_signals
from dualtrain.errors import UserError
from dualtrain.horovodize import recorder
from dualtrain.horovodize.__main__ import main
from dualtrain.horovodize.prove import collect, launch
from dualtrain.horovodize.prove.causes import RACES, likely_causes, sources_of
from dualtrain.horovodize.prove.cleaner import marked
from dualtrain.horovodize.prove.comparison import different_end, distance, first_difference, moved, unequal_options
from dualtrain.horovodize.prove.evidence import Evidence
from dualtrain.horovodize.prove.launch import Job, RunError
from dualtrain.horovodize.prove.page import page
from dualtrain.horovodize.prove.reader import read_record
from dualtrain.horovodize.prove.records import RunRecord
from dualtrain.horovodize.prove.results import facts, table
from dualtrain.horovodize.prove.verdict import verdict_of
from dualtrain.horovodize.prove.workspace import workspace
from tests.forked import run_ranks
from tests.pool import ROOT

STEPS = 6


class ExitError(Exception):
    """Exception that the patched ``os._exit`` raises instead of ending the test process."""


@pytest.fixture
def simulated(tmp_path, monkeypatch):
    """Return a function that trains with two optimizers, one rank after another in this process, and returns the record.

    ``steps`` is the requested number of steps, and ``script_steps`` is the number of steps of the script. ``change`` is
    called before each step; ``joins`` is the number of calls of ``join`` before training. ``defects`` are recorded as
    reproduced on each rank. For ``period``, see :func:`train`.
    """
    monkeypatch.setattr(recorder.os, "_exit", lambda status: (_ for _ in ()).throw(ExitError))
    count = iter(range(99))

    def simulate(change=lambda **_: None, ranks=2, steps=STEPS, script_steps=STEPS, defects=(), period=1, joins=0):
        folder = tmp_path / str(next(count))
        for rank in range(ranks):
            record = recorder.Record(str(folder), rank)
            record.write("start", format=recorder.FORMAT, steps=steps, seed=None, processor="one", time=0.0)
            watch = recorder.Recorder(record, steps)
            library = stub(rank, ranks)
            watch.patch(library)
            for _ in range(joins):
                library.join()
            try:
                train(library, rank, script_steps, change, period)
                watch.end("return", 0)
            except ExitError:
                pass
            add_defects(folder / f"rank-{rank}.jsonl", defects)
        return read_record(folder, launched=0.0)

    return simulate


def stub(rank, size):
    """Return a stub of ``horovod.torch``.

    Its ``DistributedOptimizer`` returns an instance of a subclass of the optimizer's class, but averages nothing.
    """

    def distributed_optimizer(optimizer, named_parameters=None):
        cls = type("Wrapped", (type(optimizer),), {})
        return cls(optimizer.param_groups)

    library = types.SimpleNamespace(__name__="horovod.torch", rank=lambda: rank, size=lambda: size, Sum=1)
    library.DistributedOptimizer = distributed_optimizer
    library.allreduce_async = lambda tensor, name, op: size
    library.poll = lambda handle: True
    library.synchronize = lambda handle: handle
    library.join = lambda: 0
    library.allreduce = lambda tensor, **options: tensor
    library.broadcast_parameters = lambda params, root_rank: None
    library.shutdown = lambda: None
    return library


def train(library, rank, steps, change, period):
    """Train two models; the second model's optimizer steps only once in ``period`` steps."""
    torch.manual_seed(3)
    models = nn.Linear(4, 3), nn.Linear(3, 2)
    for model in models[::-1]:
        model.register_buffer("average", torch.ones(2))
        library.broadcast_parameters(model.state_dict(), root_rank=0)
    inner = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5) for model in models]
    inner[1].param_groups[0]["betas"] = (0.9, 0.999)  # an option with several values, as Adam has
    optimizers = [
        library.DistributedOptimizer(one, named_parameters=model.named_parameters())
        for one, model in zip(inner, models, strict=True)
    ]
    for step in range(1, steps + 1):
        change(rank=rank, step=step, models=models, optimizers=optimizers)
        for optimizer, model in list(zip(optimizers, models, strict=True))[: 1 if step % period else 2]:
            optimizer.zero_grad()
            model(torch.full((2, model.in_features), step + rank / 2)).square().mean().backward()
            optimizer.step()


def add_defects(path, defects):
    *lines, last = path.read_text().splitlines()
    end = {**json.loads(last), "defects": [list(each) for each in defects]}
    path.write_text("\n".join([*lines, json.dumps(end)]) + "\n")


def at(wanted_step, wanted_rank, act):
    """Return a change that calls ``act(models, optimizers)`` before step ``wanted_step`` on rank ``wanted_rank``."""

    def change(rank, step, models, optimizers):
        if (rank, step) == (wanted_rank, wanted_step):
            act(models, optimizers)

    return change


def test_the_record_has_rank_and_size_after_a_join_before_the_first_step(simulated):
    assert [rank.world["size"] for rank in simulated(joins=1).ranks] == [2, 2]


@torch.no_grad()
def nudge(models, optimizers):
    models[1].weight[1, 2] += 1e-4


def other_rate(models, optimizers):
    optimizers[0].param_groups[0]["lr"] = 0.2


def other_momentum(models, optimizers):
    optimizers[1].param_groups[0].update(momentum=0.0, betas=(0.9, 0.99))


# -- the recorder -----------------------------------------------------------------------------------------------------


def test_a_record_contains_the_steps_weights_and_exit_reason_of_each_rank(simulated):
    run = simulated(steps=4)
    assert (run.size, run.steps) == (2, 4)
    assert run.library.startswith("horovod ")
    for rank in run.ranks:
        assert (rank.end.reason, rank.end.status) == ("steps", 0)
        assert [each.names for each in rank.optimizers] == [["weight", "bias"]] * 2
        assert [each.numels for each in rank.optimizers] == [[12, 3], [6, 2]]
        assert [sorted(each.weights) for each in rank.optimizers] == [[0, 1, 2, 3, 4]] * 2
        assert [each.steps for each in rank.optimizers] == [4, 4]  # the second optimizer also takes all its steps
        assert rank.optimizers[0].weights[0].options[0]["lr"] == 0.1
        assert [number for number, _ in rank.seconds] == [0, 1] * 4
    assert run.memory > 1 << 20
    assert run.steps_per_second > 0


def test_the_recorder_does_not_keep_deleted_optimizers_alive(tmp_path):
    """Wrap one optimizer per epoch: Horovod fails if an earlier optimizer of the same parameters still exists."""
    watch, library, model = recorder.Recorder(recorder.Record(str(tmp_path), 0), STEPS), stub(0, 1), nn.Linear(2, 1)
    watch.patch(library)
    dropped = []
    for _ in range(2):
        optimizer = library.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        dropped.append(weakref.ref(optimizer))
        del optimizer
    gc.collect()
    assert [each() for each in dropped] == [None, None]


def test_a_script_that_ends_before_the_last_step_is_recorded_too(simulated):
    run = simulated(steps=20, script_steps=3)
    assert run.steps == 3
    assert {rank.end.reason for rank in run.ranks} == {"return"}
    assert verdict_of(Evidence([run], [run]), []).line.startswith("same bits for 3 steps, all that the script takes")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_one_changed_value_changes_the_summary_and_the_checksum(dtype):
    p = torch.linspace(-3, 5, 400).to(dtype).view(20, 20).t()
    q = p.clone()
    q[7, 3] = torch.nextafter(q[7, 3].real.double(), torch.tensor(9.0).double()).to(dtype) if dtype == torch.float64 else 5
    assert recorder.summary(p) == recorder.summary(p.clone())
    assert recorder.summary(p)[0] != recorder.summary(q)[0]
    assert recorder.checksums([p, p]) != recorder.checksums([p, q])
    norm = float(torch.view_as_real(p).norm() if dtype.is_complex else p.double().norm())
    assert recorder.summary(p)[1] == pytest.approx(norm)
    assert len(recorder.summary(p)[2]) == recorder.SAMPLES
    for shape in ((), (0, 3)):
        recorder.summary(torch.zeros(shape, dtype=dtype))
        recorder.checksums([torch.zeros(shape, dtype=dtype)])


def test_the_recorder_needs_little_memory_for_large_tensors(tmp_path, monkeypatch):
    """Convert a large tensor in parts, and read the script's peak memory before the last summary allocates more."""
    sizes, order, double = [], [], torch.Tensor.double
    monkeypatch.setattr(recorder, "PART", 8)
    monkeypatch.setattr(recorder, "SAMPLES", 4)
    monkeypatch.setattr(torch.Tensor, "double", lambda self: (sizes.append(self.numel()), double(self))[1])
    values = torch.arange(100.0)
    assert recorder.summary(values)[1] == pytest.approx(float(double(values).norm()))
    assert max(sizes) == 8
    monkeypatch.setattr(recorder.Recorder, "_write_state", lambda self: order.append("state"))
    usage = types.SimpleNamespace(ru_maxrss=1)
    monkeypatch.setattr(recorder.resource, "getrusage", lambda who: (order.append("memory"), usage)[1])
    watch = recorder.Recorder(recorder.Record(str(tmp_path), 0), STEPS)
    watch.counts = [1]
    watch.end("return", 0)
    assert order == ["memory", "state"]


def test_the_recorder_is_one_file_that_python_3_8_can_read(capsys):
    assert main(["--recorder"]) == 0
    source = capsys.readouterr().out
    assert source == Path(recorder.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.startswith("dualtrain")]
    assert {"pickle", "marshal", "shelve"}.isdisjoint(imported)


SCRIPT = """
import sys, torch
import horovod.torch as hvd
from horovod.torch import DistributedOptimizer
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = DistributedOptimizer(optimizer, model.named_parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
try:
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        if step == 1:
            torch.save(model.state_dict(), sys.argv[1] + f"/after-2.{hvd.rank()}")
            print("two steps", sys.argv[2:], __name__, flush=True)
except BaseException:
    print("caught", flush=True)
finally:
    print("finally", flush=True)
"""


def test_the_recorder_ends_the_ranks_after_the_requested_number_of_steps(tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "record"
    script.write_text(SCRIPT)
    options = ["--record", folder, "--steps", 3, "--seed", 5]
    command = ["-m", "dualtrain.horovodize", recorder.__file__, *options, script, tmp_path, "--steps", 7]
    ended = run_ranks(2, list(map(str, command)), tmp_path / "output")
    assert [(end.returncode, end.stdout) for end in ended] == [(0, "two steps ['--steps', '7'] __main__\n")] * 2
    run = read_record(folder)
    assert (run.size, run.steps) == (2, 3)
    assert run.library.startswith("dualtrain ")
    for rank, record in enumerate(run.ranks):
        state = torch.load(tmp_path / f"after-2.{rank}", weights_only=True)
        weights = record.optimizers[0].weights[2]
        assert [list(each) for each in weights.tensors] == [recorder.summary(state[name]) for name in ("weight", "bias")]
        assert weights.options[0]["lr"] == 0.05


UNEVEN = """
import sys, torch
import horovod.torch as hvd
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(3, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for epoch in range(4):
    for batch in range((2, 4)[hvd.rank()]):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    hvd.join()
"""


@pytest.mark.parametrize(("steps", "counts"), [(2, [2, 2]), (3, [2, 3]), (5, [4, 8]), (20, [8, 16])])
def test_ranks_with_unequal_steps_end_together_after_hvd_join(steps, counts, tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "record"
    script.write_text(UNEVEN)
    command = ["-m", "dualtrain.horovodize", recorder.__file__, "--record", folder, "--steps", steps, script]
    ended = run_ranks(2, list(map(str, command)), tmp_path / "output")
    assert [end.returncode for end in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    run = read_record(folder)
    assert [rank.steps for rank in run.ranks] == counts
    assert {rank.end.reason for rank in run.ranks} == {"return" if steps == 20 else "steps"}


FAILING = """
import sys, torch
import horovod.torch as hvd
hvd.init()
{}
"""


@pytest.mark.parametrize(
    ("source", "reason", "status", "message"),
    [
        ("sys.exit(3)", "exit", 3, "exit status 3"),
        ("sys.exit('no data')", "exit", 1, "no data"),
        ("raise ValueError('on purpose')", "error", 1, "ValueError: on purpose"),
        ("pass", "return", 0, "before an hvd.* on every rank.* remove checkpoints of earlier runs"),
    ],
)
def test_the_reason_and_the_status_of_a_scripts_end_are_recorded(source, reason, status, message, tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "record"
    script.write_text(FAILING.format(source))
    command = ["-m", "dualtrain.horovodize", recorder.__file__, "--record", str(folder), str(script)]
    [ended] = run_ranks([{}], command, tmp_path / "output")
    assert ended.returncode == status
    run = read_record(folder)
    assert (run.ranks[0].end.reason, run.ranks[0].end.status) == (reason, status)
    (tmp_path / "log").write_text("")
    with pytest.raises(RunError, match=f"^Horovod: .*{message}") as raised:
        launch._check(run, "Horovod", status, None, tmp_path / "log")
    assert ("script.py" in raised.value.traceback) == (reason == "error")


# -- the comparison ---------------------------------------------------------------------------------------------------


def test_the_verdict_on_equal_runs_is_same_bits(simulated):
    one, other = simulated(), simulated()
    assert first_difference(one, other) is None
    assert different_end(one, other) is None
    assert distance(one, other) == (0.0, STEPS)
    evidence = Evidence([one, other], [one, other])
    verdict = verdict_of(evidence, ["a cause"])
    assert (verdict.status, verdict.line) == (0, f"same bits for {STEPS} steps, 1.00× Horovod's speed")


def test_tensors_that_differ_after_the_last_step_are_found(simulated):
    """Compare all broadcast tensors at the end, also buffers, which no optimizer updates."""

    def change_buffer(models, optimizers):
        models[1].average += 1e-3

    one, other = simulated(), simulated(at(2, 1, change_buffer))
    found = first_difference(one, other)
    assert (found.step, found.rank, found.names) == (STEPS, 1, ("average",))
    assert distance(one, other) == (
        pytest.approx(1e-3 / 2**0.5, rel=1e-2),
        STEPS,
    )  # only one of the two equal buffers changed
    verdict = verdict_of(Evidence([one, one], [other, other]), [])
    assert verdict.status == 1
    assert verdict.line.startswith(f"differs at the end, after step {STEPS}, in 'average' by 1e-03 relative on rank 1: ")
    # Runs that end at different steps, and records without these tensors, are compared by the weights after each step.
    assert first_difference(simulated(steps=2, script_steps=2), other) is None
    for rank in other.ranks:
        rank.state = []
    assert first_difference(one, other) is None

    def with_last_order(flips):
        def act(models, optimizers):
            optimizers[0].param_groups[0]["lr"] = 0.0  # the last step changes no weights
            if flips:
                models[0].bias.data.copy_(models[0].bias.flip(0))  # another order of the values has the same checksum

        return simulated(at(4, 0, act), steps=20, script_steps=4)

    found = first_difference(with_last_order(False), with_last_order(True))
    assert (found.names, found.at_end) == (("bias",), True)


def test_parameters_that_a_script_adds_or_removes_later_are_compared(simulated):
    def add(change):
        def act(models, optimizers):
            extra = nn.Parameter(torch.full((3,), change))
            extra.grad = torch.ones(3)
            optimizers[1].add_param_group({"params": [extra]})

        return at(4, 0, act)

    one, other = simulated(add(1.0)), simulated(add(2.0))
    found = first_difference(one, other)
    assert (found.step, found.names, found.relative) == (4, ("group 1 parameter 0",), pytest.approx(0.5, rel=0.1))
    assert distance(one, other)[0] > 0.01
    assert first_difference(one, simulated(add(1.0))) is None

    def shrink(change):
        def act(rank, step, models, optimizers):
            if (rank, step) == (0, 2):
                models[1].bias.data += change
            if (rank, step) == (0, 4):
                optimizers[1].param_groups[0]["params"].pop()

        return act

    assert first_difference(simulated(shrink(0.0)), simulated(shrink(1.0))).names == ("weight", "bias")


def test_an_option_that_is_nan_in_one_run_only_is_reported(simulated):
    def with_lr(lr):
        return simulated(at(3, 0, lambda models, optimizers: optimizers[0].param_groups[0].update(lr=lr)))

    one, other = with_lr(float("nan")), with_lr(1.0)
    for runs in ((one, other), (other, one)):
        [(name, *_)] = first_difference(*runs).options
        [(same, *_)] = unequal_options(*runs)
        assert name == same == "lr"
    assert unequal_options(one, with_lr(float("nan"))) == ()


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_or_infinite_weights_of_one_run_exceed_every_tolerance(value, rank, side, simulated):
    def spoil(models, optimizers):
        with torch.no_grad():
            models[0].weight[2, 3] = value

    runs = [simulated(), simulated()]
    runs[side] = simulated(at(3, rank, spoil))
    there, here = runs
    assert distance(there, here) == (float("inf"), STEPS)
    there.ranks[0].start["processor"] = "another"
    verdict = verdict_of(Evidence([there], [here], recorded=True), [])
    assert (verdict.status, "in values that are NaN or infinite" in verdict.line) == (1, True)
    assert json.loads(json.dumps(facts(Evidence([there], [here], recorded=True), verdict), allow_nan=False))


def test_weights_that_are_not_finite_are_noted(simulated):
    def overflow(models, optimizers):
        with torch.no_grad():
            models[0].bias.fill_(float("inf"))

    run = simulated(at(2, 1, overflow))
    verdict = verdict_of(Evidence([run], [run]), [])
    assert (verdict.status, verdict.details[0][:62]) == (
        0,
        "note: weights on Horovod are NaN or infinite after step 2, so ",
    )


OTHER_MOMENTUM = (("momentum", 0.5, 0.0), ("betas", [0.9, 0.999], [0.9, 0.99]))


@pytest.mark.parametrize(
    ("change", "step", "optimizer", "rank", "names", "options"),
    [
        (at(1, 0, nudge), 0, 1, 0, ("weight",), ()),
        (at(3, 1, nudge), 3, 1, 1, ("weight", "bias"), ()),
        (at(4, 1, other_rate), 4, 0, 1, ("weight", "bias"), (("lr", 0.1, 0.2),)),
        (at(2, 0, other_momentum), 2, 1, 0, ("weight", "bias"), OTHER_MOMENTUM),
    ],
)
def test_a_planted_difference_is_found_at_its_step(change, step, optimizer, rank, names, options, simulated):
    one, other = simulated(), simulated(change)
    found = first_difference(one, other)
    assert (found.step, found.optimizer, found.rank, found.names) == (step, optimizer, rank, names)
    assert found.options == options
    assert found.measured == min(mark for mark in (0, 1, 2, 4, 5, STEPS) if mark >= step)
    assert 1e-7 < found.relative < 1
    evidence = Evidence([one, one], [other, other])
    verdict = verdict_of(evidence, ["train.py:3: clip_grad_norm_ comes before synchronize()"])
    begin = f"from step {step} on" if step else "before the first step"
    assert verdict.status == 1
    assert verdict.line.startswith(f"differs {begin} in 'weight'")
    cause = f"'{options[0][0]}' is {options[0][1]} on Horovod" if options else "launcher" if not step else "train.py:3"
    assert cause in verdict.line


def test_the_earliest_difference_of_several_optimizers_is_reported(simulated):
    def change(rank, step, models, optimizers):
        if (rank, step) in ((1, 5), (0, 6)):
            optimizers[step - 5].param_groups[0]["lr"] = 0.2

    found = first_difference(simulated(period=2), simulated(change, period=2))
    assert (found.step, found.optimizer, found.rank) == (5, 0, 1)  # optimizer 1 differs later, at step 6 of the script


def test_a_difference_that_no_defect_explains_is_found_by_time_not_step_number(simulated):
    """Optimizer 1 steps in every second step of the script, so its step 3 comes after step 5 of optimizer 0."""

    def explained(rank, step, models, optimizers):
        if step == 5:
            optimizers[0].param_groups[0]["lr"] = 0.2

    def unexplained(rank, step, models, optimizers):
        if step == 6:
            optimizers[1].param_groups[0]["lr"] = 0.3

    def both(**arguments):
        explained(**arguments)
        unexplained(**arguments)

    compat = simulated(unexplained, period=2, defects=[("it takes a step", "train.py", 12)])
    evidence = Evidence([simulated(period=2)], [simulated(both, period=2)], compat)
    verdict = verdict_of(evidence, [])
    assert (verdict.difference.step, verdict.difference.optimizer) == (3, 1)
    assert "once these defects of Horovod are reproduced (it takes a step): " in verdict.line
    apart, step = distance(evidence.horovod[0], compat)
    assert (
        verdict.details[-1]
        == f"all weights together differ by {apart:.1e} relative after step {step}, with these defects reproduced"
    )


def test_the_verdict_describes_runs_that_end_differently(simulated):
    short = simulated(script_steps=3)
    assert different_end(simulated(), short) == f"optimizer 0 of rank 0 takes {STEPS} steps on Horovod and 3 with dualtrain"
    assert verdict_of(Evidence([simulated()], [short]), []).status == 1
    verdict = verdict_of(Evidence([short], [], failure="the script failed"), [])
    assert (verdict.status, verdict.line) == (1, "fails with dualtrain, but not on Horovod: the script failed")


def test_a_difference_is_attributed_to_a_defect_of_horovod(simulated):
    met = [("it takes a step", "train.py", 12)]
    evidence = Evidence([simulated(at(1, 0, nudge))] * 2, [simulated()] * 2, simulated(at(1, 0, nudge), defects=met))
    verdict = verdict_of(evidence, ["another cause"])
    assert verdict.status == 0
    assert "once these defects of Horovod are reproduced: it takes a step" in verdict.line
    assert "train.py:12: it takes a step" in verdict.details
    assert any("without these defects" in line and "from step 0 on" in line for line in verdict.details)
    evidence.compat = simulated(
        at(1, 0, nudge), script_steps=3, defects=met
    )  # the same bits, but the script takes fewer steps
    assert verdict_of(evidence, []).status == 1
    evidence.compat = simulated(at(4, 0, nudge), defects=met)
    verdict = verdict_of(evidence, [])
    assert verdict.status == 1
    assert any("still differ" in line for line in verdict.details)

    def both(rank, step, models, optimizers):
        at(1, 0, nudge)(rank, step, models, optimizers)
        at(4, 0, other_rate)(rank, step, models, optimizers)

    evidence.compat = simulated(both, defects=met)
    verdict = verdict_of(evidence, ["another cause"])
    assert verdict.difference.step == 4
    assert verdict.line.startswith("differs from step 4 on in 'weight', 'bias' by ")
    assert "once these defects of Horovod are reproduced (it takes a step): the optimizer's 'lr' is 0.1" in verdict.line
    assert any("without these defects, the weights differ before the first step" in line for line in verdict.details)


def test_rounding_is_a_likely_cause_for_more_than_two_ranks(simulated):
    def round_off(models, optimizers):
        with torch.no_grad():
            models[0].weight.mul_(1 + 2e-7)

    verdict = verdict_of(Evidence([simulated(ranks=3)], [simulated(at(2, 0, round_off), ranks=3)]), [])
    assert (verdict.status, "rounding: sums over 3 ranks" in verdict.line) == (1, True)


def scaled_by(factor):
    def scale(models, optimizers):
        with torch.no_grad():
            for model in models:
                model.weight.mul_(factor)

    return at(1, 0, scale)


@pytest.mark.parametrize(
    ("spread", "relative", "status", "begins"),
    [
        (1e-4, 0.5e-4, 0, "within twice the script's own spread"),
        (1e-4, 1e-2, 1, "differs by more than twice the script's own spread"),
        (0.5, 0.1, 1, "not repeatable, so nothing is proven"),
    ],
)
def test_an_unrepeatable_script_is_compared_with_the_spread_of_its_horovod_runs(
    spread, relative, status, begins, simulated
):
    horovod = [simulated(), simulated(scaled_by(1 + spread))]
    evidence = Evidence(horovod, [simulated(scaled_by(1 + relative))])
    verdict = verdict_of(evidence, ["another cause"], ["a race"])
    assert (verdict.status, verdict.line.startswith(begins)) == (status, True), verdict.line
    assert verdict.details[0].startswith("not repeatable: two runs on Horovod differ before the first step in 'weight'")
    assert "--seed 1" in verdict.details[1]
    assert verdict.details[2] == "possible cause: a race"
    assert not any("another cause" in line for line in verdict.details)


def test_the_distance_between_unrepeatable_runs_names_the_compared_step(simulated):
    short = [simulated(scaled_by(factor), steps=2, script_steps=2) for factor in (1 + 1e-4, 1 + 2e-4)]
    horovod = [simulated(), short[0]]
    verdict = verdict_of(Evidence(horovod, [simulated(), short[1]]), [])
    between = [distance(a, b) for a in horovod for b in (simulated(), short[1])]
    apart, step = sorted(between)[2]
    assert step == 2
    assert f"differ by {apart:.1e} after step 2, and two runs" in verdict.line


def test_a_script_that_is_repeatable_only_on_horovod_fails_the_proof(simulated):
    """If all runs on Horovod agree, the script is repeatable: one run with dualtrain that differs is an error."""
    other = simulated(scaled_by(1 + 1e-4))
    verdict = verdict_of(Evidence([simulated() for _ in range(3)], [simulated(), simulated(), other]), [])
    begins = (
        "repeatable on Horovod, but not with dualtrain: two runs with dualtrain differ before the first step in 'weight'"
    )
    assert (verdict.status, verdict.line.startswith(begins)) == (1, True), verdict.line
    # The tolerance comes from the spread of Horovod's runs, not from the spread of dualtrain's runs.
    horovod = [simulated(), simulated(scaled_by(1 + 1e-6))]
    verdict = verdict_of(Evidence(horovod, [simulated(), other]), [])
    assert (verdict.status, verdict.line.split(":")[0]) == (1, "differs by more than twice the script's own spread")
    # A record has only one run on Horovod, so the tolerance comes from the spread of dualtrain's runs.
    verdict = verdict_of(Evidence([simulated()], [simulated(), other], recorded=True), [])
    assert (verdict.status, verdict.line.split(":")[0]) == (0, "within twice the script's own spread")


@pytest.mark.parametrize(("relative", "status"), [(1e-5, 0), (0.1, 1)])
def test_a_record_of_another_platform_is_compared_within_a_tolerance(relative, status, simulated):
    here, there = simulated(scaled_by(1 + relative)), simulated()
    there.ranks[0].start["processor"] = "another"
    verdict = verdict_of(Evidence([there], [here], recorded=True), [])
    assert (verdict.status, "(processor another, here one)" in verdict.line) == (status, True)
    compat = simulated(defects=[("it takes a step", "train.py", 12)])
    verdict = verdict_of(Evidence([there], [here], compat, recorded=True), [])
    assert (verdict.status, "once these defects of Horovod are reproduced: it takes a step" in verdict.line) == (0, True)
    there.ranks[0].start["processor"] = "one"
    assert verdict_of(Evidence([there], [here], recorded=True), []).status == 1


def test_optimizer_options_must_equal_those_in_the_record_of_another_platform(simulated):
    """Compare options at each recorded step; if Horovod's defects change them, use the run that reproduces the defects."""

    def rate_at(changed_step, rate):
        def change(rank, step, models, optimizers):
            scaled_by(1 + 1e-6)(rank, step, models, optimizers)
            if (rank, step) == (0, changed_step):
                optimizers[0].param_groups[0]["lr"] = rate

        return change

    there = simulated(at(1, 0, other_rate))
    there.ranks[0].start["processor"] = "another"
    here, compat = simulated(), simulated(rate_at(1, 0.2), defects=[("it leaves out options", "train.py", 12)])
    verdict = verdict_of(Evidence([there], [here], recorded=True), [])
    assert (verdict.status, "the optimizer's 'lr' is 0.2 on Horovod and 0.1 with" in verdict.line) == (1, True)
    verdict = verdict_of(Evidence([there], [here], compat, recorded=True), [])
    assert (verdict.status, verdict.line.split(": ")[-1]) == (0, "it leaves out options")
    compat = simulated(rate_at(1, 0.2), script_steps=3, defects=[("it leaves out options", "train.py", 12)])
    assert verdict_of(Evidence([there], [here], compat, recorded=True), []).status == 1
    there = simulated()
    there.ranks[0].start["processor"] = "another"
    for rate, status in ((0.1 * (1 + 1e-9), 0), (0.10001, 1)):
        assert verdict_of(Evidence([there], [simulated(rate_at(5, rate))], recorded=True), []).status == status


def test_a_difference_comparable_to_the_weight_updates_is_not_tolerated(simulated):
    """With a low learning rate, both sides' weights stay close to each other, even if their updates differ."""

    def slow(factor):
        def change(rank, step, models, optimizers):
            if step == 1:
                for optimizer in optimizers:
                    optimizer.param_groups[0]["lr"] = 1e-6
            if step == 2:  # as if the gradients were larger; the options are the same
                with torch.no_grad():
                    models[0].bias -= factor * 1e-6

        return change

    there, here, close = simulated(slow(0)), simulated(slow(100)), simulated(slow(1))
    assert 5e-5 < distance(there, here)[0] < moved(there) < 1e-3
    there.ranks[0].start["processor"] = "another"
    verdict = verdict_of(Evidence([there], [here], recorded=True), [])
    assert (verdict.status, "and all steps together changed the weights by only" in verdict.line) == (1, True)
    assert verdict_of(Evidence([there], [close], recorded=True), []).status == 0
    verdict = verdict_of(Evidence([there, here], [here]), [])
    assert (verdict.status, verdict.line.split(":")[0]) == (1, "not repeatable, so nothing is proven")

    def slightly_higher_rate(rank, step, models, optimizers):
        slow(0)(rank, step, models, optimizers)
        if step == 3:
            optimizers[0].param_groups[0]["lr"] = 1.01e-6

    verdict = verdict_of(Evidence([there], [simulated(slightly_higher_rate)], recorded=True), [])
    assert (verdict.status, "the optimizer's 'lr' is 1e-06 on Horovod and 1.01e-06" in verdict.line) == (1, True)


def test_a_script_that_changed_since_it_was_recorded_is_the_likeliest_cause(simulated):
    here, there = simulated(at(3, 0, nudge)), simulated()
    here.ranks[0].start.update(sha256="b", arguments=["--lr", "0.2"])
    there.ranks[0].start.update(sha256="a", arguments=["--lr", "0.1"], script="train.py")
    verdict = verdict_of(Evidence([there], [here], recorded=True), ["train.py:3: clip_grad_norm_"])
    assert verdict.status == 1
    assert "the script has changed since it was recorded as 'train.py'" in verdict.line
    there.ranks[0].start["sha256"] = "b"
    verdict = verdict_of(Evidence([there], [here], recorded=True), [])
    assert "arguments were --lr 0.1 when it was recorded, and are --lr 0.2 here" in verdict.line
    same = simulated()
    same.ranks[0].start.update(sha256="b", arguments=["--lr", "0.2"])
    verdict = verdict_of(Evidence([there], [same], recorded=True), [])
    assert (verdict.status, verdict.line) == (0, f"same bits for {STEPS} steps")
    assert verdict.details[0].startswith("note: the script's arguments were --lr 0.1")
    del there.ranks[0].start["sha256"]  # as in a record of an earlier version
    there.ranks[0].start["arguments"] = ["--lr", "0.2"]
    assert verdict_of(Evidence([there], [same], recorded=True), []).details == []


def test_results_have_a_table_an_html_page_and_json_values(simulated):
    one, other = simulated(), simulated(at(3, 1, nudge))
    evidence = Evidence([one, one], [other], compat=one)
    verdict = verdict_of(evidence, [])
    rows = table(evidence)
    assert [row[0] for row in rows] == ["", "Horovod", "dualtrain", "with Horovod's defects"]
    assert rows[1][-1] == rows[3][-1]
    assert rows[1][2:4] == ["2", str(STEPS)]
    html = page("<script>.py", evidence, verdict)
    assert "&lt;script&gt;.py" in html
    assert b"?.py" in page("\udcff.py", evidence, verdict).encode()  # the name of a file may have bytes that are not UTF-8
    assert all(cell in html for cell in rows[1])
    columns = zip(*rows, strict=True)  # the page shows the table transposed
    assert all("".join(f"<td>{cell}</td>" for cell in column) in html for column in [*columns][1:])
    assert all(f"<dt>{name}</dt>" in html for name in ("measured", "processor", "cores", "load"))
    assert "record of" not in html
    one.ranks[0].start["processor"] = "<that of the record>"
    there = page("script.py", Evidence([one], [other], recorded=True), verdict)
    assert "<dt>record of" in there
    assert "&lt;that of the record&gt;, torch" in there
    values = json.loads(json.dumps(facts(evidence, verdict)))
    assert values["difference"]["step"] == 3
    assert [len(runs) for runs in values["runs"].values()] == [2, 1, 1]


CLIPPED = """
import torch
import horovod.torch as hvd
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
hvd.broadcast_optimizer_state(optimizer, 0)
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
"""


def test_the_likeliest_cause_is_a_line_of_the_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CLIPPED)
    found = likely_causes(sources_of([str(script)]))
    assert found[0].startswith(f"{script}:7: ")
    assert any(line.startswith(f"{script}:5: ") for line in found)
    assert likely_causes(sources_of([str(script)]), RACES) == found[:1]
    lines = CLIPPED.splitlines()
    inner = "\n".join(["def train(model, opt):", *(f"    {line}" for line in lines[5:7]), "    opt.step()"])
    script.write_text("\n".join([*lines[:4], inner, "train(model, optimizer)\n"]))
    assert likely_causes(sources_of([str(script)]))[0].startswith(f"{script}:7: ")
    for text in ("not python (", "import torch\n"):
        script.write_text(text)
        assert likely_causes(sources_of([str(script), "--lr"])) == []


def test_causes_are_found_in_the_modules_beside_the_script(tmp_path, monkeypatch):
    """Wrap the optimizer in one file, step it in another. A line that runs only in a world of one rank is not a cause."""
    step = "\n".join(["def train(model, optimizer, loss):", *(f"    {line}" for line in CLIPPED.splitlines()[5:])])
    files = {
        "main.py": "import horovod.torch as hvd\nfrom lib.steps import train\nimport lib.other, lib.sum\n"
        "optimizer = hvd.DistributedOptimizer(o)\ntrain(model, optimizer, loss)\n",
        "lib/__init__.py": "",
        "lib/steps.py": f"from . import deep\nimport numpy\n{step}\n",
        "lib/deep.py": "import horovod.torch as hvd\nif hvd.rank() == 0:\n    hvd.allreduce(loss)\n",
        "lib/other.py": "not python (",
        "lib/sum.py": f"import horovod.torch as hvd\nif {' + '.join('a' * 500)}:\n    hvd.allreduce(a)\n",
        "unused.py": CLIPPED,
    }
    (tmp_path / "lib").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = likely_causes(sources_of([str(tmp_path / "main.py")]))
    assert found[0].startswith(f"{tmp_path}/lib/steps.py:5: ")
    assert any(line.startswith(f"{tmp_path}/lib/deep.py:3: ") for line in found)
    assert not any("unused.py" in line for line in found)
    monkeypatch.chdir(tmp_path)
    assert likely_causes(sources_of(["-m", "main"]))[0].startswith("lib/steps.py:5: ")
    guarded = CLIPPED.replace("torch.nn.utils", "if hvd.size() == 1:\n    torch.nn.utils")
    (tmp_path / "main.py").write_text(guarded)
    assert [line.split(" ")[0] for line in likely_causes(sources_of(["main.py"]))] == ["main.py:5:"]


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.fixture
def record(simulated, tmp_path):
    """Return the folder of a record of two ranks."""
    simulated()
    return tmp_path / "0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: script; "),
        (["{tmp}/nothing.py"], "no such file"),
        (["--nproc", "0", "{script}"], "--nproc: '0' is not a whole number from 1 to"),
        (["--steps", "0", "{script}"], "--steps: '0' is not a whole number from 1 to"),
        (["--timeout", "0", "{script}"], "--timeout: '0' is not a number of seconds above 0"),
        (["--fast", "{script}"], "--fast"),
        (["--json", "{tmp}/none/x.json", "{script}"], "no such folder"),
        (["--html", "", "{script}"], "--html: the path is empty"),
        (["--against", "", "{script}"], "--against: the path is empty"),
        (["--against", "{record}", "--html", "{tmp}/empty", "{script}"], "it is a folder"),
        (["--against", "{record}", "--json", "{tmp}/fifo", "{script}"], "a FIFO, not a regular file"),
        (["--record", "{tmp}/a", "--against", "{tmp}/b", "{script}"], "give one of them"),
        (["--against", "{tmp}/none", "{script}"], "cannot read the record"),
        (["--against", "{tmp}/empty", "{script}"], "contains no record"),
        (["--against", "{record}", "--nproc", "3", "{script}"], "the record has 2 ranks"),
        (["--against", "{record}", "--steps", "7", "{script}"], f"was made with --steps {STEPS}: leave --steps out"),
        (["--against", "{record}", "--seed", "7", "{script}"], "was made without --seed: leave --seed out"),
        (["--record", "{tmp}/new", "--json", "{tmp}/x.json", "{script}"], "--record compares nothing"),
        (["--record", "{tmp}", "{script}"], "exists: name a new folder"),
        (["--record", "{script}/new", "{script}"], "cannot write to"),
    ],
)
def test_refusals_are_one_line(arguments, message, record, tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "fifo")
    words = [word.format(tmp=tmp_path, script=script, record=record) for word in arguments]
    assert main(["--prove", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("dualtrain: error: ")
    assert message in err


def test_the_prove_command_does_not_import_torch():
    program = "import sys; import dualtrain.horovodize.prove.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([launch.sys.executable, "-c", program], cwd=ROOT, timeout=60).returncode == 0


def test_a_missing_horovod_is_refused(tmp_path, monkeypatch, capsys):
    script = tmp_path / "script.py"
    script.write_text("")
    monkeypatch.setattr(launch, "installed", lambda: False)
    assert main(["--prove", str(script)]) == 2
    assert "Horovod is not installed here: record the script on a machine that has it" in capsys.readouterr().err
    monkeypatch.setattr(launch, "installed", lambda: True)
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--prove", str(script)]) == 2
    assert "neither horovodrun nor mpirun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_text("hello\n"), "is not a record"),
        (lambda path: path.write_text('{"format": '), "has no complete line: its disk is full"),
        (lambda path: path.write_text("[]\n"), "is not a record"),
        (lambda path: path.write_text('{"format": 2}\n'), "has a format that this version cannot read"),
        (lambda path: path.write_text(path.read_text().replace('"sums"', '"other"')), "is not a record"),
        (lambda path: path.write_text(path.read_text().replace('"kind": "step"', '"kind": "leap"')), "is not a record"),
        (lambda path: path.unlink(), "lacks the record of rank 1"),
        (lambda path: path.write_text(path.read_text().replace('"seed": null', '"seed": "x"')), "is not a record"),
        (lambda path: path.write_text(path.with_name("rank-0.jsonl").read_text()), "by rank 0 of 2, instead of rank 1 of"),
        (lambda path: path.with_name("rank-2.jsonl").write_text(path.read_text()), "mixes several runs"),
    ],
)
def test_a_damaged_record_is_refused(damage, message, record):
    damage(record / "rank-1.jsonl")
    with pytest.raises(UserError, match=message):
        read_record(record)


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ({"reason": "error", "status": 1, "error": "ValueError: no"}, f"rank 1 failed after step {STEPS}: ValueError: no;"),
        ({"reason": "exit", "status": 3}, f"rank 1 failed after step {STEPS}: exit status 3;"),
        (None, f"rank 1 was killed after step {STEPS}, or its file is cut off"),
    ],
)
def test_the_record_of_a_script_that_failed_is_refused(ending, message, record, tmp_path, capsys):
    path = record / "rank-1.jsonl"
    *lines, end = path.read_text().splitlines()
    lines += [] if ending is None else [json.dumps({**json.loads(end), **ending})]
    path.write_text("\n".join(lines) + "\n")
    script = tmp_path / "script.py"
    script.write_text("")
    assert main(["--prove", "--against", str(record), str(script)]) == 2
    assert message in capsys.readouterr().err


def test_the_rank_that_caused_the_failure_is_named(record):
    (record / "log").write_text("lost\n")
    peer = {"reason": "error", "status": 1, "error": "horovod.HorovodInternalError: Horovod has been shut down"}
    own = {**peer, "error": "ValueError: no"}
    for last, named in [(own, "on rank 1, after"), (None, "rank 1, after"), (peer, "on rank 0")]:
        for rank, ending in enumerate([peer, last]):
            path = record / f"rank-{rank}.jsonl"
            lines = [line for line in path.read_text().splitlines() if '"kind": "end"' not in line]
            end = {"memory": 1, "gpu_memory": 0, "defects": [], "kind": "end"}
            lines += [] if ending is None else [json.dumps({**end, **ending})]
            path.write_text("\n".join(lines) + "\n")
        with pytest.raises(RunError, match=named):
            launch._check(read_record(record), "Horovod", 1, None, record / "log")


def test_the_order_of_the_final_tensors_in_a_record_does_not_matter(record):
    before = read_record(record)
    for path in record.glob("rank-*.jsonl"):
        *steps, state, end = map(json.loads, path.read_text().splitlines())
        state["tensors"].reverse()
        path.write_text("".join(json.dumps(line) + "\n" for line in (*steps, state, end)))
    assert [rank.state for rank in read_record(record).ranks] == [rank.state for rank in before.ranks]


def test_an_unfinished_line_of_a_killed_process_is_ignored(record):
    path = record / "rank-1.jsonl"
    path.write_text(path.read_text()[:-20])
    run = read_record(record)
    assert run.ranks[1].end is None
    (record / "log").write_text("[1]<stderr>:lost\n-----\n")
    with pytest.raises(
        RunError,
        match=r"^dualtrain: rank 1, after step 6, was killed, or called os\._exit \(exit .* launcher: 1\): lost$",
    ):
        launch._check(run, "dualtrain", 1, None, record / "log")
    with pytest.raises(RunError, match=r"took no step within 5 s"):
        launch._check(run, "dualtrain", 1, 5.0, record / "log")
    run.ranks[0].end = None
    with pytest.raises(RunError, match=r"^dualtrain: ranks 0, 1, after step 6, were killed, or called"):
        launch._check(run, "dualtrain", 1, None, record / "log")


SLEEPING = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(__file__).with_name("handled").touch(), sys.exit(0)))
subprocess.Popen(["sleep", "60"], start_new_session=True)
time.sleep(60)
"""


def test_all_processes_of_a_run_without_steps_are_ended(tmp_path, monkeypatch):
    script = tmp_path / "sleeping.py"
    script.write_text(SLEEPING)
    monkeypatch.setattr(launch, "_torchrun", lambda nproc, program, folder: [launch.sys.executable, str(script)])
    with workspace() as space:
        with pytest.raises(RunError, match=r"^dualtrain: no rank started within 1 s"):
            Job((str(script),), 2, 5, None, timeout=1.0, space=space).record("dualtrain", "record")
        assert not marked(space.mark)
    assert not (tmp_path / "handled").exists()  # SIGKILL was sent, not SIGTERM, which the script handles


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("[1,0]<stderr>:ValueError[1,0]<stderr>:: [1,0]<stderr>:no\n[1,1]<stdout>:later\n", "ValueError: no"),
        ("[0]<stderr>:RuntimeError: Horovod has been shut down. This\n[1]<stderr>:KeyError: 'x'\n", "KeyError: 'x'"),
        ("[1]<stdout>: the end\n---\n[0]<stderr>:HorovodInternalError: Horovod has been shut down\n", "the end"),
        ("W0 [3] x\n[3] y\n", "y"),
    ],
    ids=["tags in a line", "errors of peers", "no error", "rank only"],
)
def test_the_output_line_that_explains_a_failure_is_shown_without_the_launchers_tags(output, shown, tmp_path):
    (tmp_path / "log").write_text(output)
    assert launch._error_line(tmp_path / "log") == f": {shown}"


def test_a_failed_run_whose_processes_hang_at_exit_is_ended_before_its_timeout(record, tmp_path, monkeypatch):
    """Write a record with an error on rank 1, then sleep, as ranks of Horovod that hang at exit do."""
    path, script = record / "rank-1.jsonl", tmp_path / "failing.py"
    *lines, end = path.read_text().splitlines()
    lines.append(json.dumps({**json.loads(end), "reason": "error", "status": 1, "error": "ValueError: no"}))
    path.write_text("\n".join(lines) + "\n")
    copy = f"shutil.copytree({str(record)!r}, sys.argv[1], dirs_exist_ok=True)"
    script.write_text(f"import shutil, sys, time\n{copy}\ntime.sleep(20)\nopen({str(tmp_path / 'end')!r}, 'w')\n")
    monkeypatch.setattr(launch, "_torchrun", lambda nproc, program, folder: [sys.executable, str(script), str(folder)])
    monkeypatch.setattr(launch, "_EXIT_SECONDS", 0.1)
    with workspace() as space:
        with pytest.raises(RunError, match=r"the script failed on rank 1, .*: ValueError: no$"):
            Job((str(script),), 2, STEPS, None, timeout=50.0, space=space).record("dualtrain", "record")
        assert not marked(space.mark)
    assert not (tmp_path / "end").exists()


def test_a_run_that_has_ended_does_not_wait_for_processes_that_the_script_leaves(record, tmp_path, monkeypatch):
    """Write a complete record, then sleep, as horovodrun does while a child of the script has its output open."""
    script = tmp_path / "ended.py"
    copy = f"shutil.copytree({str(record)!r}, sys.argv[1], dirs_exist_ok=True)"
    script.write_text(f"import shutil, sys, time\n{copy}\ntime.sleep(20)\nopen({str(tmp_path / 'end')!r}, 'w')\n")
    monkeypatch.setattr(launch, "_torchrun", lambda nproc, program, folder: [sys.executable, str(script), str(folder)])
    monkeypatch.setattr(launch, "_EXIT_SECONDS", 0.1)
    with workspace() as space:
        run = Job((str(script),), 2, STEPS, None, timeout=50.0, space=space).record("dualtrain", "record")
        assert run.steps == STEPS
        assert not marked(space.mark)
    assert not (tmp_path / "end").exists()


def test_a_full_disk_for_temporary_files_is_reported_with_the_cure():
    """The disk is full when the folder of a run is made. An error of another kind is raised unchanged."""
    with (
        pytest.raises(
            UserError, match=r"^cannot write to '.*' \(No space left on device\): free space there, or set TMPDIR"
        ),
        workspace() as space,
    ):
        raise OSError(errno.ENOSPC, "No space left on device", str(space.folder / "run-1-Horovod"))
    assert not space.folder.exists()
    with pytest.raises(FileNotFoundError), workspace():
        Path("/no/such/file").read_text()


def wait_until_signals_are_ignored(pid):
    deadline = time.monotonic() + 60
    mask = 1 << signal.SIGTERM - 1
    while not int(re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16) & mask:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def hold_workspace(connection):
    with workspace() as space:
        sleeping = ["sleep", "60"]
        child = subprocess.Popen(sleeping, env={**os.environ, **space.variables}, start_new_session=True)
        while marked(space.mark) != [child.pid]:  # during exec, /proc shows no environment for a moment
            time.sleep(0.01)
        connection.send((space, child.pid))
        connection.recv()
    connection.send("closed")
    connection.recv()


# kills_holder: whether the process that runs ``with workspace()`` is killed.
# cleaner_signal: the signal to the process that removes the folders; None: no signal.
@pytest.mark.parametrize(
    ("kills_holder", "cleaner_signal"), [(False, None), (True, None), (True, signal.SIGTERM), (False, signal.SIGKILL)]
)
def test_processes_and_folders_of_the_runs_are_removed(kills_holder, cleaner_signal, tmp_path, monkeypatch):
    """The runs' processes and folders disappear when ``with workspace()`` ends or the process that runs it is killed.

    Batch systems send SIGTERM to all processes of a job, including the process that removes the folders.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    fork = multiprocessing.get_context("fork")
    ours, other = fork.Pipe()
    holder = fork.Process(target=hold_workspace, args=(other,))
    holder.start()
    space, pid = ours.recv()
    folders = [folder for folder in (space.folder, space.shared) if folder is not None]
    assert (marked(space.mark), [folder.is_dir() for folder in folders]) == ([pid], [True] * len(folders))
    if cleaner_signal is not None:
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        [cleaner] = [int(child) for child in children if int(child) != pid]
        if cleaner_signal == signal.SIGTERM:
            wait_until_signals_are_ignored(cleaner)
        os.kill(cleaner, cleaner_signal)
    if kills_holder:
        holder.kill()
    else:
        ours.send("close")
        assert ours.recv() == "closed"
    deadline = time.monotonic() + (60 if kills_holder else 0)
    while (
        left := [marked(space.mark), *(folder for folder in folders if folder.exists())]
    ) and time.monotonic() < deadline:
        if left == [[]]:
            break
        time.sleep(0.05)
    assert left == [[]]
    holder.kill()
    holder.join()


@pytest.mark.parametrize(
    ("number", "status", "words"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")]
)
def test_a_signal_prints_one_line_and_ends_the_runs(number, status, words, capsys):
    """Send a second signal while the first one is handled: the runs must still be ended."""
    ended = []
    before = signal.getsignal(signal.SIGTERM)  # coverage may have set a handler

    def run():
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        finally:
            os.kill(os.getpid(), number)
            ended.append("the runs")

    with pytest.raises(SystemExit) as seen, ending_by_signals("nothing was compared"):
        run()
    assert (seen.value.code, ended) == (status, ["the runs"])
    assert capsys.readouterr().err == f"dualtrain: error: {words}; nothing was compared\n"
    assert signal.getsignal(signal.SIGTERM) == before
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with ending_by_signals("nothing was compared"):
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    signal.signal(signal.SIGHUP, earlier)


def test_an_interrupt_during_the_imports_prints_one_line(monkeypatch, capsys):
    class Interrupted(types.ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "dualtrain.horovodize.prove.command", Interrupted("command"))
    assert main(["--prove", "train.py"]) == 130
    assert capsys.readouterr().err == "dualtrain: error: interrupted\n"


LONG = 50
MET = [("it takes a step", "train.py", 12)]
RECORDS = {}  # cache of ``collected``: (key of ``CHANGES``, number of steps) → record


def shift(models, optimizers):
    with torch.no_grad():
        models[0].bias[0] += 0.5


def nothing(models, optimizers):
    pass


#: Arguments of ``slowly``: the step before which the function is called, and the function.
CHANGES = {
    "": (1, nothing),
    "start": (1, nudge),
    "other start": (1, shift),
    "step 3": (3, nudge),
    "step 30": (30, nudge),
    "step 40": (40, nudge),
    "step 50": (50, nudge),
    "fewer steps": (1, nothing),
}


def slowly(changed_step, act):
    """Return a change that calls ``act`` on rank 0 before one step.

    It also sets the momentum to 0, and a low learning rate, because with a higher one 50 steps would diverge.
    """

    def change(rank, step, models, optimizers):
        if step == 1:
            for optimizer in optimizers:
                optimizer.param_groups[0].update(lr=1e-5, momentum=0.0)
        at(changed_step, 0, act)(rank, step, models, optimizers)

    return change


@dataclass
class Script:
    """Simulated script. The first four attributes name the change in its runs: a key of ``CHANGES``, or "fails"."""

    horovod: str = ""
    compat: str = ""  # the run with dualtrain that reproduces Horovod's defects
    plain: str = ""  # the run with dualtrain without these defects
    again: str | None = None  # the later runs on Horovod; None: the change of the first run
    first_defect: int = 0  # the first step with a reproduced defect, or 0
    recorded: bool = False  # true if a record replaces the runs on Horovod


@pytest.fixture
def collected(simulated, monkeypatch):
    """Return a function that returns the evidence of simulated runs, and the kind and number of steps of each run."""

    def record_of(name, steps):
        if (name, steps) not in RECORDS:
            script_steps = min(steps, 30) if name == "fewer steps" else steps
            RECORDS[name, steps] = simulated(slowly(*CHANGES[name]), ranks=1, steps=steps, script_steps=script_steps)
        return RECORDS[name, steps]

    def collected(script, rounds=3):
        runs = []

        def run(job, side, title, compat=False):
            kind = "Horovod" if side == "Horovod" else "compat" if compat else "plain"
            name = {"Horovod": script.horovod, "compat": script.compat, "plain": script.plain}[kind]
            if script.again is not None and kind == "Horovod" and runs:
                name = script.again
            runs.append((kind, job.steps))
            if name == "fails":
                raise RunError(f"{side}: the script failed")
            [rank] = record_of(name, job.steps).ranks
            if kind == "compat" and script.first_defect:
                rank = replace(rank, end=rank.end._replace(defects=MET, first_defect=script.first_defect))
            return RunRecord([rank], 0.0)

        monkeypatch.setattr(collect, "run", run)
        with workspace() as space:
            job = Job(("x.py",), 1, LONG, None, 5.0, space)
            evidence = collect.collect(job, rounds, record_of(script.horovod, LONG) if script.recorded else None)
        return evidence, runs

    return collected


#: Runs as pairs of a kind and a number of steps. Each proof starts with the runs FIRST. If there is a record, it
#: replaces the run on Horovod. The runs SPEED measure the speed.
#: A run of 50 steps summarizes its weights after steps 1, 2, 5, 10, 20, 37 and 50. Most shorter runs end at one of these.
FIRST = [("Horovod", 50), ("compat", 50)]
SPEED = [("plain", 8), ("Horovod", 8), ("Horovod", 8), ("plain", 8)]
SAME, DEFECTS = "same bits for 50 steps", "same bits for 50 steps, once these defects of Horovod are reproduced: it takes"
ONCE = "once these defects of Horovod are reproduced (it takes a step)"


@pytest.mark.parametrize(
    ("script", "rounds", "later_runs", "verdict"),
    [
        (Script(), 3, SPEED, SAME),
        (Script(), 1, [], SAME),
        (Script("start", "start", "", first_defect=1), 3, [("plain", 10), *SPEED], DEFECTS),
        (Script("start", "start", "", first_defect=1), 1, [("plain", 37)], DEFECTS),
        (Script("step 30", "step 30", "", first_defect=30), 3, [("plain", 37), ("plain", 5), ("Horovod", 5)], DEFECTS),
        (Script(compat="step 3", plain="step 3"), 3, [("Horovod", 37), ("plain", 5)], "differs from step 3 on in 'weight'"),
        (Script(compat="step 3", plain="step 3"), 1, [("Horovod", 37)], "differs from step 3 on in 'weight'"),
        (
            Script(compat="step 40", plain="step 40"),
            3,
            [("Horovod", 41), ("plain", 8)],
            "differs from step 40 on in 'weight'",
        ),
        (
            Script("", "step 3", "start", first_defect=1),
            3,
            [("plain", 5), ("Horovod", 37), ("plain", 5)],
            f"differs from step 3 on in 'weight' by 1e-04 relative at step 5, {ONCE}",
        ),
        (
            Script("", "start", "start", again="other start"),
            3,
            [("Horovod", 37), ("plain", 5)],
            "not repeatable, so nothing",
        ),
        (
            Script("step 3", "start", "other start", again="", first_defect=1),
            3,
            [("plain", 5), ("Horovod", 37), ("plain", 5)],
            f"within twice the script's own spread, {ONCE}, ",
        ),
        (
            Script(compat="fewer steps", plain="fewer steps"),
            3,
            [],
            "ends differently: optimizer 0 of rank 0 takes 50 steps on Horovod and 30 with dualtrain",
        ),
        (Script(compat="fails"), 3, [("plain", 50), *SPEED], SAME),
        (
            Script(compat="fails", plain="fails"),
            3,
            [("plain", 50)],
            "fails with dualtrain, but not on Horovod: dualtrain: ",
        ),
        (Script(recorded=True), 3, [("plain", 8), ("plain", 8)], SAME),
        (Script("start", "start", "", first_defect=1, recorded=True), 3, [("plain", 50), *[("plain", 8)] * 2], DEFECTS),
        (Script(compat="step 3", plain="step 3", recorded=True), 3, [("plain", 50)], "differs from step 3 on in 'weight'"),
        (
            Script("", "step 3", "start", first_defect=1, recorded=True),
            3,
            [("plain", 50), ("plain", 37)],
            f"differs from step 3 on in 'weight' by 1e-04 relative at step 5, {ONCE}",
        ),
    ],
)
def test_all_runs_together_take_fewer_than_three_times_the_steps_of_one_run(script, rounds, later_runs, verdict, collected):
    evidence, runs = collected(script, rounds)
    assert runs == FIRST[script.recorded :] + later_runs
    assert sum(steps for kind, steps in runs if (kind, script.compat) != ("compat", "fails")) < 3 * LONG
    assert verdict_of(evidence, []).line.startswith(verdict)


@pytest.mark.parametrize(
    ("script", "rounds", "later_runs", "verdict"),
    [
        # The weights differ in the last step: only a full run shows whether Horovod's runs agree.
        (Script(compat="step 50", plain="step 50"), 3, [("Horovod", 50)], "differs from step 50"),
        # Defects were reproduced. Only a full run without them shows that they change nothing (first case), or that
        # this version of Horovod lacks them (second case).
        (Script(first_defect=1), 3, [("plain", 10), ("plain", 50)], SAME),
        (Script(compat="start", first_defect=1), 3, [("plain", 5), ("plain", 50)], SAME),
        # Rounds that the user adds are full runs, if the sides differ.
        (
            Script(compat="step 3", plain="step 3"),
            4,
            [("Horovod", 37), ("plain", 5), ("plain", 50), ("Horovod", 50)],
            "differs from step 3",
        ),
    ],
)
def test_full_runs_are_added_if_short_runs_would_prove_less(script, rounds, later_runs, verdict, collected):
    evidence, runs = collected(script, rounds)
    assert runs == FIRST + later_runs
    assert verdict_of(evidence, []).line.startswith(verdict)
    assert evidence.compat is None


def test_the_verdict_shows_the_speed_and_how_far_horovods_defects_change_the_weights(collected):
    evidence, _ = collected(Script("step 30", "step 30", "", first_defect=30))
    [place, without] = verdict_of(evidence, []).details
    assert place == "train.py:12: it takes a step"
    assert "the weights differ from step 30 on, and by " in without
    assert without.endswith(" relative after step 37")
    for run in (evidence.horovod[0], evidence.dualtrain[0]):
        # To compute the speeds, only steps that both runs took are counted (37), without the first fifth of them (7).
        run.ranks[0].seconds = [(number, 0.1 if step < 37 else 9.0) for step in range(50) for number in (0, 1)]
    evidence.dualtrain[0].ranks[0].seconds = [(number, 0.05) for number in (0, 1)] * 37
    del evidence.horovod[1:]
    assert verdict_of(evidence, []).line.endswith("it takes a step, 2.00× Horovod's speed")


def test_the_verdict_notes_that_repeatability_of_dualtrain_was_not_checked(collected, capsys):
    evidence, _ = collected(Script(compat="step 40", plain="step 40"))
    assert "not checked: whether dualtrain's own runs agree up to step 40" in verdict_of(evidence, []).details[-2]
    evidence, _ = collected(Script(compat="fails", plain="step 3"))
    assert "with the defects of Horovod: dualtrain: the script failed" in capsys.readouterr().err
    assert (evidence.compat, verdict_of(evidence, []).status) == (None, 1)
    assert not any("not checked" in line for line in verdict_of(evidence, []).details)


def test_tensors_that_only_one_side_has_are_noted(simulated):
    one, other = simulated(), simulated()
    state = other.ranks[1].state
    number = [each.name for each in state].index("average")
    state[number] = state[number]._replace(name="mean")
    [note] = verdict_of(Evidence([one], [other]), []).details
    assert note.endswith("on the two sides: only on Horovod: 'average'; only with dualtrain: 'mean'")
    del state[number]
    assert (
        verdict_of(Evidence([one], [other]), [])
        .details[0]
        .endswith("only on Horovod: 'average'; only with dualtrain: none")
    )
