"""A rank that is gone: the others hear of it, which one it was and why, within ten seconds."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest
import torch

from dualtrain import BackendError
from dualtrain.backends.lines import Line, cut_off
from dualtrain.backends.watch import Loss, Watch
from tests.conftest import require_horovod
from tests.patience import impatient
from tests.pool import Pool
from tests.test_pool import await_end
from tests.threads import run_threads

CONTRACT_SECONDS = 30.0  # half the time that a call which nobody ends would wait


@pytest.fixture
def doomed(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """A world of three processes of its own; none is left behind."""
    if request.param == "horovod":
        require_horovod()
    pool = Pool(3)
    pool.connect(request.param, pool.processes)
    pids = pool.pids
    yield pool
    pool.close()
    assert await_end(pids, 0)


def survive(backend, call):
    """Calls until it fails: the error, the seconds since the last success, and those until a second call fails."""
    success = time.monotonic()
    with pytest.raises(BackendError) as caught:  # noqa: PT012 - which of the calls fails first is open
        for _ in range(100_000):
            call()
            success = time.monotonic()
    failure = time.monotonic()
    with pytest.raises(BackendError):
        call()
    return str(caught.value), failure - success, time.monotonic() - failure


def killed_on_the_way(backend, victim):
    for _ in range(20):
        backend.allreduce(torch.ones(1000))
    if backend.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return survive(backend, lambda: backend.allreduce(torch.ones(1000)))


def aborts(backend, victim):
    backend.barrier()
    if backend.rank == victim:
        backend.abort("ValueError: boom")
        os._exit(1)
    return survive(backend, lambda: backend.allreduce(torch.ones(1000)))


KILLED = [("torch", 0), ("torch", 1), ("horovod", 1)]


@pytest.mark.parametrize(("doomed", "victim"), KILLED, indirect=["doomed"])
def test_a_killed_rank_is_named_to_the_others(doomed, victim):
    outcomes = doomed.outcomes(killed_on_the_way, victim)
    assert "exit code -9" in outcomes.pop(victim).error
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        message, first, second = outcome.value
        assert f"rank {victim} died" in message
        assert first < CONTRACT_SECONDS
        assert second < CONTRACT_SECONDS


@pytest.mark.parametrize("doomed", ["torch", "horovod"], indirect=True)
def test_the_reason_of_a_rank_that_aborts_reaches_the_others(doomed):
    victim = doomed.processes - 1
    outcomes = doomed.outcomes(aborts, victim)
    assert "exit code 1" in outcomes.pop(victim).error
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        message, first, _ = outcome.value
        assert f"rank {victim} stopped: ValueError: boom" in message
        assert first < CONTRACT_SECONDS


def fails_at_once(backend):
    if backend.rank == 1:
        backend.abort("ValueError: boom")
        return None
    return survive(backend, backend.barrier)


def test_a_rank_that_fails_at_once_is_heard():
    results = run_threads(3, fails_at_once)
    for rank, result in enumerate(results):
        assert rank == 1 or "rank 1 stopped: ValueError: boom" in result[0]


def raises_in_a_with_statement(backend):
    if backend.rank == 1:
        with pytest.raises(ValueError, match="boom"), backend:
            raise ValueError("boom")
        return None
    return survive(backend, backend.barrier)


def test_an_exception_in_a_with_statement_is_told_to_the_others():
    results = run_threads(3, raises_in_a_with_statement)
    assert results.pop(1) is None
    for message, first, _ in results:
        assert "rank 1 stopped: ValueError: boom" in message
        assert first < CONTRACT_SECONDS


def leaves_early(backend):
    if backend.rank == 0:
        return backend.close()
    with impatient(backend):  # a rank that leaves in good order gives no other reason
        return survive(backend, backend.barrier)


def test_who_waits_for_a_rank_that_has_left_is_told(typical):
    _, *results = typical(leaves_early)
    typical.leave()
    for message, first, _ in results:
        assert "rank 0 has left the job" in message
        assert first < CONTRACT_SECONDS


def misses_a_call(backend):
    """Rank 0 does not come; the others, which wait too, are not taken for missing."""
    backend.barrier()
    backend.timeout, patience = 4.0, backend.timeout
    try:
        if backend.rank == 0:
            return time.sleep(6.0)
        with pytest.raises(BackendError, match="waited 4 s for rank 0, which has not reached this operation, or hangs"):
            backend.barrier()
    finally:
        backend.timeout = patience


def test_a_wait_that_runs_out_names_the_rank_that_does_not_come(pool):
    pool.connect("torch", 3)
    pool.run(misses_a_call)
    pool.disconnect()


def waits_elsewhere(backend):
    if backend.rank == 0:
        backend.watch.report_wait("sum of 'b'")
        backend.barrier()
        backend.barrier()
        backend.watch.report_wait("sum of 'b'", ended=True)
        backend.barrier()
        return
    backend.barrier()
    assert "the other ranks, which wait too: rank 0 in sum of 'b'; make the same calls" in backend._overdue()
    backend.barrier()
    backend.barrier()
    assert "for rank 0, which" in backend._overdue()


def test_ranks_that_wait_in_different_calls_are_told_so():
    run_threads(2, waits_elsewhere)


# -- the watch by itself, over threads --------------------------------------------------------------------------------

STRANGERS = [
    b'{"rank": 1, "secret": "guessed"}\n',
    b'{"rank": 1}\n',
    b"[1, 2]\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b'{"rank": 1, "secret": "\xff"}\n',
    b"[" * 20_000 + b"\n",
    b"7\n",
    b"\n",
    b"",
]


def meet_strangers(backend):
    if backend.rank == 0:
        watch = Watch(backend, "127.0.0.1")
        assert [line.rank for line in watch._lines] == [1]
        watch.announce("farewell")
        return None
    where = backend.broadcast_object(name="watch")
    for words in STRANGERS:
        with socket.create_connection(where["at"], timeout=20) as stranger:
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            try:
                assert stranger.recv(1) == b""  # hung up on, told nothing
            except ConnectionResetError:
                pass
    line = Line(socket.create_connection(where["at"], timeout=20), rank=0)
    line.send({"rank": backend.rank, "secret": where["secret"]})
    told = line.receive()
    line.connection.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(where["at"], timeout=20)
    return told


def test_strangers_are_hung_up_on_and_the_door_is_closed_afterwards():
    _, told = run_threads(2, meet_strangers)
    assert told == [{"rank": 0, "reason": "stopped: farewell", "quiet": False}]


def fails_with_its_greeting(backend):
    if backend.rank == 0:
        watch = Watch(backend, "127.0.0.1")
        watch.settle(CONTRACT_SECONDS)
        watch.leave()
        return watch.loss
    where = backend.broadcast_object(name="watch")
    greeting = {"rank": 1, "secret": where["secret"]}
    reason = {"rank": 1, "reason": "stopped: boom", "quiet": False}
    with socket.create_connection(where["at"], timeout=20) as connection:
        connection.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in (greeting, reason)))
    return None


def test_a_rank_that_fails_with_its_greeting_is_heard():
    assert run_threads(2, fails_with_its_greeting)[0] == Loss(1, "stopped: boom")


def hears_of_waits(backend):
    """Rank 0 passes on what rank 1 waits for."""
    watch = Watch(backend, "127.0.0.1")
    if backend.rank == 1:
        watch.report_wait("a")
        watch.report_wait("b")
        watch.report_wait("a", ended=True)
    else:
        deadline = time.monotonic() + CONTRACT_SECONDS
        while watch.waiting != {1: ["b"]}:
            assert time.monotonic() < deadline, watch.waiting
            time.sleep(0.01)
    backend.barrier()
    watch.leave()


def test_what_a_rank_waits_for_reaches_all_others():
    run_threads(3, hears_of_waits)


def hear_of_losses(backend):
    watch = Watch(backend, "127.0.0.1")
    heard = []
    watch.on_loss = heard.append
    backend.barrier()
    if backend.rank == 1:
        watch.announce("ValueError: cause")
        watch.announce("once only")
        watch.leave()
    else:
        watch.settle(CONTRACT_SECONDS)
        assert heard == [watch.loss] == [Loss(1, "stopped: ValueError: cause")]
    backend.barrier()
    if backend.rank == 2:
        watch.announce("RuntimeError: consequence")
    backend.barrier()
    return watch.loss


def test_the_first_loss_is_the_one_that_is_told():
    losses = run_threads(3, hear_of_losses)
    assert losses == [Loss(1, "stopped: ValueError: cause"), None, Loss(1, "stopped: ValueError: cause")]


def leave_in_good_order(backend):
    watch = Watch(backend, "127.0.0.1")
    heard = []
    watch.on_loss = heard.append
    backend.barrier()
    if backend.rank == 1:
        watch.leave()
    else:
        deadline = time.monotonic() + CONTRACT_SECONDS
        while watch.loss is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    backend.barrier()
    assert heard == []  # nobody is alarmed
    return watch.loss


def test_leaving_in_good_order_alarms_nobody():
    quiet = Loss(1, "has left the job", quiet=True)
    assert run_threads(3, leave_in_good_order) == [quiet, None, quiet]


def test_a_world_of_one_has_nobody_to_watch():
    def alone(backend):
        watch = Watch(backend, "127.0.0.1")
        watch.announce("nobody hears")
        watch.leave()
        watch.settle(CONTRACT_SECONDS)
        return watch.loss, watch._lines

    assert run_threads(1, alone) == [(None, [])]


def test_a_line_carries_many_messages_and_pieces_of_them():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    line = Line(theirs, rank=1)
    ours.sendall(json.dumps({"a": 1}).encode() + b'\n{"b": 2}\n{"c"')
    assert line.receive() == [{"a": 1}, {"b": 2}]
    ours.sendall(b": 3}\n")
    assert line.receive() == [{"c": 3}]
    ours.close()
    with pytest.raises(ConnectionResetError, match="hung up"):
        line.receive()
    theirs.close()


@pytest.mark.parametrize(("number", "expected"), [("ETIMEDOUT", True), ("ENETUNREACH", True), ("ECONNRESET", False)])
def test_what_the_network_ends_is_told_from_what_a_process_ends(number, expected):
    assert cut_off(OSError(getattr(errno, number), "")) is expected
    assert not cut_off(ValueError("a line without an end"))
