"""The coordinator without connections, and the reading of Horovod's variables.

Tests pass messages to the coordinator, read its answers, and set its clock.
"""

from __future__ import annotations

import re
import weakref

import pytest

from dualtrain.errors import UserError
from dualtrain.horovod_variables import Settings, mention_others
from dualtrain.hvd.coordinator import Coordinator


class Harness:
    """A coordinator with recorded answers and a clock that tests set."""

    def __init__(self, size=3, **settings):
        self.now = 0.0
        self.sent = [[] for _ in range(size)]
        self.notes = []
        send = lambda rank, message: self.sent[rank].append(message)  # noqa: E731
        note = lambda *event: self.notes.append(event)  # noqa: E731
        self.coordinator = Coordinator(size, send, Settings(**settings), note, lambda: self.now)
        self.numbers = iter(range(1000))

    def receive(self, rank, kind="allreduce", name=None, tensors=(("float32", [2], "cpu"),), **facts):
        """Pass a request of ``rank`` to the coordinator, and return the request's id."""
        number = next(self.numbers)
        message = {"set": 0, "tensors": [list(t) for t in tensors], **facts}
        self.coordinator.receive(rank, {"kind": kind, "name": name, "id": number, **message})
        return number

    def look(self, seconds):
        """Let ``seconds`` pass, then look for stalls."""
        self.now += seconds
        self.coordinator.look_for_stalls()

    def answers(self, rank, *keys):
        """Return the values of these keys in the messages that a rank has received since the previous call."""
        sent, self.sent[rank] = self.sent[rank], []
        return [tuple(message.get(key) for key in keys) for message in sent]


def test_each_call_runs_as_soon_as_all_ranks_have_made_it():
    harness = Harness()
    for rank, names in enumerate(["ab", "ba", "ba"]):
        for name in names:
            harness.receive(rank, name=name, op=1)
    orders = [harness.answers(rank, "do", "name") for rank in range(3)]
    assert orders == [[("run", "b"), ("run", "a")]] * 3
    assert [note for note in harness.notes if note[0] == "matched"] == [("matched", f"allreduce.{n}", -1) for n in "ba"]


def test_unnamed_calls_of_a_kind_match_in_their_order():
    harness = Harness(2)
    first = harness.receive(0, "allgather"), harness.receive(0, op=1), harness.receive(0, op=1)
    second = harness.receive(1, op=1), harness.receive(1, "allgather"), harness.receive(1, op=1)
    assert harness.answers(0, "kind", "id") == [("allreduce", first[1]), ("allgather", first[0]), ("allreduce", first[2])]
    assert harness.answers(1, "kind", "id") == [
        (k, n) for k, n in zip(["allreduce", "allgather", "allreduce"], second, strict=True)
    ]


@pytest.mark.parametrize(
    ("first", "second", "part"),
    [
        ({"op": 1}, {"op": 3}, "reduction Sum on rank 0, Min on rank 1"),
        ({"pre": 1.0}, {"pre": 2.0}, "prescale factor"),
        ({"root": 0}, {"root": 1}, "root rank"),
        ({"tensors": []}, {}, "0 tensors on rank 0, 1 on rank 1"),
        ({"tensors": [("int32", [2], "cpu")]}, {}, "dtype int32 on rank 0, float32 on rank 1"),
        ({"tensors": [("float32", [3], "cpu")]}, {}, r"shape \(3,\) on rank 0, \(2,\) on rank 1"),
        ({"tensors": [("float32", [2, 1], "cpu")]}, {}, "shape"),
        ({"tensors": [("float32", [2], "cuda")]}, {}, "a tensor on cuda on rank 0, on cpu on rank 1"),
    ],
)
def test_a_mismatch_fails_on_every_rank_and_the_next_call_succeeds(first, second, part):
    harness = Harness(2)
    harness.receive(0, name="x", **first)
    harness.receive(1, name="x", **second)
    for rank in (0, 1):
        [(do, why)] = harness.answers(rank, "do", "why")
        assert do == "fail"
        assert re.search(part, why)
    harness.receive(0, name="x")
    harness.receive(1, name="x")
    assert harness.answers(0, "do") == [("run",)]


def test_ranks_may_have_different_numbers_of_rows_in_allgather():
    harness = Harness(2)
    harness.receive(0, "allgather", tensors=[("float32", [2, 3], "cpu")])
    harness.receive(1, "allgather", tensors=[("float32", [0, 3], "cpu")])
    assert harness.answers(1, "do", "rows") == [("run", [[2], [0]])]


def test_reductions_skip_joined_ranks_and_a_broadcast_fails():
    harness = Harness()
    waiting = harness.receive(0, op=0)
    harness.receive(1, op=0)
    harness.receive(2, "join", divide_by="active")
    assert harness.answers(0, "do", "id", "divisor") == [("joined_ranks", None, None), ("run", waiting, 2)]
    assert harness.answers(2, "do", "id") == [("joined_ranks", None), ("run", None)]
    harness.receive(0, "broadcast", root=0)
    harness.receive(1, "broadcast", root=0)
    [(do, why)] = harness.answers(1, "do", "why")[-1:]
    assert (do, why) == ("fail", "broadcast.noname is not possible, because rank 2 has joined")
    harness.receive(1, "join", divide_by="initial")
    last = harness.receive(0, "join", divide_by="initial")
    assert harness.answers(0, "do", "id", "last")[-1] == ("join_ended", last, 0)
    harness.receive(0, op=0)
    assert harness.answers(0, "do") == []  # the joins have ended: the call waits for all ranks


def test_joined_ranks_send_zeros_only_after_all_other_ranks_know_of_the_join():
    """Joined ranks wait until all other ranks have requested zeros.

    A rank that requests zeros knows of the join, and so divides by the right number of ranks.
    """
    harness = Harness(size=4)
    harness.receive(3, "join", divide_by="active")
    harness.answers(3, "do")
    request = {"kind": "join_with_zeros", "channel": "p.1", "exchange": 2}
    harness.receive(0, **request)
    harness.receive(0, **request)  # a second thread of rank 0 repeats the request
    harness.receive(1, **request)
    assert harness.answers(3, "do") == []
    harness.receive(2, "join", divide_by="initial")  # rank 2 joins too, so it requests no zeros
    harness.answers(2, "do"), harness.answers(3, "do")
    harness.receive(1, **request)  # after each `joined_ranks`, a rank that has begun the exchange requests zeros again
    for joined in (2, 3):
        assert harness.answers(joined, "do", "channel", "exchange") == [("join_with_zeros", "p.1", 2)]
    assert harness.answers(1, "do") == [("joined_ranks",)] * 2
    # Each exchange needs requests from all ranks that have not joined; in a process set, only the set's members count.
    harness.receive(0, **request | {"exchange": 3})
    assert harness.answers(3, "do") == []
    harness.coordinator.sets[7] = [1, 3]
    harness.receive(1, **request | {"channel": "of a set.1"}, set=7)
    assert harness.answers(3, "do", "channel") == [("join_with_zeros", "of a set.1")]
    # A rank that joins later may have begun these exchanges without ending them.
    harness.receive(1, "join", divide_by="initial")
    sent = [("join_with_zeros", "p.1"), ("join_with_zeros", "of a set.1"), ("joined_ranks", None)]
    assert harness.answers(1, "do", "channel") == sent


class Layout(list):
    """A list to which weak references are possible."""


def test_a_request_for_a_channel_is_kept_only_until_all_ranks_have_made_it():
    harness = Harness(2)
    kept = []

    def open_channel(rank, name):
        layout = Layout(["a (2,)"])
        kept.append(weakref.ref(layout))
        harness.receive(rank, "channel", name, tensors=[], sparse=[], buffers=[], layout=layout)
        return harness.answers(rank, "do", "name")

    open_channel(0, "first/1")
    assert open_channel(1, "first/1") == [("run", "first/1")]
    harness.answers(0)
    assert [each() for each in kept] == [None, None]
    harness.coordinator.receive(1, {"kind": "join", "id": 9, "divide_by": "initial"})
    harness.answers(0)
    assert open_channel(0, "second/1") == [("run", "second/1")]
    harness.answers(1)
    assert kept[-1]() is not None
    assert open_channel(1, "second/1") == [("run", "second/1")]
    assert [each() for each in kept] == [None] * 4


def test_process_sets_are_added_and_removed():
    harness = Harness()
    for rank in range(3):
        harness.receive(rank, "add_process_set", ranks=[0, 2], tensors=())
    assert harness.answers(1, "do", "new_set") == [("run", 1)]
    harness.receive(0, set=1)
    harness.receive(2, set=1)
    assert harness.answers(2, "do", "set", "members")[-1] == ("run", 1, [0, 2])
    assert harness.answers(1, "do") == []
    left = harness.receive(0, name="left", set=1)
    for rank in range(3):
        harness.receive(rank, "remove_process_set", ranks=[1], tensors=())
    assert ("fail", left, "process set 1 was removed") in harness.answers(0, "do", "id", "why")
    late = harness.receive(2, set=1)
    assert harness.answers(2, "do", "id")[-1] == ("fail", late)
    for rank in range(3):
        harness.receive(rank, "add_process_set", ranks=[0], tensors=())
    for rank in range(3):
        harness.receive(rank, "add_process_set", ranks=[0], tensors=())
    answers = harness.answers(1, "do", "new_set", "why")
    assert answers[-2:] == [("run", 1, None), ("fail", None, "duplicate: a process set of ranks [0] exists")]


def test_stalls_are_reported_once_on_every_rank():
    harness = Harness(stall_check=10)
    harness.receive(0, name="loss")
    harness.receive(2, name="loss")
    harness.look(9)
    assert harness.answers(1, "do") == []
    harness.look(2)
    harness.look(5)
    for rank in range(3):
        [(text,)] = [sent for sent in harness.answers(rank, "text") if sent != (None,)]
        assert text == "allreduce.loss: ranks 0, 2 waited 11 s for rank 1"
    harness.receive(1, name="loss")
    assert harness.answers(0, "do") == [("run",)]
    harness.receive(0, name="loss")
    harness.look(11)
    assert harness.answers(1, "do", "text")[-1] == ("report", "allreduce.loss: rank 0 waited 11 s for ranks 1, 2")


def test_stalls_end_the_world_after_the_limit():
    harness = Harness(2, stall_check=0, stall_shutdown=30)
    harness.receive(0, name="loss")
    harness.look(29)
    assert harness.answers(0, "do") == []
    harness.look(2)
    assert harness.answers(1, "do", "why") == [
        ("down", "allreduce.loss: rank 0 waited 31 s for rank 1, longer than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS allows")
    ]
    harness.receive(0)
    harness.receive(1)
    assert harness.answers(1, "do") == []  # after the shutdown, requests are ignored


def test_waits_for_gradients_are_reported_too():
    harness = Harness(stall_check=10)
    report = {"kind": "waiting", "what": "gradients", "members": [0, 1, 2]}
    harness.coordinator.receive(0, {**report, "seconds": 12.0})
    assert harness.answers(2, "do", "what") == [("report_wait", "gradients")]
    harness.look(0.5)  # too early: the other ranks are still expected to answer
    assert harness.answers(2, "do") == []
    harness.coordinator.receive(2, {**report, "seconds": 3.0})
    harness.look(1)
    [(text,)] = harness.answers(2, "text")
    assert text == "gradients: ranks 0, 2 waited 12 s for rank 1"
    harness.look(10)  # no rank repeats its report, so the reports have expired
    assert harness.answers(2, "text") == []


def test_the_world_ends_with_the_reason_of_the_first_rank_that_shuts_down():
    harness = Harness(2)
    harness.receive(1, "shutdown", why="rank 1: a bug")
    harness.receive(0, "shutdown")
    assert [harness.answers(rank, "do", "why") for rank in (0, 1)] == [[("down", "rank 1: a bug")]] * 2


# -- Horovod's variables ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "many"])
@pytest.mark.parametrize("name", ["FUSION_THRESHOLD", "STALL_CHECK_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS"])
def test_a_variable_that_is_not_a_finite_number_is_refused(name, value):
    with pytest.raises(UserError, match=f"HOROVOD_{name}='{value}' is not a finite number: "):
        Settings.read({f"HOROVOD_{name}": value})


@pytest.mark.parametrize("value", ["off", "false", "2"])
def test_an_unknown_value_of_the_compat_variable_is_refused(value):
    with pytest.raises(UserError, match=f"DUALTRAIN_HVD_COMPAT='{value}' is not known: set it to 0 or 1"):
        Settings.read({"DUALTRAIN_HVD_COMPAT": value})
    assert [Settings.read({"DUALTRAIN_HVD_COMPAT": known}).compat for known in ("", "0", "1")] == [False, False, True]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", True), ("2 checks", True), ("0", False), ("", False), ("false", False), ("true", False), ("-1", False)],
)
def test_flags_are_read_as_horovod_reads_them(value, expected):
    found = Settings.read({"HOROVOD_STALL_CHECK_DISABLE": value, "HOROVOD_DYNAMIC_PROCESS_SETS": value})
    assert (found.stall_check == 0, found.dynamic_sets) == (expected, expected)


def test_only_variables_without_an_effect_are_logged_as_ignored(caplog):
    caplog.set_level("DEBUG", "dualtrain.hvd")
    gloo = dict.fromkeys(("HOROVOD_GLOO_IFACE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"), "x")
    mention_others(gloo | {"HOROVOD_CYCLE_TIME": "1", "HOROVOD_TIMELINE": "x"})
    assert caplog.messages == ["ignored, because they have no effect on torch.distributed: HOROVOD_CYCLE_TIME"]


# -- calls that wait for each other -----------------------------------------------------------------------------


def block(harness, rank, name, set_id=0):
    """Call ``name`` on a process set, and report that the rank's main thread waits for this call."""
    harness.receive(rank, name=name, set=set_id, op=1)
    harness.coordinator.receive(rank, {"kind": "blocked", "call": "allreduce", "name": name, "set": set_id})


def test_calls_that_wait_for_each_other_fail():
    harness = Harness()
    harness.receive(0, name="pending", op=1)
    block(harness, 0, "a")
    block(harness, 1, "b")
    harness.look(1)
    assert not any(harness.sent)  # rank 2 may call both
    block(harness, 2, "b")
    harness.look(1)
    text = (
        "allreduce.a on rank 0 and allreduce.b on rank 1 wait for each other; every rank must make the same calls in the "
    )
    assert [harness.answers(rank, "do", "why") for rank in range(3)] == [[("fail", text + "same order")]] * 3
    for rank in (1, 2, 0, 1, 2):
        harness.receive(rank, name="a" if rank == 0 else "pending", op=1)
    harness.look(1)
    assert harness.answers(0, "do", "name") == [("run", "pending")]


def test_the_report_of_a_wait_expires_if_the_rank_does_not_repeat_it():
    harness = Harness(2)
    block(harness, 0, "a")
    harness.look(6)
    block(harness, 1, "b")
    harness.look(1)
    assert not any(harness.sent)


def test_calls_that_can_still_match_do_not_fail():
    harness = Harness()
    block(harness, 0, "a")
    block(harness, 1, "b")
    harness.receive(2, name="b", op=1)
    harness.receive(1, name="a", op=1)  # a different thread has made this call, or an interrupt has ended the wait
    harness.look(1)
    assert not any(harness.sent)
    harness.receive(2, name="a", op=1)
    harness.receive(0, name="b", op=1)
    assert harness.answers(1, "do", "name") == [("run", "a"), ("run", "b")]
    harness.look(1)
    assert not harness.sent[1]


def test_calls_in_several_process_sets_that_wait_for_each_other_fail():
    harness = Harness()
    for ranks in ([0, 1], [1, 2], [0, 2]):
        for rank in range(3):
            harness.receive(rank, "add_process_set", ranks=ranks)
    for rank in range(3):
        harness.answers(rank, "do")
    block(harness, 0, "x", 1)
    block(harness, 1, "y", 2)
    harness.look(1)
    assert not any(harness.sent)
    block(harness, 2, "z", 3)
    harness.look(1)
    assert [do for rank in range(3) for do, _ in harness.answers(rank, "do", "why")] == ["fail"] * 3


def test_calls_that_wait_for_each_other_fail_after_a_third_rank_has_joined():
    harness = Harness()
    block(harness, 0, "a")
    block(harness, 1, "b")
    harness.receive(2, "join", divide_by="initial")
    harness.look(1)
    assert harness.answers(0, "do") == [("joined_ranks",), ("fail",)]
