"""The control channel between the ranks and rank 0's coordinator, over sockets between threads."""

from __future__ import annotations

import threading
from itertools import islice

from dualtrain.horovod_variables import Settings
from dualtrain.hvd.control import control
from tests.threads import TIMEOUT, run_threads

_MESSAGES = 100
_LONG = "x" * (1 << 17)  # so long that unread messages exceed the system's socket buffers


def exchanged(backend, others_done):
    """Send messages from rank 1 to all ranks. Rank 2 reads its messages last, then ends the world.

    Return the numbers of the received messages.
    """
    end = control(backend, "127.0.0.1", Settings(), lambda *_: None, lambda: None)
    answers = end.answers()
    if backend.rank == 1:
        for number in range(_MESSAGES):
            end.send({"kind": "discard", "channel": _LONG, "exchange": number, "set": 0})
    if backend.rank == 2:
        assert others_done.wait(TIMEOUT), "the messages to rank 2 have delayed those to the other ranks"
    numbers = [answer["exchange"] for answer in islice(answers, _MESSAGES)]
    others_done.arrive()
    if backend.rank == 2:
        end.send({"kind": "shutdown", "why": "the test has ended"})
    assert next(answers) == {"do": "down", "why": "the test has ended"}
    end.close()
    return numbers


class _Both:
    """An event that is set after two ranks have arrived. Copies are the same object, because all ranks share it."""

    def __init__(self):
        self._arrivals, self._both = [], threading.Event()
        self.wait = self._both.wait

    def __deepcopy__(self, memo):
        return self

    def arrive(self):
        self._arrivals.append(None)
        if len(self._arrivals) == 2:
            self._both.set()


def test_a_rank_that_reads_messages_late_gets_all_of_them_and_does_not_delay_other_ranks():
    assert run_threads(3, exchanged, _Both()) == [list(range(_MESSAGES))] * 3
