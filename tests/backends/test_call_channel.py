"""Channel on which ranks compare calls: messages of any length, data sent with them, and failed exchanges."""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from dualtrain.backends import ring_order
from dualtrain.backends.base import Broadcast, Gather, ReduceOp, Reduction
from dualtrain.backends.call_channel import HEADER, CallChannel
from dualtrain.backends.short_calls import CallBuffers, is_sent_with_call, longest


@pytest.fixture
def channels():
    """Yield a function that connects ranks in this process and returns their channels, which are closed after the test."""
    opened: list[CallChannel] = []

    def make(size):
        ours = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            for rank in range(1, size):
                theirs = socket.create_connection(server.getsockname())
                ours.append(SimpleNamespace(rank=rank, socket=server.accept()[0]))
                for connection in (theirs, ours[-1].socket):
                    # CallChannel must turn this timeout off. It is 9 s in a job; here it is shorter than a test's wait.
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 100)
                opened.append(CallChannel(rank, size, [SimpleNamespace(rank=0, socket=theirs)], wait_for_all))
        opened.insert(0, CallChannel(0, size, ours[::-1], wait_for_all))
        return opened

    yield make
    for channel in opened:
        channel.close()


def wait_for_all(steps):
    deque(steps, maxlen=0)


def gathered(ends, messages):
    """Return what each rank receives when the ranks send these messages."""
    return on_all_ranks([partial(end.allgather, message) for end, message in zip(ends, messages, strict=True)])


def on_all_ranks(calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result(timeout=60) for one in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_messages_of_any_length_are_gathered_in_rank_order(channels, size):
    ends = channels(size)
    for length in (0, 1, 8, 100_003):
        messages = [bytes([rank + 1]) * length for rank in range(size)]
        assert gathered(ends, messages) == [messages] * size


def test_a_message_that_is_longer_than_the_sockets_buffers_waits_for_a_late_rank(channels):
    root, other = channels(2)
    data = bytes(1 << 24)

    def late():
        time.sleep(1.5)
        return root.allgather(data)

    assert on_all_ranks([late, partial(other.allgather, data)]) == [[data, data]] * 2


def test_after_an_interrupted_exchange_no_rank_gets_the_answer_to_an_earlier_message(channels, monkeypatch):
    root, other = channels(2)

    [connection] = other._sockets
    interrupted = Mock(send=connection.send, recv_into=Mock(side_effect=KeyboardInterrupt))
    with monkeypatch.context() as patch:
        patch.setattr(other, "_sockets", [interrupted])
        with pytest.raises(KeyboardInterrupt):
            other.allgather(b"2")
    with pytest.raises(ConnectionAbortedError, match="an earlier comparison of calls has failed or was interrupted"):
        other.allgather(b"3")
    with pytest.raises(ConnectionError):
        [root.allgather(b"1") for _ in range(2)]


def test_the_next_exchange_completes_an_exchange_that_timed_out(channels, monkeypatch):
    root, other, last = channels(3)

    def timed_out(steps):
        next(steps)
        next(steps)
        raise TimeoutError

    for end in (root, other):
        with monkeypatch.context() as patch:
            patch.setattr(end, "_await", timed_out)
            with pytest.raises(TimeoutError):
                end.allgather(b"1")
    messages = [b"a", b"b", b"c"]
    with ThreadPoolExecutor() as pool:
        late = pool.submit(lambda: [last.allgather(b"1"), last.allgather(messages[2])])
        assert gathered([root, other], messages[:2]) == [messages] * 2
        assert late.result(timeout=60) == [[b"1"] * 3, messages]


def test_messages_of_different_lengths_are_an_error(channels):
    root, other = channels(2)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(other.allgather, bytes(8))
        with pytest.raises(ValueError, match="different lengths"):
            root.allgather(bytes(16))
        with pytest.raises(ConnectionAbortedError):
            root.allgather(bytes(16))
        with pytest.raises(ConnectionError):
            waiting.result(timeout=60)


def test_a_reply_to_another_kind_of_exchange_is_an_error(channels):
    root, other = channels(2)

    def exchange():
        reply = memoryview(bytearray(HEADER + 8))
        reply[0] = 8
        root.exchange(reply, [memoryview(bytearray(HEADER + 100))], reply, lambda: reply)

    with pytest.raises(ValueError, match="another kind of exchange"):
        on_all_ranks([exchange, partial(other.allgather, bytes(32))])


def test_calls_after_a_failed_exchange_keep_no_buffers(channels):
    root, other = channels(2)
    root.close()
    for error in (ConnectionError, *[ConnectionAbortedError] * 3):
        with pytest.raises(error):
            other.allgather(bytes(8))
    assert len(other._unfinished) == 1


longest_on_one_host = partial(longest, one_host=True, few_cores=False)


def test_the_limit_of_data_in_a_frame_decreases_with_the_number_of_ranks():
    limits = [longest(size, one_host=True, few_cores=True) >> 10 for size in (2, 8, 16, 4096)]
    assert limits == [1024, 1024, 512, 4]
    assert [longest_on_one_host(size) >> 10 for size in (2, 8, 16, 4096)] == [512, 128, 64, 4]


def answered(messages):
    """Return the numbers that each rank reads from rank 0's reply, and set the results of the ranks' data.

    A message is ([fingerprint, extent], data): the extent is, for example, the call's number of rows; data may be None.
    """
    size = len(messages)
    root, *others = (CallBuffers(rank, size, longest_on_one_host(size)) for rank in range(size))
    root.message(*messages[0])
    for row, other, message in zip(root.rows, others, messages[1:], strict=True):
        row[: len(frame)] = (frame := other.message(*message))
    reply = root.answer(messages[0][1])
    for other in others:
        other.reply[: len(reply)] = reply
    return tuple(buffers.read(data) for buffers, (_, data) in zip((root, *others), messages, strict=True))


@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_data_of_the_longest_allowed_length_is_exchanged_on_any_number_of_ranks(size):
    limit = longest_on_one_host(size)
    for dtype in (torch.float32, torch.int64):
        data = torch.ones(limit // dtype.itemsize, dtype=dtype)
        reductions = [Reduction(data, ReduceOp.SUM) for _ in range(size)]
        assert is_sent_with_call(reductions[0], size, limit)
        answered([([5, 0], one) for one in reductions])
        assert [one.result.unique().tolist() for one in reductions] == [[size]] * size
    parts = [Gather(torch.ones(limit // size, dtype=torch.uint8), unit=1) for _ in range(size)]
    answered([([5, limit // size], one) for one in parts])
    assert [one.result.numel() for one in parts] == [limit // size * size] * size
    copies = [Broadcast(0, torch.ones(limit, dtype=torch.uint8) if rank == 0 else None) for rank in range(size)]
    answered([([5, 0], one) for one in copies])
    assert [one.result.numel() for one in copies] == [limit] * size


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN])
def test_chunks_that_are_reduced_one_by_one_give_the_same_bits_as_all_chunks_at_once(size, op, monkeypatch):
    rows = torch.randn(size, 997, generator=torch.Generator().manual_seed(0))
    rows[0, ::7], rows[-1, ::11], rows[0, ::13] = math.nan, 0.0, -0.0
    results = []
    for threshold in (1, 2, 997, 998):
        monkeypatch.setattr(ring_order, "_SLICED_ELEMENTS", threshold)
        results.append(torch.empty(997))
        ring_order.reduce_in_ring_order(rows, op, results[-1])
    assert all(torch.equal(results[0].view(torch.int32), each.view(torch.int32)) for each in results)


def test_the_reply_has_a_result_only_if_the_calls_agree():
    # ~5 is the fingerprint 5 of a rank whose ``Backend.flag`` is set.
    for fingerprint, has_result in ((5, True), (~5, True), (6, False)):
        datas = [Reduction(torch.tensor([1.0, 2.0 + rank]), ReduceOp.SUM) for rank in range(2)]
        numbers = answered([([5, 0], datas[0]), ([fingerprint, 7], datas[1])])
        assert numbers == ([[5, 0], [fingerprint, 7]],) * 2
        results = [None if one.result is None else one.result.tolist() for one in datas]
        assert results == [[2.0, 5.0] if has_result else None] * 2


def test_without_the_data_of_all_ranks_the_reply_has_no_result():
    """The ranks' calls agree, but the data of one rank is too long: all ranks then use Gloo or NCCL."""
    reduction = Reduction(torch.ones(2), ReduceOp.SUM)
    answered([([5, 0], reduction), ([5, 0], None)])
    assert reduction.result is None
    gather = Gather(torch.ones(2, dtype=torch.uint8), unit=1)
    answered([([5, 2], gather), ([5, 3], None)])
    assert gather.result is None
    copies = Broadcast(1, None), Broadcast(1, None)
    answered([([5, 0], copies[0]), ([5, 0], copies[1])])
    assert [copy.result for copy in copies] == [None, None]


def test_bytes_of_different_lengths_are_gathered_and_broadcast():
    datas = [torch.arange(length, dtype=torch.uint8) for length in (3, 10)]
    gathers = [Gather(data, unit=1) for data in datas]
    answered([([5, 3], gathers[0]), ([5, 10], gathers[1])])
    assert all(torch.equal(gather.result, torch.cat(datas)) for gather in gathers)
    copies = Broadcast(1, None), Broadcast(1, datas[1])
    answered([([5, 0], copies[0]), ([5, 0], copies[1])])
    assert all(torch.equal(copy.result, datas[1]) for copy in copies)
