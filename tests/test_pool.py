"""The test infrastructure: worlds of threads and processes, the order of files under xdist, and what a failure prints."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from dualtrain import ReduceOp
from dualtrain.bench import meet
from tests.conftest import pytest_terminal_summary
from tests.distribution import ByFile
from tests.pool import Pool, RankError, free_port, in_turn
from tests.threads import run_threads


def rank_and_size(backend, text):
    return text, backend.rank, backend.size


def fails_on_last_rank(backend, what):
    if backend.rank == backend.size - 1:
        raise KeyError(f"lost {what}")
    backend.barrier()


def unmatched_primitives(backend):
    backend.start_allreduce(torch.zeros(2 + backend.rank), ReduceOp.SUM, "x").wait()


def await_end(pids, seconds):
    """Wait up to ``seconds`` until none of these processes runs; return whether all have ended."""
    deadline = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_results_come_in_rank_order(spmd):
    assert spmd(rank_and_size, "text") == [("text", rank, spmd.size) for rank in range(spmd.size)]


def test_a_failure_shows_the_rank_and_its_traceback_and_the_pool_stays_usable():
    pool = Pool(2)
    try:
        pool.connect("torch", 2)
        with pytest.raises(RankError, match=r"(?s)rank 1 of 2.*fails_on_last_rank.*KeyError: 'lost key'.*case \('key',\)"):
            pool.run(in_turn, fails_on_last_rank, [("key",), ("door",)])
        pool.connect("torch", 2)
        assert pool.run(rank_and_size, "again") == [("again", rank, 2) for rank in range(2)]
        pids = pool.pids
    finally:
        pool.close()
    assert await_end(pids, 0)


def test_workers_end_with_their_parent():
    pool = Pool(2)
    try:
        pool.connect("torch", 2)
        pids = pool.pids
        for worker in pool._workers:
            worker.connection.close()  # the system also does this when the parent exits
        assert await_end(pids, 60)
    finally:
        pool.close()


def test_no_world_gets_the_port_of_an_earlier_world(monkeypatch):
    ports = iter([1, 1, 2])
    monkeypatch.setattr(meet, "free_port", lambda: next(ports))
    assert [free_port(), free_port()] == [1, 2]


def test_local_functions_are_refused(spmd):
    with pytest.raises(TypeError, match="top of a module"):
        spmd(lambda backend: None)


def test_run_threads_raises_the_error_of_the_failed_rank_and_not_the_errors_that_it_causes():
    with pytest.raises(KeyError, match="lost key"):
        run_threads(3, fails_on_last_rank, "key")


def test_run_threads_raises_if_the_ranks_give_a_primitive_different_shapes():
    with pytest.raises(AssertionError, match="another rank"):
        run_threads(2, unmatched_primitives)


def test_xdist_starts_files_in_collection_order():
    """``ByFile`` keeps the order of the tests. xdist alone would start the file with most tests first."""
    config = SimpleNamespace(option=SimpleNamespace(loadscopereorder=True), getvalue=lambda _: ["popen", "popen"])
    names = ["tests/a.py::test_a@processes", *(f"tests/{file}.py::test_{n}" for file in "lm" for n in range(3))]
    scheduler = ByFile(config)
    nodes = [Mock(shutting_down=False) for _ in range(2)]
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, names)
    scheduler.schedule()
    sent = [[each.args[0] for each in node.send_runtest_some.call_args_list] for node in nodes]
    assert sent == [[[0], [4, 5, 6]], [[1, 2, 3]]]


def test_after_a_failure_the_command_that_repeats_the_test_is_printed():
    lines = []
    names = ["tests/a.py::test_it[a b@c]", "tests/a.py::test_it[torch-2]@processes"]  # xdist appends the group
    failed = {"failed": [SimpleNamespace(nodeid=name) for name in names]}
    reporter = SimpleNamespace(getreports=lambda kind: failed.get(kind, []), section=lines.append, line=lines.append)
    pytest_terminal_summary(reporter)
    command = "bash launch/test.sh"
    assert lines[1:] == [f"{command} 'tests/a.py::test_it[a b@c]'", f"{command} 'tests/a.py::test_it[torch-2]'"]
