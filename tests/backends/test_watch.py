"""Ranks that fail, leave or do not make a call: the other ranks report the rank's number and the reason.

A failure or an exit is reported without waiting for a timeout.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.pool import RemoteTraceback
from unittest import mock

import pytest
import torch

from dualtrain import BackendError
from dualtrain.backends import watch as watch_module
from dualtrain.backends.watch import Watch
from dualtrain.errors import PeerFailedError, PeerFailure
from dualtrain.rendezvous.connection import Connection, cut_off, frame
from tests.conftest import require_horovod
from tests.forked import in_child, wait_until
from tests.pool import Pool
from tests.short_waits import short_waits
from tests.test_pool import await_end
from tests.threads import run_threads

CONTRACT_SECONDS = 30.0  # longest time until a failure is reported: half of the timeout of the pool's backends


@pytest.fixture
def new_world(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Yield a world of three new processes. All of them end with the test."""
    if request.param == "horovod":
        require_horovod()
    pool = Pool(3)
    pool.connect(request.param, pool.processes)
    pids = pool.pids
    yield pool
    pool.close()
    assert await_end(pids, 0)


def call_until_failure(backend, call):
    """Repeat ``call`` until it fails; return the error's text, and how long the failed call and one more took."""
    success = time.monotonic()
    with pytest.raises(BackendError) as caught:  # noqa: PT012 - any of the calls may be the first to fail
        for _ in range(100_000):
            call()
            success = time.monotonic()
    failure = time.monotonic()
    with pytest.raises(BackendError):
        call()
    return str(caught.value), failure - success, time.monotonic() - failure


def killed_between_calls(backend, victim):
    if backend.rank == victim:
        for _ in range(20):
            backend.allreduce(torch.ones(1000))
        os.kill(os.getpid(), signal.SIGKILL)
    # The victim may be killed while this rank is still in the 20th all-reduce. So the 20th or the 21st call fails.
    return call_until_failure(backend, lambda: backend.allreduce(torch.ones(1000)))


def aborts(backend, victim):
    if backend.rank == victim:
        backend.barrier()
        backend.abort("ValueError: boom")
        os._exit(1)
    # The victim may exit while this rank is still in the first barrier. So the first or the second barrier fails.
    return call_until_failure(backend, backend.barrier)


KILLED = [("torch", 0), ("torch", 1), ("horovod", 1)]


@pytest.mark.parametrize(("new_world", "victim"), KILLED, indirect=["new_world"])
def test_the_other_ranks_name_a_killed_rank(new_world, victim):
    outcomes = new_world.outcomes(killed_between_calls, victim)
    assert "exit code -9" in outcomes.pop(victim).error
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        message, first, second = outcome.value
        assert f"rank {victim} died" in message
        assert first < CONTRACT_SECONDS
        assert second < CONTRACT_SECONDS


@pytest.mark.parametrize("new_world", ["torch", "horovod"], indirect=True)
def test_the_reason_of_a_rank_that_aborts_reaches_the_others(new_world):
    victim = new_world.processes - 1
    outcomes = new_world.outcomes(aborts, victim)
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
    return call_until_failure(backend, backend.barrier)


def test_a_rank_that_fails_at_once_is_reported():
    results = run_threads(3, fails_at_once)
    for rank, result in enumerate(results):
        assert rank == 1 or "rank 1 stopped: ValueError: boom" in result[0]


def raises_in_a_with_statement(backend):
    if backend.rank == 1:
        with pytest.raises(ValueError, match="boom"), backend:
            raise ValueError("boom")
        return None
    return call_until_failure(backend, backend.barrier)


def test_an_exception_in_a_with_statement_is_reported_to_the_others():
    results = run_threads(3, raises_in_a_with_statement)
    assert results.pop(1) is None
    for message, first, _ in results:
        assert "rank 1 stopped: ValueError: boom" in message
        assert first < CONTRACT_SECONDS


class _Multiline:
    """Functions that raise exceptions with long messages, or with several lines at the end of their tracebacks."""

    @staticmethod
    def load():
        torch.nn.Linear(2, 2).load_state_dict({"weight": torch.zeros(3, 3)})

    @staticmethod
    def chained():
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second\n  third\n\nfourth") from error

    @staticmethod
    def long():
        raise RuntimeError("x" * 1000)

    @staticmethod
    def syntax():
        compile("a =", "script.py", "exec")

    @staticmethod
    def group():
        raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])


def reported(backend):
    """Wait until another rank has failed or left, and return the report."""
    assert wait_until(lambda: backend.watch.failure is not None)
    return backend.watch.failure.describe()


def raises_with_several_lines(backend, which):
    if backend.rank == 1:
        with suppress(Exception), backend:
            getattr(_Multiline, which)()
        return None
    return reported(backend)


@pytest.mark.parametrize(
    ("which", "line"),
    [
        ("load", "RuntimeError: Error(s) in loading state_dict for Linear: Missing key(s) in state_dict: "),
        ("chained", "ValueError: second third fourth\n"),
        ("long", f"RuntimeError: {'x' * 386}…\n"),
        ("syntax", "SyntaxError: invalid syntax\n"),
        ("group", "ExceptionGroup: several (2 sub-exceptions)\n"),
    ],
    ids=["load", "chained", "long", "syntax", "group"],
)
def test_the_first_line_of_a_report_has_the_type_and_the_message_of_the_exception(which, line):
    said = run_threads(2, raises_with_several_lines, which)[0]
    assert said.startswith(f"rank 1 stopped: {line}")
    assert said.splitlines()[1].endswith("Traceback (most recent call last):")


@pytest.mark.parametrize("cause", [KeyError(1), RemoteTraceback("Traceback (most …):\n  File …\nKeyError: 1")])
def test_a_cause_without_a_traceback_is_not_the_first_line_of_a_report(cause):
    try:
        raise ValueError("no sample") from cause
    except ValueError as error:
        reason = "".join(traceback.format_exception(error))
    assert run_threads(2, aborts_with, reason)[0].startswith("rank 1 stopped: ValueError: no sample\n")


def aborts_with(backend, reason):
    if backend.rank == 1:
        return backend.abort(reason)
    return reported(backend)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("", "no reason was given"),
        (" \n", "no reason was given"),
        ("the disk is full", "the disk is full"),
        ("two\nlines", "two lines\ntwo\nlines"),
        ("sample 5 failed\nTraceback (most …):\nKeyError: 5", "sample 5 failed\nTraceback (most …):\nKeyError: 5"),
        ("a\nb\n  + Exception Group Traceback (…):", "a b\na\nb\n  + Exception Group Traceback (…):"),
    ],
)
def test_any_text_may_be_the_reason_of_an_abort(reason, said):
    assert run_threads(2, aborts_with, reason)[0] == f"rank 1 stopped: {said}"


def exits_in_a_with_statement(backend, status):
    if backend.rank == 1:
        with pytest.raises(SystemExit), backend:
            raise SystemExit(status)
        return None
    return reported(backend).splitlines()[0]


@pytest.mark.parametrize("status", [None, 0])
def test_an_exit_with_status_0_in_a_with_statement_is_not_a_failure(status):
    assert run_threads(2, exits_in_a_with_statement, status)[0] == "rank 1 has left the job"


@pytest.mark.parametrize("status", [1, "no data"])
def test_an_exit_with_another_status_in_a_with_statement_is_a_failure(status):
    assert run_threads(2, exits_in_a_with_statement, status)[0] == f"rank 1 stopped: SystemExit: {status}"


def leaves_early(backend):
    if backend.rank == 0:
        return backend.close()
    with short_waits(backend):  # don't wait for the report of a failure: a rank that just leaves sends none
        return call_until_failure(backend, backend.barrier)


def test_a_wait_for_a_rank_that_has_left_is_an_error(typical):
    _, *results = typical(leaves_early)
    typical.leave()
    for message, first, _ in results:
        assert "rank 0 has left the job" in message
        assert first < CONTRACT_SECONDS


def outsider_leaves(backend):
    """Close the backend on rank 2. Ranks 0 and 1 go on in a group of their own, in which rank 0 waits for rank 1."""
    group = backend.group([0, 1])
    if group is None:
        return backend.close()
    assert wait_until(lambda: 2 in backend.watch.left)
    if backend.rank == 1:
        time.sleep(1.5)
    return group.allreduce(torch.tensor([backend.rank]), "sum").item()


def outsider_and_member_leave(backend):
    group = backend.group([0, 1])
    if backend.rank == 2:
        return backend.close()
    assert wait_until(lambda: 2 in backend.watch.left)
    if backend.rank == 1:
        return backend.close()
    return call_until_failure(group, group.barrier)[0]


def test_a_rank_that_leaves_breaks_only_groups_to_which_it_belongs():
    assert run_threads(3, outsider_leaves) == [1, 1, None]
    said = run_threads(3, outsider_and_member_leave)[0]
    assert "cannot end on rank 0 of 2: rank 1 has left the job" in said


@pytest.mark.parametrize("name", ["torch", "shm"])
def test_a_group_still_works_after_a_rank_outside_of_it_has_left(pool, name):
    pool.connect(name, 3)
    assert pool.run(outsider_leaves) == [1, 1, None]
    pool.disconnect()


def arrives_after_its_sender_left(backend):
    if backend.rank == 1:
        return backend.close()
    assert wait_until(lambda: 1 in backend.watch.left)
    polls = iter([False, False, True])

    def arrives(seconds):
        time.sleep(seconds)
        return next(polls)

    return backend.await_bounded("the last sum", arrives)


def test_data_of_a_rank_that_has_left_may_still_arrive():
    assert run_threads(2, arrives_after_its_sender_left) == [None, None]


def breaks(seconds):
    raise ConnectionResetError


def fails_after_a_rank_left(backend):
    if backend.rank == 1:
        backend.close()
        return
    assert wait_until(lambda: 1 in backend.watch.left)
    polls = []
    with mock.patch.object(backend.watch, "wait_for_report") as waits_for_the_cause:
        for call in (breaks, breaks, polls.append):
            with pytest.raises(PeerFailedError, match="rank 1 has left the job"):
                backend.await_bounded("a sum", call)
    assert (waits_for_the_cause.call_count, len(polls)) == (1, 1)


def test_only_the_first_failed_call_waits_after_a_rank_has_left():
    run_threads(2, fails_after_a_rank_left)


def misses_a_call(backend, folder):
    """Skip the second barrier on rank 0. The other ranks' errors name only rank 0, and not each other."""
    backend.barrier()
    backend.timeout, before = 4.0, backend.timeout
    failed = [folder / str(rank) for rank in range(1, backend.size)]
    try:
        if backend.rank == 0:
            assert wait_until(lambda: all(file.exists() for file in failed), 60)
            return
        with pytest.raises(BackendError, match="waited 4 s for rank 0, which has not reached this operation, or hangs"):
            backend.barrier()
        failed[backend.rank - 1].touch()
    finally:
        backend.timeout = before


def test_a_wait_that_times_out_names_the_missing_rank(pool, tmp_path):
    pool.connect("torch", 3)
    pool.run(misses_a_call, tmp_path)
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
    backend.watch.report_wait("sum of 'a'")
    assert "the other ranks, which wait too (rank 0 in sum of 'b'); make the same calls" in backend._timeout_message()
    backend.barrier()
    backend.barrier()
    assert "for rank 0, which" in backend._timeout_message()


def test_ranks_that_wait_in_different_calls_are_named():
    run_threads(2, waits_elsewhere)


def waits_in_the_same_call(backend, local_size):
    backend.world = replace(backend.world, local_size=local_size)
    backend.watch.report_wait("sum of 'a'")
    assert wait_until(lambda: len(backend.watch.waiting) == 2, 20)
    message = backend._timeout_message()
    backend.barrier()
    return message


@pytest.mark.parametrize(("local_size", "cure"), [(1, "check the network between the ranks' hosts, and "), (2, "")])
def test_ranks_that_wait_in_the_same_call_are_told_to_check_the_network_between_hosts(local_size, cure):
    for said in run_threads(2, waits_in_the_same_call, local_size):
        assert f"in sum of 'a'); {cure}make the same calls" in said


def rank_0_hangs(backend):
    original, backend.watch = backend.watch, Watch(backend, "127.0.0.1")
    if backend.rank == 0:
        backend.watch._handle = lambda messages, reported: None
    backend.barrier()
    if backend.rank > 0:
        backend.watch.report_wait("sum of 'b'")
    backend.barrier()
    said = backend._timeout_message()
    backend.barrier()
    backend.watch.leave()
    backend.watch = original
    return said


def test_a_hanging_rank_0_is_the_only_rank_named():
    for said in run_threads(3, rank_0_hangs)[1:]:
        assert said == "waited 20 s for rank 0, which has not reached this operation, or hangs"


def test_a_library_error_names_the_ranks_that_have_not_reached_the_operation():
    failed = threading.Semaphore(0)

    def library_error(backend):
        """Simulate an error of torch or Horovod on ranks 0 and 1. Rank 2 reports nothing, like a process that hangs."""
        watch, said = backend.watch, ""
        if backend.rank < 2:
            watch.wait_for_report = lambda seconds: wait_until(lambda: watch.waiting.keys() == {0, 1})
            said = str(backend.failure("sum of 'b'", RuntimeError("it was shut down"), waited=True))
            failed.release()
        else:
            assert all(failed.acquire(timeout=CONTRACT_SECONDS) for _ in range(2))
        backend.barrier()
        return said

    first, second, _ = run_threads(3, library_error)
    said = "waited for rank 2, which has not reached this operation, or hangs (it was shut down)"
    assert (first, second) == tuple(f"sum of 'b' failed on rank {rank} of 3: {said}" for rank in (0, 1))


# -- the class Watch alone; ranks are threads ---------------------------------------------------------------------------

#: Messages that unauthenticated peers send after they have received rank 0's nonce.
UNAUTHENTICATED = [
    b'{"rank": 1, "nonce": "00", "proof": "guessed"}\n',
    b'{"rank": 1, "secret": "guessed"}\n',
    b'{"rank": 1}\n',
    b"[1, 2]\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b'{"rank": 1, "nonce": "00", "proof": "\xff"}\n',
    b'{"rank": Infinity, "nonce": "00", "proof": ""}\n',
    b"[" * 20_000 + b"\n",
    b"7\n",
    b"\n",
    b"",
]


def intrude(backend):
    if backend.rank == 0:
        watch = Watch(backend, "127.0.0.1")
        assert [one.rank for one in watch._connections] == [1]
        watch.announce("the end")
        return None
    where = backend.broadcast_object(name="watch")
    for answer in UNAUTHENTICATED:
        with socket.create_connection(where["at"], timeout=20) as intruder, intruder.makefile("rb") as received:
            assert set(json.loads(received.readline())) == {"nonce"}
            intruder.sendall(answer)
            intruder.shutdown(socket.SHUT_WR)
            try:
                assert received.read() in (b"", b'{"refused": "secret"}\n')
            except ConnectionResetError:
                pass
    connection = Connection.dial(tuple(where["at"]), backend.rank, where["secret"], 20.0)
    messages = connection.receive()
    connection.socket.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(where["at"], timeout=20)
    return messages


def test_unauthenticated_peers_are_disconnected_and_the_listening_socket_is_closed_afterwards():
    _, messages = run_threads(2, intrude)
    assert messages == [{"rank": 0, "reason": "stopped: the end", "quiet": False}]


def intrude_slowly(backend):
    if backend.rank == 0:
        Watch(backend, "127.0.0.1").leave()
        return
    where = backend.broadcast_object(name="watch")
    with socket.create_connection(where["at"], timeout=20) as intruder:

        def send_slowly():
            for _ in range(100):
                intruder.sendall(b"[")
                time.sleep(0.05)

        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
            send_slowly()
    Connection.dial(tuple(where["at"]), backend.rank, where["secret"], 20.0).socket.close()
    return


def test_a_peer_that_sends_its_first_message_slowly_does_not_delay_ranks(monkeypatch):
    monkeypatch.setattr("dualtrain.rendezvous.connection._SECONDS", 0.5)
    run_threads(2, intrude_slowly)


def cannot_listen(backend):
    with pytest.raises(BackendError, match=r"watch: rank 0 cannot listen at 192\.0\.2\.1 \(.*assign"):
        Watch(backend, "192.0.2.1")
    assert backend.allreduce(torch.ones(1), "sum").item() == backend.size


def test_an_address_where_rank_0_cannot_listen_is_an_error_on_all_ranks():
    run_threads(3, cannot_listen)


def intrude_until_the_end(backend):
    if backend.rank == 0:
        backend.timeout = 0.5
        with pytest.raises(BackendError, match=r"rank 1 did not connect to rank 0 within 0.5 s"):
            Watch(backend, "127.0.0.1")
        return
    where = backend.broadcast_object(name="watch")

    def intrude_again_and_again():
        for _ in range(20):
            with socket.create_connection(where["at"], timeout=20) as intruder, suppress(ConnectionResetError):
                while intruder.recv(100):
                    pass

    with ThreadPoolExecutor(3) as pool:
        for one in [pool.submit(intrude_again_and_again) for _ in range(3)]:
            with pytest.raises(ConnectionError):
                one.result(timeout=60)


def test_unauthenticated_peers_do_not_prolong_the_wait_for_ranks(monkeypatch):
    monkeypatch.setattr("dualtrain.rendezvous.connection._SECONDS", 0.1)
    run_threads(2, intrude_until_the_end)


class Recorder:
    """A socket that records what is sent through it."""

    def __init__(self, connected):
        self.connected, self.sent = connected, b""

    def sendall(self, data):
        self.sent += data
        self.connected.sendall(data)

    def __getattr__(self, name):
        return getattr(self.connected, name)


def record_the_handshake(backend):
    with pytest.MonkeyPatch.context() as patch:
        recorders, create = [], socket.create_connection
        if backend.rank == 1:
            patch.setattr(
                socket, "create_connection", lambda *args: recorders.append(Recorder(create(*args))) or recorders[0]
            )
            where = backend.broadcast_object(name="watch")
            Connection.dial(tuple(where["at"]), 1, where["secret"], 20.0).socket.close()
            return where["secret"].encode() in recorders[0].sent
    watch = Watch(backend, "127.0.0.1")
    return watch.leave()


def test_the_secret_is_not_sent_over_a_control_channel():
    assert run_threads(2, record_the_handshake) == [None, False]


def fails_during_the_handshake(backend, report):
    """On rank 1, send ``report`` in one ``sendall`` with this rank's only message of the handshake."""
    if backend.rank == 0:
        watch = Watch(backend, "127.0.0.1")
        watch.wait_for_report(CONTRACT_SECONDS)
        watch.leave()
        return watch.failure
    where = backend.broadcast_object(name="watch")
    with pytest.MonkeyPatch.context() as patch:
        send = Connection.send

        def send_both(connection, message):
            if "rank" not in message:  # sent by rank 0's thread, which has the same patch
                return send(connection, message)
            return connection.socket.sendall(frame(message) + frame(report))

        patch.setattr(Connection, "send", send_both)
        Connection.dial(tuple(where["at"]), 1, where["secret"], 20.0).socket.close()
    return None


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ({"rank": 1, "reason": "stopped: boom", "quiet": False}, "stopped: boom"),
        ("malformed", "died: its process ended without a report"),
    ],
)
def test_a_report_that_arrives_with_the_handshake_is_received(report, reason):
    assert run_threads(2, fails_during_the_handshake, report)[0] == PeerFailure(1, reason)


def receives_waits(backend):
    """Report the operations that rank 1 waits for. Rank 0 forwards these reports to rank 2."""
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


def test_the_operation_that_a_rank_waits_for_is_reported_to_all_others():
    run_threads(3, receives_waits)


def receive_failures(backend):
    watch = Watch(backend, "127.0.0.1")
    received = []
    watch.on_peer_failure = received.append
    backend.barrier()
    if backend.rank == 1:
        watch.announce("ValueError: cause")
        watch.announce("not sent")
        watch.leave()
    else:
        watch.wait_for_report(CONTRACT_SECONDS)
        assert received == [watch.failure] == [PeerFailure(1, "stopped: ValueError: cause")]
    backend.barrier()
    if backend.rank == 2:
        watch.announce("RuntimeError: consequence")
    backend.barrier()
    return watch.failure


def test_only_the_first_failure_is_reported():
    failures = run_threads(3, receive_failures)
    assert failures == [PeerFailure(1, "stopped: ValueError: cause"), None, PeerFailure(1, "stopped: ValueError: cause")]


def test_each_callback_is_called_once_with_a_failure_that_is_found_later_or_known_already(caplog):
    watch, calls = Watch.__new__(Watch), []
    watch.start(0, [])

    def fail(failure):
        calls.append(("fail", failure))
        raise ValueError("in the callback")

    def leave(failure):
        raise SystemExit("left in a callback")

    def removed(failure):
        calls.append(("removed", failure))

    watch.add_callback(lambda failure: calls.append(("first", failure)))
    watch.add_callback(leave)
    watch.add_callback(removed)
    watch.on_peer_failure = removed
    watch.on_peer_failure = fail
    watch.remove_callback(removed)
    watch.note(asdict(PeerFailure(2, "has left the job", quiet=True)))
    assert calls == []
    failure = PeerFailure(1, "died")
    watch.note(asdict(failure))
    watch.note(asdict(PeerFailure(2, "died as well")))
    watch.add_callback(lambda failure: calls.append(("late", failure)))
    assert calls == [("fail", failure), ("first", failure), ("late", failure)]
    assert watch.failure == failure
    assert "in the callback" in caplog.text
    assert "left in a callback" in caplog.text
    with pytest.raises(ValueError, match="in the callback"):
        watch.add_callback(fail)  # called at once, in this thread, so the error is raised here


def leave_without_failure(backend):
    watch = Watch(backend, "127.0.0.1")
    received = []
    watch.on_peer_failure = received.append
    backend.barrier()
    if backend.rank == 1:
        watch.leave()
    else:
        deadline = time.monotonic() + CONTRACT_SECONDS
        while watch.failure is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    backend.barrier()
    assert received == []
    return watch.failure


def test_leaving_without_a_failure_calls_no_callback():
    quiet = PeerFailure(1, "has left the job", quiet=True)
    assert run_threads(3, leave_without_failure) == [quiet, None, quiet]


def keeps_no_connection(watch):
    assert [connection.socket.fileno() for connection in watch._connections] == [-1]


def forks_children(backend):
    """Fork three children on rank 1, then report an error of rank 1 itself. Rank 0 returns the failure that it receives.

    One child leaves, one reports an error, and one checks that its copy of rank 1's connection is closed.
    """
    watch = Watch(backend, "127.0.0.1")
    if backend.rank == 1:
        assert in_child(watch.leave) == 0
        assert in_child(lambda: watch.announce("of the child")) == 0
        assert in_child(partial(keeps_no_connection, watch)) == 0
        watch.announce("of the rank")
        backend.barrier()
        return None
    watch.wait_for_report(CONTRACT_SECONDS)
    backend.barrier()
    watch.leave()
    return watch.failure


def test_the_end_of_a_forked_child_is_not_reported_and_the_child_keeps_no_connection():
    assert run_threads(2, forks_children)[0] == PeerFailure(1, "stopped: of the rank")


def test_the_watch_of_a_world_of_one_does_nothing():
    def alone(backend):
        watch = Watch(backend, "127.0.0.1")
        watch.announce("not sent")
        watch.leave()
        watch.wait_for_report(CONTRACT_SECONDS)
        return watch.failure, watch._connections

    assert run_threads(1, alone) == [(None, [])]


def test_a_connection_receives_several_messages_and_parts_of_messages():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    connection = Connection(theirs, rank=1)
    ours.sendall(json.dumps({"a": 1}).encode() + b'\n{"b": 2}\n{"c"')
    assert connection.receive_one() == {"a": 1}
    assert connection.buffered() == [{"b": 2}]
    assert connection.buffered() == []
    ours.sendall(b": 3}\n")
    assert connection.receive() == [{"c": 3}]
    ours.close()
    with pytest.raises(ConnectionResetError, match="closed the connection"):
        connection.receive()
    theirs.close()


@pytest.mark.parametrize(("number", "expected"), [("ETIMEDOUT", True), ("ENETUNREACH", True), ("ECONNRESET", False)])
def test_a_cut_network_and_an_ended_process_are_distinguished(number, expected):
    assert cut_off(OSError(getattr(errno, number), "")) is expected
    assert not cut_off(ValueError("a message is too long"))


def catches_the_failure(backend):
    if backend.rank == 1:
        return backend.abort("ValueError: boom")
    with pytest.raises(PeerFailedError) as caught:
        backend.barrier()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.failure) == (str(caught.value), caught.value.failure)
    return caught.value.failure


def test_a_peer_failed_error_contains_the_failure_and_can_be_pickled():
    assert run_threads(2, catches_the_failure)[0] == PeerFailure(1, "stopped: ValueError: boom")


def old_names(backend):
    watch, seen = backend.watch, []
    with pytest.warns(DeprecationWarning, match=r"Backend.settle is now called Backend.drain"):
        backend.settle()
    with pytest.warns(DeprecationWarning, match=r"Watch.on_loss is now called Watch.on_peer_failure"):
        watch.on_loss = seen.append
    with pytest.warns(DeprecationWarning, match=r"Watch.loss is now called Watch.failure"):
        assert watch.loss is None
    with pytest.warns(DeprecationWarning, match=r"Watch.settle is now called Watch.wait_for_report"):
        watch.settle(0.0)
    assert watch.on_peer_failure == seen.append


def test_the_names_of_version_0_1_still_work_and_warn():
    run_threads(1, old_names)
    with pytest.warns(DeprecationWarning, match=r"watch.Loss is now called dualtrain.PeerFailure"):
        assert watch_module.Loss is PeerFailure
