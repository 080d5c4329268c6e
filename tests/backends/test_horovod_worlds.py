"""Horovod's operations in worlds that the same processes open one after another: names, inputs, and failed ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from dualtrain.errors import PeerFailedError, PeerFailure
from tests.conftest import require_horovod

ROWS = [[0, 7], [1, 7], [2, 7]]
_kept: list[str] = []


def exchange(backend):
    return backend.exchange([backend.rank, 7])


def exchange_and_keep_its_name(backend):
    """Make an exchange, and keep the name under which Horovod runs it, for the next world."""
    gather = backend.library.allgather_async

    def record(tensor, name, **options):
        _kept.append(name)
        return gather(tensor, name=name, **options)

    backend.library.allgather_async = record
    try:
        return exchange(backend)
    finally:
        backend.library.allgather_async = gather


def exchange_during_a_pending_operation(backend):
    """Make an exchange while rank 1 has a pending operation with the name of the earlier world's exchange."""
    if backend.rank == 1:
        backend.library.allgather_async(torch.full((1, 2), -5), name=_kept.pop())
    return exchange(backend)


def test_data_of_an_operation_of_an_earlier_world_is_not_received_in_the_next_world(pool):
    require_horovod()
    pool.connect("horovod", 3)
    assert pool.run(exchange_and_keep_its_name) == [ROWS] * 3
    pool.disconnect()
    pool.connect("horovod", 3)
    assert pool.run(exchange_during_a_pending_operation) == [ROWS] * 3
    pool.disconnect()


def references_from_cpp(backend):
    """Return how many references from C++ the inputs of operations have, when Horovod gets them."""
    counts, library = [], backend.library
    gather, reduce = library.allgather_async, library.allreduce_async_

    def recorded(start):
        def record(tensor, *args, **options):
            counts.append(tensor._use_count())  # private in torch 2.5 to 2.15
            return start(tensor, *args, **options)

        return record

    library.allgather_async, library.allreduce_async_ = recorded(gather), recorded(reduce)
    try:
        backend.allreduce_(torch.ones(4))
        backend.allreduce_(torch.ones(4)[:2])
    finally:
        library.allgather_async, library.allreduce_async_ = gather, reduce
    return counts


def test_horovod_never_releases_the_last_reference_to_an_input(pool):
    require_horovod()
    pool.connect("horovod", 2)
    for counts in pool.run(references_from_cpp):
        assert len(counts) > 2
        assert set(counts) == {2}  # Python's own, and that of the view that the backend keeps
    pool.disconnect()


def start_after_a_failure(backend):
    """Try an operation after this rank has received the failure of another rank; return how often Horovod was called."""
    with (
        mock.patch.object(backend.watch, "failure", PeerFailure(1, "stopped")),
        mock.patch.object(backend, "library") as library,
    ):
        with pytest.raises(PeerFailedError, match="rank 1 stopped"):
            backend.exchange([backend.rank, 7])
        return len(library.mock_calls)


def test_no_operation_is_given_to_horovod_after_a_rank_has_failed(pool):
    require_horovod()
    pool.connect("horovod", 2)
    assert pool.run(start_after_a_failure) == [0, 0]
    pool.disconnect()
