"""Rank 0's decisions: which calls belong together, and in what order they are executed.

Horovod matches calls by name, because each rank may make them in a different order. So every rank sends its requests to
rank 0. As soon as all ranks of a process set have requested a call, rank 0 sends these ranks a message to execute it. Ranks
execute calls in the order of these messages. This file uses no sockets and no tensors; ``control.py`` calls it.

Named calls match by (process set, kind, name). Unnamed calls match by (process set, kind): a rank's n-th unnamed call
matches the n-th unnamed call of each other rank. A joined rank is a rank that has called ``join``: the other ranks' calls
do not wait for it. A channel is a backend for the gradients of one optimizer; the calls of kind "channel" open it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from dualtrain.horovod_variables import Settings
from dualtrain.hvd.disagreement import (
    EQUAL,
    FREE_ROWS,
    Key,
    Message,
    describe_deadlock,
    disagreement,
    line_of,
    name_ranks,
    rows_of,
    title_of,
)

#: Text after "rank 1" in the reason for a shutdown, if the rank gives no reason. This rank may have failed, and may report
#: the error later.
ENDED = "has shut Horovod down, or its program has ended"
_FRESH_SECONDS = 5.0  # a waiting rank repeats its report every second, so an older report is out of date
#: Kinds that all ranks execute, even if only a set's members call them, because torch makes process groups collectively.
_WORLD_WIDE = {"channel", "add_process_set", "remove_process_set"}
#: Kinds that need no call from ranks that have joined.
_JOINABLE = {"allreduce", "grouped_allreduce", "barrier", "channel"}


@dataclass
class _Waiting:
    """Calls with the same key, which wait for the ranks that have not made this call yet."""

    since: float
    calls: dict[int, deque[Message]] = field(default_factory=dict)


@dataclass
class _Opened:
    """A channel that was opened without the ranks that had joined.

    Attributes:
        request: the request of the first rank.
        answer: the message that opened the channel.
        absent: the ranks that have not requested the channel yet.
    """

    request: Message
    answer: Message
    absent: set[int]


class Coordinator:
    """Matches the calls of the ranks, and sends the ranks the calls to execute.

    Args:
        size: the number of ranks.
        send: sends a message to a rank; the messages to one rank arrive in order.
        settings: how long waits may last.
        note: records an event on the timeline: (event, line, rank).
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        size: int,
        send: Callable[[int, Message], None],
        settings: Settings,
        note: Callable[[str, str, int], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = size
        self.sets: dict[int, list[int]] = {0: list(range(size))}
        self._free_ids: list[int] = []
        self._send, self._settings, self._note, self._clock = send, settings, note, clock
        #: The calls that are not matched yet.
        self._table: dict[Key, _Waiting] = {}
        #: Rank → its request, for each rank that has called ``join``.
        self._joined: dict[int, Message] = {}
        #: Channel → index of the exchange of gradients → the ranks that have requested zeros from the joined ranks.
        self._zeros_requested: dict[str, dict[int, set[int]]] = {}
        #: Channel → the last request for zeros that was sent to the joined ranks.
        self._zeros_sent: dict[str, Message] = {}
        #: Reports of ranks that wait for gradients: operation → waiting rank → (time of the report, report). The ranks
        #: exchange gradients without this class. It only records which ranks wait.
        self._waits: dict[str, dict[int, tuple[float, Message]]] = {}
        #: Operation → the time at which all ranks were asked to report whether they wait for it.
        self._reports_requested: dict[str, float] = {}
        #: Titles of the long waits that were reported to the ranks, and that still last.
        self._reported: set[str] = set()
        #: Rank → (the call for which its main thread waits, time of the report). Such a rank makes no other calls.
        self._blocked: dict[int, tuple[Key, float]] = {}
        #: Channels that were opened without joined ranks, and that some of these ranks have not requested yet.
        self._opened: dict[Key, _Opened] = {}
        self._down = False

    def receive(self, rank: int, message: Message) -> None:
        """Handle a message of ``rank``, and send the resulting messages. Does nothing after the world has ended."""
        kind = message["kind"]
        if self._down:
            return
        if kind == "shutdown":
            self.shut_down(message.get("why") or f"rank {rank} {ENDED}")
        elif kind == "waiting":
            self._note_wait(rank, message)
        elif kind == "blocked":
            self._blocked[rank] = (message["set"], message["call"], message["name"]), self._clock()
        elif kind == "join":
            self._joined[rank] = message
            self._after_join(rank)
        elif kind == "join_with_zeros":
            self._request_zeros(rank, message)
        elif kind == "discard":  # the rank discards the result of an exchange of gradients, so no member may use it
            for member in self.sets.get(message["set"], ()):
                self._send(member, {"do": "discard", "channel": message["channel"], "exchange": message["exchange"]})
        elif kind == "progress":  # the rank waits for an operation in shared memory, which the other ranks must advance
            for other in range(self.size):
                self._send(other, {"do": "progress"})
        else:
            self._submit(rank, message)

    def shut_down(self, why: str) -> None:
        """End the world: every rank's calls fail with ``why`` from now on."""
        if not self._down:
            self._down = True
            for rank in range(self.size):
                self._send(rank, {"do": "down", "why": why})

    def look_for_stalls(self) -> None:
        """Fail calls that wait for each other. Report calls that have waited for too long.

        Each wait is reported once. End the world if a call has waited for longer than ``stall_shutdown`` seconds.
        """
        self._fail_deadlocked()
        limits, waits = self._settings, [*self._unmatched(), *self._unsent_gradients()]
        for title, seconds, waiting_ranks, needed in waits:
            missing = [rank for rank in needed if rank not in waiting_ranks]
            text = f"{title}: {name_ranks(waiting_ranks)} waited {seconds:.0f} s for {name_ranks(missing)}"
            if missing and seconds > limits.stall_shutdown:
                self.shut_down(f"{text}, longer than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS allows")
                return
            if missing and limits.stall_check and seconds > limits.stall_check and title not in self._reported:
                self._reported.add(title)
                for rank in range(self.size):
                    self._send(rank, {"do": "report", "text": text})
        self._reported &= {title for title, *_ in waits}

    def _note_wait(self, rank: int, message: Message) -> None:
        """Record that a rank waits for gradients.

        If no rank has reported this wait recently, ask all ranks whether they wait for the same gradients.
        """
        what, now = message["what"], self._clock()
        if what not in self._waits or all(now - when > _FRESH_SECONDS for when, _ in self._waits[what].values()):
            self._waits[what], self._reports_requested[what] = {}, now
            for other in range(self.size):
                self._send(other, {"do": "report_wait", "what": what})
        self._waits[what][rank] = now, message

    def _unmatched(self) -> Iterator[tuple[str, float, set[int], list[int]]]:
        """Yield (title, seconds, waiting ranks, needed ranks) for each call that is not matched yet."""
        now = self._clock()
        for key, waiting in self._table.items():
            yield title_of(key), now - waiting.since, {r for r, queue in waiting.calls.items() if queue}, self._needed(key)

    def _unsent_gradients(self) -> Iterator[tuple[str, float, set[int], list[int]]]:
        """Yield a tuple as in ``_unmatched`` for each exchange of gradients for which ranks wait now."""
        now = self._clock()
        for what, reports in self._waits.items():
            fresh = {rank: message for rank, (when, message) in reports.items() if now - when < _FRESH_SECONDS}
            if fresh and now - self._reports_requested[what] > 1:  # the other ranks have had a second to report
                yield what, max(m["seconds"] for m in fresh.values()), set(fresh), next(iter(fresh.values()))["members"]

    # -- matching ---------------------------------------------------------------------------------------------------

    def _submit(self, rank: int, message: Message) -> None:
        key: Key = (message["set"], message["kind"], message["name"])
        self._blocked.pop(rank, None)
        if key[0] not in self.sets:
            self._send(rank, {"do": "fail", "id": message["id"], "why": f"process set {key[0]} was removed"})
            return
        opened = key if key in self._opened else self._opened_instead(key, rank)
        if opened is not None:
            self._answer_late(opened, rank, message)
            return
        if key not in self._table:
            self._table[key] = _Waiting(self._clock())
            self._note("negotiate", line_of(key), rank)
        self._table[key].calls.setdefault(rank, deque()).append(message)
        self._note("ready", line_of(key), rank)
        self._match(key)

    def _opened_instead(self, key: Key, rank: int) -> Key | None:
        """Return the key of the channel that the other ranks opened for the same optimizer with fewer or more gradients.

        Return ``None`` if there is none, or if ``rank`` has not joined. A joined rank requests a channel only after the
        other ranks have opened theirs.
        """
        if key[1] != "channel" or rank not in self._joined:
            return None
        return next((each for each in reversed(self._opened) if _channel_of(each) == _channel_of(key)), None)

    def _answer_late(self, key: Key, rank: int, message: Message) -> None:
        """Answer a request for a channel that the other ranks opened after ``rank`` had joined.

        End the world if the request does not fit those of the other ranks.
        """
        opened = self._opened[key]
        problem = disagreement(key, {opened.request["rank"]: opened.request, rank: message})
        if problem is not None:
            self.shut_down(problem)  # the other ranks may wait for this rank's gradients already
            return
        self._send(rank, {**opened.answer, "id": message["id"]})
        opened.absent.discard(rank)
        if not opened.absent:
            del self._opened[key]

    def _needed(self, key: Key) -> list[int]:
        return [rank for rank in self.sets.get(key[0], []) if rank not in self._joined]

    def _match(self, key: Key) -> None:
        """Match and send calls of ``key`` while each rank that has not joined has one waiting."""
        waiting = self._table[key]
        while (needed := self._needed(key)) and all(waiting.calls.get(rank) for rank in needed):
            # A rank may have made an asynchronous call before it joined: this call is matched too.
            calls = {rank: queue.popleft() for rank, queue in sorted(waiting.calls.items()) if queue}
            waiting.since = self._clock()
            self._reported.discard(title_of(key))  # a later wait for the same key is reported again
            self._note("matched", line_of(key), -1)
            self._answer(key, calls)
        if not any(waiting.calls.values()):
            self._table.pop(key, None)

    def _answer(self, key: Key, calls: dict[int, Message]) -> None:
        """Send the ranks a matched call to execute, or the reason why it fails."""
        members = self.sets[key[0]]
        absent = [rank for rank in members if rank not in calls]
        problem = disagreement(key, calls)
        if absent and key[1] not in _JOINABLE:
            joined = f"{name_ranks(absent)} {'have' if len(absent) > 1 else 'has'} joined"
            problem = f"{title_of(key)} is not possible, because {joined}"
        if problem is None and key[1] in _WORLD_WIDE:
            problem = self._change_sets(key, calls)
        if problem is not None:
            for rank, message in calls.items():
                self._send(rank, {"do": "fail", "id": message["id"], "why": problem})
            return
        first = next(iter(calls.values()))
        facts = {name: first[name] for name in (*EQUAL, "tensors", "position", "added") if name in first}
        facts |= {"do": "run", "kind": key[1], "name": key[2], "set": key[0], "members": members}
        facts |= {"divisor": self._divisor(members, absent), "new_set": first.get("new_set")}
        if key[1] == "channel":
            facts["sparse"] = sorted({tuple(pair) for message in calls.values() for pair in message["sparse"]})
            # Shared memory needs equal buffers on all ranks. They differ if only some ranks use a GPU.
            same = all(message["buffers"] == first["buffers"] for message in calls.values())
            facts["buffers"] = first["buffers"] if same else []
            if absent:
                self._opened[key] = _Opened({**first, "rank": next(iter(calls))}, facts, set(absent))
        if key[1] in FREE_ROWS:
            facts["rows"] = [[rows_of(shape) for _, shape, _ in calls[rank]["tensors"]] for rank in members]
        if key[1] == "alltoall":
            facts["splits"] = [calls[rank]["splits"] for rank in members]
        for rank in range(self.size) if key[1] in _WORLD_WIDE else members:
            self._send(rank, {**facts, "id": calls[rank]["id"] if rank in calls else None})

    def _divisor(self, members: list[int], absent: list[int]) -> int:
        """Return the divisor of averages: the number of members, minus the ``absent`` ones with ``divide_by="active"``."""
        left_out = [rank for rank in absent if self._joined[rank]["divide_by"] == "active"]
        return len(members) - len(left_out)

    def _after_join(self, rank: int) -> None:
        """Send the messages that follow from the join of ``rank``. If all ranks have joined now, end the join."""
        for message in self._zeros_sent.values():
            # The rank may have joined in the middle of the exchange of ``message``. Ranks that joined earlier have got the
            # request already, and wait for this rank's zeros.
            if rank in self.sets.get(message["set"], ()):
                self._send(rank, message)
        if len(self._joined) == self.size:
            joined, self._joined = self._joined, {}
            self._zeros_sent.clear()
            for other, message in joined.items():
                self._send(other, {"do": "join_ended", "id": message["id"], "last": rank})
            return
        for other in range(self.size):
            self._send(other, {"do": "joined_ranks", "ranks": sorted(self._joined)})
        for key in list(self._table):
            if key in self._table:
                self._match(key)

    def _request_zeros(self, rank: int, message: Message) -> None:
        """Request zeros for an exchange of gradients from the ranks that have joined.

        The exchange needs the joined ranks' zeros, and these ranks get the request only after every other rank has
        requested zeros. So when the exchange ends, every other rank knows that a rank has joined, and reads the exchange's
        extra scalar: the number of joined ranks that the averages leave out.
        """
        channel, exchange = message["channel"], message["exchange"]
        requests = self._zeros_requested.setdefault(channel, {}).setdefault(exchange, set())
        requests.add(rank)
        if not requests.issuperset(self._needed((message["set"], "join_with_zeros", channel))):
            return
        self._zeros_requested[channel] = {n: ranks for n, ranks in self._zeros_requested[channel].items() if n > exchange}
        self._zeros_sent[channel] = {**message, "do": "join_with_zeros"}
        for other in self._joined:
            if other in self.sets.get(message["set"], ()):
                self._send(other, self._zeros_sent[channel])

    # -- calls that never match ---------------------------------------------------------------------------------------

    def _fail_deadlocked(self) -> None:
        """Fail the calls of deadlocked ranks: each of them waits only for calls of ranks that are deadlocked too."""
        now = self._clock()
        reports = {rank: key for rank, (key, when) in self._blocked.items() if now - when < _FRESH_SECONDS}
        stuck = {rank: key for rank, key in reports.items() if rank in self._callers(key)}
        while free := [rank for rank, key in stuck.items() if not self._missing(key) <= stuck.keys()]:
            for rank in free:
                del stuck[rank]
        if stuck:
            rank, key = min(stuck.items())
            other = min(self._missing(key))
            why = describe_deadlock(
                {rank: (key, self._first(key, rank)), other: (stuck[other], self._first(stuck[other], other))}
            )
            self._fail_all(set(stuck.values()), why)

    def _callers(self, key: Key) -> set[int]:
        """Return the ranks whose calls of ``key`` are not matched yet."""
        return {rank for rank, queue in self._table[key].calls.items() if queue} if key in self._table else set()

    def _missing(self, key: Key) -> set[int]:
        return set(self._needed(key)) - self._callers(key)

    def _first(self, key: Key, rank: int) -> Message:
        return self._table[key].calls[rank][0]

    def _fail_all(self, keys: Iterable[Key], why: str) -> None:
        for key in keys:
            self._note("matched", line_of(key), -1)
            for rank, queue in self._table.pop(key).calls.items():
                for message in queue:
                    self._send(rank, {"do": "fail", "id": message["id"], "why": why})

    # -- process sets -----------------------------------------------------------------------------------------------

    def _change_sets(self, key: Key, calls: dict[int, Message]) -> str | None:
        """Add or remove a process set; return the reason if that is impossible. Unmatched calls on a removed set fail."""
        first = next(iter(calls.values()))
        if key[1] == "add_process_set":
            if first["ranks"] in self.sets.values():
                return f"duplicate: a process set of ranks {first['ranks']} exists"
            number = self._free_ids.pop(0) if self._free_ids else max(self.sets) + 1
            self.sets[number] = first["ranks"]
            for message in calls.values():
                message["new_set"] = number
        if key[1] == "remove_process_set":
            [number] = first["ranks"]
            if number not in self.sets:
                return f"process set {number} was removed before"
            del self.sets[number]
            self._free_ids.append(number)
            self._fail_all([key for key in self._table if key[0] == number], f"process set {number} was removed")
        return None


def _channel_of(key: Key) -> tuple[int, str]:
    """Return the process set and the name of a channel, without the number of its gradients."""
    return key[0], str(key[2]).rpartition("/")[0]
