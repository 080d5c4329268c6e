"""dualtrain/hvd/README.md#waits-shutdown-elastic: stall reports, shutdown, a second ``init``, and the timeline."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import dualtrain
from dualtrain.hvd.exceptions import HorovodInternalError
from dualtrain.hvd.rejoin import Rejoin
from dualtrain.hvd.timeline import Timeline
from dualtrain.launchers import World
from tests.forked import in_child, run_ranks, wait_until
from tests.hvd.worlds import OURS, OURS_2, OURS_3, library, ours
from tests.pool import ROOT, free_port
from tests.short_waits import short_waits


class Lines(logging.Handler):
    """Handler that records the messages of the logger ``dualtrain.hvd``."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("dualtrain.hvd").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("dualtrain.hvd").removeHandler(self)


def optimizer_of(hvd):
    p = nn.Parameter(torch.zeros(2))
    return p, hvd.DistributedOptimizer(torch.optim.SGD([p], 1.0), [("weight", p)], op=hvd.Sum)


def slow(backend):
    with Lines() as lines, library(backend, HOROVOD_STALL_CHECK_TIME_SECONDS="0.3") as hvd:
        me, size = hvd.rank(), hvd.size()
        p, optimizer = optimizer_of(hvd)
        hvd.barrier()
        if me == 1:
            time.sleep(1.0)
        assert hvd.allreduce(torch.ones(1), name="loss", op=hvd.Sum).item() == size
        p.sum().backward()
        optimizer.step()  # opens the channel for this optimizer's gradients
        optimizer.zero_grad()
        if me == 0:
            time.sleep(2.5)
        p.sum().backward()
        optimizer.step()
        hvd.barrier()
        assert p.tolist() == [-2.0 * size] * 2
        return lines.texts


@OURS_3
def test_long_waits_are_reported_on_every_rank(real):
    for texts in real(slow):
        assert any("allreduce.loss: ranks 0, 2 waited" in text and text.endswith("for rank 1") for text in texts)
        assert any("gradients.weight" in text and "for rank 0" in text for text in texts), texts


def too_slow(backend, gradients):
    env = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0.4", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    with short_waits(backend, 0.2), library(backend, **env) as hvd:
        p, optimizer = optimizer_of(hvd)
        if gradients:
            p.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if hvd.rank() == 1:
            # The other ranks wait too long, which shuts the world down before this rank makes its call.
            assert wait_until(lambda: hvd.mpi_ops._basics.engine().down is not None)
            call = lambda: hvd.allreduce(torch.ones(1))  # noqa: E731
        else:
            call = optimizer.step if gradients else lambda: hvd.allreduce(torch.ones(1), name="loss")
            if gradients:
                p.sum().backward()  # backward must not wait
        with pytest.raises(hvd.mpi_ops.HorovodInternalError, match="STALL_SHUTDOWN") as info:
            call()
        assert ("gradients" if gradients else "allreduce.loss") in str(info.value)
        assert "for rank 1" in str(info.value)
        with pytest.raises(hvd.mpi_ops.HorovodInternalError):
            hvd.barrier()
    if not gradients:
        with library(backend) as hvd:
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@pytest.mark.parametrize("gradients", [False, True], ids=["call", "gradients"])
@OURS_3
def test_a_wait_longer_than_the_limit_shuts_down_the_world(real, gradients):
    real(too_slow, gradients)
    if gradients:
        real.leave()  # leave the world, because one of its exchanges was interrupted


def one_shuts_down(backend):
    for round_ in range(2):
        with library(backend) as hvd:
            me, size = hvd.rank(), hvd.size()
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
            if me == 1:
                hvd.shutdown()
                assert not hvd.is_initialized()
                hvd.shutdown()  # a second call does nothing
                continue
            with pytest.raises(hvd.mpi_ops.HorovodInternalError, match="rank 1 has shut"):
                hvd.allreduce(torch.ones(1), name=f"alone {round_}")
            with pytest.raises(hvd.mpi_ops.HorovodInternalError):
                hvd.barrier()
    with library(backend) as hvd:
        assert hvd.allgather(torch.ones(1)).tolist() == [1] * backend.size


@OURS
def test_calls_fail_after_another_rank_shuts_down_and_a_new_init_works(real):
    real(one_shuts_down)


def forks_a_child(backend):
    with library(backend) as hvd:
        if hvd.rank() == 1:
            assert in_child(hvd.shutdown) == 0
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@OURS_2
def test_shutdown_in_a_forked_child_does_not_end_the_world(real):
    real(forks_a_child)


def elastic(backend):
    hvd = ours()
    hvd.init(comm=backend)
    failures, resets = [], []
    with short_waits(backend, 0.2), mock.patch.object(hvd.elastic, "init", partial(hvd.init, comm=backend)):
        torch.manual_seed(hvd.rank())
        model = nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model.named_parameters()
        )
        state = hvd.elastic.TorchState(model, optimizer, batch=0, seen=[])
        state.register_reset_callbacks([lambda: resets.append(state.batch)])

        @hvd.elastic.run
        def train(state):
            while state.batch < 6:
                if state.batch == 4 and not failures:
                    failures.append(list(state.seen))
                    if hvd.rank() == 1:
                        raise hvd.mpi_ops.HorovodInternalError("by hand")
                optimizer.zero_grad()
                model(torch.full((1, 2), hvd.rank() + 1.0)).sum().backward()
                optimizer.step()
                state.seen.append(state.batch)
                state.batch += 1
                if state.batch % 3 == 0:
                    state.commit()
            return state.seen

        seen = train(state)
        weights = hvd.allgather(model.weight.detach())
    hvd.shutdown()
    assert failures == [[0, 1, 2, 3]]
    assert resets == [3]
    assert seen == [0, 1, 2, 3, 4, 5]
    assert (weights == weights[0]).all()
    return model.weight.tolist()


@OURS
def test_elastic_training_continues_after_a_failure(real):
    results = real(elastic)
    assert results == results[:1] * real.size
    real.leave()  # one of the world's exchanges was interrupted


def test_elastic_training_does_not_wait_for_a_failed_rank():
    hvd = ours()
    with (
        dualtrain.connect("local", world=World(0, 1, 0, 1, launcher="none")) as backend,
        mock.patch.object(hvd.elastic, "init", side_effect=AssertionError("waits for the failed rank")),
    ):
        hvd.init(comm=backend)
        state = hvd.elastic.TorchState(batch=0)

        @hvd.elastic.run
        def train(state):
            state.batch = 1
            backend.watch.note(asdict(dualtrain.PeerFailure(1, "died")))
            hvd.barrier()

        with pytest.raises(hvd.mpi_ops.HorovodInternalError, match=r"rank 1 died\nelastic.run needs all ranks: restart"):
            train(state)
        assert state.batch == 0  # the last commit is restored before the error is raised
        assert not hvd.is_initialized()


# Program in which one rank returns from ``train`` early, and its process ends normally.
RETURNING = """
import sys
import torch
import dualtrain.hvd as hvd
hvd.init()

@hvd.elastic.run
def train(state):
    while hvd.rank() != int(sys.argv[1]) or state.batch < 2:
        state.batch += 1
        hvd.allreduce(torch.ones(2), name="loss")

train(hvd.elastic.TorchState(batch=0))
"""


@pytest.mark.parametrize("early", [0, 1])
def test_elastic_training_does_not_wait_for_a_rank_that_has_ended_normally(tmp_path, early):
    ends = run_ranks(3, ("-c", RETURNING, str(early)), tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert [end.returncode for end in ends] == [int(rank != early) for rank in range(3)]
    for end in ends[:early] + ends[early + 1 :]:
        cause = f"rank {early} has ended, so it cannot join again|the process that serves the job's store has ended .*"
        assert re.search(rf"HorovodInternalError: ({cause})\nelastic.run needs all ranks: restart the job", end.stderr)


def test_elastic_training_waits_until_all_ranks_join_again():
    store = torch.distributed.HashStore()
    first, second = (Rejoin(mock.Mock(store=store, rank=rank, size=2, timeout=0.1)) for rank in range(2))
    first.announce()
    with pytest.raises(HorovodInternalError, match=r"rank 1 did not join again within 0\.1 s\nelastic.run"):
        first.await_others()
    second.announce()
    second.announce_end()  # too late: the next world has started
    first.await_others()


def traced(backend, folder):
    found = {}
    with library(backend, HOROVOD_TIMELINE=f"{folder}/env.json", HOROVOD_TIMELINE_MARK_CYCLES="1") as hvd:
        for title, mark in [("env", True), ("first", False), ("second", True)]:
            path = f"{folder}/{title}.json"
            if title != "env":
                hvd.start_timeline(path, mark_cycles=mark)
                hvd.barrier()  # no rank calls allreduce before all have started the timeline
            for i in range(2):
                hvd.allreduce(torch.ones(2), name=f"{title}.{i}", op=hvd.Sum)
            hvd.broadcast(torch.ones(2), 0, name="weights")
            hvd.barrier()
            hvd.stop_timeline()
            hvd.stop_timeline()
            hvd.barrier()  # no rank calls allreduce before all have stopped the timeline
            hvd.allreduce(torch.ones(2), name="not seen")
            if hvd.rank() == 0:
                with open(path, encoding="utf-8") as file:
                    found[title] = json.load(file)
            hvd.barrier()
    return found


@OURS_2
def test_timelines_have_horovods_events(real, tmp_path):
    found = real(traced, str(tmp_path))[0]
    for title, events in found.items():
        names = [event["name"] for event in events]
        lines = [event["args"]["name"] for event in events if event["name"] == "process_name" and "name" in event["args"]]
        assert events[0]["args"]["start_time_since_epoch_in_micros"] / 1e6 == pytest.approx(time.time(), abs=600)
        assert {f"allreduce.{title}.0", f"allreduce.{title}.1", "broadcast.weights"} <= set(lines)
        assert not any("not seen" in line for line in lines)
        assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "NEGOTIATE_BROADCAST", "BROADCAST", "0", "1"} <= set(names)
        assert ("CYCLE_START" in names) == (title != "first")
        for name in ("ALLREDUCE", "NEGOTIATE_ALLREDUCE"):
            phases = [event["ph"] for event in events if event["name"] == name]
            assert phases.count("B") == phases.count("E") == 2
        times = [event["ts"] for event in events if "ts" in event]
        assert times == sorted(times)


#: The activities of one call on its line of the timeline: (name, phase).
CALL_ACTIVITIES = [("NEGOTIATE_ALLREDUCE", "B"), ("NEGOTIATE_ALLREDUCE", "E"), ("ALLREDUCE", "B"), ("ALLREDUCE", "E")]


def lines_of(events):
    """Return a map of the name of each line to the activities on this line: (name, phase)."""
    lines = {event["args"]["name"]: event["pid"] for event in events if "name" in event.get("args", ())}
    return {
        line: [(event["name"], event["ph"]) for event in events if event["pid"] == number and event["ph"] in "BE"]
        for line, number in lines.items()
    }


def traced_in_a_set(backend, folder):
    """Make a call on a process set while the timeline is open; return the file's events on rank 0."""
    with library(backend) as hvd:
        alone = hvd.add_process_set([0])
        hvd.start_timeline(f"{folder}/set.json")
        if alone.included():
            hvd.allreduce(torch.ones(2), name="x", process_set=alone)
        hvd.stop_timeline()
        hvd.barrier()
    return json.loads(Path(folder, "set.json").read_text()) if backend.rank == 0 else None


@OURS_2
def test_a_call_on_a_process_set_has_one_line_on_the_timeline(real, tmp_path):
    lines = lines_of(real(traced_in_a_set, str(tmp_path))[0])
    assert [activities for line, activities in lines.items() if line.startswith("allreduce.x")] == [CALL_ACTIVITIES]


def traced_late(backend, folder):
    """Make a call on rank 1 before rank 0 starts the timeline; then take two optimizer steps on both ranks.

    Take one more step after the timeline has ended.
    """
    with library(backend) as hvd:
        handle = hvd.allreduce_async(torch.ones(2), name="early") if hvd.rank() else None
        time.sleep(0.3 * (1 - hvd.rank()))  # on rank 0: time for rank 1's request to arrive
        hvd.start_timeline(f"{folder}/late.json")
        hvd.synchronize(handle if handle is not None else hvd.allreduce_async(torch.ones(2), name="early"))
        model = torch.nn.Linear(2, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        hvd.barrier()
        hvd.stop_timeline()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return json.loads(Path(folder, "late.json").read_text()) if backend.rank == 0 else None


@OURS_2
def test_a_timeline_has_calls_that_began_before_it_and_a_line_per_gradient(real, tmp_path):
    events = real(traced_late, str(tmp_path))[0]
    lines = lines_of(events)
    for line, times in {"allreduce.early": 1, "allreduce.weight": 2, "allreduce.bias": 2}.items():
        assert lines[line] == CALL_ACTIVITIES * times
    names = {event["name"] for event in events if event["name"].startswith("NEGOTIATE")}
    assert names == {"NEGOTIATE_ALLREDUCE", "NEGOTIATE_CHANNEL", "NEGOTIATE_BARRIER"}


def calls_of_children(backend):
    """Make a call and a backward pass in a child of each rank. Neither may change the rank's results and gradients."""
    with library(backend) as hvd:
        p, q = (torch.nn.Parameter(torch.zeros(20_000)) for _ in "pq")
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0), [("p", p), ("q", q)], op=hvd.Sum)
        (p.sum() + q.sum()).backward()
        optimizer.step()

        def child():
            p.grad = None  # autograd would add to p.grad, which is in memory that the ranks share
            for call in (lambda: hvd.allreduce(torch.ones(2), name="x"), lambda: (100 * p.sum()).backward()):
                with pytest.raises(
                    hvd.mpi_ops.HorovodInternalError, match=f"this process was forked from rank {hvd.rank()}"
                ):
                    call()

        assert in_child(child) == 0
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="x").tolist() == [2.0] * 2
        assert p.grad.tolist() == q.grad.tolist() == [2.0] * 20_000


@OURS_2
def test_a_call_in_a_forked_child_of_a_rank_is_an_error(real):
    real(calls_of_children)


def initializes_for_cpus(backend, port):
    """Call ``init`` on a host with one GPU for two ranks, in a script that does not use the GPU."""
    hvd, rank = ours(), str(backend.rank)
    rank_variables = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
    rank_variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (
        mock.patch.dict(os.environ, rank_variables),
        mock.patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 1),
    ):
        hvd.init()
    try:
        assert (hvd.rank(), hvd.size()) == (backend.rank, 2)
        assert not torch.distributed.is_initialized()
        assert hvd.allreduce(torch.tensor([3.0 + hvd.rank()]), op=hvd.Sum).tolist() == [7.0]
        assert not torch.cuda.is_initialized()
    finally:
        hvd.shutdown()


@OURS_2
def test_init_neither_initializes_cuda_nor_makes_the_default_process_group(real):
    real(initializes_for_cpus, free_port())


def test_hvd_calls_and_keeps_the_failure_callback_of_a_backend_that_the_program_passed():
    hvd, received = ours(), []
    with dualtrain.connect("local", world=World(0, 1, 0, 1, launcher="none")) as backend:
        report = backend.watch.on_peer_failure = received.append
        hvd.init(comm=backend)
        failure = dualtrain.PeerFailure(1, "died")
        backend.watch.note(asdict(failure))
        with pytest.raises(hvd.mpi_ops.HorovodInternalError, match="rank 1 died"):
            hvd.barrier()
        hvd.shutdown()
        assert received == [failure]
        assert backend.watch.on_peer_failure is report


def test_a_failure_that_is_known_before_init_ends_the_world():
    hvd = ours()
    with dualtrain.connect("local", world=World(0, 1, 0, 1, launcher="none")) as backend:
        backend.watch.note(asdict(dualtrain.PeerFailure(1, "died")))
        hvd.init(comm=backend)
        with pytest.raises(hvd.mpi_ops.HorovodInternalError, match="rank 1 died"):
            hvd.barrier()
        hvd.shutdown()


@pytest.mark.parametrize("ranks", [[0, 1], [0, 0], [1]])
def test_init_refuses_ranks_that_do_not_exist_or_occur_twice(ranks):
    hvd = ours()
    with pytest.raises(
        ValueError, match=re.escape(f"comm={ranks}) lists a rank twice, or one that does not exist: list ranks from 0 to 0")
    ):
        hvd.init(comm=ranks)
    assert not hvd.is_initialized()


def test_a_failed_init_leaves_no_connection():
    hvd, hook = ours(), sys.excepthook
    with (
        mock.patch("dualtrain.hvd.engine.control", side_effect=OSError("no socket")),
        pytest.raises(OSError, match="no socket"),
    ):
        hvd.init()
    assert not hvd.is_initialized()
    assert sys.excepthook is hook  # a connected backend installs a hook
    hvd.init()
    hvd.shutdown()


@pytest.mark.parametrize("path", ["/dev/full", "missing/trace.json"])
def test_calls_work_although_the_timeline_cannot_be_written(path):
    hvd = ours()
    with Lines() as lines, mock.patch.dict(os.environ, {"HOROVOD_TIMELINE": path}):
        hvd.init()
        assert hvd.allreduce(torch.ones(1)).item() == 1
        hvd.start_timeline(path)
        assert hvd.allreduce(torch.ones(1)).item() == 1
        hvd.stop_timeline()
        hvd.shutdown()
    assert [f"the timeline {path} cannot be written" in text for text in lines.texts] == [True, True]


def test_an_error_when_a_timeline_is_closed_is_logged(tmp_path):
    timeline = Timeline()
    timeline.start(str(tmp_path / "trace.json"), False)
    timeline.begin("loss", "ALLREDUCE")
    file = timeline._file
    full = OSError(28, "No space left on device")
    with Lines() as lines, mock.patch.object(file, "close", side_effect=full):
        timeline.stop()
    file.close()
    assert ["cannot be written (No space left on device)" in text for text in lines.texts] == [True]


# Program in which rank 1 fails. With the argument "late", rank 0 makes its call after rank 1 has ended the world, but
# before the report on rank 1's error arrives.
RAISING = """
import sys, time
import torch
import dualtrain.hvd as hvd
from dualtrain.backends.watch import Watch
from dualtrain.hvd.basics import engine
note = Watch.note
def note_late(self, message):
    time.sleep(0.1)
    note(self, message)
hvd.init()
if sys.argv[1] == "late":
    Watch.note = note_late
hvd.barrier()
if hvd.rank() == 1:
    raise ValueError("a bug on one rank")
while sys.argv[1] == "late" and engine().down is None:
    time.sleep(0.001)
hvd.allreduce(torch.ones(2), name="loss")
"""


@pytest.mark.parametrize("timing", ["at once", "late"])
def test_an_uncaught_exception_of_a_rank_is_named_in_the_error_of_the_other_rank(tmp_path, timing):
    ends = run_ranks(2, ("-c", RAISING, timing), tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert [end.returncode for end in ends] == [1, 1]
    assert "HorovodInternalError: rank 1 stopped: ValueError: a bug on one rank" in ends[0].stderr
