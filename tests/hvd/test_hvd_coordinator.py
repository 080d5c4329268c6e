"""The coordinator without connections: tests pass messages to it, read its answers, and set its clock."""

from __future__ import annotations

import re

import pytest

from dualtrain.horovod_variables import Settings
from dualtrain.hvd.coordinator import Coordinator


class Desk:
    """A coordinator with recorded answers and a clock that tests set."""

    def __init__(self, size=3, **settings):
        self.now = 0.0
        self.sent = [[] for _ in range(size)]
        self.notes = []
        send = lambda rank, message: self.sent[rank].append(message)  # noqa: E731
        note = lambda *event: self.notes.append(event)  # noqa: E731
        self.coordinator = Coordinator(size, send, Settings(**settings), note, lambda: self.now)
        self.numbers = iter(range(1000))

    def say(self, rank, kind="allreduce", name=None, tensors=(("float32", [2], "cpu"),), **facts):
        number = next(self.numbers)
        message = {"set": 0, "tensors": [list(t) for t in tensors], **facts}
        self.coordinator.receive(rank, {"kind": kind, "name": name, "id": number, **message})
        return number

    def look(self, seconds):
        self.now += seconds
        self.coordinator.look_for_stalls()

    def answers(self, rank, *keys):
        """Return the messages that a rank has got since the previous call."""
        sent, self.sent[rank] = self.sent[rank], []
        return [tuple(message.get(key) for key in keys) for message in sent]


def test_calls_are_matched_in_the_order_in_which_the_last_ranks_made_them():
    desk = Desk()
    for rank, names in enumerate(["ab", "ba", "ba"]):
        for name in names:
            desk.say(rank, name=name, op=1)
    orders = [desk.answers(rank, "do", "name") for rank in range(3)]
    assert orders == [[("run", "b"), ("run", "a")]] * 3
    assert [note for note in desk.notes if note[0] == "matched"] == [("matched", f"allreduce.{n}", -1) for n in "ba"]


def test_unnamed_calls_match_by_kind_and_set():
    desk = Desk(2)
    first = desk.say(0, "allgather"), desk.say(0, op=1), desk.say(0, op=1)
    second = desk.say(1, op=1), desk.say(1, "allgather"), desk.say(1, op=1)
    assert desk.answers(0, "kind", "id") == [("allreduce", first[1]), ("allgather", first[0]), ("allreduce", first[2])]
    assert desk.answers(1, "kind", "id") == [
        (k, n) for k, n in zip(["allreduce", "allgather", "allreduce"], second, strict=True)
    ]


@pytest.mark.parametrize(
    ("mine", "theirs", "part"),
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
def test_a_mismatch_fails_on_every_rank_and_the_next_call_succeeds(mine, theirs, part):
    desk = Desk(2)
    desk.say(0, name="x", **mine)
    desk.say(1, name="x", **theirs)
    for rank in (0, 1):
        [(do, why)] = desk.answers(rank, "do", "why")
        assert do == "fail"
        assert re.search(part, why)
    desk.say(0, name="x")
    desk.say(1, name="x")
    assert desk.answers(0, "do") == [("run",)]


def test_numbers_of_rows_may_differ_in_allgather_and_alltoall():
    desk = Desk(2)
    desk.say(0, "allgather", tensors=[("float32", [2, 3], "cpu")])
    desk.say(1, "allgather", tensors=[("float32", [0, 3], "cpu")])
    assert desk.answers(1, "do", "rows") == [("run", [[2], [0]])]


def test_joined_ranks_are_left_out_of_reductions_only():
    desk = Desk()
    waiting = desk.say(0, op=0)
    desk.say(1, op=0)
    desk.say(2, "join", divide_by="active")
    assert desk.answers(0, "do", "id", "divisor") == [("absent", None, None), ("run", waiting, 2)]
    assert desk.answers(2, "do", "id") == [("absent", None), ("run", None)]
    desk.say(0, "broadcast", root=0)
    desk.say(1, "broadcast", root=0)
    [(do, why)] = desk.answers(1, "do", "why")[-1:]
    assert (do, why) == ("fail", "broadcast.noname is not possible while rank 2 has joined")
    desk.say(1, "join", divide_by="initial")
    last = desk.say(0, "join", divide_by="initial")
    assert desk.answers(0, "do", "id", "last")[-1] == ("joined", last, 0)
    desk.say(0, op=0)
    assert desk.answers(0, "do") == []  # all ranks are active again


def test_joined_ranks_send_zeros_once_all_other_ranks_know_of_the_join():
    """A rank that does not know of a join would count the joined rank in its averages."""
    desk = Desk(size=4)
    desk.say(3, "join", divide_by="active")
    desk.answers(3, "do")
    request = {"kind": "join_with_zeros", "channel": "p.1", "exchange": 2}
    desk.say(0, **request)
    desk.say(0, **request)  # a repeated request, from another thread of rank 0
    desk.say(1, **request)
    assert desk.answers(3, "do") == []
    desk.say(2, "join", divide_by="initial")  # rank 2 joins too, and does not request
    desk.answers(2, "do"), desk.answers(3, "do")
    desk.say(1, **request)  # ranks that have begun the exchange learn of the join, and request zeros again
    for joined in (2, 3):
        assert desk.answers(joined, "do", "channel", "exchange") == [("join_with_zeros", "p.1", 2)]
    assert desk.answers(1, "do") == [("absent",)] * 2
    # Each exchange needs requests from all ranks; for a process set, only its members' requests count.
    desk.say(0, **request | {"exchange": 3})
    assert desk.answers(3, "do") == []
    desk.coordinator.sets[7] = [1, 3]
    desk.say(1, **request | {"channel": "of a set.1"}, set=7)
    assert desk.answers(3, "do", "channel") == [("join_with_zeros", "of a set.1")]


def test_process_sets_are_added_and_removed():
    desk = Desk()
    for rank in range(3):
        desk.say(rank, "add_process_set", ranks=[0, 2], tensors=())
    assert desk.answers(1, "do", "new_set") == [("run", 1)]
    desk.say(0, set=1)
    desk.say(2, set=1)
    assert desk.answers(2, "do", "set", "members")[-1] == ("run", 1, [0, 2])
    assert desk.answers(1, "do") == []
    left = desk.say(0, name="left", set=1)
    for rank in range(3):
        desk.say(rank, "remove_process_set", ranks=[1], tensors=())
    assert ("fail", left, "process set 1 was removed") in desk.answers(0, "do", "id", "why")
    late = desk.say(2, set=1)
    assert desk.answers(2, "do", "id")[-1] == ("fail", late)
    for rank in range(3):
        desk.say(rank, "add_process_set", ranks=[0], tensors=())
    for rank in range(3):
        desk.say(rank, "add_process_set", ranks=[0], tensors=())
    dones = desk.answers(1, "do", "new_set", "why")
    assert dones[-2:] == [("run", 1, None), ("fail", None, "duplicate: a process set of ranks [0] exists")]


def test_stalls_are_reported_once_on_every_rank():
    desk = Desk(stall_check=10)
    desk.say(0, name="loss")
    desk.say(2, name="loss")
    desk.look(9)
    assert desk.answers(1, "do") == []
    desk.look(2)
    desk.look(5)
    for rank in range(3):
        [(text,)] = [sent for sent in desk.answers(rank, "text") if sent != (None,)]
        assert text == "allreduce.loss: ranks 0, 2 waited 11 s for rank 1"
    desk.say(1, name="loss")
    assert desk.answers(0, "do") == [("run",)]
    desk.say(0, name="loss")
    desk.look(11)
    assert desk.answers(1, "do", "text")[-1] == ("report", "allreduce.loss: rank 0 waited 11 s for ranks 1, 2")


def test_stalls_end_the_world_after_the_limit():
    desk = Desk(2, stall_check=0, stall_shutdown=30)
    desk.say(0, name="loss")
    desk.look(29)
    assert desk.answers(0, "do") == []
    desk.look(2)
    assert desk.answers(1, "do", "why") == [
        ("down", "allreduce.loss: rank 0 waited 31 s for rank 1, longer than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS allows")
    ]
    desk.say(0)
    desk.say(1)
    assert desk.answers(1, "do") == []  # after the shutdown, requests are ignored


def test_waits_for_gradients_are_reported_too():
    desk = Desk(stall_check=10)
    said = {"kind": "waiting", "what": "gradients", "members": [0, 1, 2]}
    desk.coordinator.receive(0, {**said, "seconds": 12.0})
    assert desk.answers(2, "do", "what") == [("who", "gradients")]
    desk.look(0.5)  # the other ranks have not had time to answer
    assert desk.answers(2, "do") == []
    desk.coordinator.receive(2, {**said, "seconds": 3.0})
    desk.look(1)
    [(text,)] = desk.answers(2, "text")
    assert text == "gradients: ranks 0, 2 waited 12 s for rank 1"
    desk.look(10)  # the report of the wait has expired
    assert desk.answers(2, "text") == []


def test_a_rank_that_leaves_ends_the_world_once():
    desk = Desk(2)
    desk.say(1, "shutdown", why="rank 1: a bug")
    desk.say(0, "shutdown")
    assert [desk.answers(rank, "do", "why") for rank in (0, 1)] == [[("down", "rank 1: a bug")]] * 2
